"""One self-contained HTML file: verdict first, then figures, pictures, and how it was measured."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tailrace.bench.stats import PERCENTS
from tailrace.bench.table import fact_rows, figure, latency_rows
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.bench.run import Run
    from tailrace.bench.stats import Distribution

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|%)(?:\W|$))|(?<=[≤≥]) ")
MAX_FAILURES = 20
"""Different failures that the report lists."""

DEFINITIONS = (
    (
        "Percentile",
        (
            "nearest rank: the smallest observation that at least that share of all observations "
            "does not exceed; always a measured value."
        ),
    ),
    (
        "Time to first token",
        "from the scheduled arrival to the first bytes that carry generated text.",
    ),
    ("Inter-token time", "between two successive chunks with text of one request."),
    (
        "Time per output token",
        "(last text - first text) / (output tokens - 1), tokens as the server counted them.",
    ),
    ("End to end", "from the scheduled arrival to the end of the stream."),
    (
        "Failures",
        "count as infinitely slow, in inter-token time once for every token still owed.",
    ),
    (
        "Open loop",
        (
            "each request leaves at its scheduled time, whatever the server does, on a connection "
            "of its own; connecting counts."
        ),
    ),
)


def require_report() -> None:
    """Make sure, before a run starts, that its report can be drawn.

    Raises:
        ConfigError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "the report's pictures need matplotlib, which is not installed: "
            "pip install 'tailrace[bench]'"
        )


def write_report(run: Run, file: Path) -> None:
    """Write the report of a run."""
    page = environment().get_template("report.html").render(_page(run))
    file.write_text(page, encoding="utf-8")


def environment() -> Environment:
    """Return where templates are found; everything they are given is escaped."""
    made = Environment(
        loader=PackageLoader("tailrace.bench", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["unbroken"] = unbroken
    return made


def unbroken(text: str) -> str:
    """Return text that no line break parts between a number and its unit."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)


def _page(run: Run) -> dict[str, Any]:
    stats = run.stats
    return {
        "run": run,
        "verdict": _verdict(run),
        "tiles": _tiles(run),
        "headings": ["n", *(f"P{percent}" for percent in PERCENTS), "max"],
        "latencies": latency_rows(run),
        "lag": [figure(stats.lag.at(percent), "ms") for percent in (50, 99, 100)],
        "facts": fact_rows(run),
        "failures": _failures(run),
        "definitions": DEFINITIONS,
        "pictures": _pictures(run),
        "has_server_metrics": bool(run.scrape.values),
    }


def _verdict(run: Run) -> tuple[str, str]:
    """Return the verdict's kind (a CSS class) and its sentence."""
    stats = run.stats
    if not run.verdict.is_valid:
        return "invalid", "Invalid run: do not use its figures"
    broken = [name for name, holds in run.held.items() if holds is False]
    limits = ""
    if broken:
        limits = f"; {' and '.join(broken)} {'does' if len(broken) == 1 else 'do'} not hold"
    elif run.held and all(run.held.values()):
        limits = f"; {' and '.join(run.held)} {'holds' if len(run.held) == 1 else 'hold'}"
    if stats.failed:
        words = f"Valid run; {stats.failed} of {stats.requests} requests failed{limits}"
        return "failed", words
    kind = "failed" if broken else "valid"
    return kind, f"Valid run; all {stats.requests} requests complete{limits}"


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    stats = run.stats
    rate = stats.per_second(stats.output_tokens)
    return [
        _tile("P95 time to first token", stats.ttft),
        _tile("P95 inter-token time", stats.gap),
        _tile("P95 end to end", stats.e2e),
        ("Output tokens, whole run", f"{rate:,.1f}", "/s"),
        ("Failed requests", f"{stats.failed:,}", f"of {stats.requests:,}"),
    ]


def _tile(label: str, latency: Distribution) -> tuple[str, str, str]:
    value = figure(latency.at(95), latency.unit)
    return label, value, "" if value in {"failed", "-"} else latency.unit


def _failures(run: Run) -> list[tuple[int, str, str]]:
    """Return count, status and message of the most frequent failures."""
    failed = (r for r in run.records if r.is_failure)
    counts = Counter((r.status, (r.error or "")[:300]) for r in failed)
    return [(count, *what) for what, count in counts.most_common(MAX_FAILURES)]


def _pictures(run: Run) -> dict[str, Any]:
    """Draw everything; the SVG is our own drawing, every text in it escaped by matplotlib."""
    from tailrace.bench.report import run_figures as figures  # noqa: PLC0415  # matplotlib is an extra and slow to load

    stats = run.stats
    bars = figures.requests_over_time("requests", run.records)
    return {
        "cdfs": [
            Markup(figures.cdf(name, latency))  # noqa: S704  # our own drawing
            for name, latency in (
                ("cdf-ttft", stats.ttft),
                ("cdf-gap", stats.gap),
                ("cdf-e2e", stats.e2e),
            )
        ],
        "scatter": Markup(figures.ttft_by_length("scatter", run.records)),  # noqa: S704  # as above
        "load": Markup(figures.load_over_time("load", run)),  # noqa: S704  # as above
        "bars": None if bars is None else Markup(bars),  # noqa: S704  # as above
    }
