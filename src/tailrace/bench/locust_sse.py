"""One streamed answer over a gevent socket: how Locust's greenlets talk to a server.

A chunk's arrival is stamped right after `recv` returned its bytes, before any parsing. Locust's own
HTTP clients cannot do that: FastHttpUser hands lines over in blocks of 1,024 bytes, so that a first
token waits for the fifth, and HttpUser's response time ends at the headers.

The bytes become a record through `load.Reading`, as in our own driver, and failures get the same
statuses. What a chunk was worth is therefore decided once, for both drivers.
"""

from __future__ import annotations

import socket as plain_socket
from typing import TYPE_CHECKING

import gevent
import httptools
from gevent import socket, ssl

from tailrace.bench.load.client import LINGER_S, OUR_OWN_LIMITS
from tailrace.bench.load.reading import BAD_BYTES, Reading, fail
from tailrace.bench.sse import SseError
from tailrace.bench.wire import WireError
from tailrace.clock import Clock, monotonic

if TYPE_CHECKING:
    from tailrace.bench.records import Record
    from tailrace.bench.wire import Endpoint

RECV_BYTES = 65536


def client_tls(ca_file: str | None = None) -> ssl.SSLContext:
    """Return what verifies a server as browsers do, made for gevent's sockets.

    `ca_file` names the authorities to trust instead of the system's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(ca_file)
    return context


class StreamClient:
    """Sends requests to one endpoint, one connection each, and fills their records.

    Record times are seconds since `started_s`, which the run sets at its start.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.started_s = clock()
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._tls = tls
        self._clock = clock

    def exchange(self, request: bytes, record: Record) -> None:
        """Send `request`, read its answer to the end and give `record` its status.

        A killed greenlet leaves the record as "cancelled", with what was known by then.
        """
        deadline_s = self.started_s + record.scheduled_s + self._timeout_s
        answer = _Answer(record, self.started_s)
        timeout = gevent.Timeout(max(deadline_s - self._clock(), 0.0))
        try:
            with timeout:
                self._converse(request, record, answer)
            answer.conclude()
        except gevent.Timeout as expired:
            if expired is not timeout:
                raise
            fail(record, "timeout", f"not complete {self._timeout_s:g} s after its time")
        except (WireError, *BAD_BYTES) as error:
            fail(record, "stream", str(error))
        except OSError as error:
            kind = "client" if error.errno in OUR_OWN_LIMITS else "connect"
            fail(record, kind, str(error))
        finally:
            record.http_status = record.http_status or answer.status
            if record.finished_s is None:
                record.finished_s = self._clock() - self.started_s

    def _converse(self, request: bytes, record: Record, answer: _Answer) -> None:
        connection = self._connect()
        try:
            _send(connection, request)
            record.sent_s = self._clock() - self.started_s
            while not answer.is_complete:
                self._receive(connection, answer)
        finally:
            connection.close()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._endpoint.address, self._endpoint.port))
        try:
            # A request is one write: nothing is gained by holding its last segment back.
            connection.setsockopt(plain_socket.IPPROTO_TCP, plain_socket.TCP_NODELAY, 1)
            if self._tls is None:
                return connection
            return self._tls.wrap_socket(connection, server_hostname=self._endpoint.host)
        except BaseException:
            connection.close()
            raise

    def _receive(self, connection: socket.socket, answer: _Answer) -> None:
        if answer.has_ended:
            # The answer is whole; a peer that then keeps the connection open is not waited for.
            connection.settimeout(LINGER_S)
        try:
            data = connection.recv(RECV_BYTES)
        except TimeoutError:
            answer.is_complete = True
            return
        except OSError as error:
            raise WireError(f"{answer.cut_off()} ({error})") from error
        at_s = self._clock()
        if data:
            answer.take(data, at_s)
        else:
            answer.end()


def _send(connection: socket.socket, request: bytes) -> None:
    try:
        connection.sendall(request)
    except OSError as error:
        raise WireError(f"connection closed before an answer ({error})") from error


class _Answer:
    """An HTTP answer as its bytes come in; httptools calls the `on_` methods."""

    def __init__(self, record: Record, started_s: float) -> None:
        self.is_complete = False
        self._reading = Reading(record)
        self._started_s = started_s
        self._at_s = 0.0
        self._fault: Exception | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._ends_with_connection = True

    @property
    def status(self) -> int | None:
        """The HTTP status, once known."""
        return self._parser.get_status_code() or None

    @property
    def has_ended(self) -> bool:
        """Whether `data: [DONE]` was read."""
        return self._reading.has_ended

    def take(self, data: bytes, at_s: float) -> None:
        """Take bytes that were read at `at_s`, in monotonic seconds.

        Raises:
            WireError, SseError: They are no HTTP, or no events.
        """
        self._at_s = at_s - self._started_s
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise WireError(f"not HTTP: {error.__context__ or error}") from error
        if self._fault is not None:
            raise self._fault

    def end(self) -> None:
        """Take the connection's end.

        Raises:
            WireError: The answer was not whole.
        """
        if self.status is None or not self._ends_with_connection:
            raise WireError(self.cut_off())
        self.is_complete = True

    def cut_off(self) -> str:
        """Return what to say of a connection that ends here."""
        return f"connection closed {'in the body' if self.status else 'before an answer'}"

    def conclude(self) -> None:
        """Give the record its status."""
        self._reading.conclude(self.status)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Learn how the body ends."""
        chunked = name.lower() == b"transfer-encoding" and b"chunked" in value.lower()
        if chunked or name.lower() == b"content-length":
            self._ends_with_connection = False

    def on_body(self, data: bytes) -> None:
        """Read body bytes; never raises, since it is called from within the HTTP parser."""
        if self._fault is not None:
            return
        if self.status != 200:
            self._reading.refuse(data)
            return
        try:
            self._reading.feed(self._at_s, data)
        except BAD_BYTES as error:
            self._fault = SseError(f"bad event: {error}")

    def on_message_complete(self) -> None:
        """Note that nothing more is to come."""
        self.is_complete = True
