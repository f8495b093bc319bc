"""A comparison while it goes on: a panel on a terminal, plain lines elsewhere.

The comparison writes into a `ComparisonState`; the view only reads it, from a thread of its own,
so that a slow terminal never delays a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.bench.drawing import Drawing
from tailrace.bench.progress import seconds
from tailrace.bench.stats import distribution, e2e_s, ttft_s
from tailrace.clock import Clock, monotonic

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.console import RenderableType

    from tailrace.bench.load import LoadState
    from tailrace.bench.stats import Distribution

LINE_INTERVAL_S = 15.0
SAMPLE = 2000
"""Percentiles so far are those of the latest so many requests, to stay cheap."""


@dataclass
class ComparisonState:
    """Where a comparison stands; times are of the machine's monotonic clock."""

    title: str
    contenders: tuple[str, ...]
    pairs: int
    started_s: float
    stages_done: int = 0
    """Stays of one contender in one pair that have ended."""
    stages_kept: int = 0
    """Of these, found on disk and not measured again."""
    contender: str = ""
    pair: int = 0
    phase: str = ""
    """What is going on: "starting vllm", "search", "steady"."""
    load_text: str = ""
    """The offered load of the trial in progress, such as "1.50 requests/s"."""
    trial_s: float = 0.0
    trials: int = 0
    """Measured so far, the one in progress included."""
    load: LoadState | None = None
    """Of the trial in progress."""
    last_line: str = ""

    @property
    def stages(self) -> int:
        """Stays in all."""
        return len(self.contenders) * self.pairs

    def left_s(self, now_s: float) -> float | None:
        """Return the time left, judged by the stays so far; None before the first has ended."""
        measured = self.stages_done - self.stages_kept
        if measured < 1:
            return None
        each_s = (now_s - self.started_s) / (measured + 0.5)
        return max((self.stages - self.stages_done - 0.5) * each_s, 0.0)


class ComparisonProgress:
    """Shows a comparison from `with` to its end."""

    def __init__(
        self, state: ComparisonState, console: Console, *, clock: Clock = monotonic
    ) -> None:
        self._state = state
        self._console = console
        self._clock = clock
        self._drawing = Drawing(
            console, panel=self.panel, line=self._print_line, line_interval_s=LINE_INTERVAL_S
        )

    def __enter__(self) -> Self:
        """Start drawing."""
        self._drawing.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        self._drawing.__exit__(kind, error, trace)

    def activity(self, text: str) -> None:
        """Say what goes on between trials: on a terminal, where it is drawn over."""
        self._state.phase = text
        self._state.load = None

    def tell(self, text: str) -> None:
        """Say what takes a while: as `activity`, and as a line of its own elsewhere."""
        self.activity(text)
        if not self._drawing.is_live and text != self._state.last_line:
            self._state.last_line = text
            self._print(text)

    def decide(self, text: str) -> None:
        """Say what a trial or a search came to; stays on the screen, above the panel."""
        self._print(text)

    def line(self) -> str:
        """Return the state in one line."""
        state = self._state
        where = f"pair {state.pair + 1}/{state.pairs} {state.contender} {state.phase}"
        load = state.load
        if load is None:
            return f"{where}  {self._left()}"
        ttft, e2e = self._latencies(load)
        return (
            f"{where} {state.load_text}  sent {load.sent}/{load.total}  "
            f"in flight {load.in_flight}  failed {_failed(load)}  "
            f"TTFT p95 {seconds(ttft.at(95))}  E2E p95 {seconds(e2e.at(95))}  {self._left()}"
        )

    def panel(self) -> RenderableType:
        """Return the live view."""
        state = self._state
        parts: list[RenderableType] = [self._heading()]
        if state.load is not None:
            parts += [self._facts(state.load), self._percentiles(state.load)]
            elapsed_s = self._clock() - state.load.started_s if state.load.started_s else 0.0
            share = min(elapsed_s / max(state.trial_s, 1e-9), 1.0)
            parts.append(ProgressBar(total=1.0, completed=share))
        return Panel(
            Group(*parts),
            title=escape(state.title),
            subtitle=self._left(),
            title_align="left",
            subtitle_align="right",
        )

    def _heading(self) -> Text:
        state = self._state
        text = Text(f"pair {state.pair + 1} of {state.pairs}   ")
        text.append(state.contender, style="bold")
        text.append(f"   {state.phase}   {state.load_text if state.load else ''}")
        text.append(f"   trial {state.trials}", style="dim")
        return text

    def _facts(self, load: LoadState) -> Table:
        failed = _failed(load)
        facts = Table.grid(padding=(0, 3))
        facts.add_row(
            f"[bold]{load.sent}[/]/{load.total} sent",
            f"[bold]{load.in_flight}[/] in flight",
            f"[bold]{len(load.done)}[/] done",
            Text(f"{failed} failed", style="bold red" if failed else ""),
        )
        return facts

    def _percentiles(self, load: LoadState) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 3))
        for heading in ("so far", "P50", "P95", "P99"):
            table.add_column(heading, justify="left" if heading == "so far" else "right")
        for row in self._latencies(load):
            table.add_row(row.name, *(seconds(row.at(percent)) for percent in (50, 95, 99)))
        return table

    def _latencies(self, load: LoadState) -> tuple[Distribution, Distribution]:
        latest = load.done[-SAMPLE:]
        return (
            distribution("time to first token", "s", map(ttft_s, latest)),
            distribution("end to end", "s", map(e2e_s, latest)),
        )

    def _left(self) -> str:
        left_s = self._state.left_s(self._clock())
        if left_s is None:
            return f"stay {self._state.stages_done + 1} of {self._state.stages}"
        return f"about {left_s / 60:.0f} min left" if left_s > 90 else f"about {left_s:.0f} s left"

    def _print_line(self) -> None:
        if self._state.load is not None:
            self._print(self.line())

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


def _failed(load: LoadState) -> int:
    return sum(record.is_failure for record in load.done)
