"""The KV pool on the device: token-major, seen through the shapes that the kernels address.

    memory    [block, token, head, D]       a token is one piece
    keys      [block, head, D, token]       as kernels see them: by stride, without a copy
    values    [block, head, token, D]

A layer's keys and its values have memory of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tailrace.models.causal_lm import CausalLM, KVCache


def allocate_kv(
    model: CausalLM, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """Make the KV pool, token-major: [num_blocks, block_size, Hkv, D] in memory.

    The views returned have the kernels' shapes: K [num_blocks, Hkv, D, block_size], V
    [num_blocks, Hkv, block_size, D]. Why token-major: docs/performance.md, "The KV layout".
    """
    config = model.config
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    pairs = []
    for _ in range(config.num_layers):
        k = torch.empty(shape, dtype=dtype, device=device)
        v = torch.empty(shape, dtype=dtype, device=device)
        pairs.append((k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)))
    return pairs


def kv_bytes_per_token(model: CausalLM, dtype: torch.dtype) -> int:
    """Bytes of KV that one token takes over all layers."""
    config = model.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
