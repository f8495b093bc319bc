from __future__ import annotations

import pytest

from tailrace.bench.advise import decide
from tailrace.bench.limits import read_limit
from tailrace.bench.result import Platform
from tailrace.bench.team import Team
from tests.bench.scripted_result import Offered, Subject, write

FAST = (3.0, 3.1, 2.9, 3.0, 3.2, 2.95)
SLOW = (2.0, 2.1, 1.95, 2.0, 2.1, 2.0)
LIKE_FAST = (3.1, 3.0, 2.95, 3.1, 3.1, 3.0)
PLAIN = Team(name="t", people=5, ops="some")


def row(folder, team, *subjects, **changes):
    (advice,) = decide([write(folder, *subjects, **changes)], [folder], [team])
    return advice


def test_the_faster_is_chosen_with_its_interval(tmp_path):
    advice = row(tmp_path, PLAIN, Subject(name="a", max_rps=SLOW), Subject(name="b", max_rps=FAST))
    assert advice.choice == "b on one"
    assert advice.verdict == "Run b on one: 2.9 requests/s to rely on at p95_ttft=2."
    told = " ".join(advice.because)
    assert "b on one against a on one: ratio of the highest rates 1.49" in told
    assert "95% interval" in told
    assert [candidate.contender for candidate in advice.candidates] == ["b", "a"]
    assert advice.needs == "5 people, some operating skill; p95_ttft=2"


def test_an_interval_that_contains_1_is_a_tie_and_the_simpler_wins(tmp_path):
    drafted = Subject(name="a", max_rps=LIKE_FAST, fields={"strategy": "eagle"})
    advice = row(tmp_path, PLAIN, drafted, Subject(name="b", max_rps=FAST))
    assert advice.choice == "b on one"
    assert "No difference to a (eagle) on one was shown; it asks for the least" in advice.verdict
    told = " ".join(advice.because)
    assert "it contains 1" in told
    assert "fewest points of operating decide" in told


def test_equals_are_called_equal(tmp_path):
    subjects = (Subject(name="a", max_rps=LIKE_FAST), Subject(name="b", max_rps=FAST))
    advice = row(tmp_path, PLAIN, *subjects)
    assert advice.verdict.endswith("was shown; either will do.")


def test_too_few_pairs_show_no_difference(tmp_path):
    drafted = Subject(name="a", max_rps=(9.0,), fields={"strategy": "eagle"})
    advice = row(tmp_path, PLAIN, drafted, Subject(name="b", max_rps=(1.0,)))
    assert advice.choice == "b on one"
    assert "no difference was shown (" in " ".join(advice.because)


def test_a_better_configuration_that_the_team_cannot_carry_is_passed_over(tmp_path):
    team = Team(name="t", people=2, ops="none")
    hard = Subject(name="a", max_rps=FAST, fields={"restarts": 1})
    advice = row(tmp_path, team, hard, Subject(name="b", max_rps=SLOW))
    assert advice.choice == "b on one"
    (lacking,) = advice.candidates[1].lacks
    assert lacking.rule == "at most 1 point of operating"
    assert "died and was restarted: 1 (+2)" in lacking.numbers


@pytest.mark.parametrize(
    ("needs", "lacks"),
    [
        ({"rate_rps": 5.0}, "serves 5 requests/s (2.9 requests/s to rely on)"),
        ({"budget_per_hour": 2.0}, "costs at most 2 USD an hour (3.6 USD an hour)"),
        ({"budget_per_million": 1.0}, "cost at most 1 USD (3.45 USD at 2.9 requests/s)"),
        ({"rate_rps": 0.1, "budget_per_million": 9.0}, "at most 9 USD (100 USD at 0.1 requests/s)"),
        ({"limits": (read_limit("p95_ttft=0.1"),)}, "p95_ttft=0.1 exceeded by 100 of 100"),
    ],
)
def test_nothing_unmeasured_is_recommended(tmp_path, needs, lacks):
    team = Team(name="t", people=5, ops="some", **needs)
    advice = row(tmp_path, team, Subject(name="a", max_rps=FAST), price=3.6)
    assert advice.choice is None
    assert advice.verdict.startswith(
        "No measured configuration meets it. Nearest is a on one; it lacks: "
    )
    assert lacks in advice.verdict
    assert not advice.candidates[0].passes


def test_a_budget_without_a_price_is_not_met(tmp_path):
    team = Team(name="t", people=5, budget_per_hour=9.0, budget_per_million=9.0)
    advice = row(tmp_path, team, Subject(name="a", max_rps=FAST))
    assert advice.choice is None
    assert "its price is not known" in advice.verdict
    assert "not known: no price" in advice.verdict


def test_limits_other_than_the_plans_are_answered_by_trials_and_say_which(tmp_path):
    team = Team(name="t", people=5, limits=(read_limit("p95_ttft=0.6"),))
    fast = Subject(
        name="a", max_rps=FAST, offered=(Offered(rate_rps=1.0), Offered(rate_rps=2.0, ttft_s=0.7))
    )
    slow = Subject(
        name="b", max_rps=SLOW, offered=(Offered(rate_rps=1.0), Offered(rate_rps=2.0, ttft_s=0.4))
    )
    advice = row(tmp_path, team, fast, slow)
    assert advice.choice == "b on one"
    assert "2 requests/s to rely on at p95_ttft=0.6" in advice.verdict
    told = " ".join(advice.because)
    assert "trials/0003-b" in told
    assert "without an interval, since not both were searched" in told


def test_a_team_that_knows_its_rate_takes_the_cheapest_machine_that_serves_it(tmp_path):
    big = write(tmp_path / "big", Subject(name="a", max_rps=FAST), platform="big", price=9.0)
    small = write(tmp_path / "small", Subject(name="a", max_rps=SLOW), platform="small", price=4.0)
    folders = [tmp_path / "big", tmp_path / "small"]

    def choice(rate_rps):
        team = Team(name="t", people=5, rate_rps=rate_rps)
        return decide([big, small], folders, [team])[0]

    assert choice(1.5).choice == "a on small"
    assert "at different prices" in " ".join(choice(1.5).because)
    assert choice(2.5).choice == "a on big"
    assert choice(3.5).choice is None


def test_on_one_machine_a_rate_that_all_serve_leaves_it_to_points_then_to_room(tmp_path):
    team = Team(name="t", people=5, rate_rps=1.0)
    subjects = (
        Subject(
            name="a",
            max_rps=FAST,
            offered=(Offered(rate_rps=1.0, tokens=(400, 1000)),),
            fields={"strategy": "eagle"},
        ),
        # Its answers happened to be a little longer, its tokens therefore cheaper.
        Subject(name="b", max_rps=SLOW, offered=(Offered(rate_rps=1.0, tokens=(400, 1001)),)),
        Subject(name="c", max_rps=FAST, offered=(Offered(rate_rps=1.0, tokens=(400, 1000)),)),
    )
    advice = row(tmp_path, team, *subjects, price=3.6)
    assert advice.choice == "c on one"
    told = " ".join(advice.because)
    assert "both serve the rate, at the same price" in told
    assert "then the most room above the rate" in told
    assert advice.verdict.endswith("c on one has the most room above it.")
    assert "No difference" not in advice.verdict  # the question is who is fast enough


def test_machines_are_compared_by_what_a_token_costs_over_all_pairs(tmp_path):
    cheap = write(tmp_path / "c", Subject(name="a", max_rps=SLOW), platform="cheap", price=1.0)
    quick = write(tmp_path / "q", Subject(name="a", max_rps=FAST), platform="quick", price=9.0)
    advice = decide([quick, cheap], [tmp_path / "q", tmp_path / "c"], [PLAIN])[0]
    assert advice.choice == "a on cheap"
    assert "p = 0.0022 by permutation" in " ".join(advice.because)
    alike = write(tmp_path / "l", Subject(name="a", max_rps=LIKE_FAST), platform="like", price=9.0)
    tied = decide([quick, alike], [tmp_path / "q", tmp_path / "l"], [PLAIN])[0]
    assert "no difference was shown between the machines" in " ".join(tied.because)


def test_two_runs_of_one_platform_are_told_apart(tmp_path):
    runs = [write(tmp_path / name, Subject(name="a", max_rps=FAST)) for name in "xy"]
    advice = decide(runs, [tmp_path / "x", tmp_path / "y"], [PLAIN])[0]
    assert {candidate.platform for candidate in advice.candidates} == {"one", "one (run 2)"}


def test_two_currencies_are_not_compared(tmp_path):
    euro = Platform(name="euro", machine={}, price_per_hour=1.0, currency="EUR")
    dollar = write(tmp_path / "d", Subject(name="a", max_rps=FAST), price=9.0)
    other = write(tmp_path / "e", Subject(name="a", max_rps=SLOW))
    other.platform = euro
    advice = decide([dollar, other], [tmp_path / "d", tmp_path / "e"], [PLAIN])[0]
    assert advice.choice == "a on one"
    assert "ordered by rate" in " ".join(advice.because)


def test_a_plans_own_teams_come_before_defaults(tmp_path):
    plan = {"team": [{"name": "search", "people": 4}]}
    comparison = write(tmp_path, Subject(name="a", max_rps=FAST), plan=plan)
    (advice,) = decide([comparison], [tmp_path])
    assert (advice.team, advice.is_default) == ("search", False)
    comparison.plan = {}
    rows = decide([comparison], [tmp_path])
    assert len(rows) == 4
    assert all(advice.is_default for advice in rows)
    comparison.limits = []
    assert decide([comparison], [tmp_path]) == []
    comparison.limits = ["p95_ttft=2"]
    comparison.contenders.clear()
    assert decide([comparison], [tmp_path]) == []


def test_reservations_are_said_in_every_row(tmp_path):
    late = Subject(
        name="a",
        max_rps=FAST,
        offered=(Offered(rate_rps=1.0), Offered(rate_rps=2.0, reasons=("late",))),
        fields={"model": "m"},
    )
    one = write(tmp_path / "1", late, finished_unix_s=None)
    two = write(tmp_path / "2", Subject(name="a", fields={"model": "n"}), traffic="other")
    told = " ".join(decide([one, two], [tmp_path / "1", tmp_path / "2"], [PLAIN])[0].because)
    for word in (
        "different traffic",
        "model of the same name",
        "interrupted",
        "invalid trials, left out: 1",
    ):
        assert word in told
