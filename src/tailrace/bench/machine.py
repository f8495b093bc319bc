"""The machine a run was made on: what a reader needs to judge its figures."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MEMINFO = Path("/proc/meminfo")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def describe() -> dict[str, str]:
    """Return label and value pairs; what this system does not tell is left out."""
    found = {
        "Client machine": f"{_cpu_model()}, {_cores()} of {os.cpu_count()} CPUs usable",
        "Memory": _memory(),
        "CPU governor": governor(),
        "Load average at start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "System": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
        "Tailrace": version("tailrace"),
    }
    return {label: value for label, value in found.items() if value}


def governor() -> str:
    """Return the CPU frequency governor's name, empty where the system does not tell."""
    return _first_line(GOVERNOR)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _first_line(file: Path) -> str:
    try:
        return file.read_text().partition("\n")[0].strip()
    except OSError:  # not every system has every file
        return ""


def _field(file: Path, name: str) -> str:
    try:
        lines = file.read_text().splitlines()
    except OSError:  # not every system has every file
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


def _cpu_model() -> str:
    return _field(CPUINFO, "model name") or platform.processor() or "unknown CPU"


def _memory() -> str:
    kib = _field(MEMINFO, "MemTotal").removesuffix("kB").strip()
    return f"{int(kib) / 2**20:.1f} GiB" if kib.isdigit() else ""


@dataclass(frozen=True)
class CpuTimes:
    """The kernel's count of CPU time, in ticks since boot."""

    total: int
    stolen: int
    idle: int = 0
    """Of which nothing ran, whether or not something waited for a disk."""


def cpu_times() -> CpuTimes | None:
    """Read the counters of the CPUs that we may use, or None where the system has none.

    In a container the kernel's first line is of the whole host. Where a CPU of ours has no line
    the file is not the kernel's own but made for us, and its first line is ours.
    """
    counted = _cpu_lines()
    ours = [counted.get(f"cpu{number}") for number in os.sched_getaffinity(0)]
    known = [ticks for ticks in ours if ticks is not None]
    if len(known) < len(ours):
        known = [counted["cpu"]] if "cpu" in counted else []
    if not known:
        return None
    ticks = [sum(column) for column in zip(*known, strict=True)]
    return CpuTimes(sum(ticks), ticks[7], ticks[3] + ticks[4])


def _cpu_lines() -> dict[str, list[int]]:
    """Return, by CPU, the ticks of user nice system idle iowait irq softirq steal.

    Guest time is within user time. The line "cpu" is the sum of all.
    """
    try:
        lines = STAT.read_text().splitlines()
    except OSError:  # not every system has the file
        return {}
    fields = [line.split() for line in lines if line.startswith("cpu")]
    return {name: list(map(int, ticks[:8])) for name, *ticks in fields if len(ticks) >= 8}


def steal_share(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Return the share of CPU time taken by other guests between two readings."""
    if before is None or after is None or after.total <= before.total:
        return None
    return (after.stolen - before.stolen) / (after.total - before.total)


def others_share(
    before: CpuTimes | None, after: CpuTimes | None, own_s: float | None
) -> float | None:
    """Return the share of CPU time that neither we nor other guests used, nor was idle.

    Args:
        before: At the start.
        after: At the end.
        own_s: CPU seconds in between of what is measured and what measures it; None: not known.
    """
    if before is None or after is None or own_s is None or after.total <= before.total:
        return None
    idle, stolen = after.idle - before.idle, after.stolen - before.stolen
    total = after.total - before.total
    return max((total - idle - stolen - own_s * TICKS_PER_S) / total, 0.0)
