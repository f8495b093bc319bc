"""Which head shapes the compiled kernels cover."""

from __future__ import annotations

from tailrace.errors import ConfigError, EngineError

MAX_HEAD_DIM = 512  # as in kernels.c
MAX_GROUP = 48  # MAX_TASK_ROWS in attention.c
BLOCK_SIZES = (8, 16, 32)


def can_serve(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Say whether rope_and_cache and paged_attention are compiled for this shape."""
    return (
        num_heads % num_kv_heads == 0
        and num_heads // num_kv_heads <= MAX_GROUP
        and head_dim % 8 == 0
        and 0 < head_dim <= MAX_HEAD_DIM
        and block_size in BLOCK_SIZES
    )


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Refuse a head shape that the compiled kernels do not cover.

    Raises:
        ConfigError: The shape is beyond what was compiled.
    """
    if not can_serve(num_heads, num_kv_heads, head_dim, block_size):
        raise ConfigError(
            f"no native attention for {num_heads} heads over {num_kv_heads}, head_dim {head_dim}, "
            f"block size {block_size} (head_dim: a multiple of 8 up to {MAX_HEAD_DIM}; up to "
            f"{MAX_GROUP} heads share one; blocks of 8, 16 or 32); use --cpu-kernels torch"
        )


def check_status(status: int, operation: str) -> None:
    """Turn a kernel's return value into an error.

    Raises:
        EngineError: The kernel refused its input, before it wrote anything.
    """
    if status == 1:
        raise EngineError(f"{operation}: no memory for its task list")
    if status == 2:
        raise EngineError(
            f"{operation}: the batch names a block, slot, position or row outside its tensors"
        )
