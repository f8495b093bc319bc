"""The web page of `tailrace explain`: bars of phases by length, causes, and the definitions.

One self-contained file without scripts; its bars are plain boxes, so it needs no drawing library.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from tailrace.bench.explain import CAUSES, told
from tailrace.bench.explain_table import (
    CAUSE_HEADINGS,
    ENDING_HEADINGS,
    cause_rows,
    ending_rows,
    summary,
    title,
)
from tailrace.bench.report.page import moment
from tailrace.bench.report.run_report import environment
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.bench.explain import Explanation, SlowTail

COLOURS = {
    "body": "#7d8fa1",
    "tokenise": "#4c6a86",
    "admission": "#b48a00",
    "queue": "#c8560b",
    "prefill": "#0f62a8",
    "prefill_wait": "#6aaee6",
    "decode": "#0b8a6f",
    "decode_wait": "#7ccdb6",
    "preempted": "#b83227",
    "emit": "#8a4a9e",
    "socket": "#c48fd1",
}
"""Of each phase; they differ in lightness as well as hue, and each is named in the legend."""


@dataclass(frozen=True)
class Piece:
    """One phase's part of a bar."""

    phase: str
    percent: float
    """Of the longest bar."""
    tooltip: str


@dataclass(frozen=True)
class Bar:
    """The mean time of some requests, cut into phases."""

    label: str
    note: str
    pieces: tuple[Piece, ...]


def write_page(found: Explanation, file: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: The file cannot be written.
    """
    page = (
        environment()
        .get_template("explain.html")
        .render(
            summary=summary(found),
            subtitle=f"{moment(found.first_unix_s)} to {moment(found.last_unix_s)}",
            sentences=[tail.sentence for tail in found.tails],
            tails=[
                {
                    "title": title(tail),
                    "bars": bars(tail),
                    "causes": cause_rows(tail),
                }
                for tail in found.tails
            ],
            cause_headings=CAUSE_HEADINGS,
            ending_headings=ENDING_HEADINGS,
            endings=ending_rows(found),
            notes=found.notes,
            phases=CAUSES,
            colours=COLOURS,
            version=version("tailrace"),
        )
    )
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file}: {error.strerror}") from error


def bars(tail: SlowTail) -> list[Bar]:
    """Return the bars of a tail: the median request's phases, all slow ones, each length class."""
    usual_s = sum(tail.usual.values())
    rows = [
        ("median", "each phase's median", tail.usual, usual_s),
        ("all slow", f"{tail.slow.count:,} of {tail.total:,}", tail.slow.phases, tail.slow.mean_s),
    ]
    rows += [
        (
            f"prompts {row.name}",
            f"{row.slow.count:,} of {row.total:,}",
            row.slow.phases,
            row.slow.mean_s,
        )
        for row in tail.lengths
    ]
    longest_s = max(mean_s for *_, mean_s in rows) or 1.0
    return [
        Bar(
            label,
            f"{note}, {told(mean_s)}",
            tuple(
                Piece(name, 100 * seconds / longest_s, f"{CAUSES[name]}: {told(seconds)}")
                for name, seconds in phases.items()
                if seconds > 0
            ),
        )
        for label, note, phases, mean_s in rows
    ]
