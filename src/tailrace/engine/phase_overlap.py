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
before the fork or lives until the join, and the next fork waits for this step's last kernel. What
fails half-way is joined all the same: the next step overwrites the arrays that its kernels read,
and a capture with a stream that never came back cannot be ended.

`auto` goes apart where that was measured: on Hopper, over 4 bits beside copies in FP8. On an H200
it won, and answers were those of steps that go one way, bit for bit (`benchmarks/gpu_engine.py
--mixed` does both; docs/performance.md).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError
from tailrace.kernels.linear.float8_linear import Float8Linear
from tailrace.kernels.linear.int4_linear import Int4Linear
from tailrace.kernels.linear.phased_linear import PhasedLinear

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailrace.kernels.attention_shapes import Capability
    from tailrace.kernels.kv_scales import KVScales
    from tailrace.kernels.paged_attention.device_batch import DeviceBatch
    from tailrace.models.causal_lm import CausalLM, KVCache


DECODES, PROMPTS = 0, 1
"""Places of the phases in what there is one of each."""

MEASURED = (9, 0)
"""The compute capability of the GPUs where phases go apart by themselves."""

PRIORITIES = (0, -1)
"""Of the phases' streams: CUDA's, lower ones go first.

The best of three on an H200 (docs/performance.md); why, was not profiled.
"""


def why_not_apart(model: CausalLM) -> str | None:
    """Say why a model's phases cannot go apart, or None where they can."""
    alone = [linear for linear in model.layer_linears if not isinstance(linear, PhasedLinear)]
    if not alone:
        return None
    if len(alone) == len(model.layer_linears):
        return "one copy of the weights serves both phases, and would be read twice"
    return f"{len(alone)} layers ({alone[0].name}) have no copy for prompts, and share scratch"


def why_off(asked: str, model: CausalLM, capability: Capability) -> str | None:
    """Say why all rows of a model's steps go one way, or None where phases go apart.

    Args:
        asked: on, off, or auto.
        model: That serves.
        capability: The GPU's compute capability.
    """
    if asked == "off":
        return "as asked"
    reason = why_not_apart(model)
    if reason is None and asked == "auto" and not _is_measured(model, capability):
        return (
            "it was measured over 4 bits beside copies in FP8 on GPUs of compute capability "
            f"{'.'.join(map(str, MEASURED))} alone; --phase-overlap on has it"
        )
    return reason


def _is_measured(model: CausalLM, capability: Capability) -> bool:
    phased = [one for one in model.layer_linears if isinstance(one, PhasedLinear)]
    return capability == MEASURED and all(
        isinstance(one.few, Int4Linear) and isinstance(one.many, Float8Linear) for one in phased
    )


def overlap_of(
    asked: str, model: CausalLM, device: torch.device, capability: Capability
) -> PhaseOverlap | None:
    """Return what has phases go apart, or None where they do not (`why_off`).

    Args:
        asked: on, off, or auto.
        model: That serves.
        device: The model's.
        capability: Its compute capability.

    Raises:
        ConfigError: It is asked for, and phases cannot go apart.
    """
    reason = why_off(asked, model, capability)
    if reason is None:
        return PhaseOverlap.on(device)
    if asked == "on":
        raise ConfigError(f"--phase-overlap on: {reason}; name --prefill-weights, or use auto")
    return None


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
        with ExitStack() as joins:
            # Prompts have more to do, so they are queued first; alone they go to their stream as
            # well, or their rows would take memory of two.
            with self._apart(PROMPTS, joins):
                own = prompts_of(batch) if decodes else batch
                prompts = model.forward(token_ids[decodes:], own, kv_caches, kv_scales)
            if decodes:
                with self._apart(DECODES, joins):
                    own = decodes_of(batch)
                    ahead = model.forward(token_ids[:decodes], own, kv_caches, kv_scales)
        return torch.cat([ahead, prompts]) if decodes else prompts

    @contextmanager
    def _apart(self, phase: int, joins: ExitStack) -> Iterator[None]:
        """Queue on a phase's stream, behind what the current one has queued; join it at the end.

        Args:
            phase: DECODES or PROMPTS.
            joins: At whose end the current stream waits for the phase's, whatever happened.
        """
        if self.streams is None:
            yield
            return
        stream, current = self.streams[phase], torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        joins.callback(current.wait_stream, stream)
        with torch.cuda.stream(stream):
            yield


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
