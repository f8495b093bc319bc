"""The fault list over real sockets: after each, all KV is back and others are served.

Beside these: engines that die and signals (test_faults.py), pools that are too small
(test_preemption.py), bodies that stall while they are computed (test_early_prefill.py).
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.bench.launch import LocalServer
from tests.e2e.conftest import tiny_settings
from tests.e2e.observe import assert_baseline, load, metric, wait_until
from tests.support.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.e2e

LONG = {"prompt": "once upon a time " * 20, "max_tokens": 7000, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def served(tiny_folder, tmp_path_factory) -> Iterator[LocalServer]:
    settings = (*tiny_settings(tiny_folder), "--debug-kv")
    settings += ("--kv-cache-tokens", "32768", "--max-batch-size", "4", "--max-waiting", "2")
    settings += ("--header-timeout-s", "1", "--body-timeout-s", "2")
    settings += ("--stream-buffer-bytes", "20000", "--request-log", "/dev/full")
    log_file = tmp_path_factory.mktemp("faults") / "server.log"
    with LocalServer(settings, log_file=log_file) as server:
        yield server


@contextlib.contextmanager
def connected(server: LocalServer, *, small_buffer: bool = False) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        if small_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", server.port))
        yield connection


def head(length: int, path: str = COMPLETIONS) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def request(**fields: object) -> bytes:
    body = json.dumps(LONG | fields).encode()
    return head(len(body)) + body


def read_to_end(connection: socket.socket) -> bytes:
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            received += part
    return bytes(received)


def runs(server: LocalServer, count: int = 1) -> None:
    wait_until(lambda: load(server.url)[0] >= count, f"{count} run or wait")


def leaves_within_its_head(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(request()[:30])


def leaves_within_its_body(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(request()[:-40])
        time.sleep(0.05)


def leaves_its_stream(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(request(stream=True))
        assert connection.recv(1024).startswith(b"HTTP/1.1 200")


def leaves_before_its_whole_answer(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(request())
        runs(server)


def leaves_by_a_reset(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(request(stream=True))
        assert connection.recv(1024).startswith(b"HTTP/1.1 200")
        linger_s = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_s)


def leaves_while_it_waits(server: LocalServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(6):  # four run, two wait
            stack.enter_context(connected(server)).sendall(request())
        runs(server, 6)


def leaves_with_all_its_choices(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(request(n=4, temperature=1, stream=True))
        runs(server, 4)


def stalls_within_its_head(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(request()[:30])
        assert read_to_end(connection).startswith(b"HTTP/1.1 408")


def stalls_within_its_body(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(request()[:-40])
        assert read_to_end(connection).startswith(b"HTTP/1.1 408")


def stops_reading_its_stream(server: LocalServer) -> None:
    with connected(server, small_buffer=True) as connection:
        connection.sendall(request(stream=True, n=4, temperature=1, logprobs=20))
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        runs(server, 4)
        wait_until(lambda: load(server.url)[0] == 0, "it was ended")
        assert b"[DONE]" not in read_to_end(connection)


def stops_reading_a_whole_answer(server: LocalServer) -> None:
    with connected(server, small_buffer=True) as connection:
        made = "tailrace:generation_tokens_total"
        before = metric(server.url, made)
        connection.sendall(request(max_tokens=500, logprobs=20))
        # Not that it runs: it may be done before anybody has looked.
        wait_until(lambda: metric(server.url, made) >= before + 500, "its tokens are made")
        wait_until(lambda: load(server.url)[0] == 0, "it is done")


def sends_an_endless_head(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nx: " + b"a" * 100_000)
        assert read_to_end(connection).startswith(b"HTTP/1.1 431")


def sends_what_is_no_http(server: LocalServer) -> None:
    with connected(server) as connection:
        connection.sendall(bytes(range(256)) * 4)
        assert read_to_end(connection).startswith(b"HTTP/1.1 400")


def is_answered(server: LocalServer, status: int, content: bytes) -> None:
    answer = httpx.post(server.url + COMPLETIONS, content=content, timeout=120)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def sends_json_that_is_none(server: LocalServer) -> None:
    for rest in (b"", b'"', b'", "x": NaN}', b'\\ud800"}', b'\xff"}', b'", "n": 1e400}'):
        is_answered(server, 400, b'{"prompt": "' + b"a tale " * 500 + rest)


def nests_deeply(server: LocalServer) -> None:
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        is_answered(server, 400, b'{"prompt": ' + opened * 100_000 + b"1" + closed * 100_000 + b"}")


def sends_10_mb(server: LocalServer) -> None:
    is_answered(server, 400, json.dumps({"prompt": "a tale of two " * 700_000}).encode())


def sends_more_than_may_come(server: LocalServer) -> None:
    is_answered(server, 413, b'{"prompt": "' + b"a" * (17 << 20) + b'"}')


def repeats_its_keys(server: LocalServer) -> None:
    body = b'{"prompt": "' + b"a tale " * 500 + b'", "prompt": "Hi", "max_tokens": 2}'
    answer = httpx.post(server.url + COMPLETIONS, content=body, timeout=120)
    assert (answer.status_code, answer.json()["usage"]["prompt_tokens"]) == (200, 2)


def asks_for_too_much(server: LocalServer) -> None:
    for fields in ({"n": 10**9}, {"logprobs": 10**6}, {"best_of": 99}, {"max_tokens": -1}):
        is_answered(server, 400, json.dumps(LONG | fields).encode())


def asks_for_more_than_the_house_holds(server: LocalServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(connected(server)).sendall(request())
        runs(server, 6)
        is_answered(server, 429, json.dumps(LONG).encode())


def comes_and_goes_in_crowds(server: LocalServer) -> None:
    def visit(number: int) -> None:
        with connected(server) as connection, contextlib.suppress(OSError):
            sent = request(stream=bool(number % 2), max_tokens=50 + number)
            connection.sendall(sent[: len(sent) - (number % 3) * 9])
            if number % 5:
                connection.recv(1 + number)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(visit, range(120)))


FAULTS: list[Callable[[LocalServer], None]] = [
    leaves_within_its_head,
    leaves_within_its_body,
    leaves_its_stream,
    leaves_before_its_whole_answer,
    leaves_by_a_reset,
    leaves_while_it_waits,
    leaves_with_all_its_choices,
    stalls_within_its_head,
    stalls_within_its_body,
    stops_reading_its_stream,
    stops_reading_a_whole_answer,
    sends_an_endless_head,
    sends_what_is_no_http,
    sends_json_that_is_none,
    nests_deeply,
    sends_10_mb,
    sends_more_than_may_come,
    repeats_its_keys,
    asks_for_too_much,
    asks_for_more_than_the_house_holds,
    comes_and_goes_in_crowds,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_after_a_client_that(served, fault):
    fault(served)
    assert_baseline(served)
    answer = httpx.post(
        f"{served.url}/generate", json={"prompt": "Hi", "max_tokens": 3}, timeout=120
    )
    assert answer.status_code == 200


def test_while_the_log_cannot_be_written_requests_are_served_and_the_drops_counted(served):
    before = metric(served.url, "tailrace:request_log_dropped_total")
    for _ in range(3):
        body = {"prompt": "Hi", "max_tokens": 3}
        assert httpx.post(f"{served.url}/generate", json=body, timeout=120).status_code == 200

    def counted() -> bool:
        return metric(served.url, "tailrace:request_log_dropped_total") >= before + 3

    wait_until(counted, "three more are counted")
    assert_baseline(served)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> Iterator[LocalServer]:
    """A model that has NaN for the token "~": whoever sends it fails inside the step."""
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("nan") / "m", "qwen2")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("~")] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = (*tiny_settings(folder), "--debug-kv", "--no-warmup")
    log_file = tmp_path_factory.mktemp("nan") / "server.log"
    with LocalServer((*settings, "--kv-cache-tokens", "8192"), log_file=log_file) as server:
        yield server


def test_a_request_that_fails_inside_a_step_fails_alone(poisoned):
    url = poisoned.url + COMPLETIONS
    body = {"prompt": "a tale", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    body["logit_bias"] = {str(ord("~")): -100}
    alone = httpx.post(url, json=body, timeout=120).json()["choices"]
    with ThreadPoolExecutor() as pool:
        other = pool.submit(httpx.post, url, json=body, timeout=120)
        for is_streaming in (False, True):
            failing = {"prompt": "a tale of ~ and more", "max_tokens": 3, "stream": is_streaming}
            answer = httpx.post(url, json=failing, timeout=120)
            assert answer.status_code == 500
            assert "not finite" in answer.json()["error"]["message"]
        assert other.result().json()["choices"] == alone
    # Nothing of what failed is found again by one that begins like it.
    again = httpx.post(url, json=body | {"prompt": "a tale of "}, timeout=120)
    assert again.status_code == 200
    assert_baseline(poisoned)
