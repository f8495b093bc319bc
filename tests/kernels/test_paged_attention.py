from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.native import library
from tailrace.kernels.native_kernels import NativeKernels
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN, Paged, make_batch

# (sequence, rows, kv_len): decodes, whole prompts and chunks over a cached prefix, around the
# edges of blocks and of the kernel's tiles of 64 tokens.
MIXED = [(0, 1, 1), (1, 5, 5), (2, 1, 70), (3, 37, 101), (4, 64, 64), (4, 1, 64), (5, 7, 130)]
KV_LENS = [1, 5, 70, 101, 64, 130]


def paged(kv_lens, *, group=3, num_kv_heads=2, head_dim=16, block_size=16):
    return Paged(
        kv_lens=kv_lens,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )


def assert_true(case, kernels, chunks):
    for (s, rows, kv_len), out in zip(chunks, case.attend(kernels, chunks), strict=True):
        assert_close(f"attention of {rows} rows at {kv_len}", out, case.truth(s)[:kv_len][-rows:])


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_a_mixed_batch_over_a_poisoned_cache_equals_the_formula(
    kernels, block_size, head_dim, group
):
    case = paged(KV_LENS, group=group, head_dim=head_dim, block_size=block_size)
    assert_true(case, kernels, MIXED)


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim"), [(48, 1, 16), (7, 3, 40), (2, 1, 256), (1, 5, 512)]
)
def test_unusual_head_shapes_equal_the_formula(kernels, group, num_kv_heads, head_dim):
    case = paged(KV_LENS, group=group, num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert_true(case, kernels, MIXED)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch_equals_the_formula(data):
    native = NativeKernels(library.load(len(os.sched_getaffinity(0))))
    kv_lens = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=5))
    chunks = [(s, data.draw(st.integers(1, n)), n) for s, n in enumerate(kv_lens)]
    case = paged(
        kv_lens,
        group=data.draw(st.integers(1, 9)),
        num_kv_heads=data.draw(st.integers(1, 3)),
        head_dim=8 * data.draw(st.integers(1, 12)),
        block_size=data.draw(st.sampled_from([8, 16, 32])),
    )
    assert_true(case, native, chunks)


@pytest.mark.parametrize("chunk", [*range(1, 38)])
def test_chunking_changes_no_bit(native, chunk):
    case = paged([150], head_dim=64)
    whole = case.attend(native, [(0, 150, 150)])[0]
    for start in range(0, 150, chunk):
        end = min(start + chunk, 150)
        part = case.attend(native, [(0, end - start, end)])[0]
        assert torch.equal(part, whole[start:end]), f"rows {start}..{end}"


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_the_rest_of_the_batch_changes_no_bit(native, block_size):
    case = paged(KV_LENS, block_size=block_size)
    together = case.attend(native, MIXED)
    backwards = case.attend(native, MIXED[::-1])[::-1]
    for i, chunk in enumerate(MIXED):
        assert torch.equal(case.attend(native, [chunk])[0], together[i])
        assert torch.equal(backwards[i], together[i])


def test_the_number_of_threads_changes_no_bit(native, native_library):
    case = paged(KV_LENS)
    alone = NativeKernels(library.Library(native_library.path, 1))
    many = NativeKernels(library.Library(native_library.path, 3))
    expected = case.attend(native, MIXED)
    for kernels in (alone, many):
        assert all(map(torch.equal, case.attend(kernels, MIXED), expected))


def test_scores_of_any_size_keep_the_softmax_finite(kernels):
    case = paged([300], head_dim=64)
    case.queries[0] *= 60
    assert_close("out", case.attend(kernels, [(0, 300, 300)])[0], case.truth(0), atol=2e-4)


def test_nan_in_a_row_stays_in_that_row(kernels):
    case = paged([90])
    expected = case.truth(0)
    case.queries[0][40] = NAN
    found = case.attend(kernels, [(0, 90, 90)])[0]
    assert bool(found[40].isnan().all())
    keep = torch.arange(90) != 40
    assert_close("other rows", found[keep], expected[keep])


def test_a_batch_of_no_rows_is_no_error(native):
    case = paged([5])
    out = native.paged_attention(
        torch.zeros(0, 6, 16), case.k_cache, case.v_cache, make_batch([], 16), 1.0
    )
    assert out.shape == (0, 96)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_lens": torch.tensor([33], dtype=torch.int32)},  # more blocks than the table has
        {"kv_lens": torch.tensor([2], dtype=torch.int32)},  # fewer tokens than the chunk
        {"block_tables": torch.tensor([[0, 99]], dtype=torch.int32)},
        {"block_tables": torch.tensor([[-1, 0]], dtype=torch.int32)},
        {"query_starts": torch.tensor([0, 4], dtype=torch.int32)},
        {"query_starts": torch.tensor([1, 3], dtype=torch.int32)},
    ],
)
def test_a_batch_that_points_outside_is_refused(native, change):
    case = paged([20])
    batch = make_batch([(3, 20)], 16, case.tables)
    batch = replace(batch, block_tables=batch.block_tables[:, :2].contiguous())
    q = torch.randn(3, 6, 16)
    native.paged_attention(q, case.k_cache, case.v_cache, batch, 1.0)
    with pytest.raises(EngineError, match="outside its tensors"):
        native.paged_attention(q, case.k_cache, case.v_cache, replace(batch, **change), 1.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": 20}, "head_dim 20"),
        ({"block_size": 64}, "block size 64"),
        ({"group": 49}, "98 heads over 2"),
    ],
)
def test_a_head_shape_that_is_not_compiled_is_refused_by_name(native, change, named):
    with pytest.raises(ConfigError, match=rf"{named}.*--cpu-kernels torch"):
        paged([5], **change).attend(native, [(0, 1, 5)])
