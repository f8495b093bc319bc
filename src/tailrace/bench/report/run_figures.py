"""The pictures of one run."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from tailrace.bench.report.canvas import (
    AMBER,
    BLUE,
    MUTED,
    PALE,
    PAPER,
    PINK,
    RED,
    TEAL,
    WIDE_IN,
    svg,
)
from tailrace.bench.report.readings import mean_over_gpus
from tailrace.bench.report.time_figures import peaks
from tailrace.bench.stats import percentile, ttft_s
from tailrace.bench.table import figure as written
from tailrace.bench.timeline import in_flight, per_second

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

    from tailrace.bench.records import Record
    from tailrace.bench.run import Run
    from tailrace.bench.scrape import Scrape
    from tailrace.bench.stats import Distribution

MARKS = ((50, TEAL), (95, AMBER), (99, RED))

MAX_POINTS = 4000
"""A picture shows no more points than this; a larger set is thinned evenly."""
MAX_BARS = 120
"""The request-by-request picture is drawn for runs up to this many requests."""


def cdf(name: str, latency: Distribution) -> str:
    """Draw the cumulative distribution of one latency, its percentiles marked."""
    return svg(name, (3.9, 2.9), lambda figure: _draw_cdf(figure.subplots(), latency))


def _draw_cdf(axes: Any, latency: Distribution) -> None:
    scale = 1e3 if latency.unit == "ms" else 1.0
    total = len(latency.ordered)
    finite = [value * scale for value in latency.ordered if math.isfinite(value)]
    axes.set_title(latency.name)
    axes.set_xlabel(latency.unit if not latency.failed else f"{latency.unit}  (rest failed)")
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    if not finite:
        return
    ranks = _thinned(list(range(len(finite))))
    axes.plot(
        [finite[rank] for rank in ranks],
        [(rank + 1) / total for rank in ranks],
        color=BLUE,
        linewidth=1.8,
        drawstyle="steps-post",
        solid_joinstyle="round",
    )
    if _is_wide(finite):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_xlim(0, finite[-1] * 1.06 or 1)
    _mark_percentiles(axes, latency, scale, finite)


def _mark_percentiles(
    axes: Any, latency: Distribution, scale: float, finite: Sequence[float]
) -> None:
    """Mark them, and list them where this CDF has room: upper left or lower right of it."""
    middle = percentile(finite, 50)
    is_right = axes.transAxes.inverted().transform(axes.transData.transform((middle, 0)))[0] > 0.5
    for line, (percent, colour) in enumerate(MARKS):
        value = percentile(latency.ordered, percent)
        unit = f" {latency.unit}" if math.isfinite(value) else ""
        if math.isfinite(value):
            point = (value * scale, percent / 100)
            axes.vlines(point[0], 0, point[1], color=colour, linewidth=0.9, linestyle=(0, (3, 2)))
            axes.plot(*point, "o", color=colour, markersize=5.5, markeredgecolor=PAPER)
        axes.text(
            *((0.03, 0.9 - 0.095 * line) if is_right else (0.985, 0.25 - 0.095 * line)),
            f"P{percent}  {written(value, latency.unit)}{unit}",
            transform=axes.transAxes,
            ha="left" if is_right else "right",
            color=colour,
            fontweight="bold",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2, "alpha": 0.85},
        )


def _is_wide(ordered: Sequence[float]) -> bool:
    return ordered[0] > 0 and ordered[-1] / max(percentile(ordered, 50), 1e-9) > 20


def ttft_by_length(name: str, records: Sequence[Record]) -> str:
    """Draw each request's time to first token against its prompt's length."""
    return svg(name, (WIDE_IN, 3.6), lambda figure: _draw_scatter(figure.subplots(), records))


def _draw_scatter(axes: Any, records: Sequence[Record]) -> None:
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token, s")
    shown = _thinned([r for r in records if r.is_ok])
    lengths = [r.input_tokens or r.planned_input_tokens for r in shown]
    dense = len(shown) > 300
    axes.scatter(
        lengths,
        [ttft_s(r) for r in shown],
        s=9 if dense else 26,
        color=BLUE,
        alpha=0.35 if dense else 0.8,
        edgecolors="none" if dense else PAPER,
        linewidths=0.6,
        label="complete",
    )
    failed = _thinned([r.planned_input_tokens for r in records if r.is_failure])
    if failed:
        top = axes.get_ylim()[1]
        axes.scatter(failed, [top] * len(failed), marker="x", s=30, color=RED, label="failed")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)
    axes.set_xlim(left=0)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)


def requests_over_time(name: str, records: Sequence[Record]) -> str | None:
    """Draw a bar for each request, waiting then streaming; None for runs of too many."""
    ended = [r for r in records if r.finished_s is not None]
    if not 0 < len(ended) <= MAX_BARS:
        return None
    height = 1.1 + max(0.11 * len(ended), 1.2)
    return svg(name, (WIDE_IN, height), lambda figure: _draw_bars(figure.subplots(), ended))


def _draw_bars(axes: Any, records: Sequence[Record]) -> None:
    for row, record in enumerate(records):
        finished_s = record.finished_s or record.scheduled_s
        first_s = record.first_token_s if record.first_token_s is not None else finished_s
        start_s = record.scheduled_s
        bar = {"height": 0.68, "linewidth": 0}
        waiting = PALE if record.is_ok else PINK
        axes.barh(row, first_s - start_s, left=start_s, color=waiting, **bar)
        streaming = BLUE if record.is_ok else RED
        axes.barh(row, finished_s - first_s, left=first_s, color=streaming, **bar)
    axes.set_ylim(len(records) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the run's start")
    axes.set_ylabel("request")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.grid(visible=False, axis="y")
    keys = [("until the first token", PALE), ("streaming", BLUE)]
    if not all(record.is_ok for record in records):
        keys.append(("failed or cut off", RED))
    for label, colour in keys:
        axes.barh(0, 0, color=colour, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(keys), borderaxespad=0.2)


def load_over_time(name: str, run: Run) -> str:
    """Draw requests in flight, arrivals and output tokens a second over the run's time."""
    panels: list[Callable[[Any], None]] = [
        lambda axes: _draw_in_flight(axes, run.records, run.scrape),
        lambda axes: _draw_rate(axes, "arrivals / s", _arrivals(run.records), run, AMBER),
        lambda axes: _draw_rate(axes, "output tokens / s", _tokens(run.records), run, BLUE),
    ]
    if "kv_usage" in run.scrape.values:
        panels.append(lambda axes: _draw_kv(axes, run.scrape))
    gpu, process = run.scrapes.get("gpu"), run.scrapes.get("process")
    if gpu is not None and any(name.endswith("_utilisation") for name in gpu.values):
        busy = [100 * share for share in mean_over_gpus(gpu, "_utilisation")]
        panels.append(lambda axes: _draw_reading(axes, gpu.at_s, busy, "GPU busy, %"))
    if process is not None and "rss_bytes" in process.values:
        rss_gib = [size / 2**30 for size in process.values["rss_bytes"]]
        panels.append(lambda axes: _draw_reading(axes, process.at_s, rss_gib, "memory, GiB"))

    def draw(figure: Figure) -> None:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
        for panel, (axes,) in zip(panels, rows, strict=True):
            panel(axes)
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
        bottom = rows[-1][0]
        bottom.set_xlim(0, max(run.stats.span_s, run.duration_s, 1e-3))
        bottom.set_xlabel("seconds from the run's start")
        for (axes,) in rows:
            axes.axvline(run.duration_s, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        rows[0][0].annotate(
            "arrivals end",
            (run.duration_s, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
            fontsize=8.5,
        )

    return svg(name, (WIDE_IN, 1.6 * len(panels) + 0.5), draw)


def _draw_in_flight(axes: Any, records: Sequence[Record], scrape: Scrape) -> None:
    times, counts = in_flight(records)
    axes.step(times, counts, where="post", color=BLUE, linewidth=1.6, label="in flight (client)")
    axes.fill_between(times, counts, step="post", color=PALE, alpha=0.6, linewidth=0)
    for gauge, colour in (("running", TEAL), ("waiting", RED)):
        if gauge in scrape.values:
            label = f"{gauge} (server)"
            axes.plot(scrape.at_s, scrape.values[gauge], color=colour, linewidth=1.2, label=label)
    axes.set_ylabel("requests")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)


def _draw_rate(
    axes: Any, label: str, events: list[tuple[float, float]], run: Run, colour: str
) -> None:
    edges, rates = per_second(events, max(run.stats.span_s, run.duration_s))
    axes.stairs(rates, edges, fill=True, color=colour, alpha=0.28, linewidth=0)
    axes.stairs(rates, edges, color=colour, linewidth=1.4)
    axes.set_ylabel(label)


def _draw_kv(axes: Any, scrape: Scrape) -> None:
    values = [100 * value for value in scrape.values["kv_usage"]]
    _draw_reading(axes, scrape.at_s, values, "KV cache in use, %")


def _draw_reading(axes: Any, at_s: Sequence[float], values: Sequence[float], label: str) -> None:
    axes.plot(*peaks(at_s, values), color=TEAL, linewidth=1.4)
    axes.set_ylabel(label)


def _arrivals(records: Sequence[Record]) -> list[tuple[float, float]]:
    return [(record.scheduled_s, 1.0) for record in records]


def _tokens(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Spread each answer's tokens evenly over its chunks: the server counts, chunks tell when."""
    found = []
    for record in records:
        each = (record.output_tokens or len(record.chunk_s)) / max(len(record.chunk_s), 1)
        found += [(at_s, each) for at_s in record.chunk_s]
    return found


def _thinned(values: list[Any]) -> list[Any]:
    """Return at most about MAX_POINTS of `values`, evenly, always with the last."""
    step = math.ceil(len(values) / MAX_POINTS)
    if step <= 1:
        return values
    return [*itertools.islice(values, 0, len(values) - 1, step), values[-1]]
