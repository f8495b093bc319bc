from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.bench.traffic.schedule import Arrival, Shape, plan
from tailrace.errors import ConfigError

ARRIVALS = [Arrival(0.0, 100, 10), Arrival(2.0, 5000, 20), Arrival(4.0, 300, 900)]


def test_a_rate_scale_stretches_time_and_a_duration_cuts_it():
    schedule = plan(ARRIVALS, Shape(rate_scale=0.5, duration_s=8.0), source="x")
    assert [a.arrival_s for a in schedule.arrivals] == [0.0, 4.0]
    assert schedule.duration_s == 8.0
    assert schedule.rate_rps == 0.25


def test_clipping_is_counted():
    shape = Shape(max_input_tokens=1000, max_output_tokens=20)
    schedule = plan(ARRIVALS, shape, source="x")
    assert [(a.input_tokens, a.output_tokens) for a in schedule.arrivals] == [
        (100, 10),
        (1000, 20),
        (300, 20),
    ]
    assert (schedule.clipped_inputs, schedule.clipped_outputs) == (1, 1)


def test_a_clipped_prompt_keeps_its_whole_blocks():
    arrivals = [Arrival(0.0, 100, 10, (1, 2, 3)), Arrival(1.0, 35, 10, (1,))]
    schedule = plan(arrivals, Shape(max_input_tokens=70), source="x", block_tokens=32)
    assert [a.prefix_ids for a in schedule.arrivals] == [(1, 2), (1,)]
    assert schedule.block_tokens == 32


def test_nothing_left_to_send_is_an_error_with_a_remedy():
    with pytest.raises(ConfigError, match="raise --duration"):
        plan([Arrival(5.0, 1, 1)], Shape(duration_s=1.0), source="x")


@pytest.mark.parametrize("name", ["rate_scale", "duration_s", "max_requests", "max_input_tokens"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_values_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ConfigError, match="must be above 0"):
        Shape(**{name: value})


@given(
    times=st.lists(st.floats(0, 1e4), min_size=1, max_size=50),
    rate_scale=st.floats(0.01, 100),
    count=st.integers(1, 60),
)
def test_the_earliest_requests_are_kept_in_order(times, rate_scale, count):
    arrivals = [Arrival(at, 1, 1) for at in times]
    schedule = plan(arrivals, Shape(rate_scale=rate_scale, max_requests=count), source="x")
    kept = [a.arrival_s for a in schedule.arrivals]
    assert kept == sorted(at / rate_scale for at in times)[:count]
