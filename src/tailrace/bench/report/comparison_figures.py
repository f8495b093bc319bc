"""The pictures of a comparison.

A contender has one colour, one mark and one dash in all of them, and its name stands beside its
marks. CDFs are thinned to MAX_STEPS steps, evenly in rank and finer in the tail; scatters to
MAX_DOTS dots: enough for the eye, and the page stays small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from tailrace.bench.report.canvas import (
    DASHES,
    INK,
    MARKERS,
    PAPER,
    RED,
    SERIES,
    WIDE_IN,
    svg,
)
from tailrace.bench.report.findings import LATENCIES
from tailrace.bench.report.verdict import LATENCY_NAMES, bound
from tailrace.bench.table import figure as written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from tailrace.bench.limits import Limit
    from tailrace.bench.report.findings import Load, PlatformFindings, RateRow, TrialRow

MAX_STEPS = 400
"""A CDF has no more steps than this."""
MAX_DOTS = 600
"""A scatter has no more dots than this for each contender."""
MAX_COLUMNS = 4
"""Small multiples stand side by side up to this many."""
LENGTH_BINS = 6
TITLE_CHARACTERS = 112
"""Characters of a bold title that fit over the whole width."""
LEGEND_CHARACTERS = 150
"""Characters that fit in one line of a legend, a handle counting as HANDLE_CHARACTERS."""
HANDLE_CHARACTERS = 9
MAX_LABELLED = 4
"""Up to so many contenders, a CDF carries their P95 as text."""


@dataclass(frozen=True)
class Look:
    """How one contender is drawn."""

    colour: str
    mark: str
    dash: Any


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Return each contender's look, by its place in the list.

    Where colours come round again, marks and dashes are shifted by one each round.
    """
    found = {}
    for index, name in enumerate(names):
        turned = index + index // len(SERIES)
        found[name] = Look(
            SERIES[index % len(SERIES)],
            MARKERS[turned % len(MARKERS)],
            DASHES[turned % len(DASHES)],
        )
    return found


def fitted(name: str, columns: int) -> str:
    """Return a name short enough to stand above one of so many columns."""
    most = TITLE_CHARACTERS // columns
    return name if len(name) <= most else f"{name[: most - 1]}…"


def forest(
    name: str, rows: Sequence[tuple[str, RateRow]], styles: Mapping[str, Look]
) -> str | None:
    """Draw each pair's ratio as a dot and the interval as a bar; None where there is no ratio.

    Args:
        name: The picture's id.
        rows: Label and row of everything that has a baseline.
        styles: By contender.
    """
    shown = [(label, row) for label, row in rows if row.ratio and row.ratio.pairs]
    if not shown:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _draw_forest(axes, shown, styles)

    return svg(name, (WIDE_IN, 0.95 + 0.72 * len(shown)), draw)


def _draw_forest(
    axes: Any, rows: Sequence[tuple[str, RateRow]], styles: Mapping[str, Look]
) -> None:
    values = [1.0]
    for at, (_, row) in enumerate(rows):
        ratio = row.ratio
        if ratio is None:
            continue
        look = styles[row.contender.name]
        spread = _spread(len(ratio.pairs), 0.11)
        axes.plot(
            ratio.pairs,
            [at + 0.26 + shift for shift in spread],
            look.mark,
            color=look.colour,
            markersize=5,
            alpha=0.6,
            markeredgewidth=0,
        )
        values += ratio.pairs
        if ratio.low is not None and ratio.high is not None:
            axes.plot([ratio.low, ratio.high], [at, at], color=look.colour, linewidth=3.2)
            values += [ratio.low, ratio.high]
        if ratio.estimate is not None:
            axes.plot(
                ratio.estimate,
                at,
                look.mark,
                color=look.colour,
                markersize=10,
                markeredgecolor=PAPER,
                markeredgewidth=1.4,
            )
        axes.text(
            1.012,
            at,
            _ratio_text(row),
            transform=axes.get_yaxis_transform(),
            va="center",
            color=look.colour,
            fontweight="bold",
        )
    axes.axvline(1, color=INK, linewidth=1.1)
    low, high = min(values), max(values)
    pad = max((high - low) * 0.08, 0.05)
    axes.set_xlim(low - pad, high + pad)
    axes.set_ylim(len(rows) - 0.35, -0.5)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.tick_params(axis="y", colors=INK)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("highest request rate over the baseline's  (1: equal)")


def _spread(count: int, half: float) -> Sequence[float]:
    """Return shifts that keep equal values apart."""
    return [float(at) for at in np.linspace(-half, half, count)] if count > 1 else [0.0] * count


def _ratio_text(row: RateRow) -> str:
    ratio = row.ratio
    if ratio is None or ratio.estimate is None:
        return "no ratio"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.estimate:.2f} x  (no interval)"
    return f"{ratio.estimate:.2f} x  ({ratio.low:.2f} to {ratio.high:.2f})"


def highest_rates(
    name: str, rows: Sequence[tuple[str, RateRow]], styles: Mapping[str, Look]
) -> str | None:
    """Draw each search's rate as a dot and the median as a mark; None where none resolved."""
    shown = [(label, row) for label, row in rows if row.median_rps is not None]
    if not shown:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for at, (_, row) in enumerate(shown):
            look = styles[row.contender.name]
            rates = [s.max_rps for s in row.searches if s.max_rps is not None]
            median = row.median_rps or 0.0
            axes.barh(at, median, height=0.5, color=look.colour, alpha=0.22, linewidth=0)
            axes.plot([median, median], [at - 0.25, at + 0.25], color=look.colour, linewidth=2.6)
            axes.plot(
                rates,
                [at + shift for shift in _spread(len(rates), 0.13)],
                look.mark,
                color=look.colour,
                markersize=5.5,
                alpha=0.75,
                markeredgecolor=PAPER,
                markeredgewidth=0.6,
            )
            axes.text(
                1.012,
                at,
                f"{median:.3g} requests/s",
                transform=axes.get_yaxis_transform(),
                va="center",
                color=look.colour,
                fontweight="bold",
            )
        axes.set_xlim(0, max(row.high_rps or 0.0 for _, row in shown) * 1.06)
        axes.set_ylim(len(shown) - 0.45, -0.55)
        axes.set_yticks(range(len(shown)), [label for label, _ in shown])
        axes.tick_params(axis="y", colors=INK)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("highest request rate that holds, requests/s: each pair, and the median")

    return svg(name, (WIDE_IN, 0.95 + 0.5 * len(shown)), draw)


def rate_curves(name: str, platform: PlatformFindings, styles: Mapping[str, Look]) -> str | None:
    """Draw each trial as rate against each limit's percentile; None without limits or trials."""
    rows = [row for row in platform.trials if row.is_valid and not row.trial.users]
    if not platform.limits or not rows:
        return None
    count = len(platform.limits)
    names = [row.contender.name for row in platform.rates]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, count, squeeze=False)[0]
        for axes, limit in zip(panels, platform.limits, strict=True):
            _draw_curve(axes, limit, rows, platform, styles)
        _name_contenders(figure, names, styles)

    return svg(name, (WIDE_IN, 4.0 + _legend_in(names)), draw)


def _draw_curve(
    axes: Any,
    limit: Limit,
    rows: Sequence[TrialRow],
    platform: PlatformFindings,
    styles: Mapping[str, Look],
) -> None:
    scale, unit = _unit(limit.metric)
    finite = [v for row in rows if (v := row.limits[limit.name]) is not None and math.isfinite(v)]
    top = min(max(finite, default=limit.bound_s), 40 * limit.bound_s) * scale
    axes.set_title(f"P{limit.percent:g} {LATENCY_NAMES[limit.metric]}")
    if top > 6 * limit.bound_s * scale:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, max(top, limit.bound_s * scale) * 1.1)
    has_failed = False
    for contender, look in styles.items():
        mine = [row for row in rows if row.trial.contender == contender]
        points = [(r.trial.rate_rps, r.limits[limit.name], r.trial.outcome) for r in mine]
        seen = [(x, y * scale, o) for x, y, o in points if y is not None and math.isfinite(y)]
        has_failed |= _mark_failed(axes, [x for x, y, _ in points if y == math.inf], look)
        for outcome_fails in (False, True):
            some = [(x, y) for x, y, o in seen if (o == "fails") == outcome_fails]
            axes.plot(
                [x for x, _ in some],
                [y for _, y in some],
                look.mark,
                color=look.colour,
                markersize=5.2,
                alpha=0.8,
                markerfacecolor=PAPER if outcome_fails else look.colour,
                markeredgecolor=look.colour,
                markeredgewidth=1.0,
            )
        _trend(axes, seen, look)
    axes.axhline(limit.bound_s * scale, color=RED, linewidth=1.3)
    axes.annotate(
        f"limit {bound(limit)}",
        (1, limit.bound_s * scale),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        color=RED,
        fontweight="bold",
        fontsize=9,
    )
    _mark_crossings(axes, platform, styles)
    axes.set_xlim(left=0)
    axes.set_xlabel(
        "offered, requests/s" + ("  (x: the percentile is a failure)" if has_failed else "")
    )
    axes.set_ylabel(unit)


def _mark_failed(axes: Any, rates: Sequence[float], look: Look) -> bool:
    if rates:
        axes.plot(
            rates,
            [0.985] * len(rates),
            "x",
            color=look.colour,
            transform=axes.get_xaxis_transform(),
            markersize=6,
        )
    return bool(rates)


def _trend(axes: Any, seen: Sequence[tuple[float, float, str]], look: Look) -> None:
    """Draw the median of every rate that was measured more than once or lies alone."""
    if len(seen) < 3:
        return
    ordered = sorted(seen)
    size = max(len(ordered) // 7, 1)
    chunks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    if len(chunks) > 1 and len(chunks[-1]) < size:
        chunks[-2] += chunks.pop()
    axes.plot(
        [float(np.median([x for x, _, _ in chunk])) for chunk in chunks],
        [float(np.median([y for _, y, _ in chunk])) for chunk in chunks],
        color=look.colour,
        linestyle=look.dash,
        linewidth=1.7,
        alpha=0.9,
    )


def _mark_crossings(axes: Any, platform: PlatformFindings, styles: Mapping[str, Look]) -> None:
    """Mark each contender's highest rate on the lower edge."""
    for row in platform.rates:
        if row.median_rps is None:
            continue
        look = styles[row.contender.name]
        axes.axvline(row.median_rps, color=look.colour, linewidth=1.0, linestyle=(0, (2, 2)))


def cdfs(
    name: str, platform: PlatformFindings, load: Load, styles: Mapping[str, Look]
) -> str | None:
    """Draw the cumulative distribution of every latency at one load, contender by contender."""
    found = {
        contender: samples.observed_s
        for (contender, at), samples in platform.samples.items()
        if at == load
    }
    if not found:
        return None

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(LATENCIES), sharey=True)
        for axes, (key, (title, unit)) in zip(panels, LATENCIES.items(), strict=True):
            _draw_cdfs(axes, {c: values[key] for c, values in found.items()}, unit, styles)
            axes.set_title(title)
            limit = [limit for limit in platform.limits if limit.metric == key]
            for each in limit:
                _mark_limit(axes, each)
        _name_contenders(figure, list(found), styles)

    return svg(name, (WIDE_IN, 3.7 + _legend_in(list(found))), draw)


def _mark_limit(axes: Any, limit: Limit) -> None:
    scale, _ = _unit(limit.metric)
    at = limit.bound_s * scale
    axes.plot([at], [limit.percent / 100], "|", color=RED, markersize=13, markeredgewidth=2)
    low, high = axes.get_xlim()
    if not low <= at <= high:
        axes.set_xlim(low, max(high, at * 1.08))


def _draw_cdfs(
    axes: Any,
    observed_s: Mapping[str, NDArray[np.float64]],
    unit: str,
    styles: Mapping[str, Look],
) -> None:
    scale = 1e3 if unit == "ms" else 1.0
    widest, middle = 0.0, math.inf
    for line, (contender, values_s) in enumerate(observed_s.items()):
        look = styles[contender]
        total = len(values_s)
        finite = values_s[np.isfinite(values_s)] * scale
        if not len(finite):
            continue
        ranks = thinned_ranks(len(finite))
        axes.plot(
            finite[ranks],
            (ranks + 1) / total,
            color=look.colour,
            linestyle=look.dash,
            linewidth=1.8,
            drawstyle="steps-post",
        )
        widest = max(widest, float(finite[-1]))
        middle = min(middle, float(finite[len(finite) // 2]))
        rank = max(math.ceil(0.95 * total), 1) - 1
        p95_s = float(values_s[rank])
        if math.isfinite(p95_s):
            axes.plot(
                p95_s * scale,
                0.95,
                look.mark,
                color=look.colour,
                markersize=6,
                markeredgecolor=PAPER,
            )
        if len(observed_s) <= MAX_LABELLED:
            axes.text(
                0.97,
                0.06 + 0.085 * (len(observed_s) - 1 - line),
                f"P95 {written(p95_s, unit)}",
                transform=axes.transAxes,
                ha="right",
                color=look.colour,
                fontweight="bold",
                fontsize=9,
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
            )
    if widest > 100 * middle > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, widest * 1.05 or 1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.set_xlabel(unit)


def thinned_ranks(count: int) -> NDArray[np.int64]:
    """Return at most MAX_STEPS ranks of `count`: even ones, half of them in the last tenth."""
    if count <= MAX_STEPS:
        return np.arange(count)
    knee = int(0.9 * count)
    body = np.linspace(0, knee, MAX_STEPS // 2, dtype=np.int64)
    tail = np.linspace(knee, count - 1, MAX_STEPS // 2, dtype=np.int64)
    return np.unique(np.concatenate([body, tail]))


def ttft_by_length(
    name: str, platform: PlatformFindings, load: Load, styles: Mapping[str, Look]
) -> str | None:
    """Draw time to first token against prompt length: requests, their median and their P95."""
    found = {c: samples for (c, at), samples in platform.samples.items() if at == load}
    if not found:
        return None
    shown = list(found.items())
    columns = min(len(shown), MAX_COLUMNS)
    rows = math.ceil(len(shown) / columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        panels = [axes for row in grid for axes in row]
        for axes, (contender, samples) in zip(panels, shown, strict=False):
            _draw_lengths(axes, samples.lengths, samples.ttft_s, styles[contender])
            axes.set_title(fitted(contender, columns), color=styles[contender].colour)
            axes.set_xlabel("prompt tokens")
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel("time to first token, s")
        panels[0].set_xlim(left=0)
        # Margins are of what was seen: where all times are alike, they are next to nothing.
        panels[0].set_ylim(0, panels[0].get_ylim()[1] * 1.08)

    return svg(name, (WIDE_IN, 0.4 + 3.0 * rows), draw)


def _draw_lengths(
    axes: Any, lengths: NDArray[np.float64], values_s: NDArray[np.float64], look: Look
) -> None:
    finite = np.isfinite(values_s)
    step = max(math.ceil(int(finite.sum()) / MAX_DOTS), 1)
    axes.scatter(
        lengths[finite][::step],
        values_s[finite][::step],
        s=9,
        color=look.colour,
        alpha=0.25,
        edgecolors="none",
    )
    middles, p50s, p95s = binned(lengths, values_s)
    for points, dash, label in ((p95s, "-", "P95"), (p50s, (0, (4, 2)), "P50")):
        axes.plot(
            middles,
            points,
            color=look.colour,
            linestyle=dash,
            linewidth=1.9,
            marker=look.mark,
            markersize=4,
        )
        if points and math.isfinite(points[-1]):
            axes.annotate(
                label,
                (middles[-1], points[-1]),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                color=look.colour,
                fontweight="bold",
                fontsize=9,
            )
    failed = lengths[~finite]
    if len(failed):
        axes.plot(
            failed,
            np.full(len(failed), 0.98),
            "x",
            color=RED,
            transform=axes.get_xaxis_transform(),
            markersize=5,
        )
        axes.text(
            0.02,
            0.93,
            f"x {len(failed)} failed",
            transform=axes.transAxes,
            color=RED,
            fontsize=9,
            fontweight="bold",
            va="top",
        )


def binned(
    lengths: NDArray[np.float64], values_s: NDArray[np.float64]
) -> tuple[list[float], list[float], list[float]]:
    """Return middles, P50 and P95 of LENGTH_BINS groups with equally many requests each."""
    order = np.argsort(lengths, kind="stable")
    groups = np.array_split(order, min(LENGTH_BINS, max(len(order) // 20, 1)))
    kept = [group for group in groups if len(group)]
    middles = [float(np.median(lengths[group])) for group in kept]
    points = []
    for percent in (50, 95):
        at = [max(math.ceil(percent / 100 * len(group)), 1) - 1 for group in kept]
        values = [np.sort(values_s[group])[rank] for group, rank in zip(kept, at, strict=True)]
        points.append([float(value) if math.isfinite(value) else math.nan for value in values])
    return middles, points[0], points[1]


def _unit(metric: str) -> tuple[float, str]:
    unit = LATENCIES[metric][1]
    return (1e3, "ms") if unit == "ms" else (1.0, "s")


def _name_contenders(figure: Figure, names: Sequence[str], styles: Mapping[str, Look]) -> None:
    """Name contenders above the panels, in their colour, with their mark and dash."""
    handles = [_handle(name, styles[name]) for name in names]
    columns = _legend_columns(names)
    legend = figure.legend(handles=handles, loc="outside upper left", ncols=columns)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_color(styles[name].colour)
        text.set_fontweight("bold")


def _legend_columns(names: Sequence[str]) -> int:
    widest = max(map(len, names)) + HANDLE_CHARACTERS
    return min(len(names), max(LEGEND_CHARACTERS // widest, 1))


def _legend_in(names: Sequence[str]) -> float:
    """Return the height of the legend's lines beyond the first, in inches."""
    return 0.22 * (math.ceil(len(names) / _legend_columns(names)) - 1)


def _handle(name: str, look: Look) -> Any:
    from matplotlib.lines import Line2D  # noqa: PLC0415  # beside its only use

    return Line2D(
        [], [], color=look.colour, linestyle=look.dash, marker=look.mark, label=name, linewidth=1.8
    )
