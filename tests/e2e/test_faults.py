"""What goes wrong in service: clients that leave or do not read, bad bodies, dead processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from tailrace.bench.launch import LocalServer
from tailrace.types import STEP_HUNG_STATUS
from tests.e2e.conftest import tiny_settings
from tests.e2e.observe import (
    child_pids,
    engine_pid,
    events,
    health,
    is_alive,
    load,
    metric,
    ready_status,
    wait_idle,
    wait_until,
)
from tests.support import hanging_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

ENDLESS = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
"""Minutes of work for the embedded model: whatever ends sooner was ended."""


@contextlib.contextmanager
def raw_request(server: LocalServer, path: str, body: dict, **options: int) -> Iterator:
    """Send a request over a socket of its own, for tests to leave as they like."""
    with socket.socket() as connection:
        if "receive_buffer_bytes" in options:
            size = options["receive_buffer_bytes"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", server.port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


@pytest.mark.parametrize("is_streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_leaves_gives_everything_back(server, path, is_streaming):
    with raw_request(server, path, ENDLESS | {"stream": is_streaming}) as connection:
        wait_until(lambda: load(server.url)[0] == 1, "the request runs")
        wait_until(lambda: load(server.url)[1] > 0, "it holds KV")
        if is_streaming:
            assert connection.recv(1024).startswith(b"HTTP/1.1 200")
    wait_idle(server.url)


def test_a_client_that_leaves_takes_all_of_its_choices_along(server):
    body = ENDLESS | {"n": 4, "temperature": 1.0, "stream": True}
    with raw_request(server, "/v1/completions", body):
        wait_until(lambda: load(server.url)[0] == 4, "four sequences run")
    wait_idle(server.url)


def test_a_client_that_does_not_read_is_cut_off_and_no_other(tiny_server):
    body = {"prompt": "abc", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with tiny_server("--stream-buffer-bytes", "20000") as server:
        url = f"{server.url}/v1/completions"
        # Alternatives with each token make the stream, 12 MB, larger than the sockets' buffers.
        large = body | {"n": 8, "temperature": 1, "logprobs": 20}
        slow = raw_request(server, "/v1/completions", large, receive_buffer_bytes=2048)
        with slow as connection, httpx.stream("POST", url, json=body, timeout=120) as reading:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
            *pieces, last = events(reading.iter_lines())
            assert last == "[DONE]"
            assert pieces[-1]["choices"][0]["finish_reason"] == "length"
            wait_idle(server.url)
            assert b"[DONE]" not in read_to_the_end(connection)
        lines = httpx.get(f"{server.url}/metrics", timeout=120).text
        assert 'finished_reason="slow_reader"} 1.0' in lines


def read_to_the_end(connection: socket.socket) -> bytes:
    """What was still under way; a reset ends it as well as a close."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


MALFORMED = {
    "cut": b'{"prompt": "Hello", "max_tokens": ',
    "not json": b"prompt=Hello&max_tokens=4",
    "empty": b"",
    "a list": b'["Hello"]',
    "bad utf-8": b'{"prompt": "caf\xe9", "max_tokens": 4}',
    "cut utf-8": b'{"prompt": "caf\xc3", "max_tokens": 4}',
    "bad utf-8 in an unknown field": b'{"prompt": "a", "max_tokens": 4, "note": "\xff"}',
    "lone surrogate": b'{"prompt": "\\ud83d", "max_tokens": 4}',
    "deep nesting": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "wrong type": b'{"prompt": {"text": "Hello"}, "max_tokens": 4}',
}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_body_is_400_however_it_is_cut(server, path, kind):
    body = MALFORMED[kind]
    if "chat" in path:
        body = body.replace(b'"prompt"', b'"messages"', 1)

    def send(content) -> tuple[int, dict]:
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + path, content=content, headers=headers, timeout=120)
        return answer.status_code, answer.json()

    status, shown = send(body)
    assert status == 400
    assert shown["error"]["type"] == "invalid_request_error"
    assert shown["error"]["message"]
    middle = body.find(b"caf") + 4 if b"caf" in body else len(body) // 2
    assert send(iter([body[:middle], body[middle:]])) == (status, shown)


def test_a_10_mb_prompt_is_refused_while_another_stream_goes_on(server):
    body = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True, "stream": True}
    huge = {"prompt": "a tale of two " * 750_000, "max_tokens": 4}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as reading:
        arriving = events(reading.iter_lines())
        next(arriving)
        refused = httpx.post(f"{server.url}/generate", json=huge, timeout=120)
        rest = list(arriving)
    assert refused.status_code in (400, 413)
    assert refused.json()["error"]["message"]
    assert len(rest) == 150
    assert rest[-1] == "[DONE]"


def test_a_body_beyond_the_limit_is_413_whether_or_not_its_length_is_told(server):
    limit_bytes = 16 * 2**20
    huge = b'{"prompt": "' + b"a" * limit_bytes + b'", "max_tokens": 4}'
    chunks = (huge[at : at + 2**16] for at in range(0, len(huge), 2**16))
    for content in (huge, chunks):
        refused = httpx.post(f"{server.url}/generate", content=content, timeout=120)
        assert refused.status_code == 413
        assert str(limit_bytes) in refused.json()["error"]["message"]


def test_a_killed_engine_fails_what_it_held_and_is_replaced(tiny_server):
    body = {"prompt": "abc", "max_tokens": 8000, "ignore_eos": True}
    with tiny_server() as server, ThreadPoolExecutor() as pool:
        url = f"{server.url}/v1/completions"
        whole = pool.submit(httpx.post, url, json=body, timeout=120)
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as reading:
            arriving = events(reading.iter_lines())
            assert next(arriving)["choices"]
            wait_until(lambda: load(server.url)[0] == 2, "both run")
            killed = engine_pid(server)
            os.kill(killed, signal.SIGKILL)
            last = [event for event in arriving if event != "[DONE]"][-1]
        assert last["error"]["message"]
        assert whole.result().status_code in (500, 503)
        assert whole.result().json()["error"]["message"]
        assert ready_status(server.url) == 503
        assert health(server.url)["status"] != "ok"
        early = httpx.post(url, json=body, timeout=120)
        assert early.status_code == 503
        assert "retry-after" in early.headers

        wait_until(lambda: ready_status(server.url) == 200, "the engine is back")
        again = httpx.post(url, json=body | {"max_tokens": 5}, timeout=120)
        assert again.status_code == 200
        assert again.json()["usage"]["completion_tokens"] == 5
        assert engine_pid(server) != killed
        assert metric(server.url, "tailrace:engine_restarts_total") == 1
        wait_idle(server.url)


def test_a_step_that_hangs_ends_the_engine_which_is_replaced(tiny_folder, tmp_path):
    log_file = tmp_path / "server.log"
    settings = (*tiny_settings(tiny_folder), "--step-timeout-s", "4")
    body = {"prompt": "abc", "max_tokens": 8000, "ignore_eos": True}
    command = (*hanging_engine.COMMAND, "serve")
    hanging = LocalServer(settings, log_file=log_file, command=command)
    with hanging as server, ThreadPoolExecutor() as pool:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as reading:
            arriving = events(reading.iter_lines())
            assert next(arriving)["choices"]
            hung = engine_pid(server)
            lost = body | {"prompt": hanging_engine.PROMPT}
            whole = pool.submit(httpx.post, url, json=lost, timeout=120)
            last = [event for event in arriving if event != "[DONE]"][-1]
        assert last["error"]["message"]
        assert whole.result().status_code in (500, 503)
        assert whole.result().json()["error"]["message"]

        wait_until(lambda: ready_status(server.url) == 200, "the engine is back")
        again = httpx.post(url, json=body | {"max_tokens": 5}, timeout=120)
        assert again.json()["usage"]["completion_tokens"] == 5
        assert engine_pid(server) != hung
        assert metric(server.url, "tailrace:engine_restarts_total") == 1
    logged = log_file.read_text()
    (line,) = [line for line in logged.splitlines() if "step_hung" in line]
    assert "[error" in line
    assert "decodes=1" in line
    assert "MainThread at engine.py:" in line
    assert f"status {STEP_HUNG_STATUS}" in logged


def test_sigterm_lets_running_requests_end_and_exits_with_0(tiny_server):
    body = {"prompt": "abc", "max_tokens": 1200, "ignore_eos": True, "stream": True}
    with tiny_server("--drain-timeout-s", "120") as server:
        children = child_pids(server)
        process = server._process
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as reading:
            arriving = events(reading.iter_lines())
            next(arriving)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: ready_status(server.url) == 503, "it says that it is not ready")
            late = httpx.post(f"{server.url}/generate", json=body, timeout=120)
            assert late.status_code == 503
            rest = list(arriving)
        assert len(rest) == 1200
        assert rest[-1] == "[DONE]"
        assert process.wait(120) == 0
        wait_until(lambda: not any(map(is_alive, children)), "no process is left behind")


def test_the_drain_has_an_end(tiny_server):
    body = {"prompt": "abc", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with tiny_server("--drain-timeout-s", "0.2") as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as reading:
            arriving = events(reading.iter_lines())
            next(arriving)
            server._process.send_signal(signal.SIGTERM)
            seen = list(arriving)
        assert "error" in seen[-1]
        assert server._process.wait(120) == 0
