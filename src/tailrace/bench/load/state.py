"""What a watcher may read while the run goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.bench.records import Record


@dataclass
class LoadState:
    """The load so far, over all client processes."""

    total: int
    started_s: float = 0.0
    """Monotonic seconds; 0 before the start."""
    sent: int = 0
    in_flight: int = 0
    done: list[Record] = field(default_factory=list)
    chunks: int = 0
    """Chunks with text, over all requests."""
    has_started: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, at_s: float) -> None:
        """Say that the run's second 0 is this reading of the clock."""
        self.started_s = at_s
        self.has_started.set()
