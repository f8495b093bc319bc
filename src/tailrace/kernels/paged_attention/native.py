"""Paged attention by the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.native.memory import address

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.native.library import BatchStruct, Library

MAX_HEAD_DIM = 512  # as in kernels.c
MAX_GROUP = 48  # MAX_TASK_ROWS in attention.c
BLOCK_SIZES = (8, 16, 32)


def paged_attention(
    library: Library,
    threads: int,
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: BatchStruct,
    scale: float,
) -> Tensor:
    """Return causal, grouped-query attention, float32 [T, Hq * D].

    Raises:
        ConfigError: The model's head shape is beyond what was compiled.
    """
    num_rows, num_heads, head_dim = q_THD.shape
    num_blocks, num_kv_heads, block_size, _ = v_cache.shape
    if not can_attend(num_heads, num_kv_heads, head_dim, block_size):
        raise ConfigError(
            f"native attention has no kernel for {num_heads} heads over {num_kv_heads}, head_dim "
            f"{head_dim}, block size {block_size} (head_dim: a multiple of 8 up to {MAX_HEAD_DIM}; "
            f"up to {MAX_GROUP} heads share one; blocks of 8, 16 or 32): use --cpu-kernels torch"
        )
    cache_count = num_blocks * num_kv_heads * block_size * head_dim
    out_TE = torch.empty((num_rows, num_heads * head_dim))
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
        scale,
        threads,
    )
    if status != 0:
        raise EngineError(f"no memory for the attention tasks of {num_rows} rows")
    return out_TE


def can_attend(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Say whether the compiled kernel covers this head shape."""
    return (
        num_heads % num_kv_heads == 0
        and num_heads // num_kv_heads <= MAX_GROUP
        and head_dim % 8 == 0
        and 0 < head_dim <= MAX_HEAD_DIM
        and block_size in BLOCK_SIZES
    )
