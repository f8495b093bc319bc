"""One HTTP exchange: what came, and how to answer it, over plain ASGI."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tailrace.clock import monotonic
from tailrace.errors import RequestError
from tailrace.server import ingest
from tailrace.server.error_bodies import anthropic_error, openai_error, speaks_anthropic
from tailrace.server.timeline import Timeline

if TYPE_CHECKING:
    from tailrace.access import KeyHolder
    from tailrace.config import ServerConfig
    from tailrace.server.services import Services

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

DROP_EXTENSION = "tailrace.drop"
"""In the scope's extensions; its "call" closes the connection at once (see connection.py)."""

FREE_EXTENSION = "tailrace.free"
"""In the scope's extensions; its "call" says whether a send would be done at once."""

PART_EXTENSION = "tailrace.part"
"""In the scope's extensions; its "call" writes a part of a stream that has begun and whose client
is not behind. It says whether it did: otherwise the part is to be sent as usual."""

ARRIVAL_EXTENSION = "tailrace.arrival"
"""In the scope's extensions; its "at_s" is when the request's first byte came, monotonic."""

DRAINED_EXTENSION = "tailrace.drained"
"""In the scope's extensions; its "call" takes a function, which it calls with the time when the
kernel has everything that was written, or the connection is gone."""

LEFT_EXTENSION = "tailrace.left"
"""In the scope's extensions; its "call" takes a function, which it calls once if the connection
ends; None: nobody is to be called any more."""

TIMING_HEADER = "x-tailrace-timing"

_T = TypeVar("_T")
_REQUEST_ID_CHARS = 128


class Request:
    """One request and its answer.

    Attributes:
        method: Upper case.
        path: Decoded.
        headers: By lower-case name; the last of equal names counts.
        request_id: The client's X-Request-Id, or one of ours.
        is_answered: Whether the head of an answer was sent.
        status: Of that answer; 0 before.
        wants_timing: Whether the answer shall tell where its time went.
        timeline: Where that was, so far.
        failure: Why it is not answered as it wished.
        holder: Whose key it brought; None: one without a name, or none.
        was_left: Whether the client's end has ended the work on it.
        is_free: Says whether `write_now` may be called: the client is not behind.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServerConfig) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self.request_id = _request_id(self.headers.get("x-request-id"))
        self.is_answered = False
        self.status = 0
        self.failure: RequestError | None = None
        self.holder: KeyHolder | None = None
        self.wants_timing = self.headers.get(TIMING_HEADER, "").lower() in ("1", "true")
        self._has_body = False
        header_id = self.request_id.encode("latin-1")
        self._extra_headers: list[Header] = [(b"x-request-id", header_id)]
        if speaks_anthropic(self.path):  # whose clients read it there
            self._extra_headers.append((b"request-id", header_id))
        extensions = scope.get("extensions", {})
        self._drop: Callable[[], None] | None = extensions.get(DROP_EXTENSION, {}).get("call")
        self.is_free: Callable[[], bool] = extensions.get(FREE_EXTENSION, {}).get("call", _never)
        self._write_part: Callable[[bytes], bool] = extensions.get(PART_EXTENSION, {}).get(
            "call", _unwritten
        )
        self._when_drained: Callable[[Callable[[float], None]], None] = extensions.get(
            DRAINED_EXTENSION, {}
        ).get("call", _at_once)
        self._when_left: Callable[[Callable[[], None] | None], None] = extensions.get(
            LEFT_EXTENSION, {}
        ).get("call", _forgotten)
        self._is_ended_when_left = False
        self.was_left = False
        arrival_s = extensions.get(ARRIVAL_EXTENSION, {}).get("at_s")
        self.timeline = Timeline(monotonic() if arrival_s is None else arrival_s)
        self._at_end: Callable[[float], None] | None = None
        self._delivered_s: float | None = None
        self._awaits_delivery = False
        self._receive = receive
        self._send = send
        self._config = config

    def add_header(self, name: bytes, value: bytes) -> None:
        """Send one more header with the answer."""
        self._extra_headers.append((name, value))

    async def body(self, see: Callable[[bytearray], None] | None = None) -> bytes:
        """Read the whole body, once.

        Args:
            see: See `ingest.read_body`.

        Raises:
            RequestError: 408, 413 or 415.
            ClientGoneError: The client left before its end.
        """
        coding = self.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise RequestError(
                f"the body's content-encoding is {coding[:40]!r}; send it uncompressed", status=415
            )
        body = await ingest.read_body(
            self._receive,
            self.headers.get("content-length"),
            max_bytes=self._config.max_body_bytes,
            timeout_s=self._config.body_timeout_s,
            see=see,
        )
        self._has_body = True
        self.timeline.enter("tokenise")
        self._end_when_left()
        return body

    async def decode(self, kind: type[_T], see: Callable[[bytearray], None] | None = None) -> _T:
        """Read the body as JSON of a type.

        Args:
            kind: The type.
            see: See `ingest.read_body`.

        Raises:
            RequestError: 400, with `param` where a field is at fault; 408, 413 or 415.
        """
        return ingest.decode(await self.body(see), kind)

    def _end_when_left(self) -> None:
        """Cancel the task at hand if the client leaves, until `looks_itself` or the answer.

        A body is whole, so nobody receives: work on a long prompt would not hear of it.
        """
        task = asyncio.current_task()

        def left() -> None:
            self.was_left = True
            if task is not None:
                task.cancel()

        self._when_left(left)
        self._is_ended_when_left = True

    def looks_itself(self) -> None:
        """Say that the caller sees to the client's end, by `disconnected`, or need not."""
        if self._is_ended_when_left:  # else the connection may ask for its next request by now
            self._is_ended_when_left = False
            self._when_left(None)

    async def disconnected(self) -> None:
        """Wait until the client is gone (or the answer complete)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def drop(self) -> None:
        """Close the connection at once, whatever is under way."""
        if self._drop is not None:
            self._drop()

    async def send_json(self, status: int, value: Any) -> None:
        """Answer with a value as JSON."""
        await self.send_json_bytes(status, msgspec.json.encode(value))

    async def send_json_bytes(self, status: int, data: bytes) -> None:
        """Answer with JSON that is encoded already."""
        await self.send_bytes(status, data, b"application/json")

    async def send_bytes(self, status: int, data: bytes, content_type: bytes) -> None:
        """Answer with one body."""
        length = str(len(data)).encode()
        await self._start(status, [(b"content-type", content_type), (b"content-length", length)])
        await self.finish(b"" if self.method == "HEAD" else data)

    async def send_nothing(self) -> None:
        """Answer 204, which has neither a body nor its headers."""
        await self._start(204, [])
        await self.finish()

    async def send_error(self, error: RequestError) -> None:
        """Answer with an error, in the shape that the path's clients expect."""
        if error.retry_after_s is not None:
            # Whole seconds, rounded up: a client that obeys is not too early.
            self.add_header(b"retry-after", str(max(1, int(error.retry_after_s + 0.999))).encode())
        data = (
            anthropic_error(error, self.request_id)
            if speaks_anthropic(self.path)
            else openai_error(error)
        )
        await self.send_json_bytes(error.status, data)

    async def start_stream(self) -> None:
        """Begin an answer of server-sent events."""
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # a proxy would hold events back
            ],
        )

    async def write(self, data: bytes) -> None:
        """Send a part of a stream; blocks while the client is behind."""
        await self._send_part({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes) -> None:
        """Send a part of a stream, its head first where need be, without a task of its own.

        Raises:
            RuntimeError: The server below would have had to wait: `is_free` was not asked.
        """
        if not self.is_answered:
            _run_now(self.start_stream())
        if self._write_part(data):
            self.timeline.part_written()
        else:
            _run_now(self.write(data))

    async def finish(self, data: bytes = b"") -> None:
        """Send a stream's last part."""
        await self._send_part({"type": "http.response.body", "body": data})
        self.timeline.is_complete = True
        self._when_drained(self._note_delivery)

    def at_end(self, told: Callable[[float], None]) -> None:
        """Have `told` called at the end, with the time at which the kernel had the last byte."""
        self._at_end = told

    @property
    def has_account(self) -> bool:
        """Whether anybody wants to know of the end."""
        return self._at_end is not None

    def end(self) -> None:
        """Say that nothing more is sent: who asked is told, once the kernel has all of it."""
        self.looks_itself()
        if self._delivered_s is not None:
            self._tell_end(self._delivered_s)
        elif self.timeline.is_complete:
            self._awaits_delivery = True
        else:  # cut off: there is nothing to wait for
            self._tell_end(monotonic())

    def _note_delivery(self, at_s: float) -> None:
        self._delivered_s = at_s
        if self._awaits_delivery:
            self._tell_end(at_s)

    def _tell_end(self, at_s: float) -> None:
        told, self._at_end = self._at_end, None  # which leads back here
        if told is not None:
            told(at_s)

    async def _send_part(self, message: Message) -> None:
        self.timeline.send_began()
        try:
            await self._send(message)
        finally:
            self.timeline.send_ended()

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.looks_itself()
        self.is_answered = True
        self.status = status
        self.timeline.enter("emit")
        if not self._has_body and self._brings_body():
            # Bytes of an unread body may follow: this connection serves no further request.
            headers.append((b"connection", b"close"))
        start = {"type": "http.response.start", "status": status}
        await self._send(start | {"headers": headers + self._extra_headers})

    def _brings_body(self) -> bool:
        length = self.headers.get("content-length", "0")
        return length != "0" or "transfer-encoding" in self.headers


Handler = Callable[["Services", Request], Awaitable[None]]
"""A route: sends exactly one answer through the request."""


def _never() -> bool:
    return False


def _unwritten(_data: bytes) -> bool:
    """Of a server that has no shorter way than `send`."""
    return False


def _forgotten(_left: Callable[[], None] | None) -> None:
    """Of a server that tells nobody of the connection's end but through `receive`."""


def _at_once(told: Callable[[float], None]) -> None:
    told(monotonic())


def _run_now(sending: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that does not wait; one of uvicorn's sends while its flow is not paused."""
    try:
        sending.send(None)
    except StopIteration:
        return
    sending.close()
    raise RuntimeError("a send that was to be done at once has to wait")


def _request_id(given: str | None) -> str:
    if given and len(given) <= _REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
