"""How soon tokens leave a front end that is nearly, or more than, busy: the outbox against FIFO.

    python benchmarks/emitter.py --seconds 5 --rounds 3

The real application under uvicorn, pinned to one core, over loopback sockets; the engine is a mock
in the same process that puts each stream's tokens at 20 ms steps, the first one 0.2 s after the
request came, as after a prefill (so that what is measured is the way out alone). The client is
another process, on the other cores, that only reads. Delays are stamped in the server: from a
token's enqueueing to the write of its event. FIFO is the same code with an outbox that writes every
stream in order of arrival, all in one go.

First the capacity: all streams get a token as soon as the last round's are written. Then 0.9 and
1.3 times that load (more streams at the same pace), 5 % of the requests with priority -1.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import multiprocessing
import os
import random
import selectors
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mock_engine import MockEngine
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tailrace.bench import stats
from tailrace.config import Config, EngineConfig, ServerConfig
from tailrace.server import http as server_http
from tailrace.server import listening, serve
from tailrace.server.engine_client import OutputQueue
from tailrace.server.outbox import Outbox, Outlet
from tailrace.server.services import Services, TextServices
from tailrace.telemetry.metrics import Metrics
from tailrace.telemetry.request_log import RequestLog
from tailrace.text.chat import ChatTemplate
from tailrace.text.decoding import BYTE_SYMBOLS
from tailrace.text.tokenizer import Tokenizer as TextTokenizer
from tailrace.types import TokenOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import uvicorn

    from tailrace.server.engine_client import LastWord
    from tailrace.types import EngineRequest

STEP_S = 0.02
PREFILL_S = 0.2
TOKENS_PER_REQUEST = 100
HIGH_SHARE = 0.05
PACE_TOKENS_PER_S = 1 / STEP_S


@dataclasses.dataclass
class Stream:
    """One request at the mock engine."""

    request_id: str
    number: int
    priority: int
    queue: OutputQueue
    left: int
    ready_s: float
    has_begun: bool = False
    due: collections.deque[tuple[float, bool]] = dataclasses.field(
        default_factory=collections.deque
    )


@dataclasses.dataclass
class Delays:
    """Of the measured time, in seconds."""

    first: dict[int, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    later: dict[int, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    events: int = 0


class FifoOutbox(Outbox):
    """What an outbox is compared with."""

    def __init__(self) -> None:
        super().__init__(streams_per_round=2**31)

    def add(self, outlet: Outlet) -> None:
        super().add(Equal(outlet.write_pending))


@dataclasses.dataclass
class Equal:
    """A stream as good as any."""

    write_pending: Callable[[], None]
    priority = 0
    has_begun = False
    turn: int = 0


class Paced(MockEngine):
    """Tokens come when `pace` says so."""

    def __init__(self) -> None:
        super().__init__(context_length=4096, vocab_size=256)
        self.streams: dict[str, Stream] = {}
        self.by_number: dict[int, Stream] = {}
        self.delays = Delays()
        self.outstanding = 0
        """Tokens put and not written."""
        self.written = asyncio.Event()

    def submit(self, request: EngineRequest) -> OutputQueue:
        number = int(bytes(request.token_ids))
        queue = OutputQueue()
        left = request.sampling.max_tokens
        stream = Stream(
            request.request_id, number, request.priority, queue, left, time.monotonic() + PREFILL_S
        )
        self.streams[request.request_id] = self.by_number[number] = stream
        return queue

    def abort(self, request_ids: Iterable[str], on_last: LastWord | None = None) -> None:
        for request_id in request_ids:
            self.streams.pop(request_id, None)
            if on_last is not None:
                on_last(request_id, None)

    def put_all(self) -> None:
        """Give every stream its next token."""
        now = time.monotonic()
        for stream in [s for s in self.streams.values() if s.ready_s <= now]:
            stream.left -= 1
            is_last = stream.left == 0
            stream.due.append((now, not stream.has_begun))
            stream.has_begun = True
            self.outstanding += 1
            stream.queue.put_nowait(
                TokenOutput(stream.request_id, [97], finish_reason="length" if is_last else None)
            )
            if is_last:
                del self.streams[stream.request_id]

    def note_written(self, number: int, data: bytes) -> None:
        stream = self.by_number[number]
        now = time.monotonic()
        for _ in range(min(data.count(b'{"token"'), len(stream.due))):
            put_s, is_first = stream.due.popleft()
            kind = self.delays.first if is_first else self.delays.later
            kind[stream.priority].append(now - put_s)
            self.delays.events += 1
            self.outstanding -= 1
        self.written.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=200, help="of the capacity's measurement")
    options = parser.parse_args()
    logging.disable()  # streams are cut off at the end of each run, and would say so
    cores = sorted(os.sched_getaffinity(0))
    capacities = [
        measure(cores, options.streams, options.seconds, is_fifo=False, paced=False)[1]
        for _ in range(options.rounds)
    ]
    capacity = statistics.median(capacities)
    shown = " ".join(f"{c:.0f}" for c in capacities)
    print(f"capacity: {capacity:.0f} events/s on one core (rounds: {shown})\n", flush=True)
    print(f"{'load':>5} {'order':<6} {'events/s':>9}   first-token delay P50 / P99 ms, by priority")
    for share in (0.9, 1.3):
        streams = int(share * capacity / PACE_TOKENS_PER_S)
        for round_ in range(options.rounds):
            for is_fifo in (False, True):
                result, rate = measure(cores, streams, options.seconds, is_fifo=is_fifo, paced=True)
                name = "FIFO" if is_fifo else "outbox"
                kinds = {
                    "high": result.first[-1],
                    "normal": result.first[0],
                    "later tokens": result.later[0] + result.later[-1],
                }
                columns = "   ".join(
                    f"{kind} {percentile(found, 50):.2f} / {percentile(found, 99):.2f} "
                    f"(n={len(found)})"
                    for kind, found in kinds.items()
                )
                print(f"{share:>5} {name:<6} {rate:>9.0f}   {columns}   round {round_}", flush=True)


def measure(
    cores: list[int], streams: int, seconds: float, *, is_fifo: bool, paced: bool
) -> tuple[Delays, float]:
    """Return the delays and the events per second of one run."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        client = context.Process(target=read_all, args=(port, streams, cores[1:] or cores))
        client.start()
        try:
            os.sched_setaffinity(0, cores[:1])
            with asyncio.Runner(loop_factory=listening.loop_factory()) as runner:
                return runner.run(
                    serve_and_put(listener, streams, seconds, is_fifo=is_fifo, paced=paced)
                )
        finally:
            os.sched_setaffinity(0, cores)
            client.terminate()
            client.join()


async def serve_and_put(
    listener: socket.socket, streams: int, seconds: float, *, is_fifo: bool, paced: bool
) -> tuple[Delays, float]:
    engine = Paced()
    server = uvicorn_server(engine, streams, FifoOutbox() if is_fifo else Outbox())
    write, write_now = server_http.Request.write, server_http.Request.write_now

    async def stamped(self: server_http.Request, data: bytes) -> None:
        engine.note_written(int(self.request_id), data)
        await write(self, data)

    def stamped_now(self: server_http.Request, data: bytes) -> None:
        engine.note_written(int(self.request_id), data)  # our connection writes it itself
        write_now(self, data)

    server_http.Request.write, server_http.Request.write_now = stamped, stamped_now
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(60):
            while len(engine.streams) < streams:  # noqa: ASYNC110 -- once, before it counts
                await asyncio.sleep(0.01)
        put = asyncio.create_task(paced_puts(engine) if paced else eager_puts(engine))
        await asyncio.sleep(1.0)
        engine.delays = Delays()
        began = time.monotonic()
        await asyncio.sleep(seconds)
        delays, took_s = engine.delays, time.monotonic() - began
        put.cancel()
        return delays, delays.events / took_s
    finally:
        server_http.Request.write, server_http.Request.write_now = write, write_now
        server.should_exit = server.force_exit = True
        with contextlib.suppress(Exception):
            await asyncio.wait_for(serving, 10)


async def paced_puts(engine: Paced) -> None:
    """A token for every stream each step, however late the loop is."""
    due = time.monotonic()
    while True:
        due += STEP_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        engine.put_all()


async def eager_puts(engine: Paced) -> None:
    """The next token as soon as the last ones are written."""
    while True:
        engine.put_all()
        await asyncio.sleep(0)
        while engine.outstanding:
            engine.written.clear()
            await engine.written.wait()


def uvicorn_server(engine: Paced, streams: int, outbox: Outbox) -> uvicorn.Server:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder))
        services = Services(
            config=Config(
                server=ServerConfig(log_level="error"),
                engine=EngineConfig(max_batch_size=2 * streams),
            ),
            engine=engine,
            metrics=Metrics(),
            request_log=RequestLog(""),
            started_s=time.monotonic(),
            text=TextServices("mock", tokenizer, ChatTemplate({}, tokenizer)),
            outbox=outbox,
        )
    settings = serve._uvicorn_config(services)  # noqa: SLF001 -- the server as it is
    return serve._Server(settings)  # noqa: SLF001


def write_tokenizer(folder: Path) -> TextTokenizer:
    built = Tokenizer(models.BPE(vocab=BYTE_SYMBOLS, merges=[]))  # an id is a byte
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    built.save(str(folder / "tokenizer.json"))
    return TextTokenizer.load(folder)


def read_all(port: int, streams: int, cores: list[int]) -> None:
    """The client: keep `streams` requests open, one after the other on each connection."""
    os.sched_setaffinity(0, cores)
    numbers = itertools.count()
    draw = random.Random(0)
    selector = selectors.DefaultSelector()

    def send(connection: socket.socket, max_tokens: int = TOKENS_PER_REQUEST) -> None:
        number = next(numbers)
        body = json.dumps(
            {
                "prompt": str(number),
                "max_tokens": max_tokens,
                "stream": True,
                "priority": -1 if draw.random() < HIGH_SHARE else 0,
            }
        ).encode()
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\n"
            b"x-request-id: %d\r\ncontent-length: %d\r\n\r\n%b" % (number, len(body), body)
        )

    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        send(connection, draw.randint(1, TOKENS_PER_REQUEST))  # so that they do not end together
        selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = key.fileobj.recv(1 << 16)
            if not data:
                selector.unregister(key.fileobj)
            elif data.endswith(b"0\r\n\r\n"):
                send(key.fileobj)


def percentile(delays_s: list[float], percent: int) -> float:
    """Nearest rank, in milliseconds."""
    return 1000 * stats.percentile(sorted(delays_s), percent) if delays_s else float("nan")


if __name__ == "__main__":
    main()
