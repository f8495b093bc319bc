"""Several client processes that count as one: one start, one stream of records, one verdict.

A single event loop reads so many chunks a second and no more; beyond it, first tokens are stamped
late and the client is what gets measured. The chains of a run are dealt out in turn, each process
sends its share against one common start (CLOCK_MONOTONIC is the machine's), and records come back
through a pipe as they end. A process that dies makes the run invalid: what it had left is recorded
as the client's failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tailrace.bench.load.client import Load
from tailrace.bench.load.messages import (
    Bye,
    Go,
    Halt,
    Job,
    Outcome,
    Pulse,
    Ready,
    ToParent,
    pack,
    read_report,
)
from tailrace.bench.load.reading import fail
from tailrace.bench.load.shot import Shot, blank_record, chains
from tailrace.bench.load.state import LoadState
from tailrace.bench.stats import percentile
from tailrace.clock import monotonic
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from tailrace.bench.records import Record
    from tailrace.bench.wire import Endpoint

CHUNKS_PER_S_OF_ONE = 4000.0
"""Chunks a second from which on a second process is worth its start: less than one process can
read, by far. On two shared cores one read 4,800 chunks/s that came in bursts of 240, and 35,000
that came spread out, with 5 ms of added lag at p99 (benchmarks/client_ceiling.py)."""
REQUEST_IN_CHUNKS = 20.0
"""What opening a connection and making a request costs, in chunks."""
READY_TIMEOUT_S = 60.0
SILENCE_S = 30.0
"""A worker tells how it stands four times a second; one silent for so long is given up."""
_DYING_S = 1.0
"""From the end of a process's reports to the end of the process, at most; then it is killed."""
LEAD_S = 0.1
"""From the order to start until the start, so that it reaches every worker before."""


class Loader(Protocol):
    """What a trial needs of a load, whether one process or several."""

    state: LoadState
    faults: list[str]
    """What went wrong with the client itself; any makes the run invalid."""
    cpu_s: float
    """CPU time of the client, once it has run."""

    @property
    def lags_s(self) -> list[float]:
        """Event-loop lags of the client process that was latest, by their 99th percentile."""
        ...

    async def run(self, stop: asyncio.Event) -> list[Record]:
        """Send everything; return the records in order of index."""
        ...


def processes_for(
    chunks_per_s: float, requests_per_s: float = 0.0, *, cores: int | None = None
) -> int:
    """Return how many client processes an offered load needs, never more than there are cores."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    work_per_s = chunks_per_s + requests_per_s * REQUEST_IN_CHUNKS
    return max(math.ceil(min(work_per_s / CHUNKS_PER_S_OF_ONE, cores)), 1)


def loader_for(
    endpoint: Endpoint,
    shots: Sequence[Shot],
    *,
    processes: int,
    timeout_s: float,
    path: str = "/v1/completions",
    until_s: float = math.inf,
    on_record: Callable[[Record], None] = lambda _: None,
) -> Loader:
    """Return a load within this process, or a fleet of `processes` others."""
    if processes <= 1:
        return Load(
            endpoint, shots, timeout_s=timeout_s, path=path, until_s=until_s, on_record=on_record
        )
    return Fleet(
        endpoint,
        shots,
        processes=processes,
        timeout_s=timeout_s,
        path=path,
        until_s=until_s,
        on_record=on_record,
    )


@dataclass
class _Worker:
    """One client process, as its parent sees it."""

    number: int
    process: asyncio.subprocess.Process
    missing: dict[int, Shot]
    """Its shots without a record."""
    pulse: Pulse = field(default_factory=lambda: Pulse(0, 0, 0, []))
    lags_s: list[float] = field(default_factory=list)
    has_ended: bool = False
    """It said good-bye."""

    async def tell(self, *messages: Job | Go | Halt) -> None:
        """Send orders; one that is gone does not hear them, which its reports' end will tell."""
        assert self.process.stdin is not None  # noqa: S101  # a pipe was asked for
        with contextlib.suppress(ConnectionError):
            for message in messages:
                self.process.stdin.write(pack(message))
            await self.process.stdin.drain()

    async def hear(self) -> ToParent | None:
        """Return its next report; None where it died or fell silent."""
        assert self.process.stdout is not None  # noqa: S101  # a pipe was asked for
        try:
            async with asyncio.timeout(SILENCE_S):
                return await read_report(self.process.stdout)
        except TimeoutError:
            return None


class Fleet:
    """One run of shots against one endpoint, from several processes; arguments as `Load`'s."""

    def __init__(
        self,
        endpoint: Endpoint,
        shots: Iterable[Shot],
        *,
        processes: int,
        timeout_s: float,
        path: str = "/v1/completions",
        until_s: float = math.inf,
        on_record: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self._shares = _deal(chains(shots), processes)
        self.state = LoadState(total=sum(map(len, self._shares)))
        self.faults: list[str] = []
        self.cpu_s = 0.0
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._path = path
        self._until_s = until_s
        self._on_record = on_record
        self._workers: list[_Worker] = []
        self._is_stopping = False

    @property
    def lags_s(self) -> list[float]:
        """Event-loop lags of the latest process: eight calm ones must not hide it."""
        every = (worker.lags_s for worker in self._workers)
        return max(every, key=lambda lags_s: percentile(sorted(lags_s) or [0.0], 99), default=[])

    async def run(self, stop: asyncio.Event) -> list[Record]:
        """Send everything on time and wait for every answer, or until `stop` is set.

        Returns:
            A record of each request that was dispatched, and of each that a dead process owed, in
            order of index.

        Raises:
            ConfigError: The client processes did not start.
        """
        try:
            await self._start()
            halter = asyncio.create_task(self._halt_at(stop))
            try:
                await _all(self._attend(worker) for worker in self._workers)
            finally:
                halter.cancel()
                await asyncio.gather(halter, return_exceptions=True)
        finally:
            await self._end()
        return sorted(self.state.done, key=lambda record: record.index)

    async def _start(self) -> None:
        for number, share in enumerate(self._shares):
            self._workers.append(await _spawn(number, share))
        pairs = zip(self._workers, self._shares, strict=True)
        await _all(self._prepare(worker, share) for worker, share in pairs)
        self.state.start(monotonic() + LEAD_S)
        for worker in self._workers:
            await worker.tell(Go(self.state.started_s))

    async def _prepare(self, worker: _Worker, share: list[Shot]) -> None:
        endpoint = self._endpoint
        job = Job(
            worker=worker.number,
            url=endpoint.url,
            host=endpoint.host,
            address=endpoint.address,
            port=endpoint.port,
            has_tls=endpoint.tls is not None,
            api_key=endpoint.api_key,
            path=self._path,
            timeout_s=self._timeout_s,
            until_s=None if math.isinf(self._until_s) else self._until_s,
            shots=share,
        )
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await worker.tell(job)
                answer = await worker.hear()
        except TimeoutError:
            answer = None
        if not isinstance(answer, Ready):
            raise ConfigError(
                f"client process {worker.number} did not start: see what it wrote above; run "
                "with one process (--processes 1), or free memory and CPU"
            )

    async def _halt_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._is_stopping = True
        for worker in self._workers:
            await worker.tell(Halt())

    async def _attend(self, worker: _Worker) -> None:
        """Take a worker's reports to their end."""
        while (report := await worker.hear()) is not None:
            if isinstance(report, Outcome):
                worker.missing.pop(report.record.index, None)
                self._keep(report.record)
            elif isinstance(report, Pulse):
                worker.pulse = report
                worker.lags_s += report.lags_s
                self._count()
            elif isinstance(report, Bye):
                worker.has_ended = True
                self.cpu_s += report.cpu_s
        if not worker.has_ended:
            await self._mourn(worker)

    async def _mourn(self, worker: _Worker) -> None:
        # One that is dead is waited for first: kill() would take its status before asyncio does.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DYING_S):
                await worker.process.wait()
        status = worker.process.returncode
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            status = await worker.process.wait()
        owed = [] if self._is_stopping else list(worker.missing.values())
        self.faults.append(
            f"client process {worker.number} died (status {status}) with {len(owed)} of its "
            "requests open"
        )
        ended_s = monotonic() - self.state.started_s
        for shot in owed:
            record = blank_record(shot, worker=worker.number)
            record.finished_s = max(ended_s, record.scheduled_s)
            fail(record, "client", f"client process {worker.number} died (status {status})")
            self._keep(record)
        worker.pulse = Pulse(worker.pulse.sent, 0, worker.pulse.chunks, [])
        self._count()

    def _keep(self, record: Record) -> None:
        self.state.done.append(record)
        self._on_record(record)

    def _count(self) -> None:
        pulses = [worker.pulse for worker in self._workers]
        self.state.sent = sum(pulse.sent for pulse in pulses)
        self.state.in_flight = sum(pulse.in_flight for pulse in pulses)
        self.state.chunks = sum(pulse.chunks for pulse in pulses)

    async def _end(self) -> None:
        """Leave no process behind, whatever happened."""
        for worker in self._workers:
            if worker.process.stdin is not None:
                worker.process.stdin.close()
        for worker in self._workers:
            try:
                async with asyncio.timeout(5.0):
                    await worker.process.wait()
            except TimeoutError:
                worker.process.kill()
                await worker.process.wait()


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await everything at once; the first error ends the rest, and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _spawn(number: int, share: list[Shot]) -> _Worker:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tailrace.bench.load.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # What a Ctrl-C in the terminal means is this process's to say.
        start_new_session=True,
    )
    return _Worker(number, process, {shot.index: shot for shot in share})


def _deal(dealt: list[list[Shot]], processes: int) -> list[list[Shot]]:
    """Deal chains out in turn, so that every process has as much to do at any time."""
    hands = max(min(processes, len(dealt)), 1)
    return [[shot for chain in dealt[number::hands] for shot in chain] for number in range(hands)]
