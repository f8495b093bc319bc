"""Over real sockets: whatever becomes of a request, its record's phases add up to its time.

The client's own stamps, of the same clock, stand around the server's: so the end-to-end time itself
is the right one, and not only the sum.
"""

import json
import socket
import threading
import time
from dataclasses import dataclass

import msgspec
import pytest

from tailrace.config import Config, EngineConfig, ServerConfig
from tailrace.telemetry.request_log import RequestRecord
from tests.server.fake_engine import Script
from tests.server.running_app import read_to_end, running_app

COMPLETIONS = "/v1/completions"
HI = {"prompt": "Hi", "max_tokens": 8}


@dataclass
class Logged:
    """A server whose request log is read."""

    app: object
    path: object

    def records(self):
        self.app.settle()
        deadline_s = time.monotonic() + 120
        while not self.app.services.request_log._records.empty():
            assert time.monotonic() < deadline_s
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        return [msgspec.json.decode(line, type=RequestRecord) for line in lines]

    def wait(self, count):
        deadline_s = time.monotonic() + 120
        while len(self.records()) < count:
            assert time.monotonic() < deadline_s, self.records()
            time.sleep(0.005)
        found = self.records()
        assert len(found) == count
        for record in found:
            check(record)
        return found

    def head(self, body, path=COMPLETIONS, extra=""):
        return (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{extra}"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()


def check(record):
    """The sums, within a millisecond."""
    assert record.phases is not None
    whole_s = record.finished_s - record.received_s
    assert record.phases.total_s == pytest.approx(whole_s, abs=1e-3)
    assert min(record.phases.by_name().values()) >= 0
    if record.ttft_phases is not None:
        assert record.first_token_s is not None
        assert record.ttft_phases.total_s >= record.first_token_s - record.received_s - 1e-3
        assert record.ttft_phases.total_s <= whole_s + 1e-3


@pytest.fixture
def serve(tiny_folder, tmp_path):
    """Start a server with a request log; settings of the front end by name."""
    stack = []

    def start(scripts=None, engine=None, **settings):
        path = tmp_path / "requests.jsonl"
        config = Config(
            engine=EngineConfig(**engine or {}),
            server=ServerConfig(request_log=str(path), **settings),
        )
        context = running_app(tiny_folder, scripts, config, context_length=20_000)
        app = context.__enter__()
        stack.append(context)
        return Logged(app, path)

    yield start
    for context in stack:
        context.__exit__(None, None, None)


def test_a_body_that_trickles_in_is_the_bodys_time(serve):
    logged = serve()
    body = json.dumps(HI).encode()
    before_s = time.monotonic()
    with logged.app.connect() as connection:
        head = logged.head(body)
        connection.sendall(head[:10])
        time.sleep(0.12)  # the server may come to what was sent some milliseconds late
        connection.sendall(head[10:] + body[:5])
        time.sleep(0.12)
        sent_s = time.monotonic()
        connection.sendall(body[5:])
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")
    after_s = time.monotonic()
    (record,) = logged.wait(1)
    assert before_s <= record.received_s <= record.finished_s <= after_s
    assert record.phases.body_s >= 0.2
    assert record.received_s + record.phases.body_s >= sent_s
    assert record.status == 200
    # No moment of the body's counts as the socket's too.
    assert record.phases.socket_s <= after_s - before_s - record.phases.body_s


@pytest.mark.parametrize("asks", ["header", "body"])
@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/generate"])
def test_an_answer_tells_where_its_time_went_where_it_is_asked_to(serve, path, is_streaming, asks):
    logged = serve({"": Script("Hello")})
    body = {"stream": is_streaming, "max_tokens": 20}
    body |= (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    )
    headers = {"X-Tailrace-Timing": "1"} if asks == "header" else {}
    body |= {"return_metrics": True} if asks == "body" else {}
    answer = logged.app.post(path, body, headers=headers)
    assert answer.status_code == 200
    if is_streaming:
        *_, last, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        value = json.loads(last.removeprefix("data: "))
        assert not value.get("choices")
        assert "usage" not in value
    else:
        value = answer.json()
    metrics = value["metrics"]
    assert sum(metrics["phases"].values()) == pytest.approx(metrics["e2e_s"], abs=1e-3)
    assert sum(metrics["ttft_phases"].values()) == pytest.approx(metrics["ttft_s"], abs=1e-6)
    assert "predicted_ttft_s" not in metrics
    (record,) = logged.wait(1)
    # What followed that line is in the record alone.
    assert metrics["e2e_s"] <= record.finished_s - record.received_s
    assert metrics["phases"]["decode_s"] == pytest.approx(record.phases.decode_s, abs=1e-6)
    assert record.is_streaming is is_streaming


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
def test_an_answer_that_was_not_asked_does_not_tell(serve, is_streaming):
    logged = serve()
    headers = {"x-tailrace-timing": "0"}
    text = logged.app.post(COMPLETIONS, HI | {"stream": is_streaming}, headers=headers).text
    assert "metrics" not in text
    logged.wait(1)


def test_usage_and_metrics_share_a_chunk(serve):
    logged = serve()
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_metrics": True}
    text = logged.app.post(COMPLETIONS, HI | options).text
    last = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
    assert last["usage"]["prompt_tokens"] == 2
    assert last["metrics"]["e2e_s"] > 0


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
def test_a_client_that_reads_late_costs_the_socket_and_not_the_engine(serve, is_streaming):
    logged = serve(
        {"": Script("x" * 18_000, burst=500)}, stream_buffer_bytes=100_000_000, max_logprobs=20
    )
    fields = {"prompt": "big", "max_tokens": 18_000, "logprobs": 20, "stream": is_streaming}
    body = json.dumps(fields).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", logged.app.port))
        connection.sendall(logged.head(body) + body)
        deadline_s = time.monotonic() + 120
        while logged.app.engine.open_requests or not logged.app.engine.requests:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert connection.recv(1, socket.MSG_PEEK) == b"H"  # made, and on its way
        time.sleep(0.5)
        reads_s = time.monotonic()
        answer = read_to_end(connection)
        after_s = time.monotonic()
    assert len(answer) > 5_000_000
    (record,) = logged.wait(1)
    assert record.completion_tokens > 0
    # The engine was done before; how long making the answer took is the machine's affair.
    assert record.phases.emit_s + record.phases.socket_s >= 0.5
    assert record.phases.socket_s > 0
    assert reads_s <= record.finished_s <= after_s


def test_a_client_that_leaves_amid_its_answer_is_recorded_up_to_then(serve):
    script = Script("Hello", pause_after=2)
    logged = serve({"": script})
    body = json.dumps(HI | {"stream": True}).encode()
    with logged.app.connect() as connection:
        connection.sendall(logged.head(body) + body)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        logged.app.wait(logged.app.engine.was_paused.wait())
        time.sleep(0.1)
    (record,) = logged.wait(1)
    assert (record.finish_reason, record.status) == ("disconnect", 200)
    assert record.phases.decode_s >= 0.1  # the engine was still at it
    assert record.ttft_phases is not None


def test_a_client_that_leaves_before_its_first_token_is_told_by_the_engines_last_word(serve):
    logged = serve({"": Script("Hello", pause_after=0)})
    body = json.dumps(HI).encode()
    before_s = time.monotonic()
    with logged.app.connect() as connection:
        connection.sendall(logged.head(body) + body)
        logged.app.wait(logged.app.engine.was_paused.wait())
        time.sleep(0.1)
    (record,) = logged.wait(1)
    after_s = time.monotonic()
    assert (record.finish_reason, record.status) == ("disconnect", 499)
    assert record.ttft_phases is None
    assert record.phases.prefill_s >= 0.1
    assert record.phases.queue_s <= after_s - before_s - 0.1  # nothing of the pause


def test_an_engine_that_fails_is_recorded_with_the_status(serve):
    logged = serve({"": Script("Hello", error_after=0)})
    assert logged.app.post(COMPLETIONS, HI).status_code == 500
    (record,) = logged.wait(1)
    assert (record.finish_reason, record.status) == ("error", 500)
    assert record.reason == "engine_error: the step failed"


def test_of_several_sequences_the_last_one_tells_the_time(serve):
    logged = serve({"a": Script("x"), "b": Script("slow", pause_after=3)})

    def go_on():
        logged.app.wait(logged.app.engine.was_paused.wait())
        time.sleep(0.1)
        logged.app.call(logged.app.engine.scripts["b"].go_on.set)

    helper = threading.Thread(target=go_on)
    helper.start()
    answer = logged.app.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 9, "n": 1})
    helper.join()
    assert answer.status_code == 200
    (record,) = logged.wait(1)
    assert record.choices == 2
    assert record.phases.decode_s >= 0.1
    assert record.ttft_phases.total_s < record.phases.total_s - 0.09


def test_a_stop_string_leaves_no_gap(serve):
    logged = serve({"": Script("Hello, world")})
    answer = logged.app.post(COMPLETIONS, HI | {"stop": "lo"})
    assert answer.json()["choices"][0]["text"] == "Hel"
    (record,) = logged.wait(1)
    assert record.finish_reason == "stop"


def test_a_stalled_body_is_recorded_with_the_reason(serve):
    logged = serve(body_timeout_s=0.2)
    body = json.dumps(HI).encode()
    answer = logged.app.raw(logged.head(body), body[:-3])
    assert answer.startswith(b"HTTP/1.1 408")
    (record,) = logged.wait(1)
    assert (record.finish_reason, record.status) == ("refused", 408)
    assert record.reason.startswith("request timeout: the body was not complete")
    # By the time that was set, not by the usual one.
    assert 0.2 <= record.phases.body_s < ServerConfig().body_timeout_s
    assert record.submitted_s is None
    assert record.phases.queue_s == 0


def test_a_client_that_leaves_within_its_body_is_recorded(serve):
    logged = serve()
    body = json.dumps(HI).encode()
    with logged.app.connect() as connection:
        connection.sendall(logged.head(body) + body[:-3])
        time.sleep(0.1)
    (record,) = logged.wait(1)
    assert (record.finish_reason, record.status) == ("disconnect", 499)
    assert record.phases.body_s == pytest.approx(record.finished_s - record.received_s, abs=1e-3)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"prompt": "Hi", "model": "other"}, 404, "model_not_found: the model 'other'"),
        ({"prompt": "Hi", "temperature": 9}, 400, "bad request: temperature"),
        ({"prompt": ["a"] * 60}, 400, "bad request: the request means 60"),
        ({"prompt": ["a"] * 3}, 200, ""),
    ],
    ids=["model", "field", "places", "fine"],
)
def test_a_refusal_is_recorded_with_status_and_reason(serve, body, status, reason):
    logged = serve(engine={"max_batch_size": 4}, max_waiting=50)
    assert logged.app.post(COMPLETIONS, body).status_code == status
    (record,) = logged.wait(1)
    assert record.status == status
    assert record.reason.startswith(reason)
    assert (record.finish_reason == "refused") is (status != 200)


def test_a_bug_of_ours_is_an_error_and_no_refusal(serve, monkeypatch):
    logged = serve()

    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(logged.app.services.admission, "admitted", fails)
    assert logged.app.post(COMPLETIONS, HI).status_code == 500
    (record,) = logged.wait(1)
    assert (record.finish_reason, record.status) == ("error", 500)
    assert record.reason == "internal server error: the server failed at this request"


def test_a_full_house_is_recorded_as_429(serve):
    script = Script("Hello", pause_after=1)
    logged = serve({"": script}, engine={"max_batch_size": 1}, max_waiting=0)
    with logged.app.connect() as connection:
        body = json.dumps(HI).encode()
        connection.sendall(logged.head(body) + body)
        logged.app.wait(logged.app.engine.was_paused.wait())
        assert logged.app.post(COMPLETIONS, HI).status_code == 429
        logged.app.call(script.go_on.set)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")
    refused, served = logged.wait(2)
    assert (refused.status, served.status) == (429, 200)
    assert refused.reason.startswith("rate_limit_exceeded: the server is full")


def test_what_asks_for_no_text_is_not_recorded(serve):
    logged = serve()
    assert logged.app.post("/tokenize", {"prompt": "Hi"}).status_code == 200
    assert logged.app.post("/tokenize", {"prompt": 5}).status_code == 400
    assert logged.app.get("/nothing/here").status_code == 404
    assert logged.app.get(COMPLETIONS).status_code == 405
    assert logged.records() == []


def test_phases_are_histograms_with_a_label_each(serve):
    logged = serve()
    logged.app.post(COMPLETIONS, HI)
    logged.app.post(COMPLETIONS, {"prompt": 5.5})
    logged.wait(2)
    text = logged.app.get("/metrics").text
    counts = [
        line
        for line in text.splitlines()
        if line.startswith("tailrace:request_phase_seconds_count")
    ]
    assert len(counts) == 10
    assert all(line.endswith(" 2.0") for line in counts)


def test_requests_of_one_connection_have_their_own_first_bytes(serve):
    logged, asked = serve(), []
    for _ in range(3):
        begun_s = time.monotonic()
        logged.app.post(COMPLETIONS, HI)
        asked.append((begun_s, time.monotonic()))
        time.sleep(0.05)
    # By the client's clock. The server may note an answer's end only after the client has it.
    for (begun_s, answered_s), record in zip(asked, logged.wait(3), strict=True):
        assert begun_s <= record.received_s <= answered_s
