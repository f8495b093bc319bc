"""Paged attention in PyTorch: gather a sequence's blocks, then scaled dot-product attention.

One sequence at a time, so a row's result does not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tailrace.kernels.kv_scales import UNSCALED, KVScales

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    kv_scales: KVScales = UNSCALED,
) -> Tensor:
    """Return causal, grouped-query attention, float32 [T, Hq * D].

    A float8 cache is read by its scales.
    """
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    starts = batch.query_starts.tolist()
    for i, kv_len in enumerate(batch.kv_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        keys, values = gather(k_cache, v_cache, batch.block_tables[i], kv_len)
        if keys.dtype != q_THD.dtype:
            keys = keys.to(q_THD.dtype) * kv_scales.k
            values = values.to(q_THD.dtype) * kv_scales.v
        out_THD[rows] = attend(q_THD[rows], keys, values, scale)
    return out_THD.flatten(1)


def gather(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_len: int
) -> tuple[Tensor, Tensor]:
    """Return one sequence's keys and values, each [Hkv, kv_len, D], without unwritten slots."""
    _, num_kv_heads, block_size, head_dim = v_cache.shape
    blocks = block_table[: -(-kv_len // block_size)]
    keys = k_cache[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_dim)
    values = v_cache[blocks].permute(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
    return keys[:, :kv_len], values[:, :kv_len]


def attend(q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return attention of the last N positions of one sequence, [N, Hq, D]."""
    num_rows, kv_len = q_NHD.shape[0], keys.shape[1]
    is_whole = num_rows == kv_len
    mask = None
    if num_rows > 1 and not is_whole:  # row i sees the cached prefix and the chunk up to itself
        mask = torch.ones(num_rows, kv_len, dtype=torch.bool, device=keys.device)
        mask = mask.tril(kv_len - num_rows)
    out_1HND = functional.scaled_dot_product_attention(
        q_NHD.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=num_rows > 1 and is_whole,
        scale=scale,
        enable_gqa=q_NHD.shape[1] != keys.shape[0],
    )
    return out_1HND.squeeze(0).transpose(0, 1)
