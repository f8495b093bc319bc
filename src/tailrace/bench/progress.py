"""A run while it goes on: a panel on a terminal, plain lines elsewhere.

The drawing's thread only reads; lists grow at their end, so what it sees is at most a moment old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.bench.drawing import Drawing
from tailrace.bench.load import LoadState
from tailrace.bench.stats import distribution, e2e_s, tpot_s, ttft_s

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from rich.console import RenderableType

    from tailrace.bench.stats import Distribution
    from tailrace.clock import Clock

LINE_INTERVAL_S = 5.0
SAMPLE = 2000
"""Percentiles so far are those of the latest so many requests, to stay cheap."""
_NOTHING = LoadState(total=0)


def seconds(value_s: float | None) -> str:
    """Return a time as a person reads it; "failed" where it is infinite."""
    if value_s is None:
        return "-"
    if value_s == float("inf"):
        return "failed"
    return f"{value_s * 1e3:.0f} ms" if value_s < 1 else f"{value_s:.2f} s"


class Progress:
    """Shows a run from `with` to its end.

    Args:
        load: Tells the load that goes on at the moment; None while there is none yet.
        duration_s: The span in which requests arrive.
        clock: The load's.
        console: Where to draw.
        title: Of the panel.
    """

    def __init__(
        self,
        load: Callable[[], LoadState | None],
        duration_s: float,
        clock: Clock,
        console: Console,
        *,
        title: str = "replay",
    ) -> None:
        self._load = load
        self._duration_s = duration_s
        self._clock = clock
        self._console = console
        self._title = title
        self._drawing = Drawing(
            console, panel=self._panel, line=self._print_line, line_interval_s=LINE_INTERVAL_S
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
        """Stop drawing; where lines were printed, the last says how it ended."""
        self._drawing.__exit__(kind, error, trace)
        if not self._drawing.is_live:
            self._print_line()

    def line(self) -> str:
        """Return the run's state in one line."""
        state = self._state
        ttft, *_ = self._latencies()
        return (
            f"{self._elapsed_s():6.1f} s  sent {state.sent}/{state.total}  "
            f"in flight {state.in_flight}  done {len(state.done)}  failed {self._failed()}  "
            f"TTFT p50 {seconds(ttft.at(50))} p95 {seconds(ttft.at(95))}  {self._left()}"
        )

    def _print_line(self) -> None:
        self._console.print(self.line(), highlight=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        state = self._state
        facts = Table.grid(padding=(0, 3))
        rate = state.sent / max(self._elapsed_s(), 1e-9) if state.sent else 0.0
        facts.add_row(
            f"[bold]{state.sent}[/]/{state.total} sent",
            f"[bold]{state.in_flight}[/] in flight",
            f"[bold]{len(state.done)}[/] done",
            Text(f"{self._failed()} failed", style="bold red" if self._failed() else ""),
            f"{rate:.2f} requests/s",
            f"{state.chunks} chunks",
        )
        share = min(self._elapsed_s() / max(self._duration_s, 1e-9), 1.0)
        return Panel(
            Group(facts, self._percentiles(), ProgressBar(total=1.0, completed=share)),
            title=self._title,
            subtitle=self._left(),
            title_align="left",
            subtitle_align="right",
        )

    def _percentiles(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 3))
        for heading in ("so far", "P50", "P95", "P99"):
            table.add_column(heading, justify="left" if heading == "so far" else "right")
        for row in self._latencies():
            table.add_row(row.name, *(seconds(row.at(percent)) for percent in (50, 95, 99)))
        return table

    @property
    def _state(self) -> LoadState:
        return self._load() or _NOTHING

    def _latencies(self) -> tuple[Distribution, ...]:
        latest = self._state.done[-SAMPLE:]
        return (
            distribution("time to first token", "s", map(ttft_s, latest)),
            distribution("time per output token", "s", map(tpot_s, latest)),
            distribution("end to end", "s", map(e2e_s, latest)),
        )

    def _failed(self) -> int:
        return sum(record.is_failure for record in self._state.done)

    def _elapsed_s(self) -> float:
        return self._clock() - self._state.started_s if self._state.started_s else 0.0

    def _left(self) -> str:
        if not self._state.started_s:
            return "starting"
        left_s = self._duration_s - self._elapsed_s()
        if left_s > 0:
            return f"{left_s:.0f} s of arrivals left"
        if not self._state.in_flight:
            return "complete"
        return f"draining {self._state.in_flight} in flight"
