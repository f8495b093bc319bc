"""HTTP/1.1 as a load client needs it: one exchange a connection, chunks stamped when read.

The stamp is taken first thing in `data_received`, before any parsing, so that the client's own
work on one chunk is not counted as the server's. Nor is its work on other chunks: an engine's step
sends all its streams a chunk at once, and the last would wait until all others are parsed. So
bytes are read and stamped first, and parsed afterwards in small portions, between which the event
loop reads what has come meanwhile (`Inbox`). Addresses are resolved once, before the run.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

import httptools

from tailrace.clock import Clock, monotonic
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_ERROR_BYTES = 2000
"""How much of a refusal's body is kept for the record."""


class WireError(Exception):
    """The peer broke the protocol or the connection."""


@dataclass(frozen=True)
class Endpoint:
    """A server's base URL, taken apart and resolved."""

    url: str
    """Without a trailing slash and without /v1."""
    host: str
    address: str
    port: int
    tls: ssl.SSLContext | None = None
    api_key: str = ""

    def request(
        self, method: str, path: str, body: bytes | None = None, request_id: str = ""
    ) -> bytes:
        """Return the bytes of a request to `path` below the base URL."""
        base = urlsplit(self.url).path
        lines = [
            f"{method} {base}{path} HTTP/1.1",
            f"Host: {urlsplit(self.url).netloc.rpartition('@')[2]}",
            "Connection: close",
            "User-Agent: tailrace-bench",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if request_id:
            lines.append(f"X-Request-Id: {request_id}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


async def resolve(url: str, *, api_key: str = "", timeout_s: float = 10.0) -> Endpoint:
    """Find the address behind `url` that takes connections.

    Raises:
        ConfigError: The URL is malformed, or nothing answers there.
    """
    parts, port = _checked_url(url)
    host = parts.hostname or ""
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    base = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {timeout_s:.0f} s"
        raise ConfigError(
            f"--url {url}: cannot connect ({reason}); is the server running there?"
        ) from error
    address = writer.get_extra_info("peername")[0]
    writer.close()
    return Endpoint(base, host, address, port, tls, api_key)


def _checked_url(url: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url.strip())
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(
            f"--url {url}: {error}; give one such as http://127.0.0.1:8001"
        ) from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"--url {url}: give one such as http://127.0.0.1:8001")
    return parts, port


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes


class Inbox:
    """Bytes that were read and stamped, and wait to be parsed; shared by a load's exchanges."""

    PORTION = 16
    """Parsed at a time: about a quarter of a millisecond in which nothing else is read."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def put(self, work: Callable[[], None]) -> None:
        """Do `work` when everything before it is done and the loop has read what is there."""
        self._waiting.append(work)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._do_some)

    def _do_some(self) -> None:
        try:
            for _ in range(min(self.PORTION, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._is_due = bool(self._waiting)
            if self._is_due:
                # Called soon is called after the next look at the sockets.
                asyncio.get_running_loop().call_soon(self._do_some)


class Exchange(asyncio.Protocol):
    """One request and its answer on one connection.

    Await `done`: it resolves when the body is complete, or raises WireError.
    """

    def __init__(
        self,
        request: bytes,
        on_body: Callable[[Exchange, bytes], None],
        clock: Clock,
        inbox: Inbox | None = None,
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_s: float | None = None
        self.read_s = 0.0
        """When the bytes now being parsed were read."""
        self._request = request
        self._on_body = on_body
        self._clock = clock
        self._inbox = inbox
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.BaseTransport | None = None
        self._ends_with_connection = True

    @property
    def status(self) -> int | None:
        """The HTTP status, once known."""
        status = self._parser.get_status_code()
        return status or None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]  # a stream's transport
        self.sent_s = self._clock()

    def data_received(self, data: bytes) -> None:
        """Stamp, then parse: at once, or when the inbox comes to it."""
        read_s = self._clock()
        if self._inbox is None:
            self._digest(read_s, data)
        else:
            self._inbox.put(partial(self._digest, read_s, data))

    def _digest(self, read_s: float, data: bytes) -> None:
        self.read_s = read_s
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(WireError(f"not HTTP: {error.__context__ or error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Finish a body that ends with the connection; otherwise it was cut off."""
        if self._inbox is None:
            self._end(exc)
        else:
            self._inbox.put(partial(self._end, exc))

    def _end(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc is None and self.status is not None and self._ends_with_connection:
            self.done.set_result(None)
        else:
            stage = "in the body" if self.status else "before an answer"
            self.fail(WireError(f"connection closed {stage}" + (f" ({exc})" if exc else "")))

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Learn how the body ends."""
        chunked = name.lower() == b"transfer-encoding" and b"chunked" in value.lower()
        if chunked or name.lower() == b"content-length":
            self._ends_with_connection = False

    def on_body(self, body: bytes) -> None:
        """Pass on body bytes; their stamp is `read_s`."""
        if not self.done.done():
            self._on_body(self, body)

    def on_message_complete(self) -> None:
        """Finish."""
        self.finish()

    def finish(self) -> None:
        """End the exchange as complete, whatever else the peer may send."""
        if not self.done.done():
            self.done.set_result(None)
        self.close()

    def fail(self, error: Exception) -> None:
        """End the exchange with `error`, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)
        self.close()

    def close(self) -> None:
        """Drop the connection; safe to repeat."""
        if self._transport is not None:
            self._transport.close()


async def open_exchange(
    endpoint: Endpoint,
    request: bytes,
    on_body: Callable[[Exchange, bytes], None],
    *,
    clock: Clock = monotonic,
    inbox: Inbox | None = None,
) -> Exchange:
    """Connect and send; the caller awaits `.done` and closes.

    Args:
        endpoint: The server.
        request: All its bytes.
        on_body: Gets the body's bytes; must not raise.
        clock: For the stamps.
        inbox: Where bytes wait until they are parsed; None parses them as they come.

    Raises:
        OSError: No connection.
    """
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(
        lambda: Exchange(request, on_body, clock, inbox),
        endpoint.address,
        endpoint.port,
        ssl=endpoint.tls,
        server_hostname=endpoint.host if endpoint.tls else None,
    )
    return exchange


async def fetch(
    endpoint: Endpoint,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    timeout_s: float = 60.0,
) -> Answer:
    """Make one whole request.

    Raises:
        OSError: No connection, or no answer in time (TimeoutError is one).
        WireError: The answer broke off or is not HTTP.
    """
    parts: list[bytes] = []
    async with asyncio.timeout(timeout_s):
        exchange = await open_exchange(
            endpoint, endpoint.request(method, path, body), lambda _, data: parts.append(data)
        )
        try:
            await exchange.done
        finally:
            exchange.close()
    return Answer(exchange.status or 0, b"".join(parts))
