"""Prompts that trickle in are computed meanwhile, and nobody can tell by the answer."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.conftest import tiny_settings
from tests.e2e.observe import assert_baseline, engine_pid, metric, ready_status, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tailrace.bench.launch import LocalServer

pytestmark = pytest.mark.e2e

WORDS = "once upon a time there was a river, and a mill by it. "
PROMPT = WORDS * 40
USED, DROPPED = 'outcome="used"', 'outcome="dropped"'


@pytest.fixture(scope="module")
def served(tiny_folder, tmp_path_factory) -> Iterator[LocalServer]:
    from tailrace.bench.launch import LocalServer  # noqa: PLC0415

    # Without a prefix cache nothing but early work can save any.
    settings = (*tiny_settings(tiny_folder), "--debug-kv")
    settings += ("--served-model-name", "tiny")
    settings += ("--no-prefix-cache", "--body-timeout-s", "60", "--kv-cache-tokens", "16384")
    log_file = tmp_path_factory.mktemp("early") / "server.log"
    with LocalServer(settings, log_file=log_file) as server:
        yield server


def early_tokens(server: LocalServer, outcome: str) -> float:
    return metric(server.url, "tailrace:early_prompt_tokens_total{" + outcome + "}")


def body_of(path: str, before: dict, after: dict) -> bytes:
    messages = [{"role": "user", "content": PROMPT}]
    rest = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    if "chat" in path:
        prompt = {"messages": messages}
    elif "responses" in path:
        prompt = {"model": "tiny", "instructions": None, "input": messages}
        rest = {"max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
    else:
        prompt = {"prompt": PROMPT}
    return json.dumps({**before, **prompt, **rest, **after}).encode()


@contextmanager
def begun(server: LocalServer, path: str, body: bytes, count: int) -> Iterator[socket.socket]:
    """Send the first `count` bytes of a request's body."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:1200])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(body[1200:count])
        yield connection


def answer_of(connection: socket.socket) -> tuple[int, dict]:
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def shown(status: int, answer: dict) -> tuple:
    """An answer without what is new each time."""
    if status != 200:
        return status, answer["error"]
    if "output" in answer:
        texts = [item["content"][0]["text"] for item in answer["output"]]
        return status, texts, answer["usage"]["input_tokens"]
    return status, answer["choices"], answer["usage"]["prompt_tokens"]


def holds_early_kv(server: LocalServer) -> bool:
    tables = httpx.get(f"{server.url}/debug/kv", timeout=120).json()["tables"]
    return any(table["held"] > 8 for table in tables)


CHANGES = [
    ("truncate_prompt_tokens", 100),
    ("add_special_tokens", False),
    ("cache_salt", "pepper"),
    ("prompt_logprobs", 0),
    ("model", "another"),
    ("n", 2),
]
OF_COMPLETIONS = [("echo", True), ("prompt", "Another prompt."), ("prompt", [1, 2, 3])]
OF_CHATS = [
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    ("messages", [{"role": "user", "content": "Hi"}]),
]
OF_RESPONSES = [
    ("input", "Another input."),
    ("instructions", "Be brief."),
    ("cache_salt", "pepper"),
    ("model", "another"),
]
KINDS = [("/v1/completions", None), ("/v1/chat/completions", None), ("/v1/responses", None)]
KINDS += [("/v1/completions", field) for field in CHANGES + OF_COMPLETIONS]
KINDS += [("/v1/chat/completions", field) for field in CHANGES + OF_CHATS]
KINDS += [("/v1/responses", field) for field in OF_RESPONSES]


@pytest.mark.parametrize("is_late", [True, False], ids=["after", "before"])
@pytest.mark.parametrize(("path", "field"), KINDS, ids=str)
def test_answers_are_those_of_the_body_as_a_whole(served, path, field, is_late):
    name, value = field or ("seed", 7)
    extra = f'"{name}": {json.dumps(value)}'.encode()
    plain = body_of(path, {}, {})
    body = plain[:-1] + b", " + extra + b"}" if is_late else b"{" + extra + b", " + plain[1:]
    whole = httpx.post(served.url + path, content=body, timeout=60)
    cut = len(body) - 200
    with begun(served, path, body, cut) as connection:
        if is_late:
            wait_until(lambda: holds_early_kv(served), "the prompt is computed while it arrives")
        connection.sendall(body[cut:])
        assert shown(*answer_of(connection)) == shown(whole.status_code, whole.json())
    assert_baseline(served)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_what_was_computed_early_is_used_or_counted_as_dropped(served, path):
    body = body_of(path, {}, {})
    used, dropped = early_tokens(served, USED), early_tokens(served, DROPPED)
    with begun(served, path, body, len(body) - 150) as connection:
        wait_until(lambda: holds_early_kv(served), "the prompt is computed while it arrives")
        connection.sendall(body[-150:])
        assert answer_of(connection)[0] == 200
    # How much of it: as much as was computed when the rest came, on a machine that is busy little.
    wait_until(lambda: early_tokens(served, USED) > used, "it was used")
    assert early_tokens(served, DROPPED) == dropped
    with begun(served, path, body, len(body) - 150):
        wait_until(lambda: holds_early_kv(served), "the prompt is computed while it arrives")
    wait_until(lambda: early_tokens(served, DROPPED) > dropped, "it was dropped")
    assert_baseline(served)


def test_a_body_that_stalls_is_408_and_its_kv_comes_back(tiny_server):
    body = body_of("/v1/completions", {}, {})
    settings = ("--no-prefix-cache", "--body-timeout-s", "15", "--kv-cache-tokens", "16384")
    with tiny_server("--debug-kv", *settings) as server:
        with begun(server, "/v1/completions", body, len(body) - 150) as connection:
            wait_until(lambda: holds_early_kv(server), "the prompt is computed while it arrives")
            whole = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60)
            assert whole.status_code == 200  # others are served meanwhile
            assert answer_of(connection)[0] == 408
        assert_baseline(server)


def test_a_response_whose_instructions_may_still_come_holds_no_kv(served):
    used, dropped = early_tokens(served, USED), early_tokens(served, DROPPED)
    body = {"model": "tiny", "input": PROMPT * 4, "instructions": "Be brief."}
    data = json.dumps({**body, "max_output_tokens": 8, "temperature": 0}).encode()
    whole = httpx.post(f"{served.url}/v1/responses", content=data, timeout=60)
    with begun(served, "/v1/responses", data, data.index(b"instructions")) as connection:
        httpx.post(f"{served.url}/v1/completions", json={"prompt": "x", "max_tokens": 40})
        assert not holds_early_kv(served)
        connection.sendall(data[data.index(b"instructions") :])
        assert shown(*answer_of(connection)) == shown(whole.status_code, whole.json())
    assert (early_tokens(served, USED), early_tokens(served, DROPPED)) == (used, dropped)
    assert_baseline(served)


def test_a_body_outlives_an_engine_that_dies_under_it(tiny_server):
    body = body_of("/v1/completions", {}, {})
    with tiny_server("--debug-kv", "--kv-cache-tokens", "16384") as server:
        whole = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60)
        with begun(server, "/v1/completions", body, len(body) - 150) as connection:
            wait_until(lambda: holds_early_kv(server), "the prompt is computed while it arrives")
            os.kill(engine_pid(server), signal.SIGKILL)
            wait_until(lambda: ready_status(server.url) == 503, "the death is noticed")
            wait_until(lambda: ready_status(server.url) == 200, "another engine is ready")
            connection.sendall(body[-150:])
            assert shown(*answer_of(connection)) == shown(200, whole.json())
        assert_baseline(server)
