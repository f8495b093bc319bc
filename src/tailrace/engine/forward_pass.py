"""A step's way through the model, queued kernel by kernel or captured: all of it at fixed places.

    staging        the step's index arrays, in one buffer
    tables         its block tables, gathered from those by slot
    kv_caches      read and written by slot of the pool
    last_tokens    by slot of the batch: what the step before drew, which the host may not know yet

A graph replays addresses, so what a step reads and writes lies where it lay when it was captured.
Steps share those places, and may: the device takes them in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailrace.engine.scheduler import Step
from tailrace.engine.step_arrays import no_tiles, step_arrays
from tailrace.kernels.paged_attention.device_batch import DeviceBatch
from tailrace.kernels.sampling.triton_likeliest import likeliest

if TYPE_CHECKING:
    import numpy as np

    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.frames import Frame
    from tailrace.engine.phase_overlap import PhaseOverlap
    from tailrace.engine.slot_tables import SlotTables
    from tailrace.engine.staging import Staging
    from tailrace.kernels.kv_scales import KVScales
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape
    from tailrace.models.causal_lm import CausalLM, KVCache


@dataclass
class ForwardPass:
    """The model, and the places of its steps on the device."""

    model: CausalLM
    device: torch.device
    kv_caches: list[KVCache]
    kv_scales: list[KVScales] | None
    """One a layer, where the cache is float8."""
    tables: SlotTables
    staging: Staging
    last_tokens: torch.Tensor
    """int64 [slots + 1]: one entry more than there are slots, where padded rows write theirs."""
    overlap: PhaseOverlap | None = None
    """Has decodes and prompts go apart."""

    # The engine's thread; at start the runner's

    def arrays(
        self,
        step: Step,
        decodes: int,
        frame: Frame,
        tiles: np.ndarray,
        blocks: BlockManager | None,
    ) -> dict[str, np.ndarray]:
        """Return the index arrays of a step, as `step_arrays` has them."""
        num_slots = len(self.last_tokens) - 1
        return step_arrays(
            step, decodes, frame, tiles, blocks, tables=self.tables, num_slots=num_slots
        )

    def padding(self, frame: Frame) -> dict[str, np.ndarray]:
        """Return the arrays of a frame that nobody's rows are in."""
        return self.arrays(Step(), 0, frame, no_tiles(frame), None)

    # The runner's thread

    def batch(
        self,
        arrays: dict[str, torch.Tensor],
        *,
        num_decodes: int,
        max_query_len: int,
        max_kv_len: int,
        shape: PrefillShape,
    ) -> DeviceBatch:
        """Return a step as the kernels take it, over its arrays on the device."""
        return DeviceBatch(
            query_starts=arrays["query_starts"],
            kv_lens=arrays["kv_lens"],
            block_tables=self.tables.of_step(arrays["table_rows"]),
            positions=arrays["positions"],
            slots=arrays["slots"],
            max_query_len=max_query_len,
            max_kv_len=max_kv_len,
            num_decodes=num_decodes,
            tiles=arrays["tiles"],
            shape=shape,
        )

    def hidden(self, arrays: dict[str, torch.Tensor], batch: DeviceBatch) -> torch.Tensor:
        """Queue the layers; return the hidden rows [T, H]."""
        self.tables.gather(arrays["table_rows"])
        ids = self.input_ids(arrays)
        return self.through(self.model, ids, batch, self.kv_caches, self.kv_scales)

    def through(
        self,
        model: CausalLM,
        ids: torch.Tensor,
        batch: DeviceBatch,
        kv_caches: list[KVCache],
        kv_scales: list[KVScales] | None,
    ) -> torch.Tensor:
        """Queue the layers of this model, or of its shallow one; see `CausalLM.forward`."""
        if self.overlap is None:
            return model.forward(ids, batch, kv_caches, kv_scales)
        return self.overlap.forward(model, ids, batch, kv_caches, kv_scales)

    def input_ids(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        """Queue the choice of each row's token, the host's or the one drawn last; int64 [T]."""
        pending = arrays["pending"]
        last = self.last_tokens[pending.clamp(min=0)]
        return torch.where(pending >= 0, last, arrays["ids"])

    def sample_rows(
        self, hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [S, V] and the likeliest ids, -1 where a row is not finite; keep them."""
        logits = self.model.logits(hidden.index_select(0, rows))
        # Of a row that is not finite an id that cannot be: the host takes it for an error.
        return logits, likeliest(logits, slots, self.last_tokens)
