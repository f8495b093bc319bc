"""A server under test for the length of an `async with` block: started, or found running.

Started servers run in a session of their own and are ended with everything below them, whatever
ends the block; the block is left only when the port, and on a GPU the memory, is free again, so
that the next contender finds the machine as this one did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from tailrace.bench.engines.adapter import LOOPBACK
from tailrace.bench.engines.registry import adapter_for
from tailrace.bench.launch import free_port
from tailrace.bench.metrics_source import MetricsSource, source_at
from tailrace.bench.monitor import Monitor
from tailrace.bench.process_tree import ProcessTree, members, oom_kills
from tailrace.bench.wire import Endpoint, WireError, fetch, resolve
from tailrace.clock import monotonic
from tailrace.errors import ConfigError, EngineError
from tailrace.telemetry.gpu import Gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from tailrace.bench.codec import Codec
    from tailrace.bench.engines.adapter import Adapter
    from tailrace.bench.engines.spec import EngineSpec

HOST = "127.0.0.1"
POLL_S = 0.25
TELL_S = 5.0
"""How often a long start says what it is at."""
PROBE_TIMEOUT_S = 30.0
LOG_TAIL_LINES = 20
MOST_LINE = 200
FREE_TIMEOUT_S = 60.0
"""For the port and the GPU's memory after the end."""
GPU_SLACK_BYTES = 512 * 2**20
"""More than before the start by no more than this counts as free: others use the GPU too."""
NEIGHBOUR_BYTES = 2 * 2**30
"""Taken of a GPU before the start beyond this: not the driver's, but somebody's."""
WARM_UP_AT_ONCE = 64
"""At most: engines compile, capture or tune some things for large batches only."""

# What engines, CUDA, C++ and Python say of it; hints on how to avoid it are worded otherwise.
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|(?:failed|error): out of memory|std::bad_alloc"
    r"|cudaErrorMemoryAllocation|\bMemoryError\b|Cannot allocate memory|Not enough memory"
    r"|(?:unable|failed) to allocate .*buffer|(?:Prefill|Decode|runs) out of memory"
    r"|No available memory for the cache"
)


@dataclass(frozen=True)
class _Death:
    """How a server ended by itself."""

    status: int
    memory_kills: int
    """By the kernel, in this control group, since the start."""
    memory_lines: int
    """Of the log, that say so."""
    tail: str

    def __str__(self) -> str:
        how = f"ended with status {self.status}"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-self.status).name}"
        if self.memory_kills and self.status == -signal.SIGKILL:
            how += ", by the kernel, which was out of memory"
        elif self.memory_kills:
            how += ", after the kernel, out of memory, had killed a process here"
        elif self.memory_lines:
            how += ", out of memory by its own words"
        return how


class EngineServer:
    """One contender's server; entering it again after it was left starts it again.

    Attributes:
        spec: What the plan says of it.
        adapter: Its kind.
        endpoint: Where it answers; inside the block only.
        url: The same as text.
        command: Its command line; empty where it is not ours.
        version: As it tells; empty where it does not.
        context_tokens: Most tokens of one request, where only its own routes tell.
        ready_s: From process start to ready, one for each start; empty where it is not ours.
        restarts: How often it was started again after it had died by itself.
        out_of_memory: The kernel's kills, or one where only its log says so, over all starts.
        log_file: What it printed.
    """

    def __init__(
        self,
        adapter: Adapter,
        log_file: Path,
        *,
        on_progress: Callable[[str], None],
        gpus: Gpus,
    ) -> None:
        self.spec: EngineSpec = adapter.spec
        self.adapter = adapter
        self.log_file = log_file
        self.command: list[str] = []
        self.version = ""
        self.context_tokens: int | None = None
        self.ready_s: list[float] = []
        self.restarts = 0
        self.out_of_memory = 0
        self._tell = on_progress
        self._gpus = gpus
        self._api_key = _api_key(self.spec)
        self._endpoint: Endpoint | None = None
        self._source: MetricsSource | None = None
        self._max_running: int | None = None
        self._tree: ProcessTree | None = None
        self._log_start = 0
        self._oom_kills_before: int | None = None
        self._gpu_bytes_before: dict[int, int] = {}
        self._devices_in_use: frozenset[int] = frozenset()
        """GPUs that the server is seen to use; empty where it is seen on none."""
        self._has_died = False
        self._death: _Death | None = None

    async def __aenter__(self) -> Self:
        """Start the server, or find it, and wait until it is ready.

        Raises:
            EngineError: It ended, or was not ready in time; the message carries its log's tail.
            ConfigError: It is not ours, and does not answer; or its metrics cannot be read.
        """
        if self._tree is not None:
            raise RuntimeError(f"engine {self.spec.name}: entered twice without being left")
        try:
            if self.adapter.is_ours:
                await self._start()
            else:
                self._endpoint = await resolve(self.spec.url, api_key=self._api_key)
                await self._check_ready_now(self._endpoint)
            await self._look_around()
        except BaseException:
            await self._end(grace_s=0.0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop what was started.

        Raises:
            EngineError: The port or the GPU's memory stays taken (only where the block itself
                raised nothing).
        """
        endpoint = self._endpoint
        is_ours = self._tree is not None
        await self._end(self.spec.stop_timeout_s)
        if not is_ours or endpoint is None or not (error is None or isinstance(error, Exception)):
            return  # who interrupts does not want to wait for what comes next
        left = await self._wait_until_free(endpoint)
        if left and error is None:
            raise EngineError(f"engine {self.spec.name}: {left} after its end; see {self.log_file}")

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers."""
        if self._endpoint is None:
            raise RuntimeError(f"engine {self.spec.name}: not entered")
        return self._endpoint

    @property
    def url(self) -> str:
        """Where it answers, without /v1."""
        return self.endpoint.url

    @property
    def pid(self) -> int | None:
        """The first process of a server that we started."""
        return None if self._tree is None else self._tree.pid

    @property
    def extra_body(self) -> dict[str, Any]:
        """Fields that every request must carry, beside the usual ones."""
        return self.adapter.extra_body()

    def codec(self, model: str) -> Codec:
        """Return the tokenizer that counts as the server does."""
        return self.adapter.codec(self.endpoint, model)

    def is_alive(self) -> bool:
        """Return whether it runs; one that is not ours: whether it takes connections."""
        if self._tree is not None:
            return self._tree.poll() is None
        if self._endpoint is None:
            return False
        return _takes_connections(self._endpoint.address, self._endpoint.port)

    def death(self) -> str:
        """Return how it died by itself, with its log's last words; empty where it did not."""
        death = self._note_death()
        if death is not None:
            return f"engine {self.spec.name}: the server {death}; {death.tail}"
        if self._endpoint is not None and self._tree is None and not self.is_alive():
            return f"engine {self.spec.name}: {self._endpoint.url} takes no connections any more"
        return ""

    def monitor(self) -> Monitor:
        """Return a monitor of this server and of the machine, for one trial."""
        is_here = self.adapter.is_ours or self.endpoint.host in LOOPBACK
        constants = dict.fromkeys(self.adapter.silent_at_zero, 0.0)
        if self._max_running is not None:
            constants["max_running"] = float(self._max_running)
        return Monitor(
            self._source,
            pid=self.pid,
            gpus=self._gpus if is_here else Gpus(),
            devices=self._visible_devices() if is_here else None,
            constants=constants,
        )

    async def warm_up(
        self, bodies: Sequence[bytes], *, path: str = "/v1/completions", timeout_s: float = 600.0
    ) -> None:
        """Send a few requests of the run's own lengths, some at once, and wait for all answers.

        Raises:
            EngineError: One of them failed, or the server died of it.
        """
        gate = asyncio.Semaphore(WARM_UP_AT_ONCE)

        async def send(body: bytes) -> str:
            async with gate:
                try:
                    answer = await fetch(self.endpoint, "POST", path, body, timeout_s=timeout_s)
                except (OSError, WireError) as error:
                    return str(error) or f"no answer within {timeout_s:g} s"
            if answer.status == 200:
                return ""
            return f"HTTP {answer.status}: {answer.body[:MOST_LINE].decode(errors='replace')}"

        faults = [fault for fault in await asyncio.gather(*map(send, bodies)) if fault]
        if faults:
            raise EngineError(
                self.death()
                or f"engine {self.spec.name}: {len(faults)} of {len(bodies)} warm-up requests "
                f"failed, first: {faults[0]}"
            )

    # Starting

    async def _start(self) -> None:
        if self._has_died:
            self.restarts += 1
        self._has_died = False
        self._death = None
        host, port = self._place()
        if _takes_connections(host, port):
            raise ConfigError(
                f"engine {self.spec.name}: something else already listens on {host}:{port}; stop "
                "it, or leave `url` out, which takes a free port"
            )
        self.command = self.adapter.command(host, port)
        self._gpu_bytes_before = self._gpu_bytes()
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._oom_kills_before = oom_kills(os.getpid())
        started_s = monotonic()
        try:
            self._tree = ProcessTree(
                self.command, log_file=self.log_file, env=self.adapter.environment()
            )
        except OSError as error:
            raise ConfigError(
                f"engine {self.spec.name}: {self.command[0]}: {error.strerror}"
            ) from error
        self._endpoint = await self._wait_until_ready(self._tree, host, port)
        self.ready_s.append(monotonic() - started_s)
        self._devices_in_use = await asyncio.to_thread(self._used_devices, self._tree.pid)

    def _place(self) -> tuple[str, int]:
        if not self.spec.url:
            return HOST, free_port()
        parts = urlsplit(self.spec.url)
        return parts.hostname or HOST, parts.port or 80

    async def _wait_until_ready(self, tree: ProcessTree, host: str, port: int) -> Endpoint:
        started_s = monotonic()
        told_s = started_s
        url = self.spec.url or f"http://{host}:{port}"
        while True:
            if tree.poll() is not None:
                raise EngineError(
                    f"engine {self.spec.name}: the server {self._note_death()} before it was "
                    f"ready; {self._log_tail()}"
                )
            now_s = monotonic()
            if now_s - started_s > self.spec.ready_timeout_s:
                raise EngineError(
                    f"engine {self.spec.name}: the server was not ready within "
                    f"{self.spec.ready_timeout_s:g} s; {self._log_tail()}"
                )
            if now_s - told_s > TELL_S:
                told_s = now_s
                self._tell(f"{self.spec.name}: {now_s - started_s:.0f} s, {self._last_line()}")
            endpoint = await self._answering(url)
            if endpoint is not None:
                return endpoint
            await asyncio.sleep(POLL_S)

    async def _answering(self, url: str) -> Endpoint | None:
        """Return the endpoint where the server says that it is ready, else None."""
        try:
            endpoint = await resolve(url, api_key=self._api_key, timeout_s=PROBE_TIMEOUT_S)
        except ConfigError:  # it does not listen yet
            return None
        return endpoint if await self._not_ready(endpoint) == "" else None

    async def _not_ready(self, endpoint: Endpoint) -> str:
        """Return what keeps the server from being ready; empty where nothing does."""
        for path in self.adapter.ready_paths:
            try:
                answer = await fetch(endpoint, "GET", path, timeout_s=PROBE_TIMEOUT_S)
            except (OSError, WireError) as error:
                return f"{path}: {error or f'no answer within {PROBE_TIMEOUT_S:g} s'}"
            if answer.status != 200:
                return f"{path}: HTTP {answer.status}"
        return ""

    async def _check_ready_now(self, endpoint: Endpoint) -> None:
        reason = await self._not_ready(endpoint)
        if reason:
            raise ConfigError(
                f"engine {self.spec.name}: {endpoint.url} is not ready as {self.spec.kind} is "
                f"({reason}); start it first, or correct `kind`"
            )

    async def _look_around(self) -> None:
        self.version = await self.adapter.version(self.endpoint)
        self.context_tokens = await self.adapter.context_tokens(self.endpoint)
        self._max_running = await self.adapter.max_running(self.endpoint, self.command)
        self._source = await source_at(self.spec.metrics_url, self.endpoint)

    # Ending

    async def _end(self, grace_s: float) -> None:
        self._note_death()
        tree, self._tree = self._tree, None
        if tree is not None:
            # In a thread, which goes on whatever becomes of this task.
            if grace_s <= 0:
                await asyncio.shield(asyncio.to_thread(tree.kill))
            elif await asyncio.shield(asyncio.to_thread(tree.stop, grace_s)) is None:
                self._tell(f"{self.spec.name}: killed, {grace_s:g} s after SIGTERM")
            # A death says so in many lines, and is one all the same.
            self.out_of_memory += self._memory_kills() or int(self._memory_lines() > 0)
        self._endpoint = None
        self._source = None

    async def _wait_until_free(self, endpoint: Endpoint) -> str:
        """Wait, and return what stays taken, empty where nothing does."""
        deadline_s = monotonic() + FREE_TIMEOUT_S
        while left := self._still_taken(endpoint):
            if monotonic() > deadline_s:
                return left
            await asyncio.sleep(POLL_S)
        return ""

    def _still_taken(self, endpoint: Endpoint) -> str:
        if _takes_connections(endpoint.address, endpoint.port):
            return f"port {endpoint.port} still takes connections"
        for index, used in self._gpu_bytes().items():
            more = used - self._gpu_bytes_before.get(index, used)
            if more > GPU_SLACK_BYTES:
                return f"GPU {index} still holds {more / 2**30:.1f} GiB more than before its start"
        return ""

    def _gpu_bytes(self) -> dict[int, int]:
        """Return what is taken of each GPU that the server sees: the others are not its own."""
        visible = self._visible_devices()
        return {
            reading.index: reading.memory_used_bytes
            for reading in self._gpus.read()
            if reading.memory_used_bytes is not None
            and (visible is None or reading.index in visible)
        }

    def _visible_devices(self) -> frozenset[int] | None:
        return visible_devices(self.adapter.environment(), self._gpus)

    def _used_devices(self, pid: int) -> frozenset[int]:
        """Return the GPUs that the server uses, now that it is ready; empty where none is seen.

        In a container the driver's process numbers are others than ours: there a GPU is the
        server's whose memory was taken while it started.
        """
        tree = {member.pid for member in members(pid)}
        named = {index for index, pids in self._gpus.processes().items() if pids & tree}
        before = self._gpu_bytes_before
        grown = {
            index
            for index, used in self._gpu_bytes().items()
            if used - before.get(index, used) > GPU_SLACK_BYTES
        }
        return frozenset(named or grown)

    @property
    def neighbours(self) -> tuple[str, ...]:
        """What was on the server's GPUs before it started: others that use them too, in words."""
        taken = {i: used for i, used in self._gpu_bytes_before.items() if used > NEIGHBOUR_BYTES}
        own = self._devices_in_use
        return tuple(
            f"GPU {index} had {used / 2**30:.1f} GiB in use before the server's start: "
            + (
                "somebody else is on it, whose work these figures hold too; measure on a GPU of "
                "your own"
                if own
                else "a GPU of this machine that the server may not use (it was seen on none); if "
                "it does, these figures hold somebody else's work too"
            )
            for index, used in taken.items()
            if not own or index in own
        )

    # Death and memory

    def _note_death(self) -> _Death | None:
        """Return how the server died by itself, remembered from the first look on."""
        status = None if self._tree is None else self._tree.poll()
        if self._death is None and status is not None:
            self._has_died = True
            self._death = _Death(
                status, self._memory_kills(), self._memory_lines(), self._log_tail()
            )
        return self._death

    def _memory_kills(self) -> int:
        now = oom_kills(os.getpid())
        before = self._oom_kills_before
        return 0 if now is None or before is None else now - before

    def _memory_lines(self) -> int:
        return sum(1 for line in self._log_lines() if _OUT_OF_MEMORY.search(line))

    def _log_lines(self) -> Iterator[str]:
        """Yield what was printed since this start."""
        if not self.log_file.exists():
            return
        with self.log_file.open("rb") as stream:
            stream.seek(self._log_start)
            for line in stream:
                yield line.decode("utf-8", "replace").rstrip()

    def _log_tail(self) -> str:
        lines = deque(self._log_lines(), LOG_TAIL_LINES)
        return "\n".join([f"its log, {self.log_file}, ends with:", *lines])

    def _last_line(self) -> str:
        lines = deque((line for line in self._log_lines() if line.strip()), 1)
        return lines[0][:MOST_LINE] if lines else "nothing printed yet"


def start(
    spec: EngineSpec,
    log_file: Path,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
    gpus: Gpus | None = None,
) -> EngineServer:
    """Return the server of `spec`, to be entered.

    Args:
        spec: The contender.
        log_file: Gets what the server prints; appended to by every start.
        on_progress: Told now and then what a long start is at.
        gpus: What to read of the GPUs; None looks for this machine's.

    Raises:
        ConfigError: `spec` cannot be run here; says what is missing.
    """
    return EngineServer(
        adapter_for(spec),
        log_file,
        on_progress=on_progress,
        gpus=Gpus.find() if gpus is None else gpus,
    )


def _api_key(spec: EngineSpec) -> str:
    if not spec.api_key_env:
        return ""
    key = os.environ.get(spec.api_key_env, "")
    if not key:
        raise ConfigError(
            f"engine {spec.name}: api_key_env = {spec.api_key_env!r}, but that variable is not set"
        )
    return key


def _takes_connections(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def visible_devices(environ: Mapping[str, str], gpus: Gpus) -> frozenset[int] | None:
    """Return the GPUs that CUDA shows to a process of this environment, or None for all.

    As CUDA reads it, a name that is none hides all that follow. Parts of a split GPU are not told
    apart here: where one is named, any GPU may be its.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or "MIG-" in text:
        return None
    found: set[int] = set()
    for name in map(str.strip, text.split(",")):
        if name.isdecimal():
            found.add(int(name))
            continue
        is_uuid = name.startswith("GPU-")  # or as much of one as only one GPU has
        named = [gpu.index for gpu in gpus.read() if is_uuid and gpu.uuid.startswith(name)]
        if len(named) != 1:
            break
        found.add(named[0])
    return frozenset(found)
