"""`tailrace serve` as real processes: start, signals, death of the engine, and what is left."""

import contextlib
import gc
import json
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tailrace.config import Config, EngineConfig, ServerConfig
from tailrace.server import serve
from tests.server.served import CONTEXT_TOKENS, DEADLINE_S, status_of, streaming
from tests.support.garbage import is_frozen


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
def test_sigterm_to_the_whole_process_group_drains_too(start):
    server = start("--drain-timeout-s", "100")
    with server.ready() as client, streaming(client, 1000) as (events, lines):
        server.signal_group(signal.SIGTERM)
        server.line("draining .*sequences=1")
        events.extend(lines)
    assert events[-1] == "data: [DONE]"
    assert len(events) == 1001
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


def test_what_a_server_keeps_for_good_is_no_garbage_to_look_through(tiny_folder):
    _, bridge = serve.assemble(Config(), SimpleNamespace())
    try:
        bridge._on_resolved(str(tiny_folder))
        assert is_frozen()
    finally:
        gc.unfreeze()
        bridge._context.term()
