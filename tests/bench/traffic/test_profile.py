from __future__ import annotations

import itertools
import random
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.bench.traffic.azure_conv import AZURE_CONV
from tailrace.bench.traffic.profile import (
    LEVELS,
    Profile,
    draw,
    draw_until,
    measure,
    quantile,
    rank_correlation,
)
from tailrace.bench.traffic.trace import read_trace

REAL = Path(__file__).parents[3].parent / "shared" / "traces" / "azure2023_conv.csv"
DRAWN = 20_000


@pytest.fixture(scope="module")
def drawn():
    return list(itertools.islice(draw(AZURE_CONV, seed=1), DRAWN))


@pytest.fixture(scope="module")
def figures(drawn):
    return measure(drawn, name="drawn", source="")


def test_drawn_requests_have_the_profiles_rate_and_burstiness(figures):
    assert figures.rate_rps == pytest.approx(AZURE_CONV.rate_rps, rel=0.03)
    assert figures.arrival_cv == pytest.approx(AZURE_CONV.arrival_cv, rel=0.03)


def test_drawn_lengths_correlate_as_the_profile_says(figures):
    assert figures.rank_correlation == pytest.approx(AZURE_CONV.rank_correlation, abs=0.025)


@pytest.mark.parametrize("side", ["input_tokens", "output_tokens"])
def test_drawn_lengths_lie_below_each_quantile_as_often_as_it_says(drawn, side):
    lengths = sorted(getattr(arrival, side) for arrival in drawn)
    quantiles = getattr(AZURE_CONV, side)
    for level, value in zip(LEVELS, quantiles, strict=True):
        at_most = sum(length <= value for length in lengths) / len(lengths)
        below = sum(length < value for length in lengths) / len(lengths)
        assert below - 0.012 <= level <= at_most + 0.012, (level, value)


def test_the_means_of_what_is_drawn_are_the_traces(drawn):
    assert fmean(a.input_tokens for a in drawn) == pytest.approx(1155, rel=0.03)
    assert fmean(a.output_tokens for a in drawn) == pytest.approx(211, rel=0.03)
    assert AZURE_CONV.mean_input_tokens == pytest.approx(1155, rel=0.02)
    assert AZURE_CONV.mean_output_tokens == pytest.approx(211, rel=0.02)


def test_the_same_seed_draws_the_same_requests():
    first, again, other = (draw_until(AZURE_CONV, seed=seed, end_s=20) for seed in (3, 3, 4))
    assert first == again != other
    assert all(arrival.arrival_s < 20 for arrival in first)


def test_the_figures_are_those_of_the_published_file():
    if not REAL.is_file():
        pytest.skip(f"{REAL} is not here")
    real = measure(read_trace(REAL).arrivals, name="", source="")
    assert real.input_tokens == AZURE_CONV.input_tokens
    assert real.output_tokens == AZURE_CONV.output_tokens
    assert real.rate_rps == pytest.approx(AZURE_CONV.rate_rps, abs=5e-4)
    assert real.arrival_cv == pytest.approx(AZURE_CONV.arrival_cv, abs=5e-4)
    assert real.rank_correlation == pytest.approx(AZURE_CONV.rank_correlation, abs=5e-4)


def test_a_strong_link_between_the_lengths_survives_the_draw():
    ramp = tuple(range(10, 10 + 1000 * len(LEVELS), 1000))
    linked = Profile("linked", "", 1.0, 2.0, ramp, ramp, rank_correlation=-0.7)
    found = measure(list(itertools.islice(draw(linked, seed=5), 5000)), name="", source="")
    assert found.rank_correlation == pytest.approx(-0.7, abs=0.03)
    assert found.arrival_cv == pytest.approx(2.0, rel=0.08)


@given(share=st.floats(0, 1), other=st.floats(0, 1))
def test_quantiles_grow_with_the_share_and_stay_within_the_range(share, other):
    low, high = sorted((share, other))
    values = AZURE_CONV.input_tokens
    assert values[0] <= quantile(values, low) <= quantile(values, high) <= values[-1]


def test_quantiles_at_the_levels_are_the_figures():
    values = AZURE_CONV.output_tokens
    assert [quantile(values, level) for level in LEVELS] == list(values)


def test_rank_correlation_knows_order_reverse_ties_and_nothing():
    rng = random.Random(2)
    values = [rng.random() for _ in range(50)]
    assert rank_correlation(values, [v**3 for v in values]) == pytest.approx(1)
    assert rank_correlation(values, [-v for v in values]) == pytest.approx(-1)
    assert rank_correlation(values, [1.0] * 50) == 0
    # By hand: ranks (1.5, 1.5, 3) against (1, 2, 3).
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.8660254)
