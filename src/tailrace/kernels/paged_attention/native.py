"""Paged attention by the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.native.heads import check_heads, check_status
from tailrace.kernels.native.memory import address

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.native.library import BatchStruct, Library


def paged_attention(
    library: Library,
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: BatchStruct,
    *,
    scale: float,
) -> Tensor:
    """Return causal, grouped-query attention, float32 [T, Hq * D].

    Raises:
        ConfigError: The model's head shape is beyond what was compiled.
        EngineError: The batch names blocks or rows that do not exist.
    """
    num_rows, num_heads, head_dim = q_THD.shape
    num_blocks, num_kv_heads, block_size, _ = v_cache.shape
    check_heads(num_heads, num_kv_heads, head_dim, block_size)
    cache_count = num_blocks * num_kv_heads * block_size * head_dim
    out_TE = torch.empty((num_rows, num_heads * head_dim), dtype=torch.float32)
    status = library.paged_attention(
        ctypes.byref(batch),
        address(q_THD, batch.num_rows * num_heads * head_dim),
        address(k_cache, cache_count),
        address(v_cache, cache_count),
        out_TE.data_ptr(),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        num_blocks,
        scale,
        library.threads,
    )
    check_status(status, "paged_attention")
    return out_TE
