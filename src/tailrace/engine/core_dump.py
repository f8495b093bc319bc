"""A core dump of the GPU, asked of CUDA's driver while a kernel runs and does not end.

The driver offers it to processes that were started with CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1: it
waits at a named pipe, and a byte written there has it write what every warp is at, for cuda-gdb.
Unless CUDA_COREDUMP_GENERATION_FLAGS has skip_abort, it then ends the process itself (SIGABRT).
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = structlog.get_logger("tailrace.engine")

SWITCH = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"
PIPE = "CUDA_COREDUMP_PIPE"
_USUAL_PIPE = "corepipe.cuda.%h.%p"
WAIT_S = 30.0
"""What the driver is given to write it: seconds suffice where the GPU's memory is left out
(CUDA_COREDUMP_GENERATION_FLAGS), and nothing would for all of it."""


def ask_for_core_dump(
    environ: Mapping[str, str] = os.environ, *, pause: Callable[[float], object] = time.sleep
) -> None:
    """Ask for a core dump where this process was started for it, and give it time.

    What stands in the way is logged: there is nobody to raise it to.

    Args:
        environ: The environment that the process was started with.
        pause: Waits so many seconds.
    """
    if environ.get(SWITCH) != "1":
        return
    pattern = environ.get(PIPE) or _USUAL_PIPE
    try:
        pipe = find_pipe(pattern)
        _write_to(pipe)
    except OSError as error:
        log.error("gpu_core_dump_failed", pipe=pattern, error=str(error))  # noqa: TRY400 -- no bug
        return
    log.warning("gpu_core_dump_asked", pipe=str(pipe), wait_s=WAIT_S)
    pause(WAIT_S)


def find_pipe(pattern: str) -> Path:
    """Return the pipe that a name means for this process; of several (%t, a time) the latest.

    Args:
        pattern: As the driver takes it: %h is the host's name, %p the process id, %t a time; that
            may not be in the folder's name.

    Raises:
        FileNotFoundError: There is none.
    """
    known = {"%h": socket.gethostname(), "%p": str(os.getpid())}
    path = Path(pattern)
    folder = Path(re.sub("%[hp]", lambda found: known[found[0]], str(path.parent)))
    parts = re.split("(%[hpt])", path.name)
    name = "".join(".*" if part == "%t" else re.escape(known.get(part, part)) for part in parts)
    pipes = [p for p in folder.iterdir() if re.fullmatch(name, p.name) and p.is_fifo()]
    if not pipes:
        raise FileNotFoundError(f"the driver has made no such pipe in {folder.resolve()}")
    return max(pipes, key=lambda pipe: pipe.stat().st_mtime)


def _write_to(pipe: Path) -> None:
    """Write a byte; where nobody reads that is an error, and no wait."""
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"1")
    finally:
        os.close(descriptor)
