"""The steps that are captured as CUDA graphs: how each is made, and which serve.

    tried       as warmed, but for kernels' launches: what is to be compiled is found out, and is
                compiled by several processes (kernels/early_compile.py)
    warmed      a layer of each kind is run: what compiles or loads kernels does so
    captured    all layers, the largest frame first, so that the others lie in its memory
    serves      by frame; others of the same frame may take its place, and it theirs

A graph is of one frame and one way of launching. Both are fixed while it is captured, so whoever
compares two captures both, and lets them serve in turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailrace.engine.frames import Frame
from tailrace.engine.graph_capture import captured, quietly
from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import dependent_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tailrace.engine.forward_pass import ForwardPass
    from tailrace.engine.frames import Detail, FrameSizes
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape


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
        dependent_from: From how many sequences on decode steps serve by dependent launches (see
            decode_launches.py); None: they do not.
        has_dependent_launches: Whether the device knows them.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        sizes: FrameSizes,
        shape: PrefillShape,
        *,
        dependent_from: int | None = None,
        has_dependent_launches: bool = False,
    ) -> None:
        self.shape = shape
        self.graphs: dict[Frame, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[Frame, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pass = forward_pass
        self._sizes = sizes
        self.dependent_from = dependent_from
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
        self.serve_by(self._captured(self._sizes.keep(detail), self.dependent_from))

    @torch.inference_mode()
    def rehearse(self, detail: Detail = "all") -> None:
        """Run a layer of each kind of the frames that `capture` will."""
        for frame, dependent in self._ways(self._sizes.keep(detail), self.dependent_from):
            self._warmed(frame, self.shape, dependent=dependent)

    @torch.inference_mode()
    def captured_decodes(self, *, dependent: bool) -> CapturedSteps:
        """Capture the steps of decodes once more, after `capture`; what serves stays as it is.

        Args:
            dependent: Whether all of them by dependent launches (see kernels/dependent_launch.py),
                or none.

        Raises:
            EngineError: They are asked for, and the device does not know them.
            RuntimeError: The device has no memory for the graphs.
        """
        if dependent and not self._has_dependent_launches:
            raise EngineError("dependent launches: this GPU does not know them; Hopper does")
        frames = [Frame(size) for size in reversed(self._sizes.buckets)]
        return self._captured(frames, 1 if dependent else None)

    @torch.inference_mode()
    def warm(self, shape: PrefillShape, tokens: int = 1) -> None:
        """Run tokens of a prompt, a tile at most, by another shape than captured steps have."""
        self._warmed(Frame(0, tokens=tokens, prompts=1, tiles=1), shape, dependent=False)

    def serve_by(self, steps: CapturedSteps) -> CapturedSteps:
        """Let these serve instead of those of the same frames; return all that served before."""
        before = CapturedSteps(dict(self.graphs), dict(self.outputs))
        self.graphs.update(steps.graphs)
        self.outputs.update(steps.outputs)
        return before

    def _captured(self, frames: Sequence[Frame], dependent_from: int | None) -> CapturedSteps:
        """Capture frames, the largest first; decodes alone, if so many, by dependent launches."""
        runs = [
            self._warmed(frame, self.shape, dependent=dependent)
            for frame, dependent in self._ways(frames, dependent_from)
        ]
        steps = CapturedSteps({}, {})
        stream, pool = torch.cuda.Stream(self._pass.device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        with quietly():
            for frame, run in zip(frames, runs, strict=True):
                steps.graphs[frame], steps.outputs[frame] = captured(run, stream, pool)
        return steps

    @staticmethod
    def _ways(frames: Sequence[Frame], dependent_from: int | None) -> Iterator[tuple[Frame, bool]]:
        """Return frames and whether each goes by dependent launches: decodes alone, if so many."""
        for frame in frames:
            is_many = dependent_from is not None and frame.decodes >= dependent_from
            yield frame, is_many and not frame.tokens

    def _warmed(
        self, frame: Frame, shape: PrefillShape, *, dependent: bool
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
            shape=shape,
        )
        model, layers = places.model.shallow()
        scales = None if places.kv_scales is None else [places.kv_scales[index] for index in layers]
        caches = [places.kv_caches[index] for index in layers]
        places.tables.gather(arrays["table_rows"])
        with dependent_launches(on=dependent):
            hidden = places.through(model, places.input_ids(arrays), batch, caches, scales)
            places.sample_rows(hidden, arrays["sample_rows"], arrays["sample_slots"])
        if places.device.type == "cuda":
            torch.cuda.synchronize(places.device)  # the arrays are overwritten by the next frame's

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            with dependent_launches(on=dependent):
                hidden = places.hidden(arrays, batch)
                return places.sample_rows(hidden, arrays["sample_rows"], arrays["sample_slots"])

        return run
