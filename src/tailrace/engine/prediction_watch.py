"""Are steps predicted well, of late? Pace, late binding and admission go by these predictions.

    error = sum |predicted - measured| / sum measured       over the device's last ten seconds or so
    off   = for how many of its seconds the error has been above `MOST_ERROR`

Seconds are the device's, so that an idle server is no judge of itself, and a step counts by the
time that it took: a hundred quick decodes do not outweigh what makes clients wait. One stall moves
the error and is forgotten; a kind of step that the model has no term for stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_ERROR = 0.25
LASTING_S = 60.0
"""Off for so long is worth a line in the log."""
_MEMORY_S = 10.0
_MOST_STEP_S = _MEMORY_S
"""A step counts as at most so long: a stall of a minute would be remembered for minutes."""


@dataclass
class PredictionWatch:
    """Follows predictions and what came."""

    off_s: float = 0.0
    """Seconds of the device's time that the error has been too large without a break."""
    _missed_s: float = 0.0
    _measured_s: float = 0.0

    @property
    def error(self) -> float:
        """The share of the last seconds by which predictions were off; 0 before there are any."""
        return self._missed_s / self._measured_s if self._measured_s else 0.0

    @property
    def is_off(self) -> bool:
        """Whether predictions have been off for long."""
        return self.off_s >= LASTING_S

    def add(self, predicted_s: float, measured_s: float) -> bool:
        """Add a step; return whether it is the one with which predictions have been off for long.

        Args:
            predicted_s: When the step was issued.
            measured_s: What the device took; more than 0.
        """
        was_off = self.is_off
        counted = min(1.0, _MOST_STEP_S / measured_s)
        kept = math.exp(-counted * measured_s / _MEMORY_S)
        self._measured_s = kept * self._measured_s + counted * measured_s
        self._missed_s = kept * self._missed_s + counted * abs(predicted_s - measured_s)
        self.off_s = self.off_s + counted * measured_s if self.error > MOST_ERROR else 0.0
        return self.is_off and not was_off
