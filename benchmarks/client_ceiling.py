"""The client's ceiling: how many streams and chunks a second it reads with little added lag.

    python benchmarks/client_ceiling.py [--processes 1 2] [--seconds 4] [--out ceiling.json]

A loopback server in processes of its own (`tailrace.bench.load.loopback`) sends 20 chunks a second
to each stream, about 250 bytes each, and knows the monotonic stamp at which it handed each one to
the kernel. Added lag is the client's read stamp less that stamp: it holds what the client adds to
every latency it reports, and the loopback device's few microseconds. Two patterns: `steps`, where
all streams get their chunk in one burst, as an engine's step makes it and the harder one; and
`spread`, where each stream keeps its own phase. The client is the harness's own, in processes of
its own, and does all that it does in a run: HTTP, SSE, JSON, the record.

Streams are added until the 99th percentile of the added lag passes the widest bound; the highest
count within each bound is then narrowed down by bisection. A count that breaks the tightest bound
is measured again, up to `--tries` times, and its calmest measurement counts: other work on the
machine can only add. The server's CPU counts against the machine, so with two cores the client has
one to itself. FIGURES MEAN SOMETHING ON A QUIET MACHINE ONLY; the load average is printed beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tailrace.bench.load.canary import Carried, Peak, carry
from tailrace.bench.load.loopback import CHUNKS_PER_S, PATTERNS
from tailrace.bench.machine import describe

BOUNDS_S = (0.001, 0.005)
LADDER = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BISECTIONS = 3


@dataclass(frozen=True)
class Point:
    """One measurement."""

    pattern: str
    processes: int
    streams: int
    chunks_per_s: float
    added_p50_ms: float
    added_p95_ms: float
    added_p99_ms: float
    cpu_us_per_chunk: float
    failed: int


async def calmest(pattern: str, processes: int, streams: int, options: argparse.Namespace) -> Point:
    """Return the least lag of several measurements of so many streams."""
    found: list[Point] = []
    while len(found) < options.tries and not (found and not is_beyond(found[-1], min(BOUNDS_S))):
        found.append(await measure(pattern, processes, streams, options))
    return min(found, key=lambda point: (point.failed, point.added_p99_ms))


async def measure(pattern: str, processes: int, streams: int, options: argparse.Namespace) -> Point:
    """Drive so many streams and say what the client added."""
    carried: Carried = await carry(
        Peak(rate_rps=1.0, streams=streams),
        processes=processes,
        seconds=options.seconds,
        pattern=pattern,
        servers=options.servers,
        always_apart=True,
    )
    p50, p95, p99 = (round((carried.added.at(p) or 0.0) * 1e3, 3) for p in (50, 95, 99))
    return Point(
        pattern=pattern,
        processes=processes,
        streams=streams,
        chunks_per_s=streams * CHUNKS_PER_S,
        added_p50_ms=p50,
        added_p95_ms=p95,
        added_p99_ms=p99,
        cpu_us_per_chunk=round(carried.cpu_us_per_chunk, 1),
        failed=carried.failed,
    )


async def climb(
    pattern: str, processes: int, options: argparse.Namespace, console: Console
) -> list[Point]:
    """Return every point that was measured of one client, in order of streams."""
    points: list[Point] = []

    async def at(streams: int) -> Point:
        found = next((point for point in points if point.streams == streams), None)
        if found is None:
            found = await calmest(pattern, processes, streams, options)
            points.append(found)
            console.print(row(found), highlight=False, soft_wrap=True)
        return found

    for streams in LADDER:
        if is_beyond(await at(streams), max(BOUNDS_S)) and streams >= options.at_least:
            break
    for bound_s in BOUNDS_S:
        for _ in range(BISECTIONS):
            within = highest(points, bound_s)
            above = [p.streams for p in points if p.streams > (within.streams if within else 0)]
            if within is None or not above or min(above) - within.streams <= within.streams // 8:
                break
            await at((within.streams + min(above)) // 2)
    return sorted(points, key=lambda point: point.streams)


def is_beyond(point: Point, bound_s: float) -> bool:
    """Whether a point breaks the bound."""
    return point.failed > 0 or point.added_p99_ms > bound_s * 1e3


def highest(points: list[Point], bound_s: float) -> Point | None:
    """Return the most streams that were within the bound.

    A smaller count may have broken it: other work only adds, so the best that was seen is the
    client's.
    """
    within = [point for point in points if not is_beyond(point, bound_s)]
    return max(within, key=lambda point: point.streams, default=None)


def row(point: Point) -> str:
    """Return a measurement as a line."""
    return (
        f"  {point.pattern:6} {point.processes} client  {point.streams:5} streams "
        f"{point.chunks_per_s:7,.0f} chunks/s  added p50 {point.added_p50_ms:7.2f}  p95 "
        f"{point.added_p95_ms:7.2f}  p99 {point.added_p99_ms:7.2f} ms  "
        f"{point.cpu_us_per_chunk:5.1f} us CPU/chunk"
        + (f"  {point.failed} FAILED" if point.failed else "")
    )


def table(points: list[Point]) -> Table:
    """Return the ceilings."""
    found = Table(title="The client's ceiling", title_justify="left")
    for name in (
        "pattern",
        "client processes",
        "added lag p99",
        "streams",
        "chunks/s",
        "CPU/chunk",
    ):
        found.add_column(name, justify="left" if name == "pattern" else "right")
    for pattern, processes in dict.fromkeys((p.pattern, p.processes) for p in points):
        mine = [p for p in points if (p.pattern, p.processes) == (pattern, processes)]
        for bound_s in BOUNDS_S:
            best = highest(mine, bound_s)
            found.add_row(
                pattern,
                str(processes),
                f"<= {bound_s * 1e3:g} ms",
                f"{best.streams:,}" if best else f"under {mine[0].streams}",
                f"{best.chunks_per_s:,.0f}" if best else "-",
                f"{best.cpu_us_per_chunk:.0f} us" if best else "-",
            )
    return found


async def main(options: argparse.Namespace) -> None:
    """Measure everything, print the table, write the file."""
    console = Console()
    machine = describe()
    for label, value in machine.items():
        console.print(f"{label}: {value}", highlight=False)
    points: list[Point] = []
    for pattern in options.patterns:
        for processes in options.processes:
            points += await climb(pattern, processes, options, console)
    console.print(table(points))
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    console.print(f"load average at the end: {load}", highlight=False)
    if options.out is not None:
        content = {"machine": machine, "points": [asdict(point) for point in points]}
        options.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of the client")
    parser.add_argument("--servers", type=int, default=1, help="processes of the server")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--tries", type=int, default=3, help="most measurements of one count")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--at-least", type=int, default=0, help="streams to go to in any case")
    parser.add_argument("--out", type=Path, help="a JSON file for every measurement")
    asyncio.run(main(parser.parse_args()))
