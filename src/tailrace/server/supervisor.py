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
from typing import TYPE_CHECKING, Protocol

import msgspec

from tailrace.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.config import EngineConfig

MAX_SOCKET_PATH_BYTES = 107  # of sockaddr_un, without its final zero
WORKER = (sys.executable, "-m", "tailrace.engine.worker")


class Incarnation(Protocol):
    """One life of the engine, whoever started it."""

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        ...

    @property
    def socket_path(self) -> Path:
        """Where it binds."""
        ...

    @property
    def number(self) -> int:
        """1 for the first."""
        ...

    async def wait(self) -> int:
        """Return its exit status once it has ended, or is no longer ours to talk to."""
        ...

    async def stop(self, grace_s: float) -> None:
        """See it to its end, where that is ours to do."""
        ...

    def kill(self) -> None:
        """End it now, or let go of it."""
        ...


class EngineSource(Protocol):
    """Where a bridge gets its engine from."""

    identity: bytes
    """What the engine is to know this front end by: see `types.ForgetFrontend`. Empty: any."""
    is_owner: bool
    """Whether engines end with us."""

    async def launch(self) -> Incarnation:
        """Return the next incarnation, or the present one.

        Raises:
            EngineError: There will be none.
        """
        ...

    def clean(self) -> None:
        """Let go of everything."""
        ...


@dataclass
class EngineProcess:
    """One incarnation of the engine.

    Attributes:
        process: The child.
        socket_path: Where it binds; new for each incarnation, so that no message meant for a dead
            engine reaches the next one.
        number: 1 for the first.
    """

    process: asyncio.subprocess.Process
    socket_path: Path
    number: int = 1

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid

    async def wait(self) -> int:
        """Return the exit status once it has ended; negative for a signal."""
        return await self.process.wait()

    async def stop(self, grace_s: float) -> None:
        """Wait for the end that was asked for by message; then insist.

        By SIGKILL: an engine ignores SIGTERM, which whoever stops the server may send to all of its
        processes at once.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), grace_s)
            return
        self.kill()
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
        places: Most requests that it holds at once; 0: the one front end counts.
    """

    identity = b""
    is_owner = True

    config: EngineConfig
    command: Sequence[str] = WORKER
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tailrace-")))
    launched: int = 0
    places: int = 0
    _begun: EngineProcess | None = None
    """The next to be launched, if it is there already."""

    async def begin(self) -> None:
        """Start the first one ahead of its launch.

        Raises:
            EngineError: The command cannot be started.
        """
        self._begun = await self._start()

    async def launch(self) -> EngineProcess:
        """Start one, or return the one that was begun.

        Raises:
            EngineError: The command cannot be started.
        """
        begun, self._begun = self._begun, None
        return begun or await self._start()

    async def _start(self) -> EngineProcess:
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
        order = msgspec.json.encode(
            {"socket": str(socket_path), "config": self.config, "places": self.places}
        )
        if process.stdin is None:
            raise EngineError("the engine process has no standard input")
        process.stdin.write(order + b"\n")
        with contextlib.suppress(ConnectionError):  # it died at once: `wait` tells
            await process.stdin.drain()
        return EngineProcess(process, socket_path, self.launched)

    def clean(self) -> None:
        """End one that was begun and never launched, and remove the sockets' folder."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
