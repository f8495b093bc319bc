"""An engine that another process starts and ends: what a front end among several talks to.

EngineUp 1 | launch -> incarnation 1 ... EngineDown 1 -> its `wait` returns
           | launch waits ............... EngineUp 2 -> incarnation 2
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import EngineError

if TYPE_CHECKING:
    from tailrace.server.orders import EngineUp

ENDED = 0
"""As exit status: only the owner knows how an engine ended, and tells."""


@dataclass(eq=False)
class BorrowedIncarnation:
    """One life of the engine, as seen by a front end that does not own it."""

    pid: int
    socket_path: Path
    number: int
    _is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> int:
        """Return once it has ended, or was let go of."""
        await self._is_over.wait()
        return ENDED

    async def stop(self, grace_s: float) -> None:
        """Let go of it."""
        del grace_s
        self._is_over.set()

    def kill(self) -> None:
        """Let go of it: whether a silent engine is to be killed is for its owner to find."""
        self._is_over.set()


class BorrowedEngine:
    """Implements `supervisor.EngineSource`; told of engines by `is_up` and `is_down`.

    Args:
        identity: What the engine is to know this front end by.
    """

    is_owner = False

    def __init__(self, identity: str) -> None:
        self.identity = identity.encode()
        self._up: EngineUp | None = None
        self._changed = asyncio.Condition()
        self._lent: BorrowedIncarnation | None = None
        self._is_released = False

    async def is_up(self, engine: EngineUp) -> None:
        """There is an engine."""
        async with self._changed:
            self._up = engine
            self._changed.notify_all()

    async def is_down(self, number: int) -> None:
        """An engine has ended."""
        async with self._changed:
            if self._up is not None and self._up.number == number:
                self._up = None
        if self._lent is not None and self._lent.number == number:
            self._lent.kill()

    async def release(self) -> None:
        """Have nobody wait for an engine any more."""
        async with self._changed:
            self._is_released = True
            self._changed.notify_all()

    async def launch(self) -> BorrowedIncarnation:
        """Return the engine that there is, or wait for the next.

        Raises:
            EngineError: Nobody is to wait any more.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._up is not None or self._is_released)
            up = self._up
        if up is None:
            raise EngineError("this front end is going down")
        self._lent = BorrowedIncarnation(up.pid, Path(up.socket), up.number)
        return self._lent

    def clean(self) -> None:
        """Nothing here is ours to remove."""
