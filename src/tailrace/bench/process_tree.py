"""A process that we started, with everything below it: its output, its use, its end.

Servers fork: a front end, engines, workers. They share the session that the first one was given,
so one signal reaches them all; those that left it are found by descent before the first one ends.
Should this process die without a word, SIGKILL included, a guard ends them: a second little
process that waits for its input to close, which happens when we are gone, however that came about.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.clock import monotonic
from tailrace.telemetry.process import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
POLL_S = 0.05
STRAGGLERS_S = 5.0
"""What the rest of the tree gets at least to follow the first process, before SIGKILL."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_GUARD = """
import os, signal, sys
sys.stdin.buffer.read()
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
"""


@dataclass(frozen=True)
class Member:
    """One process; its start tells it from a later one with the same number."""

    pid: int
    parent: int
    session: int
    state: str
    started_ticks: int
    cpu_s: float
    """User and system time so far."""


@dataclass(frozen=True)
class Usage:
    """What a tree uses at one moment."""

    processes: int
    rss_bytes: int
    """Summed; pages that several processes share count several times."""
    cpu_s: float
    """Of those that live now."""


class ProcessTree:
    """A command in a session of its own.

    Args:
        command: What to run, without a shell.
        log_file: Gets its output, appended.
        env: Its whole environment; None inherits ours.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, log_file: Path, env: Mapping[str, str] | None = None
    ) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  # the user's own command, no shell
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                # A Ctrl-C in the terminal is for the client; the server is told by SIGTERM.
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._guard = _start_guard(self.pid)

    def poll(self) -> int | None:
        """Return the exit status of the first process, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the first process and return its status.

        Raises:
            TimeoutError: It still runs.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"process {self.pid} runs on after {timeout_s:g} s") from error

    def send_signal(self, number: int) -> None:
        """Signal the first process alone; nothing happens where it has ended."""
        self._process.send_signal(number)

    def stop(self, grace_s: float) -> int | None:
        """End it by SIGTERM, then what is left of the tree, and return the exit status.

        The first process is told alone, since servers end their own workers in order; what it
        leaves running, as a shell does, is told after it.

        Returns None where it took SIGKILL to end the first process.
        """
        tree = members(self.pid)
        deadline_s = monotonic() + grace_s
        self._process.terminate()
        try:
            status: int | None = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            status = None
        else:
            self._end_stragglers(tree, max(deadline_s, monotonic() + STRAGGLERS_S))
        self._end(tree)
        return status

    def kill(self) -> None:
        """End the whole tree at once."""
        self._end(members(self.pid))

    def _end_stragglers(self, tree: Iterable[Member], deadline_s: float) -> None:
        for member in self._left(tree):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGTERM)
        self._await_end(tree, deadline_s)

    def _await_end(self, tree: Iterable[Member], deadline_s: float) -> None:
        # Memory of the machine and of its GPUs is free only when the last of them has ended.
        while self._left(tree) and monotonic() < deadline_s:
            time.sleep(POLL_S)

    def _left(self, tree: Iterable[Member]) -> list[Member]:
        """Return those of the tree, or of the session, that still run."""
        now = {member.pid: member for member in _all_processes()}
        known = {(member.pid, member.started_ticks) for member in tree}
        return [
            member
            for member in now.values()
            if (member.session == self.pid or (member.pid, member.started_ticks) in known)
            and member.state not in {"Z", "X"}
        ]

    def _end(self, tree: Iterable[Member]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for member in self._left(tree):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        self._process.wait()
        self._await_end(tree, monotonic() + STRAGGLERS_S)
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()


def _start_guard(pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  # our own program
        [sys.executable, "-I", "-S", "-c", _GUARD, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def members(pid: int) -> list[Member]:
    """Return a process and all below it; empty where it is gone, or the system has no /proc."""
    everyone = list(_all_processes())
    below: dict[int, list[Member]] = {}
    for member in everyone:
        below.setdefault(member.parent, []).append(member)
    found = [member for member in everyone if member.pid == pid]
    for member in found:  # grows while it is walked
        found += below.get(member.pid, [])
    return found


def usage(pid: int) -> Usage | None:
    """Return what a process and all below it use, or None where it is gone."""
    tree = [member for member in members(pid) if member.state not in {"Z", "X"}]
    if not tree:
        return None
    resident = (resident_bytes(member.pid) for member in tree)
    return Usage(
        processes=len(tree),
        rss_bytes=sum(size for size in resident if size is not None),
        cpu_s=sum(member.cpu_s for member in tree),
    )


def _all_processes() -> Iterable[Member]:
    if not PROC.is_dir():
        return
    for name in os.listdir(PROC):  # noqa: PTH208  # a Path for each of thousands is slow
        if name.isdigit() and (member := _member(int(name))) is not None:
            yield member


def _member(pid: int) -> Member | None:
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it ended meanwhile
        return None
    # The name, in brackets, may hold blanks and brackets: what follows the last one is regular.
    rest = text.rpartition(")")[2].split()
    if len(rest) < 20:
        return None
    return Member(
        pid=pid,
        parent=int(rest[1]),
        session=int(rest[3]),
        state=rest[0],
        started_ticks=int(rest[19]),
        cpu_s=(int(rest[11]) + int(rest[12])) / TICKS_PER_S,
    )


def oom_kills(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return how many processes the kernel has killed for memory in the control group of `pid`.

    None where the group has no such counter, as outside of containers and services.
    """
    for file in _memory_files(pid, proc, cgroups):
        try:
            lines = file.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.strip().isdigit():
                return int(count)
    return None


def _memory_files(pid: int, proc: Path, cgroups: Path) -> Iterable[Path]:
    """Yield where the counter may stand: of version 2, then of version 1.

    Inside a container the group's path is often the host's, and the mount shows the group itself.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers:
            yield cgroups / inside / "memory.events"
            yield cgroups / "memory.events"
        elif "memory" in controllers.split(","):
            yield cgroups / "memory" / inside / "memory.oom_control"
            yield cgroups / "memory" / "memory.oom_control"
