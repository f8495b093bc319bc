"""Rates from counters: a window that slides, and starts anew with a new engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.telemetry.rates import RateWindow
from tailrace.types import EngineStats


def report(time_s, *, steps=0, tokens=0, busy_s=0.0):
    return EngineStats(
        time_s=time_s,
        running_requests=0,
        waiting_requests=0,
        total_blocks=1,
        free_blocks=1,
        block_size=16,
        live_tokens=0,
        held_blocks=0,
        steps_total=steps,
        generation_tokens_total=tokens,
        busy_s_total=busy_s,
    )


def test_nothing_is_known_before_two_reports():
    rates = RateWindow()
    assert (rates.busy_share, rates.tokens_per_s) == (None, None)
    rates.add(report(1.0))
    assert (rates.busy_share, rates.tokens_per_s) == (None, None)


def test_two_reports_of_one_moment_say_nothing():
    rates = RateWindow()
    rates.add(report(1.0))
    rates.add(report(1.0, steps=1, tokens=5))
    assert rates.tokens_per_s is None


def test_rates_are_growth_over_time():
    rates = RateWindow()
    rates.add(report(10.0, steps=5, tokens=100, busy_s=3.0))
    rates.add(report(14.0, steps=9, tokens=300, busy_s=4.0))
    assert rates.tokens_per_s == pytest.approx(50.0)
    assert rates.busy_share == pytest.approx(0.25)


def test_a_busy_share_never_exceeds_one():
    rates = RateWindow()
    rates.add(report(0.0))
    rates.add(report(1.0, steps=1, busy_s=1.5))
    assert rates.busy_share == 1.0


def test_what_lies_before_the_window_is_forgotten():
    rates = RateWindow(window_s=10.0)
    for second in range(100):
        tokens = min(second, 50) * 100  # 100 a second, then none
        rates.add(report(float(second), steps=second, tokens=tokens))
    assert rates.tokens_per_s == 0.0


@pytest.mark.parametrize("counter", ["steps", "tokens", "busy_s"])
def test_a_counter_that_went_back_is_a_new_engine(counter):
    rates = RateWindow()
    rates.add(report(0.0, steps=10, tokens=10, busy_s=10.0))
    rates.add(report(1.0, steps=20, tokens=20, busy_s=20.0))
    after = {"steps": 30, "tokens": 30, "busy_s": 30.0} | {counter: 1}
    rates.add(report(2.0, **after))
    assert rates.tokens_per_s is None
    rates.add(report(3.0, **after | {"tokens": after["tokens"] + 7}))
    assert rates.tokens_per_s == pytest.approx(7.0)


@given(st.lists(st.floats(0.001, 2.0), min_size=2, max_size=300))
def test_a_steady_engine_shows_its_rate_however_often_it_reports(gaps_s):
    rates = RateWindow()
    now_s = 0.0
    for steps, gap_s in enumerate(gaps_s, 1):
        now_s += gap_s
        rates.add(report(now_s, steps=steps, tokens=int(now_s * 1_000_000), busy_s=now_s / 2))
    assert rates.tokens_per_s == pytest.approx(1_000_000, rel=0.01)
    assert rates.busy_share == pytest.approx(0.5)
    assert len(rates._samples) <= 10.0 / 0.5 + 4
