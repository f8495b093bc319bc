"""Tailrace itself, started as a user would start it."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

from tailrace.bench.engines.adapter import Adapter, has_option, option
from tailrace.config import ENV_PREFIX, EngineConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.wire import Endpoint


class Tailrace(Adapter):
    """`python -m tailrace serve`."""

    kind: ClassVar[str] = "tailrace"
    ready_paths: ClassVar[tuple[str, ...]] = ("/ready", "/v1/models")
    no_prefix_cache: ClassVar[tuple[str, ...]] = ("--no-prefix-cache",)
    max_running_flags: ClassVar[tuple[str, ...]] = ("--max-batch-size",)

    def own_command(self) -> Sequence[str]:
        """Serve the weights with this Python."""
        serve = (sys.executable, "-m", "tailrace", "serve", "--host", "{host}", "--port", "{port}")
        name = ("--served-model-name", self.spec.model) if self.spec.model else ()
        return (*serve, "--model-path", self.spec.weights, *name)

    def more_arguments(self, command: Sequence[str]) -> Sequence[str]:
        """Ask for the request log where the plan names one."""
        log = self.spec.request_log
        if log is None or has_option(command, "--request-log"):
            return ()
        return ("--request-log", str(log))

    async def max_running(self, endpoint: Endpoint, command: Sequence[str]) -> int | None:
        """Return the flag's value, the environment's, or the default where no file may differ."""
        told = await super().max_running(endpoint, command)
        if told is not None or not self.is_ours or has_option(command, "--config"):
            return told
        name = "max_batch_size"
        default = next(entry.default for entry in fields(EngineConfig) if entry.name == name)
        value = self.environment().get(ENV_PREFIX + name.upper(), default)
        return int(str(value))


def request_log_of(command: Sequence[str]) -> str:
    """Return where a command line sends the request log; empty where it asks for none."""
    return option(command, ("--request-log",))
