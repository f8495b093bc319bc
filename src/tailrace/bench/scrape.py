"""The server's own gauges over the run, read from /metrics once a second.

Engines name the same thing differently; `GAUGES` says which names mean what. A server without
/metrics is no error: the report then shows the client's view alone.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailrace.bench.wire import Endpoint, WireError, fetch

if TYPE_CHECKING:
    from tailrace.clock import Clock

INTERVAL_S = 1.0

GAUGES = {
    "running": ("num_requests_running", "requests_running", "running_requests", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "requests_waiting", "waiting_requests", "num_queue_reqs"),
    "kv_usage": ("kv_cache_usage_ratio", "kv_usage_ratio", "kv_cache_usage_perc", "token_usage"),
}
"""Our name to the families' names, without the engine's prefix (`vllm:`, `sglang:`, ...)."""

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)")


@dataclass
class Scrape:
    """Readings of one run."""

    at_s: list[float] = field(default_factory=list)
    """Seconds from the run's start."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """One list for each gauge that the server has, as long as `at_s`; NaN where one was missing."""

    def add(self, at_s: float, reading: dict[str, float]) -> None:
        """Keep one reading."""
        for name in reading.keys() - self.values.keys():
            self.values[name] = [math.nan] * len(self.at_s)
        self.at_s.append(at_s)
        for name, values in self.values.items():
            values.append(reading.get(name, math.nan))


def parse(text: str) -> dict[str, float]:
    """Return the known gauges of an exposition; several label sets of one family are summed."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        name = sample and _meaning(sample[1])
        if sample and name:
            try:
                found[name] = found.get(name, 0.0) + float(sample[2])
            except ValueError:  # a malformed line says nothing
                continue
    return found


def _meaning(family: str) -> str | None:
    bare = family.partition(":")[2] or family.partition("_")[2]
    for name, families in GAUGES.items():
        if bare in families:
            return name
    return None


async def watch(endpoint: Endpoint, scrape: Scrape, elapsed_s: Clock) -> None:
    """Read until cancelled, or until the server turns out to have no /metrics.

    Args:
        endpoint: The server.
        scrape: Gets the readings.
        elapsed_s: Tells the seconds since the run's start.
    """
    while True:
        at_s = elapsed_s()
        try:
            answer = await fetch(endpoint, "GET", "/metrics", timeout_s=10.0)
        except (OSError, WireError):
            # A busy server may miss a reading; the gap shows in the picture.
            await asyncio.sleep(INTERVAL_S)
            continue
        if answer.status != 200:
            return
        scrape.add(at_s, parse(answer.body.decode("utf-8", "replace")))
        await asyncio.sleep(INTERVAL_S)
