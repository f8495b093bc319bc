"""Each slot's block table, on the host and on the device; a step sends the entries that are new.

    engine's thread   host    [slots, units]       extend: copies what tables grew by, and lists it
    a step's arrays           cells, entries       where in [slots, units], and what to write there
    runner's thread   device  [slots, units]       apply: written before the step's kernels
                      step    [sequences, units]   gather: the rows of its slots, in its own order

Rules:
1. A table only grows while it lives (block_manager.py), so what a slot has of it stays right.
2. Who is admitted, or goes on after a step that failed, is sent whole: the slot may have been
   another's, or entries may never have come.
3. Nobody is told when an early prompt's slot is another's: there the table itself is compared.
4. The device takes steps in order: a step's rows are gathered before the next one's entries are
   written, and that one's lie in another of the staging's buffers until then.

Rows are gathered, once a step, rather than looked up by slot in every layer's attention: those
kernels, whose shapes are measured, serve tables from elsewhere too, and a row of 64 KB for 131,072
tokens is little beside what a step reads of them (7.5 GB of KV in Qwen2.5-7B).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.engine.early_prompts import EARLY_SLOTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.frames import Frame
    from tailrace.engine.scheduler import Chunk, Step

_NO_ENTRIES = np.empty(0, dtype=np.int32)


class SlotTables:
    """Block tables by slot.

    Args:
        num_slots: Places of the batch; early prompts' slots come after them.
        width: Units of the longest sequence.
        unit_tokens: Tokens of a unit.
        max_sequences: Most sequences of a step, padding included.
        device: Where the kernels read them.
    """

    def __init__(
        self,
        num_slots: int,
        width: int,
        unit_tokens: int,
        *,
        max_sequences: int,
        device: torch.device,
    ) -> None:
        self.width = width
        self.unit_tokens = unit_tokens
        self.no_slot = num_slots + EARLY_SLOTS
        """A row of zeros, for sequences that are padding."""
        self.host = np.zeros((self.no_slot, width), dtype=np.int32)
        self._num_slots = num_slots
        self._sent = np.zeros(self.no_slot, dtype=np.int32)
        """Entries that each slot has of its table."""
        self._early: list[list[int] | None] = [None] * EARLY_SLOTS
        """Whose those are, in the slots after the batch's."""
        self._device = torch.zeros(self.no_slot + 1, width, dtype=torch.int32, device=device)
        self._step = torch.zeros(max_sequences, width, dtype=torch.int32, device=device)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.width * self.unit_tokens

    @property
    def words(self) -> int:
        """Most int32 words that a step sends: every slot's table, whole."""
        return 2 * self.host.size

    @staticmethod
    def device_bytes(num_slots: int, width: int, max_sequences: int) -> int:
        """Return what tables take of the device, and the largest step's entries on their way."""
        slots = num_slots + EARLY_SLOTS
        return 4 * width * ((slots + 1) + max_sequences + 2 * slots)

    # The engine's thread

    def extend(
        self,
        step: Step,
        slots: np.ndarray,
        ends: np.ndarray,
        blocks: BlockManager,
    ) -> dict[str, np.ndarray]:
        """Take over what tables grew by; return it as "cells" and "entries", int32 [n] each.

        Args:
            step: Prepared for the device; each step once, in order.
            slots: Of its chunks.
            ends: Of its chunks, in tokens: their tables reach as far.
            blocks: Who holds what now.
        """
        chunks, sent = step.chunks, self._sent
        for sequence in step.admitted:
            sent[sequence.slot] = 0
        needs = -(-ends // self.unit_tokens)
        for index in np.flatnonzero(slots >= self._num_slots).tolist():
            self._note_owner(chunks[index], blocks)
        late = np.flatnonzero(needs > sent[slots]).tolist()
        if not late:
            return {"cells": _NO_ENTRIES, "entries": _NO_ENTRIES}
        cells: list[int] = []
        entries: list[int] = []
        for index in late:
            slot, need = int(slots[index]), int(needs[index])
            have = int(sent[slot])
            row = blocks.table(chunks[index].sequence.request_id)[have:need]
            self.host[slot, have:need] = row
            sent[slot] = need
            cells.extend(range(slot * self.width + have, slot * self.width + need))
            entries += row
        return {
            "cells": np.array(cells, dtype=np.int32),
            "entries": np.array(entries, dtype=np.int32),
        }

    def _note_owner(self, chunk: Chunk, blocks: BlockManager) -> None:
        """Start an early prompt's slot anew where the table is another than before."""
        table = blocks.table(chunk.sequence.request_id)
        place = chunk.slot - self._num_slots
        if self._early[place] is not table:
            self._early[place] = table
            self._sent[chunk.slot] = 0

    # The runner's thread

    def apply(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Queue the writing of a step's new entries."""
        cells = arrays["cells"]
        if len(cells):
            self._device.view(-1).index_copy_(0, cells.long(), arrays["entries"])

    def gather(self, rows: torch.Tensor) -> None:
        """Queue the gathering of the tables of slots; `no_slot` is a row of zeros.

        Args:
            rows: int32 [B].
        """
        torch.index_select(self._device, 0, rows, out=self.of_step(rows))

    def of_step(self, rows: torch.Tensor) -> torch.Tensor:
        """Return where `gather` puts them: int32 [B, W], at the same address for each step."""
        return self._step[: len(rows)]


def table_bytes(
    num_slots: int, context_length: int, block_size: int, mixed: Sequence[Frame]
) -> int:
    """Return the device's bytes of block tables, for sequences of at most so many tokens."""
    most = most_sequences(num_slots, mixed)
    return SlotTables.device_bytes(num_slots, -(-context_length // block_size), most)


def most_sequences(num_slots: int, mixed: Sequence[Frame]) -> int:
    """Return the most sequences of a step, padding included."""
    return num_slots + max([EARLY_SLOTS, *(frame.prompts for frame in mixed)]) + 1
