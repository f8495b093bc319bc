"""The way to the engine: one DEALER socket, one queue per request, and the engine's restarts.

    STARTING --EngineReady--> READY --exit or silence--> RESTARTING --EngineReady--> READY
        |                                                    |
        '--EngineFatal, or exit before ready--> FAILED <-----'--gave up after MAX_FAILED_STARTS

An EngineFatal of a restarted engine counts as one failed start: the memory, or the file, that it
lacked may be there a moment later. Whatever ends an incarnation, each request that it held gets a
last output with `finish_reason` "error".
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

import msgspec
import structlog
import zmq
import zmq.asyncio

from tailrace.clock import monotonic
from tailrace.errors import EngineError, RequestError, TailraceError
from tailrace.server.engine_client import EngineState, OutputQueue
from tailrace.types import (
    STEP_HUNG_STATUS,
    AbortRequests,
    EngineFatal,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    ForgetFrontend,
    FrontendMessage,
    GrowPrompt,
    InspectKv,
    KvReport,
    ModelResolved,
    Ping,
    ReserveKv,
    Shutdown,
    TokenOutput,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tailrace.clock import Clock
    from tailrace.server.engine_client import LastWord
    from tailrace.server.supervisor import EngineSource, Incarnation
    from tailrace.types import EngineRequest, EngineStats

log = structlog.get_logger("tailrace.bridge")

PING_INTERVAL_S = 1.0
SILENCE_LIMIT_S = 60.0
"""A ready engine that says nothing for so long, beside a step, is taken for hung."""
MAX_FAILED_STARTS = 5
HEALTHY_LIFE_S = 30.0
"""An engine that lives shorter makes the next wait twice as long."""
MAX_BACKOFF_S = 30.0
FIRST_BACKOFF_S = 0.5
GRACE_S = 5.0
"""An engine told to stop gets this long to end by itself."""
STOPPING = "the server is stopping; this request was not finished"
ENGINE_DIED = "the engine died while it held this request; it is being restarted, try again"


def silence_limit_s(step_limit_s: float) -> float:
    """Return for how long a ready engine may say nothing; infinite where a step has no limit.

    An engine is silent while it waits for a step. It ends by itself where that hangs, after it has
    written down what it knows (engine/hang_watch.py); this is for whatever else may hold it up.
    """
    return step_limit_s + SILENCE_LIMIT_S if step_limit_s else math.inf


class Bridge:
    """Implements `EngineClient` over ZeroMQ, and keeps an engine process alive.

    Args:
        launcher: Starts engine processes, or knows who does.
        on_resolved: Told the model's folder each time an engine has found it.
        on_stats: Told every report of the engine.
        silence_limit_s: Most seconds that a ready engine may say nothing.
        clock: Monotonic seconds.
        first_backoff_s: Wait before a restart; doubled after each short life.
    """

    def __init__(
        self,
        launcher: EngineSource,
        *,
        on_resolved: Callable[[str], None],
        on_stats: Callable[[EngineStats], None],
        silence_limit_s: float,
        clock: Clock = monotonic,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self._launcher = launcher
        self._on_resolved = on_resolved
        self._on_stats = on_stats
        self._clock = clock
        self._silence_limit_s = silence_limit_s
        self._first_backoff_s = first_backoff_s
        self._state = EngineState.STARTING
        self._ready: EngineReady | None = None
        self._stats: EngineStats | None = None
        self._restarts_total = 0
        self._queues: dict[str, OutputQueue] = {}
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: Incarnation | None = None
        self._reserved: set[str] = set()
        """Requests that have a lease, or early work, and have not come yet."""
        self._last_words: dict[str, LastWord] = {}
        """Who waits for the last output of a request that was aborted."""
        self._connections = 0
        self._kv_asked: list[asyncio.Future[KvReport]] = []
        self._last_heard_s = 0.0
        self._cause = ""  # of the latest incarnation's end
        self._stop_asked = asyncio.Event()
        self._became_ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self.undecodable_total = 0

    @property
    def state(self) -> EngineState:
        """Whether requests can be served now."""
        return self._state

    @property
    def ready(self) -> EngineReady | None:
        """What the engine said when it was warm."""
        return self._ready

    @property
    def stats(self) -> EngineStats | None:
        """The engine's latest report."""
        return self._stats

    @property
    def restarts_total(self) -> int:
        """How often the engine was started again."""
        return self._restarts_total

    @property
    def silence_s(self) -> float | None:
        """Seconds since the engine last said something."""
        if self._state is not EngineState.READY:
            return None
        return self._clock() - self._last_heard_s

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {"engine": self._process.pid} if self._process else {}

    @property
    def open_requests(self) -> int:
        """Requests whose last output has not come yet."""
        return len(self._queues)

    def submit(self, request: EngineRequest) -> OutputQueue:
        """Hand a request over.

        Raises:
            RequestError: 503, the engine is not ready.
        """
        if self._stop_asked.is_set():
            raise RequestError("the server is stopping", status=503, retry_after_s=2.0)
        if self._state is not EngineState.READY:
            raise RequestError(f"the engine is {self._state.value}", status=503, retry_after_s=2.0)
        queue = OutputQueue()
        self._queues[request.request_id] = queue
        self._reserved.discard(request.request_id)
        self._send(request)
        return queue

    def reserve(self, request_id: str, num_tokens: int, lifetime_s: float) -> None:
        """Lease KV for a request whose body is still arriving; `abort` gives it back.

        Does nothing while the engine is not ready: the request will be told.
        """
        if self._state is EngineState.READY:
            self._reserved.add(request_id)
            self._send(ReserveKv(request_id, num_tokens, lifetime_s))

    def grow(
        self,
        request_id: str,
        start: int,
        token_ids: list[int],
        lifetime_s: float,
        cache_salt: str = "",
    ) -> None:
        """Offer a piece of a prompt whose body is still arriving; see `EngineClient`.

        Does nothing while the engine is not ready. A restarted one ignores what follows on pieces
        that it never got.
        """
        if self._state is EngineState.READY:
            self._reserved.add(request_id)
            self._send(GrowPrompt(request_id, start, token_ids, lifetime_s, cache_salt))

    async def inspect_kv(self) -> KvReport:
        """Have the KV pool checked and described.

        Raises:
            RequestError: 503, the engine is not ready, or died over it.
        """
        if self._state is not EngineState.READY:
            raise RequestError(f"the engine is {self._state.value}", status=503, retry_after_s=2.0)
        report: asyncio.Future[KvReport] = asyncio.get_running_loop().create_future()
        self._kv_asked.append(report)
        self._send(InspectKv())
        return await report

    def abort(self, request_ids: Iterable[str], on_last: LastWord | None = None) -> None:
        """Forget requests: no further output of theirs comes, and no lease stays.

        Args:
            request_ids: Unknown ones are no error.
            on_last: See `EngineClient.abort`.
        """
        wanted = set(request_ids)
        submitted = self._queues.keys() & wanted
        known = [*submitted, *(self._reserved & wanted)]
        for request_id in known:
            self._queues.pop(request_id, None)
        self._reserved -= wanted
        is_asked = bool(known) and self._state is EngineState.READY
        if is_asked:
            self._send(AbortRequests(known))
        if on_last is not None:
            for request_id in wanted:
                if is_asked and request_id in submitted:
                    self._last_words[request_id] = on_last
                else:
                    on_last(request_id, None)

    def forget_frontend(self, name: str) -> None:
        """Have the engine end what a front end that has died asked for."""
        if self._state is EngineState.READY:
            self._send(ForgetFrontend(name))

    async def wait_ready(self) -> EngineReady:
        """Wait until an engine is warm for the first time."""
        await self._became_ready.wait()
        if self._ready is None:
            raise EngineError("ready without a description")
        return self._ready

    async def run(self) -> None:
        """Keep an engine alive until `stop`; to be called once.

        Raises:
            EngineError: No engine can be started; the text is fit for the operator.
        """
        self._ended.clear()
        try:
            await self._keep_alive()
        finally:
            self._fail_open_requests(STOPPING)
            self._ended.set()

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """End the engine and close; requests still open get an error."""
        self._stop_asked.set()
        self._send(AbortRequests(list(self._queues)))
        if self._launcher.is_owner:
            self._send(Shutdown())
        self._fail_open_requests(STOPPING)
        if self._process is not None:
            if self._state is not EngineState.READY:
                self._process.kill()  # it heeds no message while it loads
            await self._process.stop(grace_s)
        await self._ended.wait()
        self._context.term()
        self._launcher.clean()

    async def _keep_alive(self) -> None:
        failed_starts = short_lives = 0
        while not self._stop_asked.is_set():
            self._cause = ""
            started_s = self._clock()
            was_ready = await self._run_once()
            self._fail_open_requests(ENGINE_DIED)
            if self._stop_asked.is_set():
                return
            failed_starts = 0 if was_ready else failed_starts + 1
            # One that is ready and dies at once is no better than one that never was.
            short_lives = 0 if self._clock() - started_s > HEALTHY_LIFE_S else short_lives + 1
            self._give_up_after(failed_starts)
            self._state = EngineState.RESTARTING
            self._stats = None
            self._restarts_total += 1
            log.error("engine_restarts", total=self._restarts_total, cause=self._cause)
            backoff_s = min(MAX_BACKOFF_S, self._first_backoff_s * 2**short_lives)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked.wait(), backoff_s)

    def _give_up_after(self, failed_starts: int) -> None:
        """Raise where another start is not worth trying: what never worked will not work now."""
        if self._became_ready.is_set() and failed_starts < MAX_FAILED_STARTS:
            return
        self._state = EngineState.FAILED
        if self._became_ready.is_set():
            raise EngineError(
                f"the engine failed to start {failed_starts} times in a row; at last: {self._cause}"
            )
        raise EngineError(self._cause)

    async def _run_once(self) -> bool:
        """Run one incarnation to its end; return whether it was ever ready."""
        process = await self._launcher.launch()
        self._process = process
        self._restarts_total = max(self._restarts_total, process.number - 1)
        self._last_heard_s = self._clock()
        exited = asyncio.create_task(process.wait())
        try:
            self._socket = self._connect(process)
            if not self._stop_asked.is_set():
                await self._talk_until(exited)
        finally:
            process.kill()
            if self._socket is not None:
                self._socket.close()
            self._socket = None
            status = await exited
            self._process = None
        self._cause = self._cause or _cause_of(status)
        return self._state is EngineState.READY

    async def _talk_until(self, exited: asyncio.Task[int]) -> None:
        """Exchange messages until the process has ended, or should."""
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._ping())]
        try:
            await asyncio.wait([exited, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    self._note_failure(result)
        if exited.done():
            await self._drain_last_words()

    def _note_failure(self, error: Exception) -> None:
        """Keep why our own side ended an incarnation, such as: its folder has no tokenizer."""
        if isinstance(error, TailraceError):
            self._cause = str(error)
        else:
            self._cause = f"the bridge to the engine failed: {error!r}"
            log.error("bridge_failed", exc_info=error)

    def _connect(self, process: Incarnation) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._launcher.identity:
            # Another each time: the engine may not have noticed yet that the last is gone.
            self._connections += 1
            identity = self._launcher.identity + b".%d" % self._connections
            socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.connect(f"ipc://{process.socket_path}")
        return socket

    def _send(self, message: FrontendMessage) -> None:
        if self._socket is not None:
            # With no high-water mark a send is complete at once; its future carries nothing.
            self._socket.send(self._encoder.encode(message))

    async def _ping(self) -> None:
        while True:
            self._send(Ping())
            await asyncio.sleep(PING_INTERVAL_S)
            silence_s = self._clock() - self._last_heard_s
            if self._state is EngineState.READY and silence_s > self._silence_limit_s:
                self._cause = f"it said nothing for {silence_s:.1f} s"
                return  # which ends it

    async def _receive(self) -> None:
        while self._socket is not None:
            message = self._decode(await self._socket.recv())
            if message is not None:
                self._handle(message)

    async def _drain_last_words(self) -> None:
        """Take what a process that has ended still sent; it is past becoming ready."""
        while self._socket is not None and await self._socket.poll(50):
            message = self._decode(await self._socket.recv())
            if isinstance(message, EngineOutputs | EngineFatal):
                self._handle(message)

    def _decode(self, frame: bytes) -> EngineMessage | None:
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            self.undecodable_total += 1
            log.warning("undecodable_message", error=str(error), total=self.undecodable_total)
            return None

    def _handle(self, message: EngineMessage) -> None:
        self._last_heard_s = self._clock()
        match message:
            case EngineOutputs(outputs, stats):
                self._stats = stats
                self._on_stats(stats)
                for output in outputs:
                    self._deliver(output)
            case KvReport():
                self._answer_inspections(message)
            case ModelResolved(folder):
                self._on_resolved(folder)
            case EngineReady():
                self._ready = message
                self._state = EngineState.READY
                self._became_ready.set()
            case EngineFatal():
                self._cause = message.error

    def _deliver(self, output: TokenOutput) -> None:
        if output.finish_reason is None:
            queue = self._queues.get(output.request_id)
        else:
            queue = self._queues.pop(output.request_id, None)
        if queue is not None:
            queue.put_nowait(output)
        elif output.finish_reason is not None:
            told = self._last_words.pop(output.request_id, None)
            if told is not None:
                told(output.request_id, output)

    def _answer_inspections(self, answer: KvReport | RequestError) -> None:
        """Tell all who asked; one report is as good as another."""
        asked, self._kv_asked = self._kv_asked, []
        for report in asked:
            if report.done():
                continue  # who asked has gone
            if isinstance(answer, KvReport):
                report.set_result(answer)
            else:
                report.set_exception(answer)

    def _fail_open_requests(self, why: str) -> None:
        self._answer_inspections(RequestError(why, status=503, retry_after_s=2.0))
        last_words, self._last_words = self._last_words, {}
        for request_id, told in last_words.items():
            told(request_id, None)
        queues, self._queues = self._queues, {}
        self._reserved.clear()
        for request_id, queue in queues.items():
            queue.put_nowait(TokenOutput(request_id, [], finish_reason="error", error=why))


def _cause_of(status: int) -> str:
    ended = f"the engine process ended with status {status}"
    if status == STEP_HUNG_STATUS:
        return f"{ended}: the device did not end a step within --step-timeout-s"
    return ended
