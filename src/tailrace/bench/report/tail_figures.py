"""The picture of the slow tail: where the time of the slowest requests went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.bench.anatomy import CAUSES
from tailrace.bench.report.canvas import INK, WIDE_IN, svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from tailrace.bench.report.slow_tail import SlowTail

COLOURS = {
    "failed": "#b3261e",
    "client": "#5c6670",
    "network": "#8d97a1",
    "ingest": "#7f6aa8",
    "queue": "#d0770a",
    "own_prefill": "#1a6396",
    "others_prefill": "#5d9fd3",
    "preemption": "#9a3d8f",
    "own_decode": "#10806a",
    "batch": "#4b8b2f",
    "emission": "#b0a03a",
    "unknown": "#a9b1b9",
}
"""Each cause's colour, the same on light and dark pages: the label stands on it in white."""
ON_COLOUR = "#fefefe"
"""White that dark mode does not repaint."""
LABEL_FROM = 0.09
"""A part of at least this share carries its figure."""
SEEN_FROM = 0.005
"""Parts smaller than this are too thin to see, and are not in the legend."""
TITLES = {"ttft": "slowest by time to first token", "e2e": "slowest by end-to-end time"}


def slow_tail(name: str, tails: Sequence[SlowTail]) -> str | None:
    """Draw each contender's slow requests as one bar, parted by cause; None where none was slow."""
    shown = [tail for tail in tails if any(tail.shares.values())]
    if not shown:
        return None
    several = len({tail.platform for tail in shown}) > 1
    labels = [f"{t.contender}\n{t.platform}" if several else t.contender for t in shown]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(TITLES), sharey=True)
        for axes, (metric, title) in zip(panels, TITLES.items(), strict=True):
            for at, tail in enumerate(shown):
                _draw_bar(axes, at, tail.shares.get(metric, {}))
            axes.set_title(title)
            axes.set_xlim(0, 1)
            axes.set_ylim(len(shown) - 0.5, -0.5)
            axes.set_xticks([])
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)
        panels[0].set_yticks(range(len(shown)), labels)
        panels[0].tick_params(axis="y", colors=INK)
        _name_causes(figure, shown)

    return svg(name, (WIDE_IN, 1.25 + 0.6 * len(shown)), draw)


def _draw_bar(axes: Any, at: int, shares: Mapping[str, float]) -> None:
    left = 0.0
    for key in CAUSES:
        share = shares.get(key, 0.0)
        if share <= 0:
            continue
        axes.barh(at, share, left=left, height=0.62, color=COLOURS[key], linewidth=0)
        if share >= LABEL_FROM:
            axes.text(
                left + share / 2,
                at,
                f"{share:.0%}",
                ha="center",
                va="center",
                color=ON_COLOUR,
                fontweight="bold",
                fontsize=9,
            )
        left += share


def _name_causes(figure: Figure, shown: Sequence[SlowTail]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415  # beside its only use

    present = {
        key
        for tail in shown
        for shares in tail.shares.values()
        for key in shares
        if shares[key] >= SEEN_FROM
    }
    handles = [
        Patch(color=COLOURS[key], label=label) for key, label in CAUSES.items() if key in present
    ]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=5, handlelength=1.0, handleheight=1.0
    )
