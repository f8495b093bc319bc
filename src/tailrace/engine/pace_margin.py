"""By how much steps outlast their predictions, one in twenty of them excepted: the pace's margin.

A prediction is a mean, so half of the steps that are cut to a target by it alone would take longer.
What streams are promised is the step that they seldom see exceeded, so the pace aims below the
target by this factor. It follows the steps that it is about, those cut to the time, one by one:

    step took longer than margin x predicted   margin += STEP x 19/20
    it did not                                 margin -= STEP x 1/20

which stands still where one step in twenty is longer: stochastic approximation of a quantile
(Robbins and Monro, 1951). How much longer does not count, so one stall moves it as little as any
step, and it has nothing to remember.
"""

from __future__ import annotations

from dataclasses import dataclass

QUANTILE = 0.95
"""Of the steps with decodes that are cut to the target, those that end within it."""
MOST = 1.5
"""Where steps are longer by more than half, the model is wrong: `prediction_watch` says so."""
_STEP = 0.02
_NEAR = 0.7
"""Of what the pace aims at: shorter steps were not cut to it, and may err by other shares."""


@dataclass
class PaceMargin:
    """A factor, at least 1, that predictions are to be taken by."""

    value: float = 1.0

    def add(self, predicted_s: float, measured_s: float, target_s: float) -> None:
        """Learn from a step.

        Args:
            predicted_s: When it was issued.
            measured_s: What the device took; more than 0.
            target_s: Of such steps.
        """
        if predicted_s * self.value < _NEAR * target_s:
            return
        is_longer = measured_s > self.value * predicted_s
        moved = self.value + _STEP * (QUANTILE - (not is_longer))
        self.value = min(MOST, max(1.0, moved))
