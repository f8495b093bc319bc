"""How attention reads a float8 cache: in float16, by pairs; as exactly as in any wider dtype."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from tailrace.errors import EngineError
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention import triton_decode, triton_prefill
from tailrace.kernels.paged_attention.device_batch import cut_tiles
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch, DecodeShape
from tailrace.kernels.paged_attention.triton_float8 import (
    Reading,
    has_products_from_shared,
    in_float16,
    parted,
    reading,
)
from tailrace.kernels.paged_attention.triton_prefill import Shape
from tests.kernels.paged import NAN, Paged, make_batch
from tests.kernels.test_float8_kv import SCALES, float8_cache, paged

DECODE = DecodeShape(64, 32, 4, 3)
PREFILL = Shape(64, 32, 4, 3)
ALL = pytest.mark.parametrize("by", list(Reading), ids=lambda by: by.name)
IN_FLOAT16 = pytest.mark.parametrize("by", [Reading.FLOAT16, Reading.PAIRS], ids=lambda by: by.name)


@pytest.fixture(autouse=True)
def _half_precision(request):
    """Float8 is served beside half precision alone."""
    if "on_triton" in request.fixturenames:
        on_triton = request.getfixturevalue("on_triton")
        if on_triton.kernels.dtype == torch.float32 or on_triton.kernels.capability < (8, 9):
            pytest.skip("float8 needs 16 bits beside it, and a GPU that converts it")


@triton.jit
def _part_kernel(pairs_ptr, evens_ptr, odds_ptr, count: tl.constexpr, compiled: tl.constexpr):
    places = tl.program_id(0) * count + tl.arange(0, count)
    evens, odds = parted(tl.load(pairs_ptr + places), compiled)
    tl.store(evens_ptr + places, evens)
    tl.store(odds_ptr + places, odds)


@triton.jit
def _in_float16_kernel(q_ptr, out_ptr, down_ptr, height: tl.constexpr, dim: tl.constexpr):
    rows = tl.arange(0, height)
    places = (rows * dim)[:, None] + tl.arange(0, dim)[None, :]
    halves, down = in_float16(tl.load(q_ptr + places))
    tl.store(out_ptr + places, halves)
    tl.store(down_ptr + rows, down)


def parted_on(on_triton, pairs):
    """Return the first and the second numbers of int16 [N], N a multiple of 1024."""
    count = len(pairs)
    halves = [
        torch.empty(count, dtype=torch.float16, device=on_triton.kernels.device) for _ in "eo"
    ]
    given = pairs.to(on_triton.kernels.device)
    _part_kernel[(count // 1024,)](given, *halves, count=1024, compiled=given.is_cuda)
    return [half.cpu() for half in halves]


def test_every_pair_of_numbers_is_widened_exactly(on_triton):
    """All 65,536 of them, NaN and subnormals too."""
    pairs = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    expected = pairs.view(torch.uint8).view(FLOAT8).to(torch.float16).view(-1, 2)
    for found, wanted in zip(parted_on(on_triton, pairs), expected.unbind(1), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def in_float16_on(on_triton, q):
    """Return rows of q in float16, and what takes them back, float64."""
    device = on_triton.kernels.device
    halves = torch.empty(q.shape, dtype=torch.float16, device=device)
    down = torch.empty(len(q), dtype=torch.float32, device=device)
    _in_float16_kernel[(1,)](q.to(device), halves, down, height=q.shape[0], dim=q.shape[1])
    return halves.cpu().double(), down.cpu().double()


def test_rows_of_any_size_go_to_float16_and_back(on_triton):
    """What bfloat16 holds beyond float16's range does as well: nothing becomes infinite."""
    sizes = 2.0 ** torch.tensor([0, 3, -3, 15, -15, 60, -60, 126], dtype=torch.float64)
    q = torch.randn(8, 64, dtype=torch.float64) * sizes[:, None] / 4
    # And rows whose numbers are of many sizes.
    q[1] *= 2.0 ** -torch.arange(64, dtype=torch.float64)
    q = q.to(torch.bfloat16)
    halves, down = in_float16_on(on_triton, q.float())
    largest = q.abs().amax(1, keepdim=True).double()
    top = halves.abs().amax(1)
    assert bool(((top >= 2**14) & (top < 2**15)).all())
    back = halves * down[:, None]
    off = (back - q.double()).abs()
    is_near = q.double().abs() >= largest * 2.0**-28
    assert torch.equal(back[is_near], q.double()[is_near])
    assert int((~is_near).sum()) > 10
    assert bool((off <= largest * 2.0**-39).all())


def test_rows_of_zeros_infinity_and_nan_stay_what_they_are(on_triton):
    q = torch.randn(4, 16)
    q[0] = 0
    q[1] = 1e-40
    q[2, 3] = math.inf
    q[3, 5] = NAN
    halves, down = in_float16_on(on_triton, q)
    assert torch.equal(halves[0], torch.zeros(16, dtype=torch.float64))
    assert bool(down.isfinite().all())
    assert bool((halves[1] * down[1]).abs().max() < 1e-37)
    assert bool(halves[2, 3].isinf())
    assert bool(halves[3, 5].isnan())


def attended(on_triton, case, chunk, by):
    """Return attention of one chunk (sequence, rows, kv_len), read in one way; decodes are cut."""
    sequence, rows, kv_len = chunk
    batch = on_triton.batch(make_batch([(rows, kv_len)], case.block_size, [case.tables[sequence]]))
    k = float8_cache(on_triton, case.k_cache / SCALES.k, 1.0, is_keys=True)
    v = float8_cache(on_triton, case.v_cache / SCALES.v, 1.0, is_keys=False)
    q = on_triton.half(case.queries[sequence][kv_len - rows : kv_len]).contiguous()
    out = torch.empty_like(q)
    given = {
        "kv_lens": batch.kv_lens, "block_tables": batch.block_tables, "scale": case.scale,
        "kv_scales": SCALES, "by": by,
    }  # fmt: skip
    if rows == 1:
        heads, dim = q.shape[1:]
        scratch = DecodeScratch.allocate(1, heads, dim, kv_len, DECODE.split, str(q.device))
        triton_decode.decode(q, k, v, out, shape=DECODE, scratch=scratch, **given)
    else:
        counts, lens = (x.cpu().numpy() for x in (batch.query_starts.diff(), batch.kv_lens))
        cut = cut_tiles(counts, lens, first_sequence=0, block_m=PREFILL.block_m)
        tiles = torch.from_numpy(cut).to(q.device)
        starts = batch.query_starts
        triton_prefill.prefill(
            q, k, v, out, tiles=tiles, query_starts=starts, shape=PREFILL, **given
        )
    return out.cpu().double()


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("chunk", [(0, 1, 150), (0, 150, 150), (0, 37, 150)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_no_reading_errs_more_than_products_in_the_activations_dtype(on_triton, head_dim, chunk):
    case = paged(on_triton, [150], group=3, num_kv_heads=1, head_dim=head_dim, block_size=8)
    expected = case.truth(0)[150 - chunk[1] :]
    errors = {by: error(attended(on_triton, case, chunk, by), expected) for by in Reading}
    assert errors[Reading.AS_Q] < on_triton.tolerance["rtol"]
    assert errors[Reading.FLOAT16] <= 1.05 * errors[Reading.AS_Q], errors
    assert errors[Reading.PAIRS] <= 1.05 * errors[Reading.AS_Q], errors


@ALL
@pytest.mark.parametrize("rows", [1, 40])
def test_the_largest_queries_there_are_keep_the_softmax_finite(on_triton, rows, by):
    """In float16 that is 65504; times a scale and keys of some hundreds it is far beyond."""
    case = paged(on_triton, [90], group=2, num_kv_heads=1, head_dim=64, block_size=8)
    case.queries[0] = torch.full_like(case.queries[0], 65504.0)
    found = attended(on_triton, case, (0, rows, 90), by)
    # Scores differ by thousands: one key has all the weight, and its values come out.
    q, k = case.queries[0][:, :1].double(), case.keys[0][:, 0].double()
    best = (q @ k.T)[90 - rows :, 0]
    best = best.masked_fill(torch.ones(rows, 90, dtype=torch.bool).triu(91 - rows), -math.inf)
    expected = case.values[0][best.argmax(1)].double().expand(-1, 2, -1)
    torch.testing.assert_close(found, expected, **on_triton.tolerance)


@IN_FLOAT16
@pytest.mark.parametrize("rows", [1, 40])
def test_weights_below_what_float16_holds_of_one_still_count(on_triton, rows, by):
    """bfloat16 has them; 2^-27 is nothing in float16, but 2^-12 is, 15 powers of two higher."""
    case = Paged(kv_lens=[60], num_heads=1, num_kv_heads=1, head_dim=32, block_size=8)
    keys, values = torch.zeros(60, 1, 32), torch.zeros(60, 1, 32)
    # One key is 27 octaves above the others, and its values are 0.
    octaves = 27 / math.log2(math.e) / case.scale
    keys[0, 0, 0] = SCALES.k
    values[1:] = 448 * SCALES.v
    case.queries[0] = torch.zeros(60, 1, 32)
    case.queries[0][:, :, 0] = on_triton.rounded(torch.tensor(octaves / SCALES.k))
    slots = torch.tensor(case.tables[0])[torch.arange(60) // 8], torch.arange(60) % 8
    case.k_cache[slots[0], :, :, slots[1]] = keys
    case.v_cache[slots[0], :, slots[1]] = values
    case.keys, case.values = [keys], [values]
    found = attended(on_triton, case, (0, rows, 60), by)
    expected = case.truth(0)[60 - rows :]
    assert 1e-7 < float(expected.max()) < 1e-5
    # Beside what the output's own dtype rounds, subnormal in float16.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2.0**-24)


def test_a_gpu_reads_so_beside_half_precision():
    cache = torch.zeros(4, 8, 2, 64).to(FLOAT8)
    k, v = cache.permute(0, 2, 3, 1), cache.permute(0, 2, 1, 3)
    on_gpu = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, shape=(1, 2, 64))
    assert reading(on_gpu, k, v) == Reading.PAIRS
    assert reading(on_gpu, k, v, asked=Reading.AS_Q) == Reading.AS_Q


def test_pairs_are_read_where_two_dimensions_lie_side_by_side(on_triton):
    q = on_triton.half(torch.zeros(1, 2, 64))

    def cache(dim=64, dtype=FLOAT8, heads=2):
        k = torch.zeros(4, 8, heads, dim).to(dtype).to(q.device)
        return k.permute(0, 2, 3, 1), k.permute(0, 2, 1, 3)

    def by(k, v, dtype=q.dtype, **more):
        return reading(q.to(dtype).expand(1, 2, 64)[..., : v.shape[3]], k, v, **more)

    assert by(*cache()) == Reading.PAIRS
    assert by(*cache(32)) == Reading.PAIRS
    # A product takes no fewer than 16 at a time.
    assert by(*cache(16)) == Reading.FLOAT16
    assert by(*cache(), from_shared=True) == Reading.FLOAT16
    k, v = cache()
    assert by(k.contiguous(), v) == Reading.FLOAT16
    odd = torch.zeros(4 * 8 * 2 * 64 + 1, dtype=torch.uint8, device=q.device).view(FLOAT8)
    odd = odd[1:].view(4, 8, 2, 64)
    assert by(odd.permute(0, 2, 3, 1), odd.permute(0, 2, 1, 3)) == Reading.FLOAT16
    assert by(*cache(dtype=q.dtype)) == Reading.AS_Q
    assert by(*cache(), dtype=torch.float32) == Reading.AS_Q


def test_a_reading_that_a_cache_does_not_have_is_refused(on_triton):
    q = on_triton.half(torch.zeros(1, 2, 64))
    k = torch.zeros(4, 8, 2, 64).to(FLOAT8).to(q.device)
    k, v = k.permute(0, 2, 3, 1), k.permute(0, 2, 1, 3)
    with pytest.raises(EngineError, match="by pairs: no two dimensions of a head lie"):
        reading(q, k.contiguous(), v, asked=Reading.PAIRS)
    with pytest.raises(EngineError, match=f"in float16: the cache is {q.dtype}, not float8"):
        reading(q, k.to(q.dtype), v.to(q.dtype), asked=Reading.FLOAT16)
    assert all(reading(q, k, v, asked=by) == by for by in Reading)


def test_the_largest_heads_are_read_by_pairs_for_prompts_too(on_triton):
    """In one piece their queries would not fit the registers: see test_compile_ahead.py."""
    q = on_triton.half(torch.zeros(1, 2, 256))
    k = torch.zeros(4, 8, 2, 256).to(FLOAT8).to(q.device)
    found = reading(q, k.permute(0, 2, 3, 1), k.permute(0, 2, 1, 3), from_shared=True)
    assert found == Reading.PAIRS


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_products_from_shared_memory_are_hoppers_and_its_successors(
    monkeypatch, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert has_products_from_shared(torch.device("cuda")) == expected
    assert has_products_from_shared(torch.device("cpu"))
