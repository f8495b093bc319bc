"""A mixed step as two, at once: decodes by their weights, prompts by their copy of them.

    steps' stream      tables, ids |                                      | joined | head, draw
    decodes' stream                | every layer, 4 bits ......... |
    prompts' stream                | every layer, FP8 .................... |

Decodes wait for memory, prompts for arithmetic, and where each phase has a copy of the weights of
its own, going apart reads no weight twice: `--prefill-weights` has paid for it already. What it
gives is that one phase's kernels fill what the other's leave: their ends, where fewer programs run
than there is room for, and the small kernels between products.

Row by row the same kernels see the same numbers, so nothing that is computed changes by it. What
must not be shared between the streams is scratch: that of split sums is one for the weights and
one for their copies (`TritonKernels`), and decodes' attention alone has some.

Memory that one stream frees is handed out again on that stream alone. What crosses over is made
before the fork or lives until the join, and the next fork waits for this step's last kernel.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError
from tailrace.kernels.linear.phased_linear import PhasedLinear

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailrace.kernels.kv_scales import KVScales
    from tailrace.kernels.paged_attention.device_batch import DeviceBatch
    from tailrace.models.causal_lm import CausalLM, KVCache


def why_not_apart(model: CausalLM) -> str | None:
    """Say why a model's phases cannot go apart, or None where they can."""
    alone = [linear for linear in model.layer_linears if not isinstance(linear, PhasedLinear)]
    if not alone:
        return None
    if len(alone) == len(model.layer_linears):
        return "one copy of the weights serves both phases, and would be read twice"
    return f"{len(alone)} layers ({alone[0].name}) have no copy for prompts, and share scratch"


def overlap_of(asked: str, model: CausalLM, device: torch.device) -> PhaseOverlap | None:
    """Return what serves steps, or None where all their rows go one way.

    Args:
        asked: on, off, or auto, which is off until a GPU has spoken.
        model: That serves.
        device: The model's.

    Raises:
        ConfigError: It is asked for, and phases cannot go apart.
    """
    if asked != "on":
        return None
    reason = why_not_apart(model)
    if reason is not None:
        raise ConfigError(f"--phase-overlap on: {reason}; name --prefill-weights, or use auto")
    return PhaseOverlap.on(device)


PRIORITIES = (0, 0)
"""Of the decodes' stream and the prompts': CUDA's, lower ones go first."""


@dataclass(frozen=True)
class PhaseOverlap:
    """Runs a model's decodes and prompts apart.

    Args:
        device: The model's.
        streams: Of decodes and of prompts; None: one after the other (for tests on a CPU).
    """

    device: torch.device
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None

    @classmethod
    def on(cls, device: torch.device) -> PhaseOverlap:
        """Return what runs phases on streams of a device."""
        if device.type != "cuda":
            return cls(device, None)
        decodes, prompts = (torch.cuda.Stream(device, priority=first) for first in PRIORITIES)  # type: ignore[no-untyped-call]
        return cls(device, (decodes, prompts))

    def forward(
        self,
        model: CausalLM,
        token_ids: torch.Tensor,
        batch: DeviceBatch,
        kv_caches: Sequence[KVCache],
        kv_scales: Sequence[KVScales] | None,
    ) -> torch.Tensor:
        """Queue a step's layers; see `CausalLM.forward`.

        Args:
            model: Its layers are all `PhasedLinear`.
            token_ids: int64 [T].
            batch: The whole step.
            kv_caches: One pair a layer.
            kv_scales: One a layer, where the caches are float8.

        Returns:
            float32 [T, H], for the current stream.
        """
        decodes = batch.num_decodes
        if decodes == len(token_ids):
            return model.forward(token_ids, batch, kv_caches, kv_scales)
        # Prompts have more to do, so they are queued first; alone they go to their stream as
        # well, or their rows would take memory of two.
        with self._apart(1):
            own = prompts_of(batch) if decodes else batch
            prompts = model.forward(token_ids[decodes:], own, kv_caches, kv_scales)
        if not decodes:
            self._join(1)
            return prompts
        with self._apart(0):
            own = decodes_of(batch)
            ahead = model.forward(token_ids[:decodes], own, kv_caches, kv_scales)
        self._join(0)
        self._join(1)
        return torch.cat([ahead, prompts])

    @contextmanager
    def _apart(self, phase: int) -> Iterator[None]:
        """Queue on a phase's stream, behind what the current one has queued."""
        if self.streams is None:
            yield
            return
        stream = self.streams[phase]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def _join(self, phase: int) -> None:
        if self.streams is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.streams[phase])


def decodes_of(batch: DeviceBatch) -> DeviceBatch:
    """Return a step's decodes as a step of their own."""
    count = batch.num_decodes
    return replace(
        batch,
        query_starts=batch.query_starts[: count + 1],
        kv_lens=batch.kv_lens[:count],
        block_tables=batch.block_tables[:count],
        positions=batch.positions[:count],
        slots=batch.slots[:count],
        tiles=batch.tiles[:0],
    )


def prompts_of(batch: DeviceBatch) -> DeviceBatch:
    """Return a step's prompts as a step of their own.

    Arrays are copied: kernels are compiled for addresses at multiples of 16 bytes, and where
    prompts begin in a step's is anywhere.
    """
    count = batch.num_decodes
    tiles = batch.tiles.clone()
    tiles[:, 0] -= count
    return replace(
        batch,
        query_starts=batch.query_starts[count:] - count,
        kv_lens=batch.kv_lens[count:].clone(),
        block_tables=batch.block_tables[count:].clone(),
        positions=batch.positions[count:].clone(),
        slots=batch.slots[count:].clone(),
        num_decodes=0,
        tiles=tiles,
    )
