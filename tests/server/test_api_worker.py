"""One front end as a process of its own, ordered about by hand: when it goes, and how."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager

import msgspec
import pytest

from tailrace.config import Config, ServerConfig
from tailrace.server import listening
from tailrace.server.api_worker import StopRequests
from tailrace.server.front_ends import WORKER
from tailrace.server.orders import Drain, Start

DEADLINE_S = 120.0


@pytest.mark.parametrize(
    ("asked", "sets"),
    [
        (["signal", "signal"], [True, True]),
        (["order", "order"], [True, True]),
        (["signal", "order", "signal"], [True, False, True]),
        (["order", "signal", "order", "order"], [True, False, True, True]),
    ],
    ids=["signals", "orders", "signal first", "order first"],
)
def test_an_order_and_a_signal_are_one_request(asked, sets):
    stop = asyncio.Event()
    requests = StopRequests(stop)
    found = []
    for by in asked:
        requests.ask(by)
        found.append(stop.is_set())
        stop.clear()  # as draining begins
    assert found == sets


@contextmanager
def started(**given):
    """A front end while there is no engine; its process and port."""
    with (
        listening.bind_only("127.0.0.1", 0, is_shared=True) as keeper,
        subprocess.Popen(
            WORKER, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=os.environ
        ) as process,
    ):
        port = keeper.getsockname()[1]
        config = Config(server=ServerConfig(api_workers=2))
        tell(process, Start(0, "frontend-0-1", config, port, **given))
        yield process, port
        process.kill()


@pytest.fixture
def front_end():
    """One that listens."""
    with started() as (process, port):
        deadline_s = time.monotonic() + DEADLINE_S
        while not listens(port):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.02)
        yield process, port


def tell(process, order):
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    process.stdin.flush()


def listens(port):
    try:
        with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return connection.recv(100).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


@pytest.mark.parametrize("by", ["signal", "order"])
def test_one_that_is_told_to_go_waits_for_no_engine(front_end, by):
    process, port = front_end
    if by == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        tell(process, Drain())
    assert process.wait(DEADLINE_S) == 0
    assert not listens(port)


@pytest.fixture
def joining():
    """One that joins others, begun before `front_end` is."""
    with started(joins=True) as found:
        yield found


def test_one_that_joins_others_takes_no_client_before_it_has_an_engine(joining, front_end):
    """And goes when it is told to, though it has never listened."""
    process, port = joining
    for _ in range(20):
        assert not listens(port)
        time.sleep(0.05)
    tell(process, Drain())
    assert process.wait(DEADLINE_S) == 0
    assert not listens(port)
    assert listens(front_end[1])
