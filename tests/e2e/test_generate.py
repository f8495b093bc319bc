"""POST /generate with `curl`: the bodies that two field reports' load scripts send."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.e2e.observe import events

pytestmark = pytest.mark.e2e

PROMPT = "Explain in a few words why the sky is blue: the light of the sun"


@pytest.fixture
def curl(server):
    """Send a body; return the status, the content type and the body of the answer."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    def send(path: str, body: dict | None = None, *options: str) -> tuple[int, str, str]:
        command = ["curl", "-sS", "-N", "--max-time", "120", *options]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        command += ["-w", "\n%{http_code} %{content_type}", server.url + path]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        shown, _, tail = done.stdout.rpartition("\n")
        status, _, kind = tail.partition(" ")
        return int(status), kind, shown

    return send


def test_the_warm_up_request_of_text_1(curl):
    status, _, shown = curl("/generate", {"prompt": "Hello", "max_tokens": 1, "stream": False})
    assert status == 200
    answer = json.loads(shown)
    assert isinstance(answer["text"], str)
    assert answer["usage"]["completion_tokens"] == 1


def test_the_stream_of_text_1_is_one_event_a_token_and_done(curl):
    body = {"prompt": PROMPT, "max_tokens": 16, "stream": True, "temperature": 0}
    status, kind, shown = curl("/generate", body)
    assert status == 200
    assert kind.startswith("text/event-stream")
    *pieces, last = events(shown.split("\n"))
    assert last == "[DONE]"
    assert all(set(piece) == {"token"} for piece in pieces)
    assert len(pieces) == 16
    whole = json.loads(curl("/generate", body | {"stream": False})[2])
    assert "".join(piece["token"] for piece in pieces) == whole["text"]


def test_the_answer_of_text_2_says_where_its_time_went(curl):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.7, "top_p": 0.95}
    status, kind, shown = curl("/generate", body)
    assert status == 200
    assert kind.startswith("application/json")
    answer = json.loads(shown)
    assert answer["text"]
    metrics = answer["metrics"]
    parts = [metrics[name] for name in ("queue_ms", "prefill_ms", "decode_ms")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= metrics["request_latency_ms"] + 1
    assert 0 < metrics["ttft_ms"] <= metrics["request_latency_ms"]


def test_a_wrong_body_is_400_in_openais_shape(curl):
    status, _, shown = curl("/generate", {"prompt": PROMPT, "max_tokens": "many"})
    assert status == 400
    assert json.loads(shown)["error"]["param"] == "max_tokens"
    status, _, shown = curl("/generate", {"max_tokens": 4})
    assert status == 400
    assert json.loads(shown)["error"]["param"] == "prompt"


def test_tokenize_and_detokenize_are_each_others_inverse(curl):
    status, _, shown = curl("/tokenize", {"prompt": PROMPT})
    assert status == 200
    found = json.loads(shown)
    assert found["count"] == len(found["tokens"])
    status, _, shown = curl("/detokenize", {"tokens": found["tokens"]})
    assert status == 200
    assert json.loads(shown)["prompt"] == PROMPT


def test_what_operators_read(curl):
    status, kind, shown = curl("/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert "tailrace:kv_cache_usage_perc" in shown
    health = json.loads(curl("/health")[2])
    assert health["status"] == "ok"
    assert health["pending_requests"] == 0
    assert {"device_utilization", "tokens_per_second", "running_requests"} <= set(health)
    assert health["kv_cache"]["usage"] == 0
    assert curl("/ready")[0] == 200
    assert json.loads(curl("/version")[2])["version"]
