"""The open loop: every request leaves at its scheduled time, whatever the server does.

    schedule     |    |  |        |     |          due times
    dispatcher   +----+--+--------+-----+          one task that never waits for an answer
    chains       [=====....text..text..]           one task each: a request, or several in a row
                    [==....text.......]~~[==...]   ~~ think time, then the next turn

A closed loop is the same with one chain a user: its next request is due when the answer before it
ended and the think time has passed, and its latency counts from then.
The dispatcher's lateness is measured (`dispatched_s - scheduled_s`), and so is the event loop's
(`Heartbeat`): where the client could not keep up, the run is not to be believed.
Nothing is tokenised, drawn or encoded here; bodies were made before the run.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import resource
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailrace.bench.load.reading import BAD_BYTES, Reading, fail
from tailrace.bench.load.shot import Shot, blank_record, chains
from tailrace.bench.load.state import LoadState
from tailrace.bench.sse import SseError
from tailrace.bench.wire import Endpoint, Exchange, Inbox, WireError, open_exchange
from tailrace.clock import Clock, monotonic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tailrace.bench.records import Record

HEARTBEAT_S = 0.02
SWITCH_S = 0.0005
"""How long another thread of this process (the view's, the monitor's) may keep Python to itself
while bytes wait to be stamped; Python's own default is ten times as much."""
LINGER_S = 1.0
"""How long a server may take to close a stream after `data: [DONE]`."""
OUR_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})
"""Connection errors that say nothing about the server."""


@dataclass
class Heartbeat:
    """How late the client's event loop runs what is due."""

    lags_s: list[float] = field(default_factory=list)

    async def beat(self, clock: Clock) -> None:
        """Measure until cancelled."""
        while True:
            due_s = clock() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self.lags_s.append(max(clock() - due_s, 0.0))


class Load:
    """One run of shots against one endpoint, within this process.

    Args:
        endpoint: The server.
        shots: What to send; shots with `after` make chains.
        timeout_s: A request that is not complete so long after it was due has failed.
        path: Below the base URL.
        until_s: A request of a chain that would be due later than this is not sent any more.
        worker: This process's number, for the records.
        on_record: Called with each record at its end.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        shots: Iterable[Shot],
        *,
        timeout_s: float,
        path: str = "/v1/completions",
        until_s: float = math.inf,
        worker: int = 0,
        on_record: Callable[[Record], None] = lambda _: None,
        clock: Clock = monotonic,
    ) -> None:
        self._chains = chains(shots)
        self.state = LoadState(total=sum(map(len, self._chains)))
        self.heartbeat = Heartbeat()
        self.faults: list[str] = []
        """Always empty: a fault of this process ends the run itself."""
        self.cpu_s = 0.0
        """CPU time of this process over the run."""
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._path = path
        self._until_s = until_s
        self._worker = worker
        self._on_record = on_record
        self._clock = clock
        self._inbox = Inbox()

    @property
    def lags_s(self) -> list[float]:
        """The event loop's lags so far."""
        return self.heartbeat.lags_s

    async def run(self, stop: asyncio.Event, *, start_s: float | None = None) -> list[Record]:
        """Send everything on time and wait for every answer, or until `stop` is set.

        Args:
            stop: Ends the run; what is in flight is recorded as cancelled.
            start_s: The clock's reading that is the run's second 0; None is now.

        Returns:
            A record of each request that was dispatched, in order of index.
        """
        _raise_file_limit()
        with _quiet:
            cpu_before_s = time.process_time()
            heart = asyncio.create_task(self.heartbeat.beat(self._clock))
            stopped = asyncio.create_task(stop.wait())
            try:
                self.state.start(self._clock() if start_s is None else start_s)
                tasks = await self._dispatch(stopped)
                await self._drain(tasks, stopped)
            finally:
                await _cancel(heart, stopped)
                self.cpu_s = time.process_time() - cpu_before_s
        return sorted(self.state.done, key=lambda record: record.index)

    async def _dispatch(self, stopped: asyncio.Task[bool]) -> list[asyncio.Task[None]]:
        tasks: list[asyncio.Task[None]] = []
        for chain in self._chains:
            # Timers may fire a fraction of a millisecond early; a request may not.
            while (delay_s := chain[0].scheduled_s - self._now()) > 0 and not stopped.done():
                await asyncio.wait({stopped}, timeout=delay_s)
            if stopped.done():
                break
            self._count_in()
            tasks.append(asyncio.create_task(self._walk(chain)))
        return tasks

    async def _drain(self, tasks: list[asyncio.Task[None]], stopped: asyncio.Task[bool]) -> None:
        answers = asyncio.gather(*tasks)
        either: set[asyncio.Future[Any]] = {answers, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answers.done():
            # What a request cannot handle itself is a bug of this client, and must not pass.
            await answers
        await _cancel(answers, *tasks)

    async def _walk(self, chain: list[Shot]) -> None:
        """Send a chain's requests one after the other; the first was counted in already."""
        record = await self._shoot(chain[0], chain[0].scheduled_s)
        for shot in chain[1:]:
            ended_s = record.finished_s
            due_s = (self._now() if ended_s is None else ended_s) + shot.think_s
            if due_s > self._until_s:
                return
            while (delay_s := due_s - self._now()) > 0:  # noqa: ASYNC110  # early timers, as above
                await asyncio.sleep(delay_s)
            self._count_in()
            record = await self._shoot(shot, due_s)

    def _count_in(self) -> None:
        self.state.sent += 1
        self.state.in_flight += 1

    async def _shoot(self, shot: Shot, due_s: float) -> Record:
        record = blank_record(shot, scheduled_s=due_s, worker=self._worker)
        record.dispatched_s = self._now()
        try:
            await self._converse(shot, record)
        finally:
            # Also when cancelled: what is known is kept.
            record.finished_s = self._now() if record.finished_s is None else record.finished_s
            self.state.in_flight -= 1
            self.state.done.append(record)
            self._on_record(record)
        return record

    async def _converse(self, shot: Shot, record: Record) -> None:
        reading = Reading(record)
        deadline_s = self.state.started_s + record.scheduled_s + self._timeout_s
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(deadline_s - self._clock()):
                exchange = await open_exchange(
                    self._endpoint,
                    self._endpoint.request("POST", self._path, shot.body, shot.request_id),
                    _Listener(reading, self.state),
                    clock=self._clock,
                    inbox=self._inbox,
                )
                record.sent_s = self._since_start(exchange.sent_s)
                await exchange.done
            reading.conclude(exchange.status)
        except TimeoutError:
            fail(record, "timeout", f"not complete {self._timeout_s:g} s after its time")
        except (WireError, *BAD_BYTES) as error:
            fail(record, "stream", str(error))
        except OSError as error:
            kind = "client" if error.errno in OUR_OWN_LIMITS else "connect"
            fail(record, kind, str(error))
        finally:
            if exchange is not None:
                # An error event's own status, where it had one, says more than the stream's 200.
                record.http_status = record.http_status or exchange.status
                exchange.close()

    def _now(self) -> float:
        return self._clock() - self.state.started_s

    def _since_start(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - self.state.started_s


class _Listener:
    """Hands an exchange's body bytes to the reading."""

    def __init__(self, reading: Reading, state: LoadState) -> None:
        self._reading = reading
        self._state = state

    def __call__(self, exchange: Exchange, data: bytes) -> None:
        """Take body bytes; never raises, since it is called from within the HTTP parser."""
        if exchange.status != 200:
            self._reading.refuse(data)
            return
        try:
            at_s = exchange.read_s - self._state.started_s
            self._state.chunks += self._reading.feed(at_s, data)
        except BAD_BYTES as error:
            exchange.fail(SseError(f"bad event: {error}"))
            return
        if self._reading.has_ended:
            # The answer is whole; a peer that then keeps the connection open is not waited for.
            asyncio.get_running_loop().call_later(LINGER_S, exchange.finish)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Quiet:
    """Keeps garbage collection and other threads away from what is measured.

    Both settings are the process's: the first of several loads that overlap sets them, and the
    last one out puts back what the first found. (Were each to put back what it found itself, two
    that do not end in turn would leave the process with a load's settings.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = 0
        self._usual_switch_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._held += 1
            if self._held > 1:
                return
            # Garbage made while preparing is swept now, not inside a measured chunk.
            gc.collect()
            gc.freeze()
            self._usual_switch_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_S)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._held -= 1
            if self._held == 0:
                sys.setswitchinterval(self._usual_switch_s)
                gc.unfreeze()


_quiet = _Quiet()


def _raise_file_limit() -> None:
    """An open loop holds as many sockets as the server is slow: take all the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
