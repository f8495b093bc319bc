"""Can this client carry the load that is planned? Asked for a few seconds, before hours are spent.

A server of almost no cost (`loopback`) streams as many chunks a second, to as many streams, as the
run's peak will; it knows when it sent each chunk, and the client when it read it. What lies between
is what the client would add to every latency. Requests come at the planned rate beside, with
bodies of the planned size, since it is also long prompts that wear a client out.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.bench.load.fleet import Fleet, loader_for, processes_for
from tailrace.bench.load.loopback import CHUNKS_PER_S, PATTERNS, loopback
from tailrace.bench.load.shot import Shot
from tailrace.bench.stats import distribution, lag_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tailrace.bench.records import Record
    from tailrace.bench.stats import Distribution

SECONDS = 3.0
BOUND_S = 0.01
"""What the client may add at p99: a tenth of a first token that feels instant."""
RAMP_S = 0.5
"""Streams are opened over so long: a thousand connections at once are no steady load."""
BYTES_PER_TOKEN = 4.5
"""Of English text, for the size of a body."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The hardest moment of a run, for the client."""

    rate_rps: float
    streams: int
    """Answers in flight."""
    chunks_per_s: float = CHUNKS_PER_S
    """Of each stream."""
    body_bytes: int = 1000

    @classmethod
    def of(cls, rate_rps: float, *, input_tokens: float, output_tokens: float) -> Peak:
        """Return the peak of a request rate with these mean lengths, each token a chunk.

        As many streams as carry its tokens at 20 a second each: slower streams would be more, with
        as many chunks in all.
        """
        streams = max(round(rate_rps * output_tokens / CHUNKS_PER_S), 1)
        return cls(
            rate_rps=rate_rps, streams=streams, body_bytes=round(input_tokens * BYTES_PER_TOKEN)
        )


@dataclass(frozen=True)
class Carried:
    """How the client carried the peak."""

    peak: Peak
    processes: int
    added: Distribution
    """From a chunk's sending to its reading, s."""
    dispatch: Distribution
    """From a request's time to its sending, s."""
    cpu_us_per_chunk: float
    failed: int
    faults: tuple[str, ...]
    bound_s: float

    @property
    def chunks_per_s(self) -> float:
        """Chunks a second that were asked for."""
        return self.peak.streams * self.peak.chunks_per_s

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why runs at this peak would be invalid; empty means that the client can carry it."""
        what = (
            f"at {self.peak.rate_rps:g} requests/s and {self.peak.streams} streams "
            f"({self.chunks_per_s:,.0f} chunks/s) from {self.processes} client process"
            f"{'es' if self.processes > 1 else ''}"
        )
        found = [
            f"the client adds too much {what}: {name} at p99 {seen_s * 1e3:.1f} ms, bound "
            f"{self.bound_s * 1e3:g} ms; give it more cores (--processes), free the machine, or "
            "lower the peak"
            for name, seen_s in (
                ("reading chunks", self.added.at(99)),
                ("sending requests", self.dispatch.at(99)),
            )
            if seen_s is not None and seen_s > self.bound_s
        ]
        if self.failed:
            found.append(f"{self.failed} requests to a local server failed {what}")
        return (*self.faults, *found)

    def __str__(self) -> str:
        """Return it in one line."""
        added = self.added
        return (
            f"client check: {self.peak.streams} streams, {self.chunks_per_s:,.0f} chunks/s, "
            f"{self.peak.rate_rps:g} requests/s: added lag p50 {_ms(added.at(50))}, p99 "
            f"{_ms(added.at(99))} (bound {_ms(self.bound_s)}), {self.cpu_us_per_chunk:.0f} us of "
            f"CPU a chunk, {self.processes} process(es)"
        )


async def carry(
    peak: Peak,
    *,
    processes: int = 0,
    seconds: float = SECONDS,
    bound_s: float = BOUND_S,
    pattern: str = PATTERNS[0],
    servers: int = 1,
    always_apart: bool = False,
) -> Carried:
    """Drive a local server at the peak, and measure what the client adds.

    Args:
        peak: The planned load.
        processes: Client processes; 0 takes as many as a trial would.
        seconds: How long, besides the ramp.
        bound_s: What may be added at p99.
        pattern: The server's, one of loopback.PATTERNS.
        servers: Its processes.
        always_apart: Even a single client process is one of its own.

    Raises:
        ConfigError: A process did not start.
    """
    processes = processes or processes_for(peak.streams * peak.chunks_per_s, peak.rate_rps)
    shots = _shots(peak, seconds)
    with tempfile.TemporaryDirectory(prefix="tailrace-canary-") as name:
        async with loopback(
            Path(name), pattern=pattern, chunks_per_s=peak.chunks_per_s, processes=servers
        ) as server:
            timeout_s = RAMP_S + 10 * seconds + 30.0
            load = (
                Fleet(server.endpoint, shots, processes=processes, timeout_s=timeout_s)
                if always_apart
                else loader_for(server.endpoint, shots, processes=processes, timeout_s=timeout_s)
            )
            records = await load.run(asyncio.Event())
            added = list(_added_s(records, server.stamps_s(), load.state.started_s))
    return Carried(
        peak=peak,
        processes=processes,
        added=distribution("added lag", "ms", added),
        dispatch=distribution("dispatch lag", "ms", map(lag_s, records)),
        cpu_us_per_chunk=load.cpu_s / max(load.state.chunks, 1) * 1e6,
        failed=sum(not record.is_ok for record in records),
        faults=tuple(load.faults),
        bound_s=bound_s,
    )


def _shots(peak: Peak, seconds: float) -> list[Shot]:
    """Return the long streams, opened over the ramp, and the requests that come beside them."""
    opened_s = [RAMP_S * number / peak.streams for number in range(peak.streams)]
    long_ones = [
        (at_s, max(round((RAMP_S + seconds - at_s) * peak.chunks_per_s), 1), 1000)
        for at_s in opened_s
    ]
    beside = [
        (RAMP_S + number / peak.rate_rps, 1, peak.body_bytes)
        for number in range(round(peak.rate_rps * seconds))
    ]
    return [
        Shot(index, at_s, 1, tokens, _body(size, tokens), request_id=f"canary-{index}")
        for index, (at_s, tokens, size) in enumerate((*long_ones, *beside))
    ]


def _body(size: int, tokens: int) -> bytes:
    return json.dumps({"prompt": "a" * size, "max_tokens": tokens, "stream": True}).encode()


def _added_s(
    records: Sequence[Record], sent_s: dict[str, list[float]], started_s: float
) -> Iterable[float]:
    """Yield each chunk's time from sending to reading, once every stream is open."""
    for record in records:
        for read_s, stamp_s in zip(record.chunk_s, sent_s.get(record.request_id, ()), strict=False):
            if read_s >= RAMP_S:
                yield read_s + started_s - stamp_s


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.2f} ms"
