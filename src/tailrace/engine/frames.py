"""The sizes of steps that are captured as CUDA graphs, and which of them serves a step.

A graph is of fixed sizes, so a step is padded up to one that is captured. Decodes alone have many
sizes, for theirs are the steps whose time everybody's next token is; steps with prompt tokens have
those where padding costs less than queueing kernels one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALL_BUCKETS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
_MIXED_DECODES = (0, 16, 32, 64, 96)
_MIXED_TOKENS = (64, 128, 256, 512)
_PACED_TOKENS = (384, 640, 768, 896, 1024, 1152, 1280)
"""Further sizes where prompts are cut to a time: a cut is rounded down to what is captured. Up to
the last, queueing kernel by kernel takes a good part of the step, or all of it where phases go
apart and their kernels are queued twice (engine/phase_overlap)."""
_UNCAPTURED_STEP = 128
"""Above all that are captured, cuts are multiples of this: such steps take longer to run than to
queue."""
_LEAST_UNCAPTURED = 896
"""Where fewer sizes are captured (memory is short, or nothing is paced), cuts from here on are
such: to round them down to what is captured would leave half of the step's prompts out."""
_FEW_TOKENS = (128, 512)
_MIXED_PROMPTS = 16
_MOST_PADDED = 1.3
"""Rows of a large frame, as a multiple of the step's own."""

Detail = Literal["all", "few", "decodes"]
"""How many sizes of steps are captured."""


@dataclass(frozen=True)
class Frame:
    """The sizes of a step's index arrays; those that are captured are padded up to.

    rows       [d d d . .][a a a b b . . .]      decodes, then prompt tokens; dots are padding
    sequences  [0 1 2 . .][a b . . .] [none]     a last one without rows, for tiles without work
    """

    decodes: int
    """Rows of the decode kernel, one sequence each."""
    tokens: int = 0
    """Rows of the prefill kernel."""
    prompts: int = 0
    """Sequences that those rows belong to."""
    tiles: int = 0

    @property
    def rows(self) -> int:
        """All rows."""
        return self.decodes + self.tokens


def graph_buckets(max_batch_size: int) -> list[int]:
    """Return the batch sizes whose decode steps are captured, ascending, to `max_batch_size`."""
    sizes = [size for size in _SMALL_BUCKETS if size < max_batch_size]
    sizes += range(40, max_batch_size, 8)
    return [*sizes, max_batch_size]


def mixed_frames(
    max_batch_size: int, token_budget: int, block_m: int, *, paced: bool = False
) -> list[Frame]:
    """Return the frames of steps with prompt tokens, the smallest first.

    Those with few of them, whose kernels would take longer to queue than to run, and those of the
    whole budget: the scheduler counts decodes as `padded_decodes`, so that full steps fit exactly.
    Where prompts beside decodes are cut to a time (`paced`), sizes in between as well.
    """
    cuts = _PACED_TOKENS if paced else ()
    sizes = [
        (rows, tokens)
        for rows in padded_sizes(max_batch_size)
        for tokens in (*_MIXED_TOKENS, *(cuts if rows else ()), token_budget - rows)
        if 0 < tokens <= token_budget - rows
    ]
    return [
        Frame(rows, tokens, _MIXED_PROMPTS, -(-tokens // block_m) + _MIXED_PROMPTS)
        for rows, tokens in sorted(set(sizes), key=lambda size: (sum(size), size))
    ]


def fitting_frame(
    frames: Sequence[Frame], *, decodes: int, tokens: int, prompts: int
) -> Frame | None:
    """Return the first of `frames` that a step fits, or None: that much padding would cost more.

    A small step runs faster than its kernels are queued, so any padding pays; a large one does not.
    """
    frame = next(
        (f for f in frames if f.decodes >= decodes and f.tokens >= tokens and f.prompts >= prompts),
        None,
    )
    if frame is None or frame.tokens <= _MIXED_TOKENS[-1]:
        return frame
    return frame if frame.rows <= _MOST_PADDED * (decodes + tokens) else None


def kept_frames(
    buckets: list[int], mixed: list[Frame], token_budget: int, detail: Detail
) -> tuple[list[int], list[Frame]]:
    """Return which decode batches and mixed frames to capture where memory allows no more.

    "few" keeps, of what "all" has, every other batch size, and the mixed frames of 128 and 512
    prompt tokens and of the whole budget; "decodes" keeps those batch sizes alone.
    """
    if detail == "all":
        return buckets, mixed
    fewer = sorted({*buckets[::2], buckets[-1]})
    if detail == "decodes":
        return fewer, []
    return fewer, [f for f in mixed if f.tokens in _FEW_TOKENS or f.rows == token_budget]


def padded_sizes(max_batch_size: int) -> list[int]:
    """Return the numbers of decode rows that mixed frames have, ascending."""
    return [*(size for size in _MIXED_DECODES if size < max_batch_size), max_batch_size]


def whole_prompts(frames: Sequence[Frame], rows: int, tokens: int) -> int:
    """Return the most prompt tokens, up to those given, that need no padding.

    Args:
        frames: Those of steps with prompt tokens.
        rows: Decode rows, padded.
        tokens: Most prompt tokens.
    """
    captured = [frame.tokens for frame in frames if frame.decodes == rows]
    usual = [size for size in captured if size <= _PACED_TOKENS[-1]]
    sizes = [size for size in captured if size <= tokens]
    if tokens >= max(_LEAST_UNCAPTURED, max(usual, default=0) + _UNCAPTURED_STEP):
        sizes.append(tokens - tokens % _UNCAPTURED_STEP)
    return max(sizes, default=tokens)


class FrameSizes:
    """The frames of one runner: which are captured, and which serves a step.

    Args:
        num_slots: Places of the batch.
        token_budget: Most rows of a step.
        block_m: Rows of a tile of prompts' attention.
        paced: Whether prompts beside decodes are cut to a time.
    """

    def __init__(
        self, num_slots: int, token_budget: int, block_m: int, *, paced: bool = False
    ) -> None:
        self.num_slots = num_slots
        self.token_budget = token_budget
        self.buckets = graph_buckets(num_slots)
        """Batch sizes of the steps of decodes alone, ascending."""
        self.mixed = mixed_frames(num_slots, token_budget, block_m, paced=paced)
        """Of steps with prompt tokens, the smallest first."""
        self._all = self.buckets, self.mixed
        self._padded_sizes = padded_sizes(num_slots)

    def padded_decodes(self, decodes: int) -> int:
        """Return the rows that a mixed step computes for so many decodes."""
        padded = next(size for size in self._padded_sizes if size >= decodes)
        # Padding takes at most half of what prompts would have; else the step is not captured.
        return padded if 2 * (padded - decodes) <= self.token_budget - decodes else decodes

    def whole_prompts(self, decodes: int, tokens: int) -> int:
        """Return the most prompt tokens, up to those given, that need no padding beside decodes."""
        rows = self.padded_decodes(decodes)
        return whole_prompts(self.mixed, rows, tokens)

    def fitting(self, *, decodes: int, tokens: int, prompts: int) -> Frame | None:
        """Return the smallest frame that a step fits, without much padding."""
        if not tokens:
            return Frame(next(size for size in self.buckets if size >= decodes))
        return fitting_frame(self.mixed, decodes=decodes, tokens=tokens, prompts=prompts)

    def keep(self, detail: Detail) -> list[Frame]:
        """Keep of all frames what `kept_frames` does, and return it, the largest first."""
        self.buckets, self.mixed = kept_frames(*self._all, self.token_budget, detail)
        if not self.mixed:  # nothing to pad decodes for
            self._padded_sizes = list(range(self.num_slots + 1))
        chosen = [*map(Frame, self.buckets), *self.mixed]
        chosen.sort(key=lambda frame: frame.rows, reverse=True)
        return chosen
