"""Why the slowest requests were slow, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tailrace.bench.explain import CAUSES, METRICS, told

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.bench.explain import Division, Explanation, SlowTail

LEAST_SHARE = 0.005
"""A phase that is smaller everywhere is no column."""


def print_explanation(found: Explanation, console: Console) -> None:
    """Print what was read, then each tail: its sentence, where its time went, and why."""
    console.print(Text(summary(found), style="bold"))
    for tail in found.tails:
        console.print()
        console.print(Text(tail.sentence, style="bold"))
        console.print(_table(["requests", "n", "of", "mean", *shown(tail)], length_rows(tail)))
        console.print(_table(CAUSE_HEADINGS, cause_rows(tail)))
    if found.endings:
        console.print()
        console.print(Text("Without a whole answer:", style="bold"))
        console.print(_table(ENDING_HEADINGS, ending_rows(found)))
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def summary(found: Explanation) -> str:
    """Return what was read, in one line."""
    files = f"{len(found.files)} files" if len(found.files) > 1 else found.files[0]
    span_s = max(0.0, found.last_unix_s - found.first_unix_s)
    return f"{found.total:,} requests in {told(span_s)}, {found.answered:,} answered ({files})"


def title(tail: SlowTail) -> str:
    """Return a tail's heading."""
    return f"Slowest {tail.share:.0%} by {METRICS[tail.metric]}"


def shown(tail: SlowTail) -> list[str]:
    """Return the phases that are worth a column."""
    divisions = [tail.slow, *(row.slow for row in tail.lengths)]
    return [
        name
        for name in CAUSES
        if any(division.share(name) >= LEAST_SHARE for division in divisions)
    ]


def length_rows(tail: SlowTail) -> list[list[str]]:
    """Return the shares of all slow requests, and of each length class: as columns `shown`."""
    columns = shown(tail)
    rows = [_division_row("all", tail.slow, tail.total, columns)]
    rows += [
        _division_row(f"prompts {row.name}", row.slow, row.total, columns) for row in tail.lengths
    ]
    return rows


CAUSE_HEADINGS = ["cause", "requests", "share of time", "mean", "median request", "such as"]


def cause_rows(tail: SlowTail) -> list[list[str]]:
    """Return each cause: as `CAUSE_HEADINGS`."""
    return [
        [
            f"{row.label} ({row.phase})",
            f"{row.count:,}",
            f"{row.share:.0%}",
            told(row.mean_s),
            told(row.usual_s),
            ", ".join(row.examples),
        ]
        for row in tail.causes
    ]


ENDING_HEADINGS = ["end", "status", "requests", "median time", "most of it in", "reason"]


def ending_rows(found: Explanation) -> list[list[str]]:
    """Return how requests without a whole answer ended: as `ENDING_HEADINGS`."""
    return [
        [
            ending.finish_reason,
            str(ending.status),
            f"{ending.count:,}",
            told(ending.median_s),
            ending.phase,
            ending.reason,
        ]
        for ending in found.endings
    ]


def _division_row(name: str, division: Division, total: int, columns: list[str]) -> list[str]:
    shares = [f"{division.share(column):.0%}" for column in columns]
    return [name, f"{division.count:,}", f"{total:,}", told(division.mean_s), *shares]


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _table(headings: list[str], rows: list[list[str]]) -> Table:
    table = Table()
    words = {0, len(headings) - 1} if headings[-1] in {"such as", "reason"} else {0}
    for index, heading in enumerate(headings):
        table.add_column(
            heading,
            justify="left" if index in words else "right",
            overflow="fold",
            no_wrap=index not in words,
        )
    for row in rows:
        # Ids and reasons are the clients': text, neither markup nor a terminal's commands.
        table.add_row(*(Text(_printable(cell)) for cell in row))
    return table
