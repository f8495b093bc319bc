from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.bench import permutation
from tailrace.bench.permutation import p_value

SIDES = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=4)


@given(first=SIDES, second=SIDES)
def test_it_is_the_share_of_dealings_at_least_as_far_apart(first, second):
    values = first + second

    def apart(hand) -> float:
        rest = [v for i, v in enumerate(values) if i not in hand]
        return abs(statistics.fmean(values[i] for i in hand) - statistics.fmean(rest))

    seen = apart(range(len(first)))
    dealt = [
        apart(h) >= seen - 1e-9 for h in itertools.combinations(range(len(values)), len(first))
    ]
    assert p_value(first, second) == pytest.approx(sum(dealt) / len(dealt))


def test_few_figures_show_nothing_and_six_a_side_can():
    assert p_value([1, 2, 3], [11, 12, 13]) == pytest.approx(0.1)
    assert p_value([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]) == pytest.approx(2 / 924)
    assert p_value([], [1.0]) == 1.0


def test_many_figures_are_drawn_and_agree_with_all_dealings(monkeypatch):
    random = np.random.default_rng(3)
    first, second = list(random.normal(0, 1, 8)), list(random.normal(0.8, 1, 8))
    whole = p_value(first, second)
    monkeypatch.setattr(permutation, "MOST_DEALINGS", 4000)
    assert p_value(first, second) == pytest.approx(whole, abs=0.03)


def test_without_a_difference_p_is_rarely_small():
    random = np.random.default_rng(5)
    small = sum(p_value(random.normal(size=5), random.normal(size=5)) <= 0.05 for _ in range(300))
    assert 3 <= small <= 27
