"""Who is served next: one priority queue over all the streams of a front end.

    engine --put--> a stream's outputs --oldest--> heap --round--> get --> text --> socket

A stream enters the heap with its oldest output, and its turn is to take all that it has by then, so
a backlog shortens itself: more tokens for each write. The order is (priority, first tokens before
later ones, arrival). A round lets a few streams go on and then lets the event loop look for what
else has come. Were all of a step's streams woken at once, as queues of asyncio would, the first
token of an urgent one would wait for the text and the bytes of every other: that is the difference.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tailrace.types import TokenOutput

STREAMS_PER_ROUND = 8
"""Half a millisecond's work: what an urgent output may have to wait for, at most twice."""


class _Entry(NamedTuple):
    priority: int
    is_later: bool
    arrival: int
    queue: TurnQueue


class Turns:
    """Gives the streams of one event loop their turns.

    Args:
        streams_per_round: How many go on before the loop looks for news.
    """

    def __init__(self, streams_per_round: int = STREAMS_PER_ROUND) -> None:
        self._streams_per_round = streams_per_round
        self._heap: list[_Entry] = []
        self._arrivals = itertools.count()
        self._has_round = False

    @property
    def waiting(self) -> int:
        """Streams that have something to say and wait for their turn."""
        return len(self._heap)

    def queue(self, priority: int) -> TurnQueue:
        """Return a new stream's queue.

        Args:
            priority: Smaller goes first, as in the engine.
        """
        return TurnQueue(self, priority)

    def next_arrival(self) -> int:
        """Return a number that grows with time."""
        return next(self._arrivals)

    def enter(self, entry: _Entry) -> None:
        """Let a stream wait for its turn."""
        heapq.heappush(self._heap, entry)
        self._plan_round()

    def _plan_round(self) -> None:
        if not self._has_round:
            self._has_round = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._has_round = False
        left = self._streams_per_round
        while self._heap and left:
            left -= heapq.heappop(self._heap).queue.go_on()
        if self._heap:
            self._plan_round()


class TurnQueue:
    """One stream's outputs, in order; implements `OutputQueue`.

    Args:
        turns: Of the event loop.
        priority: Smaller goes first.
    """

    def __init__(self, turns: Turns, priority: int) -> None:
        self._turns = turns
        self._priority = priority
        self._outputs: deque[tuple[int, TokenOutput]] = deque()
        """With their arrivals."""
        self._getter: asyncio.Future[None] | None = None
        self._has_begun = False
        self._is_entered = False

    def put_nowait(self, output: TokenOutput) -> None:
        """Add an output."""
        self._outputs.append((self._turns.next_arrival(), output))
        if self._getter is not None and not self._getter.done():
            self._enter()

    async def get(self) -> TokenOutput:
        """Return the next output when it is this stream's turn."""
        self._getter = asyncio.get_running_loop().create_future()
        if self._outputs:
            self._enter()
        try:
            await self._getter
        finally:
            self._getter = None
        return self._take()

    def get_nowait(self) -> TokenOutput:
        """Return the next output, in the same turn.

        Raises:
            asyncio.QueueEmpty: There is none.
        """
        if not self._outputs:
            raise asyncio.QueueEmpty
        return self._take()

    def empty(self) -> bool:
        """Say whether no output is there."""
        return not self._outputs

    def go_on(self) -> bool:
        """Begin a turn; return whether anybody waited for it."""
        self._is_entered = False
        # An entry may outlive its getter, and what it was made for.
        if self._getter is None or self._getter.done() or not self._outputs:
            return False
        self._getter.set_result(None)
        return True

    def _take(self) -> TokenOutput:
        _, output = self._outputs.popleft()
        self._has_begun = self._has_begun or bool(output.token_ids)
        return output

    def _enter(self) -> None:
        if not self._is_entered:
            self._is_entered = True
            oldest, _ = self._outputs[0]
            self._turns.enter(_Entry(self._priority, self._has_begun, oldest, self))
