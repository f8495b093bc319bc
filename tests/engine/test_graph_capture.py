"""What surrounds a capture, on a device that writes down what is asked of it."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch

from tailrace.engine.graph_capture import captured, quietly


@pytest.fixture
def asked(monkeypatch):
    """Return what was asked of the device, in order."""
    words = []

    class Graph:
        def capture_begin(self, pool):
            words.append(f"begin in {pool}")

        def capture_end(self):
            words.append("end")

    @contextmanager
    def on(stream):
        words.append(f"on {stream}")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", on)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: words.append(name))
    return words


def test_memory_is_given_back_once_for_all_graphs_and_no_garbage_is_collected(asked):
    with quietly():
        assert not gc.isenabled()
        found = [captured(lambda i=i: asked.append(i) or i, "side", "pool")[1] for i in range(2)]
    assert gc.isenabled()
    assert found == [0, 1]
    one = ["on side", "begin in pool", 0, "end"]
    assert asked == ["synchronize", "empty_cache", *one, *one[:2], 1, "end"]


def test_a_capture_that_fails_is_ended_and_garbage_is_collected_again(asked):
    def fails():
        raise torch.OutOfMemoryError("no")

    with pytest.raises(torch.OutOfMemoryError), quietly():
        captured(fails, "side", "pool")
    assert asked[-1] == "end"
    assert gc.isenabled()


def test_garbage_that_nobody_collected_before_is_left_alone_after(asked):
    gc.disable()
    try:
        with quietly():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
