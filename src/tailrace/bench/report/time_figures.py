"""Requests and readings of single trials over time, one column a contender."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from matplotlib.ticker import MaxNLocator

from tailrace.bench.report.canvas import MUTED, RED, WIDE_IN, svg
from tailrace.bench.report.comparison_figures import MAX_DOTS, fitted
from tailrace.bench.report.readings import mean_over_gpus, total_over_gpus
from tailrace.bench.stats import ttft_s
from tailrace.bench.timeline import in_flight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.figure import Figure

    from tailrace.bench.limits import Limit
    from tailrace.bench.records import Record
    from tailrace.bench.report.comparison_figures import Look
    from tailrace.bench.scrape import Scrape

    Thin: TypeAlias = Callable[[Sequence[float], Sequence[float]], tuple[list[float], list[float]]]

MAX_READINGS = 600
"""A time line has no more points than this; of what falls together, the worst is drawn."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One trial over its time: what was asked for and what the monitor saw."""

    contender: str
    records: Sequence[Record]
    scrapes: Mapping[str, Scrape]
    duration_s: float


def timelines(
    name: str, shown: Sequence[Timeline], limits: Sequence[Limit], styles: Mapping[str, Look]
) -> str | None:
    """Draw requests above queue, KV, GPU and memory over time, one column a contender."""
    if not shown:
        return None
    panels = [panel for panel in _PANELS if any(panel.has(line) for line in shown)]
    ttft = [limit for limit in limits if limit.metric == "ttft"]

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(panels), len(shown), sharex=True, sharey="row", squeeze=False)
        for row, panel in zip(grid, panels, strict=True):
            for axes, line in zip(row, shown, strict=True):
                look = styles[line.contender]
                if panel.has(line):
                    panel.draw(axes, line, look)
                else:
                    axes.text(
                        0.5,
                        0.5,
                        "not exported",
                        transform=axes.transAxes,
                        ha="center",
                        va="center",
                        color=MUTED,
                        fontstyle="italic",
                    )
                axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
            row[0].set_ylabel(panel.label)
            row[0].set_ylim(0, _room(row, panel.top))
        for axes, line in zip(grid[0], shown, strict=True):
            axes.set_title(fitted(line.contender, len(shown)), color=styles[line.contender].colour)
            for limit in ttft:
                axes.axhline(limit.bound_s, color=RED, linewidth=1.0)
        longest = max(
            max((r.finished_s or 0.0) for r in line.records) if line.records else 0.0
            for line in shown
        )
        for axes in grid[-1]:
            axes.set_xlim(0, longest or 1)
            axes.set_xlabel("seconds from the trial's start")

    return svg(name, (WIDE_IN, 1.45 * len(panels) + 0.7), draw)


def _room(row: Sequence[Any], top: float | None) -> float:
    """Return the upper end of a row's shared axis."""
    highest = max(float(axes.get_ylim()[1]) for axes in row)
    return top if top is not None else highest * 1.05


@dataclass(frozen=True)
class _Panel:
    label: str
    has: Callable[[Timeline], bool]
    draw: Callable[[Any, Timeline, Look], None]
    top: float | None = None


def _draw_first_tokens(axes: Any, line: Timeline, look: Look) -> None:
    ok = slowest_first_tokens(line.records)
    axes.vlines(
        [r.scheduled_s for r in ok],
        0,
        [ttft_s(r) or 0.0 for r in ok],
        color=look.colour,
        linewidth=0.8,
        alpha=0.45,
    )
    axes.plot(
        [r.scheduled_s for r in ok],
        [ttft_s(r) for r in ok],
        look.mark,
        color=look.colour,
        markersize=3,
    )
    failed = [r.scheduled_s for r in line.records if r.is_failure]
    if failed:
        axes.plot(
            failed, [0.96] * len(failed), "x", color=RED, transform=axes.get_xaxis_transform()
        )


def slowest_first_tokens(records: Sequence[Record]) -> list[Record]:
    """Return at most MAX_DOTS complete requests: of neighbours in time, the slowest."""
    ok = [record for record in records if record.is_ok]
    step = max(math.ceil(len(ok) / MAX_DOTS), 1)
    groups = [ok[start : start + step] for start in range(0, len(ok), step)]
    return [max(group, key=lambda record: ttft_s(record) or 0.0) for group in groups]


def peaks(at_s: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most MAX_READINGS points: of neighbours in time, the highest.

    Two readers of one source (NVML and a Prometheus, say) leave each other's values out in
    turn; what was not read is skipped, so that a line joins what was.
    """
    known = [(at, v) for at, v in zip(at_s, values, strict=True) if math.isfinite(v)]
    step = max(math.ceil(len(known) / MAX_READINGS), 1)
    groups = [known[start : start + step] for start in range(0, len(known), step)]
    return [group[0][0] for group in groups], [max(v for _, v in group) for group in groups]


def dips(at_s: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the same of what is worst where it is least: of neighbours in time, the lowest."""
    times, highest = peaks(at_s, [-value for value in values])
    return times, [-value for value in highest]


def _draw_queue(axes: Any, line: Timeline, look: Look) -> None:
    times, counts = peaks(*in_flight(line.records))
    axes.fill_between(times, counts, step="post", color=look.colour, alpha=0.2, linewidth=0)
    axes.text(
        0.01, 0.94, "in flight", transform=axes.transAxes, color=look.colour, fontsize=8.5, va="top"
    )
    server = line.scrapes.get("server")
    if server is not None and "waiting" in server.values:
        waiting = peaks(server.at_s, server.values["waiting"])
        axes.step(*waiting, where="mid", color=RED, linewidth=1.3)
        axes.text(
            0.01,
            0.78,
            "waiting (server)",
            transform=axes.transAxes,
            color=RED,
            fontsize=8.5,
            va="top",
        )


def _server(key: str, scale: float = 1.0) -> tuple[Callable[[Timeline], bool], Any]:
    def has(line: Timeline) -> bool:
        return key in _values(line, "server")

    def draw(axes: Any, line: Timeline, look: Look) -> None:
        scrape = line.scrapes["server"]
        _area(axes, scrape.at_s, [scale * v for v in scrape.values[key]], look)

    return has, draw


def _values(line: Timeline, source: str) -> Mapping[str, list[float]]:
    scrape = line.scrapes.get(source)
    return {} if scrape is None else scrape.values


def _gpu(
    ending: str, of: Callable[[Scrape, str], list[float]], scale: float, thin: Thin = peaks
) -> tuple[Any, Any]:
    def has(line: Timeline) -> bool:
        return any(name.endswith(ending) for name in _values(line, "gpu"))

    def draw(axes: Any, line: Timeline, look: Look) -> None:
        scrape = line.scrapes["gpu"]
        _area(axes, scrape.at_s, [scale * v for v in of(scrape, ending)], look, thin)

    return has, draw


def _draw_rss(axes: Any, line: Timeline, look: Look) -> None:
    scrape = line.scrapes["process"]
    _area(axes, scrape.at_s, [v / 2**30 for v in scrape.values["rss_bytes"]], look)


def _area(
    axes: Any, at_s: Sequence[float], values: Sequence[float], look: Look, thin: Thin = peaks
) -> None:
    times, worst = thin(at_s, values)
    axes.plot(times, worst, color=look.colour, linewidth=1.4)
    axes.fill_between(times, worst, color=look.colour, alpha=0.13, linewidth=0)


_PANELS = (
    _Panel("TTFT of each\nrequest, s", lambda line: bool(line.records), _draw_first_tokens),
    _Panel("requests", lambda line: bool(line.records), _draw_queue),
    _Panel("KV cache\nin use, %", *_server("kv_usage", 100.0), 105.0),
    _Panel("KV fragmen-\ntation, %", *_server("kv_fragmentation", 100.0)),
    _Panel("GPU busy, %", *_gpu("_utilisation", mean_over_gpus, 100.0), 105.0),
    _Panel("GPU power, W", *_gpu("_power_w", total_over_gpus, 1.0)),
    _Panel("GPU clock,\nMHz", *_gpu("_sm_clock_mhz", mean_over_gpus, 1.0, dips)),
    _Panel("process\nmemory, GiB", lambda line: "rss_bytes" in _values(line, "process"), _draw_rss),
)
