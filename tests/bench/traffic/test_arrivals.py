from __future__ import annotations

import itertools
import random
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.bench.traffic.arrivals import constant, gamma, poisson, read_curve
from tailrace.errors import ConfigError

COUNT = 20_000


def gaps_of(times):
    taken = list(itertools.islice(times, COUNT))
    return [b - a for a, b in itertools.pairwise(taken)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_variation_that_burstiness_says(burstiness):
    gaps = gaps_of(gamma(random.Random(1), 8.0, burstiness))
    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_counts_vary_as_much_as_their_mean():
    times = list(itertools.takewhile(lambda t: t < 4000, poisson(random.Random(2), 5.0)))
    counts = [0] * 4000
    for time in times:
        counts[int(time)] += 1
    assert fmean(counts) == pytest.approx(5, rel=0.03)
    assert pstdev(counts) ** 2 / fmean(counts) == pytest.approx(1, rel=0.08)


def test_constant_arrivals_are_even():
    assert list(itertools.islice(constant(4.0), 5)) == [0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("text", "is_ramp", "spans"),
    [
        ("0:0,100:20", True, {(0, 50): 250, (50, 100): 750, (100, 120): 400}),
        ("0:10,100:0", True, {(0, 50): 375, (50, 100): 125, (100, 120): 0}),
        ("0:2,50:20,100:0", False, {(0, 50): 100, (50, 100): 1000, (100, 120): 0}),
        ("0:3", True, {(0, 50): 150, (50, 120): 210}),
    ],
)
def test_a_curves_spans_hold_as_many_arrivals_as_its_area(text, is_ramp, spans):
    curve = read_curve(text, is_ramp=is_ramp)
    rounds = 30
    drawn = [
        list(itertools.takewhile(lambda t: t < 120, curve.arrivals(random.Random(seed))))
        for seed in range(rounds)
    ]
    for (start, end), expected in spans.items():
        assert curve.area(end) - curve.area(start) == pytest.approx(expected)
        found = fmean(sum(start <= t < end for t in times) for times in drawn)
        # Poisson: the mean of the rounds is within four of its own deviations.
        assert found == pytest.approx(expected, abs=4 * (expected / rounds) ** 0.5)
    assert all(a <= b for times in drawn for a, b in itertools.pairwise(times))


def test_a_curve_keeps_its_shape_when_its_mean_is_given():
    curve = read_curve("0:1,10:3", is_ramp=False).scaled_to(8.0, 20.0)
    assert curve.area(20) == pytest.approx(160)
    assert curve.points[1][1] == pytest.approx(3 * curve.points[0][1])


@pytest.mark.parametrize(
    "text", ["", "5", "0:1,60", "1:1", "0:1,0:2", "0:-1", "0:0", "0:x", "0:inf"]
)
def test_a_curve_written_otherwise_is_refused(text):
    with pytest.raises(ConfigError, match="rates"):
        read_curve(text, is_ramp=True)


@given(
    rates=st.lists(st.floats(0, 50), min_size=1, max_size=6).filter(lambda r: r[-1] > 0.1),
    is_ramp=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(deadline=None)
def test_arrivals_of_any_curve_grow_and_depend_on_the_seed_alone(rates, is_ramp, seed):
    text = ",".join(f"{10 * place}:{rate!r}" for place, rate in enumerate(rates))
    curve = read_curve(text, is_ramp=is_ramp)
    once, again = (
        list(itertools.islice(curve.arrivals(random.Random(seed)), 50)) for _ in range(2)
    )
    assert once == again
    assert all(a <= b for a, b in itertools.pairwise(once))
    assert len(once) == 50


def test_a_curve_that_is_0_for_a_whole_trial_cannot_be_scaled():
    with pytest.raises(ConfigError, match=r"0 for the whole 60 s"):
        read_curve("0:0,60:5", is_ramp=False).scaled_to(2.0, 60.0)


@pytest.mark.parametrize(
    ("is_ramp", "end_s", "peak_rps"),
    [(True, 5.0, 2.0), (True, 20.0, 3.0), (False, 10.0, 1.0), (False, 10.5, 3.0)],
)
def test_the_peak_of_a_curve_is_that_of_its_part(is_ramp, end_s, peak_rps):
    assert read_curve("0:1,10:3,30:0", is_ramp=is_ramp).peak_rps(end_s) == peak_rps
