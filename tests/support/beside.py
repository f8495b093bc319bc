"""Kernels are compiled ahead in the time that the workers of a run of tests leave.

Many tests wait: for a server that starts, for a load that has its length. Three minutes of
compiling pass there, at the priority that takes only what nobody else wants: whoever wakes up runs
at once, and no test that watches the clock can tell. Begun once a worker has collected the test
that reads the results, which comes last; it compiles itself what is not there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

READER = "tests/kernels/test_compile_ahead.py"
FOLDER = "compiled"
"""Of the results, below what all workers of the run share."""
KINDS = ("sm_90", "sm_89", "sm_80")

_started: list[subprocess.Popen[bytes]] = []


def start(root: Path, shared: Path, cache: Path) -> None:
    """Begin, once a run.

    Args:
        root: Of the repository.
        shared: A folder of this run alone.
        cache: Triton's, which knows each kernel by its source.
    """
    if _started or importlib.util.find_spec("triton") is None:
        return
    (shared / FOLDER).mkdir(exist_ok=True)
    _started.extend(
        subprocess.Popen(
            [
                sys.executable, "-m", "tests.kernels.compile_ahead", kind,
                "--into", str(shared / FOLDER), "--idle",
            ],
            cwd=root,
            env=environment(cache),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for kind in KINDS
    )  # fmt: skip


def environment(cache: Path) -> dict[str, str]:
    """Return that of a process that compiles: kernels declared in it are not interpreted.

    Nor does their code say which line it is of: a tenth of the time, and the same registers.
    """
    inherited = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    return {**inherited, "TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1"}


def hurry() -> None:
    """Compile at the priority of all others, where that is allowed: somebody waits for it now."""
    for process in _started:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))


def end() -> None:
    """End what still runs: nobody is left to read it."""
    for process in _started:
        process.kill()
        process.wait()
    _started.clear()
