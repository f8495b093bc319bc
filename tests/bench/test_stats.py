from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.bench.records import Record
from tailrace.bench.stats import (
    Limits,
    distribution,
    gaps_s,
    longest_gap_s,
    percentile,
    strictest,
    summarise,
    tpot_s,
)

INF = math.inf
VALUES = st.lists(st.floats(0, 1e6) | st.just(INF), min_size=1, max_size=80)


def ok(index=0, **changes) -> Record:
    """Scheduled at 10, first text at 12, one chunk a second, over at 15.5."""
    fields = {
        "scheduled_s": 10.0,
        "dispatched_s": 10.25,
        "sent_s": 10.5,
        "first_token_s": 12.0,
        "chunk_s": [12.0, 13.0, 15.0],
        "finished_s": 15.5,
        "planned_input_tokens": 100,
        "planned_output_tokens": 7,
        "input_tokens": 100,
        "output_tokens": 7,
        "status": "ok",
    }
    return Record(index=index, **(fields | changes))


@given(values=VALUES, percent=st.integers(0, 100) | st.sampled_from([99.9, 0.1, 12.5]))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values, percent):
    found = percentile(sorted(values), percent)
    needed = percent / 100 * len(values)
    assert found in values
    assert sum(v <= found for v in values) >= needed - 1e-9
    smaller = [v for v in values if v < found]
    assert not smaller or len(smaller) < needed


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=80), percent=st.integers(1, 100))
def test_percentiles_agree_with_numpys_inverted_cdf(values, percent):
    # numpy multiplies in floating point, which can tip over a rank by one: allow its neighbour.
    ordered = sorted(values)
    exact = -(-percent * len(ordered) // 100) - 1
    theirs = np.percentile(ordered, percent, method="inverted_cdf")
    assert percentile(ordered, percent) == ordered[exact]
    assert theirs in ordered[max(exact - 1, 0) : exact + 2]


def test_exact_ranks_are_not_tipped_over_by_rounding():
    ordered = list(range(1, 1001))
    assert percentile(ordered, 99.9) == 999
    assert percentile(ordered, 55) == 550
    assert percentile(ordered, 100) == 1000
    assert percentile(ordered, 0) == 1


def test_percentiles_of_nothing_or_beyond_are_errors():
    for ordered, percent in (([], 50), ([1.0], 101), ([1.0], -1)):
        with pytest.raises(ValueError, match="not defined"):
            percentile(ordered, percent)


def test_latency_counts_from_the_schedule():
    stats = summarise([ok()])
    assert stats.ttft.ordered == (2.0,)
    assert stats.e2e.ordered == (5.5,)
    assert stats.lag.ordered == (0.25,)
    assert stats.gap.ordered == (1.0, 2.0)
    assert stats.tpot.ordered == (0.5,)


def test_time_per_token_needs_two_tokens():
    assert tpot_s(ok(output_tokens=1, chunk_s=[12.0])) is None
    # Seven tokens in one piece: no pace can be told, and 0 would be the best of all.
    assert tpot_s(ok(chunk_s=[12.0])) is None
    assert tpot_s(ok(chunk_s=[12.0, 12.0])) == 0


@pytest.mark.parametrize("status", ["connect", "http", "stream", "short", "timeout", "client"])
def test_a_failure_is_infinitely_slow_everywhere(status):
    failed = ok(1, status=status, error="x")
    stats = summarise([ok(), failed])
    for latency in stats.latencies:
        assert latency.ordered[-1] == INF
        assert latency.at(99) == INF
    assert stats.failures == {status: 1}
    assert stats.failed == 1
    assert stats.completed == 1
    # Three chunks came of seven tokens: two gaps were seen and four are owed.
    assert gaps_s(failed) == [1.0, 2.0, INF, INF, INF, INF]


def test_failures_move_the_percentiles_as_the_slowest_would():
    records = [ok(i) for i in range(90)] + [ok(i, status="http") for i in range(90, 100)]
    stats = summarise(records)
    assert stats.ttft.at(90) == 2.0
    assert stats.ttft.at(91) == INF
    assert stats.ttft.failed == 10


def test_requests_cut_off_by_an_interrupt_are_in_no_latency():
    stats = summarise([ok(), ok(1, status="cancelled")])
    assert [len(latency.ordered) for latency in (stats.ttft, stats.tpot, stats.e2e)] == [1, 1, 1]
    assert len(stats.gap.ordered) == 2
    assert (stats.cancelled, stats.failed) == (1, 0)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(ttft_s=2.0), 1),
        (Limits(ttft_s=1.9), 0),
        (Limits(ttft_s=2.0, tpot_s=0.5, e2e_s=5.5), 1),
        (Limits(ttft_s=2.0, tpot_s=0.4), 0),
        (Limits(e2e_s=5.4), 0),
        (Limits(), None),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits, good):
    assert summarise([ok(), ok(1, status="timeout")], limits).good == good


def test_only_complete_answers_count_as_work():
    stats = summarise([ok(), ok(1, status="short", output_tokens=3)])
    assert (stats.input_tokens, stats.output_tokens) == (100, 7)
    assert stats.per_second(stats.output_tokens) == pytest.approx(7 / 15.5)


def test_no_records_give_no_latencies():
    stats = summarise([])
    assert stats.ttft.at(99) is None
    assert stats.per_second(3) == 0


@given(values=VALUES)
def test_a_distribution_counts_its_failures(values):
    latency = distribution("x", "s", [*values, None])
    assert latency.failed == sum(map(math.isinf, values))
    assert list(latency.ordered) == sorted(values)


def test_a_bound_on_inter_token_time_is_one_on_the_longest():
    assert longest_gap_s(ok()) == 2.0
    assert longest_gap_s(ok(chunk_s=[12.0])) is None
    assert Limits(itl_s=2.0).are_kept(ok())
    assert not Limits(itl_s=1.9).are_kept(ok())
    assert Limits(itl_s=0.1).are_kept(ok(chunk_s=[12.0]))


def test_the_strictest_of_several_limits_holds_every_one_of_them():
    found = strictest([Limits(ttft_s=2.0), Limits(ttft_s=1.0, e2e_s=9.0), Limits(itl_s=0.5)])
    assert found == Limits(ttft_s=1.0, e2e_s=9.0, itl_s=0.5)
    assert strictest([]) == Limits()
