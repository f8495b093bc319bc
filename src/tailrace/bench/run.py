"""A finished run as plain values: what the table, the JSON summary and the report are made of."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailrace.bench.scrape import Scrape
from tailrace.bench.stats import PERCENTS, Distribution, Limits, Stats

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    duration_s: float
    """The span in which requests arrived."""
    scrape: Scrape = field(default_factory=Scrape)

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


def _figures(latency: Distribution) -> dict[str, Any]:
    points = {f"p{percent}": _plain(latency.at(percent)) for percent in PERCENTS}
    return {"n": len(latency.ordered), **points, "max": _plain(latency.at(100))}


def _plain(value_s: float | None) -> float | str | None:
    if value_s is None:
        return None
    return "inf" if math.isinf(value_s) else round(value_s, 6)
