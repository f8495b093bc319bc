"""Where the time went, on a real server over real sockets: sums, and what the client's clock says.

The client reads the machine's monotonic clock as the server does, so its stamps bound the server's.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from tailrace.telemetry.request_log import RequestRecord, read_records
from tests.e2e.observe import metric, wait_idle, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

WITHIN_S = 0.001
TIMED = {"X-Tailrace-Timing": "1"}


@dataclass
class Log:
    """A server's request log."""

    path: Path

    def wait(self, count: int) -> list[RequestRecord]:
        """Return its records once there are so many, each checked."""
        wait_until(
            lambda: self.path.exists() and len(read_records([self.path])[0]) >= count,
            f"{count} records",
        )
        records, damaged = read_records([self.path])
        assert damaged == 0
        for record in records:
            assert record.phases is not None
            whole_s = record.finished_s - record.received_s
            assert record.phases.total_s == pytest.approx(whole_s, abs=WITHIN_S)
            assert min(record.phases.by_name().values()) >= 0
        return records

    def of(self, request_id: str, count: int) -> RequestRecord:
        return next(r for r in self.wait(count) if r.http_request_id == request_id)


def send(port: int, body: dict, *, keep_back: int = 0, receive_buffer: int = 0) -> socket.socket:
    """Send a completion, but for its last bytes, over a socket of its own."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"x-request-id: {body.get('user', 'x')}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data[: len(data) - keep_back])
    return connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def test_every_request_is_told_whatever_becomes_of_it(tiny_server, tmp_path):
    log = Log(tmp_path / "requests.jsonl")
    settings = ("--request-log", str(log.path), "--body-timeout-s", "1", "--stream-buffer-bytes")
    with tiny_server(*settings, "100000000") as server:
        body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}

        # A stream that tells of itself, bounded by the client's clock.
        before_s = time.monotonic()
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json=body | {"stream": True},
            headers=TIMED | {"x-request-id": "stream"},
            timeout=120,
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
        after_s = time.monotonic()
        metrics = json.loads(lines[-2].removeprefix("data: "))["metrics"]
        assert sum(metrics["phases"].values()) == pytest.approx(metrics["e2e_s"], abs=WITHIN_S)
        streamed = log.of("stream", 1)
        assert before_s <= streamed.received_s
        assert streamed.received_s + metrics["e2e_s"] <= after_s
        # The server may note that the last byte was sent after the client has it.
        assert streamed.finished_s <= time.monotonic()
        assert metrics["e2e_s"] <= streamed.finished_s - streamed.received_s
        assert streamed.phases.decode_s > 0
        assert streamed.phases.prefill_s > 0
        assert streamed.phases.prefill_wait_s == pytest.approx(0, abs=WITHIN_S)
        assert streamed.ttft_phases.decode_s == 0

        # A body that stalls, then never ends.
        with send(server.port, body | {"user": "stalled"}, keep_back=9) as stalled:
            assert read_all(stalled).startswith(b"HTTP/1.1 408")
        refused = log.of("stalled", 2)
        assert (refused.status, refused.finish_reason) == (408, "refused")
        # The deadline counts from before the body's time does.
        assert 1.0 - WITHIN_S <= refused.phases.body_s <= refused.finished_s - refused.received_s

        # A client that leaves amid a long answer.
        long = body | {"max_tokens": 8000, "stream": True, "user": "leaves"}
        with send(server.port, long) as leaving:
            assert leaving.recv(64).startswith(b"HTTP/1.1 200")
            time.sleep(0.3)
        left = log.of("leaves", 3)
        assert left.finish_reason == "disconnect"
        assert left.phases.decode_s >= 0.25
        assert left.phases.decode_s < 30

        # One that reads a large answer late: alternatives with each token make it large.
        large = body | {"n": 8, "temperature": 1, "logprobs": 20, "max_tokens": 700}
        with send(
            server.port, large | {"stream": True, "user": "late"}, receive_buffer=2048
        ) as late:
            wait_until(lambda: metric(server.url, "tailrace:num_requests_running") == 8, "it runs")
            wait_idle(server.url)
            time.sleep(0.5)
            assert late.recv(64).startswith(b"HTTP/1.1 200")
            reads_s = time.monotonic()
            read_all(late)
            ended_s = time.monotonic()
        read_late = log.of("late", 4)
        assert read_late.finish_reason == "length"
        # The engine was done before; how long making the events took is the machine's affair.
        assert read_late.phases.emit_s + read_late.phases.socket_s >= 0.5
        assert read_late.phases.socket_s > 0
        assert reads_s <= read_late.finished_s <= ended_s

        wait_idle(server.url)
        assert metric(server.url, "tailrace:request_phase_seconds_count") == 4 * 10
        explained = subprocess.run(
            [sys.executable, "-m", "tailrace", "explain", str(log.path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        assert "4 requests" in explained
        assert "disconnect" in explained


def test_who_is_preempted_and_who_waits_for_another_is_told(tiny_server, tmp_path):
    log = Log(tmp_path / "requests.jsonl")
    pool = ("--kv-cache-tokens", "256", "--context-length", "256")

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            # Answers of one token: the engine then expects no more of the next, and lends too much.
            for _ in range(40):
                await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            bodies = [
                {"prompt": f"{n} " + "abcdefgh" * (6 + n), "max_tokens": 160, "ignore_eos": True}
                for n in range(5)
            ]
            answers = await asyncio.gather(
                *(
                    client.post(
                        "/v1/completions", json=body, headers=TIMED | {"x-request-id": f"r{n}"}
                    )
                    for n, body in enumerate(bodies)
                )
            )
            for answer in answers:
                metrics = answer.json()["metrics"]
                total_s = sum(metrics["phases"].values())
                assert total_s == pytest.approx(metrics["e2e_s"], abs=WITHIN_S)

    with tiny_server("--request-log", str(log.path), *pool) as server:
        asyncio.run(ask(server.url))
        told = [record for record in log.wait(45) if record.http_request_id.startswith("r")]
        preempted = [record for record in told if record.preemptions]
        assert len(told) == 5
        assert preempted
        for record in told:
            assert (record.phases.preempted_s > 0) is (record.preemptions > 0)
        waited_s = [record.phases.queue_s + record.phases.prefill_wait_s for record in told]
        assert max(waited_s) > 0
