"""One clock: monotonic seconds, injectable so that no test sleeps.

`time.monotonic` counts from boot on Linux and is shared by all processes of one machine, so
stamps taken in the front end and in the engine may be subtracted from each other.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Anything that tells monotonic seconds."""

    def __call__(self) -> float:
        """Return monotonic seconds."""
        ...


def monotonic() -> float:
    """Return the machine's monotonic seconds, comparable between its processes."""
    return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to: for tests."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: `seconds` is negative; a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self.now_s += seconds
