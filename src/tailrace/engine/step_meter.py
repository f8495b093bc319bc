"""What steps take, on the device and beside it: totals, histograms, and how wrong the forecast was.

    host      | schedule | prepare |      wait      | commit | publish |     the engine's own time;
    queue               | kernels queued |                                   the runner's thread;
    device    ... N-1 | idle |------ N ------|                               the device's

One turn is one call of `Engine.step` with the sending of its outputs. What the host does while the
device is busy costs nothing; `idle` is what it costs, and is counted only between two steps of
which the second was issued while the first ran or waited to.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import structlog

from tailrace.engine.prediction_watch import MOST_ERROR, PredictionWatch
from tailrace.types import (
    FORECAST_ERROR_BOUNDS,
    HOST_BOUNDS_S,
    STEP_BOUNDS_S,
    STEP_RATIO_BOUNDS,
    Distribution,
    StepTimings,
)

log = structlog.get_logger("tailrace.engine")

_MOST_RATIO = 1000.0


class Histogram:
    """Counts by upper bound, the last for what exceeds all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        """Return what was counted up to now."""
        return Distribution(tuple(self._counts), self._total)


@dataclass
class StepMeter:
    """Adds up; the engine tells, its reports read."""

    schedule_s: float = 0.0
    prepare_s: float = 0.0
    queue_s: float = 0.0
    commit_s: float = 0.0
    publish_s: float = 0.0
    idle_s: float = 0.0
    predicted_s: float = 0.0
    """Of the last step."""
    pace_margin: float = 1.0
    """By which steps cut to `--itl-target-ms` outlast their predictions (pace_margin.py)."""
    _turn_s: float = 0.0
    """Of the turn that goes on: schedule, prepare, commit and publish."""
    _host: Histogram = field(default_factory=lambda: Histogram(HOST_BOUNDS_S))
    _device: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    _error: Histogram = field(default_factory=lambda: Histogram(FORECAST_ERROR_BOUNDS))
    _ratio: Histogram = field(default_factory=lambda: Histogram(STEP_RATIO_BOUNDS))
    _watch: PredictionWatch = field(default_factory=PredictionWatch)

    def begin_turn(self) -> None:
        """Close the turn before, with what was published of it."""
        if self._turn_s > 0.0:
            self._host.add(self._turn_s)
        self._turn_s = 0.0

    def add_schedule(self, seconds: float) -> None:
        """Add the choice of a step."""
        self.schedule_s += seconds
        self._turn_s += seconds

    def add_prepare(self, seconds: float) -> None:
        """Add the making of its index arrays."""
        self.prepare_s += seconds
        self._turn_s += seconds

    def add_commit(self, seconds: float) -> None:
        """Add the taking of its results."""
        self.commit_s += seconds
        self._turn_s += seconds

    def add_publish(self, seconds: float) -> None:
        """Add the sending of its outputs."""
        self.publish_s += seconds
        self._turn_s += seconds

    def add_step(
        self, device_s: float, idle_s: float, queue_s: float, predicted_s: float | None
    ) -> None:
        """Add a step that is done.

        Args:
            device_s: What the device took; 0 where the runner does not measure.
            idle_s: What it stood still before although the step was there.
            queue_s: What the runner's thread took to queue it.
            predicted_s: What was predicted when it was issued; None where nothing was,
                or where the step did what no prediction is of.
        """
        self.idle_s += idle_s
        self.queue_s += queue_s
        if device_s <= 0.0:
            return
        self._device.add(device_s)
        if predicted_s is not None:
            self.predicted_s = predicted_s
            self._error.add(abs(predicted_s - device_s) / device_s)
            # What was predicted to take nothing has no ratio.
            is_bounded = device_s < _MOST_RATIO * predicted_s
            self._ratio.add(device_s / predicted_s if is_bounded else _MOST_RATIO)
            if self._watch.add(predicted_s, device_s):
                log.warning(
                    "steps_mispredicted",
                    error=round(self._watch.error, 3),
                    most_error=MOST_ERROR,
                    off_s=round(self._watch.off_s),
                    see="docs/steps.md, When predictions are off",
                )

    def read(self) -> StepTimings:
        """Return all of it."""
        return StepTimings(
            schedule_s_total=self.schedule_s,
            prepare_s_total=self.prepare_s,
            queue_s_total=self.queue_s,
            commit_s_total=self.commit_s,
            publish_s_total=self.publish_s,
            idle_s_total=self.idle_s,
            predicted_s=self.predicted_s,
            pace_margin=self.pace_margin,
            host=self._host.read(),
            device=self._device.read(),
            error=self._error.read(),
            ratio=self._ratio.read(),
            recent_error=self._watch.error,
            off_s=self._watch.off_s,
            is_off=self._watch.is_off,
        )
