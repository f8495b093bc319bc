"""The process that compiles kernels for a start, as the start sees it: begun, and ended.

It imports torch and the kernels before it can be of use, as long as the start does itself. So
whether there will be work for it is asked before either begins: neither torch nor Triton is
imported here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Sequence

log = structlog.get_logger("tailrace.kernels")

COMMAND = (sys.executable, "-m", "tailrace.kernels.compile_worker")
MOST_WORKERS = 15
"""That one process forks."""
_COLD_ENTRIES = 32
"""In Triton's cache on disk; one that has fewer will lack most of a model's kernels."""


def own_cores() -> list[int]:
    """Return the process's cores; by its id those of the main thread, as others may be bound."""
    return sorted(os.sched_getaffinity(os.getpid()))


def most_workers(cores: Sequence[int]) -> int:
    """Return how many may compile at once; one core is the start's own."""
    return min(len(cores) - 1, MOST_WORKERS)


def begin_if_cold() -> subprocess.Popen[bytes] | None:
    """Begin one where a start will lack most of its kernels; None: it will not, or it cannot be."""
    if find_spec("triton") is None:
        return None
    cores = own_cores()
    return begin(COMMAND, cores) if most_workers(cores) > 1 and cache_is_cold() else None


def begin(command: Sequence[str], cores: Sequence[int]) -> subprocess.Popen[bytes] | None:
    """Begin one on these cores, of which this thread may have one; None: it cannot be."""
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        log.warning("no_compile_worker", reason=str(error))
        return None
    try:
        return subprocess.Popen(  # noqa: S603 - this package's own module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # so that it ends with all that it has forked
        )
    except OSError as error:
        log.warning("no_compile_worker", reason=str(error))
    finally:
        os.sched_setaffinity(0, own)
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End one and what it has forked, and forget its pipes; again is as good as once."""
    status = process.poll()
    if status is None or status < 0:  # else it has waited for all that it forked
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def cache_folder() -> Path:
    """Return where Triton keeps what it compiled: its `knobs.cache.dir`, which takes its import."""
    named = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))  # noqa: PTH111 - may have none
    return Path(home, ".triton", "cache") if named is None else Path(named)


def cache_is_cold() -> bool:
    """Whether Triton's cache on disk has next to nothing, or cannot be read (`is_on_disk` says so).

    Entries are folders; who was killed while it compiled left empty ones, which count for nothing.
    It is counted no further than it takes to tell.
    """
    try:
        with os.scandir(cache_folder()) as entries:
            held = (entry for entry in entries if _holds_something(entry))
            found = sum(1 for _ in islice(held, _COLD_ENTRIES))
    except OSError:
        return True
    return found < _COLD_ENTRIES


def _holds_something(entry: os.DirEntry[str]) -> bool:
    try:
        with os.scandir(entry) as files:
            return next(files, None) is not None
    except NotADirectoryError:
        return True


def _environment() -> dict[str, str]:
    """Return a worker's: without a GPU to take memory of, and bound to no core by OpenMP."""
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_CPU_AFFINITY"}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_PROC_BIND": "false", "OMP_NUM_THREADS": "1"}
