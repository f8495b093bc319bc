"""Something that goes on, drawn: a panel on a terminal, plain lines elsewhere.

Drawing happens in a thread of its own, so that a slow terminal never delays a request.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rich.live import Live

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from rich.console import Console, RenderableType

REFRESH_PER_S = 2


class Drawing:
    """Draws from `with` to its end.

    Args:
        console: Where to.
        panel: Returns what a terminal shows; called from another thread.
        line: Prints what other outputs get; likewise.
        line_interval_s: Between two lines.
    """

    def __init__(
        self,
        console: Console,
        *,
        panel: Callable[[], RenderableType],
        line: Callable[[], None],
        line_interval_s: float,
    ) -> None:
        self._line = line
        self._line_interval_s = line_interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                get_renderable=panel,
                console=console,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
            )

    @property
    def is_live(self) -> bool:
        """Whether a panel is drawn."""
        return self._live is not None

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._live is not None:
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._print_lines, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        self._stop.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def _print_lines(self) -> None:
        while not self._stop.wait(self._line_interval_s):
            self._line()
