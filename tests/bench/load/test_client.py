"""The client against a scripted server: it recovers what was scripted, and survives the rest."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import socket
import sys
from dataclasses import replace

import pytest

from tailrace.bench.load import Load, Shot
from tailrace.bench.stats import e2e_s, gaps_s, ttft_s
from tailrace.bench.target import Target, completion_body
from tailrace.bench.wire import Endpoint, resolve
from tests.bench.mock_server import FAULTS, Behaviour, MockServer

TARGET = Target("mock", None, "")


def shots(times_s: list[float], output_tokens: int = 5) -> list[Shot]:
    return [
        Shot(
            index,
            at_s,
            3,
            output_tokens,
            completion_body(TARGET, "a b c", output_tokens, temperature=0, seed=index),
        )
        for index, at_s in enumerate(times_s)
    ]


def run(script, planned, *, timeout_s=20.0, stop_after=None, **more):
    """Return the records, the load and the server after one run."""

    async def go():
        async with MockServer(script=script) as server:
            endpoint = await resolve(server.url)
            stop = asyncio.Event()

            def on_record(_):
                if stop_after is not None and len(load.state.done) >= stop_after:
                    stop.set()

            load = Load(endpoint, planned, timeout_s=timeout_s, on_record=on_record, **more)
            return await load.run(stop), load, server

    return asyncio.run(go())


def test_scripted_latencies_are_recovered():
    """Each token is stamped when the server writes it, however late a busy machine lets it."""
    scripted = {0: (0.30, 0.02), 1: (0.02, 0.05), 2: (0.10, 0.08), 3: (0.02, 0.02)}
    late_s = [math.inf] * 4
    for _ in range(3):
        records, load, server = run(
            lambda index: Behaviour(*scripted[index]), shots([0.0, 0.0, 0.05, 0.1])
        )
        assert [record.status for record in records] == ["ok"] * 4
        for record in records:
            first_s, gap_s = scripted[record.index]
            wrote_s = [at_s - load.state.started_s for at_s in server.wrote_s[record.index]]
            delays_s = [read - wrote for read, wrote in zip(record.chunk_s, wrote_s, strict=True)]
            assert min(delays_s) >= 0
            late_s[record.index] = min(late_s[record.index], max(delays_s))
            assert record.first_token_s == record.chunk_s[0]
            assert ttft_s(record) >= first_s * 0.95
            assert len(gaps_s(record)) == 4
            assert e2e_s(record) >= ttft_s(record) + sum(gaps_s(record)) >= first_s + gap_s * 3.8
            assert record.input_tokens == 3
            assert record.output_tokens == 5
            assert record.finish_reason == "length"
            assert record.http_status == 200
    # Who stalls between a write and its reading does so by chance: not in all of three runs.
    assert max(late_s) < 0.1


def test_stamps_of_one_request_are_in_order():
    records, *_ = run(lambda _: Behaviour(0.02, 0.005), shots([0.0, 0.03, 0.06]))
    for record in records:
        moments = [
            record.scheduled_s,
            record.dispatched_s,
            record.sent_s,
            record.first_token_s,
            *record.chunk_s[1:],
            record.finished_s,
        ]
        assert all(a <= b for a, b in itertools.pairwise(moments))


def test_a_slow_answer_holds_no_other_request_back():
    """The first request never ends by itself, yet all others are sent and answered."""
    script = {0: Behaviour(fault="silent")}
    records, load, server = run(
        lambda index: script.get(index, Behaviour()),
        shots([0.02 * i for i in range(8)]),
        timeout_s=1.5,
    )
    assert [record.status for record in records] == ["timeout", *["ok"] * 7]
    assert [body["seed"] for body in server.completions] == list(range(8))
    assert all(record.finished_s < records[0].finished_s for record in records[1:])
    assert load.state.in_flight == 0


EXPECTED = {
    "refuse": ("http", "503"),
    "error_event": ("stream", "out of memory"),
    "late_refusal": ("stream", "too long"),
    "cut": ("stream", "closed in the body"),
    "garbage": ("stream", "bad event"),
    "binary": ("stream", "bad event"),
    "not_http": ("stream", "not HTTP"),
    "endless_event": ("stream", "the limit is"),
    "no_done": ("stream", "without data: [DONE]"),
    "short": ("short", "4 of 5 tokens"),
    "silent": ("timeout", "not complete 2 s"),
    "no_usage": ("ok", ""),
}

STATUSES = {"refuse": 503, "late_refusal": 400, "error_event": 200}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_record_and_no_crash(fault):
    script = {1: Behaviour(gap_s=0.002, fault=fault)}
    records, *_ = run(
        lambda index: script.get(index, Behaviour()), shots([0.0, 0.01, 0.02]), timeout_s=2.0
    )
    status, words = EXPECTED[fault]
    assert [record.status for record in records] == ["ok", status, "ok"]
    assert words in (records[1].error or "")
    assert (records[1].input_tokens is None) == (fault not in {"short", "no_done"})
    assert records[1].finished_s is not None
    if fault in STATUSES:
        assert records[1].http_status == STATUSES[fault]


def test_nobody_there_is_a_failure_of_each_request():
    with socket.socket() as held:
        # Bound and not listening: refused, and nobody else can take the port meanwhile.
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        endpoint = Endpoint(f"http://127.0.0.1:{port}", "127.0.0.1", "127.0.0.1", port)
        load = Load(endpoint, shots([0.0, 0.01]), timeout_s=5.0)
        records = asyncio.run(load.run(asyncio.Event()))
    assert [record.status for record in records] == ["connect", "connect"]


def test_an_interrupt_keeps_what_ended_and_marks_what_was_in_flight():
    script = {1: Behaviour(fault="silent")}
    planned = shots([0.0, 0.0, 0.2, 3600.0])
    records, load, _ = run(
        lambda index: script.get(index, Behaviour()), planned, timeout_s=60.0, stop_after=2
    )
    assert [record.status for record in records] == ["ok", "cancelled", "ok"]
    assert load.state.sent == 3
    assert load.state.in_flight == 0


def test_the_heartbeat_measures_the_clients_own_loop():
    _, load, _ = run(lambda _: Behaviour(ttft_s=0.1), shots([0.0]))
    assert load.heartbeat.lags_s
    assert min(load.heartbeat.lags_s) >= 0


def test_tokens_without_text_do_not_make_an_answer_fail(monkeypatch):
    """Special tokens have no text: the usage still counts them, and the end is their time."""
    textless = MockServer._stream

    async def stream(self, writer, body, how):
        await textless(self, writer, {**body, "max_tokens": 0}, how)

    monkeypatch.setattr(MockServer, "_stream", stream)
    planned = [Shot(0, 0.0, 3, 0, completion_body(TARGET, "a b c", 5, temperature=0))]
    records, *_ = run(lambda _: Behaviour(), planned)
    assert records[0].status == "ok"
    assert records[0].chunk_s == []
    assert records[0].first_token_s == pytest.approx(records[0].finished_s, abs=1.0)


def test_a_bug_of_the_client_is_not_taken_for_the_servers_failure():
    async def go():
        async with MockServer() as server:
            endpoint = await resolve(server.url)
            load = Load(endpoint, shots([0.0, 0.0]), timeout_s=5.0, on_record=lambda _: 1 / 0)
            await load.run(asyncio.Event())

    with pytest.raises(ZeroDivisionError):
        asyncio.run(go())


def test_every_request_carries_its_own_id_and_the_record_keeps_it():
    planned = [replace(shot, request_id=f"r-{shot.index}") for shot in shots([0.0, 0.01, 0.02])]
    records, _, server = run(lambda _: Behaviour(), planned)
    assert sorted(server.request_ids) == ["r-0", "r-1", "r-2"]
    assert [record.request_id for record in records] == ["r-0", "r-1", "r-2"]


def test_in_a_chat_the_first_token_is_the_first_text_whether_reasoning_or_content():
    """The chunk that carries only the role is none; both names of reasoning are text."""
    body = {
        "messages": [{"role": "user", "content": "a b c"}],
        "max_tokens": 4,
        "seed": 0,
    }
    planned = [Shot(0, 0.0, 3, 4, json.dumps(body).encode())]
    records, *_ = run(
        lambda _: Behaviour(ttft_s=0.2, gap_s=0.01), planned, path="/v1/chat/completions"
    )
    assert records[0].status == "ok"
    assert len(records[0].chunk_s) == 4
    assert ttft_s(records[0]) >= 0.19


def chained(count: int, think_s: float, **fields) -> list[Shot]:
    """Return one user's requests, due at once but for the one before."""
    return [
        replace(shot, after=shot.index - 1 if shot.index else None, think_s=think_s, **fields)
        for shot in shots([0.0] * count)
    ]


def test_a_users_next_request_is_due_when_its_answer_ended_and_the_think_time_has_passed():
    script = {0: Behaviour(ttft_s=0.2)}
    records, *_ = run(
        lambda index: script.get(index, Behaviour()), chained(4, think_s=0.05, user=3, session=8)
    )
    assert [record.status for record in records] == ["ok"] * 4
    for before, after in itertools.pairwise(records):
        assert after.scheduled_s == pytest.approx(before.finished_s + 0.05, abs=1e-9)
        assert after.dispatched_s >= after.scheduled_s
    assert {record.user for record in records} == {3}
    assert {record.session for record in records} == {8}
    # Latency counts from when it was due, not from the first request's time.
    assert records[1].scheduled_s > 0.2


def test_a_user_goes_on_after_a_failure():
    script = {0: Behaviour(fault="refuse")}
    records, *_ = run(lambda index: script.get(index, Behaviour()), chained(2, think_s=0.0))
    assert [record.status for record in records] == ["http", "ok"]


def test_users_do_not_wait_for_each_other():
    slow = chained(2, think_s=0.0)
    quick = [
        replace(shot, index=shot.index + 10, after=None if shot.after is None else shot.after + 10)
        for shot in chained(3, think_s=0.0)
    ]
    records, *_ = run(lambda index: Behaviour(ttft_s=0.4 if index == 0 else 0.0), slow + quick)
    # The body carries the seed of `shots`: 0 is slow in both chains, later ones are not.
    by_index = {record.index: record for record in records}
    assert by_index[12].finished_s < by_index[1].finished_s + 0.4
    assert abs(by_index[0].scheduled_s - by_index[10].scheduled_s) < 1e-9


def test_nothing_of_a_chain_is_sent_after_the_time_is_up():
    records, load, _ = run(
        lambda _: Behaviour(ttft_s=0.1), chained(50, think_s=0.05, user=0), until_s=0.5
    )
    assert 1 <= len(records) <= 4
    assert all(record.status == "ok" for record in records)
    assert load.state.total == 50


def test_an_interrupt_ends_users_that_are_thinking():
    records, load, _ = run(lambda _: Behaviour(), chained(3, think_s=60.0), stop_after=1)
    assert [record.status for record in records] == ["ok"]
    assert load.state.in_flight == 0


@pytest.mark.parametrize("after", [{1: 7}, {0: 1, 1: 0}, {1: 0, 2: 0}])
def test_chains_that_cannot_be_are_refused(after):
    planned = [replace(shot, after=after.get(shot.index)) for shot in shots([0.0] * 3)]
    with pytest.raises(ValueError, match="request"):
        Load(Endpoint("http://x", "x", "127.0.0.1", 1), planned, timeout_s=1)


def test_other_threads_get_little_time_while_it_runs_and_their_usual_time_after():
    usual_s, during_s = sys.getswitchinterval(), []
    run(lambda _: during_s.append(sys.getswitchinterval()) or Behaviour(), shots([0.0]))
    assert during_s[0] < usual_s / 5
    assert sys.getswitchinterval() == usual_s


def test_loads_that_overlap_leave_other_threads_their_usual_time():
    usual_s, during_s = sys.getswitchinterval(), []

    async def go():
        async with MockServer(script=lambda _: Behaviour(ttft_s=0.2)) as server:
            endpoint = await resolve(server.url)
            first, second = (Load(endpoint, shots([at_s]), timeout_s=20) for at_s in (0.0, 0.3))
            running = asyncio.create_task(first.run(asyncio.Event()))
            await asyncio.sleep(0.1)
            later = asyncio.create_task(second.run(asyncio.Event()))
            await running
            during_s.append(sys.getswitchinterval())
            assert not later.done()
            await later

    asyncio.run(go())
    assert during_s[0] < usual_s / 5
    assert sys.getswitchinterval() == usual_s
