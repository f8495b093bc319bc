"""Which rows of a step belong to which sequence, and where their keys and values live.

A step's flat batch is the concatenation of the sequences' chunks; a decode is a chunk of one
row. Row i of a chunk of n rows, in a sequence with kv_len tokens in the cache after this step,
stands at position p = kv_len - n + i and attends to positions 0..p.

    query_starts  0        3  4              7
    rows          [a a a] [b] [c c c]           a, c prefill; b decodes

The caches of one layer are `k_cache [num_blocks, Hkv, D, block_size]` and
`v_cache [num_blocks, Hkv, block_size, D]`, float32. K is transposed inside its block, so that
the scores of a block are outer products and need no horizontal sums. Slots that no token has
been written to hold garbage, possibly NaN; no kernel lets them reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """The shape of one step; all tensors are contiguous and on the model's device."""

    query_starts: torch.Tensor
    """int32 [B+1]: row offsets of each sequence's chunk."""
    kv_lens: torch.Tensor
    """int32 [B]: tokens of each sequence in the cache after this step's writes."""
    block_tables: torch.Tensor
    """int32 [B, max_blocks]: entries beyond ceil(kv_len / block_size) are never read."""
    positions: torch.Tensor
    """int64 [T]: absolute position of each row."""
    slots: torch.Tensor
    """int64 [T]: block_id * block_size + offset, where the row's K and V are written."""
    max_query_len: int
    max_kv_len: int
    num_decodes: int = 0
    """Rows at the front that are decodes: sequences of one row, past their prompts. Where a layer
    has two copies of its weight, all other rows are taken for prompts'."""
