"""How much memory this process may still take on its host: the machine's, and its control groups'.

A container sees the whole machine in /proc/meminfo, and is killed at its own limit. The limit may
stand at any group on the way up, and each group counts what all below it took, so the room is the
least of (limit - taken) along the path:

    /sys/fs/cgroup/                  the root, or what a container sees of it
      kubepods/                      memory.max, memory.high     version 2
        pod7/                        memory.limit_in_bytes       version 1, below memory/
          server/    <- this process

Files that were read count as taken until somebody needs the memory: the kernel drops their pages
then, so they are left out, as /proc/meminfo's MemAvailable leaves them out. After a checkpoint was
read they are most of what a group has taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """Memory that may still be taken, and what ends it."""

    free_bytes: int
    limit: str
    """What would be exceeded, for messages: a file and its value, or the machine."""

    def less(self, owed_bytes: int, to: str) -> Room:
        """Return this without what is promised to somebody who has not written to it yet."""
        words = f"{self.limit}, less {owed_bytes / 2**30:.2f} GiB of {to}"
        return Room(max(0, self.free_bytes - owed_bytes), words)


@dataclass(frozen=True)
class _Version:
    """How one version of control groups spells it."""

    limits: tuple[str, ...]
    taken: str
    droppable: tuple[str, ...]
    """Fields of memory.stat: pages of files, of the group and all below it."""


_V1 = _Version(
    limits=("memory.limit_in_bytes",),
    taken="memory.usage_in_bytes",
    droppable=("total_inactive_file", "total_active_file"),
)
_V2 = _Version(
    # Above memory.high a process is not killed but slowed down until it hardly runs.
    limits=("memory.max", "memory.high"),
    taken="memory.current",
    droppable=("inactive_file", "active_file"),
)


def host_room(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Room:
    """Return what this process may still take: the least of the machine's room and its groups'.

    Args:
        proc: Where the kernel shows processes.
        cgroups: Where control groups are mounted.
    """
    rooms = [_machine(proc), *_groups(proc, cgroups)]
    return min(rooms, key=lambda room: room.free_bytes)


def _machine(proc: Path) -> Room:
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return Room(int(value.split()[0]) << 10, "MemAvailable of this machine")
    pages = os.sysconf("SC_PHYS_PAGES")
    return Room(pages * os.sysconf("SC_PAGE_SIZE"), "the memory of this machine")


def _groups(proc: Path, cgroups: Path) -> Iterator[Room]:
    """Yield the room of every group that this process is in and that has a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mounts: tuple[Path, ...]
        if not controllers:
            version, mounts = _V2, (cgroups, cgroups / "unified")
        elif "memory" in controllers.split(","):
            version, mounts = _V1, (cgroups / "memory",)
        else:
            continue
        for mount in mounts:
            for folder in _upwards(mount, path):
                yield from _room_of(folder, version)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield a group's folder and all above it, up to the mount.

    Inside a container the path is often the host's, and the mount shows the group itself: folders
    that are not there are passed over by who reads them. A path out of the mount ("/../x": a
    process that is not of this namespace) has nothing to read below the mount.
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _room_of(folder: Path, version: _Version) -> Iterator[Room]:
    taken = _number(folder / version.taken)
    if taken is None:
        return
    kept = max(0, taken - _droppable(folder / "memory.stat", version))
    for name in version.limits:
        limit = _number(folder / name)
        if limit is not None:
            words = f"{folder / name} ({limit} bytes, {kept} taken)"
            yield Room(max(0, limit - kept), words)


def _number(file: Path) -> int | None:
    """Return a file's number; None where there is no such file or no limit ("max")."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _droppable(file: Path, version: _Version) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = (line.split() for line in lines)
    return sum(int(field[1]) for field in fields if field and field[0] in version.droppable)
