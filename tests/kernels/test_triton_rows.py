"""The row-wise kernels: norm, rotary embedding with the cache write, silu-mul, linear layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tailrace.errors import ConfigError
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN, make_batch
from tests.kernels.test_rope_cache import empty_caches, make_rotary
from tests.kernels.test_rope_cache import truth as turned

SHAPES = [(1, 1), (1, 7), (5, 33), (3, 576), (2, 1000)]


def norm(x, weight, eps=1e-5):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_the_formula(on_triton, shape):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[1])
    y = on_triton.kernels.rms_norm(on_triton.float(x), on_triton.float(weight), 1e-5)
    assert y.dtype == on_triton.kernels.dtype
    assert_close("y", y.cpu(), norm(x, weight), **on_triton.tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_adds_in_float32_and_norms_the_sum(on_triton, shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    total = on_triton.rounded(x) + residual
    kept, given = on_triton.float(residual), on_triton.half(x)
    before = given.clone()
    y = on_triton.kernels.add_rms_norm(given, kept, on_triton.float(weight), 1e-5)
    assert torch.equal(kept.cpu(), total)
    assert torch.equal(given, before)
    assert_close("y", y.cpu(), norm(total, weight), **on_triton.tolerance)


def test_eps_keeps_a_row_of_zeros_at_zero(on_triton):
    zeros, ones = on_triton.float(torch.zeros(2, 40)), on_triton.float(torch.ones(40))
    assert torch.equal(on_triton.kernels.rms_norm(zeros, ones, 1e-6).float().cpu(), zeros.cpu())


def test_a_norm_does_not_depend_on_its_neighbours(on_triton):
    x, weight = on_triton.float(torch.randn(9, 575)), on_triton.float(torch.randn(575))
    together = on_triton.kernels.rms_norm(x, weight, 1e-5)
    for row in (0, 4, 8):
        alone = on_triton.kernels.rms_norm(x[row : row + 1], weight, 1e-5)[0]
        assert torch.equal(alone, together[row])


@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (5, 33), (3, 1536)])
def test_silu_mul_equals_the_formula(on_triton, shape):
    rows, width = shape
    x = on_triton.rounded(torch.randn(rows, 2 * width) * 4)
    gate, up = x.double().chunk(2, dim=-1)
    y = on_triton.kernels.silu_mul(on_triton.half(x)).cpu()
    assert_close("y", y, gate * torch.sigmoid(gate) * up, **on_triton.tolerance)


def test_silu_keeps_nan_and_saturates(on_triton):
    gate = torch.tensor([[-6e4, -200.0, -0.0, 0.0, 200.0, NAN]])
    x = on_triton.half(torch.cat([gate, torch.ones_like(gate)], dim=-1))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, NAN]])
    assert_close("y", on_triton.kernels.silu_mul(x).cpu(), expected, rtol=1e-6, atol=1e-6)


def test_no_rows_are_no_error(on_triton):
    ones = on_triton.float(torch.ones(64))
    assert on_triton.kernels.rms_norm(on_triton.float(torch.zeros(0, 64)), ones, 1e-5).shape == (
        0,
        64,
    )
    assert on_triton.kernels.silu_mul(on_triton.half(torch.zeros(0, 64))).shape == (0, 32)


# (query heads, KV heads, head_dim, block_size, token-major)
LAYOUTS = [
    (3, 3, 64, 8, True),
    (6, 2, 128, 16, True),
    (7, 1, 64, 32, True),
    (8, 1, 256, 16, True),
    (6, 2, 16, 16, False),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "token_major"), LAYOUTS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_q_is_turned_and_k_and_v_land_in_their_slots(
    on_triton, heads, kv_heads, head_dim, block_size, token_major, with_norm
):
    batch = make_batch([(1, 100), (9, 37), (1, 61), (1, 1)], block_size)
    num_rows = batch.positions.numel()
    # Rows that padding adds: they are turned, but what they hold goes nowhere.
    skipped = torch.tensor([0, 5])
    slots = batch.slots.clone()
    slots[skipped] = -1
    written = slots >= 0
    rotary = make_rotary(head_dim)
    num_blocks = int(batch.block_tables.max()) + 2
    caches = list(empty_caches(kv_heads, head_dim, block_size, num_blocks))
    if token_major:
        caches = on_triton.token_major(*caches)
    else:
        caches = [on_triton.half(cache) for cache in caches]
    qkv = on_triton.rounded(torch.randn(num_rows, (heads + 2 * kv_heads) * head_dim))
    given = on_triton.half(qkv)
    norms = [torch.randn(head_dim) if with_norm else None for _ in "qk"]
    on_device = [None if n is None else on_triton.float(n) for n in norms]
    found = on_triton.kernels.rope_and_cache(
        given,
        on_triton.rotary(rotary),
        on_triton.batch(replace(batch, slots=slots)),
        *caches,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        q_norm=on_device[0],
        k_norm=on_device[1],
        norm_eps=1e-6,
    )
    assert torch.equal(given.float().cpu(), qkv)
    q, k, v = qkv.view(num_rows, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    tolerance = on_triton.tolerance
    assert_close("q", found.cpu(), turned(q, batch.positions, rotary, norms[0]), **tolerance)
    k_cache, v_cache = (cache.float().cpu() for cache in caches)
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    expected = turned(k, batch.positions, rotary, norms[1])[written]
    assert_close("k_cache", k_cache[blocks, :, :, offsets], expected, **tolerance)
    assert torch.equal(v_cache[blocks, :, offsets], v[written])
    # Nothing else was written.
    count = int(written.sum()) * kv_heads * head_dim
    assert int((~k_cache.isnan()).sum()) == count
    assert int((~v_cache.isnan()).sum()) == count


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_equals_the_formula(on_triton, with_bias):
    x = on_triton.rounded(torch.randn(5, 48))
    weight = on_triton.rounded(torch.randn(33, 48) * 48**-0.5)
    bias = on_triton.rounded(torch.randn(33)) if with_bias else None
    dtype = str(on_triton.kernels.dtype).removeprefix("torch.")
    linear = on_triton.kernels.pack_linear(weight, bias, dtype)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    y = linear(on_triton.half(x)).cpu()
    assert_close("y", y, expected, **on_triton.tolerance)
    elements = 33 * 48 + (33 if with_bias else 0)
    assert linear.nbytes == elements * on_triton.kernels.dtype.itemsize


def test_weights_of_another_dtype_are_refused(on_triton):
    other = "float16" if on_triton.kernels.dtype != torch.float16 else "float32"
    with pytest.raises(ConfigError, match=f"weights in {other} do not go with"):
        on_triton.kernels.pack_linear(torch.randn(4, 4), None, other)
