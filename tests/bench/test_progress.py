from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from tailrace.bench.load import LoadState
from tailrace.bench.progress import Progress, seconds
from tailrace.clock import VirtualClock
from tests.bench.test_stats import ok


def _state() -> LoadState:
    state = LoadState(total=5, started_s=100.0, sent=3, in_flight=1, chunks=9)
    state.done += [ok(), ok(1, status="http")]
    return state


def _progress(
    terminal: bool, now_s: float, state: LoadState | None = None
) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    progress = Progress(lambda: state, 60.0, VirtualClock(now_s), console, title="my run")
    return progress, stream


def test_the_line_says_how_the_run_stands():
    progress, _ = _progress(terminal=False, now_s=112.0, state=_state())
    line = progress.line()
    for words in ("12.0 s", "sent 3/5", "in flight 1", "done 2", "failed 1", "p50 2.00 s"):
        assert words in line
    assert "p95 failed" in line
    assert "48 s of arrivals left" in line


def test_after_the_last_arrival_it_says_draining():
    assert (
        "draining 1 in flight" in _progress(terminal=False, now_s=170.0, state=_state())[0].line()
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_it_draws_a_panel_on_a_terminal_and_lines_elsewhere(terminal):
    progress, stream = _progress(terminal, now_s=112.0, state=_state())
    with progress:
        pass
    shown = stream.getvalue()
    assert ("sent 3/5" in shown) != terminal
    assert "in flight" in shown
    assert ("╭" in shown) == terminal
    assert ("my run" in shown) == terminal


@pytest.mark.parametrize("state", [None, LoadState(total=5)])
def test_before_the_start_it_says_starting(state):
    line = _progress(terminal=False, now_s=112.0, state=state)[0].line()
    assert "starting" in line
    assert "0.0 s" in line


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (math.inf, "failed"), (0.0421, "42 ms"), (3.456, "3.46 s")]
)
def test_times_read_as_a_person_reads_them(value, shown):
    assert seconds(value) == shown
