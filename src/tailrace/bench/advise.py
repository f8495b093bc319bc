"""The decision map: which measured configuration a team should run, and the numbers behind it.

A configuration is one contender on one platform. For each team:

1. Rate: the highest at which the team's limits held. Where they are the plan's, the lowest of the
   pairs' searches counts: what a team can rely on. Where they are others, only trials that were
   run count: the highest rate that held with no failing rate below it, all its trials pooled.
2. Every rule is a line with its numbers: the limits, the rate to serve, the budgets, and the
   operating (complexity.py gives points; people and operating skill say how many are too many).
3. Of those that meet every rule the cheapest token wins, at the rate the team serves; without
   prices, the highest rate. Where no difference was shown - the interval of the ratio contains 1,
   there is none, or the price is the same - the one with fewer points wins, and the row says so.
   Two machines are never paired: between them a permutation of the pairs' figures decides.
4. Nothing that was not measured is recommended. A team that needs more than any configuration was
   seen to serve is told the nearest one and what it lacks, not how many copies might do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tailrace.bench.configuration import Configuration
from tailrace.bench.limits import read_limit
from tailrace.bench.permutation import p_value
from tailrace.bench.ratio import ratio_of
from tailrace.bench.team import default_teams, read_teams

SIGNIFICANT = 0.05
"""The p-value up to which a difference between two machines is shown."""
SAME_COST = 0.01
"""Costs at one rate and one price differ only by the tokens that answers happened to have."""

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tailrace.bench.complexity import Complexity
    from tailrace.bench.configuration import Capacity
    from tailrace.bench.result import Comparison
    from tailrace.bench.team import Team


@dataclass(frozen=True, kw_only=True)
class Line:
    """One rule applied to one configuration."""

    rule: str
    numbers: str
    passes: bool


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One measured configuration under one team's needs."""

    configuration: str
    """Contender, strategy and platform."""
    contender: str
    platform: str
    rate_rps: float | None
    """The highest rate to rely on under the team's limits; None: none is known."""
    rate_source: str
    """Which searches or trials say so, or why there is none."""
    cost_per_million: float | None
    """Of output tokens, at the rate the team serves."""
    currency: str
    complexity: int
    complexity_why: tuple[str, ...]
    """One sentence for each rule that gave points."""
    lines: tuple[Line, ...]

    @property
    def passes(self) -> bool:
        """Whether every rule is met."""
        return all(line.passes for line in self.lines)

    @property
    def lacks(self) -> tuple[Line, ...]:
        """The rules that are not met."""
        return tuple(line for line in self.lines if not line.passes)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One row of the map."""

    team: str
    needs: str
    choice: str | None
    """The configuration to run; None: none that was measured meets the needs."""
    verdict: str
    """What to run, or what is nearest and what it lacks."""
    because: tuple[str, ...]
    """The rules and numbers behind it; ties and reservations are said here."""
    candidates: tuple[Candidate, ...]
    """The choice first, then by how many rules they miss."""
    is_default: bool


def decide(
    comparisons: Sequence[Comparison],
    folders: Sequence[Path],
    teams: Sequence[Team] | None = None,
) -> list[Advice]:
    """Return one row for each team.

    Args:
        comparisons: What was measured, one for each platform.
        folders: Their folders, in the same order.
        teams: None takes the plans' rows, and where they have none, stated defaults; without
            limits in the plan there are none.

    Raises:
        ConfigError: A plan's team is not understood, or records cannot be read.
    """
    measured = [
        Configuration(comparison, folder, contender, platform)
        for comparison, folder, platform in zip(
            comparisons, folders, _platform_names(comparisons), strict=True
        )
        for contender in comparison.contenders
    ]
    if not measured:
        return []
    if teams is None:
        teams = _planned(comparisons) or default_teams(comparisons)
    plan_limits = tuple(map(read_limit, comparisons[0].limits))
    return [_advice(replace(team, limits=team.limits or plan_limits), measured) for team in teams]


def _platform_names(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the platforms' names, numbered where one was measured more than once."""
    names: list[str] = []
    for comparison in comparisons:
        name = comparison.platform.name
        count = sum(other == name or other.startswith(f"{name} (run ") for other in names)
        names.append(f"{name} (run {count + 1})" if count else name)
    return names


def _planned(comparisons: Sequence[Comparison]) -> tuple[Team, ...]:
    """Return the teams of all plans, each once."""
    return tuple(
        dict.fromkeys(team for comparison in comparisons for team in read_teams(comparison.plan))
    )


@dataclass(frozen=True)
class _Judged:
    """A configuration, what it can do under a team's limits, and the rules applied to it."""

    configuration: Configuration
    capacity: Capacity
    candidate: Candidate


def _judge(team: Team, configuration: Configuration) -> _Judged:
    platform = configuration.comparison.platform
    capacity = configuration.capacity(team.limits)
    complexity = configuration.complexity()
    served_rps = team.rate_rps if team.rate_rps is not None else capacity.rate_rps
    cost = None
    if capacity.rate_rps is not None and served_rps is not None:
        cost = configuration.output_cost(served_rps)
    lines = [_limits_line(team, capacity), _rate_line(team, capacity)]
    lines += [_hour_line(team, platform.price_per_hour, platform.currency)]
    lines += [_million_line(team, cost, served_rps, platform.currency)]
    lines += [_complexity_line(team, complexity)]
    return _Judged(
        configuration,
        capacity,
        Candidate(
            configuration=configuration.name,
            contender=configuration.contender.name,
            platform=configuration.platform,
            rate_rps=capacity.rate_rps,
            rate_source=capacity.source,
            cost_per_million=cost,
            currency=platform.currency,
            complexity=complexity.points,
            complexity_why=complexity.why,
            lines=tuple(line for line in lines if line is not None),
        ),
    )


def _limits_line(team: Team, capacity: Capacity) -> Line:
    limits = ", ".join(map(str, team.limits)) or "no limits"
    return Line(
        rule=f"holds {limits}", numbers=capacity.source, passes=capacity.rate_rps is not None
    )


def _rate_line(team: Team, capacity: Capacity) -> Line | None:
    if team.rate_rps is None:
        return None
    able = "none known" if capacity.rate_rps is None else f"{capacity.rate_rps:.3g} requests/s"
    return Line(
        rule=f"serves {team.rate_rps:g} requests/s",
        numbers=f"{able} to rely on",
        passes=capacity.rate_rps is not None and capacity.rate_rps >= team.rate_rps,
    )


def _hour_line(team: Team, price: float | None, currency: str) -> Line | None:
    if team.budget_per_hour is None:
        return None
    return Line(
        rule=f"costs at most {team.budget_per_hour:g} {currency} an hour",
        numbers="its price is not known" if price is None else f"{price:g} {currency} an hour",
        passes=price is not None and price <= team.budget_per_hour,
    )


def _million_line(
    team: Team, cost: float | None, served_rps: float | None, currency: str
) -> Line | None:
    if team.budget_per_million is None:
        return None
    known = f"{cost:.3g} {currency} at {served_rps:.3g} requests/s" if cost is not None else ""
    return Line(
        rule=f"a million output tokens cost at most {team.budget_per_million:g} {currency}",
        numbers=known or "not known: no price, no rate, or no counted tokens",
        passes=cost is not None and cost <= team.budget_per_million,
    )


def _complexity_line(team: Team, complexity: Complexity) -> Line:
    why = "; ".join(complexity.why) or "nothing beyond one plain server"
    points = complexity.points
    return Line(
        rule=f"at most {_points(team.allowed_points)} of operating",
        numbers=f"{_points(points)}: {why}",
        passes=points <= team.allowed_points,
    )


def _points(count: int) -> str:
    return "1 point" if count == 1 else f"{count} points"


def _advice(team: Team, measured: Sequence[Configuration]) -> Advice:
    judged = [_judge(team, configuration) for configuration in measured]
    passing = [one for one in judged if one.candidate.passes]
    if passing:
        chosen, ties, because = _choose(team, passing)
        verdict = _recommendation(team, chosen, ties)
    else:
        chosen = min(judged, key=_distance)
        because = [f"{line.rule}: {line.numbers}" for line in chosen.candidate.lines]
        lacks = "; ".join(f"{line.rule} ({line.numbers})" for line in chosen.candidate.lacks)
        verdict = (
            "No measured configuration meets it. Nearest is "
            f"{chosen.candidate.configuration}; it lacks: {lacks}."
        )
    others = sorted((one for one in judged if one is not chosen), key=_distance)
    return Advice(
        team=team.name,
        needs=team.needs,
        choice=chosen.candidate.configuration if passing else None,
        verdict=verdict,
        because=(*because, *_reservations(measured)),
        candidates=tuple(one.candidate for one in (chosen, *others)),
        is_default=team.is_default,
    )


def _distance(one: _Judged) -> tuple[int, float]:
    """Fewest rules missed, then the highest rate."""
    return len(one.candidate.lacks), -(one.candidate.rate_rps or 0.0)


def _recommendation(team: Team, chosen: _Judged, ties: Sequence[_Judged]) -> str:
    candidate = chosen.candidate
    limits = ", ".join(map(str, team.limits))
    cost = ""
    if candidate.cost_per_million is not None:
        at = "that rate" if team.rate_rps is None else f"{team.rate_rps:g} requests/s"
        cost = (
            f"; a million output tokens cost {candidate.cost_per_million:.3g} "
            f"{candidate.currency} at {at}"
        )
    return (
        f"Run {candidate.configuration}: {candidate.rate_rps:.3g} requests/s to rely on at "
        f"{limits}{cost}.{_tie(team, chosen, ties)}"
    )


def _tie(team: Team, chosen: _Judged, ties: Sequence[_Judged]) -> str:
    """Return what is to be said of those that are not shown to be worse; "" where none are."""
    if not ties:
        return ""
    names = ", ".join(one.candidate.configuration for one in ties)
    points = chosen.candidate.complexity
    is_simplest = all(one.candidate.complexity > points for one in ties)
    if team.rate_rps is not None:
        # Which is faster is another question, answered by the verdict: here each is fast enough.
        why = "asks for the least operating" if is_simplest else "has the most room above it"
        return f" The rate is served by {names} too; {chosen.candidate.configuration} {why}."
    why = "it asks for the least operating" if is_simplest else "either will do"
    return f" No difference to {names} was shown; {why}."


def _choose(team: Team, passing: Sequence[_Judged]) -> tuple[_Judged, list[_Judged], list[str]]:
    """Return the best of those that meet every rule, what ties with it, and why."""
    by_cost = len({one.candidate.currency for one in passing}) == 1 and all(
        one.candidate.cost_per_million is not None for one in passing
    )
    ranked = sorted(passing, key=_by_cost if by_cost else _by_rate)
    best = ranked[0]
    ties: list[tuple[_Judged, str]] = []
    beaten: list[str] = []
    for other in ranked[1:]:
        is_tie, told = _compare(team, best, other, by_cost)
        if is_tie:
            ties.append((other, told))
        else:
            beaten.append(told)
    equals = [best, *(one for one, _ in ties)]
    chosen = min(equals, key=lambda one: _simplest(team, one))
    because = [f"{line.rule}: {line.numbers}" for line in chosen.candidate.lines]
    because += [told for _, told in ties]
    if ties:
        points = ", ".join(
            f"{one.candidate.configuration} {one.candidate.complexity}" for one in equals
        )
        then = "the cheaper token" if by_cost else "the higher rate"
        if team.rate_rps is not None:
            then = "the most room above the rate"
        because.append(f"among these the fewest points of operating decide, then {then}: {points}")
    because += beaten
    because.append(
        "ordered by the price of a token"
        if by_cost
        else "ordered by rate: prices are not known for all, or not in one currency"
    )
    return chosen, [one for one in equals if one is not chosen], because


def _simplest(team: Team, one: _Judged) -> tuple[int, float]:
    """Fewest points; among equals, for a team that knows its rate, the most room above it."""
    room = 0.0 if team.rate_rps is None else one.candidate.rate_rps or 0.0
    return one.candidate.complexity, -room


def _by_cost(one: _Judged) -> tuple[float, float]:
    cost = one.candidate.cost_per_million
    return (math.inf if cost is None else cost), -(one.candidate.rate_rps or 0.0)


def _by_rate(one: _Judged) -> float:
    return -(one.candidate.rate_rps or 0.0)


def _compare(team: Team, best: _Judged, other: _Judged, by_cost: bool) -> tuple[bool, str]:
    """Return whether no difference was shown between two, and the sentence that says so."""
    first, second = best.candidate, other.candidate
    names = f"{first.configuration} against {second.configuration}"
    if team.rate_rps is not None:
        return _at_rate(names, first, second, by_cost)
    if best.configuration.comparison is not other.configuration.comparison:
        return _across(names, best, other, by_cost)
    if best.capacity.by_pair and other.capacity.by_pair:
        return _paired(names, best.capacity.by_pair, other.capacity.by_pair)
    return first.rate_rps == second.rate_rps, (
        f"{names}: {first.rate_rps:.3g} against {second.rate_rps:.3g} requests/s, without an "
        "interval, since not both were searched"
    )


def _at_rate(names: str, first: Candidate, second: Candidate, by_cost: bool) -> tuple[bool, str]:
    """Compare two that both serve what the team needs: the machine's price decides."""
    if not by_cost:
        return True, f"{names}: both serve the rate, and prices do not tell them apart"
    costs = f"{first.cost_per_million:.3g} and {second.cost_per_million:.3g} {first.currency}"
    is_same = math.isclose(
        first.cost_per_million or 0.0, second.cost_per_million or 0.0, rel_tol=SAME_COST
    )
    told = "at the same price" if is_same else "at different prices"
    return is_same, f"{names}: both serve the rate, {told} ({costs} a million output tokens)"


def _paired(names: str, mine: dict[int, float], theirs: dict[int, float]) -> tuple[bool, str]:
    pairs = [(mine[pair], theirs[pair]) for pair in sorted(mine.keys() & theirs.keys())]
    ratio = ratio_of(pairs)
    if ratio.estimate is None or ratio.low is None or ratio.high is None:
        why = "; ".join(ratio.reasons) or "no interval"
        return True, f"{names}: no difference was shown ({why})"
    told = (
        f"ratio of the highest rates {ratio.estimate:.2f}, {ratio.confidence:.0%} interval "
        f"{ratio.low:.2f} to {ratio.high:.2f}, {len(pairs)} pairs"
    )
    if ratio.low <= 1 <= ratio.high:
        return True, f"{names}: no difference was shown ({told}: it contains 1)"
    return False, f"{names}: {told}"


def _across(names: str, best: _Judged, other: _Judged, by_cost: bool) -> tuple[bool, str]:
    """Compare two machines: runs on them are not pairs."""
    figures = [_figures(one, by_cost) for one in (best, other)]
    unit = f"{best.candidate.currency} per million output tokens" if by_cost else "requests/s"
    told = " against ".join(map(_span, figures)) + f" {unit}"
    if not (best.capacity.by_pair and other.capacity.by_pair):
        is_same = math.isclose(figures[0][0], figures[1][0])
        return is_same, f"{names}: {told}, without an interval, since not both were searched"
    chance = p_value(*([math.log(figure) for figure in side] for side in figures))
    if chance > SIGNIFICANT:
        why = f"{told} over the pairs; p = {chance:.2g} by permutation"
        return True, f"{names}: no difference was shown between the machines ({why})"
    return False, f"{names}: {told} over the pairs; p = {chance:.2g} by permutation"


def _figures(one: _Judged, by_cost: bool) -> list[float]:
    """Return the rate of each pair, or what tokens cost at it, in ascending order."""
    rates = sorted(one.capacity.by_pair.values()) or [one.candidate.rate_rps or 0.0]
    cost = one.candidate.cost_per_million
    if not by_cost or cost is None or one.candidate.rate_rps is None:
        return rates
    # The candidate's cost is that at the rate to rely on, and the price of a token goes by rate.
    return sorted(cost * one.candidate.rate_rps / rate_rps for rate_rps in rates)


def _span(figures: Sequence[float]) -> str:
    low, high = f"{figures[0]:.3g}", f"{figures[-1]:.3g}"
    return low if low == high else f"{low} to {high}"


def _reservations(measured: Sequence[Configuration]) -> list[str]:
    """Return what a reader must keep in mind for every row."""
    comparisons = list({id(one.comparison): one.comparison for one in measured}.values())
    found = []
    if len({comparison.traffic for comparison in comparisons}) > 1:
        found.append("the platforms saw different traffic: their rates do not compare")
    if len({one.contender.model for one in measured if one.contender.model}) > 1:
        found.append("the configurations did not all serve a model of the same name")
    found += [
        f"{comparison.title}: interrupted, so not all that was planned is here"
        for comparison in comparisons
        if comparison.is_interrupted
    ]
    invalid = sum(bool(trial.reasons) for c in comparisons for trial in c.trials)
    if invalid:
        found.append(f"invalid trials, left out: {invalid}")
    return found
