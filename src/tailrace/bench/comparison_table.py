"""A result on the terminal: highest rates with their ratios, and what steady loads felt like."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from tailrace.bench.cautions import search_cautions, trial_cautions
from tailrace.bench.progress import seconds
from tailrace.bench.records import read_records
from tailrace.bench.stats import summarise
from tailrace.bench.trial import RECORDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from tailrace.bench.result import Comparison, Ratio, Trial
    from tailrace.bench.stats import Distribution


RATIO = ("ratio to the first", "interval")


def print_comparison(comparison: Comparison, folder: Path, console: Console) -> None:
    """Print the tables of a result folder, and why a figure is missing."""
    if comparison.searches:
        console.print(rate_table(comparison))
    for line in missing(comparison):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if any(trial.phase == "steady" for trial in comparison.trials):
        console.print(steady_table(comparison, folder))
    for line in (*search_cautions(comparison), *trial_cautions(comparison)):
        console.print(f"note: {line}", highlight=False, soft_wrap=True, markup=False)


def rate_table(comparison: Comparison) -> Table:
    """Return the highest rates: the middle one over the pairs, their range, the ratio."""
    limits = escape(", ".join(comparison.limits))
    with_ratios = bool(comparison.ratios)
    table = _table(
        f"{escape(comparison.title)}: highest rate that keeps {limits}",
        ("contender", "requests/s", "range", "pairs", *(RATIO if with_ratios else ())),
    )
    for contender in comparison.contenders:
        rates = [
            search.max_rps
            for search in comparison.searches
            if search.contender == contender.name and search.max_rps is not None
        ]
        ratio = next((r for r in comparison.ratios if r.contender == contender.name), None)
        table.add_row(
            contender.name,
            f"{median(rates):.3g}" if rates else "not found",
            f"{min(rates):.3g} to {max(rates):.3g}" if len(rates) > 1 else "",
            str(len(rates)),
            *(_ratio_cells(ratio) if with_ratios else ()),
        )
    return table


def _ratio_cells(ratio: Ratio | None) -> tuple[str, str]:
    if ratio is None:
        return "", ""
    interval = ""
    if ratio.low is not None and ratio.high is not None:
        interval = f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.confidence:.0%})"
    return ("" if ratio.estimate is None else f"{ratio.estimate:.3f}"), interval


def missing(comparison: Comparison) -> list[str]:
    """Return why a highest rate or an interval is missing, one line each."""
    lines = [
        f"{search.contender}, pair {search.pair + 1}: no highest rate: {reason}"
        for search in comparison.searches
        for reason in search.reasons
    ]
    lines += [
        f"{ratio.contender} to {ratio.baseline}: {reason}"
        for ratio in comparison.ratios
        for reason in ratio.reasons
    ]
    return lines


def steady_table(comparison: Comparison, folder: Path) -> Table:
    """Return the latencies at the steady loads, over all valid trials of each."""
    headings = ("contender", "load", "trials", "requests", "failed")
    latencies = ("TTFT p50, p95, p99", "end to end p50, p95, p99")
    table = _table("Steady loads", (*headings, *latencies))
    for name, trials in _by_load(comparison).items():
        valid = [trial for trial in trials if not trial.reasons]
        records = [
            record for trial in valid for record in read_records(folder / trial.folder / RECORDS)
        ]
        stats = summarise(records)
        table.add_row(
            *name,
            f"{len(valid)} of {len(trials)}",
            str(stats.requests),
            str(stats.failed),
            *(_points(latency) for latency in (stats.ttft, stats.e2e)),
        )
    return table


def _points(latency: Distribution) -> str:
    return ", ".join(seconds(latency.at(percent)) for percent in (50, 95, 99))


def _by_load(comparison: Comparison) -> dict[tuple[str, str], list[Trial]]:
    """Return the steady trials of each contender and load, in the plan's order."""
    found: dict[tuple[str, str], list[Trial]] = {}
    order = {contender.name: number for number, contender in enumerate(comparison.contenders)}
    steady = [trial for trial in comparison.trials if trial.phase == "steady"]
    steady.sort(key=lambda t: (t.users, 0.0 if t.users else t.rate_rps, order[t.contender]))
    for trial in steady:
        load = f"{trial.users} users" if trial.users else f"{trial.rate_rps:.3g}/s"
        found.setdefault((trial.contender, load), []).append(trial)
    return found


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE, pad_edge=False)
    for heading in headings:
        is_text = heading in {"contender", "load"}
        table.add_column(heading, justify="left" if is_text else "right")
    return table
