"""One contender on one platform: the rate to rely on, what its tokens cost, what it takes to run.

Where a team's limits are the plan's, the searches answer. Where they are others, only trials that
were run do: from the lowest rate offered up to the first that fails, all trials of a rate pooled.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.complexity import Complexity, complexity_of
from tailrace.bench.cost import cost_per_million, mean_tokens
from tailrace.bench.monitor import read_readings
from tailrace.bench.records import read_records

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tailrace.bench.cost import Tokens
    from tailrace.bench.limits import Limit
    from tailrace.bench.records import Record
    from tailrace.bench.result import Comparison, Contender, Trial

ROUNDING = 1e-9
"""0.29 x 100 is a little below 29 in floating point; 29 of 100 must still be allowed."""


@dataclass(frozen=True)
class Capacity:
    """The highest rate to rely on, and how that is known."""

    rate_rps: float | None
    source: str
    by_pair: dict[int, float]
    """Of the searches, where the limits are the plan's; else empty."""


class Configuration:
    """One contender on one platform, with what its trials say; records are read once."""

    def __init__(
        self, comparison: Comparison, folder: Path, contender: Contender, platform: str = ""
    ) -> None:
        self.comparison = comparison
        self.platform = platform or comparison.platform.name
        """Unique among the platforms that are compared."""
        self.contender = contender
        self._folder = folder
        self._records: dict[str, list[Record]] = {}
        self._tokens: dict[float, Tokens | None] = {}

    @property
    def name(self) -> str:
        """Contender, strategy and platform."""
        strategy = self.contender.strategy
        told = "" if strategy in {"", "default"} else f" ({strategy})"
        return f"{self.contender.name}{told} on {self.platform}"

    @property
    def trials(self) -> list[Trial]:
        """The valid trials of an open loop: a closed loop slows down with its server."""
        return [
            trial
            for trial in self.comparison.trials
            if trial.contender == self.contender.name and not trial.reasons and not trial.users
        ]

    def complexity(self) -> Complexity:
        """Return the score of what it takes to run it."""
        processes = None
        for trial in self.trials:
            scrape = read_readings(self._folder / trial.folder / "monitor.jsonl").get("process")
            counts = scrape.values.get("processes", []) if scrape else []
            known = [count for count in counts if not math.isnan(count)]
            processes = max([*known, processes or 0.0]) if known else processes
        return complexity_of(self.contender, self.comparison.platform, processes)

    def capacity(self, limits: Sequence[Limit]) -> Capacity:
        """Return the highest rate that held."""
        if not limits:
            return Capacity(None, "no limit was set, so there is no highest rate", {})
        if {str(limit) for limit in limits} == set(self.comparison.limits):
            searched = self._searched()
            if searched:
                return searched
        return self._tried(limits)

    def _searched(self) -> Capacity | None:
        by_pair = {
            search.pair: search.max_rps
            for search in self.comparison.searches
            if search.contender == self.contender.name and search.max_rps is not None
        }
        if not by_pair:
            return None
        rates = sorted(by_pair.values())
        return Capacity(
            rates[0],
            f"searched: {statistics.median(rates):.3g} requests/s in the median of {len(rates)} "
            f"pairs, {rates[0]:.3g} to {rates[-1]:.3g}; the lowest counts",
            by_pair,
        )

    def _tried(self, limits: Sequence[Limit]) -> Capacity:
        """Judge the rates that were offered, from the lowest up to the first that fails."""
        by_rate: dict[float, list[Trial]] = {}
        for trial in self.trials:
            by_rate.setdefault(trial.rate_rps, []).append(trial)
        best, failed, few = None, "", 0
        for rate_rps in sorted(by_rate):
            judged = [self._judge(limit, by_rate[rate_rps]) for limit in limits]
            if any(verdict is None for verdict, _ in judged):
                few += 1
                continue
            if not all(verdict for verdict, _ in judged):
                failed = next(told for verdict, told in judged if not verdict)
                failed = f"failed at {rate_rps:.3g} requests/s: {failed}"
                break
            best = rate_rps, by_rate[rate_rps], judged
        if best is None:
            short = f"{few} rates have too few requests for the percentile" if few else ""
            why = failed or short or "no valid trial"
            return Capacity(None, f"no trial that was run held these limits ({why})", {})
        rate_rps, trials, judged = best
        return Capacity(
            rate_rps,
            f"not searched; held in {len(trials)} trial{'s' * (len(trials) > 1)} at "
            f"{rate_rps:.3g} requests/s ({trials[0].folder}): "
            + "; ".join(told for _, told in judged)
            + (f"; {failed}" if failed else "; no higher rate was tried"),
            {},
        )

    def _judge(self, limit: Limit, trials: Sequence[Trial]) -> tuple[bool | None, str]:
        """Return whether a limit held in trials of one rate; None: too few observations."""
        over, total = limit.exceeded([record for trial in trials for record in self._read(trial)])
        told = f"{limit} exceeded by {over} of {total}"
        if total * limit.allowed_share < 1 - ROUNDING:
            return (None if over == 0 else False), f"{told}, too few for {limit.percent:g} %"
        return over <= limit.allowed_share * total + ROUNDING, told

    def _read(self, trial: Trial) -> list[Record]:
        if trial.folder not in self._records:
            self._records[trial.folder] = read_records(
                self._folder / trial.folder / "records.jsonl"
            )
        return self._records[trial.folder]

    def output_cost(self, rate_rps: float) -> float | None:
        """Return the price of a million output tokens at a rate; None where it is not known."""
        price = self.comparison.platform.price_per_hour
        if price is None:
            return None
        if rate_rps not in self._tokens:
            self._tokens[rate_rps] = mean_tokens(
                self._folder, self.comparison, self.contender.name, rate_rps
            )
        tokens = self._tokens[rate_rps]
        return cost_per_million(price, rate_rps * tokens.output_tokens) if tokens else None
