"""Several front ends on one port: counted together, watched, drained."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tailrace.config import Config, EngineConfig, ServerConfig
from tailrace.errors import ConfigError, EngineError
from tailrace.server import front_ends as front_ends_module
from tailrace.server.front_ends import MAX_FAILED_STARTS, FrontEnds
from tests.server.served import CONTEXT_TOKENS, DEADLINE_S, status_of, streaming

SHORT = {"prompt": "Hi", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def wait_until(holds, what):
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"still not: {what}"
        time.sleep(0.02)


def metrics(url):
    """Samples by their name with labels, as a front end that the kernel chose has them."""
    lines = httpx.get(f"{url}/metrics", timeout=DEADLINE_S).text.splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("tailrace:"): float(value) for name, value in samples}


def held(url):
    """Requests at the engine by front end."""
    found = metrics(url)
    return [found.get(f'frontend_requests{{frontend="{index}"}}', 0.0) for index in (0, 1)]


@contextlib.contextmanager
def streams_on_both(url, max_tokens):
    """Open streams until each front end has one; give their clients' lines."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(24):
            client = stack.enter_context(httpx.Client(base_url=url, timeout=DEADLINE_S))
            opened.append(stack.enter_context(streaming(client, max_tokens)))
            time.sleep(0.05)
            if all(held(url)):
                break
        wait_until(lambda: all(held(url)), "each front end has a stream")
        yield opened


@pytest.fixture
def server(start):
    """Two front ends; their watcher's address."""
    started = start("--api-workers", "2", "--max-batch-size", "24", "--drain-timeout-s", "100")
    with started.ready() as client:
        started.url = str(client.base_url).rstrip("/")
    return started


def front_end_pids(server):
    found = []
    for pid in server.family():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"tailrace.server.api_worker" in command:
                found.append(pid)
    return found


@pytest.mark.e2e
def test_whichever_is_asked_tells_what_all_have_served(server):
    for _ in range(12):  # connections of their own: the kernel deals them out
        assert httpx.post(f"{server.url}/generate", json=SHORT).status_code == 200
    served = 'request_success_total{finished_reason="length"}'
    # A client has its answer a moment before it is counted.
    wait_until(lambda: metrics(server.url).get(served) == 12, "all are counted")
    assert {metrics(server.url)[served] for _ in "x" * 8} == {12.0}
    found = metrics(server.url)
    assert found["e2e_request_latency_seconds_count"] == 12
    assert found["frontend_imbalance"] == 1.0
    for role in ("watcher", "frontend-0", "frontend-1", "engine"):
        assert found[f'process_resident_memory_bytes{{process="{role}"}}'] > 1e6
    server.process.send_signal(signal.SIGTERM)
    assert server.ended()[0] == 0
    server.assert_nothing_left()


@pytest.mark.e2e
def test_all_write_one_request_log(start, tmp_path):
    log_file = tmp_path / "requests.jsonl"
    server = start("--api-workers", "3", "--request-log", str(log_file))
    with server.ready() as client:
        url = str(client.base_url).rstrip("/")
    for _ in range(30):
        assert httpx.post(f"{url}/generate", json=SHORT).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended()[0] == 0
    records = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert len({record["request_id"] for record in records}) == 30


@pytest.mark.e2e
@pytest.mark.parametrize("is_to_group", [False, True], ids=["watcher", "group"])
def test_sigterm_drains_all(server, is_to_group):
    with streams_on_both(server.url, 1000) as opened:
        tell = server.signal_group if is_to_group else server.process.send_signal
        tell(signal.SIGTERM)
        server.line("draining .*front_ends=2")
        for events, lines in opened:
            events.extend(lines)
            assert events[-1] == "data: [DONE]"
            assert len(events) == 1001
    assert server.ended()[0] == 0
    server.assert_nothing_left()


@pytest.mark.e2e
@pytest.mark.parametrize("is_to_group", [False, True], ids=["watcher", "group"])
def test_a_second_sigterm_ends_all_at_once(server, is_to_group):
    with streams_on_both(server.url, CONTEXT_TOKENS - 10) as opened:
        tell = server.signal_group if is_to_group else server.process.send_signal
        tell(signal.SIGTERM)
        server.line("draining .*front_ends=2")
        tell(signal.SIGTERM)
        for _, lines in opened:
            with contextlib.suppress(httpx.TransportError):
                assert "stopping" in "".join(list(lines)[-2:])
    assert server.ended()[0] == 0
    server.assert_nothing_left()


@pytest.mark.e2e
def test_a_killed_front_end_is_replaced_and_only_its_requests_end(server):
    assert httpx.post(f"{server.url}/generate", json=SHORT).status_code == 200
    with streams_on_both(server.url, CONTEXT_TOKENS - 10) as opened:
        before = held(server.url)
        killed = front_end_pids(server)[0]
        os.kill(killed, signal.SIGKILL)
        server.line("front_end_restarts .*status=-9")
        wait_until(lambda: sum(map(bool, held(server.url))) == 1, "its requests have gone")
        after = held(server.url)
        assert max(after) in before
        still_there = ended = 0
        for _, lines in opened:
            try:
                next(lines)
                still_there += 1
            except (StopIteration, httpx.TransportError):
                ended += 1
        # What had been received before the end is read first, so an ended one may seem alive.
        assert still_there >= max(after)
        wait_until(lambda: len(front_end_pids(server)) == 2, "there are two again")
        found = metrics(server.url)
        assert found["frontend_restarts_total"] == 1
        assert found['request_success_total{finished_reason="length"}'] == 1
    wait_until(lambda: held(server.url) == [0, 0], "nothing is left at the engine")
    for _ in range(12):
        assert httpx.post(f"{server.url}/generate", json=SHORT).status_code == 200
    assert killed not in server.family()


@pytest.mark.e2e
def test_a_killed_engine_is_replaced_under_all(server):
    with streams_on_both(server.url, CONTEXT_TOKENS - 10) as opened:
        (engine,) = server.family() - {server.process.pid, *front_end_pids(server)}
        os.kill(engine, signal.SIGKILL)
        for events, lines in opened:
            events.extend(lines)
            assert "engine died" in "".join(events[-2:])

    def all_are_ready():
        with httpx.Client(base_url=server.url) as client:
            return {status_of(client, "/ready") for _ in range(6)} == {200}

    wait_until(lambda: all(all_are_ready() for _ in range(4)), "all talk to the new engine")
    for _ in range(12):
        assert httpx.post(f"{server.url}/generate", json=SHORT).status_code == 200
    assert metrics(server.url)["engine_restarts_total"] == 1


@pytest.mark.e2e
def test_a_killed_watcher_takes_everybody_along(server):
    server.process.kill()
    server.ended()
    server.wait_for_end_of_family()


@pytest.mark.e2e
def test_the_cap_holds_over_all_front_ends(start):
    started = start("--api-workers", "2", "--max-batch-size", "1", "--max-waiting", "1")
    with started.ready() as client:
        url = str(client.base_url).rstrip("/")
    with contextlib.ExitStack() as stack:
        for index in range(2):
            client = stack.enter_context(httpx.Client(base_url=url, timeout=DEADLINE_S))
            body = SHORT | {"max_tokens": CONTEXT_TOKENS - 10, "stream": True}
            if index:  # it waits, so its head does not come: leave it at that
                raw = stack.enter_context(
                    socket.create_connection(("127.0.0.1", client.base_url.port))
                )
                data = json.dumps(body).encode()
                head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(
                    data
                )
                raw.sendall(head + data)
            else:
                stack.enter_context(streaming(client, CONTEXT_TOKENS - 10))
        wait_until(lambda: sum(held(url)) == 2, "one runs and one waits")
        for is_streaming in (False, True):
            for _ in range(10):
                refused = httpx.post(f"{url}/v1/completions", json=SHORT | {"stream": is_streaming})
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"
                assert "2 of 2 sequences" in refused.text
                assert int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: metrics(url)['http_errors_total{status="429"}'] == 20, "all are counted")
    wait_until(lambda: held(url) == [0, 0], "all have left")
    assert httpx.post(f"{url}/generate", json=SHORT).status_code == 200


@pytest.mark.e2e
def test_a_model_that_cannot_be_served_is_one_readable_line(start, tmp_path):
    server = start("--api-workers", "2", model=tmp_path / "none")
    status, lines = server.ended()
    assert status == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith("tailrace: ")
    server.assert_nothing_left()


@pytest.mark.e2e
def test_a_port_of_anothers_is_not_shared(start):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start("--port", str(port), "--api-workers", "2")
        status, lines = server.ended()
    assert status == 1
    assert lines == [f"tailrace: cannot listen on 127.0.0.1:{port}: Address already in use"]


# Without an engine


class NoBridge:
    def forget_frontend(self, name):
        pass


def fronts(folder, *command, workers=2):
    config = Config(server=ServerConfig(api_workers=workers))
    return FrontEnds(config, 1, folder, command=(sys.executable, "-c", *command))


def test_front_ends_that_never_come_up_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(front_ends_module, "FIRST_BACKOFF_S", 0.001)
    failing = fronts(tmp_path, "print('a stray word'); raise SystemExit(3)", workers=1)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(asyncio.wait_for(failing.run(NoBridge()), 120))
    (error,) = caught.value.exceptions
    assert isinstance(error, EngineError)
    assert f"front end 0 ended {MAX_FAILED_STARTS} times" in str(error)
    assert "status 3" in str(error)
    assert failing.restarts == MAX_FAILED_STARTS - 1


def test_those_that_drain_are_not_started_again(tmp_path):
    waiting = "import sys\nfor line in sys.stdin:\n    if '\"drain\"' in line: break"

    async def main():
        watched = fronts(tmp_path, waiting)
        running = asyncio.create_task(watched.run(NoBridge()))
        while len(watched._alive) < 2:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)
        watched.drain()
        await asyncio.wait_for(running, 120)
        assert watched.restarts == 0

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("workers", [0, 65, -1])
def test_there_are_one_to_64(workers):
    with pytest.raises(ConfigError, match="--api-workers"):
        ServerConfig(api_workers=workers)


def test_a_system_without_shared_ports_is_an_error(monkeypatch):
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    with pytest.raises(ConfigError, match="SO_REUSEPORT"):
        front_ends_module.run_front_ends(Config(engine=EngineConfig(), server=ServerConfig()))


def test_counts_of_processes_that_have_ended_stay_in_the_sum(tmp_path):
    script = (
        "from tailrace.telemetry.metrics import Metrics\n"
        "m = Metrics()\nm.count_error(429)\nm.observe_token_gap(0.01)\n"
        "print(m.render(dropped_records=2).decode())"
    )
    for run in (1, 2, 3):
        shown = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f'tailrace:http_errors_total{{status="429"}} {run}.0' in shown
        assert f"tailrace:inter_token_latency_seconds_count {run}.0" in shown
        assert f"tailrace:request_log_dropped_total {2 * run}.0" in shown
