"""Each value of a setting that is dealt out stands beside each value of the others."""

from __future__ import annotations

import itertools

import pytest

from tests.support.pairs import dealt


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (3, 3), (4, 17), (5, 2)])
def test_every_part_meets_both_values(rows, columns):
    cases = list(itertools.product(range(rows), "abcdefghijklmnopq"[:columns]))
    found = dealt(cases, (False, True))
    assert [case[:2] for case in found] == cases
    assert len({(row, value) for row, _, value in found}) == 2 * rows
    assert len({(column, value) for _, column, value in found}) == 2 * columns


def test_a_part_meets_both_values_whatever_is_at_another_place():
    """A 1 among rows and a 1 among columns are two parts."""
    found = dealt(itertools.product((0, 1), (0, 1, 2)), (False, True))
    assert len({(row, value) for row, _, value in found}) == 4
    assert len({(column, value) for _, column, value in found}) == 6


def test_what_only_some_cases_share_meets_both_too():
    cases = [(16, "a"), (16, "b"), (16, "c"), (32, "b"), (32, "d"), (64, "d"), (64, "a")]
    assert {(name, value) for _, name, value in dealt(cases, (0, 1))} >= set(
        itertools.product("abd", (0, 1))
    )
