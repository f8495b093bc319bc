"""A float8 cache's prompts, widened for Hopper's kernel: each key in its place, no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.errors import EngineError
from tailrace.kernels.kv_scales import UNSCALED, KVScales, quantised
from tailrace.kernels.linear.float8 import FLOAT8
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN, Paged, make_batch

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels.paged_attention import triton_hopper_prefill, triton_widened_kv
from tailrace.kernels.paged_attention.device_batch import plan
from tailrace.kernels.paged_attention.prefill_kernels import prefill
from tailrace.kernels.paged_attention.triton_hopper_prefill import (
    CANDIDATES,
    USUAL,
    hopper_prefill_kernel,
)
from tailrace.kernels.paged_attention.triton_widened_kv import (
    UNIT_TOKENS,
    USUAL_TOKENS,
    WidenedKv,
    scratch_units,
    units_of,
    widen,
)
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.hopper_stand_in import let_hopper_serve

SCALES = KVScales(0.037, 0.011)


def float8_caches(paged, scales=UNSCALED, device="cpu"):
    """Return a case's caches in float8, token-major as `allocate_kv` lays them out."""
    k, v = (
        quantised(cache, scale, FLOAT8).to(device)
        for cache, scale in ((paged.k_cache, scales.k), (paged.v_cache, scales.v))
    )
    k = k.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return k, v.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)


def poisoned(units, kv_heads, head_dim, dtype, device="cpu"):
    wide = WidenedKv.allocate(units, kv_heads, head_dim, dtype, torch.device(device))
    for part in (wide.keys, wide.values):
        part.fill_(NAN)
    return wide


def widened(on_triton, lens, first, *, unit=8, heads=2, head_dim=64, spare=1):
    """Return what became of a scratch with a few units too many, its tables, and the caches."""
    dtype, device = on_triton.kernels.dtype, on_triton.kernels.device
    paged = Paged(
        kv_lens=lens, num_heads=heads, num_kv_heads=heads, head_dim=head_dim, block_size=unit
    )
    batch = on_triton.batch(make_batch([(min(n, 1), n) for n in lens], unit, paged.tables))
    wide = poisoned(units_of(np.array(lens[first:])) + spare, heads, head_dim, dtype, device)
    k, v = float8_caches(paged, device=device)
    tables = widen(
        k, v, wide, kv_lens=batch.kv_lens, block_tables=batch.block_tables, first=first
    )  # fmt: skip
    expected = [(x.float().cpu() for x in (k, v)), paged.tables]
    return wide, tables.cpu(), expected


def check(wide, tables, expected, lens, first, unit):
    """See that each key is where the tables say, exactly, and that nothing else was written."""
    (k, v), pool_tables = expected
    units = []
    for row, kv_len in enumerate(lens):
        if row < first:
            continue
        count = -(-kv_len // UNIT_TOKENS)
        mine = tables[row, :count].tolist()
        units += mine
        at = torch.arange(kv_len)
        pool = torch.tensor(pool_tables[row], dtype=torch.long)[at // unit]
        for part, cache in ((wide.keys, k.permute(0, 3, 1, 2)), (wide.values, v.transpose(1, 2))):
            flat = part.cpu().float()[mine].flatten(0, 1)
            assert torch.equal(flat[:kv_len], cache[pool, at % unit])
            assert bool(flat[kv_len:].isnan().all())
    assert units == list(range(len(units)))
    for part in (wide.keys, wide.values):
        assert bool(part[len(units) :].isnan().all())


@pytest.mark.parametrize("unit", [8, 16, 32])
def test_every_key_of_the_prompts_is_widened_exactly_and_no_other(on_triton, unit):
    lens = [50, 1, 130, 128, 0, 7, 257, 0]
    wide, tables, (caches, pool) = widened(on_triton, lens, 1, unit=unit)
    check(wide, tables, (tuple(caches), pool), lens, 1, unit)


def test_programs_go_round_over_more_pieces_than_there_are_of_them(on_triton, monkeypatch):
    monkeypatch.setattr(triton_widened_kv, "MOST_PROGRAMS", 9)
    lens = [9, 300, 65]
    wide, tables, (caches, pool) = widened(on_triton, lens, 0, head_dim=128, heads=3)
    check(wide, tables, (tuple(caches), pool), lens, 0, 8)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lens=st.lists(st.integers(0, 290), min_size=1, max_size=18), data=st.data())
def test_any_lengths_have_places_of_their_own(on_triton, lens, data):
    first = data.draw(st.integers(0, len(lens) - 1))
    wide, tables, (caches, pool) = widened(on_triton, lens, first, heads=1, head_dim=16)
    check(wide, tables, (tuple(caches), pool), lens, first, 8)


def test_a_step_of_decodes_alone_has_nothing_to_widen(on_triton):
    wide, tables, _ = widened(on_triton, [40, 3], 2)
    assert tables.shape == (2, 1)
    assert bool(wide.keys.isnan().all())


def test_beyond_the_scratch_nothing_is_written(on_triton):
    """The caller sees to it that a step fits; where it did not, memory of others stays whole."""
    dtype, device = on_triton.kernels.dtype, on_triton.kernels.device
    paged = Paged(kv_lens=[400], num_heads=1, num_kv_heads=1, head_dim=64, block_size=8)
    batch = on_triton.batch(make_batch([(1, 400)], 8, paged.tables))
    around = poisoned(6, 1, 64, dtype, device)
    wide = WidenedKv(around.keys[2:4], around.values[2:4])
    k, v = float8_caches(paged, device=device)
    widen(k, v, wide, kv_lens=batch.kv_lens, block_tables=batch.block_tables, first=0)
    for part in (around.keys, around.values):
        assert bool(part[[0, 1, 4, 5]].isnan().all())
        assert not bool(part[2:4].isnan().any())


def test_a_scratch_of_other_heads_is_refused(on_triton):
    paged = Paged(kv_lens=[4], num_heads=2, num_kv_heads=2, head_dim=64, block_size=8)
    batch = make_batch([(1, 4)], 8, paged.tables)
    known = {"kv_lens": batch.kv_lens, "block_tables": batch.block_tables, "first": 0}
    wide = poisoned(1, 4, 64, torch.float16)
    with pytest.raises(EngineError, match=r"scratch of \[4, 64\] for KV of \[2, 64\]"):
        widen(*float8_caches(paged), wide, **known)


def test_a_servers_scratch_is_what_a_step_can_fill_within_bounds():
    usual = USUAL_TOKENS // UNIT_TOKENS
    assert scratch_units(4, 1) == 4
    assert scratch_units(4, 256) == 8
    assert scratch_units(4, 257) == 12
    assert scratch_units(128, 4096) == usual
    assert scratch_units(128, 131_072) == 131_072 // UNIT_TOKENS
    assert units_of(np.array([0, 1, 128, 129])) == 4
    assert units_of(np.array([], np.int32)) == 0


# Attention over what was widened

CHUNKS = [(1, 70), (5, 5), (2, 128), (3, 300), (130, 260), (1, 129)]
"""(rows, keys): a decode, then prompts of a tile and of two, at its end and behind it."""


def attended(paged, shape, dtype, device="cpu", *, scales=SCALES):
    """Return the attention of `CHUNKS`' prompts over the case's cache in float8."""
    batch = make_batch(CHUNKS, paged.block_size, paged.tables)
    planned = plan(batch, shape)
    q = torch.cat([q[n - rows : n] for q, (rows, n) in zip(paged.queries, CHUNKS, strict=True)])
    out = torch.full_like(q, NAN, dtype=dtype, device=device)
    k, v = float8_caches(paged, scales, device)
    units = units_of(np.array([keys for _, keys in CHUNKS[1:]]))
    prefill(
        q.to(device, dtype),
        k,
        v,
        out,
        tiles=planned.tiles.to(device),
        query_starts=batch.query_starts.to(device),
        kv_lens=batch.kv_lens.to(device),
        block_tables=batch.block_tables.to(device),
        scale=paged.scale,
        shape=shape,
        kv_scales=scales,
        wide=poisoned(units, paged.num_kv_heads, paged.head_dim, dtype, device),
        first_prompt=1,
    )
    assert bool(out[0].isnan().all())
    return out[1:].cpu().float()


def float8_case(head_dim, dtype, scales=SCALES, heads=(2, 1)):
    """Return sequences of values that the cache and the queries can hold, and the formula's."""
    case = Paged(
        kv_lens=[keys for _, keys in CHUNKS],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=8,
    )
    case.queries = [q.to(dtype).float() for q in case.queries]
    for name, scale in (("keys", scales.k), ("values", scales.v)):
        given = getattr(case, name)
        setattr(case, name, [quantised(x, scale, FLOAT8).float() * scale for x in given])
    rows = [case.truth(i)[keys - rows :] for i, (rows, keys) in enumerate(CHUNKS)]
    return case, torch.cat(rows[1:])


SHAPES = [
    (64, USUAL[64], torch.float16),
    (128, USUAL[128], torch.bfloat16),
    (128, next(s for s in CANDIDATES[128] if s.block_n == 64), torch.float16),
]


@pytest.mark.parametrize(("head_dim", "shape", "dtype"), SHAPES, ids=str)
def test_hoppers_kernel_over_what_was_widened_equals_the_formula(
    interpreter, monkeypatch, head_dim, shape, dtype
):
    """The kernel itself, interpreted; whatever the scratch held before is NaN."""
    interpreters = pytest.importorskip("tests.kernels.gluon_interpreter")
    kernel = interpreters.Interpreter(hopper_prefill_kernel, seed=7, undefined_reads={"_clear"})
    monkeypatch.setattr(triton_hopper_prefill, "hopper_prefill_kernel", kernel)
    case, truth = float8_case(head_dim, dtype)
    found = attended(case, shape, dtype)
    error = float((found.double() - truth).norm() / truth.norm())
    assert error < (0.004 if dtype == torch.bfloat16 else 0.0005)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "shape", "dtype"), SHAPES, ids=str)
def test_on_a_hopper_gpu_as_well(head_dim, shape, dtype):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernel needs a Hopper GPU")
    case, truth = float8_case(head_dim, dtype, heads=(14, 2))
    found = attended(case, shape, dtype, "cuda")
    error = float((found.double() - truth).norm() / truth.norm())
    assert error < (0.005 if dtype == torch.bfloat16 else 0.0006)


@pytest.mark.parametrize("scales", [SCALES, UNSCALED], ids=["scaled", "unscaled"])
def test_a_step_over_float8_is_the_same_by_either_kernel(interpreter, monkeypatch, scales):
    """Decodes read the cache itself, prompts by the stand-in what was widened of it."""
    stand_in = let_hopper_serve(monkeypatch)
    case, truth = float8_case(64, torch.float32, scales, heads=(4, 2))
    batch = make_batch(CHUNKS, 8, case.tables)
    q = torch.cat([q[n - rows : n] for q, (rows, n) in zip(case.queries, CHUNKS, strict=True)])
    found = {}
    for asked in ("triton", "hopper"):
        kernels = TritonKernels(torch.device("cpu"), "float32")
        kernels.serve_prompts_by(asked, head_dim=64, kv_dtype=FLOAT8, unit=8)
        k, v = float8_caches(case, scales)
        out = kernels.paged_attention(q, k, v, batch, case.scale, kv_scales=scales)
        found[asked] = out.view(-1, 4, 64)
        assert_close(asked, found[asked][1:], truth, rtol=2e-5, atol=2e-5)
    assert torch.equal(found["triton"][0], found["hopper"][0])
    (call,) = stand_in.calls
    assert call.v_scale == pytest.approx(scales.v)


@pytest.mark.parametrize("longest", [300, 1500])
def test_a_batch_beyond_what_was_reserved_goes_by_tritons_kernel(interpreter, monkeypatch, longest):
    """Where its lengths are read back anyway; a step of the engine has its shape chosen before."""
    stand_in = let_hopper_serve(monkeypatch)
    case, truth = float8_case(64, torch.float32)
    kernels = TritonKernels(torch.device("cpu"), "float32")
    kernels.serve_prompts_by("hopper", head_dim=64, kv_dtype=FLOAT8, unit=8)
    kernels.reserve(
        rows=1, sequences=1, num_heads=2, num_kv_heads=1, head_dim=64, max_kv_len=longest
    )
    needed = units_of(np.array([keys for _, keys in CHUNKS])) * UNIT_TOKENS
    fits = needed <= kernels.wide_tokens
    assert fits == (longest == 1500)
    batch = make_batch(CHUNKS, 8, case.tables)
    q = torch.cat([q[n - rows : n] for q, (rows, n) in zip(case.queries, CHUNKS, strict=True)])
    out = kernels.paged_attention(
        q, *float8_caches(case, SCALES), batch, case.scale, kv_scales=SCALES
    )
    assert_close("out", out.view(-1, 2, 64)[1:], truth, rtol=2e-5, atol=2e-5)
    assert bool(stand_in.calls) == fits


def test_scales_without_float8_and_float8_without_a_place_are_errors():
    empty = torch.empty(0)
    index = dict.fromkeys(("tiles", "query_starts", "kv_lens", "block_tables"), empty)
    known = index | {"scale": 1.0, "shape": USUAL[128], "kv_scales": SCALES}
    with pytest.raises(EngineError, match="KV scales, and the cache is not float8"):
        prefill(empty, empty, empty, empty, **known)
    with pytest.raises(EngineError, match="no place to widen it to"):
        prefill(empty, empty.to(FLOAT8), empty.to(FLOAT8), empty, **known)
