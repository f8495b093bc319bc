from __future__ import annotations

import pytest

from tailrace.bench.stats import summarise
from tailrace.bench.validity import Observed, judge
from tests.bench.test_stats import ok

CALM = {
    "loop_lags_s": [0.001] * 100,
    "steal_share": 0.0,
    "is_interrupted": False,
    "planned_requests": 200,
}


def verdict(records, **changes):
    observed = Observed(**(CALM | changes))
    return judge(records, summarise(records), observed, max_lag_s=0.3)


def many(count=200, wrong=0, **changes):
    return [ok(i, **(changes if i < wrong else {})) for i in range(count)]


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
        ({"cached_tokens": 100}, "300 of 20000 prompt tokens cached"),
        ({"status": "client"}, "sockets or files"),
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
        {"status": "http"},
    ],
)
def test_one_in_a_hundred_is_borne(changes):
    assert verdict(many(wrong=2, **changes)).is_valid


def test_a_late_event_loop_makes_the_run_invalid():
    found = verdict(many(), loop_lags_s=[0.001] * 90 + [0.4] * 10)
    assert "event-loop lag 400.0 ms" in found.reasons[0]


def test_an_interrupted_run_says_how_far_it_came():
    found = verdict([*many(100), ok(100, status="cancelled")], is_interrupted=True)
    assert "100 of 200 requests ended" in found.reasons[0]


def test_stolen_cpu_and_few_requests_are_cautions():
    found = verdict(many(20), steal_share=0.2)
    assert found.is_valid
    assert any("20 requests" in caution for caution in found.cautions)
    assert any("20.0% of CPU time" in caution for caution in found.cautions)
