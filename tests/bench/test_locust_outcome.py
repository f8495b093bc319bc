"""What a Locust run came to: its exit status, and what makes it invalid or calls for caution."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tailrace.bench.locust_outcome import Clients, ClientState, exit_code, judged
from tailrace.bench.locust_plan import Plan
from tailrace.bench.records import Record


def plan(loop: str = "open", **more) -> Plan:
    fields = {
        "url": "http://h",
        "host": "h",
        "address": "127.0.0.1",
        "port": 1,
        "is_tls": False,
        "model": "m",
        "version": "",
        "loop": loop,
        "traffic": "t",
        "prompts": "p",
        "requests": 200,
        "duration_s": 10.0,
    }
    return Plan(**(fields | more))


def records(count: int = 200, **more) -> list[Record]:
    fields = {
        "planned_input_tokens": 8,
        "planned_output_tokens": 2,
        "input_tokens": 8,
        "output_tokens": 2,
        "cached_tokens": 0,
        "status": "ok",
    }
    return [
        Record(
            index=index,
            scheduled_s=index / 20,
            dispatched_s=index / 20 + 0.001,
            first_token_s=index / 20 + 0.1,
            finished_s=index / 20 + 0.2,
            chunk_s=[index / 20 + 0.1, index / 20 + 0.2],
            **(fields | more),
        )
        for index in range(count)
    ]


def clients(*, processes: int = 1, ended: int = 1, is_done: bool = True, lag_s: float = 0.0):
    state = ClientState(lags_s=[lag_s] * 100, requests=100, is_done=is_done)
    return Clients([state] * ended, processes, "Locust 0", None)


def outcome(found, the_plan=None, the_clients=None, *, limits="", max_failures=0.0):
    options = Namespace(max_lag_s=0.05, limits=limits, request_timeout_s=60.0)
    run = judged(the_plan or plan(), options, found, the_clients or clients())
    return run, exit_code(run, max_failures)


def test_a_whole_run_is_valid():
    run, status = outcome(records(), limits="p95_ttft=0.2,p50_e2e=0.3")
    assert (run.verdict.reasons, run.verdict.cautions, status) == ((), (), 0)
    assert run.duration_s == 10.0
    assert run.conditions["Driver"] == "Locust 0, open loop"


def test_a_limit_that_does_not_hold_is_status_1():
    assert outcome(records(), limits="p95_ttft=0.05")[1] == 1


@pytest.mark.parametrize(("share", "status"), [(0.0, 1), (0.005, 1), (0.01, 0), (0.1, 0)])
def test_failures_are_forgiven_up_to_a_share(share, status):
    found = records(198) + records(200, status="http", output_tokens=None)[198:]
    assert outcome(found, max_failures=share)[1] == status


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"the_clients": clients(lag_s=0.2)}, "the client was late"),
        ({"the_clients": clients(is_done=False)}, "interrupted"),
        ({"the_clients": clients(processes=3, ended=2)}, "1 worker processes"),
    ],
)
def test_what_the_client_did_wrong_makes_it_invalid(more, words):
    run, status = outcome(records(), **more)
    assert status == 3
    assert words in run.verdict.reasons[0]


def test_calm_clients_do_not_hide_a_late_one():
    late = ClientState(lags_s=[0.2] * 100, requests=1, is_done=True)
    calm = ClientState(lags_s=[0.0] * 20_000, requests=199, is_done=True)
    run, status = outcome(records(), the_clients=Clients([calm, late, calm], 3, "Locust 0", None))
    assert status == 3
    assert "the client was late" in run.verdict.reasons[0]


def test_tokens_cached_by_plan_are_no_accident():
    found = records(cached_tokens=4)
    assert outcome(found)[1] == 3
    shared = plan(shared_tokens=dict.fromkeys(range(200), 4))
    assert outcome(found, shared)[1] == 0


def test_a_closed_loop_ends_by_the_clock_and_says_what_it_cut_off():
    found = records(198) + records(200, status="cancelled")[198:]
    run, status = outcome(found, plan("closed", duration_s=0.0), clients(is_done=False))
    assert status == 0
    assert "2 answers were cut off" in run.verdict.cautions[-1]
    assert run.duration_s == found[-1].scheduled_s


def test_no_request_at_all_is_no_success():
    assert outcome([], plan("closed"))[1] == 1
