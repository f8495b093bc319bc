"""Request and its answers, over receive and send made by hand."""

import asyncio
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config import ServerConfig
from tailrace.errors import RequestError
from tailrace.server.http import DROP_EXTENSION, LEFT_EXTENSION, PART_EXTENSION, Request


class Exchange:
    """A request, and what was sent for it."""

    def __init__(self, method="GET", headers=(), incoming=(), part=lambda _: False):
        self.sent = []
        self.drops = 0
        self.left = None
        self._incoming = list(incoming)
        scope = {
            "method": method,
            "path": "/x",
            "headers": list(headers),
            "extensions": {
                DROP_EXTENSION: {"call": self._drop},
                LEFT_EXTENSION: {"call": self._when_left},
                PART_EXTENSION: {"call": part},
            },
        }
        self.request = Request(scope, self._receive, self._send, ServerConfig())

    async def _receive(self):
        return self._incoming.pop(0)

    async def _send(self, message):
        self.sent.append(message)

    def _drop(self):
        self.drops += 1

    def _when_left(self, left):
        self.left = left

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def body(self):
        return b"".join(message["body"] for message in self.sent[1:])


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_json_goes_out_with_its_length_and_the_requests_id():
    exchange = Exchange()
    run(exchange.request.send_json(201, {"text": "é"}))
    assert exchange.status == 201
    assert exchange.headers[b"content-type"] == b"application/json"
    assert exchange.headers[b"content-length"] == str(len(exchange.body)).encode()
    assert exchange.headers[b"x-request-id"].decode() == exchange.request.request_id
    assert json.loads(exchange.body) == {"text": "é"}
    assert exchange.request.is_answered


def test_head_gets_the_headers_alone():
    exchange = Exchange("HEAD")
    run(exchange.request.send_json(200, {"a": 1}))
    assert exchange.headers[b"content-length"] == b"7"
    assert exchange.body == b""


def test_204_has_neither_a_body_nor_its_headers():
    exchange = Exchange("OPTIONS")
    run(exchange.request.send_nothing())
    assert exchange.status == 204
    assert set(exchange.headers) == {b"x-request-id"}
    assert exchange.body == b""


def test_a_stream_is_events_that_no_proxy_holds_back():
    exchange = Exchange()

    async def main():
        await exchange.request.start_stream()
        await exchange.request.write(b"data: 1\n\n")
        await exchange.request.finish(b"data: 2\n\n")

    run(main())
    assert exchange.headers[b"content-type"].startswith(b"text/event-stream")
    assert exchange.headers[b"x-accel-buffering"] == b"no"
    assert exchange.body == b"data: 1\n\ndata: 2\n\n"
    assert [m.get("more_body", False) for m in exchange.sent[1:]] == [True, False]


@given(st.floats(0, 100))
def test_retry_after_is_whole_seconds_and_never_too_early(seconds):
    exchange = Exchange()
    run(exchange.request.send_error(RequestError("x", status=503, retry_after_s=seconds)))
    sent = exchange.headers[b"retry-after"]
    assert sent.isdigit()
    assert max(1, math.floor(seconds)) <= int(sent) <= max(1, math.ceil(seconds))
    assert int(sent) >= seconds - 0.001


@given(st.binary(max_size=200))
def test_a_request_id_is_echoed_only_if_it_cannot_be_a_second_header(raw):
    request = Exchange(headers=[(b"x-request-id", raw)]).request
    echoed = request.request_id.encode("latin-1")
    assert echoed
    assert len(echoed) <= 128
    assert all(32 <= byte < 127 for byte in echoed)
    if len(raw) > 0 and len(raw) <= 128 and all(32 <= byte < 127 for byte in raw):
        assert echoed == raw
    else:
        assert len(echoed) == 32


def test_ids_of_our_own_differ():
    assert Exchange().request.request_id != Exchange().request.request_id


@pytest.mark.parametrize(
    ("headers", "closes"),
    [
        ([], False),
        ([(b"content-length", b"0")], False),
        ([(b"content-length", b"5")], True),
        ([(b"transfer-encoding", b"chunked")], True),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_answer_before_the_body_was_read_ends_the_connection(method, headers, closes):
    exchange = Exchange(method, headers)
    run(exchange.request.send_json(404, {}))
    assert (exchange.headers.get(b"connection") == b"close") is closes


def test_an_answer_after_the_body_keeps_the_connection():
    exchange = Exchange(
        "POST", [(b"content-length", b"2")], [{"type": "http.request", "body": b"{}"}]
    )

    async def main():
        assert await exchange.request.body() == b"{}"
        await exchange.request.send_json(200, {})

    run(main())
    assert b"connection" not in exchange.headers


def test_disconnected_waits_for_the_end_whatever_comes_before():
    exchange = Exchange(
        incoming=[{"type": "http.request", "body": b"late"}, {"type": "http.disconnect"}]
    )
    run(exchange.request.disconnected())
    assert exchange._incoming == []


def test_dropping_reaches_the_connection():
    exchange = Exchange()
    exchange.request.drop()
    assert exchange.drops == 1


def test_without_our_connection_dropping_does_nothing():
    scope = {"method": "GET", "path": "/", "headers": []}
    Request(scope, None, None, ServerConfig()).drop()


BODY = {"type": "http.request", "body": b"{}"}


def test_work_on_a_whole_body_ends_with_the_connection():
    async def main():
        exchange = Exchange("POST", incoming=[BODY])
        await exchange.request.body()
        exchange.left()
        assert exchange.request.was_left
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(60)
        asyncio.current_task().uncancel()

    run(main())


def test_a_requests_end_leaves_the_next_ones_watch_alone():
    """An answer is complete before its request has ended; the next one runs by then."""

    async def main():
        first, second = Exchange("POST", incoming=[BODY]), Exchange("POST", incoming=[BODY])
        second.request._when_left = first._when_left  # one connection
        await first.request.body()
        await first.request.send_json(200, {})
        await second.request.body()
        watch = first.left
        first.request.end()
        assert first.left is watch is not None

    run(main())


@pytest.mark.parametrize("then", ["answer", "end", "looks_itself"])
def test_nothing_is_ended_that_is_answered_or_looks_itself(then):
    async def main():
        exchange = Exchange("POST", incoming=[BODY])
        assert exchange.left is None
        await exchange.request.body()
        assert exchange.left is not None
        if then == "answer":
            await exchange.request.send_json(200, {})
        else:
            getattr(exchange.request, then)()
        assert exchange.left is None

    run(main())


def test_a_part_that_the_connection_writes_itself_is_not_sent_again():
    taken, answers = [], iter([True, False, True])

    def write_part(data):
        taken.append(data)
        return next(answers)

    exchange = Exchange(part=write_part)
    for data in (b"a", b"b", b"c"):
        exchange.request.write_now(data)
    assert exchange.status == 200
    assert taken == [b"a", b"b", b"c"]
    assert exchange.body == b"b"
    assert exchange.request.timeline.written_s is not None
