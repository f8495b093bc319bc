"""uvicorn's HTTP connection with what it lacks.

A deadline and a bound for request heads: uvicorn closes idle connections between requests, but
not one whose request head never completes, and it bounds a head by memory alone.
An end for clients that do not take an answer: uvicorn closes such a connection, but a close waits
for what is still to be written, for ever.
A way to drop a connection, to know whether it takes bytes now, to write a stream's part without a
coroutine, to know when a request's first byte came, and when the kernel has its answer's last: see
http.py.
Bodies beside an offer to upgrade, which Java's HttpClient and `curl --http2` make with every
request: httptools passes over such a body and would take it for the next request.
An end for every request of a connection that is lost: uvicorn tells only the latest of those that
came behind each other, and reads nothing, not even the end, while one waits behind another. Work
that waits for nothing from the client, such as tokenising, may ask to be told, too.
Streams without chunks to HTTP/1.0, which has none.
A gentle end where an answer comes before its body is whole (a wrong key, a body too large): to
close with bytes unread is a reset, and many clients would see that in place of the answer.
"""

from __future__ import annotations

import select
import weakref
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tailrace.clock import monotonic
from tailrace.server.http import (
    ARRIVAL_EXTENSION,
    DRAINED_EXTENSION,
    DROP_EXTENSION,
    FREE_EXTENSION,
    LEFT_EXTENSION,
    PART_EXTENSION,
)

if TYPE_CHECKING:
    from asyncio import TimerHandle
    from collections.abc import Awaitable, Callable

MAX_HEAD_BYTES = 64 * 1024
MAX_READ_AHEAD = 8
"""Requests that are read while one before them is answered, so that a client's end is seen. One
that sends more is read again when they are answered; until then its end is looked for."""
MAX_READ_AHEAD_BYTES = 1024 * 1024
"""Likewise, of the bodies of those requests together."""
LOOK_S = 1.0
"""How often a connection that is not read is looked at for its end."""
LINGER_S = 5.0
LINGER_BYTES = 64 * 1024 * 1024
"""Of a body that nobody reads, so much is thrown away after the answer, for so long."""
_ALONE = b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_STALLED = b"HTTP/1.1 408 Request Timeout" + _ALONE
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large" + _ALONE
_NO_MORE = getattr(select, "POLLRDHUP", 0)  # Linux has it, even ahead of bytes nobody has read
_BROKEN = select.POLLHUP | select.POLLERR
_FRAMING = (b"content-length", b"transfer-encoding")


class _HeadTooLargeError(Exception):
    """Ends the parser's work; uvicorn then asks for a 400."""


class Connection(HttpToolsProtocol):
    """One client connection.

    A head is under way from the connection's start, and from a later request's first byte, until
    its blank line. While it is, a timer runs. Its size is counted twice: as the parser reports
    its parts, which is exact however the bytes come, and as bytes received, which bounds a single
    endless part that the parser still holds.

        head ................ chunk size, extension . data ... size 0, trailer fields ... next head
        parsed, received      idle                    0        idle, parsed               (anew)

    After the head, bytes that bring the body no further are idle. The parser keeps an unfinished
    trailer field, and appends to it at a cost that grows with it: idle bytes have the head's limit.
    """

    header_timeout_s: float = 10.0
    delivery_timeout_s: float = 60.0
    """A client that takes nothing of a whole answer for so long is dropped, whatever it asked
    next."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: TimerHandle | None = None
        self._head_bytes = 0
        self._parsed_head_bytes = 0
        self._idle_bytes = 0
        self._in_head = True
        self._has_begun = False
        self._is_replaying = False
        self._delivery_timer: TimerHandle | None = None
        self._resumptions = 0
        self._first_byte_s = 0.0
        self._awaiting_drain: list[Callable[[float], None]] = []
        self._look_timer: TimerHandle | None = None
        self._left: Callable[[], None] | None = None
        self._linger_timer: TimerHandle | None = None
        self._lingering_bytes = 0
        self._running: RequestResponseCycle | None = None
        """The request that the application answers; uvicorn's own `cycle` is the latest."""

    def connection_made(self, transport: Any) -> None:
        """Start the first head's deadline."""
        super().connection_made(transport)
        self._extensions: dict[str, dict[object, object]] = {
            DROP_EXTENSION: {"call": transport.abort},
            FREE_EXTENSION: {"call": self._is_free},
            PART_EXTENSION: {"call": self._write_part},
            DRAINED_EXTENSION: {"call": self._when_drained},
            LEFT_EXTENSION: {"call": self._when_left},
        }
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadlines."""
        self._end_head()
        self._unset_keepalive_if_required()  # uvicorn forgets it at a reset
        for timer in (self._delivery_timer, self._linger_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        self._tell_drained()  # as far as it will ever be
        self.pipeline.clear()  # those have not begun
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        left, self._left = self._left, None
        if left is not None:
            left()
        super().connection_lost(exc)
        # They lead back here: in a circle all would stay until the collector comes.
        self._extensions = {}
        self._running = None
        self.cycle = None  # type: ignore[assignment]  # as before the first request
        self.scope = None  # type: ignore[assignment]

    def resume_writing(self) -> None:
        """The kernel has taken what waited."""
        super().resume_writing()
        self._resumptions += 1
        if self._awaiting_drain and not self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits()  # the usual ones
            self._tell_drained()

    def data_received(self, data: bytes) -> None:
        """Count a head's bytes before the parser stores them."""
        if self._linger_timer is not None:
            self._lingering_bytes += len(data)
            if self._lingering_bytes > LINGER_BYTES:
                self.transport.close()
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._idle_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        # Still in the head after all of that: none of those bytes belonged to a body.
        waiting_bytes = self._head_bytes if self._in_head else self._idle_bytes
        if waiting_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def on_body(self, body: bytes) -> None:
        """The body has come further."""
        self._idle_bytes = 0
        super().on_body(body)
        self._read_ahead()  # uvicorn stops at 64 KiB of a body that waits

    def on_message_begin(self) -> None:
        """A request's first byte has come."""
        if self._is_replaying:
            return
        super().on_message_begin()
        self._first_byte_s = monotonic()
        self._has_begun = True
        if not self._in_head:
            self._start_head()

    def on_url(self, url: bytes) -> None:
        """Count the target."""
        if self._is_replaying:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a field."""
        if self._is_replaying:
            return
        self._count(len(name) + len(value) + 4)  # ": " and the line's end
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser did not take."""
        if self._parsed_head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)
        elif self._is_answering():
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        """The head is whole: stop its deadline, offer the application what ASGI lacks."""
        if self._is_replaying:
            return
        self._end_head()
        arrival: dict[object, object] = {"at_s": self._first_byte_s}
        self.scope["extensions"] = self._extensions | {ARRIVAL_EXTENSION: arrival}
        super().on_headers_complete()
        self._read_ahead()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            # uvicorn hands on the instance's own.
            cycle.send = _without_chunks(cycle)  # type: ignore[assignment, method-assign]
        cycle.transport = _GentleTransport(self, cycle)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def close_after(self, cycle: RequestResponseCycle) -> None:
        """Close, once the client has had time to take the answer."""
        if not (cycle.response_complete and cycle.more_body) or self.transport.is_closing():
            self.transport.close()
            return
        self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """An answer is made; what of it the client has not taken has a deadline."""
        super().on_response_complete()
        if self._delivery_timer is None:
            self._watch_delivery()

    def _read_ahead(self) -> None:
        """Go on reading while requests wait behind the running one, so that an end is seen."""
        if not self.pipeline:
            return
        waiting_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) <= MAX_READ_AHEAD and waiting_bytes <= MAX_READ_AHEAD_BYTES:
            self.flow.resume_reading()
        elif self._look_timer is None:
            self._look_later()

    def _look_later(self) -> None:
        self._look_timer = self.loop.call_later(LOOK_S, self._look_for_end)

    def _look_for_end(self) -> None:
        """Close a connection that is not read where the client has ended it.

        The end comes behind all bytes: of more than the kernel's buffer holds it is not there yet,
        and then the first write that is refused tells.
        """
        self._look_timer = None
        if not self.flow.read_paused or self.transport.is_closing():
            return
        watch = select.poll()
        watch.register(self.transport.get_extra_info("socket").fileno(), _NO_MORE)
        seen = watch.poll(0)
        if not seen:
            self._look_later()
        elif seen[0][1] & _BROKEN:
            self.transport.abort()
        else:
            self.transport.close()  # as where its end is read

    def on_message_complete(self) -> None:
        """The request is whole, unless httptools has only passed over its body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _parse(self, data: bytes) -> None:
        """Feed the parser; replaces uvicorn's own way, which loses what follows an upgrade."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline_upgrade()
                data = data[offer.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            else:
                return

    def _decline_upgrade(self) -> None:
        """Go on in HTTP/1.1, as a server may: with a parser that has not seen the offer.

        head with offer | body ... next head      what the client sends
        old parser      |                         stops here, the application is running
                   head | body ... next head      new parser; its head says only where
                                                  the body ends, and goes unreported
        """
        lines = [b"POST / HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name in _FRAMING]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._is_replaying = True
        self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")
        self._is_replaying = False

    def _start_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._parsed_head_bytes = 0
        self._idle_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_timeout_s, self._close_stalled)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_stalled(self) -> None:
        self._head_timer = None
        # A client that has said nothing would take an answer for that to its next request.
        self._refuse(_STALLED if self._has_begun else b"")

    def _watch_delivery(self) -> None:
        """Look again later whether bytes that wait have become fewer."""
        self._delivery_timer = None
        left_bytes = self.transport.get_write_buffer_size()
        if not left_bytes:
            return
        pause = self._resumptions if self.flow.write_paused else None
        self._delivery_timer = self.loop.call_later(
            self.delivery_timeout_s, self._check_delivery, left_bytes, pause
        )

    def _check_delivery(self, before_bytes: int, pause: int | None) -> None:
        """Drop a client that has taken nothing since.

        While an answer is being made, bytes taken may have been replaced by others; but not in one
        and the same `pause`, in which nothing is written.
        """
        is_comparable = pause == self._resumptions or not self._is_answering()
        if is_comparable and self.transport.get_write_buffer_size() >= before_bytes:
            self.transport.abort()
        else:
            self._watch_delivery()

    def _count(self, size: int) -> None:
        self._parsed_head_bytes += size
        if self._parsed_head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError

    def _refuse(self, answer: bytes) -> None:
        """Close; say why, unless it would land amid the answer to an earlier request."""
        if self.transport.is_closing():
            return
        if answer and not self._is_answering():
            self.transport.write(answer)
        self.transport.close()

    def _when_drained(self, told: Callable[[float], None]) -> None:
        """Call `told` with the time once the kernel has all that was written, or never will."""
        transport = self.transport
        if not transport.get_write_buffer_size():
            told(monotonic())
            return
        self._awaiting_drain.append(told)
        if not transport.is_closing():  # else its end tells
            # The transport pauses us at once, and resumes when nothing waits any more.
            transport.set_write_buffer_limits(high=0)

    def _tell_drained(self) -> None:
        awaiting, self._awaiting_drain = self._awaiting_drain, []
        now_s = monotonic()
        for told in awaiting:
            told(now_s)

    def _when_left(self, left: Callable[[], None] | None) -> None:
        """Call `left` if the connection ends."""
        self._left = left

    def _is_free(self) -> bool:
        return not self.flow.write_paused

    def _write_part(self, data: bytes) -> bool:
        """Write a chunk as uvicorn's `send` does, where that would do nothing else."""
        cycle = self._running
        if (
            cycle is None
            or not cycle.chunked_encoding  # not begun, or without chunks
            or cycle.response_complete
            or cycle.disconnected
            or self.flow.write_paused
            or not data  # which would be the last chunk
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


class _GentleTransport:
    """A connection's transport as a request's answer uses it."""

    __slots__ = ("_connection", "_cycle", "is_closing", "write")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        # It holds this one: a circle would keep all of the request until the collector comes.
        self._cycle = weakref.ref(cycle)
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """See `Connection.close_after`."""
        cycle = self._cycle()
        if cycle is not None:
            self._connection.close_after(cycle)


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return the cycle's `send`, but that an answer without a length ends with the connection."""
    found = weakref.ref(cycle)  # which will hold what is returned
    is_endless = False

    async def send_plain(message: Any) -> None:
        nonlocal is_endless
        cycle = found()
        if cycle is None:
            return
        if message["type"] == "http.response.start":
            is_endless = all(name != b"content-length" for name, _ in message["headers"])
            if is_endless:
                cycle.chunked_encoding = False
        elif is_endless:
            cycle.expected_content_length = len(message.get("body", b""))  # of this part
        await RequestResponseCycle.send(cycle, message)

    return send_plain


def connection_class(
    header_timeout_s: float, delivery_timeout_s: float = Connection.delivery_timeout_s
) -> type[Connection]:
    """Return the connection class with deadlines, in seconds, for heads and for whole answers."""
    deadlines = {"header_timeout_s": header_timeout_s, "delivery_timeout_s": delivery_timeout_s}
    return type("Connection", (Connection,), deadlines)
