"""The gevent client against a scripted server: the statuses and stamps of our own driver."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tailrace.bench.load import Load, Shot
from tailrace.bench.locust_plan import Plan, write_plan
from tailrace.bench.records import read_records
from tailrace.bench.stats import e2e_s, gaps_s, ttft_s
from tailrace.bench.target import Target, completion_body
from tailrace.bench.wire import Endpoint
from tests.bench.mock_server import FAULTS, Behaviour, running

# Not importorskip: gevent stays out of this process.
if importlib.util.find_spec("gevent") is None:
    pytest.skip("gevent is not installed: pip install -e '.[bench]'", allow_module_level=True)

TARGET = Target("mock", None, "")
TOKENS = 5


def shots(times_s: list[float], **more) -> list[Shot]:
    return [
        Shot(
            index,
            at_s,
            3,
            TOKENS,
            completion_body(TARGET, "a b c", TOKENS, temperature=0, seed=index),
            request_id=f"r{index}",
            **more,
        )
        for index, at_s in enumerate(times_s)
    ]


@pytest.fixture
def send(tmp_path):
    """Send shots from a process of its own; return the records in order."""

    def run(port: int, planned: list[Shot], *, timeout_s=20.0, host="127.0.0.1", ca_file=None):
        plan = Plan(
            url=f"http{'s' if ca_file else ''}://{host}:{port}",
            host=host,
            address="127.0.0.1",
            port=port,
            is_tls=ca_file is not None,
            model="mock",
            version="",
            loop="open",
            traffic="",
            prompts="",
            requests=len(planned),
            duration_s=1.0,
        )
        write_plan(tmp_path / "plan.jsonl", plan, planned)
        command = [sys.executable, "-m", "tests.bench.gevent_client", str(tmp_path / "plan.jsonl")]
        command += [str(tmp_path / "records.jsonl"), str(timeout_s)]
        command += [str(ca_file)] if ca_file else []
        root = Path(__file__).parents[2]
        done = subprocess.run(
            command, cwd=root, capture_output=True, check=False, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return read_records(tmp_path / "records.jsonl")

    return run


def test_scripted_latencies_are_recovered(send):
    # The third one's gaps last a second longer than anybody's, whatever a loaded machine adds.
    scripted = {0: (0.30, 0.02), 1: (0.02, 0.05), 2: (0.10, 0.30), 3: (0.02, 0.02)}
    with running(script=lambda index: Behaviour(*scripted[index], cached_tokens=2)) as server:
        records = send(server.port, shots([0.0, 0.0, 0.05, 0.1]))
    assert [record.status for record in records] == ["ok"] * 4
    for record in records:
        first_s, gap_s = scripted[record.index]
        # What is scripted is a lower bound; above it, a loaded machine may add what it likes.
        assert first_s * 0.95 <= ttft_s(record) <= first_s + 2
        assert len(gaps_s(record)) == TOKENS - 1
        assert gap_s * 4 * 0.95 <= sum(gaps_s(record)) <= gap_s * 4 + 2
        assert e2e_s(record) >= ttft_s(record) + sum(gaps_s(record))
        assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (3, TOKENS, 2)
        assert (record.finish_reason, record.http_status) == ("length", 200)
        assert record.request_id == f"r{record.index}"
        moments = [record.scheduled_s, record.dispatched_s, record.sent_s, record.first_token_s]
        moments += [*record.chunk_s[1:], record.finished_s]
        assert all(a <= b for a, b in itertools.pairwise(moments))
    assert max(records, key=lambda record: sum(gaps_s(record))).index == 2


def own_driver(port: int, planned: list[Shot], timeout_s: float):
    endpoint = Endpoint(f"http://127.0.0.1:{port}", "127.0.0.1", "127.0.0.1", port)
    load = Load(endpoint, planned, timeout_s=timeout_s)
    return asyncio.run(load.run(asyncio.Event()))


def words(record) -> str:
    """What was wrong, but for how many bytes happened to be read at once."""
    return re.sub(r"event of \d+ bytes", "event of N bytes", record.error or "")


def test_every_fault_gets_the_status_that_our_own_driver_gives_it(send):
    planned = shots([0.01 * index for index in range(len(FAULTS) + 1)])

    def script(index: int) -> Behaviour:
        return Behaviour(gap_s=0.002, fault=FAULTS[index] if index < len(FAULTS) else "")

    with running(script=script) as server:
        ours = own_driver(server.port, planned, 1.5)
        theirs = send(server.port, planned, timeout_s=1.5)
    assert len({record.status for record in theirs}) >= 5
    facts = ("index", "status", "http_status", "input_tokens", "output_tokens")
    for field in facts:
        assert [getattr(r, field) for r in theirs] == [getattr(r, field) for r in ours], field
    assert [words(r) for r in theirs] == [words(r) for r in ours]
    assert [len(r.chunk_s) for r in theirs] == [len(r.chunk_s) for r in ours]
    assert all(record.finished_s is not None for record in theirs)


def test_a_slow_answer_holds_no_other_request_back(send):
    script = {0: Behaviour(fault="silent")}
    with running(script=lambda index: script.get(index, Behaviour())) as server:
        records = send(server.port, shots([0.02 * i for i in range(8)]), timeout_s=2.0)
    assert [record.status for record in records] == ["timeout", *["ok"] * 7]
    assert all(record.finished_s < records[0].finished_s for record in records[1:])


def test_the_turns_of_a_session_wait_for_each_other(send):
    first, *_ = shots([0.0])
    later = [
        Shot(1, 0.0, 3, TOKENS, first.body, after=0, think_s=0.2, session=7, turn=1),
        Shot(2, 0.0, 3, TOKENS, first.body, after=1, think_s=0.1, session=7, turn=2),
    ]
    with running(script=lambda _: Behaviour(0.05, 0.01)) as server:
        records = send(server.port, [first, *later])
    assert [record.status for record in records] == ["ok"] * 3
    for before, after, think_s in zip(records, records[1:], (0.2, 0.1), strict=False):
        assert after.scheduled_s == pytest.approx(before.finished_s + think_s, abs=1e-6)
        assert after.dispatched_s >= after.scheduled_s


def test_nobody_there_is_a_failure_of_each_request(send):
    with socket.socket() as held:
        # Bound and not listening: refused, and nobody else can take the port meanwhile.
        held.bind(("127.0.0.1", 0))
        records = send(held.getsockname()[1], shots([0.0, 0.01]), timeout_s=5.0)
    assert [record.status for record in records] == ["connect", "connect"]


ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    b'data: {"choices": [{"text": " a", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.fixture
def tls_server(tmp_path):
    """A TLS server with a certificate for localhost, which answers each request alike."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)

    def serve(count: int) -> None:
        for _ in range(count):
            plain, _ = listener.accept()
            try:
                with context.wrap_socket(plain, server_side=True) as peer:
                    while b'"stream"' not in peer.recv(65536):
                        pass
                    peer.sendall(ANSWER)
            except OSError:  # a client that does not trust us leaves in the handshake
                plain.close()

    def start(count: int) -> threading.Thread:
        thread = threading.Thread(target=serve, args=(count,), daemon=True)
        thread.start()
        return thread

    yield listener.getsockname()[1], certificate, start
    listener.close()


def test_tls_is_verified(send, tls_server):
    port, certificate, start = tls_server
    thread = start(2)
    (trusted,) = send(port, shots([0.0]), host="localhost", ca_file=certificate)
    assert (trusted.status, trusted.output_tokens) == ("ok", TOKENS)
    (misnamed,) = send(port, shots([0.0]), host="example.org", ca_file=certificate)
    assert misnamed.status == "connect"
    assert "certificate" in misnamed.error
    thread.join(120)
