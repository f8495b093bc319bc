"""How busy the engine was lately, from its ever-growing counters."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.types import EngineStats

WINDOW_S = 10.0
_SAMPLE_S = 0.5
_COUNTERS = ("steps_total", "generation_tokens_total", "busy_s_total")


class RateWindow:
    """Keeps samples of about the last ten seconds.

    `add` may be called for every step: it keeps one sample each half second, and the newest.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[EngineStats] = deque()

    def add(self, stats: EngineStats) -> None:
        """Take a report; one whose counters went back is a new engine's."""
        samples = self._samples
        if samples and any(getattr(stats, c) < getattr(samples[-1], c) for c in _COUNTERS):
            samples.clear()
        if len(samples) > 1 and stats.time_s - samples[-2].time_s < _SAMPLE_S:
            samples.pop()
        samples.append(stats)
        while len(samples) > 2 and stats.time_s - samples[1].time_s >= self._window_s:
            samples.popleft()

    @property
    def busy_share(self) -> float | None:
        """Share of the time in which the device had a step to run; None before two reports."""
        busy = self._per_second("busy_s_total")
        return None if busy is None else min(1.0, busy)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens a second; None before two reports."""
        return self._per_second("generation_tokens_total")

    def _per_second(self, counter: str) -> float | None:
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        span_s = last.time_s - first.time_s
        grown: float = getattr(last, counter) - getattr(first, counter)
        return grown / span_s if span_s > 0 else None
