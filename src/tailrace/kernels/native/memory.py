"""What crosses into C: addresses, after a look at what they point at.

C trusts its caller, so each tensor's type, layout and size is checked here; a wrong one is a bug
of ours, never the client's doing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.errors import EngineError
from tailrace.kernels.native.library import BatchStruct

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch


def address(tensor: Tensor, count: int, dtype: torch.dtype = torch.float32) -> int:
    """Return where a contiguous tensor's `count` elements begin.

    Raises:
        EngineError: The tensor has another type, size or layout.
    """
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous():
        raise EngineError(
            f"a native kernel wants {count} contiguous elements of {dtype} and was given "
            f"{tensor.dtype} of shape {list(tensor.shape)}, strides {list(tensor.stride())}"
        )
    return tensor.data_ptr()


def batch_struct(batch: AttentionBatch) -> BatchStruct:
    """Return the batch as C sees it; the caller keeps the batch alive.

    Raises:
        EngineError: A tensor of the batch has another type, size or layout than promised.
    """
    num_sequences, max_blocks = batch.block_tables.shape
    num_rows = batch.positions.numel()
    return BatchStruct(
        query_starts=address(batch.query_starts, num_sequences + 1, torch.int32),
        kv_lens=address(batch.kv_lens, num_sequences, torch.int32),
        block_tables=address(batch.block_tables, num_sequences * max_blocks, torch.int32),
        positions=address(batch.positions, num_rows, torch.int64),
        slots=address(batch.slots, num_rows, torch.int64),
        num_sequences=num_sequences,
        max_blocks=max_blocks,
        num_rows=num_rows,
    )
