"""A cache in float8: what is written saturates at the scale, what is read is what was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tailrace.errors import EngineError, ModelError
from tailrace.kernels.kv_scales import UNSCALED, KVScales, quantised
from tailrace.kernels.linear.float8 import FLOAT8
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN, Paged, make_batch
from tests.kernels.test_rope_cache import make_rotary
from tests.kernels.test_rope_cache import truth as turned

SCALES = KVScales(0.037, 0.011)
KV_LENS = [1, 5, 70, 101, 64, 130]
MIXED = [(0, 1, 1), (2, 1, 70), (4, 1, 64), (1, 5, 5), (3, 37, 101), (4, 64, 64), (5, 7, 130)]
# (group, head_dim, block_size)
SHAPES = [(1, 128, 16), (3, 64, 8), (7, 128, 8), (2, 256, 16), (4, 32, 32)]


@pytest.fixture(autouse=True)
def _float8_here(request):
    if "on_triton" in request.fixturenames:
        on_triton = request.getfixturevalue("on_triton")
        if on_triton.kernels.capability < (8, 9):
            pytest.skip("this GPU has no float8")


def float8_cache(on_triton, cache, scale, *, is_keys):
    """Return the cache in float8, token-major on the kernels' device; NaN stays NaN."""
    kept = quantised(cache, scale, FLOAT8)
    order, back = ((0, 3, 1, 2), (0, 2, 3, 1)) if is_keys else ((0, 2, 1, 3), (0, 2, 1, 3))
    return kept.to(on_triton.kernels.device).permute(order).contiguous().permute(back)


def paged(on_triton, kv_lens, *, group, num_kv_heads, head_dim, block_size):
    """Return sequences whose keys and values are those that a float8 cache can hold."""
    case = Paged(
        kv_lens=kv_lens,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    case.queries = [on_triton.rounded(q) for q in case.queries]
    for name, scale in (("keys", SCALES.k), ("values", SCALES.v)):
        given = getattr(case, name)
        setattr(case, name, [quantised(x, scale, FLOAT8).float() * scale for x in given])
    return case


class Float8Kernels:
    """Attends over the case's cache in float8."""

    def __init__(self, on_triton):
        self.on_triton = on_triton

    def paged_attention(self, q, k_cache, v_cache, batch, scale):
        on_triton = self.on_triton
        k = float8_cache(on_triton, k_cache, SCALES.k, is_keys=True)
        v = float8_cache(on_triton, v_cache, SCALES.v, is_keys=False)
        moved = on_triton.batch(batch)
        q = on_triton.half(q)
        out = on_triton.kernels.paged_attention(q, k, v, moved, scale, kv_scales=SCALES)
        return out.cpu().float()


@pytest.mark.parametrize(("group", "head_dim", "block_size"), SHAPES)
def test_a_mixed_batch_over_a_poisoned_cache_equals_the_formula(
    on_triton, group, head_dim, block_size
):
    kv_heads = 1 if group == 7 else 2
    sizes = {"group": group, "num_kv_heads": kv_heads, "head_dim": head_dim}
    case = paged(on_triton, KV_LENS, **sizes, block_size=block_size)
    found = case.attend(Float8Kernels(on_triton), MIXED)
    for (s, rows, kv_len), out in zip(MIXED, found, strict=True):
        expected = case.truth(s)[:kv_len][-rows:]
        assert_close(f"{rows} rows at {kv_len}", out, expected, **on_triton.tolerance)


def test_a_decodes_neighbours_change_no_bit(on_triton):
    case = paged(on_triton, [600, 3, 64], group=7, num_kv_heads=1, head_dim=64, block_size=8)
    chunks = [(s, 1, n) for s, n in enumerate(case.kv_lens)]
    kernels = Float8Kernels(on_triton)
    together = case.attend(kernels, chunks)
    for i, chunk in enumerate(chunks):
        assert torch.equal(case.attend(kernels, [chunk])[0], together[i])


def test_the_reference_reads_a_float8_cache_by_its_scales(reference):
    case = Paged(kv_lens=[37, 5], num_heads=4, num_kv_heads=2, head_dim=32, block_size=8)
    for name, scale in (("keys", SCALES.k), ("values", SCALES.v)):
        given = getattr(case, name)
        setattr(case, name, [quantised(x, scale, FLOAT8).float() * scale for x in given])
    k, v = (
        quantised(cache, scale, FLOAT8)
        for cache, scale in ((case.k_cache, SCALES.k), (case.v_cache, SCALES.v))
    )
    batch = make_batch([(37, 37), (5, 5)], 8, case.tables)
    out = reference.paged_attention(
        torch.cat(case.queries), k, v, batch, case.scale, kv_scales=SCALES
    )
    expected = torch.cat([case.truth(0), case.truth(1)])
    assert_close("out", out.view(42, 4, 32), expected)


def write(kernels, qkv, rotary, batch, caches, *, heads, kv_heads, head_dim):
    kernels.rope_and_cache(
        qkv,
        rotary,
        batch,
        *caches,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_scales=SCALES,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "unit"), [(6, 2, 128, 8), (3, 1, 64, 16)]
)
def test_k_and_v_are_divided_rounded_and_saturated(on_triton, heads, kv_heads, head_dim, unit):
    batch = make_batch([(1, 50), (9, 37), (1, 1)], unit)
    rows = batch.positions.numel()
    slots = batch.slots.clone()
    slots[2] = -1
    qkv = on_triton.rounded(torch.randn(rows, (heads + 2 * kv_heads) * head_dim))
    # Some of v is beyond 448 x its scale, all others within.
    qkv[4] = on_triton.rounded(qkv[4] * 100)
    qkv[6, -1] = NAN
    given = on_triton.half(qkv)
    rotary = make_rotary(head_dim)
    blocks = int(batch.block_tables.max()) + 2
    shape = (blocks, unit, kv_heads, head_dim)
    poison = torch.full(shape, NAN).to(FLOAT8).to(on_triton.kernels.device)
    caches = [poison.clone().permute(0, 2, 3, 1), poison.clone().permute(0, 2, 1, 3)]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    moved = on_triton.batch(replace(batch, slots=slots))
    write(on_triton.kernels, given, on_triton.rotary(rotary), moved, caches, **sizes)

    written = slots >= 0
    units, offsets = slots[written] // unit, slots[written] % unit
    _, k, v = qkv.view(rows, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    k_cache, v_cache = (cache.cpu().float() for cache in caches)
    expected_v = quantised(v, SCALES.v, FLOAT8).float()[written]
    assert torch.equal(v_cache[units, :, offsets].nan_to_num(999), expected_v.nan_to_num(999))
    assert float(v_cache[units, :, offsets].nan_to_num().abs().max()) == 448.0
    expected_k = turned(k, batch.positions, rotary, None)[written] / SCALES.k
    # Half a step of 3 bits of mantissa; the last octave's step is 2^-9.
    assert_close(
        "k", k_cache[units, :, :, offsets], expected_k.clamp(-448, 448), rtol=0.063, atol=2**-10
    )
    # Nothing else was written, and the NaN is where it was.
    count = int(written.sum()) * kv_heads * head_dim
    assert int((~k_cache.isnan()).sum()) == count
    assert int((~v_cache.isnan()).sum()) == count - 1


def test_scales_that_are_no_positive_numbers_are_refused():
    for scale in (0.0, -1.0, NAN, float("inf")):
        with pytest.raises(ModelError, match="k_scale .*: must be finite and above 0"):
            KVScales(scale, 1.0)


def test_the_compiled_kernels_take_no_scales(native):
    case = Paged(kv_lens=[3], num_heads=2, num_kv_heads=2, head_dim=64, block_size=16)
    batch = make_batch([(3, 3)], 16, case.tables)
    arguments = (case.queries[0], case.k_cache, case.v_cache, batch, case.scale)
    native.paged_attention(*arguments, kv_scales=UNSCALED)
    with pytest.raises(EngineError, match="native kernels keep KV in float32"):
        native.paged_attention(*arguments, kv_scales=SCALES)
