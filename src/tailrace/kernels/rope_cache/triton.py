"""Rotary embedding, QK-norm and the cache write in Triton: one program a row, one pass.

qkv row   [ q heads | k heads | v heads ]       each head as its two halves (d, d + D/2)
            rotate    rotate     as it is
          -> q out    -> K cache -> V cache     a row whose slot is negative writes no cache

A float8 cache gets k and v divided by the layer's scales and saturated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.linear.float8 import FLOAT8

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.rotary import Rotary


@triton.jit
def _saturated(x):
    # Beyond the largest value the conversion would make NaN; a NaN is to stay one.
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rope_cache_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    positions,
    slots,
    q_ptr,
    k_cache,
    v_cache,
    norm_eps,
    k_inverse,
    v_inverse,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    total: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    heads = tl.arange(0, PADDED)
    dims = tl.arange(0, HALF)
    is_q = heads < NUM_HEADS
    is_k = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < total)
    is_head = (heads < total)[:, None]
    # Positions and slots are the step's own, and nobody writes the tables.
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + dims)[None, :]
    sin = tl.load(sin_ptr + position * HALF + dims)[None, :]
    wait_for_last(DEPENDENT)
    source = qkv_ptr + (row * total + heads)[:, None] * (2 * HALF) + dims[None, :]
    left = tl.load(source, mask=is_head, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=is_head, other=0.0).to(tl.float32)

    new_left, new_right = left, right
    if HAS_NORM:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + norm_eps)[:, None]
        q_left = tl.load(q_norm_ptr + dims)[None, :]
        q_right = tl.load(q_norm_ptr + HALF + dims)[None, :]
        k_left = tl.load(k_norm_ptr + dims)[None, :]
        k_right = tl.load(k_norm_ptr + HALF + dims)[None, :]
        new_left = left * scale * tl.where(is_q[:, None], q_left, k_left)
        new_right = right * scale * tl.where(is_q[:, None], q_right, k_right)
    turned_left = new_left * cos - new_right * sin
    turned_right = new_right * cos + new_left * sin

    target = q_ptr + (row * NUM_HEADS + heads)[:, None] * (2 * HALF) + dims[None, :]
    dtype = q_ptr.dtype.element_ty
    tl.store(target, turned_left.to(dtype), mask=is_q[:, None])
    tl.store(target + HALF, turned_right.to(dtype), mask=is_q[:, None])

    if slot >= 0:
        unit, offset = slot // UNIT, slot % UNIT
        k_heads = heads - NUM_HEADS
        k_target = k_cache + unit * stride_kb + offset * stride_kt
        k_target += k_heads[:, None] * stride_kh + dims[None, :] * stride_kd
        cache_dtype = k_cache.dtype.element_ty
        if IS_FLOAT8:
            turned_left = _saturated(turned_left * k_inverse)
            turned_right = _saturated(turned_right * k_inverse)
            left = _saturated(left * v_inverse)
            right = _saturated(right * v_inverse)
        tl.store(k_target, turned_left.to(cache_dtype), mask=is_k[:, None])
        tl.store(k_target + HALF * stride_kd, turned_right.to(cache_dtype), mask=is_k[:, None])
        v_heads = heads - NUM_HEADS - NUM_KV_HEADS
        v_target = v_cache + unit * stride_vb + offset * stride_vt
        v_target += v_heads[:, None] * stride_vh + dims[None, :] * stride_vd
        tl.store(v_target, left.to(cache_dtype), mask=is_v[:, None])
        tl.store(v_target + HALF * stride_vd, right.to(cache_dtype), mask=is_v[:, None])


def rope_and_cache(
    qkv_TE: Tensor,
    rotary: Rotary,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    kv_scales: KVScales = UNSCALED,
) -> Tensor:
    """Rotate q and k, write k and v at `slots`, and return q [T, Hq, D] in qkv's dtype.

    Args:
        qkv_TE: Contiguous.
        rotary: Its tables lie on qkv's device.
        positions: Integers [T].
        slots: Integers [T]; below 0: this row's k and v go nowhere.
        k_cache: [num_blocks, Hkv, D, block_size], any strides.
        v_cache: [num_blocks, Hkv, block_size, D], any strides.
        num_heads: Query heads, Hq.
        num_kv_heads: Hkv.
        head_dim: D, a power of two.
        q_norm: float32 [D], or None for no norm; given together with `k_norm`.
        k_norm: float32 [D].
        norm_eps: Of the norms.
        kv_scales: What k and v are divided by in a float8 cache, where they saturate.
    """
    rows = qkv_TE.shape[0]
    q_THD = torch.empty(rows, num_heads, head_dim, dtype=qkv_TE.dtype, device=qkv_TE.device)
    if rows == 0:
        return q_THD
    has_norm = q_norm is not None and k_norm is not None
    rope_cache_kernel[(rows,)](
        qkv_TE,
        rotary.cos_PD,
        rotary.sin_PD,
        q_norm if has_norm else qkv_TE,
        k_norm if has_norm else qkv_TE,
        positions,
        slots,
        q_THD,
        k_cache,
        v_cache,
        norm_eps,
        1 / kv_scales.k,
        1 / kv_scales.v,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(3),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        v_cache.stride(3),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PADDED=triton.next_power_of_2(num_heads + 2 * num_kv_heads),
        UNIT=v_cache.shape[2],
        HAS_NORM=has_norm,
        IS_FLOAT8=k_cache.dtype == FLOAT8,
        num_warps=4,
        **launch_options(),
    )
    return q_THD
