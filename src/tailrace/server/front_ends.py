"""Several front ends on one port: the process that watches them, and owns the engine.

    watcher --+-- engine           started and restarted as ever (bridge.py)
              +-- front end 0 --.
              '-- front end 1 --+--- each talks to the engine itself
    clients -- the port: the kernel deals connections out (SO_REUSEPORT)

Rules
1. A front end that dies is started again; what it asked for is ended at the engine at once.
2. What must be counted over all of them is counted at the engine: the places (a request beyond the
   cap is refused there), who is served first, and how much each front end has there.
3. SIGTERM drains all; a second one ends all. The engine goes last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog

from tailrace.clock import monotonic
from tailrace.errors import ConfigError, EngineError
from tailrace.server import listening, serve
from tailrace.server.bridge import GRACE_S, HEALTHY_LIFE_S, Bridge, silence_limit_s
from tailrace.server.orders import Drain, EngineDown, EngineUp, Family, Serving, Start, Word
from tailrace.server.supervisor import Launcher
from tailrace.telemetry.metrics import SHARED_FOLDER_VARIABLE

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Sequence
    from pathlib import Path

    from tailrace.config import Config
    from tailrace.server.orders import Order
    from tailrace.server.supervisor import EngineProcess

log = structlog.get_logger("tailrace.front_ends")

WORKER = (sys.executable, "-m", "tailrace.server.api_worker")
MAX_FAILED_STARTS = 5
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0


@dataclass(eq=False)
class _FrontEnd:
    """One life of one front end."""

    index: int
    identity: str
    process: Process
    started_s: float
    is_serving: bool = False

    def tell(self, order: Order) -> None:
        """Send an order; one that has died does not hear it."""
        stdin = self.process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(msgspec.json.encode(order) + b"\n")

    def kill(self) -> None:
        """End it now."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class FrontEnds:
    """Starts, watches and drains the front ends.

    Args:
        config: Theirs, and how many.
        port: That they listen on.
        metrics_folder: Where they keep what they count.
        command: What to run.
    """

    def __init__(
        self, config: Config, port: int, metrics_folder: Path, command: Sequence[str] = WORKER
    ) -> None:
        self.restarts = 0
        self.model = ""
        self._config = config
        self._port = port
        self._metrics_folder = metrics_folder
        self._command = command
        self._alive: dict[int, _FrontEnd] = {}
        self._engine: EngineUp | None = None
        self._bridge: Bridge | None = None
        self._draining = asyncio.Event()
        self._all_serve = asyncio.Event()

    async def run(self, bridge: Bridge) -> None:
        """Keep all of them alive; returns once they have drained.

        Raises:
            EngineError: One cannot be started.
        """
        self._bridge = bridge
        async with asyncio.TaskGroup() as group:
            for index in range(self._config.server.api_workers):
                group.create_task(self._keep_alive(index))

    async def wait_serving(self) -> None:
        """Wait until each of them serves."""
        await self._all_serve.wait()

    def engine_is_up(self, engine: EngineProcess) -> None:
        """Tell them of an engine."""
        self._engine = EngineUp(str(engine.socket_path), engine.pid, engine.number)
        self._tell_all(self._engine)

    def engine_is_down(self, number: int) -> None:
        """Tell them of its end."""
        if self._engine is not None and self._engine.number == number:
            self._engine = None
        self._tell_all(EngineDown(number))

    def drain(self) -> None:
        """Have them end; called again, at once."""
        self._draining.set()
        self._tell_all(Drain())

    def kill(self) -> None:
        """End what is left of them."""
        self._draining.set()
        for front_end in self._alive.values():
            front_end.kill()

    async def _keep_alive(self, index: int) -> None:
        failed = short = life = 0
        while not self._draining.is_set():
            life += 1
            front_end = await self._start(index, life)
            status = await self._attend(front_end)
            del self._alive[index]
            if self._bridge is not None:
                self._bridge.forget_frontend(front_end.identity)
            if self._draining.is_set():
                return
            failed = 0 if front_end.is_serving else failed + 1
            if failed >= MAX_FAILED_STARTS:
                raise EngineError(
                    f"front end {index} ended {failed} times before it served anything; at last "
                    f"with status {status}"
                )
            lived_s = monotonic() - front_end.started_s
            short = 0 if lived_s > HEALTHY_LIFE_S else short + 1
            self.restarts += 1
            log.error("front_end_restarts", index=index, status=status, total=self.restarts)
            backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**short / 2)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), backoff_s)

    async def _start(self, index: int, life: int) -> _FrontEnd:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            env=os.environ | {SHARED_FOLDER_VARIABLE: str(self._metrics_folder)},
        )
        front_end = _FrontEnd(index, f"frontend-{index}-{life}", process, monotonic())
        joins = any(other.is_serving for other in self._alive.values())
        self._alive[index] = front_end
        front_end.tell(Start(index, front_end.identity, self._config, self._port, joins))
        if self._engine is not None:
            front_end.tell(self._engine)
        pids = {f"frontend-{i}": other.process.pid for i, other in sorted(self._alive.items())}
        self._tell_all(Family({"watcher": os.getpid(), **pids}, self.restarts))
        if self._draining.is_set():
            front_end.tell(Drain())
        return front_end

    async def _attend(self, front_end: _FrontEnd) -> int:
        """Listen to one until it ends; return its exit status."""
        words = front_end.process.stdout
        while words is not None and (line := await words.readline()):
            with contextlib.suppress(msgspec.DecodeError):  # somebody's stray print
                self._hear(front_end, msgspec.json.decode(line, type=Word))
        return await front_end.process.wait()

    def _hear(self, front_end: _FrontEnd, word: Serving) -> None:
        front_end.is_serving = True
        self.model = word.model
        all_of_them = len(self._alive) == self._config.server.api_workers
        if all_of_them and all(other.is_serving for other in self._alive.values()):
            self._all_serve.set()

    def _tell_all(self, order: Order) -> None:
        for front_end in self._alive.values():
            front_end.tell(order)


class _TellingLauncher(Launcher):
    """A launcher that tells the front ends of what it launches."""

    front_ends: FrontEnds
    _ends: set[asyncio.Task[None]]

    async def launch(self) -> EngineProcess:
        """See `Launcher`."""
        engine = await super().launch()
        self.front_ends.engine_is_up(engine)
        watch = asyncio.create_task(self._tell_end(engine))
        self._ends.add(watch)
        watch.add_done_callback(self._ends.discard)
        return engine

    async def _tell_end(self, engine: EngineProcess) -> None:
        await engine.wait()
        self.front_ends.engine_is_down(engine.number)


def run_front_ends(config: Config) -> int:
    """Serve with several front ends until told to stop; return the process's exit status.

    Raises:
        ConfigError: The address cannot be bound, or the system cannot share a port.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            f"--api-workers {config.server.api_workers}: this system has no SO_REUSEPORT, by which "
            "several processes listen on one port; use 1"
        )
    host, port = config.server.host, config.server.port
    # A shared port could be another server's, whose clients we would take: ask for it alone first.
    listening.bind(host, port).close()
    with (
        listening.bind_only(host, port, is_shared=True) as keeper,
        asyncio.Runner(loop_factory=listening.loop_factory()) as runner,
    ):
        return runner.run(_watch(config, keeper))


async def _watch(config: Config, keeper: socket.socket) -> int:
    places = config.engine.max_batch_size + config.server.max_waiting
    launcher = _TellingLauncher(config.engine, places=places)
    metrics_folder = launcher.folder / "metrics"
    metrics_folder.mkdir(mode=0o700)
    front_ends = FrontEnds(config, keeper.getsockname()[1], metrics_folder)
    launcher.front_ends, launcher._ends = front_ends, set()  # noqa: SLF001 -- ours
    bridge = Bridge(
        launcher,
        on_resolved=lambda _: None,
        on_stats=lambda _: None,
        silence_limit_s=silence_limit_s(config.engine.step_limit_s),
    )
    stop = listening.stop_on_signals(signal.SIGTERM, signal.SIGINT)
    engine = asyncio.create_task(bridge.run())
    watching = asyncio.create_task(front_ends.run(bridge))
    announced = asyncio.create_task(_announce(config, front_ends, bridge, keeper))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([engine, watching, stopped], return_when=asyncio.FIRST_COMPLETED)
        if engine.done() or watching.done():
            return _failed(engine, watching)
        await _drain(config, front_ends, watching, stop)
        return 0
    finally:
        announced.cancel()
        stopped.cancel()
        front_ends.kill()
        await asyncio.wait([watching])
        await bridge.stop(serve.INSISTENT_GRACE_S if stop.is_set() else GRACE_S)
        await asyncio.gather(engine, watching, announced, stopped, return_exceptions=True)


async def _drain(
    config: Config, front_ends: FrontEnds, watching: asyncio.Task[None], stop: asyncio.Event
) -> None:
    """Wait until all have drained, or must go."""
    timeout_s = config.server.drain_timeout_s
    log.info("draining", front_ends=config.server.api_workers, timeout_s=timeout_s)
    stop.clear()  # the next signal means: now
    front_ends.drain()
    again = asyncio.create_task(stop.wait())
    # They keep the time themselves, and need some more to tell their clients.
    await asyncio.wait(
        [watching, again], timeout=timeout_s + 2 * GRACE_S, return_when=asyncio.FIRST_COMPLETED
    )
    again.cancel()
    if not watching.done():
        front_ends.drain()
        await asyncio.wait([watching], timeout=GRACE_S)
    log.info("drained", front_ends_left=0 if watching.done() else 1)


async def _announce(
    config: Config, front_ends: FrontEnds, bridge: Bridge, keeper: socket.socket
) -> None:
    ready = await bridge.wait_ready()
    await front_ends.wait_serving()
    serve.log_ready(config, ready, keeper, front_ends.model)


def _failed(*tasks: asyncio.Task[None]) -> int:
    """Tell the operator why it cannot go on; return the exit status."""
    causes: list[BaseException] = []
    for task in tasks:
        error = task.exception() if task.done() else None
        if isinstance(error, BaseExceptionGroup):
            causes += error.exceptions
        elif error is not None:
            causes.append(error)
    if len(causes) != 1 or not isinstance(causes[0], EngineError):
        raise BaseExceptionGroup("the front ends failed", causes or [EngineError("they ended")])
    print(f"tailrace: {causes[0]}", file=sys.stderr)  # noqa: T201 -- for the operator
    return 1
