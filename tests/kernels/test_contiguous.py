"""Prefill over keys in one piece: any padding, any layout, a prefix or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import EngineError
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels.paged_attention import contiguous
from tailrace.kernels.paged_attention.contiguous import Spans, attend, index_arrays, reaches
from tailrace.kernels.paged_attention.triton_hopper_prefill import USUAL
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.hopper_stand_in import let_hopper_serve
from tests.kernels.on_triton import OnTriton

# (queries, offset, firsts, ends): whole prompts, left and right padding, a chunk over a prefix,
# a chunk that a prompt does not reach, a row of padding alone.
PADDINGS = {
    "none": Spans.unpadded(2, 70, 0),
    "left": Spans(70, 0, (0, 13, 69), (70, 70, 70)),
    "right": Spans(70, 0, (0, 0), (70, 3)),
    "both": Spans(70, 0, (5, 66), (68, 67)),
    "prefix": Spans.unpadded(2, 9, 61),
    "prefix, left": Spans(9, 61, (0, 20, 64), (70, 70, 70)),
    "prefix, right": Spans(9, 61, (0, 10), (66, 50)),
    "nothing": Spans(70, 0, (0, 0), (70, 0)),
}


def formula(q, k, v, spans, scale):
    """Return attention [B, Q, Hq, D] in float64, row by row; zeros where no query is real."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
    out = torch.zeros_like(q)
    for b, (first, end) in enumerate(zip(spans.firsts, spans.ends, strict=True)):
        for i in range(spans.query_length):
            column = spans.query_offset + i
            if first <= column < end:
                seen = slice(first, column + 1)
                weights = (torch.einsum("hd,htd->ht", q[b, :, i], k[b, :, seen]) * scale).softmax(1)
                out[b, :, i] = torch.einsum("ht,htd->hd", weights, v[b, :, seen])
    return out.transpose(1, 2)


def random_case(on_triton, spans, *, heads=2, kv_heads=1, head_dim=16, spare=3):
    """Return q, k, v with NaN in every key that is not real, and in every query."""
    batch, stop = len(spans.firsts), spans.query_offset + spans.query_length
    q = on_triton.rounded(torch.randn(batch, heads, spans.query_length, head_dim))
    k, v = (
        on_triton.rounded(torch.randn(batch, kv_heads, stop + spare, head_dim)) for _ in range(2)
    )
    for b, (first, end) in enumerate(zip(spans.firsts, spans.ends, strict=True)):
        k[b, :, :first] = v[b, :, :first] = k[b, :, end:] = v[b, :, end:] = NAN
        columns = torch.arange(spans.query_offset, stop)
        q[b, :, (columns < first) | (columns >= end)] = NAN
    return q, k, v


def run(on_triton, q, k, v, spans):
    capability = on_triton.kernels.capability
    return attend(q, k, v, spans, scale=0.3, capability=capability).cpu().float()


def token_major(x):
    """Return x as a projection leaves it: [B, T, H, D] seen as [B, H, T, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside_a_larger_cache(x):
    """Return x as the first tokens of a static cache whose other slots hold NaN."""
    batch, heads, tokens, dims = x.shape
    cache = x.new_full((batch, heads, tokens + 30, dims), NAN)
    cache[:, :, :tokens] = x
    return cache[:, :, :tokens]


@pytest.mark.parametrize("name", PADDINGS)
def test_every_padding_equals_the_formula(on_triton, name):
    spans = PADDINGS[name]
    q, k, v = random_case(on_triton, spans, heads=4, kv_heads=2)
    found = run(on_triton, *(on_triton.half(x) for x in (q, k, v)), spans)
    assert_close(name, found, formula(q, k, v, spans, 0.3), **on_triton.tolerance)


@pytest.mark.parametrize("value_layout", [token_major, inside_a_larger_cache])
@pytest.mark.parametrize("key_layout", [token_major, inside_a_larger_cache])
def test_any_layout_gives_the_same_bits(on_triton, key_layout, value_layout):
    spans = PADDINGS["prefix, left"]
    q, k, v = (on_triton.half(x) for x in random_case(on_triton, spans))
    expected = run(on_triton, q, k, v, spans)
    found = run(on_triton, token_major(q), key_layout(k), value_layout(v), spans)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("query_layout", [token_major, inside_a_larger_cache])
@pytest.mark.parametrize("offset", [0, 30])
def test_a_batch_of_one_equals_the_formula_in_any_layout(on_triton, offset, query_layout):
    spans = Spans.unpadded(1, 40, offset)
    q, k, v = random_case(on_triton, spans, heads=4, kv_heads=2)
    expected = formula(q, k, v, spans, 0.3)
    q, k, v = (on_triton.half(x) for x in (q, k, v))
    for queries in (q, query_layout(q)):
        found = run(on_triton, queries, k, token_major(v), spans)
        assert_close("out", found, expected, **on_triton.tolerance)


@pytest.mark.parametrize("layout", [token_major, inside_a_larger_cache, torch.Tensor.contiguous])
def test_the_layouts_of_models_and_caches_are_read_in_place(on_triton, monkeypatch, layout):
    spans = Spans.unpadded(2, 9, 0)
    q, k, v = (on_triton.half(x) for x in random_case(on_triton, spans, heads=4, kv_heads=2))
    given_k, given_v, seen = layout(k), layout(v), []
    launch = contiguous._launch
    monkeypatch.setattr(
        contiguous, "_launch", lambda *a, **known: (seen.append(a[:3]), launch(*a, **known))
    )
    given_q = token_major(q)
    run(on_triton, given_q, given_k, given_v, spans)
    ((used_q, used_k, used_v),) = seen
    assert used_q.data_ptr() == given_q.data_ptr()
    assert used_k.data_ptr() == given_k.data_ptr()
    assert used_v.data_ptr() == given_v.data_ptr()


def test_one_key_for_all_sequences_is_copied_or_read(on_triton):
    """Sequences that share their memory, and ones that lie half a token apart."""
    spans = Spans.unpadded(2, 70, 0)
    q, k, v = random_case(on_triton, spans, heads=4, kv_heads=2)
    shared_k, shared_v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    expected = formula(q, shared_k, shared_v, spans, 0.3)
    on_device = (on_triton.half(q), *(on_triton.half(x[:1]).expand(2, -1, -1, -1) for x in (k, v)))
    found = run(on_triton, *on_device, spans)
    assert_close("shared", found, expected, **on_triton.tolerance)
    # [B, H, T, D] whose sequences are no whole number of tokens apart.
    memory = on_triton.half(torch.randn(2 * 2 * 73 * 16 + 8))
    uneven = memory.as_strided((2, 2, 73, 16), (2 * 73 * 16 + 8, 73 * 16, 16, 1))
    found = run(on_triton, on_triton.half(q), uneven, uneven, spans)
    plain = uneven.cpu().float()
    assert_close("uneven", found, formula(q, plain, plain, spans, 0.3), **on_triton.tolerance)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tiles_cover_every_real_query_once_and_no_other(data):
    queries, offset = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 40))
    stop = offset + queries
    bounds = st.lists(st.integers(0, stop), min_size=2, max_size=2).map(sorted)
    rows = data.draw(st.lists(bounds, min_size=1, max_size=4))
    apart, block = data.draw(st.integers(stop, 200)), data.draw(st.sampled_from([1, 4, 16]))
    spans = Spans(queries, offset, tuple(r[0] for r in rows), tuple(r[1] for r in rows))
    tiles, starts, kv_lens, tables = index_arrays(spans, apart, block)
    ends = [*starts.tolist()[1:], len(rows) * queries]
    covered = {}
    for sequence, first in tiles.tolist():
        assert sequence % 2 == 0
        num_rows = ends[sequence] - starts[sequence]
        for row in range(first, min(first + block, num_rows)):
            # What the kernel computes: the row's place in the batch, its first key and its keys.
            position = kv_lens[sequence] - num_rows + row
            place = int(starts[sequence]) + row
            assert place not in covered
            covered[place] = (int(tables[sequence]), int(position) + 1)
    expected = {
        b * queries + i: (b * apart + first, offset + i + 1 - first)
        for b, (first, end) in enumerate(rows)
        for i in range(queries)
        if first <= offset + i < end
    }
    assert covered == expected


def test_keys_beyond_the_queries_are_refused():
    with pytest.raises(EngineError, match=r"keys 0\.\.11 of a row whose queries end at 10"):
        Spans(10, 0, (0,), (11,))
    with pytest.raises(EngineError, match=r"keys 5\.\.4"):
        Spans(10, 0, (5,), (4,))


def test_what_32_bits_do_not_reach_is_known():
    near = torch.empty(1, device="meta").as_strided((2, 8, 4096, 128), (4096 * 1024, 128, 1024, 1))
    assert reaches(near)
    for shape, strides in (
        ((1, 1, 1 << 21, 128), (1 << 28, 1 << 28, 128, 1)),  # longer than any unit
        ((1, 1, 1 << 20, 128), (1 << 33, 1 << 33, 4096, 1)),  # tokens far apart
        ((1, 64, 1024, 128), (1 << 40, 1 << 27, 128, 1)),  # heads far apart
        ((4, 1, 1024, 1), (1 << 31, 1, 1, 1)),  # sequences far apart
    ):
        assert not reaches(torch.empty(1, device="meta").as_strided(shape, strides))


# By Hopper's kernel


@pytest.fixture
def hopper(interpreter, monkeypatch):
    return let_hopper_serve(monkeypatch)


WIDE = TritonKernels(torch.device("cpu"), "float32")


def by_hopper(q, k, v, spans):
    return attend(q, k, v, spans, scale=0.3, capability=WIDE.capability, shape=USUAL[64])


@pytest.mark.parametrize("name", [name for name in PADDINGS if name != "nothing"])
@pytest.mark.parametrize("layout", [token_major, inside_a_larger_cache, torch.Tensor.contiguous])
def test_hoppers_kernel_is_called_over_the_same_keys(hopper, name, layout):
    spans = PADDINGS[name]
    q, k, v = random_case(OnTriton(WIDE), spans, heads=4, kv_heads=2, head_dim=64, spare=0)
    found = by_hopper(q, layout(k), layout(v), spans)
    assert_close(name, found, formula(q, k, v, spans, 0.3), rtol=2e-5, atol=2e-5)
    assert hopper.calls


def test_boxes_stay_within_the_memory_and_only_what_they_would_leave_is_copied(hopper, monkeypatch):
    """A box is read whole, up to the longest sequence's length from where any sequence begins."""
    used = []
    launch = contiguous._launch

    def spy(q, k, v, out, **known):
        used.append(k.data_ptr())
        units, tokens = known["reach"]
        last = (units + tokens - 2) * k.stride(2) + (k.shape[1] - 1) * k.stride(1) + 64
        assert (k.storage_offset() + last) * 4 <= k.untyped_storage().nbytes()
        launch(q, k, v, out, **known)

    monkeypatch.setattr(contiguous, "_launch", spy)
    for spans, is_copied in (
        (Spans.unpadded(2, 70, 0), False),
        (Spans(70, 0, (0, 0), (70, 50)), False),  # what is behind the second is its padding
        (Spans(70, 0, (13, 0), (70, 70)), False),  # ... behind the first, the second
        (Spans(70, 0, (0, 13), (70, 70)), True),
        (Spans(70, 0, (13, 13), (70, 70)), False),  # none is longer than the last
    ):
        q, k, v = random_case(OnTriton(WIDE), spans, heads=4, kv_heads=2, head_dim=64, spare=0)
        k, v = k.contiguous(), v.contiguous()
        found = by_hopper(q, k, v, spans)
        assert (used[-1] != k.data_ptr()) == is_copied
        assert_close("out", found, formula(q, k, v, spans, 0.3), rtol=2e-5, atol=2e-5)


def test_what_boxes_cannot_be_copied_of_is_copied_first(hopper):
    """Dimensions that lie apart, and keys that begin between multiples of 16 bytes."""
    spans = Spans.unpadded(2, 70, 0)
    q, k, v = random_case(OnTriton(WIDE), spans, heads=4, kv_heads=2, head_dim=64, spare=0)
    expected = formula(q, k, v, spans, 0.3)
    apart = k.transpose(2, 3).contiguous().transpose(2, 3)
    shifted = torch.empty(v.numel() + 1)[1:].view(v.shape).copy_(v)
    for keys, values in ((apart, v), (k, shifted)):
        found = by_hopper(q, keys, values, spans)
        assert_close("out", found, expected, rtol=2e-5, atol=2e-5)
