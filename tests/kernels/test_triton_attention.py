from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.attention_shapes import (
    ADA,
    AMPERE,
    HOPPER,
    decode_candidates,
    decode_shape,
    kind,
    prefill_shape,
)
from tailrace.kernels.paged_attention import triton_decode
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN, Paged, make_batch
from tests.support.streams import written_streams

# (sequence, rows, kv_len): decodes first, then whole prompts and chunks over a cached prefix,
# around the edges of blocks and of tiles of 64.
KV_LENS = [1, 5, 70, 101, 64, 130]
MIXED = [(0, 1, 1), (2, 1, 70), (4, 1, 64), (1, 5, 5), (3, 37, 101), (4, 64, 64), (5, 7, 130)]
# (group, head_dim, block_size)
SHAPES = [(1, 128, 16), (3, 64, 8), (7, 128, 32), (8, 64, 16), (2, 256, 16), (4, 32, 32)]


def paged(on_triton, kv_lens, *, group=3, num_kv_heads=2, head_dim=64, block_size=16):
    case = Paged(
        kv_lens=kv_lens,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    # The truth is that of the numbers which the kernel is given.
    for values in (case.queries, case.keys, case.values):
        values[:] = [on_triton.rounded(x) for x in values]
    return case


def assert_true(case, on_triton, chunks):
    for (s, rows, kv_len), out in zip(chunks, case.attend(on_triton, chunks), strict=True):
        expected = case.truth(s)[:kv_len][-rows:]
        assert_close(f"{rows} rows at {kv_len}", out, expected, **on_triton.tolerance)


@pytest.mark.parametrize(("group", "head_dim", "block_size"), SHAPES)
def test_a_mixed_batch_over_a_poisoned_cache_equals_the_formula(
    on_triton, group, head_dim, block_size
):
    kv_heads = 1 if group == 7 else 2
    sizes = {"group": group, "num_kv_heads": kv_heads, "head_dim": head_dim}
    case = paged(on_triton, KV_LENS, **sizes, block_size=block_size)
    assert_true(case, on_triton, MIXED)


def test_prefill_across_several_tiles_and_a_long_prefix_equals_the_formula(on_triton):
    case = paged(on_triton, [200, 333], group=2, num_kv_heads=1)
    assert_true(case, on_triton, [(0, 200, 200), (1, 70, 333)])


def test_decode_across_splits_equals_the_formula(on_triton):
    split = decode_shape(64, on_triton.kernels.capability).split
    lens = [split - 1, split, split + 1, 2 * split + 3]
    case = paged(on_triton, lens, group=2, num_kv_heads=1)
    assert_true(case, on_triton, [(s, 1, n) for s, n in enumerate(lens)])


def test_a_decodes_neighbours_change_no_bit(on_triton):
    """Nor does the room of a table or the scratch of a longer sequence."""
    lens = [600, 3, 1100, 64]
    case = paged(on_triton, lens, group=7, num_kv_heads=1)
    chunks = [(s, 1, n) for s, n in enumerate(lens)]
    together = case.attend(on_triton, chunks)
    backwards = case.attend(on_triton, chunks[::-1])[::-1]
    with_prefill = case.attend(on_triton, [*chunks, (2, 9, 40)])
    on_triton.kernels.reserve(
        rows=6, sequences=6, num_heads=7, num_kv_heads=1, head_dim=64, max_kv_len=1500
    )
    for i, chunk in enumerate(chunks):
        assert torch.equal(case.attend(on_triton, [chunk])[0], together[i])
        assert torch.equal(backwards[i], together[i])
        assert torch.equal(with_prefill[i], together[i])


def test_splits_taken_in_turn_change_no_bit(on_triton, monkeypatch):
    """As where contexts are long: of 1, 2 and 3 splits two programs take what there is."""
    lens = [3, 600, 0, 1100, 1536]
    case = paged(on_triton, [max(n, 1) for n in lens], group=7, num_kv_heads=2)
    batch = make_batch([(1, max(n, 1)) for n in lens], 16, case.tables)
    batch = replace(batch, kv_lens=torch.tensor(lens, dtype=torch.int32))
    q = torch.cat([queries[-1:] for queries in case.queries])

    def attend():
        return on_triton.paged_attention(q, case.k_cache, case.v_cache, batch, case.scale)

    own = attend()
    assert torch.equal(own.view(5, -1)[2], torch.zeros(14 * 64)), "a padded row"
    for name, value in (("MOST_PROGRAMS", 0), ("SHARING_PROGRAMS", 1), ("LEAST_SHARERS", 2)):
        monkeypatch.setattr(triton_decode, name, value)
    assert triton_decode.programs_a_row(3, 10) == 2
    assert torch.equal(attend(), own)


@pytest.mark.parametrize("most", [triton_decode.MOST_GRAINS, 0], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("block_size", [4, 8, 16, 256])
def test_where_a_caches_tokens_lie_changes_no_bit(on_triton, monkeypatch, block_size, most):
    """By heads or by tokens, keys and values alike or not, in steps that eight divides or not."""
    lens = [3, 255, 257, 600]
    case = paged(on_triton, lens, group=7, num_kv_heads=1, block_size=block_size)
    chunks = [(s, 1, n) for s, n in enumerate(lens)]
    k_cache, v_cache = case.k_cache, case.v_cache
    monkeypatch.setattr(triton_decode, "MOST_GRAINS", most)
    expected = case.attend(on_triton, chunks)
    by_token = k_cache.mT.contiguous().mT
    for case.k_cache, case.v_cache in ((by_token, v_cache), (by_token, uneven(v_cache))):
        for found, wanted in zip(case.attend(on_triton, chunks), expected, strict=True):
            assert torch.equal(found, wanted)


def uneven(cache):
    """Return the same numbers, 67 from one token to the next, NaN between them."""
    wide = torch.full((*cache.shape[:3], 67), NAN, dtype=cache.dtype)
    wide[..., :64] = cache
    return wide[..., :64]


@pytest.mark.parametrize(
    ("splits", "rows", "expected"),
    [(16, 512, 16), (64, 512, 64), (64, 1024, 16), (256, 4, 256), (256, 200, 20), (256, 512, 16)],
)
def test_programs_share_the_splits_of_a_row_only_where_most_would_be_idle(splits, rows, expected):
    assert triton_decode.programs_a_row(splits, rows) == expected


def test_chunking_a_prompt_at_tiles_changes_no_bit(on_triton):
    block_m = prefill_shape(64, 150, on_triton.kernels.capability).block_m
    case = paged(on_triton, [3 * block_m - 20], group=2, num_kv_heads=1)
    total = case.kv_lens[0]
    whole = case.attend(on_triton, [(0, total, total)])[0]
    for start in range(0, total, block_m):
        end = min(start + block_m, total)
        part = case.attend(on_triton, [(0, end - start, end)])[0]
        assert torch.equal(part, whole[start:end]), f"rows {start}..{end}"


def test_a_padded_decode_gives_zeros(on_triton):
    """A captured graph's rows without a sequence: no keys, and NaN in q."""
    case = paged(on_triton, [70, 20])
    batch = make_batch([(1, 70), (1, 20), (1, 1)], 16, [*case.tables, [0]])
    batch = replace(batch, kv_lens=torch.tensor([70, 20, 0], dtype=torch.int32))
    q = torch.cat([case.queries[0][-1:], case.queries[1][-1:], torch.full((1, 6, 64), NAN)])
    found = on_triton.paged_attention(q, case.k_cache, case.v_cache, batch, case.scale)
    found = found.view(3, 6, 64)
    assert_close("row 0", found[0], case.truth(0)[-1], **on_triton.tolerance)
    assert_close("row 1", found[1], case.truth(1)[-1], **on_triton.tolerance)
    assert torch.equal(found[2], torch.zeros(6, 64))


def test_decode_over_a_float8_cache_reads_what_it_holds(on_triton):
    if on_triton.kernels.capability < (8, 9):
        pytest.skip("this GPU has no float8")
    if on_triton.kernels.dtype == torch.float32:
        pytest.skip("float8 is for half precision")
    case = paged(on_triton, [70, 513], group=4, num_kv_heads=1)
    cache = [x.to(torch.float8_e4m3fn) for x in (case.k_cache, case.v_cache)]
    wide = [on_triton.half(x.float()) for x in cache]
    batch = on_triton.batch(make_batch([(1, 70), (1, 513)], 16, case.tables))
    q = on_triton.half(torch.cat([q[-1:] for q in case.queries]))
    narrow = [x.to(on_triton.kernels.device) for x in cache]
    found = on_triton.kernels.paged_attention(q, *narrow, batch, case.scale)
    expected = on_triton.kernels.paged_attention(q, *wide, batch, case.scale)
    assert_close("out", found.cpu(), expected.cpu(), **on_triton.tolerance)


def test_scores_of_any_size_keep_the_softmax_finite(on_triton):
    case = paged(on_triton, [90], group=1, num_kv_heads=1)
    case.queries[0] = on_triton.rounded(case.queries[0] * 60)
    # Scores are some hundreds: what rounding a weight or a product costs grows with them.
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if on_triton.tolerance["atol"] < 1e-4 else None
    for chunk in ((0, 90, 90), (0, 1, 90)):
        found = case.attend(on_triton, [chunk])[0]
        expected = case.truth(0)[-chunk[1] :]
        assert_close(f"{chunk}", found, expected, **(tolerance or on_triton.tolerance))


def test_nan_in_a_row_stays_in_that_row(on_triton):
    case = paged(on_triton, [90], group=1, num_kv_heads=1)
    expected = case.truth(0)
    case.queries[0][40] = NAN
    found = case.attend(on_triton, [(0, 90, 90)])[0]
    assert bool(found[40].isnan().all())
    keep = torch.arange(90) != 40
    assert_close("other rows", found[keep], expected[keep], **on_triton.tolerance)


def test_more_than_was_reserved_is_an_error(on_triton):
    case = paged(on_triton, [70])
    on_triton.kernels.reserve(
        rows=1, sequences=1, num_heads=6, num_kv_heads=2, head_dim=64, max_kv_len=40
    )
    case.attend(on_triton, [(0, 1, 30)])
    two = [(0, 1, 30), (0, 1, 31)]
    with pytest.raises(EngineError, match="2 rows of 31 tokens exceed what was reserved"):
        case.attend(on_triton, two)


@pytest.mark.parametrize("fails", [None, "_prefill", "_decode"])
def test_prompts_beside_decodes_are_waited_for_whatever_fails(monkeypatch, fails):
    """Else the next step overwrites the tables that they still read."""
    kernels = pytest.importorskip("tailrace.kernels.triton_kernels").TritonKernels(
        torch.device("cpu"), "float32"
    )
    steps, kernels._beside = written_streams(monkeypatch, "steps", "beside")
    for name in ("_prefill", "_decode"):

        def queue(*_, name=name, **__):
            steps.words.append(f"{name} on {torch.cuda.current_stream().name}")
            if name == fails:
                raise torch.OutOfMemoryError

        monkeypatch.setattr(kernels, name, queue)
    batch = make_batch([(1, 9), (5, 5)], 16)
    cache = torch.zeros(2, 1, 64, 16)
    with pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
        kernels.paged_attention(torch.zeros(6, 2, 64), cache, cache.mT, batch, 1.0)
    assert steps.words[:2] == ["beside waits for steps", "_prefill on beside"]
    assert steps.words[-1] == "steps waits for beside"
    assert ("_decode on steps" in steps.words) == (fails != "_prefill")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), AMPERE), ((8, 6), ADA), ((8, 9), ADA), ((9, 0), HOPPER), ((10, 0), HOPPER),
     ((12, 0), ADA)],
)  # fmt: skip
def test_each_gpu_has_its_rows(capability, expected):
    assert kind(capability) == expected
    for head_dim, is_float8 in itertools.product((16, 32, 64, 128, 256), (False, True)):
        shape = decode_shape(head_dim, capability, is_float8=is_float8)
        assert shape == decode_candidates(head_dim, capability, is_float8=is_float8)[0]
        assert shape.split % shape.block_n == 0
        # Where a row's sums are cut is the same for every GPU, head and cache, and so is scratch.
        assert shape.split == 512
        for longest in (1, 1023, 1024, 200_000):
            assert prefill_shape(head_dim, longest, capability).block_m >= 64


def test_a_gpu_or_a_head_that_no_kernel_serves_is_refused():
    with pytest.raises(ConfigError, match=r"compute capability is 7\.5.*8\.0 or later"):
        prefill_shape(128, 10, (7, 5))
    with pytest.raises(ConfigError, match="head_dim 96: the GPU kernels serve 16, 32, 64"):
        decode_shape(96, (9, 0))
