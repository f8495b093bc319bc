"""One contender's stay in one round: started afresh when first needed, restarted where it dies.

Nothing is started until the first trial asks for it, so that a resumed comparison, which finds its
first trials on disk, starts only what it still has to measure.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.bench.engines import start
from tailrace.bench.engines.tailrace import request_log_of
from tailrace.bench.masking import masked
from tailrace.bench.target import inspect
from tailrace.telemetry.request_log import LogMark, rotated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

    from tailrace.bench.engines import EngineServer, EngineSpec
    from tailrace.bench.result import Contender
    from tailrace.bench.target import Target

LOG_SETTLE_S = 0.5
"""A server may write a request's line a moment after its last byte was read here."""


@dataclass(frozen=True)
class Served:
    """A server that takes requests, and the model it was asked for."""

    server: EngineServer
    target: Target


class Session:
    """Keeps one contender's server for the length of an `async with` block.

    Args:
        spec: The contender.
        name: Of this stay, such as "p2-vllm"; names its logs.
        folder: Gets the logs.
        contender: Is told of starts, deaths and versions.
        warm_up: Sends the first requests to a server that has just become ready.
        on_progress: Told now and then what is being waited for.
    """

    def __init__(
        self,
        spec: EngineSpec,
        name: str,
        folder: Path,
        contender: Contender,
        *,
        warm_up: Callable[[Served], Awaitable[None]],
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.contender = contender
        self.was_started = False
        """Whether a server has been asked for."""
        self._spec = _with_request_log(spec, folder / f"{name}.requests.jsonl")
        self._log_file = folder / f"{name}.log"
        self._warm_up = warm_up
        self._on_progress = on_progress
        self._stack = AsyncExitStack()
        self._server: EngineServer | None = None
        """From the moment it is asked to start."""
        self._served: Served | None = None
        self._log_mark: LogMark | None = None

    async def __aenter__(self) -> Self:
        """Start nothing yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server, if one was started; without patience where the user has interrupted."""
        await self._leave(kind, error, trace)

    async def served(self) -> Served:
        """Return the server; start, inspect and warm it first where there is none.

        Raises:
            ConfigError: It cannot be run here, or does not speak OpenAI's API.
            EngineError: It did not start.
        """
        if self._served is None:
            self.was_started = True
            self._served = await self._enter()
        return self._served

    def death(self) -> str:
        """Return how the server died; "" where it lives, or was never started."""
        if self._served is None or self._served.server.is_alive():
            return ""
        return self._served.server.death() or "it ended by itself"

    async def bury(self) -> None:
        """Leave a server that has died; the next `served` starts it again."""
        self.contender.restarts += 1
        await self._leave()

    def mark_request_log(self) -> None:
        """Remember where the request log ends now: what follows belongs to the next trial."""
        if self._spec.request_log is not None:
            self._log_mark = LogMark(self._spec.request_log)

    async def copy_request_log(self, file: Path) -> None:
        """Write what was logged since the mark to `file`; nothing where there is no log."""
        log = self._spec.request_log
        if log is None:
            return
        await asyncio.sleep(LOG_SETTLE_S)
        _copy_log(log, self._log_mark, file)

    async def _enter(self) -> Served:
        is_ours = bool(self._spec.command or self._spec.weights)
        self._on_progress(f"{'starting' if is_ours else 'asking'} {self._spec.name}")
        server = start(self._spec, self._log_file, on_progress=self._on_progress)
        self._server = server
        try:
            await self._stack.enter_async_context(server)
            served = Served(server, await self._target(server))
            self._note(served)
            self._on_progress(f"warming {self._spec.name}")
            await self._warm_up(served)
        except BaseException as error:
            await self._leave(type(error), error, error.__traceback__)
            raise
        return served

    async def _target(self, server: EngineServer) -> Target:
        target = await inspect(server.endpoint, self._spec.model)
        if target.context_tokens is not None:
            return target
        return replace(target, context_tokens=server.context_tokens)

    async def _leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        server, self._server = self._server, None
        self._served = None
        try:
            await self._stack.__aexit__(kind, error, trace)
        finally:
            self._stack = AsyncExitStack()
            if server is not None:
                self.contender.out_of_memory += server.out_of_memory

    def _note(self, served: Served) -> None:
        server, contender = served.server, self.contender
        contender.command = masked(server.command, secrets_of(self._spec), takes_many=True)
        contender.version = server.version or served.target.version
        if contender.version and contender.version not in contender.versions:
            contender.versions.append(contender.version)
        contender.model = served.target.model
        contender.ready_s.extend(server.ready_s[-1:])


def secrets_of(spec: EngineSpec) -> list[str]:
    """Return the values that no result may show."""
    return [os.environ.get(spec.api_key_env, "")] if spec.api_key_env else []


def _copy_log(log: Path, mark: LogMark | None, file: Path) -> None:
    """Write the whole lines that came after `mark` to `file`; nothing where there is no log."""
    if rotated(log):
        lines = mark.written_since() if mark else log.read_bytes()
        file.write_bytes(lines[: lines.rfind(b"\n") + 1])


def _with_request_log(spec: EngineSpec, file: Path) -> EngineSpec:
    """Return `spec` with a request log of its own, where the server is Tailrace and ours."""
    if spec.kind != "tailrace" or spec.url or spec.request_log is not None:
        return spec
    asked = request_log_of((*spec.command, *spec.arguments))
    # Absolute, since a server may be started in a folder of its own.
    return replace(spec, request_log=Path(asked) if asked else file.absolute())
