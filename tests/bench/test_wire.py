from __future__ import annotations

import asyncio

import pytest

from tailrace.bench.wire import Endpoint, Exchange, Inbox, WireError, fetch, resolve
from tailrace.clock import VirtualClock
from tailrace.errors import ConfigError
from tests.bench.mock_server import MockServer


@pytest.mark.parametrize("url", ["", "ftp://x", "127.0.0.1:80", "http://", "http://h:99999"])
def test_a_malformed_url_is_refused_with_an_example(url):
    with pytest.raises(ConfigError, match="give one such as"):
        asyncio.run(resolve(url))


def test_a_url_may_end_in_v1():
    async def go():
        async with MockServer() as server:
            endpoint = await resolve(f"{server.url}/v1/")
            return server.url, endpoint, await fetch(endpoint, "GET", "/v1/models")

    url, endpoint, answer = asyncio.run(go())
    assert endpoint.url == url
    assert answer.status == 200


def test_a_request_carries_key_length_and_host():
    endpoint = Endpoint("http://h:1/base", "h", "127.0.0.1", 1, api_key="k")
    head, _, body = endpoint.request("POST", "/v1/x", b"{}").partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/v1/x HTTP/1.1"
    assert {"Host: h:1", "Authorization: Bearer k", "Content-Length: 2"} <= set(lines)
    assert body == b"{}"


def test_a_request_carries_its_id_where_it_has_one():
    endpoint = Endpoint("http://h:1", "h", "127.0.0.1", 1)
    assert b"\r\nX-Request-Id: r-7\r\n" in endpoint.request("POST", "/v1/x", b"{}", "r-7")
    assert b"X-Request-Id" not in endpoint.request("POST", "/v1/x", b"{}")


def _exchange(seen: list[tuple[float, bytes]], clock: VirtualClock) -> Exchange:
    return Exchange(b"", lambda exchange, data: seen.append((exchange.read_s, data)), clock)


def test_bytes_are_stamped_when_they_are_read():
    async def go():
        clock, seen = VirtualClock(), []
        exchange = _exchange(seen, clock)
        exchange.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
        clock.advance(2.5)
        exchange.data_received(b"cd")
        await exchange.done
        return seen

    assert asyncio.run(go()) == [(0.0, b"ab"), (2.5, b"cd")]


def test_a_body_may_end_with_the_connection():
    async def go():
        seen = []
        exchange = _exchange(seen, VirtualClock())
        exchange.data_received(b"HTTP/1.1 200 OK\r\n\r\nab")
        exchange.connection_lost(None)
        await exchange.done
        return exchange.status, seen

    assert asyncio.run(go()) == (200, [(0.0, b"ab")])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-x\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_an_error(data):
    async def go():
        exchange = _exchange([], VirtualClock())
        if data:
            exchange.data_received(data)
        exchange.connection_lost(None)
        await exchange.done

    with pytest.raises(WireError):
        asyncio.run(go())


def test_bytes_after_the_end_are_ignored():
    async def go():
        seen = []
        exchange = _exchange(seen, VirtualClock())
        exchange.data_received(b"HTTP/1.1 204 OK\r\nContent-Length: 0\r\n\r\n")
        exchange.data_received(b"\x00\x01")
        await exchange.done
        return seen

    assert asyncio.run(go()) == []


def test_with_an_inbox_everything_is_stamped_before_anything_is_parsed():
    """Two answers come at once: the second one's stamp does not wait for the first one's work."""

    async def go():
        clock, seen, inbox = VirtualClock(), [], Inbox()

        def slow(exchange, data):
            clock.advance(1.0)
            seen.append((exchange.read_s, data))

        first, second = (Exchange(b"", slow, clock, inbox) for _ in range(2))
        for exchange, body in ((first, b"ab"), (second, b"cd")):
            exchange.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + body)
        assert seen == []
        await asyncio.gather(first.done, second.done)
        return seen

    assert asyncio.run(go()) == [(0.0, b"ab"), (0.0, b"cd")]


def test_the_inbox_keeps_the_order_also_of_the_end():
    async def go():
        seen, inbox = [], Inbox()
        exchange = Exchange(b"", lambda _, data: seen.append(data), VirtualClock(), inbox)
        exchange.data_received(b"HTTP/1.1 200 OK\r\n\r\nab")
        exchange.data_received(b"cd")
        exchange.connection_lost(None)
        await exchange.done
        return seen

    assert asyncio.run(go()) == [b"ab", b"cd"]


def test_the_inbox_lets_the_loop_turn_between_its_portions():
    async def go():
        inbox, order = Inbox(), []
        for number in range(Inbox.PORTION * 2 + 1):
            inbox.put(lambda number=number: order.append(number))
        turns = 0
        while len(order) < Inbox.PORTION * 2 + 1:
            before = len(order)
            await asyncio.sleep(0)
            assert len(order) - before <= Inbox.PORTION
            turns += 1
        assert order == sorted(order)
        inbox.put(lambda: order.append(-1))
        await asyncio.sleep(0)
        return turns, order[-1]

    turns, last = asyncio.run(go())
    assert turns >= 3
    assert last == -1


def test_the_inbox_goes_on_after_a_bug():
    async def go():
        inbox, order = Inbox(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: order.append(context))
        inbox.put(lambda: 1 / 0)
        inbox.put(lambda: order.append("next"))
        await asyncio.sleep(0.01)
        return order

    bug, after = asyncio.run(go())
    assert isinstance(bug["exception"], ZeroDivisionError)
    assert after == "next"
