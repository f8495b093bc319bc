"""vLLM's OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from typing import TYPE_CHECKING, ClassVar

from tailrace.bench.engines.adapter import Adapter, has_option
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Vllm(Adapter):
    """`vllm serve`, or its module where only the package is to be found."""

    kind: ClassVar[str] = "vllm"
    # /health runs no GPU work, so the model list, which needs the engine's start, is asked too.
    ready_paths: ClassVar[tuple[str, ...]] = ("/health", "/v1/models")
    no_prefix_cache: ClassVar[tuple[str, ...]] = ("--no-enable-prefix-caching",)
    max_running_flags: ClassVar[tuple[str, ...]] = ("--max-num-seqs",)

    def own_command(self) -> Sequence[str]:
        """Serve the weights by the program `vllm`, or by this Python's package.

        Raises:
            ConfigError: Neither is installed.
        """
        where = ("--host", "{host}", "--port", "{port}")
        name = ("--served-model-name", self.spec.model) if self.spec.model else ()
        if shutil.which("vllm", path=self.environment().get("PATH")) is not None:
            return ("vllm", "serve", self.spec.weights, *where, *name)
        if importlib.util.find_spec("vllm") is not None:
            module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
            return (*module, "--model", self.spec.weights, *where, *name)
        raise ConfigError(
            f"engine {self.spec.name}: vllm is not installed here (no such program, no such "
            "package); install it, or give `command`"
        )

    def more_arguments(self, command: Sequence[str]) -> Sequence[str]:
        """Have every answer say how many prompt tokens came from the cache."""
        flag = "--enable-prompt-tokens-details"
        told = has_option(command, flag, flag.replace("--", "--no-", 1))
        return () if told else (flag,)
