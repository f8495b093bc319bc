"""`tailrace serve` as real processes: start, signals, death of the engine, and what is left."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import httpx
import pytest

from tailrace.config import Config, EngineConfig, ServerConfig
from tailrace.errors import ConfigError
from tailrace.server import serve

DEADLINE_S = 120.0
"""After so long a test has failed, were the machine ever so busy."""
CONTEXT_TOKENS = 50_000
"""Room for requests that do not end while a test is at work."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    from tests.support.tiny import make_tiny_checkpoint  # noqa: PLC0415 -- brings torch

    folder = tmp_path_factory.mktemp("served") / "tiny-model"
    return make_tiny_checkpoint(folder, max_position_embeddings=CONTEXT_TOKENS)


class Served:
    """A server process and all that descend from it, known by a mark in their environment."""

    def __init__(self, folder, *options):
        self.mark = uuid.uuid4().hex
        self.folder = folder
        command = [sys.executable, "-m", "tailrace", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TEST_MARK": self.mark, "TMPDIR": folder, "NO_COLOR": "1"},
        )
        self.lines = []
        self._new_lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self._new_lines.put(line.rstrip("\n"))
        self._new_lines.put(None)

    def line(self, pattern):
        """Wait for a line of standard error; return the match."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            line = self._new_lines.get(timeout=deadline_s - time.monotonic())
            assert line is not None, f"ended without {pattern!r}: {self.lines}"
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found

    def ready(self):
        """Wait for the line that says so; return a client."""
        url = self.line(r"\] ready .*url=(\S+)")[1]
        return httpx.Client(base_url=url, timeout=DEADLINE_S)

    def ended(self):
        """Wait for the end; return the exit status and what was not yet read."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        rest = []
        while (line := self._new_lines.get(timeout=DEADLINE_S)) is not None:
            rest.append(line)
        return status, rest

    def family(self):
        """Return the process ids that carry the mark."""
        found = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self.mark in (entry / "environ").read_text(
                    encoding="utf-8", errors="replace"
                ):
                    found.add(int(entry.name))
        return found

    def engine_pid(self):
        (pid,) = self.family() - {self.process.pid}
        return pid

    def wait_for_end_of_family(self):
        deadline_s = time.monotonic() + DEADLINE_S
        while self.family():
            assert time.monotonic() < deadline_s, f"left behind: {self.family()}"
            time.sleep(0.01)

    def assert_nothing_left(self):
        assert self.family() == set()
        assert list(Path(self.folder).glob("tailrace-*")) == []


@pytest.fixture
def start(checkpoint):
    """Start a server on the tiny model; nothing of it outlives the test."""
    started = []

    def start(*options, model=checkpoint):
        small = (
            "--threads",
            "1",
            "--kv-cache-tokens",
            str(CONTEXT_TOKENS),
            "--cpu-kernels",
            "torch",
        )
        server = Served(folder, "--model-path", str(model), *small, *options)
        started.append(server)
        return server

    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield start
        for server in started:
            for pid in server.family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            server.process.wait()
            server._reader.join(DEADLINE_S)
            server.process.stderr.close()


@contextlib.contextmanager
def streaming(client, max_tokens):
    """Begin a stream; give its events once the first has come."""
    body = {
        "prompt": "Hi",
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    with client.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        yield [next(lines)], lines


def status_of(client, path):
    return client.get(path).status_code


@pytest.mark.e2e
def test_sigterm_lets_the_running_request_finish_and_takes_no_other(start):
    server = start("--drain-timeout-s", "100")
    with server.ready() as client:
        whole = client.post(
            "/generate",
            json={"prompt": "Hi", "max_tokens": 1000, "temperature": 0, "ignore_eos": True},
        ).json()
        with streaming(client, 1000) as (events, lines):
            server.process.send_signal(signal.SIGTERM)
            server.line("draining .*sequences=1")
            with contextlib.suppress(httpx.TransportError):  # it may have ended
                assert status_of(client, "/ready") == 503
                refused = client.post("/generate", json={"prompt": "Hi", "max_tokens": 1})
                assert refused.status_code == 503
                assert "retry-after" in refused.headers
            events.extend(lines)
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(event["token"] for event in texts) == whole["text"]
    assert server.ended()[0] == 0
    server.assert_nothing_left()


@pytest.mark.e2e
def test_a_second_sigterm_ends_at_once(start):
    server = start("--drain-timeout-s", "1000")
    with server.ready() as client, streaming(client, CONTEXT_TOKENS - 10) as (events, lines):
        server.process.send_signal(signal.SIGTERM)
        server.line("draining")
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.TransportError):
            events.extend(lines)
    assert server.ended()[0] == 0
    assert "stopping" in "".join(events[-2:])
    server.assert_nothing_left()


@pytest.mark.e2e
def test_a_request_beyond_the_deadline_is_cut_with_an_error(start):
    server = start("--drain-timeout-s", "0.1")
    with server.ready() as client, streaming(client, CONTEXT_TOKENS - 10) as (events, lines):
        server.process.send_signal(signal.SIGINT)
        events.extend(lines)
    assert server.ended()[0] == 0
    assert "stopping" in "".join(events[-2:])
    server.assert_nothing_left()


@pytest.mark.e2e
def test_a_killed_engine_ends_its_stream_with_an_error_and_is_replaced(start):
    server = start()
    with server.ready() as client:
        killed = server.engine_pid()
        with streaming(client, CONTEXT_TOKENS - 10) as (events, lines):
            os.kill(killed, signal.SIGKILL)
            events.extend(lines)
        assert "engine died" in "".join(events[-2:])
        assert status_of(client, "/ready") == 503
        assert status_of(client, "/health") == 503
        assert status_of(client, "/live") == 200
        refused = client.post("/generate", json={"prompt": "Hi", "max_tokens": 1})
        assert refused.status_code == 503
        server.line("engine_restarts .*status -9")
        deadline_s = time.monotonic() + DEADLINE_S
        while status_of(client, "/ready") != 200:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert server.engine_pid() != killed
        assert client.get("/health").json()["engine_restarts"] == 1
        answer = client.post("/generate", json={"prompt": "Hi", "max_tokens": 3})
        assert answer.status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended()[0] == 0
    server.assert_nothing_left()


@pytest.mark.e2e
def test_a_killed_front_end_takes_its_engine_along(start):
    server = start()
    server.ready().close()
    server.process.kill()
    server.ended()
    server.wait_for_end_of_family()


@pytest.mark.e2e
def test_sigterm_while_the_model_loads_ends_at_once(start):
    server = start()
    while len(server.family()) < 2:
        assert server.process.poll() is None
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.ended()[0] == 0
    server.assert_nothing_left()


@pytest.mark.e2e
@pytest.mark.parametrize("broken", ["missing", "empty", "no tokenizer", "bad config"])
def test_a_model_that_cannot_be_served_is_one_readable_line_and_status_1(
    start, checkpoint, tmp_path, broken
):
    folder = tmp_path / "model"
    if broken != "missing":
        folder.mkdir()
    if broken == "no tokenizer":
        for name in ("config.json", "model.safetensors"):
            (folder / name).symlink_to(checkpoint / name)
    if broken == "bad config":
        (folder / "config.json").write_text("{")
    server = start(model=folder)
    status, lines = server.ended()
    assert status == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith("tailrace: ")
    assert str(folder) in lines[0]
    server.assert_nothing_left()


@pytest.mark.e2e
def test_a_port_in_use_is_one_readable_line_and_status_1(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("--port", str(port))
        status, lines = server.ended()
    assert status == 1
    assert lines == [f"tailrace: cannot listen on 127.0.0.1:{port}: Address already in use"]
    server.assert_nothing_left()


# Without processes


@pytest.mark.parametrize(
    ("path", "served", "name"),
    [
        ("smollm2", "", "SmolLM2-135M-Instruct"),
        ("/models/Qwen2.5-0.5B-Instruct", "", "Qwen2.5-0.5B-Instruct"),
        ("/models/Qwen2.5-0.5B-Instruct/", "", "Qwen2.5-0.5B-Instruct"),
        ("/models/tiny.Q4_1.gguf", "", "tiny.Q4_1"),
        (".", "", Path.cwd().name),
        ("/models/tiny", "mine", "mine"),
    ],
)
def test_the_model_is_called_as_asked_or_as_its_folder(path, served, name):
    config = Config(
        engine=EngineConfig(model_path=path), server=ServerConfig(served_model_name=served)
    )
    assert serve._model_name(config) == name


def test_a_bound_port_that_nobody_listens_on_yet_is_taken_once():
    first = serve._bind("127.0.0.1", 0)
    with first, pytest.raises(ConfigError, match="Address already in use"):
        serve._bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "1.2.3"])
def test_an_address_that_is_not_ours_is_named(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {re.escape(host)}:0: "):
        serve._bind(host, 0)


def test_the_default_address_is_loopback():
    with serve._bind(ServerConfig().host, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_an_ipv6_address_is_bound_as_such():
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        listener = serve._bind("::1", 0)
    except ConfigError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with listener:
        assert listener.family is socket.AF_INET6
