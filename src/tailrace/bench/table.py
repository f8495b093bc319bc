"""The run's figures as a table on the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tailrace.bench.stats import PERCENTS

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.bench.limits import Limit
    from tailrace.bench.run import Run
    from tailrace.bench.stats import Distribution


def figure(value_s: float | None, unit: str) -> str:
    """Return a latency in its unit, three significant digits where that is meaningful."""
    if value_s is None:
        return "-"
    if math.isinf(value_s):
        return "failed"
    if unit == "ms":
        return f"{value_s * 1e3:.1f}"
    return f"{value_s:.3f}" if value_s < 10 else f"{value_s:.1f}"


def latency_rows(run: Run) -> list[tuple[str, ...]]:
    """Return name with unit, observations, percentiles and maximum of each latency."""
    return [_row(latency) for latency in run.stats.latencies]


def _row(latency: Distribution) -> tuple[str, ...]:
    points = [figure(latency.at(percent), latency.unit) for percent in (*PERCENTS, 100)]
    return (f"{latency.name} ({latency.unit})", f"{len(latency.ordered):,}", *points)


def fact_rows(run: Run) -> list[tuple[str, str]]:
    """Return label and value of what is not a latency."""
    stats = run.stats
    offered = stats.requests / run.duration_s if run.duration_s > 0 else 0.0
    failed = ", ".join(f"{count} {status}" for status, count in sorted(stats.failures.items()))
    rows = [
        ("Requests", f"{stats.requests:,} sent, {stats.completed:,} complete"),
        ("Failed", f"{stats.failed:,}" + (f" ({failed})" if failed else "")),
        ("Offered", f"{offered:.3f} requests/s over {run.duration_s:.1f} s of arrivals"),
        (
            "Served (ramp and drain included)",
            f"{stats.per_second(stats.completed):.3f} requests/s over {stats.span_s:.1f} s",
        ),
        ("Prompt tokens", _tokens(run, stats.input_tokens)),
        ("Output tokens", _tokens(run, stats.output_tokens)),
    ]
    if stats.good is not None:
        rows.append(("Goodput", f"{stats.good:,} of {stats.requests:,} requests{_limits(run)}"))
    rows += [(f"Limit {limit}", _held(limit, run)) for limit in run.limit]
    rows += [
        (f"Good: {name}", f"{count:,} ({stats.per_second(count):.3f}/s)")
        for name, count in run.good.items()
        if run.limit
    ]
    return rows


def _held(limit: Limit, run: Run) -> str:
    holds = run.held[str(limit)]
    if holds is None:
        return "nothing was observed"
    latency = limit.of(run.stats)
    seen = figure(latency.at(limit.percent), latency.unit)
    return f"{'holds' if holds else 'FAILS'} ({seen} {latency.unit})"


def _tokens(run: Run, count: int) -> str:
    return f"{count:,} ({run.stats.per_second(count):,.1f}/s)"


def _limits(run: Run) -> str:
    limits = run.limits
    given = (
        ("time to first token", limits.ttft_s),
        ("time per output token", limits.tpot_s),
        ("end to end", limits.e2e_s),
        ("every inter-token time", limits.itl_s),
    )
    text = ", ".join(f"{name} at most {value:g} s" for name, value in given if value is not None)
    return f" ({run.stats.per_second(run.stats.good or 0):.3f}/s) within {text}"


def print_run(run: Run, console: Console) -> None:
    """Print verdict, latencies and facts; the verdict first."""
    for reason in run.verdict.reasons:
        console.print(Text(f"INVALID: {reason}", style="bold red"))
    table = Table(title=run.title, title_justify="left", title_style="bold")
    table.add_column("from the scheduled arrival")
    for heading in ("n", *(f"P{percent}" for percent in PERCENTS), "max"):
        table.add_column(heading, justify="right")
    for row in latency_rows(run):
        table.add_row(*row)
    console.print(table)
    for label, value in fact_rows(run):
        console.print(Text.assemble((f"{label}: ", "bold"), value))
    for caution in run.verdict.cautions:
        console.print(Text(f"note: {caution}", style="yellow"))
