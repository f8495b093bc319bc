"""Rotary embedding and the cache write in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.kernels.kv_scales import UNSCALED, KVScales, quantised
from tailrace.kernels.rms_norm.reference import rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.rotary import Rotary


def rope_and_cache(
    qkv_TE: Tensor,
    rotary: Rotary,
    batch: AttentionBatch,
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
    """Rotate q and k, write k and v at `batch.slots`, and return q [T, Hq, D]."""
    heads_THD = qkv_TE.view(qkv_TE.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split_with_sizes(heads_THD, (num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, norm_eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, norm_eps)
    cos_T1D = rotary.cos_PD[batch.positions].unsqueeze(1)
    sin_T1D = rotary.sin_PD[batch.positions].unsqueeze(1)
    q, k = rotate(q, cos_T1D, sin_T1D), rotate(k, cos_T1D, sin_T1D)
    block_size = v_cache.shape[2]
    blocks = batch.slots // block_size
    offsets = batch.slots % block_size
    k_cache[blocks, :, :, offsets] = quantised(k, kv_scales.k, k_cache.dtype)
    v_cache[blocks, :, offsets] = quantised(v, kv_scales.v, v_cache.dtype)
    return q


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Turn each pair (d, d + D/2) of every head by its row's angles."""
    left, right = x_THD.chunk(2, dim=-1)
    turned = (left * cos_T1D - right * sin_T1D, right * cos_T1D + left * sin_T1D)
    return torch.cat(turned, dim=-1)
