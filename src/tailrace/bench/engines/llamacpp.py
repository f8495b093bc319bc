"""llama.cpp's `llama-server`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tailrace.bench.codec import LLAMACPP, Codec, ServerCodec
from tailrace.bench.engines.adapter import Adapter, ask, has_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.wire import Endpoint


class LlamaCpp(Adapter):
    """`llama-server -m FILE.gguf`.

    It knows no `min_tokens`; `ignore_eos` and `max_tokens` make the length exact there.
    """

    kind: ClassVar[str] = "llamacpp"
    ready_paths: ClassVar[tuple[str, ...]] = ("/health", "/v1/models")
    # The second keeps it from copying the KV of finished requests aside.
    no_prefix_cache: ClassVar[tuple[str, ...]] = ("--no-cache-prompt", "--cache-ram", "0")
    has_cache_field: ClassVar[bool] = True
    max_running_flags: ClassVar[tuple[str, ...]] = ("-np", "--parallel")

    def own_command(self) -> Sequence[str]:
        """Serve the weights by the program on the PATH."""
        name = ("--alias", self.spec.model) if self.spec.model else ()
        where = ("--host", "{host}", "--port", "{port}")
        return ("llama-server", "--model", self.spec.weights, *where, *name)

    def more_arguments(self, command: Sequence[str]) -> Sequence[str]:
        """Ask for /metrics."""
        return () if has_option(command, "--metrics") else ("--metrics",)

    def extra_body(self) -> dict[str, Any]:
        """Leave the prompt cache out where the plan says so, whoever started the server."""
        own: dict[str, Any] = {} if self.spec.prefix_cache else {"cache_prompt": False}
        return own | super().extra_body()

    def codec(self, endpoint: Endpoint, model: str) -> Codec:
        """Return its tokenizer over HTTP."""
        return ServerCodec(endpoint, model, (LLAMACPP,))

    async def version(self, endpoint: Endpoint) -> str:
        """Return the build, such as "b6000-1234abc"."""
        return str((await ask(endpoint, "/props")).get("build_info", ""))

    async def max_running(self, endpoint: Endpoint, command: Sequence[str]) -> int | None:
        """Return the number of slots."""
        slots = (await ask(endpoint, "/props")).get("total_slots")
        return slots if isinstance(slots, int) else await super().max_running(endpoint, command)

    async def context_tokens(self, endpoint: Endpoint) -> int | None:
        """Return the context of one slot."""
        settings = (await ask(endpoint, "/props")).get("default_generation_settings")
        tokens = settings.get("n_ctx") if isinstance(settings, dict) else None
        return tokens if isinstance(tokens, int) else None
