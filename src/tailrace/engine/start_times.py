"""What a start spends its time on, for one line of the log.

    begun | import | device | weights | ... | probes        each phase ends at its mark

A phase lasts from the mark before to its own, so every second belongs to one phase, and their sum
is the whole start. What other threads do meanwhile (a tokenizer is read) counts where it is waited
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.clock import monotonic

if TYPE_CHECKING:
    from tailrace.clock import Clock


class StartTimes:
    """Seconds by phase, in the order in which phases first ended.

    Args:
        clock: Monotonic seconds.
        begun_s: When the first phase began; None: now.
    """

    def __init__(self, clock: Clock = monotonic, begun_s: float | None = None) -> None:
        self._clock = clock
        self._last_s = clock() if begun_s is None else begun_s
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Say what the time since the last mark was spent on; a phase may have several parts."""
        now_s = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def total_s(self) -> float:
        """Of all phases."""
        return sum(self.seconds.values())

    def describe(self) -> str:
        """Return such as "import 3.1 s, weights 4.0 s, capture 2.2 s; 9.3 s in all"."""
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
        return f"{parts}; {self.total_s:.1f} s in all"
