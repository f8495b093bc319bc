"""What a million tokens cost on a machine that runs at its limit.

    price an hour / (highest rate that holds x mean tokens of a request x 3600 s) x one million

The rate is the median over the searches that resolved. The mean tokens come from the valid trials
that were offered the nearest rates: what is served near the limit, not what the plan hoped for.
It is the best case, and says so: a machine that stands half idle costs twice as much a token.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.records import read_records
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tailrace.bench.result import Comparison, Trial

NEAREST_TRIALS = 3
"""From so many trials, nearest to the rate, the mean tokens are taken."""
RECORDS_FILE = "records.jsonl"


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens, in the price's currency.

    Raises:
        ConfigError: The price is negative, or the rate not above 0.
    """
    if not 0 <= price_per_hour < math.inf:
        raise ConfigError(f"price_per_hour {price_per_hour}: must be 0 or more")
    if not 0 < tokens_per_s < math.inf:
        raise ConfigError(f"{tokens_per_s} tokens/s: a cost needs a rate above 0")
    return price_per_hour / (tokens_per_s * 3600) * 1e6


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Mean tokens of a complete request, as the server counted them."""

    input_tokens: float
    output_tokens: float
    requests: int
    """Complete requests behind the means."""
    folders: tuple[str, ...]
    """The trials they come from, as result.json names their folders."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A million tokens of one contender at its limit; None where `reason` says what is missing."""

    contender: str
    platform: str
    currency: str
    price_per_hour: float | None
    max_rps: float | None = None
    """Median of the searches that resolved."""
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    """Prompt and output."""
    output_per_million: float | None = None
    """Price of a million output tokens: all that the machine costs, over the output alone."""
    total_per_million: float | None = None
    """Price of a million prompt and output tokens together."""
    low: float | None = None
    """`output_per_million` at the highest rate that a pair found."""
    high: float | None = None
    """`output_per_million` at the lowest rate that a pair found."""
    tokens: Tokens | None = None
    reason: str = ""
    """Why there is no figure; empty where there is one."""


def max_rates_rps(comparison: Comparison, contender: str) -> list[float]:
    """Return the highest rates of a contender, one for each pair whose search resolved."""
    return [
        search.max_rps
        for search in comparison.searches
        if search.contender == contender and search.max_rps is not None
    ]


def cost_at_limit(folder: Path, comparison: Comparison, contender: str) -> Cost:
    """Return what a million tokens of a contender cost at its highest rate.

    Args:
        folder: The result's folder, where the trials' records are.
        comparison: What it holds.
        contender: One of the comparison's.

    Raises:
        ConfigError: A trial's records cannot be read.
    """
    platform = comparison.platform
    rates_rps = sorted(max_rates_rps(comparison, contender))

    def cost(**figures: object) -> Cost:
        return Cost(
            contender=contender,
            platform=platform.name,
            currency=platform.currency,
            price_per_hour=platform.price_per_hour,
            **figures,  # type: ignore[arg-type]  # named and typed at each call below
        )

    if not rates_rps:
        return cost(reason=_why_no_rate(comparison, contender))
    max_rps = statistics.median(rates_rps)
    tokens = mean_tokens(folder, comparison, contender, max_rps)
    if tokens is None:
        return cost(
            max_rps=max_rps,
            reason="no valid trial has a complete request whose tokens the server counted",
        )
    output, total = tokens.output_tokens, tokens.input_tokens + tokens.output_tokens
    speeds = {
        "max_rps": max_rps,
        "tokens": tokens,
        "output_tokens_per_s": max_rps * output,
        "total_tokens_per_s": max_rps * total,
    }
    price = platform.price_per_hour
    if price is None:
        return cost(**speeds, reason="no price: the plan's [platform] has no price_per_hour")
    return cost(
        **speeds,
        output_per_million=cost_per_million(price, max_rps * output),
        total_per_million=cost_per_million(price, max_rps * total),
        low=cost_per_million(price, rates_rps[-1] * output),
        high=cost_per_million(price, rates_rps[0] * output),
    )


def _why_no_rate(comparison: Comparison, contender: str) -> str:
    reasons = [
        reason
        for search in comparison.searches
        if search.contender == contender
        for reason in search.reasons
    ]
    why = f": {reasons[0]}" if reasons else ""
    return (
        f"no highest rate: no search resolved{why}" if reasons else "no highest rate was searched"
    )


def mean_tokens(
    folder: Path, comparison: Comparison, contender: str, rate_rps: float
) -> Tokens | None:
    """Return the mean tokens of a contender's requests near a rate.

    None where no valid trial has a complete request that the server counted.

    Raises:
        ConfigError: A trial's records cannot be read.
    """
    trials = [
        trial
        for trial in comparison.trials
        if trial.contender == contender and not trial.reasons and trial.rate_rps > 0
    ]
    trials.sort(key=lambda trial: abs(math.log(trial.rate_rps / rate_rps)))
    return _mean_tokens(folder, trials[:NEAREST_TRIALS])


def _mean_tokens(folder: Path, trials: Sequence[Trial]) -> Tokens | None:
    counted = [
        (record.input_tokens, record.output_tokens)
        for trial in trials
        for record in read_records(folder / trial.folder / RECORDS_FILE)
        if record.is_ok and record.input_tokens is not None and record.output_tokens
    ]
    if not counted:
        return None
    return Tokens(
        input_tokens=statistics.fmean(inputs for inputs, _ in counted),
        output_tokens=statistics.fmean(outputs for _, outputs in counted),
        requests=len(counted),
        folders=tuple(trial.folder for trial in trials),
    )
