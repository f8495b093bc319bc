"""A server on this machine that costs next to nothing and knows when it sent each chunk.

`python -m tailrace.bench.load.loopback STAMPS_FILE` serves completions of `max_tokens` chunks at a
steady pace, and writes one line for each finished stream: its X-Request-Id and the monotonic
stamps of its chunks, each taken just before the chunk was handed to the kernel. What the client
read later than that is what the client (and the loopback device) added.

    steps    all streams get their chunk in one burst, as from an engine's step
    spread   each stream keeps its own phase
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import httptools
import msgspec

from tailrace.bench.load.event_loop import run
from tailrace.bench.wire import Endpoint
from tailrace.clock import monotonic
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATTERNS = ("steps", "spread")
CHUNKS_PER_S = 20.0
"""Of each stream: as fast as most people read, and as a busy engine serves."""
CHUNK_BYTES = 250
"""About what an OpenAI-style completion chunk takes."""
START_TIMEOUT_S = 30.0
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(content: object) -> bytes:
    return _framed(b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk() -> bytes:
    content = {"id": "cmpl-", "object": "text_completion", "choices": [{"index": 0, "text": " a"}]}
    short = len(_event(content))
    content["id"] = "cmpl-" + "0" * (CHUNK_BYTES - short)
    return _event(content)


CHUNK = _chunk()


class _Asked(msgspec.Struct):
    prompt: str
    max_tokens: int


class _Stream(asyncio.Protocol):
    """One connection, one completion."""

    def __init__(self, pace: _Pace) -> None:
        self.left = 0
        self._pace = pace
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._request_id = ""
        self._asked = 0
        self._stamps: list[float] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]  # a stream's transport

    def data_received(self, data: bytes) -> None:
        """Parse the request."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's name
        """Send no more."""
        self._pace.drop(self)

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Learn the request's id."""
        if name.lower() == b"x-request-id":
            self._request_id = value.decode()

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Begin to stream."""
        asked = msgspec.json.decode(bytes(self._body), type=_Asked)
        self._asked = self.left = asked.max_tokens
        self._write(HEAD)
        self._pace.add(self)

    def send(self) -> None:
        """Send the next chunk, and the rest of the answer after the last one."""
        self._stamps.append(monotonic())
        self._write(CHUNK)
        self.left -= 1
        if not self.left:
            self._end()

    def _end(self) -> None:
        finish = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        usage = {"prompt_tokens": 1, "completion_tokens": self._asked}
        usage_event = _event({"choices": [], "usage": usage})
        # On disk before the client can know that the answer is whole.
        self._pace.log(self._request_id, self._stamps)
        self._write(_event(finish) + usage_event + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        self._pace.drop(self)
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


class _Pace:
    """Sends every stream's chunks at its time."""

    def __init__(self, pattern: str, chunks_per_s: float, log: BinaryIO) -> None:
        self._interval_s = 1 / chunks_per_s
        self._pattern = pattern
        self._log = log
        self._streams: set[_Stream] = set()

    def add(self, stream: _Stream) -> None:
        """Take in a stream, whose first chunk is due at once."""
        self._streams.add(stream)
        if self._pattern == "spread":
            self._beat(stream, monotonic())

    def drop(self, stream: _Stream) -> None:
        """Forget a stream."""
        self._streams.discard(stream)

    def log(self, request_id: str, stamps: list[float]) -> None:
        """Write down when a stream's chunks were sent."""
        self._log.write(msgspec.json.encode([request_id, stamps]) + b"\n")
        self._log.flush()

    def _beat(self, stream: _Stream, due_s: float) -> None:
        if stream not in self._streams:
            return
        stream.send()
        next_s = due_s + self._interval_s
        delay_s = max(next_s - monotonic(), 0.0)
        asyncio.get_running_loop().call_later(delay_s, self._beat, stream, next_s)

    async def step(self) -> None:
        """Run steps until cancelled, where that is the pattern."""
        due_s = monotonic()
        while self._pattern == "steps":
            due_s += self._interval_s
            await asyncio.sleep(max(due_s - monotonic(), 0.0))
            for stream in tuple(self._streams):
                stream.send()


async def _serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # A parent that is gone needs no server.
    loop.add_reader(sys.stdin.fileno(), stop.set)
    listener = socket.create_server(
        ("127.0.0.1", options.port), backlog=4096, reuse_port=options.port != 0
    )
    with Path(options.stamps).open("wb") as log:  # noqa: ASYNC230  # once, before anyone connects
        pace = _Pace(options.pattern, options.chunks_per_s, log)
        server = await loop.create_server(lambda: _Stream(pace), sock=listener, backlog=4096)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        steps = asyncio.create_task(pace.step())
        await stop.wait()
        steps.cancel()
        server.close()


def main() -> None:
    """Serve until SIGTERM, or until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stamps")
    parser.add_argument("--port", type=int, default=0, help="shared with others where given")
    parser.add_argument("--pattern", choices=PATTERNS, default=PATTERNS[0])
    parser.add_argument("--chunks-per-s", type=float, default=CHUNKS_PER_S)
    options = parser.parse_args()
    run(_serve(options))


@dataclass
class Loopback:
    """The running server, as its parent sees it."""

    endpoint: Endpoint
    stamps_files: list[Path]
    _known: dict[str, list[float]] = field(default_factory=dict)

    def stamps_s(self) -> dict[str, list[float]]:
        """Return the send stamps of every finished stream, by request id."""
        for file in self.stamps_files:
            for line in file.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    request_id, stamps = msgspec.json.decode(line, type=tuple[str, list[float]])
                    self._known[request_id] = stamps
        return self._known


@asynccontextmanager
async def loopback(
    folder: Path,
    *,
    pattern: str = PATTERNS[0],
    chunks_per_s: float = CHUNKS_PER_S,
    processes: int = 1,
) -> AsyncIterator[Loopback]:
    """Run the server in processes of its own for the length of the block.

    Args:
        folder: Gets the stamps.
        pattern: One of `PATTERNS`.
        chunks_per_s: Of each stream.
        processes: How many share the port.

    Raises:
        ConfigError: It does not start.
    """
    files = [folder / f"stamps-{number}.jsonl" for number in range(processes)]
    with socket.socket() as held:
        # Held, and not listening: the port is ours to share among the processes.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        arguments = ["--port", str(port), "--pattern", pattern, "--chunks-per-s", str(chunks_per_s)]
        running: list[asyncio.subprocess.Process] = []
        try:
            for file in files:
                running.append(await _start(file, arguments))  # noqa: PERF401  # kept if one fails
            yield Loopback(
                Endpoint(f"http://127.0.0.1:{port}", "127.0.0.1", "127.0.0.1", port), files
            )
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            for process in running:
                await process.wait()


async def _start(file: Path, arguments: list[str]) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tailrace.bench.load.loopback",
        str(file),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # A Ctrl-C in the terminal is this process's to answer.
        start_new_session=True,
    )
    assert process.stdout is not None  # noqa: S101  # a pipe was asked for
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
    except TimeoutError:
        line = b""
    if not line:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise ConfigError(
            "the local server that checks the client did not start: see what it wrote above"
        )
    return process


if __name__ == "__main__":
    main()
