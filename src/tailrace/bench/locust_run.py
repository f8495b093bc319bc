"""One run inside a Locust process: what is due when, who is in flight, what was recorded.

    open loop      one dispatcher greenlet spawns a greenlet for each request (or session) at its
                   scheduled time, and never waits for an answer
    closed loop    Locust's users come for the next prepared request when their pause is over

Both count latency from the moment a request was due, as our own driver does. Nothing here knows
Locust, so that it can be tested without it; nothing here knows asyncio either, since in a Locust
process everything that waits must be a greenlet.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING

import gevent
from gevent.pool import Group

from tailrace.bench.load.client import HEARTBEAT_S
from tailrace.bench.load.shot import Shot, blank_record, chains
from tailrace.bench.load.state import LoadState
from tailrace.clock import Clock, monotonic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailrace.bench.locust_sse import StreamClient
    from tailrace.bench.records import Record
    from tailrace.bench.wire import Endpoint


class LocustRun:
    """The requests of one run and what became of them.

    Args:
        endpoint: Where to send.
        client: Sends; its `started_s` is set here.
        shots: All requests of the run; `share` picks this process's part of them.
        on_record: Called with each record at its end.
        share: This process's number and how many there are.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client: StreamClient,
        shots: Sequence[Shot],
        *,
        on_record: Callable[[Record], None],
        share: tuple[int, int] = (0, 1),
        clock: Clock = monotonic,
    ) -> None:
        self.worker, processes = share
        self._chains = deque(chains(shots)[self.worker :: processes])
        self.state = LoadState(total=sum(map(len, self._chains)))
        self.lags_s: list[float] = []
        """How late the process's event loop ran what was due."""
        self._client = client
        # Encoded before the run: only bytes are sent within it.
        self._requests = {
            shot.index: endpoint.request("POST", "/v1/completions", shot.body, shot.request_id)
            for chain in self._chains
            for shot in chain
        }
        self._on_record = on_record
        self._clock = clock
        self._in_flight = Group()
        self._left = len(self._chains)
        self._heart: gevent.Greenlet | None = None

    def start(self, start_s: float | None = None) -> None:
        """Make `start_s` on the clock (None: now) the run's second 0."""
        gc.collect()
        gc.freeze()
        self.state.start(self._clock() if start_s is None else start_s)
        self._client.started_s = self.state.started_s
        self._heart = gevent.spawn(self._beat)

    def finish(self) -> None:
        """End the run; what is in flight is recorded as cancelled."""
        self._in_flight.kill()
        if self._heart is not None:
            self._heart.kill()
        gc.unfreeze()

    @property
    def is_done(self) -> bool:
        """Whether every request was sent and has ended, in whatever way."""
        return self._left == 0

    def now_s(self) -> float:
        """Return the run's time in seconds."""
        return self._clock() - self.state.started_s

    def dispatch(self) -> None:
        """Send everything at its time, and return when every answer has ended."""
        try:
            while self._chains:
                self.wait_until(self._chains[0][0].scheduled_s)
                chain = self._chains.popleft()
                self._in_flight.spawn(self.walk, chain, chain[0].scheduled_s)
            self._in_flight.join()
        finally:
            self._in_flight.kill()

    def next_chain(self) -> list[Shot] | None:
        """Return what a closed-loop user sends next, or None where all is sent."""
        return self._chains.popleft() if self._chains else None

    def walk(self, chain: Sequence[Shot], due_s: float, user: int | None = None) -> Record:
        """Send a request, or the turns of a session one after another; return the last record."""
        try:
            record = self._shoot(chain[0], due_s, user)
            for shot in chain[1:]:
                due_s = (record.finished_s or self.now_s()) + shot.think_s
                self.wait_until(due_s)
                record = self._shoot(shot, due_s, user)
        finally:
            self._left -= 1
        return record

    def wait_until(self, due_s: float) -> None:
        """Sleep until the run's second `due_s`."""
        # A loop, since gevent's timers count from the event loop's last turn and may fire early.
        while (delay_s := due_s - self.now_s()) > 0:
            gevent.sleep(delay_s)

    def _shoot(self, shot: Shot, due_s: float, user: int | None) -> Record:
        record = blank_record(shot, scheduled_s=due_s, worker=self.worker)
        record.user = shot.user if user is None else user
        record.dispatched_s = self.now_s()
        self.state.sent += 1
        self.state.in_flight += 1
        try:
            self._client.exchange(self._requests[shot.index], record)
        finally:
            # Also when killed: what is known is kept.
            self.state.in_flight -= 1
            self.state.chunks += len(record.chunk_s)
            self.state.done.append(record)
            self._on_record(record)
        return record

    def _beat(self) -> None:
        while True:
            due_s = self._clock() + HEARTBEAT_S
            gevent.sleep(HEARTBEAT_S)
            self.lags_s.append(max(self._clock() - due_s, 0.0))
