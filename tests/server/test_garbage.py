"""What a request leaves behind is freed at once, not when the collector comes.

A thousand requests in circles are 100,000 objects and their prompts: finding them took a tenth of
a second, in which no stream was written.
"""

import gc
import json
import socket
import struct
import time
from contextlib import contextmanager

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tailrace.server.connection import Connection
from tailrace.server.emitter import Emitter
from tailrace.server.generation import Generation
from tailrace.server.growing_json import GrowingJson
from tailrace.server.http import Request
from tailrace.server.routes_generate import GenerateFormat
from tests.server.fake_engine import Script
from tests.server.running_app import running_app

KINDS = (Connection, Emitter, Generation, GrowingJson, Request, RequestResponseCycle)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
PROMPT = {"prompt": "Hi", "max_tokens": 6}
STREAM = {"stream": True}


@pytest.fixture(scope="module")
def app(tiny_folder):
    scripts = {
        "held": Script("abcdef", pause_after=3),
        "fails": Script("abcdef", error_after=0),
        "fails late": Script("abcdef", error_after=2),
    }
    with running_app(tiny_folder, scripts) as app:
        yield app


@contextmanager
def collecting_nothing():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ids_alive():
    return {id(found) for found in gc.get_objects() if isinstance(found, KINDS)}


def alive_but(known):
    found = [one for one in gc.get_objects() if isinstance(one, KINDS) and id(one) not in known]
    return [type(one).__qualname__ for one in found]


def wait_until(holds):
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def sent(path, body):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    return head.encode(), data


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", PROMPT, 200),
        ("/v1/completions", PROMPT | STREAM | {"n": 2}, 200),
        ("/v1/completions", PROMPT | {"max_tokens": -1}, 400),
        ("/v1/completions", {"prompt": "fails"}, 500),
        ("/v1/completions", {"prompt": "fails"} | STREAM, 500),
        ("/v1/completions", {"prompt": "fails late"} | STREAM, 200),
        ("/v1/completions", {"prompt": ["fails", "Hi"]}, 500),
        ("/v1/chat/completions", CHAT | STREAM, 200),
        ("/v1/messages", CHAT | STREAM, 200),
        ("/v1/responses", {"model": "tiny", "input": "Hi", "stream": True}, 200),
        ("/generate", PROMPT | STREAM, 200),
        ("/tokenize", {"prompt": "Hi"}, 200),
        ("/nowhere", {}, 404),
    ],
    ids=[
        *("whole", "stream", "refused", "failed", "stream failed", "stream fails", "one fails"),
        *("chat", "messages", "responses", "raw", "text", "nowhere"),
    ],
)
def test_an_answered_request_is_freed_with_its_connection(app, path, body, status):
    head, data = sent(path, body)
    answer = app.raw(head + b"connection: close\r\n\r\n" + data)  # what is made once is made
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    app.settle()
    with collecting_nothing():
        known = ids_alive()
        for _ in range(2):
            app.raw(head + b"\r\n" + data + head + b"connection: close\r\n\r\n" + data)
        app.settle()
        wait_until(lambda: not alive_but(known))


def ask_until(connection, request, mark):
    """Send a request, and read its answer as far as a mark."""
    connection.sendall(request)
    received = b""
    while mark not in received:
        received += connection.recv(65536)


def test_a_request_whose_client_leaves_midway_is_freed(app):
    head, data = sent("/v1/completions", {"prompt": "held"} | STREAM)
    with collecting_nothing():
        known = ids_alive()
        with app.connect() as connection:
            ask_until(connection, head + b"\r\n" + data, b"data: ")
        wait_until(lambda: not alive_but(known))


def test_a_connection_that_is_reset_between_requests_is_freed(app):
    head, data = sent("/v1/completions", PROMPT)
    with collecting_nothing():
        known = ids_alive()
        with app.connect() as connection:
            ask_until(connection, head + b"\r\n" + data, b'"usage"')
            app.settle()
            # No end but a reset, as of a proxy that has had enough.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: not alive_but(known))


def test_a_request_at_which_the_server_fails_is_freed(app, monkeypatch):
    def breaks(self, piece):
        raise ValueError("no event of this")

    monkeypatch.setattr(GenerateFormat, "event", breaks)
    head, data = sent("/generate", PROMPT | STREAM)
    app.raw(head + b"connection: close\r\n\r\n" + data)
    app.settle()
    with collecting_nothing():
        known = ids_alive()
        app.raw(head + b"connection: close\r\n\r\n" + data)
        app.settle()
        wait_until(lambda: not alive_but(known))


def test_a_request_of_http_1_0_is_freed(app):
    head, data = sent("/v1/chat/completions", CHAT | STREAM)
    old = head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + data
    with collecting_nothing():
        known = ids_alive()
        assert b"[DONE]" in app.raw(old)
        app.settle()
        wait_until(lambda: not alive_but(known))
