"""One measured trial of one server: the part that a replay, a search and a comparison share.

    schedule + prompts -> shots -> load -> records.jsonl, as they come
    monitor ------------------------------> monitor.jsonl
    both -> figures, and a verdict on whether they may be believed

Prompts, and whatever else takes thought, were made before; nothing here but sends and stamps.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.bench import machine
from tailrace.bench.limits import check_timeout
from tailrace.bench.load import Shot, loader_for, new_run_id, processes_for
from tailrace.bench.records import to_line
from tailrace.bench.run import Run, goodput_limits
from tailrace.bench.scrape import Scrape
from tailrace.bench.stats import Limits, summarise
from tailrace.bench.target import completion_body
from tailrace.bench.validity import Observed, judge
from tailrace.clock import monotonic
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Self

    from tailrace.bench.limits import Limit
    from tailrace.bench.load import Loader, LoadState
    from tailrace.bench.monitor import Monitor, Reading
    from tailrace.bench.prompts import Prompt
    from tailrace.bench.records import Record
    from tailrace.bench.target import Target
    from tailrace.bench.traffic.schedule import Arrival, Schedule
    from tailrace.bench.wire import Endpoint

RECORDS = "records.jsonl"
MONITOR = "monitor.jsonl"


@dataclass(frozen=True)
class Server:
    """Who is measured."""

    endpoint: Endpoint
    target: Target
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields added to every request's body, over ours; None takes a field out."""
    monitor: Monitor | None = None


@dataclass(frozen=True)
class Work:
    """What is asked of it."""

    schedule: Schedule
    prompts: Sequence[Prompt]
    """One for each arrival, in order."""
    users: int = 0
    """Closed loop; 0 is open loop."""
    seed: int = 0
    """Of the sampling: request i asks for seed + i."""

    def __post_init__(self) -> None:
        """Check that every arrival has its prompt, and in a closed loop its user.

        Raises:
            ValueError: It has not.
        """
        if len(self.prompts) != len(self.schedule.arrivals):
            raise ValueError(
                f"{len(self.prompts)} prompts for {len(self.schedule.arrivals)} arrivals"
            )
        if self.users and any(arrival.user is None for arrival in self.schedule.arrivals):
            raise ValueError("a closed loop whose requests have no users")


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """How it is measured."""

    temperature: float = 0.7
    timeout_s: float = 600.0
    """A request not complete so long after it was due has failed."""
    max_lag_s: float = 0.1
    """The client's p99 lag beyond which the trial is invalid."""
    limits: tuple[Limit, ...] = ()
    processes: int = 0
    """Client processes; 0 takes as many as the offered load needs."""
    ignore_eos: bool = True
    goodput: Limits = field(default_factory=Limits)
    """A further set of bounds on each request, for goodput."""

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: A value is out of range.
        """
        if not self.timeout_s > 0:
            raise ConfigError(f"--timeout {self.timeout_s}: must be above 0")
        if not self.max_lag_s > 0:
            raise ConfigError(f"--max-lag {self.max_lag_s}: must be above 0")
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"--temperature {self.temperature}: must be 0 to 2")
        if self.processes < 0:
            raise ConfigError(f"--processes {self.processes}: must be 0 (automatic) or above")
        check_timeout(self.limits, self.timeout_s)


async def run_trial(
    server: Server,
    work: Work,
    folder: Path,
    options: TrialOptions,
    *,
    stop: asyncio.Event,
    on_state: Callable[[LoadState], None] = lambda _: None,
) -> Run:
    """Measure, and leave `records.jsonl` and `monitor.jsonl` in `folder`.

    Args:
        server: Who is measured; it must be ready and warm.
        work: What is sent.
        folder: Is made where it is missing; what a trial before left in it is replaced.
        options: How it is measured.
        stop: Ends the trial early; what was measured is kept, and the verdict says so.
        on_state: Called once, before the start, with the state that then changes as the load goes.

    Returns:
        The run, without title and conditions but for those of the client.

    Raises:
        ConfigError: The folder cannot be written to, or client processes did not start.
    """
    _make(folder)
    processes = options.processes or _processes(work)
    with _Files(folder) as files:
        loader = loader_for(
            server.endpoint,
            make_shots(server, work, options),
            processes=processes,
            timeout_s=options.timeout_s,
            until_s=work.schedule.duration_s if work.users else math.inf,
            on_record=files.keep,
        )
        on_state(loader.state)
        watcher = asyncio.create_task(_watch(server.monitor, loader, files))
        starting = asyncio.create_task(_Moment.of_start(loader.state))
        try:
            records = await loader.run(stop)
            end = _Moment.now()
        finally:
            watcher.cancel()
            if not loader.state.has_started.is_set():
                starting.cancel()
            broken, start = await asyncio.gather(watcher, starting, return_exceptions=True)
    if isinstance(start, BaseException):  # what is interrupted before its start ends above
        raise start
    # Several processes count their own time; this one's is that of the messages between them.
    own_s = end.own_s - start.own_s + (loader.cpu_s if processes > 1 else 0.0)
    used_s = files.cpu_s(end.at_s - start.at_s, own_s)
    observed = Observed(
        loop_lags_s=loader.lags_s,
        steal_share=machine.steal_share(start.cpu, end.cpu),
        others_share=machine.others_share(start.cpu, end.cpu, used_s),
        is_interrupted=stop.is_set(),
        planned_requests=loader.state.total,
        client_faults=tuple(loader.faults),
        shared_tokens={i: prompt.shared_tokens for i, prompt in enumerate(work.prompts)},
        user_requests=Counter(a.user for a in work.schedule.arrivals if a.user is not None),
        server=files.scrapes.get("server", Scrape()),
        gpu=files.scrapes.get("gpu", Scrape()),
        longest_think_s=max((a.think_s for a in work.schedule.arrivals), default=0.0),
        arrivals_s=work.schedule.duration_s,
        governor=machine.governor(),
        monitor_fault="" if not isinstance(broken, Exception) else repr(broken),
    )
    stats = summarise(records, options.goodput)
    return Run(
        title="",
        conditions={"Client processes": str(processes)},
        records=records,
        stats=stats,
        verdict=judge(records, stats, observed, max_lag_s=options.max_lag_s),
        limits=options.goodput,
        limit=options.limits,
        goodput=goodput_limits(options.limits, options.goodput),
        duration_s=_arrivals_s(work.schedule, records, is_interrupted=stop.is_set()),
        scrape=files.scrapes.get("server", Scrape()),
        scrapes=files.scrapes,
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; give a folder to write to") from error


def make_shots(server: Server, work: Work, options: TrialOptions) -> list[Shot]:
    """Return every request of the work, its body made, its id unlike any other run's."""
    run_id = new_run_id()
    arrivals = work.schedule.arrivals
    before = _predecessors(arrivals)
    return [
        Shot(
            index,
            arrival.arrival_s,
            arrival.input_tokens,
            arrival.output_tokens,
            completion_body(
                server.target,
                prompt.text,
                arrival.output_tokens,
                temperature=options.temperature,
                seed=work.seed + index,
                priority=arrival.priority,
                ignore_eos=options.ignore_eos,
                extra_body=server.extra_body,
            ),
            request_id=f"tailrace-{run_id}-{index}",
            priority=arrival.priority,
            user=arrival.user,
            session=arrival.session,
            turn=arrival.turn,
            after=before[index],
            think_s=arrival.think_s,
        )
        for index, (arrival, prompt) in enumerate(zip(arrivals, work.prompts, strict=True))
    ]


def _predecessors(arrivals: Sequence[Arrival]) -> list[int | None]:
    """Return, for each arrival, the one whose answer it waits for."""
    latest: dict[tuple[str, int], int] = {}
    found: list[int | None] = []
    for index, arrival in enumerate(arrivals):
        chain = _chain(arrival)
        found.append(None if chain is None else latest.get(chain))
        if chain is not None:
            latest[chain] = index
    return found


def _chain(arrival: Arrival) -> tuple[str, int] | None:
    """Return what an arrival is a link of: its user's day, or its session."""
    if arrival.user is not None:
        return "user", arrival.user
    return None if arrival.session is None else ("session", arrival.session)


def _processes(work: Work) -> int:
    """Return how many client processes the work needs, if each token is a chunk."""
    arrivals = work.schedule.arrivals
    # A second at least: a handful of requests at once is no rate.
    span_s = max(work.schedule.duration_s, 1.0)
    tokens = sum(arrival.output_tokens for arrival in arrivals)
    return processes_for(tokens / span_s, len(arrivals) / span_s)


def _arrivals_s(schedule: Schedule, records: Sequence[Record], *, is_interrupted: bool) -> float:
    """Return how long requests arrived: the plan's time, or that of an interrupted trial."""
    if not is_interrupted:
        return schedule.duration_s
    return max((record.scheduled_s for record in records), default=0.0)


@dataclass(frozen=True)
class _Moment:
    """How much CPU time had been used by a moment."""

    cpu: machine.CpuTimes | None
    """Of this machine."""
    at_s: float
    own_s: float
    """Of this process."""

    @classmethod
    def now(cls) -> Self:
        """Read the counters."""
        return cls(machine.cpu_times(), monotonic(), time.process_time())

    @classmethod
    async def of_start(cls, state: LoadState) -> Self:
        """Read them once the load has started: that client processes start is not part of it."""
        await state.has_started.wait()
        # In a thread, as the kernel takes its time where there are many CPUs.
        return await asyncio.to_thread(cls.now)


class _Files:
    """What is measured, in files at once: it survives whatever happens to this process."""

    def __init__(self, folder: Path) -> None:
        self.scrapes: dict[str, Scrape] = {}
        self._folder = folder

    def __enter__(self) -> Self:
        self._records = (self._folder / RECORDS).open("wb")
        self._monitor = (self._folder / MONITOR).open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._records.close()
        self._monitor.close()

    def cpu_s(self, took_s: float, client_s: float) -> float | None:
        """Return the CPU time of server and client; None where the server's is not read."""
        cores = self.scrapes.get("process", Scrape()).values.get("cpu_cores", ())
        known = [value for value in cores if not math.isnan(value)]
        return client_s + fmean(known) * took_s if known else None

    def keep(self, record: Record) -> None:
        """Keep one record."""
        self._records.write(to_line(record))
        self._records.flush()

    def add(self, reading: Reading) -> None:
        """Keep one reading, also by its source."""
        self._monitor.write(msgspec.json.encode(reading) + b"\n")
        self._monitor.flush()
        self.scrapes.setdefault(reading.source, Scrape()).add(reading.at_s, reading.values)


async def _watch(monitor: Monitor | None, loader: Loader, files: _Files) -> None:
    """Read the monitor from the load's start on, in the load's time."""
    if monitor is None:
        return
    state = loader.state
    await state.has_started.wait()
    await monitor.watch(lambda: monotonic() - state.started_s, files.add)
