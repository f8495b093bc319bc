from __future__ import annotations

import math

import pytest

from tailrace.bench.scrape import Scrape
from tailrace.bench.stats import summarise
from tailrace.bench.validity import Observed, judge, unresolved
from tests.bench.test_stats import ok

CALM = {
    "loop_lags_s": [0.001] * 100,
    "steal_share": 0.0,
    "is_interrupted": False,
    "planned_requests": 200,
}

USUAL = {"cached_tokens": 0, "chunk_s": [12.0 + number / 2 for number in range(7)]}


def verdict(records, **changes):
    observed = Observed(**(CALM | changes))
    return judge(records, summarise(records), observed, max_lag_s=0.3)


def many(count=200, wrong=0, **changes):
    return [ok(i, **(USUAL | (changes if i < wrong else {}))) for i in range(count)]


def scrape(**counters) -> Scrape:
    found = Scrape()
    for at_s, values in enumerate(zip(*counters.values(), strict=True)):
        found.add(at_s, dict(zip(counters, values, strict=True)))
    return found


def test_a_calm_run_of_right_lengths_is_valid_without_a_word():
    found = verdict(many())
    assert found.is_valid
    assert found.cautions == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dispatched_s": 10.31}, "dispatch lag 310.0 ms"),
        ({"input_tokens": 99}, "prompt lengths: 3 of 200"),
        ({"input_tokens": None}, "3 carry no usage"),
        ({"output_tokens": 8}, "output lengths: 3 of 200"),
        ({"status": "short", "output_tokens": 3}, "output lengths: 3 of 200"),
        ({"status": "short", "output_tokens": 3}, "3 ended early"),
        (
            {"status": "http", "http_status": 400, "error": "HTTP 400: prompt is too long"},
            "3 of 200 requests were refused as wrong ones, not for want of room (bound 1%)",
        ),
        (
            {"status": "stream", "http_status": 400, "error": "bad event: too long"},
            "3 of 200 requests were refused as wrong ones",
        ),
        ({"cached_tokens": 100}, "300 of 20000 prompt tokens cached"),
        (
            {"status": "client", "error": "out of files"},
            "in the client itself, the first with: out",
        ),
    ],
)
def test_more_than_one_in_a_hundred_makes_the_run_invalid(changes, words):
    found = verdict(many(wrong=3, **changes))
    assert not found.is_valid
    assert any(words in reason for reason in found.reasons)


@pytest.mark.parametrize(
    "changes",
    [
        {"dispatched_s": 10.31},
        {"input_tokens": 99},
        {"output_tokens": 8},
        {"cached_tokens": 100},
        {"status": "short", "output_tokens": 3},
        {"status": "http", "http_status": 400},
    ],
)
def test_one_in_a_hundred_is_borne(changes):
    assert verdict(many(wrong=2, **changes)).is_valid


def test_a_refusal_is_quoted_and_not_without_end():
    said = "HTTP 400: " + "x" * 3000
    (reason,) = verdict(many(wrong=3, status="http", http_status=400, error=said)).reasons
    assert reason.endswith("the first with: " + said[:200])


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_without_room_is_measured(status):
    assert verdict(many(wrong=50, status="http", http_status=status)).is_valid


@pytest.mark.parametrize("status", [200, 429, 503, None])
def test_a_stream_that_breaks_is_measured(status):
    assert verdict(many(wrong=50, status="stream", http_status=status)).is_valid


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_server_that_cuts_answers_off_is_measured(reason):
    cut = {"status": "short", "output_tokens": 2, "finish_reason": reason}
    assert verdict(many(wrong=50, **cut)).is_valid


@pytest.mark.parametrize("reason", ["stop", "length", None])
def test_a_server_that_lets_answers_end_early_was_asked_for_less(reason):
    ended = {"status": "short", "output_tokens": 2, "finish_reason": reason}
    assert "50 ended early" in verdict(many(wrong=50, **ended)).reasons[0]


@pytest.mark.parametrize(
    "changes",
    [{"status": "short", "output_tokens": 2}, {"input_tokens": 99}, {"output_tokens": 8}],
)
def test_a_wrong_length_among_many_failures_is_one_in_all_requests(changes):
    failed = [ok(100 + i, status="timeout", **USUAL) for i in range(180)]
    assert verdict([*many(20, wrong=1, **changes), *failed]).is_valid
    assert not verdict([*many(20, wrong=3, **changes), *failed]).is_valid


def test_a_machine_that_others_use_is_a_caution():
    for share in (None, 0.0, 0.1):
        assert verdict(many(), others_share=share).cautions == ()
    found = verdict(many(), others_share=0.43)
    assert found.is_valid
    assert "43% of this machine's CPU time went to programs that are neither" in found.cautions[0]


def test_tokens_that_come_several_at_once_are_said():
    assert verdict(many(wrong=200, output_tokens=7)).cautions == ()
    merged = verdict(many(wrong=200, chunk_s=[12.0, 13.0]))
    assert merged.is_valid
    assert "the server sent 3.5 tokens a chunk" in merged.cautions[0]


def test_a_late_event_loop_makes_the_run_invalid():
    found = verdict(many(), loop_lags_s=[0.001] * 90 + [0.4] * 10)
    assert "event-loop lag 400.0 ms" in found.reasons[0]


def test_one_late_process_is_not_hidden_by_calm_ones():
    records = [
        ok(i, cached_tokens=0, worker=i % 25, dispatched_s=10.4 if i % 25 == 7 else 10.0)
        for i in range(1000)
    ]
    assert sum(r.dispatched_s > 10.3 for r in records) == 40
    calm = [ok(i, cached_tokens=0, dispatched_s=10.4 if i < 4 else 10.0) for i in range(1000)]
    assert verdict(calm).is_valid
    few_late = [
        *calm[4:],
        *[ok(5000 + i, cached_tokens=0, worker=1, dispatched_s=10.4) for i in range(4)],
    ]
    assert "dispatch lag 400.0 ms" in verdict(few_late).reasons[0]
    assert "dispatch lag 400.0 ms" in verdict(records).reasons[0]


def test_an_interrupted_run_says_how_far_it_came():
    found = verdict([*many(100), ok(100, status="cancelled")], is_interrupted=True)
    assert "100 of 200 requests ended" in found.reasons[0]


def test_few_requests_are_a_caution():
    found = verdict(many(20))
    assert found.is_valid
    assert any("20 requests" in caution for caution in found.cautions)


@pytest.mark.parametrize(
    ("share", "is_valid", "is_said"),
    [(None, True, False), (0.05, True, False), (0.07, True, True), (0.11, False, True)],
)
def test_a_little_stolen_cpu_is_a_caution_and_more_makes_the_run_invalid(share, is_valid, is_said):
    found = verdict(many(), steal_share=share)
    assert found.is_valid == is_valid
    said = [text for text in (*found.reasons, *found.cautions) if "stolen" in text]
    assert len(said) == is_said


def test_a_dead_client_process_makes_the_run_invalid():
    found = verdict(many(), client_faults=("client process 1 died (status -9)",))
    assert "not whole: client process 1 died" in found.reasons[0]


def test_hits_are_counted_beyond_what_each_request_shares_by_plan():
    records = many(cached_tokens=60, wrong=200)
    assert verdict(records, shared_tokens=dict.fromkeys(range(200), 60)).is_valid
    # One request's unused sharing does not excuse another's accident.
    found = verdict(records, shared_tokens={0: 10**6})
    assert f"{199 * 60} of 20000" in found.reasons[0]


def test_where_no_usage_tells_the_servers_counters_do():
    records = many(cached_tokens=None, wrong=200)
    half = scrape(prefix_queries_total=[100, 300], prefix_hits_total=[90, 190])
    assert "10000 of 20000 prompt tokens" in verdict(records, server=half).reasons[0]
    planned = dict.fromkeys(range(200), 50)
    assert verdict(records, server=half, shared_tokens=planned).is_valid
    none = scrape(prefix_queries_total=[100, math.nan, 300], prefix_hits_total=[90, math.nan, 90])
    found = verdict(records, server=none)
    assert found.is_valid
    assert found.cautions == ()


@pytest.mark.parametrize(
    "server",
    [
        Scrape(),
        scrape(prefix_queries_total=[100, 100], prefix_hits_total=[90, 90]),
        scrape(prefix_hits_total=[1, 1]),
        scrape(prefix_queries_total=[100], prefix_hits_total=[90]),
    ],
)
def test_where_neither_tells_it_is_a_caution(server):
    found = verdict(many(cached_tokens=None, wrong=200), server=server)
    assert found.is_valid
    assert "could not be checked" in found.cautions[0]


def test_users_that_ran_out_of_requests_are_a_caution():
    records = [ok(i, user=i % 2, **USUAL) for i in range(200)]
    assert verdict(records, user_requests={0: 101, 1: 101}).cautions == ()
    requests = {0: 100, 1: 101}
    found = verdict(records, user_requests=requests, arrivals_s=20.0, longest_think_s=4.0)
    assert "1 of 2 users" in found.cautions[0]
    # Its last answer ended at 15.5: thinking for as long as 5 s, it could not send another.
    found = verdict(records, user_requests=requests, arrivals_s=20.0, longest_think_s=5.0)
    assert found.cautions == ()


def test_a_monitor_that_broke_off_is_a_caution():
    found = verdict(many(), monitor_fault="KeyError('x')")
    assert found.is_valid
    assert "KeyError" in found.cautions[0]


@pytest.mark.parametrize(
    ("governor", "is_said"), [("", False), ("performance", False), ("powersave", True)]
)
def test_a_governor_that_slows_the_clock_is_a_caution(governor, is_said):
    found = verdict(many(), governor=governor)
    assert found.is_valid
    assert any("governor is powersave" in text for text in found.cautions) == is_said


def test_a_search_that_did_not_resolve_joins_the_verdict():
    calm = verdict(many())
    assert calm.also(unresolved("vllm", [])) == calm
    found = calm.also(unresolved("vllm", ["holds at the highest rate"]))
    assert not found.is_valid
    assert "highest rate of vllm did not resolve: holds at the highest" in found.reasons[0]


@pytest.mark.parametrize(("held", "told"), [(1, False), (2, True)])
def test_a_gpu_whose_clocks_power_or_heat_lowered_is_named(held, told):
    nan = math.nan
    gpu = scrape(
        gpu0_held_back=[0.0] * 11,
        gpu0_sm_clock_mhz=[1980.0] * 11,
        gpu1_held_back=[nan] + [1.0] * held + [0.0] * (10 - held),
        gpu1_sm_clock_mhz=[nan, *[1600.0] * 6, *[1900.0] * 4],
    )
    found = verdict(many(), gpu=gpu)
    assert found.is_valid
    words = (
        "GPU 1 lowered its clocks for power or heat in 20% of the readings, to 1,600 MHz at the "
        "median: rates hold for this board's power limit and cooling"
    )
    assert found.cautions == ((words,) if told else ())


def test_clocks_that_were_lowered_are_told_where_they_were_not_read():
    (words,) = verdict(many(), gpu=scrape(gpu0_held_back=[1.0, 1.0])).cautions
    assert words.startswith("GPU 0 lowered its clocks for power or heat in 100% of the readings: ")
