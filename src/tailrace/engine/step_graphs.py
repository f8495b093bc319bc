"""The steps that are captured as CUDA graphs: how each is made, and which serve.

    warmed      a layer of each kind is run: what compiles or loads kernels does so
    captured    all layers, the largest frame first, so that the others lie in its memory
    serves      by frame; others of the same frame may take its place, and it theirs

A graph is of one frame, one way of launching and one budget of weights asked for ahead. All of that
is fixed while it is captured, so whoever compares two captures both, and lets them serve in turns.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.engine.device_faults import check_device
from tailrace.engine.device_result import mark, seconds_between
from tailrace.engine.frames import Frame
from tailrace.engine.graph_capture import captured, quietly
from tailrace.engine.weight_prefetch import DeviceCache, budget_of, describe
from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import dependent_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tailrace.engine.forward_pass import ForwardPass
    from tailrace.engine.frames import Detail, FrameSizes
    from tailrace.engine.weight_prefetch import Budgets
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape
    from tailrace.kernels.weight_prefetch.gaps import Budget
    from tailrace.models.causal_lm import CausalLM


@dataclass(frozen=True)
class CapturedSteps:
    """Graphs by their frames, and where each leaves its logits and ids."""

    graphs: dict[Frame, torch.cuda.CUDAGraph]
    outputs: dict[Frame, tuple[torch.Tensor, torch.Tensor]]


class StepGraphs:
    """Captures a runner's frames, and replays them; on the runner's thread.

    Args:
        forward_pass: What is captured.
        sizes: The frames.
        shape: Of prompts' attention, for the longest sequence that there can be.
        budgets: How much of the next weight decode steps ask for ahead, by rows.
        has_dependent_launches: Whether the device knows them.

    Raises:
        EngineError: There is no GPU to ask.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        sizes: FrameSizes,
        shape: PrefillShape,
        *,
        budgets: Budgets | None = None,
        has_dependent_launches: bool = False,
    ) -> None:
        self.cache = DeviceCache.of(forward_pass.device)
        """What weights are asked for into; None on a CPU."""
        if budgets and self.cache is None:
            raise EngineError("weights are asked for ahead on a GPU only")
        self.shape = shape
        self.graphs: dict[Frame, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[Frame, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pass = forward_pass
        self._sizes = sizes
        self._budgets = budgets or {}
        self._has_dependent_launches = has_dependent_launches

    def replay(self, frame: Frame) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the frame's graph; return logits [S, V] and ids [S], the next replay's too."""
        self.graphs[frame].replay()
        return self.outputs[frame]

    @torch.inference_mode()
    def capture(self, detail: Detail = "all") -> None:
        """Capture the graphs of the frames, the largest first, in one memory pool.

        Raises:
            RuntimeError: The device has no memory for them (`is_out_of_memory`); the runner is
                of no further use.
        """
        self.serve_by(self._captured(self._sizes.keep(detail), self._budgets))

    @torch.inference_mode()
    def captured_decodes(
        self,
        *,
        dependent: bool = False,
        budget: Budget | None = None,
        sizes: Sequence[int] = (),
    ) -> CapturedSteps:
        """Capture the steps of decodes once more, after `capture`; what serves stays as it is.

        Args:
            dependent: Whether by dependent launches (see kernels/dependent_launch.py).
            budget: Of weights that they ask for ahead, whatever their rows.
            sizes: Batch sizes out of `decode_sizes`; none: all of them.

        Raises:
            ConfigError: A layer does not tell how its weight is read.
            EngineError: What is asked for, the device does not know.
            RuntimeError: The device has no memory for the graphs.
        """
        if dependent and not self._has_dependent_launches:
            raise EngineError("dependent launches: this GPU does not know them; Hopper does")
        budgets = {} if budget is None else {self._sizes.num_slots: budget}
        with dependent_launches(on=dependent):
            chosen = sorted(sizes or self.decode_sizes, reverse=True)
            return self._captured([Frame(size) for size in chosen], budgets)

    @property
    def decode_sizes(self) -> list[int]:
        """The batch sizes whose decode steps are captured, ascending."""
        return list(self._sizes.buckets)

    @torch.inference_mode()
    def prefetch_by(self, budgets: Budgets) -> None:
        """Serve decode steps by graphs that ask for weights by other budgets, after `capture`.

        Raises:
            RuntimeError: The device has no memory for the graphs; what served goes on serving.
        """
        sizes = [
            size for size in self._sizes.buckets if budget_of(budgets, size) != self._budget(size)
        ]
        self.serve_by(self._captured([Frame(size) for size in reversed(sizes)], budgets))
        self._budgets = budgets

    def describe_prefetch(self) -> str:
        """Say in one line what decode steps ask for ahead."""
        return describe(self._budgets)

    def _budget(self, size: int) -> Budget | None:
        return budget_of(self._budgets, size)

    def rehearsals(
        self,
        sequences: int,
        keys: Sequence[int],
        budget: Budget | None,
        *,
        dependent: bool = False,
    ) -> list[Callable[[], float]]:
        """Capture a step of decodes, and return what runs it and tells its seconds.

        To be called before there are requests. No KV is written.

        Args:
            sequences: At most as many as are captured.
            keys: Tokens of each sequence: one function for each of these.
            budget: Of weights that it asks for ahead.
            dependent: Whether by dependent launches.

        Raises:
            EngineError: What is asked for, the device does not know.
            RuntimeError: The device has no memory for the graph.
        """
        size = next(size for size in self._sizes.buckets if size >= sequences)
        steps = self.captured_decodes(dependent=dependent, budget=budget, sizes=[size])
        run = partial(self._rehearse, steps.graphs[Frame(size)], Frame(size), sequences)
        longest = self._pass.tables.max_tokens
        return [partial(run, min(count, longest)) for count in keys]

    @torch.inference_mode()
    def _rehearse(
        self, graph: torch.cuda.CUDAGraph, frame: Frame, sequences: int, keys: int
    ) -> float:
        places = self._pass
        arrays = places.padding(frame)
        arrays["kv_lens"][:sequences] = keys
        arrays["positions"][:sequences] = keys - 1
        arrays["table_rows"][:sequences] = np.arange(sequences)
        places.staging.send(places.staging.pack(arrays))
        places.tables.pretend(sequences, keys, places.kv_caches[0][0].shape[0])
        begin = mark(places.device)
        graph.replay()
        end = mark(places.device)
        places.tables.forget()
        check_device(places.device)
        return seconds_between(begin, end)

    def serve_by(self, steps: CapturedSteps) -> CapturedSteps:
        """Let these serve instead of those of the same frames; return all that served before."""
        before = CapturedSteps(dict(self.graphs), dict(self.outputs))
        self.graphs.update(steps.graphs)
        self.outputs.update(steps.outputs)
        return before

    def _captured(self, frames: Sequence[Frame], budgets: Budgets) -> CapturedSteps:
        """Capture frames, the largest first; those of decodes alone ask for weights ahead."""
        runs = [
            self._warmed(frame, None if frame.tokens else budget_of(budgets, frame.decodes))
            for frame in frames
        ]
        steps = CapturedSteps({}, {})
        stream, pool = torch.cuda.Stream(self._pass.device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        with quietly():
            for frame, run in zip(frames, runs, strict=True):
                steps.graphs[frame], steps.outputs[frame] = captured(run, stream, pool)
        return steps

    def _warmed(
        self, frame: Frame, budget: Budget | None
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Run a frame with one layer of each kind, and return what runs all of them.

        The run compiles, loads kernels and chooses cuBLAS's algorithms, none of which a capture
        may do. Further layers of a kind would only do again what is done.
        """
        places = self._pass
        packed = places.staging.pack(places.padding(frame))
        arrays = places.staging.send(packed)
        batch = places.batch(
            arrays,
            num_decodes=frame.decodes,
            max_query_len=max(frame.tokens, 1),
            max_kv_len=places.tables.max_tokens,
            shape=self.shape,
        )
        model, layers = places.model.shallow()
        scales = None if places.kv_scales is None else [places.kv_scales[index] for index in layers]
        caches = [places.kv_caches[index] for index in layers]
        places.tables.gather(arrays["table_rows"])
        with self._asking(model, budget):
            hidden = places.through(model, places.input_ids(arrays), batch, caches, scales)
        places.sample_rows(hidden, arrays["sample_rows"], arrays["sample_slots"])
        if places.device.type == "cuda":
            torch.cuda.synchronize(places.device)  # the arrays are overwritten by the next frame's

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            with self._asking(places.model, budget):
                hidden = places.hidden(arrays, batch)
            return places.sample_rows(hidden, arrays["sample_rows"], arrays["sample_slots"])

        return run

    def _asking(self, model: CausalLM, budget: Budget | None) -> AbstractContextManager[None]:
        """Have a step of decodes ask for weights ahead, if any."""
        if budget is None:
            return nullcontext()
        if self.cache is None:
            raise EngineError("weights are asked for ahead on a GPU only")
        return self.cache.asking(model, budget)
