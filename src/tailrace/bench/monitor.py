"""What server, GPUs, processes and client do over a trial, once a second, in trial time.

Each source has a task of its own, so that a server that is slow to answer leaves no gap in the
others. What may block (NVML, /proc) is read in a thread: the client that is being timed may share
this event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from tailrace.bench import process_tree
from tailrace.bench.machine import CpuTimes, cpu_times
from tailrace.bench.scrape import Scrape
from tailrace.clock import monotonic
from tailrace.errors import ConfigError
from tailrace.telemetry.gpu import Gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tailrace.bench.metrics_source import Figures, MetricsSource
    from tailrace.clock import Clock

INTERVAL_S = 1.0
LAST_READ_S = 2.0
"""What a source may take for what it has not yet told when the trial is over."""


class Reading(msgspec.Struct):
    """Some figures at one moment."""

    source: str
    """server, gpu, process or client."""
    at_s: float
    """From the trial's start."""
    values: dict[str, float]


class Monitor:
    """Reads everything that can be read of one server and of this machine.

    Args:
        source: Where the server's metrics come from; None reads none.
        pid: The server's first process, where it is ours.
        gpus: Whose figures to read; one without NVML reads nothing.
        devices: Indices of the GPUs that the server uses; None for all.
        constants: Stand in every reading of the server that has no such name of its own.
        interval_s: Between two readings of the machine.
    """

    def __init__(
        self,
        source: MetricsSource | None,
        *,
        pid: int | None = None,
        gpus: Gpus | None = None,
        devices: frozenset[int] | None = None,
        constants: Mapping[str, float] | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._source = source
        self._pid = pid
        self._gpus = Gpus() if gpus is None else gpus
        self._devices = devices
        self._constants = dict(constants or {})
        self._interval_s = interval_s
        self._has_gpus = False

    async def watch(self, elapsed_s: Clock, on_reading: Callable[[Reading], None]) -> None:
        """Read until cancelled.

        Args:
            elapsed_s: Tells the seconds since the trial's start.
            on_reading: Gets each reading, in this event loop.
        """
        self._has_gpus = bool(await asyncio.to_thread(self._gpu_values))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_client(elapsed_s, on_reading))
            if self._source is not None:
                group.create_task(self._watch_server(self._source, elapsed_s, on_reading))
            if self._has_gpus:
                group.create_task(self._watch_gpus(elapsed_s, on_reading))
            if self._pid is not None:
                group.create_task(self._watch_processes(self._pid, elapsed_s, on_reading))

    async def _watch_server(
        self, source: MetricsSource, elapsed_s: Clock, on_reading: Callable[[Reading], None]
    ) -> None:
        def pass_on(found: list[Figures]) -> None:
            for figures in found:
                at_s = elapsed_s() - figures.age_s
                if figures.server:
                    values = {**self._constants, **figures.server}
                    on_reading(Reading("server", at_s, values))
                # What we see ourselves of GPUs and processes comes oftener, and says more.
                if figures.gpu and not self._has_gpus:
                    on_reading(Reading("gpu", at_s, dict(figures.gpu)))
                if figures.process and self._pid is None:
                    on_reading(Reading("process", at_s, dict(figures.process)))

        try:
            while True:
                pass_on(await source.read())
                await asyncio.sleep(source.interval_s)
        except asyncio.CancelledError:
            # A collector lags: what it has read by now belongs to the trial.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_READ_S):
                    pass_on(await source.read())
            raise

    async def _watch_gpus(self, elapsed_s: Clock, on_reading: Callable[[Reading], None]) -> None:
        while True:
            at_s = elapsed_s()
            values = await asyncio.to_thread(self._gpu_values)
            if values:
                on_reading(Reading("gpu", at_s, values))
            await asyncio.sleep(self._interval_s)

    def _gpu_values(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for gpu in self._gpus.read():
            if self._devices is not None and gpu.index not in self._devices:
                continue
            named = {
                "utilisation": gpu.busy_share,
                "memory_bytes": gpu.memory_used_bytes,
                "power_w": gpu.power_w,
                "sm_clock_mhz": gpu.sm_clock_mhz,
                "held_back": gpu.is_held_back,
            }
            known = {f"gpu{gpu.index}_{name}": value for name, value in named.items()}
            found |= {name: float(value) for name, value in known.items() if value is not None}
        return found

    async def _watch_processes(
        self, pid: int, elapsed_s: Clock, on_reading: Callable[[Reading], None]
    ) -> None:
        before: tuple[float, float] | None = None
        while True:
            at_s = elapsed_s()
            usage, kills = await asyncio.to_thread(_of_processes, pid)
            if usage is not None:
                values = {
                    "rss_bytes": float(usage.rss_bytes),
                    "processes": float(usage.processes),
                }
                now = (monotonic(), usage.cpu_s)
                if before is not None and now[0] > before[0]:
                    # A process that ended takes its time along: never below nothing.
                    used_s = max(now[1] - before[1], 0.0)
                    values["cpu_cores"] = used_s / (now[0] - before[0])
                before = now
                if kills is not None:
                    values["oom_kills_total"] = float(kills)
                on_reading(Reading("process", at_s, values))
            await asyncio.sleep(self._interval_s)

    async def _watch_client(self, elapsed_s: Clock, on_reading: Callable[[Reading], None]) -> None:
        before = cpu_times()
        while True:
            await asyncio.sleep(self._interval_s)
            # In a thread: the kernel counts every core's ticks for the first line of the file.
            now = await asyncio.to_thread(cpu_times)
            values = _cpu_shares(before, now)
            if values:
                on_reading(Reading("client", elapsed_s(), values))
            before = now


def _of_processes(pid: int) -> tuple[process_tree.Usage | None, int | None]:
    return process_tree.usage(pid), process_tree.oom_kills(os.getpid())


def _cpu_shares(before: CpuTimes | None, after: CpuTimes | None) -> dict[str, float]:
    if before is None or after is None or after.total <= before.total:
        return {}
    total = after.total - before.total
    return {
        "cpu_steal": (after.stolen - before.stolen) / total,
        "cpu_busy": 1.0 - (after.idle - before.idle) / total,
    }


def to_line(reading: Reading) -> bytes:
    """Return one line of `monitor.jsonl`."""
    return msgspec.json.encode(reading) + b"\n"


def read_readings(file: Path) -> dict[str, Scrape]:
    """Return the readings of a `monitor.jsonl` by source; empty where there is no such file.

    A last line that was cut off, as by a crash, is left out.

    Raises:
        ConfigError: The file holds something else.
    """
    found: dict[str, Scrape] = {}
    data = file.read_bytes() if file.exists() else b""
    readings: list[Reading] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            readings.append(msgspec.json.decode(line, type=Reading))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{file}, line {number}: not a reading ({error})") from error
    # Sources that lag tell of several moments at once, and out of step with the others.
    for reading in sorted(readings, key=lambda reading: reading.at_s):
        found.setdefault(reading.source, Scrape()).add(reading.at_s, reading.values)
    return found
