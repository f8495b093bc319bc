"""Admission at a real server: the cap, late first tokens, keys and their classes, draining."""

import contextlib
import json
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.served import DEADLINE_S, streaming

pytestmark = pytest.mark.e2e

CLASSES = """
[[classes]]
name = "interactive"
priority = 0
share = 1

[[classes]]
name = "batch"
priority = 5
max-sequences = 3

[keys.alice]
key = "sk-alice"
class = "interactive"

[keys.bob]
key = "sk-bob"
class = "interactive"

[keys.night]
key = "sk-night"
class = "batch"
"""


def asking(client, tokens=4, *, key=None, prompt="Hi", headers=None, **fields):
    """POST /generate; return the answer."""
    headers = dict(headers or {})
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return client.post("/generate", json=body | fields, headers=headers)


def samples(client, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    lines = client.get("/metrics", headers=headers).text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("tailrace:"): float(value) for name, value in found}


def assert_nothing_is_held(client, key=None):
    """Wait until every unit is back, as the pool itself tells."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        report = client.get("/debug/kv", headers=headers).json()
        assert report["fault"] == ""
        if not report["tables"] and not report["reserved_blocks"]:
            assert report["free_blocks"] == report["total_blocks"]
            return
        assert time.monotonic() < deadline_s, report
        time.sleep(0.02)


def wait_for(client, holds, key=None):
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds(samples(client, key)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_a_flood_beyond_the_cap_is_429_with_a_time_to_return_and_leaves_nothing(start, front_ends):
    options = ("--max-batch-size", "2", "--max-waiting", "2", "--debug-kv")
    with start(*options, "--api-workers", front_ends).ready() as client:
        with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(streaming(client, 40_000))
            waiting = [pool.submit(asking, client) for _ in range(2)]
            wait_for(client, lambda m: m.get("num_requests_waiting") == 2)
            with ThreadPoolExecutor(16) as flood:
                answers = list(flood.map(lambda _: asking(client), range(60)))
            stack.close()
            assert [future.result().status_code for future in waiting] == [200, 200]
        assert {answer.status_code for answer in answers} == {429}
        for answer in answers:
            assert int(answer.headers["retry-after"]) >= 1
            assert "of 4 sequences" in answer.json()["error"]["message"]
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert_nothing_is_held(client)
        assert asking(client).status_code == 200


def test_without_a_waiting_room_the_batch_is_the_cap(start):
    with start("--max-batch-size", "1", "--max-waiting", "0").ready() as client:
        with streaming(client, 20_000):
            refused = asking(client)
        assert refused.status_code == 429
        assert "1 of 1 sequences" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1


def test_a_first_token_that_would_be_late_is_refused_at_once(start, tmp_path):
    log = tmp_path / "requests.jsonl"
    options = ("--max-batch-size", "1", "--max-ttft", "0.5", "--debug-kv")
    with start(*options, "--request-log", str(log)).ready() as client:
        told = asking(client, return_metrics=True).json()["metrics"]
        assert told["predicted_ttft_s"] > 0.0
        assert told["ttft_s"] > 0.0
        # Each is expected to hold the one place for some 250 steps.
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda _: asking(client, 250), range(50)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.status_code for answer in answers} == {200, 429}
        for answer in refused:
            message = answer.json()["error"]["message"]
            predicted_s = float(re.search(r"predicted in (\S+) s", message)[1])
            assert predicted_s > 0.49
            assert "--max-ttft" in message
            assert int(answer.headers["retry-after"]) >= 1
        assert_nothing_is_held(client)
        found = samples(client)
        assert found["late_refusals_total"] == len(refused)
        assert found['admission_rejections_total{reason="first_token_late"}'] == len(refused)
        assert {answer.json()["error"]["code"] for answer in refused} == {"first_token_late"}
        predicted = found["predicted_time_to_first_token_seconds_count"]
        assert predicted == 51 - len(refused) == found["ttft_prediction_error_ratio_count"]
        assert asking(client).status_code == 200
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        assert record["predicted_ttft_s"] > 0.0
        if record["status"] == 200:
            assert record["ttft_s"] > 0.0
        else:
            assert record["finish_reason"] == "refused"
            assert record["predicted_ttft_s"] > 0.49


def in_order(client, calls, key):
    """Ask one after another behind a long answer; return the order in which they were answered.

    Answers take some tenths of a second each, longer than a thread here waits for its turn.
    """
    ended = []

    def ask(name, options):
        answer = asking(client, 200, **options)
        ended.append((name, answer.status_code))

    threads = []
    with streaming(client, 40_000, key) as (_, lines):
        next(lines)
        for number, (name, options) in enumerate(calls):
            thread = threading.Thread(target=ask, args=(name, options))
            thread.start()
            threads.append(thread)
            wait_for(client, lambda m, n=number: m.get("num_requests_waiting") == n + 1, key)
    # The long one has left.
    for thread in threads:
        thread.join(DEADLINE_S)
    return ended


def test_keys_have_the_priorities_and_shares_of_their_classes(start, tmp_path):
    settings = tmp_path / "tailrace.toml"
    settings.write_text(CLASSES)
    options = ("--max-batch-size", "1", "--debug-kv", "--config", str(settings))
    alice, bob, night = ({"key": f"sk-{name}"} for name in ("alice", "bob", "night"))
    with start(*options).ready() as client:
        assert asking(client).status_code == 401
        assert asking(client, key="sk-other").status_code == 401
        flood = [(f"alice{n}", alice) for n in range(4)]
        low = [("night0", night), ("night1", night)]
        ended = in_order(client, [*low, *flood, ("bob", bob)], "sk-alice")
        assert {status for _, status in ended} == {200}
        names = [name for name, _ in ended]
        # One of a flood at most goes before a single request of another key; nights come last.
        assert names.index("bob") <= 1
        assert names[-2:] == ["night0", "night1"]
        assert [n for n in names if n.startswith("alice")] == [name for name, _ in flood]

        less = {"headers": {"x-tailrace-priority": "3"}}
        ended = in_order(client, [("asked less", bob | less), ("alice", alice)], "sk-alice")
        assert [name for name, _ in ended] == ["alice", "asked less"]

        too_urgent = asking(client, priority=0, **night)
        assert too_urgent.status_code == 400
        assert too_urgent.json()["error"]["param"] == "priority"
        assert_nothing_is_held(client, "sk-bob")


@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_a_key_has_no_more_sequences_than_its_class_allows(start, tmp_path, front_ends):
    settings = tmp_path / "tailrace.toml"
    settings.write_text(CLASSES)
    options = ("--max-batch-size", "8", "--debug-kv", "--config", str(settings))
    server = start(*options, "--api-workers", front_ends)
    with server.ready() as client, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(streaming(client, 40_000, "sk-night"))
        refused = asking(client, key="sk-night")
        assert refused.status_code == 429
        assert "'night' has 3 of 3" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "key_limit_exceeded"
        assert "sk-night" not in refused.text
        assert asking(client, key="sk-alice").status_code == 200
        stack.close()
        assert_nothing_is_held(client, "sk-alice")
        assert asking(client, key="sk-night").status_code == 200


def test_who_comes_while_it_drains_gets_503_and_those_inside_are_served(start):
    server = start("--max-batch-size", "1", "--drain-timeout-s", "60")
    with server.ready() as client, ThreadPoolExecutor(2) as pool:
        inside = [pool.submit(asking, client, 800) for _ in range(2)]
        wait_for(client, lambda m: m.get("num_requests_waiting") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.line("draining")
        refused = asking(client)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert [future.result().status_code for future in inside] == [200, 200]
    status, _ = server.ended()
    assert status == 0
