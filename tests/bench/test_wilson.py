"""Wilson's bounds, what clustered observations are worth, and the counts that planning needs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tailrace.bench.wilson import (
    Tally,
    fewest_observations,
    needed_requests,
    pool,
    tally_of,
    wilson,
    z_of,
)


def test_the_bounds_are_those_of_the_textbook():
    # Newcombe 1998, table I: 81 of 263, and 0 of 20.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


def test_nothing_observed_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)
    assert tally_of([]).bounds() == (0.0, 1.0)
    assert tally_of([(0, 0)] * 9).bounds() == (0.0, 1.0)
    assert tally_of([]).share == 0


def test_the_bounds_cover_the_truth_as_often_as_they_say():
    random = np.random.default_rng(3)
    for share in (0.05, 0.01, 0.3):
        seen = random.binomial(400, share, 4000)
        inside = [low <= share <= high for low, high in (wilson(k / 400, 400) for k in seen)]
        assert 0.92 <= np.mean(inside) <= 0.98


def test_the_needed_count_is_where_the_bounds_let_the_allowed_share_go():
    for allowed, share in ((0.05, 0.0), (0.01, 0.0), (0.05, 0.025), (0.05, 0.075), (0.1, 0.0)):
        count = needed_requests(allowed, share)
        low, high = wilson(share, count)
        assert not low <= allowed <= high or math.isclose(high, allowed, rel_tol=1e-9)
        low, high = wilson(share, count - 1)
        assert low <= allowed <= high


def test_the_counts_that_the_documents_name():
    assert needed_requests(0.05) == 73
    assert needed_requests(0.01) == 381
    assert fewest_observations(95) == 20
    assert fewest_observations(99) == 100
    assert fewest_observations(99.9) == 1000
    assert fewest_observations(50) == 2


def test_the_count_agrees_with_loadgens_exact_one():
    """LoadGen lets P99 pass without a slow query from 459 on: 0.99 ** 459 < 1 % (one-sided)."""
    exact = math.ceil(math.log(0.01) / math.log(0.99))
    assert exact == 459
    assert needed_requests(0.01, confidence=0.98) == pytest.approx(exact, rel=0.2)


def test_independent_requests_are_worth_what_they_are():
    random = np.random.default_rng(1)
    worth = [
        tally_of([(int(x), 1) for x in random.random(600) < 0.1]).effective for _ in range(200)
    ]
    assert 400 < np.mean(worth) <= 600


def test_slow_neighbours_are_worth_less():
    """One stall of 30 requests tells less than 30 slow requests all over the run."""
    together = tally_of([(int(300 <= index < 330), 1) for index in range(600)])
    spread = tally_of([(int(index % 20 == 0), 1) for index in range(600)])
    assert together.share == spread.share == 0.05
    assert spread.effective == 600
    assert together.effective < 40
    low, high = together.bounds()
    assert low < 0.02
    assert high > 0.1


def test_many_gaps_of_one_slow_request_are_about_one_observation():
    """Inter-token time: 100 gaps a request, a slow request has 40 slow ones."""
    random = np.random.default_rng(2)
    slow = random.random(200) < 0.1
    tally = tally_of([(40 if s else 0, 100) for s in slow])
    assert tally.observations == 20_000
    assert tally.requests == 200
    assert tally.effective < 2500


def test_a_handful_of_requests_is_worth_no_more_than_a_handful():
    tally = tally_of([(0, 100)] * 6)
    assert tally.observations == 600
    assert tally.effective == 6
    assert tally.bounds()[1] > 0.3


def test_pooling_sees_the_difference_between_runs():
    calm, rough = tally_of([(0, 1)] * 300), tally_of([(int(i % 5 == 0), 1) for i in range(300)])
    both = pool([calm, rough])
    assert (both.exceeded, both.observations, both.requests) == (60, 600, 600)
    assert calm.effective == rough.effective == 300
    assert both.effective < 300


def test_two_shares_differ_only_beyond_noise():
    calm = tally_of([(0, 1)] * 400)
    burst = tally_of([(int(150 <= i < 190), 1) for i in range(400)])
    broken = tally_of([(int(i >= 80), 1) for i in range(400)])
    assert not calm.differs(burst, 0.999)
    assert calm.differs(broken, 0.999)
    assert broken.differs(calm, 0.999)
    assert not calm.differs(calm, 0.5)
    assert not calm.differs(Tally((), 0), 0.5)


def test_z():
    assert z_of(0.95) == pytest.approx(1.95996, abs=1e-5)
