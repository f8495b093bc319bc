"""How many prompt tokens a step may carry, so that the streams in it wait no longer than meant.

Coefficients in, tokens out. A step is cut so that 95 of 100 end in time, not so that the mean does:
what predictions miss is learnt from the steps themselves (pace_margin.py). A step without decodes
is not cut, for nobody's next token waits for it. However long the decodes alone take, a share of
the step stays with the prompts: a target that cannot be held must not starve them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailrace.engine.pace_margin import PaceMargin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tailrace.engine.step_time import StepLoad, StepTimeModel

LEAST_SHARE = 8
"""One part in so many of the token budget is left to prompts, whatever the decodes take."""


@dataclass(frozen=True)
class Pace:
    """A target for the time of steps that carry decodes.

    Args:
        model: Predicts steps; without a fit nothing is cut.
        target_s: Seconds within which such steps end, all but one in twenty.
        least_tokens: Prompt tokens that any step may carry.
        round_down: Of (decodes, prompt tokens): the largest size up to there that the device
            computes without padding.
        margin: By which steps outlast their predictions.
    """

    model: StepTimeModel
    target_s: float
    least_tokens: int
    round_down: Callable[[int, int], int]
    margin: PaceMargin = field(default_factory=PaceMargin)

    @property
    def aim_s(self) -> float:
        """What a step may be predicted to take."""
        return self.target_s / self.margin.value

    def observe(self, load: StepLoad, predicted_s: float, measured_s: float) -> None:
        """Learn from a step that is done: what its chunks asked for, its seconds on the device."""
        if load.decodes and load.prefill_tokens:
            self.margin.add(predicted_s, measured_s, self.target_s)

    def limit(self, load: StepLoad, prompts: Iterable[tuple[int, int]], most: int) -> int:
        """Return how many prompt tokens to put beside the decodes of `load`, at most `most`.

        Args:
            load: The step's decodes.
            prompts: Who is next, in order: (tokens computed before, tokens left) each.
            most: What the token budget leaves.
        """
        if self.model.costs is None or not load.decodes:
            return most
        taken = 0
        for start, left in prompts:
            wanted = min(left, most - taken)
            fitting = self.fitting(load, start, wanted)
            taken += fitting
            if fitting < wanted:
                break
            if taken == most:
                return most
            load = load.with_chunk(start, wanted)
        else:
            return most  # all of them fit
        return min(most, self.round_down(load.decodes, max(taken, min(self.least_tokens, most))))

    def chunk(self, load: StepLoad, start: int, wanted: int) -> int:
        """Return how many of a prompt's next `wanted` tokens to add to a step, at least one."""
        if not load.decodes:
            return wanted
        owed = self.least_tokens - load.prefill_tokens
        return min(wanted, max(1, owed, self.fitting(load, start, wanted)))

    def fitting(self, load: StepLoad, start: int, wanted: int) -> int:
        """Return the most tokens up to `wanted` with which the step is done in time; 0: none."""
        costs = self.model.costs
        if costs is None or load.with_chunk(start, wanted).seconds(costs) <= self.aim_s:
            return wanted
        low, high = 0, wanted  # the first is in time or none, the last is not
        while high - low > 1:
            middle = (low + high) // 2
            if load.with_chunk(start, middle).seconds(costs) <= self.aim_s:
                low = middle
            else:
                high = middle
        return low
