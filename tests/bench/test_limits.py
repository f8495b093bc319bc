"""A limit is read as it is written, and counts what exceeds it."""

from __future__ import annotations

import math

import pytest

from tailrace.bench.limits import Limit, parse_limit, read_limit
from tailrace.bench.records import Record
from tailrace.bench.stats import summarise
from tailrace.errors import ConfigError


def record(index=0, *, first_s=0.5, chunks=3, gap_s=0.1, status="ok", at_s=0.0) -> Record:
    times = [at_s + first_s + gap_s * number for number in range(chunks)]
    return Record(
        index=index,
        scheduled_s=at_s,
        planned_input_tokens=1,
        planned_output_tokens=chunks,
        status=status,
        first_token_s=times[0],
        finished_s=times[-1],
        chunk_s=times,
        output_tokens=chunks,
    )


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("p95_ttft=2.0", Limit("ttft", 95, 2.0)),
        ("p99_e2e_s=12", Limit("e2e", 99, 12.0)),
        ("p99.9_itl=0.1", Limit("itl", 99.9, 0.1)),
        ("p50_tpot=0.05", Limit("tpot", 50, 0.05)),
    ],
)
def test_a_limit_reads_as_it_is_written(text, limit):
    assert read_limit(text) == limit
    assert read_limit(str(limit)) == limit


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("p95_ttft", "in seconds"),
        ("p95_ttft=fast", "in seconds"),
        ("ttft=2", "write it as p95_ttft"),
        ("p95_tttf=2", "did you mean 'ttft'"),
        ("p100_ttft=2", "below 100"),
        ("p0_ttft=2", "above 0"),
        ("p95_ttft=0", "above 0"),
        ("p95_ttft=inf", "above 0"),
        ("p95_ttft=nan", "above 0"),
    ],
)
def test_what_is_no_limit_is_refused_by_name(text, words):
    with pytest.raises(ConfigError, match=words):
        read_limit(text)


def test_parse_takes_the_name_alone():
    assert parse_limit("p90_ttft", 1.5) == Limit("ttft", 90, 1.5)


@pytest.mark.parametrize(("percent", "share"), [(95, 0.05), (90, 0.1), (99, 0.01), (99.9, 0.001)])
def test_the_allowed_share_is_exact(percent, share):
    """1 - 90 / 100 is a little under 0.1: one slow request of ten would then fail P90."""
    assert Limit("ttft", percent, 1.0).allowed_share == share


@pytest.mark.parametrize("slow", range(8))
def test_counting_and_the_percentile_agree(slow):
    """At most the allowed share exceeds the bound exactly where the percentile is within it."""
    limit = read_limit("p95_ttft=1.0")
    records = [record(i, first_s=2.0 if i < slow else 0.5) for i in range(100)]
    exceeded, count = limit.exceeded(records)
    assert (exceeded, count) == (slow, 100)
    point_s = limit.of(summarise(records)).at(95)
    assert (exceeded / count <= limit.allowed_share) == (point_s <= limit.bound_s)


def test_each_metric_counts_its_own_observations():
    records = [record(0, first_s=0.5, gap_s=0.2, chunks=4), record(1, first_s=0.1, gap_s=0.1)]
    assert read_limit("p95_ttft=0.3").exceeded(records) == (1, 2)
    assert read_limit("p95_itl=0.15").exceeded(records) == (3, 5)
    assert read_limit("p95_tpot=0.15").exceeded(records) == (1, 2)
    assert read_limit("p95_e2e=1.0").exceeded(records) == (1, 2)


def test_failures_exceed_every_bound_and_what_was_cut_off_is_not_counted():
    records = [record(0), record(1, status="timeout"), record(2, status="cancelled")]
    for name in ("ttft", "tpot", "e2e"):
        assert Limit(name, 95, 1e9).exceeded(records) == (1, 2)
    assert Limit("itl", 95, 1e9).exceeded([record(status="http", chunks=0 + 1)]) == (1, 1)


def test_the_tally_takes_requests_in_order_of_time():
    """A stall is a stall in whatever order its records came in."""
    records = [record(i, at_s=float(i), first_s=2.0 if i < 20 else 0.1) for i in range(200)]
    limit = read_limit("p95_ttft=1.0")
    tally = limit.tally(records)
    assert tally == limit.tally(records[::-1])
    assert tally.requests == 200
    assert tally.effective < 40
    assert not math.isnan(tally.bounds()[0])
