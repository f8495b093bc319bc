"""A finished run as plain values: what the table, the JSON summary and the report are made of."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailrace.bench.scrape import Scrape
from tailrace.bench.stats import PERCENTS, Distribution, Limits, Stats, strictest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.limits import Limit
    from tailrace.bench.records import Record
    from tailrace.bench.validity import Verdict


@dataclass(frozen=True, kw_only=True)
class Run:
    """One replay, measured."""

    title: str
    conditions: dict[str, str]
    """Label and value, in the order a reader wants them."""
    records: Sequence[Record]
    stats: Stats
    verdict: Verdict
    limits: Limits
    """Bounds on each request, for `stats.good`."""
    duration_s: float
    """The span in which requests arrived."""
    scrape: Scrape = field(default_factory=Scrape)
    """The server's readings."""
    scrapes: dict[str, Scrape] = field(default_factory=dict)
    """All readings by source: server, gpu, process, client."""
    limit: tuple[Limit, ...] = ()
    """Bounds on percentiles; a run keeps them or not."""
    goodput: dict[str, Limits] = field(default_factory=dict)
    """Sets of bounds on each request, by the name they are shown under."""

    @property
    def held(self) -> dict[str, bool | None]:
        """Whether each limit holds, by how it is written; None where nothing was observed."""
        return {str(limit): _holds(limit, self.stats) for limit in self.limit}

    @property
    def good(self) -> dict[str, int]:
        """How many requests kept every bound of each goodput set."""
        return {
            name: sum(map(limits.are_kept, self.records)) for name, limits in self.goodput.items()
        }

    def summary(self) -> dict[str, Any]:
        """Return everything but the records, fit for JSON: seconds, infinite ones as "inf"."""
        stats = self.stats
        return {
            "valid": self.verdict.is_valid,
            "reasons": list(self.verdict.reasons),
            "cautions": list(self.verdict.cautions),
            "conditions": self.conditions,
            "duration_s": self.duration_s,
            "span_s": stats.span_s,
            "requests": stats.requests,
            "completed": stats.completed,
            "failures": stats.failures,
            "cancelled": stats.cancelled,
            "good": stats.good,
            "limits": self.held,
            "goodput": {
                name: {"requests": count, "per_second": round(stats.per_second(count), 6)}
                for name, count in self.good.items()
            },
            "input_tokens": stats.input_tokens,
            "output_tokens": stats.output_tokens,
            "latency_s": {
                key: _figures(latency)
                for key, latency in (
                    ("ttft", stats.ttft),
                    ("inter_token", stats.gap),
                    ("time_per_output_token", stats.tpot),
                    ("end_to_end", stats.e2e),
                    ("dispatch_lag", stats.lag),
                )
            },
        }

    def summary_json(self) -> str:
        """Return the summary as JSON."""
        return json.dumps(self.summary(), indent=2, allow_nan=False) + "\n"


def goodput_limits(limits: Sequence[Limit], more: Limits | None = None) -> dict[str, Limits]:
    """Return the goodput sets that percentile limits imply: each bound alone, and all at once.

    A request is good where it keeps the bound itself: of `p95_ttft=2` that is 2 s to first token.
    """
    bounds = {f"{limit.metric} <= {limit.bound_s:g} s": _bound(limit) for limit in limits}
    if more is not None and more.is_set:
        bounds["as asked"] = more
    if len(bounds) > 1:
        bounds["all of them"] = strictest(bounds.values())
    return bounds


def _bound(limit: Limit) -> Limits:
    return Limits(**{f"{limit.metric}_s": limit.bound_s})


def _holds(limit: Limit, stats: Stats) -> bool | None:
    seen_s = limit.of(stats).at(limit.percent)
    return None if seen_s is None else seen_s <= limit.bound_s


def _figures(latency: Distribution) -> dict[str, Any]:
    points = {f"p{percent}": _plain(latency.at(percent)) for percent in PERCENTS}
    return {"n": len(latency.ordered), **points, "max": _plain(latency.at(100))}


def _plain(value_s: float | None) -> float | str | None:
    if value_s is None:
        return None
    return "inf" if math.isinf(value_s) else round(value_s, 6)
