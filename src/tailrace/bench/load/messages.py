"""What a fleet and its workers tell each other: MessagePack with its length before it, over pipes.

    parent  Job            Go          Halt            stdin of the worker
    worker      Ready         Pulse, Outcome ... Bye   its stdout

A pipe that ends is a message too: the parent's end tells a worker to stop, a worker's end before
`Bye` that it died.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from tailrace.bench.load.shot import Shot
from tailrace.bench.records import Record

_LENGTH = struct.Struct("!I")


class Job(msgspec.Struct, tag=True):
    """A worker's share. Sent through the pipe, so that the key stands in no file or list."""

    worker: int
    url: str
    host: str
    address: str
    port: int
    has_tls: bool
    api_key: str
    path: str
    timeout_s: float
    until_s: float | None
    shots: list[Shot]


class Go(msgspec.Struct, tag=True):
    """Begin when the machine's monotonic clock reads `start_s`."""

    start_s: float


class Halt(msgspec.Struct, tag=True):
    """Cancel what is in flight, send its records, and end."""


class Ready(msgspec.Struct, tag=True):
    """The share is understood and prepared."""


class Outcome(msgspec.Struct, tag=True):
    """A request ended."""

    record: Record


class Pulse(msgspec.Struct, tag=True):
    """How the worker stands, and its event loop's lags since the last pulse."""

    sent: int
    in_flight: int
    chunks: int
    lags_s: list[float]


class Bye(msgspec.Struct, tag=True):
    """All was sent; the pipe ends after it."""

    cpu_s: float
    """CPU time of the run, this process's alone."""


ToWorker = Job | Go | Halt
ToParent = Ready | Outcome | Pulse | Bye

_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_TO_PARENT = msgspec.msgpack.Decoder(ToParent)
_ENCODER = msgspec.msgpack.Encoder()


def pack(message: ToWorker | ToParent) -> bytes:
    """Return a message as it goes into the pipe."""
    data = _ENCODER.encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_order(stream: asyncio.StreamReader) -> ToWorker | None:
    """Return the parent's next message, or None where the pipe ended."""
    data = await _read(stream)
    return None if data is None else _TO_WORKER.decode(data)


async def read_report(stream: asyncio.StreamReader) -> ToParent | None:
    """Return the worker's next message, or None where the pipe ended."""
    data = await _read(stream)
    return None if data is None else _TO_PARENT.decode(data)


async def _read(stream: asyncio.StreamReader) -> bytes | None:
    try:
        (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        return await stream.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
