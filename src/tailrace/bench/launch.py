"""A server of our own for the length of a `with` block, started as a user would start it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.bench.process_tree import ProcessTree
from tailrace.clock import monotonic
from tailrace.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

POLL_S = 0.2
LOG_TAIL_LINES = 20
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a TCP port that nothing uses, and that the kernel gives to nobody by itself.

    A server binds it seconds later, when it has loaded: until then one of the kernel's own range
    may have become the end of somebody's connection.

    Raises:
        EngineError: A hundred ports were all in use.
    """
    first, end = 20_000, _first_of_kernel()
    for _ in range(100):
        # Not `random`, which others may have seeded as it is here.
        port = first + secrets.randbelow(end - first) if end - first >= 1000 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bound: int = probe.getsockname()[1]
            return bound
    raise EngineError(f"no free TCP port: 100 of {first} to {end - 1} are all in use; free some")


def _first_of_kernel() -> int:
    """Return where the range begins from which the kernel takes ports; 0 where it does not say."""
    try:
        return int(_KERNELS_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


class LocalServer:
    """Runs `python -m tailrace serve`, ready inside the block, ended by SIGTERM after it.

    Args:
        arguments: Further arguments of `serve`.
        log_file: Where its output goes; a temporary file by default.
        ready_timeout_s: How long loading and warm-up may take.
        stop_timeout_s: How long draining may take before the server is killed.
        command: What to run; `serve` of this Python by default.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        log_file: Path | None = None,
        ready_timeout_s: float = 300.0,
        stop_timeout_s: float = 60.0,
        command: Sequence[str] = (sys.executable, "-m", "tailrace", "serve"),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = log_file or Path(tempfile.mkdtemp(prefix="tailrace-")) / "server.log"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        self._ready_timeout_s = ready_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: ProcessTree | None = None

    @property
    def command(self) -> list[str]:
        """The command line of the server."""
        return list(self._command)

    def __enter__(self) -> Self:
        """Start the server and wait until it is ready.

        Raises:
            EngineError: It ended, or was not ready in time; the message carries its log's tail.
        """
        self.log_file.unlink(missing_ok=True)
        self._process = ProcessTree(self._command, log_file=self.log_file)
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server.

        Raises:
            EngineError: It did not end by itself with status 0 (only where the block itself
                raised nothing).
        """
        process = self._process
        if process is None:
            return
        status = process.stop(self._stop_timeout_s)
        if error is None and status != 0:
            how = (
                f"did not end within {self._stop_timeout_s:g} s of SIGTERM and was killed"
                if status is None
                else f"ended with status {status} instead of 0"
            )
            raise EngineError(f"the server {how}; {self._log_tail()}")

    def _wait_until_ready(self, process: ProcessTree) -> None:
        deadline_s = monotonic() + self._ready_timeout_s
        while not self._is_ready():
            status = process.poll()
            if status is not None:
                raise EngineError(
                    f"the server ended with status {status} before it was ready; {self._log_tail()}"
                )
            if monotonic() > deadline_s:
                raise EngineError(
                    f"the server was not ready within {self._ready_timeout_s:g} s; "
                    f"{self._log_tail()}"
                )
            time.sleep(POLL_S)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:  # noqa: S310  # http
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):  # not listening yet, or 503 while it warms up
            return False

    def _log_tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"its log, {self.log_file}, ends with:", *lines])
