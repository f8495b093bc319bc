"""How every picture looks, and how a drawing becomes SVG text that lives in a page.

No pyplot and none of its globals. Text stays text, so that the page's own font shows; ids get a
prefix, so that several pictures live in one page. Inside a page each colour is a CSS variable
with the drawn colour behind it: the page's dark mode repaints the pictures.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable

INK, MUTED, RULE, PAPER = "#1f2933", "#66727f", "#dfe4ea", "#ffffff"
BLUE, TEAL, AMBER, RED, PALE = "#1f5f8b", "#3a9188", "#c77d0a", "#b83227", "#c9dbe8"
PINK = "#ecc7c3"

SERIES = ("#0f62a8", "#c8560b", "#0b8a6f", "#8a4a9e", "#6b6f00", "#7a4b2a")
"""One colour a contender. They differ in lightness as well as hue, so that they also hold for
readers who see few hues; each series is named beside its marks and has a mark of its own."""
MARKERS = ("o", "s", "D", "^", "v", "P")
DASHES = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)), (0, (6, 1.5, 1.4, 1.5)), (0, (3, 3)), (0, (8, 2)))

WIDE_IN = 11.6
"""The width of a picture that fills the page."""

VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    PAPER: "paper",
    BLUE: "blue",
    TEAL: "teal",
    AMBER: "amber-mark",
    RED: "red",
    PALE: "pale",
    PINK: "pink",
    **{colour: f"series-{index}" for index, colour in enumerate(SERIES)},
}
"""Each colour's name in the pages' style sheet (templates/style.html)."""

_NUMBERS = re.compile(r' (?:d|x|y)="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")
_COLOUR = re.compile("|".join(VARIABLES))

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def svg(name: str, size_in: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """Return what `draw` draws as an `<svg>` element for a page.

    Args:
        name: Unique within the page; letters, digits and dashes.
        size_in: Width and height in inches; the page scales the picture to its column.
        draw: Gets the empty figure.
    """
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size_in, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _embeddable(stream.getvalue(), name)


def standalone(svg_text: str) -> str:
    """Return an embedded picture as a file of its own: plain colours on paper."""
    plain = re.sub(r"var\(--[\w-]+, (#[0-9a-f]{6})\)", r"\1", svg_text)
    # A viewer outside a page wants a size; the view box is in points.
    plain = re.sub(
        r'viewBox="0 0 ([\d.]+) ([\d.]+)"', r'\g<0> width="\1pt" height="\2pt"', plain, count=1
    )
    end = plain.index(">") + 1
    return f'{plain[:end]}<rect width="100%" height="100%" fill="{PAPER}"/>{plain[end:]}\n'


def _embeddable(text: str, name: str) -> str:
    """Drop the prolog, the fixed size and needless digits; ids unique, colours variable."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", body)
    body = _NUMBERS.sub(lambda found: _DIGITS.sub(r"\1", found[0]), body)
    return re.sub(r'\bstyle="[^"]*"', _with_variables, body)


def _with_variables(style: re.Match[str]) -> str:
    return _COLOUR.sub(lambda colour: f"var(--{VARIABLES[colour[0]]}, {colour[0]})", style[0])
