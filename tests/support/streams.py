"""CUDA's streams for machines without a GPU: they write down what is queued and what waits."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


class Stream:
    """A stream by its name; `words` are those of all streams, in order."""

    def __init__(self, name: str, words: list[str]) -> None:
        self.name, self.words = name, words

    def wait_stream(self, other: Stream) -> None:
        self.words.append(f"{self.name} waits for {other.name}")


def written_streams(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Stream]:
    """Return streams of which torch takes the first for the current one."""
    words: list[str] = []
    streams = [Stream(name, words) for name in names]
    current = streams[:1]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return streams
