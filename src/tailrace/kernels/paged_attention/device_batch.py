"""A step as the Triton kernels take it: decodes first, then the prefill chunks cut into tiles.

rows    [d d d d][a a a a a a a][b b b]     d: one row each, the decode kernel's
tiles            (a,0) (a,4)    (b,0)       the prefill kernel's, most keys first
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.kernels.attention_batch import AttentionBatch

if TYPE_CHECKING:
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape


@dataclass(frozen=True, kw_only=True)
class DeviceBatch(AttentionBatch):
    """An `AttentionBatch` whose first `num_decodes` sequences have one row each."""

    tiles: torch.Tensor
    """int32 [N, 2]: sequence and first row within its chunk; of the sequences after the decodes."""
    shape: PrefillShape
    """That `tiles` are cut for."""


def cut_tiles(
    rows: np.ndarray, kv_lens: np.ndarray, *, first_sequence: int, block_m: int
) -> np.ndarray:
    """Return int32 [N, 2] tiles, those with the most keys first.

    Args:
        rows: Rows of each chunk.
        kv_lens: Tokens in the cache after the step, for each chunk.
        first_sequence: The index of the first chunk in the batch.
        block_m: Rows of a tile.
    """
    counts = -(-rows // block_m)
    chunk = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = within * block_m
    keys = np.minimum((kv_lens - rows)[chunk] + first + block_m, kv_lens[chunk])
    order = np.argsort(-keys, kind="stable")
    tiles = np.stack([chunk + first_sequence, first], axis=1)[order]
    return np.ascontiguousarray(tiles, dtype=np.int32)


def plan(batch: AttentionBatch, shape: PrefillShape) -> DeviceBatch:
    """Return the plan of a batch whose metadata must be read back: for tests and small jobs."""
    if isinstance(batch, DeviceBatch):
        return batch
    starts = batch.query_starts.cpu().numpy()
    rows, kv_lens = np.diff(starts), batch.kv_lens.cpu().numpy()
    is_long = np.flatnonzero(rows != 1)
    decodes = int(is_long[0]) if len(is_long) else len(rows)
    tiles = cut_tiles(
        rows[decodes:], kv_lens[decodes:], first_sequence=decodes, block_m=shape.block_m
    )
    known = {entry.name: getattr(batch, entry.name) for entry in fields(AttentionBatch)}
    known["num_decodes"] = decodes  # here whatever has one row: it is the decode kernel's
    return DeviceBatch(
        **known,
        tiles=torch.from_numpy(tiles).to(batch.kv_lens.device),
        shape=shape,
    )
