"""A latency limit, as teams write it: `p95_ttft=2.0`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from tailrace.bench.stats import e2e_s, gaps_s, tpot_s, ttft_s
from tailrace.bench.wilson import tally_of
from tailrace.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tailrace.bench.records import Record
    from tailrace.bench.stats import Distribution, Stats
    from tailrace.bench.wilson import Tally

METRICS = ("ttft", "itl", "tpot", "e2e")
"""Time to first token, inter-token time, time per output token, end to end."""

_PATTERN = re.compile(r"p(?P<percent>\d+(?:\.\d+)?)_(?P<metric>[a-z0-9]+?)(?:_s)?")


@dataclass(frozen=True)
class Limit:
    """The `percent` point of `metric` must not exceed `bound_s` seconds."""

    metric: str
    percent: float
    bound_s: float

    @property
    def name(self) -> str:
        """As it is written in a plan, such as "p95_ttft"."""
        return f"p{self.percent:g}_{self.metric}"

    @cached_property
    def allowed_share(self) -> float:
        """The share of observations that may exceed the bound."""
        return float((100 - Fraction(str(self.percent))) / 100)

    def __str__(self) -> str:
        return f"{self.name}={self.bound_s:g}"

    def of(self, stats: Stats) -> Distribution:
        """Return the distribution that this limit is about."""
        return {"ttft": stats.ttft, "itl": stats.gap, "tpot": stats.tpot, "e2e": stats.e2e}[
            self.metric
        ]

    def exceeded(self, records: Sequence[Record]) -> tuple[int, int]:
        """Return how many observations exceed the bound, and of how many.

        Failed requests exceed every bound; requests cut off by an interrupt are not counted.
        """
        tally = self.tally(records)
        return tally.exceeded, tally.observations

    def tally(self, records: Sequence[Record]) -> Tally:
        """Count as `exceeded` does, and say what so many neighbours are worth (wilson.py)."""
        ordered = sorted(records, key=lambda record: record.scheduled_s)
        return tally_of([self._count(record) for record in ordered])

    def _count(self, record: Record) -> tuple[int, int]:
        values = list(_OBSERVED[self.metric](record))
        return sum(value > self.bound_s for value in values), len(values)


def _one(read: Callable[[Record], float | None]) -> Callable[[Record], Iterable[float]]:
    def observed(record: Record) -> Iterable[float]:
        value = read(record)
        return () if value is None else (value,)

    return observed


_OBSERVED: dict[str, Callable[[Record], Iterable[float]]] = {
    "ttft": _one(ttft_s),
    "itl": gaps_s,
    "tpot": _one(tpot_s),
    "e2e": _one(e2e_s),
}


def parse_limit(name: str, bound_s: float) -> Limit:
    """Return the limit called `name` ("p95_ttft", "p99_e2e_s").

    Raises:
        ConfigError: The name is not one of ours, or a number is out of range.
    """
    found = _PATTERN.fullmatch(name)
    if found is None:
        raise ConfigError(f"limit {name}: write it as p95_ttft; metrics: {', '.join(METRICS)}")
    metric, percent = found["metric"], float(found["percent"])
    if metric not in METRICS:
        raise ConfigError(
            f"limit {name}: {metric} is not one of {', '.join(METRICS)}{nearest(metric, METRICS)}"
        )
    if not 0 < percent < 100:
        raise ConfigError(f"limit {name}: the percentile must be above 0 and below 100")
    if not 0 < bound_s < float("inf"):
        raise ConfigError(f"limit {name}: {bound_s} s; must be above 0")
    return Limit(metric, percent, bound_s)


def read_limit(text: str) -> Limit:
    """Return the limit written `p95_ttft=2.0` (seconds).

    Raises:
        ConfigError: It is written otherwise.
    """
    name, _, value = text.partition("=")
    try:
        bound_s = float(value)
    except ValueError as error:
        raise ConfigError(f"limit {text}: write it as p95_ttft=2.0, in seconds") from error
    return parse_limit(name.strip(), bound_s)


def check_timeout(limits: Iterable[Limit], timeout_s: float) -> None:
    """Check that a request may take as long as the limits allow.

    Raises:
        ConfigError: It has failed before, so another limit than the one asked for would be kept.
    """
    for limit in limits:
        if limit.metric in {"ttft", "e2e"} and limit.bound_s >= timeout_s:
            raise ConfigError(
                f"timeout_s = {timeout_s:g}: a request fails after it, so {limit} would in truth "
                f"be a limit of {timeout_s:g} s; give a timeout above {limit.bound_s:g} s"
            )
