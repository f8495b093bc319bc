"""One queue over all streams of this front end: who is written first.

An engine step brings a token for each of many streams at once. They are not written as they are
found in its message, but in this order: priority class, then first tokens before later ones, then
arrival. What has been read from the engine together is sorted together: the queue is emptied when
the loop has dealt with all of it, in one go and without a task switch for each stream.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Protocol


class Outlet(Protocol):
    """A stream with something to write."""

    @property
    def priority(self) -> int:
        """Smaller is earlier."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether anything of it was written before."""
        ...

    def write_pending(self) -> None:
        """Write what waits, without blocking; never raises."""
        ...


class Outbox:
    """The queue."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, Outlet]] = []
        self._arrivals = itertools.count()
        self._is_due = False

    def add(self, outlet: Outlet) -> None:
        """Have an outlet write, once, when what has arrived with it is known."""
        entry = (outlet.priority, outlet.has_begun, next(self._arrivals), outlet)
        heapq.heappush(self._heap, entry)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        while self._heap:
            heapq.heappop(self._heap)[3].write_pending()
