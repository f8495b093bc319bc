"""The engine process: `python -m tailrace.engine.worker`.

The parent writes one JSON line to standard input, {"socket": path, "config": EngineConfig}, and
keeps the pipe open: its end means that the parent died, and this process exits. The worker binds
a ZeroMQ ROUTER at ipc://<socket>; each front end connects a DEALER and sends a Ping to be known.
Frames are MessagePack of `types.FrontendMessage` and `types.EngineMessage`; nothing is pickled.

A message that does not decode is dropped and counted: a broken front end must not end the others'
requests.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog
import zmq

from tailrace.clock import monotonic
from tailrace.config import EngineConfig
from tailrace.engine.exit import end_now
from tailrace.errors import TailraceError
from tailrace.telemetry.console_log import configure_log
from tailrace.types import (
    AbortRequests,
    EngineFatal,
    EngineMessage,
    EngineOutputs,
    EngineRequest,
    ForgetFrontend,
    FrontendMessage,
    GrowPrompt,
    InspectKv,
    ModelResolved,
    Ping,
    ReserveKv,
    Shutdown,
    TokenOutput,
)

if TYPE_CHECKING:
    from tailrace.engine.engine import Engine
    from tailrace.types import EngineStats

T = TypeVar("T")

log = structlog.get_logger("tailrace.engine")

# An idle engine wakes so often only to notice that its parent died.
_IDLE_POLL_MS = 1000
# An engine that holds its next step looks so often whether the one in flight has ended early.
_HOLD_POLL_MS = 2
# One that loads looks so often whether it is done, which nothing wakes it for.
_LOADING_POLL_MS = 20
# One that has failed waits so long for somebody to tell it to: front ends import for seconds.
_HEARING_S = 60.0


class LaunchOrder(msgspec.Struct):
    """The line on standard input."""

    socket: str
    config: EngineConfig
    places: int = 0
    """Most requests that run or wait at once; further ones are refused. 0: any number, where one
    front end counts for itself."""


@dataclass
class _Frontend:
    """What one front end is owed."""

    outputs: list[TokenOutput] = field(default_factory=list)
    wants_stats: bool = False
    wants_kv: bool = False
    requests: set[str] = field(default_factory=set)
    """Asked and not yet ended."""
    arriving: set[str] = field(default_factory=set)
    """Leased or begun, and not yet asked."""


class Mailbox:
    """The engine's side of the socket: who is known, who asked what, what is due to whom."""

    def __init__(self, socket_path: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(f"ipc://{socket_path}")
        Path(socket_path).chmod(0o600)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(FrontendMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._frontends: dict[bytes, _Frontend] = {}
        self._owners: dict[str, bytes] = {}
        self._forgotten: set[str] = set()
        self._announced: list[EngineMessage] = []
        self.undecodable_total = 0

    @property
    def has_company(self) -> bool:
        """Whether any front end is known."""
        return bool(self._frontends)

    def announce(self, message: EngineMessage) -> None:
        """Tell every front end, those that will come later included."""
        self._announced.append(message)
        for identity in self._frontends:
            self._send(identity, message)

    def wait(self, timeout_ms: int) -> None:
        """Sleep until a message comes or the time is up; exit where the parent has died."""
        ready = dict(self._poller.poll(timeout_ms))
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            log.warning("parent_died")
            os._exit(1)

    def receive(self) -> list[FrontendMessage]:
        """Return all messages that have come; front ends new to us are told what was announced.

        That somebody has died comes last: what it said before may be read after the news.
        """
        messages: list[FrontendMessage] = []
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return sorted(messages, key=lambda m: isinstance(m, ForgetFrontend))
            message = self._decode(frames)
            if message is None or _name_of(identity) in self._forgotten:
                continue
            self._meet(identity)
            message = self._own(identity, message)
            if message is None:
                continue
            if isinstance(message, Ping):
                self._frontends[identity].wants_stats = True
            elif isinstance(message, InspectKv):
                self._frontends[identity].wants_kv = True
            messages.append(message)

    def post(self, outputs: list[TokenOutput]) -> None:
        """Sort outputs by the front end that asked."""
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if output.finish_reason is not None:
                self._owners.pop(output.request_id, None)
                if owner is not None:
                    self._frontends[owner].requests.discard(output.request_id)
            if owner is not None:
                self._frontends[owner].outputs.append(output)

    def forget(self, name: str) -> list[str]:
        """Stop talking to a front end that has died; return the ids that it asked for."""
        if not name:
            return []
        self._forgotten.add(name)
        gone = [i for i in self._frontends if _name_of(i) == name]
        asked: list[str] = []
        for identity in gone:
            frontend = self._frontends.pop(identity)
            asked += [*frontend.requests, *frontend.arriving]
        for request_id in asked:
            self._owners.pop(request_id, None)
        return asked

    def flush(self, engine: Engine) -> None:
        """Send what is due: one message per front end."""
        stats = None
        for identity, frontend in self._frontends.items():
            if frontend.outputs or frontend.wants_stats:
                stats = stats or self._with_frontends(engine.stats())
                self._send(identity, EngineOutputs(frontend.outputs, stats))
                frontend.outputs = []
                frontend.wants_stats = False
            if frontend.wants_kv:
                self._send(identity, engine.inspect_kv())
                frontend.wants_kv = False

    def close(self) -> None:
        """Deliver what is under way and close."""
        self._socket.close()
        self._context.term()

    def _own(self, identity: bytes, message: FrontendMessage) -> FrontendMessage | None:
        """Note whose an id is; return what may be done of a message: nobody touches others' ids."""
        frontend, owners = self._frontends[identity], self._owners
        match message:
            case EngineRequest(request_id=request_id):
                if owners.setdefault(request_id, identity) != identity:
                    fault = f"request id {request_id!r} is another front end's"
                    frontend.outputs.append(
                        TokenOutput(request_id, [], finish_reason="error", error=fault)
                    )
                    return None
                frontend.requests.add(request_id)
                frontend.arriving.discard(request_id)
            case ReserveKv(request_id) | GrowPrompt(request_id):
                if owners.setdefault(request_id, identity) != identity:
                    return None
                if request_id not in frontend.requests:
                    frontend.arriving.add(request_id)
            case AbortRequests(request_ids):
                own = [i for i in request_ids if owners.get(i, identity) == identity]
                for request_id in frontend.arriving.intersection(own):
                    owners.pop(request_id, None)  # what never came whole ends without an output
                frontend.arriving.difference_update(own)
                return AbortRequests(own)
        return message

    def _with_frontends(self, stats: EngineStats) -> EngineStats:
        counts: dict[str, int] = {}
        for identity, frontend in self._frontends.items():
            if name := _name_of(identity):
                counts[name] = counts.get(name, 0) + len(frontend.requests)
        return msgspec.structs.replace(stats, frontends=counts) if counts else stats

    def _decode(self, frames: list[bytes]) -> FrontendMessage | None:
        try:
            return self._decoder.decode(b"".join(frames))
        except (msgspec.DecodeError, RecursionError) as error:
            self.undecodable_total += 1
            log.warning("undecodable_message", error=str(error), total=self.undecodable_total)
            return None

    def _meet(self, identity: bytes) -> None:
        if identity not in self._frontends:
            self._frontends[identity] = _Frontend()
            for message in self._announced:
                self._send(identity, message)

    def _send(self, identity: bytes, message: EngineMessage) -> None:
        self._socket.send_multipart([identity, self._encoder.encode(message)])


def _name_of(identity: bytes) -> str:
    """Return the name in a front end's identity, "" where it chose none: see `ForgetFrontend`."""
    if identity.startswith(b"\0"):  # ZeroMQ's own choice
        return ""
    return identity.decode("utf-8", "replace").rpartition(".")[0]


class Worker:
    """Feeds the engine from the mailbox until told to stop.

    Args:
        mailbox: Of the front ends.
        engine: What they talk to.
        places: See `LaunchOrder`.
    """

    def __init__(self, mailbox: Mailbox, engine: Engine, places: int = 0) -> None:
        self.mailbox = mailbox
        self.engine = engine
        self.places = places
        self.stopping = False

    def run(self) -> None:
        """Serve until a Shutdown came and no request is left."""
        while not (self.stopping and not self.engine.has_work):
            self._listen(0 if self.engine.has_work else _IDLE_POLL_MS)
            while (hold_ms := int(1e3 * self.engine.hold_s())) > 0:
                self._listen(min(hold_ms, _HOLD_POLL_MS))
            outputs = self.engine.step() if self.engine.has_work else []
            begun_s = monotonic()
            self.mailbox.post(outputs)
            self.mailbox.flush(self.engine)
            if outputs:
                self.engine.meter.add_publish(monotonic() - begun_s)

    def _listen(self, timeout_ms: int) -> None:
        self.mailbox.wait(timeout_ms)
        for message in self.mailbox.receive():
            self._handle(message)

    def _handle(self, message: FrontendMessage) -> None:
        match message:
            case EngineRequest():
                refused = self._refusal(message) or self.engine.add(message)
                if refused is not None:
                    self.mailbox.post([refused])
            case ReserveKv():
                self.engine.reserve(message)
            case GrowPrompt():
                self.engine.grow(message)
            case AbortRequests(request_ids):
                self.mailbox.post(self.engine.abort(request_ids))
            case ForgetFrontend(name):
                self.mailbox.post(self.engine.abort(self.mailbox.forget(name)))
            case Shutdown():
                self.stopping = True
            case Ping() | InspectKv():
                pass  # the mailbox knows who asked

    def _refusal(self, request: EngineRequest) -> TokenOutput | None:
        """Refuse what is beyond the cap: several front ends cannot count it between them."""
        held = self.engine.requests
        if not self.places or held < self.places:
            return None
        why = (
            f"the server is full: {held} of {self.places} sequences are running or waiting; try "
            "again later"
        )
        return self.engine.turn_away(request.request_id, why)


def main() -> int:
    """Load, warm up, serve; return the exit status."""
    # Ctrl-C reaches the whole process group, and systemd's SIGTERM the whole control group; the
    # parent, which drains first, decides when this process goes: by a Shutdown, by its pipe's end,
    # or by a SIGKILL.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_log()
    started_s = time.monotonic()
    order = msgspec.json.decode(_first_line(sys.stdin.fileno()), type=LaunchOrder)
    mailbox = Mailbox(order.socket)
    # One thread owns the device and its thread pool: OpenMP keeps a team for each thread that
    # calls it, so loading here and running there would leave a second, idle team behind.
    with ThreadPoolExecutor(1, thread_name_prefix="runner") as executor:
        try:
            engine = _build(order.config, mailbox, executor, started_s)
        except Exception as error:  # the front end must hear of any of them
            if not isinstance(error, TailraceError):
                log.exception("start_failed")
            _announce_fatal(mailbox, error)
            end_now(1)  # the runner's thread may be waiting for a lost device
        try:
            Worker(mailbox, engine, order.places).run()
        except Exception as error:  # a bug of ours: the front ends hear of it before we end
            log.exception("engine_failed")
            _announce_fatal(mailbox, error)
            end_now(1)
    mailbox.close()
    return 0


def _announce_fatal(mailbox: Mailbox, error: Exception) -> None:
    text = str(error) if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"
    mailbox.receive()
    mailbox.announce(EngineFatal(text))
    give_up_s = monotonic() + _HEARING_S
    while True:
        mailbox.wait(_IDLE_POLL_MS)  # a front end that connects only now is told too
        mailbox.receive()
        if mailbox.has_company or monotonic() > give_up_s:
            break
    mailbox.close()


def _build(
    config: EngineConfig, mailbox: Mailbox, executor: ThreadPoolExecutor, started_s: float
) -> Engine:
    # torch is imported only here, so that a bad order line fails before seconds of imports.
    from tailrace.engine import setup  # noqa: PLC0415
    from tailrace.engine.early_context import open_context  # noqa: PLC0415
    from tailrace.engine.start_times import StartTimes  # noqa: PLC0415

    times = StartTimes(begun_s=started_s)
    setup.pin_threads(config.threads)
    # From this thread, whose cores are all of the process's: the runner's own is bound to one.
    with ThreadPoolExecutor(2, thread_name_prefix="start") as beside:
        if config.gpus:
            beside.submit(open_context, config.gpus[0])
        folder = _awaited(executor.submit(setup.resolve, config), mailbox)
        mailbox.receive()
        mailbox.announce(ModelResolved(str(folder)))
        times.mark("checkpoint")
        grammars = cache(partial(beside.submit, setup.load_grammars, folder))  # once
        loading = executor.submit(setup.load, config, folder, times=times, grammars=grammars)
        loaded = _awaited(loading, mailbox)
    load_s = time.monotonic() - started_s
    submit = setup.watched(config, loaded, executor.submit)
    warmup_s = setup.warm_up(config, loaded, submit, times) if config.warmup else 0.0
    engine = setup.make_engine(config, loaded, submit)
    # What is here stays for good. A full collection over it (torch's modules above all) takes
    # 77 ms, in the middle of a step; without it, nothing.
    gc.collect()
    gc.freeze()
    times.mark("rest")
    log.info("start", phases=times.describe())
    mailbox.receive()
    mailbox.announce(setup.ready(config, loaded, engine, load_s, warmup_s))
    return engine


def _awaited(result: Future[T], mailbox: Mailbox) -> T:
    """Wait on another thread's result; who connects meanwhile is told what was announced.

    A front end may come late: it has things of its own to import. It reads the tokenizer once it
    knows the folder, which should not wait for the weights.
    """
    while not result.done():
        mailbox.wait(_LOADING_POLL_MS)
        mailbox.receive()
    return result.result()


def _first_line(descriptor: int) -> bytes:
    """Read up to the first line's end, unbuffered: the poller watches the rest of the pipe."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
