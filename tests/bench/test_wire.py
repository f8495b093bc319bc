from __future__ import annotations

import asyncio

import pytest

from tailrace.bench.wire import Endpoint, Exchange, WireError, fetch, resolve
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
