"""The report's tables as text, one for HTML and Markdown alike."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tailrace.bench.report import readings
from tailrace.bench.report.findings import LATENCIES
from tailrace.bench.table import figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailrace.bench.advise import Advice
    from tailrace.bench.cost import Cost
    from tailrace.bench.report.findings import (
        Load,
        PlatformFindings,
        RateRow,
        SteadyRow,
        TrialRow,
    )

BEST_CASE = (
    "The machine runs at its highest rate that holds: the best case. Half idle, a token costs "
    "twice as much."
)
RESOURCES = tuple(name for name in readings.LABELS if name != "cpu_steal_max")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings and rows of text; nothing in it is escaped yet."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: frozenset[int] = frozenset({0})
    """Columns of words; the others are figures and stand to the right."""
    is_grouped: bool = False
    """The first column is the same over several rows."""
    hot: int | None = None
    """The column that readers came for."""

    @property
    def grouped(self) -> list[tuple[int, tuple[str, ...]]]:
        """Each row with how many rows its first cell covers: 0 where the cell stands above."""
        if not self.is_grouped:
            return [(1, row) for row in self.rows]
        found = []
        for _, same in itertools.groupby(self.rows, key=lambda row: row[0]):
            rows = list(same)
            found += [(len(rows) if not at else 0, row) for at, row in enumerate(rows)]
        return found


def without_single_platform(table: Table, platforms: int) -> Table:
    """Drop a first column that says the same in every row."""
    if platforms > 1:
        return table
    return replace(
        table,
        headings=table.headings[1:],
        rows=tuple(row[1:] for row in table.rows),
        words=frozenset(column - 1 for column in table.words if column),
        hot=None if table.hot is None else table.hot - 1,
        is_grouped=False,
    )


def rates(platforms: Sequence[PlatformFindings]) -> Table:
    """Return the highest rates, and each ratio to the baseline."""
    rows = [
        (platform.name, *_rate_cells(row, is_alone=len(platform.rates) == 1))
        for platform in platforms
        for row in platform.rates
    ]
    return Table(
        title="Highest request rate at the limit",
        headings=(
            "platform",
            "contender",
            "strategy",
            "version",
            "requests/s",
            "range over pairs",
            "resolved",
            "ratio",
            f"{_confidence(platforms)} interval",
        ),
        rows=tuple(rows),
        words=frozenset({0, 1, 2, 3}),
        is_grouped=True,
        hot=4,
        note=(
            "Median over the interleaved pairs. The ratio is taken pair by pair against the "
            "baseline; its interval resamples whole pairs."
        ),
    )


def _confidence(platforms: Sequence[PlatformFindings]) -> str:
    found = {ratio.confidence for p in platforms for ratio in p.comparison.ratios}
    return " or ".join(f"{100 * each:g} %" for each in sorted(found)) or "95 %"


def _rate_cells(row: RateRow, *, is_alone: bool) -> tuple[str, ...]:
    contender, ratio = row.contender, row.ratio
    span = "-"
    if row.low_rps is not None and row.high_rps is not None:
        span = f"{rps(row.low_rps)} to {rps(row.high_rps)}"
    interval = "-"
    if ratio and ratio.low is not None and ratio.high is not None:
        interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
    if row.is_baseline:
        over = "-" if is_alone else "baseline"
    else:
        over = "-" if ratio is None or ratio.estimate is None else f"{ratio.estimate:.2f} x"
    return (
        contender.name,
        contender.strategy,
        f"{contender.engine} {contender.version}".strip(),
        rps(row.median_rps),
        span,
        f"{row.resolved} of {len(row.searches)}" if row.searches else "-",
        over,
        interval,
    )


def rps(rate: float | None) -> str:
    """Return a request rate with three digits."""
    if rate is None:
        return "-"
    if rate >= 100:
        return f"{rate:,.0f}"
    return f"{rate:#.3g}" if rate else "0"


def latencies(platform: PlatformFindings, load: Load) -> Table:
    """Return every latency's percentiles at one load, contender beside contender."""
    rows = [row for row in platform.steady if row.load == load]
    return Table(
        title=f"{platform.name} at {load}: latency from the scheduled arrival",
        headings=("latency", "contender", "n", "P50", "P90", "P95", "P99"),
        rows=tuple(
            (f"{name} ({unit})", row.contender, *_latency_cells(row, key, unit))
            for key, (name, unit) in LATENCIES.items()
            for row in rows
        ),
        words=frozenset({0, 1}),
        is_grouped=True,
        hot=5,
    )


def _latency_cells(row: SteadyRow, key: str, unit: str) -> tuple[str, ...]:
    latency = row.work.latency_s[key]
    points = (latency.p50, latency.p90, latency.p95, latency.p99)
    return (f"{latency.observations:,}", *(figure(point, unit) for point in points))


def work(platform: PlatformFindings, load: Load) -> Table:
    """Return throughput, goodput and failures at one load."""
    rows = [row for row in platform.steady if row.load == load]
    return Table(
        title=f"{platform.name} at {load}: work done",
        headings=(
            "contender",
            "trials",
            "requests",
            "failed",
            "requests/s",
            "output tokens/s",
            "good requests",
            "goodput, requests/s",
            "P95 TTFT by trial, s",
        ),
        rows=tuple(_work_cells(row) for row in rows),
        note=(
            "Ramp and drain are in the rates. "
            + (
                "A good request kept every limit's bound itself."
                if platform.limits
                else "Without limits there is no goodput."
            )
            + (
                " These trials were chosen because they held: a repeat may be a little slower."
                if load.is_highest
                else ""
            )
        ),
    )


def _work_cells(row: SteadyRow) -> tuple[str, ...]:
    done = row.work
    failed = ", ".join(f"{count} {status}" for status, count in sorted(done.failures.items()))
    ended = done.requests - done.cancelled
    good = "-" if done.good is None or not ended else f"{done.good / ended:.1%}"
    goodput = "-" if done.good is None else rps(done.per_second(done.good))
    span = row.p95_ttft_range_s
    return (
        row.contender,
        f"{row.trials}",
        f"{done.requests:,}",
        failed or "0",
        rps(done.per_second(done.completed)),
        f"{done.per_second(done.output_tokens):,.1f}",
        good,
        goodput,
        "-" if span is None else f"{figure(span[0], 's')} to {figure(span[1], 's')}",
    )


def resources(platform: PlatformFindings) -> Table:
    """Return memory, queue, KV use and faults over all valid trials; without what nobody has."""
    contenders = [row.contender for row in platform.rates]
    found = [row.readings for row in platform.rates]
    return Table(
        title=f"{platform.name}: memory, queue and faults over all valid trials",
        headings=("", *(contender.name for contender in contenders)),
        rows=(
            *_reading_rows(found),
            ("Died in a trial, restarted", *(str(c.restarts) for c in contenders)),
            ("Ran out of memory", *(str(c.out_of_memory) for c in contenders)),
            (
                "Start to ready, median",
                *(
                    f"{statistics.median(c.ready_s):.1f} s" if c.ready_s else "-"
                    for c in contenders
                ),
            ),
        ),
        note=(
            "Trials above the highest rate are among them: caches are full there by design. "
            "A dash: the engine does not export it, or it could not be read."
        ),
    )


def resources_at(platform: PlatformFindings, load: Load) -> Table | None:
    """Return memory, queue and KV use at one load; None where nothing was read."""
    rows = [row for row in platform.steady if row.load == load]
    cells = _reading_rows([row.work.readings for row in rows])
    if not cells:
        return None
    return Table(
        title=f"{platform.name} at {load}: memory and queue",
        headings=("", *(row.contender for row in rows)),
        rows=cells,
    )


def _reading_rows(found: Sequence[dict[str, float]]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            readings.LABELS[name],
            *(readings.written(name, figures.get(name)) for figures in found),
        )
        for name in RESOURCES
        if any(name in figures for figures in found)
    )


def costs(found: Sequence[tuple[str, Cost]]) -> Table:
    """Return what a million tokens cost at the limit.

    Args:
        found: The platform's name in this report, and the cost.
    """
    return Table(
        title="Cost per million tokens at the limit",
        headings=(
            "platform",
            "contender",
            "price an hour",
            "requests/s",
            "output tokens/s",
            "1 M output tokens",
            "over the pairs",
            "1 M tokens, in and out",
        ),
        rows=tuple((name, *_cost_cells(cost)) for name, cost in found),
        words=frozenset({0, 1}),
        is_grouped=True,
        hot=5,
        note=" ".join([BEST_CASE, *_without_cost([cost for _, cost in found])]),
    )


def _without_cost(costs: Sequence[Cost]) -> Iterator[str]:
    """Yield why a cost is missing, each reason once."""
    names: dict[str, list[str]] = {}
    for cost in costs:
        if cost.reason:
            names.setdefault(cost.reason, []).append(cost.contender)
    for reason, contenders in names.items():
        yield f"No cost of {', '.join(dict.fromkeys(contenders))}: {reason}."


def _cost_cells(cost: Cost) -> tuple[str, ...]:
    span = "-"
    if cost.low is not None and cost.high is not None:
        span = f"{money(cost.low)} to {money(cost.high)}"
    return (
        cost.contender,
        f"{money(cost.price_per_hour)} {cost.currency}" if cost.price_per_hour is not None else "-",
        rps(cost.max_rps),
        "-" if cost.output_tokens_per_s is None else f"{cost.output_tokens_per_s:,.0f}",
        "-" if cost.reason else f"{money(cost.output_per_million)} {cost.currency}",
        span,
        "-"
        if cost.total_per_million is None
        else f"{money(cost.total_per_million)} {cost.currency}",
    )


def money(amount: float | None) -> str:
    """Return an amount with two decimals, or three digits where it is small."""
    if amount is None:
        return "-"
    return f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.3g}"


def decisions(advice: Sequence[Advice]) -> Table:
    """Return the decision map: one row a team."""
    return Table(
        title="Decision map",
        headings=("team", "what it needs", "run", "why"),
        rows=tuple(
            (
                each.team + (" (default row)" if each.is_default else ""),
                each.needs,
                each.choice or "none of the measured",
                each.verdict,
            )
            for each in advice
        ),
        words=frozenset({0, 1, 2, 3}),
        hot=2,
    )


def invalid(platforms: Sequence[PlatformFindings]) -> Table | None:
    """Return the trials that are in no figure, with their reasons."""
    rows = [row for platform in platforms for row in platform.invalid]
    if not rows:
        return None
    return Table(
        title="Invalid trials",
        headings=("platform", "trial", "offered", "why"),
        rows=tuple(
            (row.platform, row.trial.folder, str(row.load), "; ".join(row.trial.reasons))
            for row in rows
        ),
        words=frozenset({0, 1, 2, 3}),
        is_grouped=True,
    )


def searches(platforms: Sequence[PlatformFindings]) -> Table:
    """Return every search for a highest rate."""
    return Table(
        title="Searches",
        headings=("platform", "contender", "pair", "requests/s", "holds", "fails", "unresolved"),
        rows=tuple(
            (
                platform.name,
                search.contender,
                str(search.pair + 1),
                rps(search.max_rps),
                rps(search.holds_rps),
                rps(search.fails_rps),
                "; ".join(search.reasons),
            )
            for platform in platforms
            for search in platform.comparison.searches
        ),
        words=frozenset({0, 1, 6}),
        is_grouped=True,
    )


def trials(platform: PlatformFindings) -> Table:
    """Return every trial of a platform, in order."""
    limits = [limit.name for limit in platform.limits]
    units = {limit.name: LATENCIES[limit.metric][1] for limit in platform.limits}
    return Table(
        title=f"Trials on {platform.name}",
        headings=(
            "contender",
            "phase",
            "pair",
            "offered",
            "seed",
            "requests",
            "failed",
            *(f"{name}, {units[name]}" for name in limits),
            "outcome",
            "kept in mind",
        ),
        rows=tuple(_trial_cells(row, limits, units) for row in platform.trials),
        words=frozenset({0, 1, 7 + len(limits), 8 + len(limits)}),
    )


def _trial_cells(row: TrialRow, limits: Sequence[str], units: dict[str, str]) -> tuple[str, ...]:
    trial = row.trial
    return (
        trial.contender,
        trial.phase,
        str(trial.pair + 1),
        str(row.load),
        str(trial.seed),
        f"{row.work.requests:,}",
        f"{row.work.failed:,}",
        *(figure(row.limits[name], units[name]) for name in limits),
        "invalid" if trial.reasons else trial.outcome or "-",
        "; ".join((*trial.reasons, *trial.cautions)),
    )
