from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.rotary import Rotary
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN, make_batch

MAX_POSITION = 200


def make_rotary(head_dim):
    frequencies = 1e4 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(MAX_POSITION, dtype=torch.float64), frequencies)
    return Rotary(angles.cos().float(), angles.sin().float())


def empty_caches(num_kv_heads, head_dim, block_size, num_blocks):
    k_cache = torch.full((num_blocks, num_kv_heads, head_dim, block_size), NAN)
    return k_cache, torch.full((num_blocks, num_kv_heads, block_size, head_dim), NAN)


def truth(x, positions, rotary, norm):
    """Norm, then turn each pair as a complex number, in float64."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    left, right = x.chunk(2, dim=-1)
    angles = torch.complex(rotary.cos_PD.double(), rotary.sin_PD.double())[positions]
    turned = torch.complex(left, right) * angles.unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 128])
@pytest.mark.parametrize("with_norm", [False, True])
def test_q_is_turned_and_k_and_v_land_in_their_slots(
    kernels, block_size, heads, head_dim, with_norm
):
    num_heads, num_kv_heads = heads
    batch = make_batch([(1, 100), (37, 37), (5, 61), (1, 1)], block_size)
    num_rows = batch.positions.numel()
    rotary = make_rotary(head_dim)
    k_cache, v_cache = empty_caches(num_kv_heads, head_dim, block_size, 40)
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
    before = qkv.clone()
    norms = [torch.randn(head_dim) if with_norm else None for _ in "qk"]
    found = kernels.rope_and_cache(
        qkv,
        rotary,
        batch,
        k_cache,
        v_cache,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=norms[0],
        k_norm=norms[1],
        norm_eps=1e-6,
    )
    assert torch.equal(qkv, before)
    split = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = qkv.view(num_rows, -1, head_dim).split(split, dim=1)
    assert_close("q", found, truth(q, batch.positions, rotary, norms[0]))
    blocks, offsets = batch.slots // block_size, batch.slots % block_size
    expected_k = truth(k, batch.positions, rotary, norms[1])
    assert_close("k_cache", k_cache[blocks, :, :, offsets], expected_k)
    assert torch.equal(v_cache[blocks, :, offsets], v)
    # Nothing else was written.
    written = num_rows * num_kv_heads * head_dim
    assert int((~k_cache.isnan()).sum()) == written
    assert int((~v_cache.isnan()).sum()) == written


def call(kernels, batch, *, head_dim=16, block_size=16, num_kv_heads=1, num_heads=2):
    k_cache, v_cache = empty_caches(num_kv_heads, head_dim, block_size, 8)
    qkv = torch.randn(batch.positions.numel(), (num_heads + 2 * num_kv_heads) * head_dim)
    return kernels.rope_and_cache(
        qkv,
        make_rotary(head_dim),
        batch,
        k_cache,
        v_cache,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


@pytest.mark.parametrize(
    ("field", "value"), [("slots", 128), ("slots", -1), ("positions", MAX_POSITION)]
)
def test_a_slot_or_position_outside_the_tensors_is_refused(native, field, value):
    batch = make_batch([(3, 20)], 16)
    wrong = getattr(batch, field).clone()
    wrong[1] = value
    with pytest.raises(EngineError, match="outside its tensors"):
        call(native, replace(batch, **{field: wrong}))


def test_a_batch_with_tensors_of_another_type_is_refused(native):
    batch = make_batch([(3, 20)], 16)
    with pytest.raises(EngineError, match=r"torch\.int64"):
        call(native, replace(batch, slots=batch.slots.int()))


def test_a_head_shape_that_is_not_compiled_is_refused_by_name(native):
    with pytest.raises(ConfigError, match=r"head_dim 520.*--cpu-kernels torch"):
        call(native, make_batch([(3, 20)], 16), head_dim=520)
