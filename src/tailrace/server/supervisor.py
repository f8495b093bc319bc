"""The engine's process: started, told its order, watched, ended. Knows nothing of its messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tailrace.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.config import EngineConfig

MAX_SOCKET_PATH_BYTES = 107  # of sockaddr_un, without its final zero
WORKER = (sys.executable, "-m", "tailrace.engine.worker")


@dataclass
class EngineProcess:
    """One incarnation of the engine.

    Attributes:
        process: The child.
        socket_path: Where it binds; new for each incarnation, so that no message meant for a dead
            engine reaches the next one.
    """

    process: asyncio.subprocess.Process
    socket_path: Path

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid

    async def wait(self) -> int:
        """Return the exit status once it has ended; negative for a signal."""
        return await self.process.wait()

    async def stop(self, grace_s: float) -> None:
        """Wait for the end that was asked for by message; then insist."""
        for insist in (self.process.terminate, self.process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
                return
            with contextlib.suppress(ProcessLookupError):
                insist()
        await self.process.wait()

    def kill(self) -> None:
        """End it now."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


@dataclass
class Launcher:
    """Starts engine processes, each with a socket of its own in one private folder.

    Attributes:
        config: Sent to each on its standard input.
        command: What to run.
    """

    config: EngineConfig
    command: Sequence[str] = WORKER
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tailrace-")))
    launched: int = 0

    async def launch(self) -> EngineProcess:
        """Start one; its standard input stays open, so that it notices our death.

        Raises:
            EngineError: The command cannot be started.
        """
        self.launched += 1
        socket_path = self.folder / f"engine-{self.launched}.sock"
        size = len(os.fsencode(socket_path))
        if size > MAX_SOCKET_PATH_BYTES:
            raise EngineError(
                f"the socket's path {socket_path} has {size} bytes; the system takes "
                f"{MAX_SOCKET_PATH_BYTES}: set TMPDIR to a shorter folder"
            )
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise EngineError(f"cannot start {self.command[0]}: {error.strerror}") from error
        order = msgspec.json.encode({"socket": str(socket_path), "config": self.config})
        if process.stdin is None:
            raise EngineError("the engine process has no standard input")
        process.stdin.write(order + b"\n")
        with contextlib.suppress(ConnectionError):  # it died at once: `wait` tells
            await process.stdin.drain()
        return EngineProcess(process, socket_path)

    def clean(self) -> None:
        """Remove the sockets' folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
