"""What both progress views share: who draws, and that leaving ends it."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from tailrace.bench.drawing import Drawing


def drawing(lines, **console):
    return Drawing(
        Console(file=io.StringIO(), **console),
        panel=lambda: "panel",
        line=lambda: lines.append("line"),
        line_interval_s=0.005,
    )


def test_lines_are_printed_where_there_is_no_terminal_until_it_is_left():
    enough = threading.Event()

    class Lines(list):
        def append(self, line):
            super().append(line)
            if len(self) == 3:
                enough.set()

    before = set(threading.enumerate())
    with drawing(Lines(), force_terminal=False) as drawn:
        assert not drawn.is_live
        assert enough.wait(120)
    assert set(threading.enumerate()) <= before


def test_a_terminal_gets_a_panel_and_no_lines():
    lines = []
    with drawing(lines, force_terminal=True) as drawn:
        assert drawn.is_live
    assert lines == []


def test_an_error_inside_passes_and_ends_the_drawing():
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="inside"), drawing([], force_terminal=False):
        raise ValueError("inside")
    # Threads of earlier tests may end meanwhile; none is added.
    assert set(threading.enumerate()) <= before
