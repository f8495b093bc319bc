"""One queue over all streams of this front end: who is written first.

An engine step brings a token for each of many streams at once. They are not written as they are
found in its message, but in this order: priority class, then first tokens before later ones, then
arrival. What has been read from the engine together is sorted together: the queue is served when
the loop has dealt with all of it, without a task switch for each stream.

Of equals that came together, who was written longest ago is first. So a stream has the same place
step after step, and its client sees the engine's own pace: the gap of one that went from the first
place of a burst to the last would be longer by all of the burst. Whoever is new has its first token
written before the others', and stays where that has put it.

    add, add, add ... | round: a few streams | sockets, the engine's next message | round ...

Where more is waiting than a round writes, the loop looks for news in between, and what has come and
is more urgent overtakes. A stream waits at one place in the queue, and its turn takes all that it
has by then: a backlog shortens itself, by more events in each write.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Protocol

STREAMS_PER_ROUND = 16
"""Some half a millisecond's work: what an urgent token may have to wait for."""


class Outlet(Protocol):
    """A stream with something to write."""

    @property
    def priority(self) -> int:
        """Smaller is earlier."""
        ...

    turn: int
    """The outbox's own: which turn of all was its latest; 0 before the first."""

    @property
    def has_begun(self) -> bool:
        """Whether anything of it was written before."""
        ...

    def write_pending(self) -> None:
        """Make its text of what has come, and write it, without blocking; never raises."""
        ...


class Outbox:
    """The queue.

    Args:
        streams_per_round: How many are written before the loop looks for news.
    """

    def __init__(self, streams_per_round: int = STREAMS_PER_ROUND) -> None:
        self._streams_per_round = streams_per_round
        self._heap: list[tuple[int, bool, int, int, int, Outlet]] = []
        self._waiting: set[int] = set()
        """By identity: an outlet need not be hashable, and lives as long as it is in the heap."""
        self._arrivals = itertools.count()
        self._round_number = 0
        """Of the next one: what comes before it came together."""
        self._turns = 0
        self._is_due = False

    @property
    def waiting(self) -> int:
        """Streams that have something to write and wait for their turn."""
        return len(self._heap)

    def add(self, outlet: Outlet) -> None:
        """Have an outlet write, once, when what has arrived with it is known.

        One that waits already keeps its place.
        """
        if id(outlet) in self._waiting:
            return
        self._waiting.add(id(outlet))
        equals = (self._round_number, outlet.turn, next(self._arrivals))
        heapq.heappush(self._heap, (outlet.priority, outlet.has_begun, *equals, outlet))
        if not self._is_due:
            self._plan_round()

    def _plan_round(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._is_due = False
        self._round_number += 1
        for _ in range(min(self._streams_per_round, len(self._heap))):
            outlet = heapq.heappop(self._heap)[-1]
            self._waiting.discard(id(outlet))
            self._turns += 1
            outlet.turn = self._turns
            outlet.write_pending()
        if self._heap and not self._is_due:
            self._plan_round()
