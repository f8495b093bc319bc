from __future__ import annotations

import pytest

from tailrace.bench.limits import read_limit
from tailrace.bench.result import Comparison, Platform
from tailrace.bench.team import Team, default_teams, read_teams
from tailrace.errors import ConfigError


def test_a_row_of_a_plan_is_read():
    row = {
        "name": "search",
        "people": 3,
        "ops": "none",
        "limits": {"p95_ttft": 2.0},
        "rate_rps": 4,
        "budget_per_hour": 9.5,
    }
    (team,) = read_teams({"team": [row], "title": "t"})
    assert team.limits == (read_limit("p95_ttft=2"),)
    assert team.needs == (
        "3 people, no operating skill; p95_ttft=2; 4 requests/s; at most 9.5 an hour"
    )
    assert not team.is_default
    assert read_teams({}) == ()
    assert read_teams({"team": [{}]})[0].name == "team 1"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ops": "sone"}, r"ops = 'sone'.*did you mean 'some'"),
        ({"people": 0}, "people = 0; must be at least 1"),
        ({"rate_rps": -1}, "rate_rps = -1; must be above 0"),
        ({"budget_per_milion": 1}, "budget_per_milion is not known.*budget_per_million"),
        ({"is_default": True}, "is_default is not known"),
        ({"limits": {"p95_tfft": 1.0}}, "tfft is not one of"),
        ({"limits": [1]}, "wrong kind"),
        ({"people": "two"}, "wrong kind"),
    ],
)
def test_a_row_that_is_not_understood_names_the_team(row, message):
    with pytest.raises(ConfigError, match=message):
        read_teams({"team": [{"name": "search"} | row]})


def test_people_and_skill_say_how_many_points_can_be_carried():
    allowed = {
        ops: Team(name="t", people=3, ops=ops).allowed_points for ops in ("none", "some", "strong")
    }
    assert allowed["none"] < allowed["some"] < allowed["strong"]
    for ops, points in allowed.items():
        assert Team(name="t", people=2, ops=ops).allowed_points == points - 1


def priced(price) -> Comparison:
    return Comparison(
        title="t",
        command="",
        started_unix_s=0.0,
        plan={},
        traffic="",
        limits=["p95_ttft=2"],
        platform=Platform(name="here", machine={}, price_per_hour=price),
        contenders=[],
    )


@pytest.mark.parametrize(
    ("prices", "budgets"),
    [([None], {None}), ([3.0], {None}), ([3.0, None, 2.0], {None, 2.0})],
)
def test_default_rows_say_that_they_are_and_take_budgets_from_known_prices(prices, budgets):
    rows = default_teams(list(map(priced, prices)))
    assert all(row.is_default for row in rows)
    assert {row.limits[0].bound_s for row in rows} == {1.0, 2.0, 4.0}
    assert {row.budget_per_hour for row in rows} == budgets
