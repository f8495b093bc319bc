"""The front end's view of the engine: submit, listen, abort, and how it fares.

`EngineClient` is what routes and generation see; `bridge.Bridge` is the real one, and tests use a
scripted one.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailrace.types import EngineReady, EngineRequest, EngineStats, KvReport, TokenOutput


class EngineState(enum.Enum):
    """Whether requests can be served."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """It died, or fell silent, and is being started again."""
    FAILED = "failed"
    """It cannot be started: the server is going down."""


class OutputQueue:
    """One request's outputs, in order: waited for one by one, or taken when a listener is told.

    The last output has a `finish_reason`; when the engine dies, that is "error".
    """

    def __init__(self) -> None:
        self._outputs: deque[TokenOutput] = deque()
        self._has_come = asyncio.Event()
        self._listener: Callable[[], None] | None = None

    def put_nowait(self, output: TokenOutput) -> None:
        """Take an output."""
        self._outputs.append(output)
        if self._listener is None:
            self._has_come.set()
        else:
            self._listener()

    async def get(self) -> TokenOutput:
        """Return the next output; asking on after the last is an error."""
        while not self._outputs:
            self._has_come.clear()
            await self._has_come.wait()
        return self._outputs.popleft()

    def take(self) -> TokenOutput | None:
        """Return the next output; None where none is there."""
        return self._outputs.popleft() if self._outputs else None

    def listen(self, listener: Callable[[], None]) -> None:
        """From now on call `listener`, which must not raise, whenever an output has come.

        Nobody may wait in `get` then.
        """
        self._listener = listener
        if self._outputs:
            listener()

    def ignore(self) -> None:
        """Forget the listener, and what it holds."""
        self._listener = None


LastWord = Callable[[str, "TokenOutput | None"], None]
"""Takes a request's id and its last output."""


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
    def silence_s(self) -> float | None:
        """Seconds since the engine last said something, which it does each second, but for steps.

        None where it is not ready.
        """
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

    def reserve(self, request_id: str, num_tokens: int, lifetime_s: float) -> None:
        """Lease KV for a request whose body is still arriving; `abort` gives it back.

        Args:
            request_id: The request that will be submitted.
            num_tokens: Known of its prompt so far.
            lifetime_s: Given back by itself after so long.
        """
        ...

    def grow(
        self,
        request_id: str,
        start: int,
        token_ids: list[int],
        lifetime_s: float,
        cache_salt: str = "",
    ) -> None:
        """Offer a piece of a prompt whose body is still arriving, to be computed early.

        Args:
            request_id: The request that will be submitted; `abort` ends the work.
            start: Where the piece stands in the prompt; pieces follow on one another.
            token_ids: Certain if the body goes on as it began.
            lifetime_s: Given up by itself so long after the first piece.
            cache_salt: Under which its prefixes are looked for; of the first piece.
        """
        ...

    async def inspect_kv(self) -> KvReport:
        """Have the KV pool checked and described.

        Raises:
            RequestError: 503, the engine is not ready, or died over it.
        """
        ...

    def abort(self, request_ids: Iterable[str], on_last: LastWord | None = None) -> None:
        """Forget requests: no further output of theirs comes, and no lease stays.

        Args:
            request_ids: Unknown ones are no error.
            on_last: Told the engine's last output of each, which has its times, once it has come;
                None in its place where none will. Must not raise.
        """
        ...
