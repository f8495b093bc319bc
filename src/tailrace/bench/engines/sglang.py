"""SGLang's server."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from tailrace.bench.codec import SGLANG, Codec, ServerCodec
from tailrace.bench.engines.adapter import Adapter, ask, has_option
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.wire import Endpoint


class Sglang(Adapter):
    """`python -m sglang.launch_server`."""

    kind: ClassVar[str] = "sglang"
    # It generates one token, and refuses while the server starts.
    ready_paths: ClassVar[tuple[str, ...]] = ("/health_generate", "/v1/models")
    no_prefix_cache: ClassVar[tuple[str, ...]] = ("--disable-radix-cache",)
    silent_at_zero: ClassVar[tuple[str, ...]] = ("prefix_hits_total", "preemptions_total")
    max_running_flags: ClassVar[tuple[str, ...]] = ("--max-running-requests",)

    def own_command(self) -> Sequence[str]:
        """Serve the weights by this Python's package.

        Raises:
            ConfigError: It is not installed.
        """
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError(
                f"engine {self.spec.name}: sglang is not installed in this Python; install it, or "
                "give `command`"
            )
        launch = (sys.executable, "-m", "sglang.launch_server", "--model-path", self.spec.weights)
        name = ("--served-model-name", self.spec.model) if self.spec.model else ()
        return (*launch, "--host", "{host}", "--port", "{port}", *name)

    def more_arguments(self, command: Sequence[str]) -> Sequence[str]:
        """Ask for /metrics, and for cached prompt tokens in every answer."""
        flags = ("--enable-metrics", "--enable-cache-report")
        return [flag for flag in flags if not has_option(command, flag)]

    def codec(self, endpoint: Endpoint, model: str) -> Codec:
        """Return its tokenizer over HTTP."""
        return ServerCodec(endpoint, model, (SGLANG,))

    async def version(self, endpoint: Endpoint) -> str:
        """Return the version."""
        return str((await _info(endpoint)).get("version", ""))

    async def max_running(self, endpoint: Endpoint, command: Sequence[str]) -> int | None:
        """Return what its schedulers have settled on together, or what it was started with."""
        states = (await _info(endpoint)).get("internal_states")
        found = [
            state.get("effective_max_running_requests_per_dp")
            for state in (states if isinstance(states, list) else [])
            if isinstance(state, dict)
        ]
        known = [count for count in found if isinstance(count, int)]
        return sum(known) if known else await super().max_running(endpoint, command)


async def _info(endpoint: Endpoint) -> dict[str, Any]:
    """Return /server_info, which older servers call /get_server_info."""
    for path in ("/server_info", "/get_server_info"):
        found = await ask(endpoint, path)
        if found:
            return found
    return {}
