"""A row of the decision map: who must run a server, and what they need of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from tailrace.bench.limits import Limit, parse_limit, read_limit
from tailrace.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.result import Comparison

ALLOWED_POINTS = {"none": 2, "some": 3, "strong": 8}
"""Points of complexity (complexity.py) that a team of that operating skill can carry."""
SMALL_TEAM = 2
"""Up to so many people there is nobody to stand in: one point less."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """Who must run it, and what they need."""

    name: str
    people: int = 1
    ops: str = "some"
    """What they know of running such servers: "none", "some" or "strong"."""
    limits: tuple[Limit, ...] = ()
    """Empty: the plan's."""
    rate_rps: float | None = None
    """What they must serve; None asks for the most."""
    budget_per_hour: float | None = None
    budget_per_million: float | None = None
    """Of output tokens, at `rate_rps` where that is given, else at the highest rate."""
    is_default: bool = False
    """Not from a plan: one of the rows that show how the map reads."""

    def __post_init__(self) -> None:
        """Check every value once.

        Raises:
            ConfigError: A value is out of range.
        """
        if self.ops not in ALLOWED_POINTS:
            known = ", ".join(ALLOWED_POINTS)
            raise ConfigError(
                f"team {self.name}: ops = {self.ops!r}; must be one of {known}"
                f"{nearest(self.ops, ALLOWED_POINTS)}"
            )
        if self.people < 1:
            raise ConfigError(f"team {self.name}: people = {self.people}; must be at least 1")
        for name in ("rate_rps", "budget_per_hour", "budget_per_million"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"team {self.name}: {name} = {value}; must be above 0")

    @property
    def allowed_points(self) -> int:
        """Points of complexity that the team can carry."""
        return ALLOWED_POINTS[self.ops] - (self.people <= SMALL_TEAM)

    @property
    def needs(self) -> str:
        """In words; a budget is in the platform's currency."""
        skill = {"none": "no", "some": "some", "strong": "strong"}[self.ops]
        people = "1 person" if self.people == 1 else f"{self.people} people"
        parts = [f"{people}, {skill} operating skill"]
        parts += [str(limit) for limit in self.limits]
        if self.rate_rps is not None:
            parts.append(f"{self.rate_rps:g} requests/s")
        if self.budget_per_hour is not None:
            parts.append(f"at most {self.budget_per_hour:g} an hour")
        if self.budget_per_million is not None:
            parts.append(f"at most {self.budget_per_million:g} per million output tokens")
        return "; ".join(parts)


def read_teams(plan: dict[str, Any]) -> tuple[Team, ...]:
    """Return the `[[team]]` rows of a plan, checked.

    Raises:
        ConfigError: A row is not understood.
    """
    return tuple(_team(row, number) for number, row in enumerate(plan.get("team", []), start=1))


def _team(row: dict[str, Any], number: int) -> Team:
    name = str(row.get("name") or f"team {number}")
    known = [field.name for field in fields(Team) if field.name != "is_default"]
    for key in row:
        if key not in known:
            raise ConfigError(f"team {name}: {key} is not known{nearest(key, known)}")
    try:
        limits = tuple(parse_limit(key, bound) for key, bound in row.get("limits", {}).items())
        return Team(**(row | {"name": name, "limits": limits}))
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"team {name}: a value is of the wrong kind ({error})") from error


def default_teams(comparisons: Sequence[Comparison]) -> tuple[Team, ...]:
    """Return the rows that stand where no plan names a team; none where no limits were set."""
    limits = tuple(map(read_limit, comparisons[0].limits))
    if not limits:
        return ()
    prices = [c.platform.price_per_hour for c in comparisons if c.platform.price_per_hour]
    rows = [
        Team(name="small team", people=2, ops="none", limits=limits),
        Team(name="product team", people=8, ops="some", limits=limits),
        Team(
            name="product team, limits twice as strict",
            people=8,
            ops="some",
            limits=_scaled(limits, 0.5),
        ),
        Team(
            name="platform team, limits twice as loose",
            people=20,
            ops="strong",
            limits=_scaled(limits, 2.0),
        ),
    ]
    if len(set(prices)) > 1:
        rows.insert(
            2,
            Team(
                name="product team on the cheapest machine",
                people=8,
                ops="some",
                limits=limits,
                budget_per_hour=min(prices),
            ),
        )
    return tuple(replace(row, is_default=True) for row in rows)


def _scaled(limits: Sequence[Limit], factor: float) -> tuple[Limit, ...]:
    return tuple(replace(limit, bound_s=limit.bound_s * factor) for limit in limits)
