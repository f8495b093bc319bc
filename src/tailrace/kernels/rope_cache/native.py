"""Rotary embedding and the cache write by the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.native.heads import check_heads, check_status
from tailrace.kernels.native.memory import address

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.native.library import BatchStruct, Library
    from tailrace.kernels.rotary import Rotary


def rope_and_cache(
    library: Library,
    qkv_TE: Tensor,
    rotary: Rotary,
    batch: BatchStruct,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
) -> Tensor:
    """Rotate q and k, write k and v into the caches, and return q [T, Hq, D].

    Raises:
        ConfigError: The model's head shape is beyond what was compiled.
        EngineError: The batch names slots or positions that do not exist.
    """
    num_rows: int = batch.num_rows
    num_blocks, _, block_size, _ = v_cache.shape
    check_heads(num_heads, num_kv_heads, head_dim, block_size)
    cache_count = num_blocks * num_kv_heads * block_size * head_dim
    angle_count = rotary.cos_PD.shape[0] * (head_dim // 2)
    q_THD = torch.empty((num_rows, num_heads, head_dim), dtype=torch.float32)
    status = library.rope_and_cache(
        ctypes.byref(batch),
        address(qkv_TE, num_rows * (num_heads + 2 * num_kv_heads) * head_dim),
        address(rotary.cos_PD, angle_count),
        address(rotary.sin_PD, angle_count),
        None if q_norm is None else address(q_norm, head_dim),
        None if k_norm is None else address(k_norm, head_dim),
        address(k_cache, cache_count),
        address(v_cache, cache_count),
        q_THD.data_ptr(),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        num_blocks,
        rotary.cos_PD.shape[0],
        norm_eps,
        library.threads,
    )
    check_status(status, "rope_and_cache")
    return q_THD
