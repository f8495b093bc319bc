"""Exact percentiles of what users felt.

Definitions, used everywhere:
- A percentile is the nearest-rank one: the smallest observation that at least p % of all
  observations do not exceed. It is always a value that was measured; nothing is interpolated.
- Time to first token: from the SCHEDULED arrival to the first bytes with generated text.
- Inter-token time: between two successive chunks with text of one request.
- Time per output token: (last text - first text) / (output tokens - 1), tokens as the server
  counted them; requests of one token have none, nor have answers that came in one chunk.
- End to end: from the scheduled arrival to the stream's end.
- A failed request is infinitely slow in each of them; in inter-token time once for every token
  it still owed. A percentile can therefore be infinite, which reads "failed".
- Requests cut off by an interrupt are in none.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tailrace.bench.records import Record

INFINITY = math.inf
PERCENTS = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of values already in ascending order.

    Raises:
        ValueError: No values, or `percent` outside 0 to 100.
    """
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"the {percent} % point of {len(ordered)} values is not defined")
    # Exact arithmetic: 99.9 % of 1000 is the 999th value, not the 1000th by a rounding error.
    rank = math.ceil(Fraction(str(percent)) * len(ordered) / 100)
    return ordered[max(rank, 1) - 1]


@dataclass(frozen=True)
class Distribution:
    """All observations of one latency."""

    name: str
    unit: str
    ordered: tuple[float, ...]
    """Ascending, infinite ones last."""

    @property
    def failed(self) -> int:
        """How many observations are infinite."""
        return sum(1 for _ in itertools.takewhile(math.isinf, reversed(self.ordered)))

    def at(self, percent: float) -> float | None:
        """Return a percentile, or None where nothing was observed."""
        return percentile(self.ordered, percent) if self.ordered else None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request must keep to count as good; None asks nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    itl_s: float | None = None
    """Of a request's longest inter-token time."""

    @property
    def is_set(self) -> bool:
        """Whether any limit is given."""
        return any(getattr(self, limit.name) is not None for limit in fields(self))

    def are_kept(self, record: Record) -> bool:
        """Whether a request met every limit that is given; a failed one never does."""
        observed = (
            (self.ttft_s, ttft_s),
            (self.tpot_s, tpot_s),
            (self.e2e_s, e2e_s),
            (self.itl_s, longest_gap_s),
        )
        return record.is_ok and all(
            limit is None or (of(record) or 0.0) <= limit for limit, of in observed
        )


def strictest(limits: Iterable[Limits]) -> Limits:
    """Return the limits that a request keeps where it keeps all of these."""
    found: dict[str, float] = {}
    for one in limits:
        for limit in fields(one):
            bound = getattr(one, limit.name)
            if bound is not None:
                found[limit.name] = min(bound, found.get(limit.name, INFINITY))
    return Limits(**found)


@dataclass(frozen=True)
class Stats:
    """One run in figures."""

    requests: int
    completed: int
    failures: dict[str, int]
    """Failed requests by status."""
    cancelled: int
    ttft: Distribution
    gap: Distribution
    tpot: Distribution
    e2e: Distribution
    lag: Distribution
    """The client's own lateness: a measure of the client, not of the server."""
    span_s: float
    """From the first schedule to the last answer."""
    input_tokens: int
    output_tokens: int
    good: int | None
    """Requests within the limits, or None where there are none."""

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return sum(self.failures.values())

    @property
    def latencies(self) -> tuple[Distribution, ...]:
        """What the table shows, in its order."""
        return (self.ttft, self.gap, self.tpot, self.e2e)

    def per_second(self, count: float) -> float:
        """Return `count` over the whole run, ramp and drain included."""
        return count / self.span_s if self.span_s > 0 else 0.0


def ttft_s(record: Record) -> float | None:
    """Time to first token; None for a request cut off by an interrupt."""
    return _from_schedule(record, record.first_token_s)


def e2e_s(record: Record) -> float | None:
    """End-to-end time; None for a request cut off by an interrupt."""
    return _from_schedule(record, record.finished_s)


def tpot_s(record: Record) -> float | None:
    """Time per output token; None where there are fewer than two tokens, or chunks.

    An answer that came in one piece shows no pace: 0 would be the best of all.
    """
    if record.is_failure:
        return INFINITY
    tokens = record.output_tokens or len(record.chunk_s)
    if not record.is_ok or tokens < 2 or len(record.chunk_s) < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (tokens - 1)


def gaps_s(record: Record) -> list[float]:
    """Inter-token times of one request, an infinite one for each token a failed one still owed."""
    if not record.is_ok and not record.is_failure:
        return []
    found = [later - earlier for earlier, later in itertools.pairwise(record.chunk_s)]
    if record.is_failure:
        owed = record.planned_output_tokens - max(len(record.chunk_s), 1)
        found += [INFINITY] * max(owed, 1)
    return found


def longest_gap_s(record: Record) -> float | None:
    """Return the longest inter-token time of one request; None where it has none."""
    return max(gaps_s(record), default=None)


def _from_schedule(record: Record, moment_s: float | None) -> float | None:
    if record.is_failure:
        return INFINITY
    if not record.is_ok or moment_s is None:
        return None
    return moment_s - record.scheduled_s


def distribution(name: str, unit: str, values: Iterable[float | None]) -> Distribution:
    """Sort what was observed."""
    return Distribution(name, unit, tuple(sorted(v for v in values if v is not None)))


def summarise(records: Sequence[Record], limits: Limits | None = None) -> Stats:
    """Return one run's figures."""
    limits = limits or Limits()
    failures: dict[str, int] = {}
    for record in records:
        if record.is_failure:
            failures[record.status] = failures.get(record.status, 0) + 1
    return Stats(
        requests=len(records),
        completed=sum(record.is_ok for record in records),
        failures=failures,
        cancelled=sum(record.status == "cancelled" for record in records),
        ttft=_of(records, "Time to first token", "s", ttft_s),
        gap=distribution("Inter-token time", "ms", itertools.chain(*map(gaps_s, records))),
        tpot=_of(records, "Time per output token", "ms", tpot_s),
        e2e=_of(records, "End to end", "s", e2e_s),
        lag=_of(records, "Dispatch lag of the client", "ms", lag_s),
        span_s=max((record.finished_s or 0.0 for record in records), default=0.0),
        input_tokens=sum(r.input_tokens or 0 for r in records if r.is_ok),
        output_tokens=sum(r.output_tokens or 0 for r in records if r.is_ok),
        good=sum(map(limits.are_kept, records)) if limits.is_set else None,
    )


def lag_s(record: Record) -> float | None:
    """How late the client turned to a request."""
    return None if record.dispatched_s is None else record.dispatched_s - record.scheduled_s


def _of(
    records: Sequence[Record], name: str, unit: str, read: Callable[[Record], float | None]
) -> Distribution:
    return distribution(name, unit, map(read, records))
