"""The front end's view of the engine: submit, listen, abort, and how it fares.

`EngineClient` is what routes and generation see; `bridge.Bridge` is the real one, and tests use a
scripted one.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailrace.types import EngineReady, EngineRequest, EngineStats, TokenOutput


class EngineState(enum.Enum):
    """Whether requests can be served."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """It died, or fell silent, and is being started again."""
    FAILED = "failed"
    """It cannot be started: the server is going down."""


class OutputQueue(Protocol):
    """One request's outputs, in order."""

    async def get(self) -> TokenOutput:
        """Return the next output. The last has a `finish_reason`; asking on is an error.

        When the engine dies, an output with `finish_reason` "error" comes.
        """
        ...

    def get_nowait(self) -> TokenOutput:
        """Return the next output, which is there: see `empty`."""
        ...

    def empty(self) -> bool:
        """Say whether no output is there."""
        ...


class EngineClient(Protocol):
    """What the routes need of the engine."""

    @property
    def state(self) -> EngineState:
        """Whether requests can be served now."""
        ...

    @property
    def ready(self) -> EngineReady | None:
        """What the engine said when it was warm; None before the first time."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """The engine's latest report; at most about a second old while it lives."""
        ...

    @property
    def restarts_total(self) -> int:
        """How often the engine was started again."""
        ...

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role, such as {"engine": 123}."""
        ...

    def submit(self, request: EngineRequest) -> OutputQueue:
        """Hand a request over.

        Raises:
            RequestError: 503, the engine is not ready.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests: no further output of theirs comes."""
        ...
