"""The Locust driver: `locust -f $(python -m tailrace.bench.locustfile) --host http://...`.

Locust brings the process, the users and the web UI; requests, clocks and records are ours, and the
same as those of our own driver (`tailrace bench replay`).

    --loop closed    `ChatUser`s: send, read the whole answer, pause, send again (-u says how many)
    --loop open      one `Dispatcher` sends every request at its scheduled time and never waits

The web UI shows three rows: TTFT and E2E, from the moment that a request was due, and ITL, each gap
between chunks; a failed request is a failure of E2E. Locust rounds what it shows (147 ms is 150):
exact percentiles come from `records.jsonl`, and stand in `summary.json` and on the terminal.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import gevent
import msgspec
from locust import LoadTestShape, User, events
from locust import __version__ as locust_version
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner
from rich.console import Console

from tailrace.bench.locust_events import Reporter
from tailrace.bench.locust_options import (
    add_arguments,
    given_plan,
    limits_of,
    made_folder,
    make_plan,
    wanted_of,
)
from tailrace.bench.locust_outcome import EXIT_CONFIG, Clients, ClientState, exit_code, judged
from tailrace.bench.locust_plan import (
    Plan,
    Stage,
    Think,
    Wanted,
    read_plan,
    read_stages,
    read_think,
    users_at,
)
from tailrace.bench.locust_run import LocustRun
from tailrace.bench.locust_sse import StreamClient, client_tls
from tailrace.bench.machine import CpuTimes, cpu_times
from tailrace.bench.records import Record, read_records, to_line
from tailrace.bench.table import print_run
from tailrace.clock import monotonic
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from locust.env import Environment

    from tailrace.bench.load.shot import Shot

log = logging.getLogger("tailrace")

IDLE_CHECK_S = 0.05
LEAD_S = 0.25
"""From a test's start until an open loop's second 0."""
WORKERS_LEAD_S = 2.0
"""The same with several processes, each of which reads the plan first."""
WORKERS_END_S = 15.0
"""How long the master waits for its workers' last words."""
SHARE_DONE = "tailrace-share-done"
RECORDS = "records.jsonl"
NEXT_RUN_SEED = 1_000_003
"""Added for each later run of the web UI, so that no prompt is sent twice."""


class Stages(LoadTestShape):  # type: ignore[misc]  # Locust's classes are Any to mypy
    """Users over time, as `--shape` says."""

    abstract = True  # Locust would otherwise use it whether `--shape` is given or not

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        super().__init__()
        self._stages = stages

    def tick(self) -> tuple[int, float] | None:
        """Return how many users there should be now; Locust asks once a second."""
        users = users_at(self._stages, self.get_run_time())
        return None if users is None else (users, max(users, 1))


class ChatUser(User):  # type: ignore[misc]
    """A closed-loop user: reads the whole answer, pauses, and sends the next request.

    Latency counts from the moment its pause was over.
    """

    def on_start(self) -> None:
        """Take a number; the first request is due at once."""
        self._number, self._rng = driver.enrol()
        self._due_s: float | None = None
        self._last_s = 0.0

    def wait_time(self) -> float:
        """Return the pause, which begins where the answer ended."""
        self._due_s = self._last_s + driver.think.draw(self._rng)
        return max(self._due_s - driver.running().now_s(), 0.0)

    def ask(self) -> None:
        """Send the next prepared request, or the turns of a session."""
        run = driver.running()
        chain = run.next_chain()
        if chain is None:
            driver.on_all_sent()
            raise StopUser
        due_s = run.now_s() if self._due_s is None else self._due_s
        run.wait_until(due_s)
        record = run.walk(chain, due_s, self._number)
        self._last_s = record.finished_s or run.now_s()

    tasks: ClassVar = [ask]


class Dispatcher(User):  # type: ignore[misc]
    """The open loop: one "user" that sends every request at its scheduled time."""

    def dispatch(self) -> None:
        """Send everything, then end the test."""
        if driver.claim_dispatch():
            driver.running().dispatch()
            driver.end_test()
        raise StopUser

    tasks: ClassVar = [dispatch]


class Share(msgspec.Struct):
    """What the master tells its workers, with Locust's own message that starts users."""

    plan: str
    folder: str
    workers: int
    start_s: float
    """On the machine's monotonic clock."""
    boot: str
    """Which machine, and since when: the clock means nothing to another."""


class Driver:
    """What the users of this process share: the plan, the run and its outcome."""

    def __init__(self) -> None:
        self.think = Think(0.0, 0.0)
        self._environment: Environment = None
        self._run: LocustRun | None = None
        """None: there is no run, or this is the master, whose workers run."""
        self._share = (0, 1)
        self._plan: Plan | None = None
        """Of the run that goes on."""
        self._prepared: tuple[Wanted, Plan, list[Shot]] | None = None
        self._records = -1
        self._reporter: Reporter | None = None
        self._folder = Path()
        self._runs = 0
        self._users = 0
        self._is_dispatched = False
        self._is_ending = False
        self._shares_done: set[int] = set()
        self._cpu_before: CpuTimes | None = None

    @property
    def _is_master(self) -> bool:
        return isinstance(self._environment.runner, MasterRunner)

    @property
    def _is_worker(self) -> bool:
        return isinstance(self._environment.runner, WorkerRunner)

    # Locust's events

    def on_init(self, environment: Environment, **_: Any) -> None:
        """Check the arguments and, where the test starts by itself, prepare before its time runs.

        A bad argument ends Locust with one line and exit status 2.
        """
        self._environment = environment
        options = environment.parsed_options
        if self._is_worker:
            return
        if self._is_master:
            environment.runner.register_message(SHARE_DONE, self._on_share_done)
        try:
            self._check(options)
            if options.headless or options.autostart:
                self._prepare()
        except ConfigError as error:
            log.error("%s", error)  # noqa: TRY400  # a user's mistake needs no traceback
            sys.exit(EXIT_CONFIG)

    def on_test_start(self, **_: Any) -> None:
        """Begin a run; users are spawned when this returns."""
        try:
            if self._is_worker:
                self._begin_share()
            else:
                self._begin()
        except ConfigError as error:
            log.error("%s", error)  # noqa: TRY400  # a user's mistake needs no traceback
            self._environment.process_exit_code = EXIT_CONFIG
            self.end_test()

    def on_test_stop(self, **_: Any) -> None:
        """End the run: records of what is in flight, events, exact percentiles."""
        if self._run is not None:
            self._finish_share(self._run)
        # A headless master tells its workers to end only after this event.
        if not self._is_worker and not (self._is_master and self._is_headless()):
            self._conclude()

    def on_quitting(self, **_: Any) -> None:
        """End what an interrupt or a signal has left running, and have the exit status."""
        if self._is_worker or self._plan is None:
            return
        self._environment.runner.quit()
        self._conclude()

    # What users call

    def running(self) -> LocustRun:
        """Return the run.

        Raises:
            StopUser: There is none: it could not be prepared, or has ended.
        """
        if self._run is None:
            raise StopUser
        return self._run

    def enrol(self) -> tuple[int, random.Random]:
        """Return a user's number, unlike that of any other process's, and its randomness."""
        index, workers = self._share
        number = self._users * workers + index
        self._users += 1
        return number, random.Random(f"{self._environment.parsed_options.seed}:user:{number}")

    def claim_dispatch(self) -> bool:
        """Return True to the first dispatcher of a run, and False to any other."""
        first, self._is_dispatched = not self._is_dispatched, True
        return first

    def on_all_sent(self) -> None:
        """End the test once every user has its answer: prompts are not sent twice."""
        if not self._is_ending:
            self._is_ending = True
            log.warning("all prepared requests are sent; for a longer test raise --max-requests")
            gevent.spawn(self._end_when_idle)

    def end_test(self) -> None:
        """Stop the test from outside its users, whom that kills; a worker asks its master to."""
        runner = self._environment.runner
        if self._is_worker:
            runner.send_message(SHARE_DONE, self._share[0])
        else:
            gevent.spawn(runner.quit if self._is_headless() else runner.stop)

    def _is_headless(self) -> bool:
        return bool(self._environment.parsed_options.headless)

    def _end_when_idle(self) -> None:
        while self._run is not None and not self._run.is_done:
            gevent.sleep(IDLE_CHECK_S)
        self.end_test()

    def _on_share_done(self, msg: Any, **_: Any) -> None:
        self._shares_done.add(msg.data)
        if len(self._shares_done) == self._share[1]:
            self.end_test()

    # Preparation

    def _check(self, options: Namespace) -> None:
        limits_of(options)
        if options.think_s:
            read_think(options.think_s)
        loop = read_plan(Path(options.plan))[0].loop if options.plan else options.loop
        self._environment.user_classes = [Dispatcher if loop == "open" else ChatUser]
        if loop == "open" and self._is_master and options.num_users is None:
            options.num_users = options.expect_workers
        if options.shape:
            if loop == "open":
                raise ConfigError("--shape: an open loop has no users; take --loop closed")
            stages = Stages(read_stages(options.shape))
            stages.runner = self._environment.runner
            self._environment.shape_class = stages

    def _prepare(self) -> tuple[Plan, list[Shot]]:
        """Return this run's plan, made by a process of its own unless it is there already."""
        options = self._environment.parsed_options
        name = options.out if self._runs == 0 else f"{options.out}-{self._runs + 1}"
        self._folder = made_folder(name)
        file = self._plan_file()
        if options.plan:
            return given_plan(file, self._environment.host)
        wanted = wanted_of(
            options, self._environment.host, options.seed + self._runs * NEXT_RUN_SEED
        )
        if self._prepared is None or self._prepared[0] != wanted:
            make_plan(wanted, file, options.api_key)
            self._prepared = (wanted, *read_plan(file))
        return self._prepared[1:]

    def _plan_file(self) -> Path:
        given = self._environment.parsed_options.plan
        return Path(given) if given else self._folder / "plan.jsonl"

    def _begin(self) -> None:
        """Begin a run in this process, or as master in the workers."""
        runner, options = self._environment.runner, self._environment.parsed_options
        limits_of(options)  # the web UI may have changed them
        plan, shots = self._prepare()
        for stale in (self._folder / RECORDS, *self._folder.glob("client-*.json")):
            stale.unlink(missing_ok=True)
        self._runs += 1
        self._cpu_before = cpu_times()
        if not self._is_master:
            lead_s = LEAD_S if plan.loop == "open" else 0.0
            self._start(plan, shots, (0, 1), lead_s=lead_s)
            return
        workers = runner.worker_count
        if plan.loop == "open" and runner.target_user_count < workers:
            raise ConfigError(f"-u {runner.target_user_count}: give one for each worker, {workers}")
        share = Share(
            plan=str(self._plan_file().resolve()),
            folder=str(self._folder.resolve()),
            workers=workers,
            start_s=monotonic() + (WORKERS_LEAD_S if plan.loop == "open" else 0.0),
            boot=_boot(),
        )
        # Custom options travel to the workers.
        options.tailrace_share = msgspec.to_builtins(share)
        self._plan, self._share, self._shares_done = plan, (0, workers), set()

    def _begin_share(self) -> None:
        """Begin a worker's share of what the master has prepared."""
        runner, options = self._environment.runner, self._environment.parsed_options
        share = msgspec.convert(options.tailrace_share, Share)
        if share.boot != _boot():
            raise ConfigError("a worker on another machine: its clock differs; take --processes")
        if not 0 <= runner.worker_index < share.workers:
            raise ConfigError(
                f"worker {runner.worker_index} of {share.workers}: one was lost; start Locust anew"
            )
        self._folder = Path(share.folder)
        plan, shots = read_plan(Path(share.plan))
        lead_s = share.start_s - monotonic()
        self._start(plan, shots, (runner.worker_index, share.workers), lead_s=lead_s)

    def _start(
        self, plan: Plan, shots: list[Shot], share: tuple[int, int], *, lead_s: float
    ) -> None:
        options = self._environment.parsed_options
        self.think = read_think(options.think_s or plan.think_s or "0")
        tls = client_tls() if plan.is_tls else None
        endpoint = plan.endpoint(options.api_key)
        client = StreamClient(endpoint, timeout_s=options.request_timeout_s, tls=tls)
        # Every process appends whole lines, so that they share one file.
        self._records = os.open(
            self._folder / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
        self._reporter = Reporter(self._environment.events.request.fire)
        self._run = LocustRun(endpoint, client, shots, on_record=self._on_record, share=share)
        self._plan, self._share = plan, share
        self._users, self._is_dispatched, self._is_ending = 0, False, False
        # Locust looks at the stack when it stops a test. The first look reads every module's
        # source and blocks all streams for some 40 ms: it is taken here, before any stream.
        inspect.stack()
        self._run.start(monotonic() + lead_s)

    # The outcome

    def _on_record(self, record: Record) -> None:
        os.write(self._records, to_line(record))
        if self._reporter is not None:
            self._reporter.add(record)

    def _finish_share(self, run: LocustRun) -> None:
        self._run = None
        run.finish()
        if self._reporter is not None:
            self._reporter.finish()
        os.close(self._records)
        state = ClientState(lags_s=run.lags_s, requests=run.state.total, is_done=run.is_done)
        file = self._folder / f"client-{run.worker}.json"
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(state))
        part.replace(file)

    def _conclude(self) -> None:
        """Write and print what the records say, once every process has ended its share."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        clients = Clients(
            ended=self._clients(),
            processes=self._share[1],
            driver=f"Locust {locust_version}",
            cpu_before=self._cpu_before,
        )
        options = self._environment.parsed_options
        file = self._folder / RECORDS
        run = judged(plan, options, read_records(file) if file.exists() else [], clients)
        (self._folder / "summary.json").write_text(run.summary_json(), encoding="utf-8")
        print_run(run, Console(stderr=True))
        self._environment.process_exit_code = exit_code(run, options.max_failures)

    def _clients(self) -> list[ClientState]:
        """Return how each process ended, waiting for workers to say so."""
        until_s = monotonic() + WORKERS_END_S
        files = [self._folder / f"client-{index}.json" for index in range(self._share[1])]
        while self._is_master and not all(map(Path.exists, files)) and monotonic() < until_s:
            gevent.sleep(IDLE_CHECK_S)
        found = [
            msgspec.json.decode(file.read_bytes(), type=ClientState)
            for file in files
            if file.exists()
        ]
        for file in files:
            file.unlink(missing_ok=True)
        return found


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


driver = Driver()


events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(driver.on_init)
events.test_start.add_listener(driver.on_test_start)
events.test_stop.add_listener(driver.on_test_stop)
events.quitting.add_listener(driver.on_quitting)

if __name__ == "__main__":
    print(Path(__file__).resolve())  # noqa: T201  # what `locust -f` takes
