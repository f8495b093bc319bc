"""What differs between engines: the command, readiness, the version, the body, the tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from tailrace.bench.codec import Codec, ServerCodec
from tailrace.bench.wire import Endpoint, WireError, fetch
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.engines.spec import EngineSpec

ASK_TIMEOUT_S = 10.0
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Adapter:
    """One contender and its kind of engine; each kind is a subclass.

    Raises:
        ConfigError: Something that the contender needs is missing here; says what.
    """

    spec: EngineSpec

    kind: ClassVar[str] = "openai"
    ready_paths: ClassVar[tuple[str, ...]] = ("/v1/models",)
    """All must answer 200 before the server counts as ready."""
    no_prefix_cache: ClassVar[tuple[str, ...]] = ()
    """Arguments that turn prefix caching off."""
    has_cache_field: ClassVar[bool] = False
    """Whether a request's own field can leave the prefix cache out."""
    silent_at_zero: ClassVar[tuple[str, ...]] = ()
    """Our names of counters that its metrics do not show before they first count."""
    max_running_flags: ClassVar[tuple[str, ...]] = ()
    """Arguments that say how many requests may run at once."""

    def __post_init__(self) -> None:
        """Check what can be checked without starting anything."""
        self._check_prefix_cache()
        if self.is_ours:
            self._check_command()
        elif not self.spec.url:
            raise ConfigError(
                f"engine {self.spec.name}: nothing to measure; give `weights` for {self.kind}'s "
                "own command, or `command`, or the `url` of a running server"
            )

    @property
    def is_ours(self) -> bool:
        """Whether we start and stop it."""
        return bool(self.spec.command or self.spec.weights)

    def command(self, host: str, port: int) -> list[str]:
        """Return the command line that starts the server."""
        given = self.spec.command or tuple(self.own_command())
        more = [*self.spec.arguments]
        if not self.spec.prefix_cache:
            more += self.no_prefix_cache
        more += self.more_arguments([*given, *more])
        filled = (
            part.replace("{host}", host).replace("{port}", str(port)) for part in [*given, *more]
        )
        return list(filled)

    def own_command(self) -> Sequence[str]:
        """Return the command that serves `spec.weights`, with `{host}` and `{port}` in it.

        Raises:
            ConfigError: This kind has none, or its program is not installed.
        """
        raise ConfigError(
            f"engine {self.spec.name}: kind openai has no command of its own; give `command`, or "
            "the `url` of a running server"
        )

    def more_arguments(self, command: Sequence[str]) -> Sequence[str]:
        """Return what must be added to a command so that it can be measured."""
        del command
        return ()

    def extra_body(self) -> dict[str, Any]:
        """Return the fields that every request must carry, beside the usual ones."""
        return dict(self.spec.extra_body)

    def codec(self, endpoint: Endpoint, model: str) -> Codec:
        """Return the tokenizer that counts as the server does."""
        return ServerCodec(endpoint, model)

    async def version(self, endpoint: Endpoint) -> str:
        """Return the version that the server tells; empty where it tells none."""
        found = await ask(endpoint, "/version")
        return str(found.get("version", ""))

    async def max_running(self, endpoint: Endpoint, command: Sequence[str]) -> int | None:
        """Return how many requests may run at once, or None where that is not known."""
        del endpoint
        value = option(command, self.max_running_flags)
        return int(value) if value.isdigit() else None

    async def context_tokens(self, endpoint: Endpoint) -> int | None:
        """Return the most tokens of one request, where the model list does not tell them."""
        del endpoint
        return None

    def environment(self) -> dict[str, str]:
        """Return the environment of the command."""
        # Or a Python server's last words stay in its buffer.
        return {"PYTHONUNBUFFERED": "1"} | os.environ | self.spec.env

    def _check_command(self) -> None:
        spec = self.spec
        words = spec.command or tuple(self.own_command())
        if not spec.url and not any("{port}" in word for word in (*words, *spec.arguments)):
            raise ConfigError(
                f"engine {spec.name}: `command` has no {{port}}, so nobody knows where it "
                "listens; write {port} where the number belongs, or give `url`"
            )
        if spec.url and urlsplit(spec.url).hostname not in LOOPBACK:
            raise ConfigError(
                f"engine {spec.name}: `command` starts a server on this machine, but `url` "
                f"{spec.url} is elsewhere; leave one of them out"
            )
        if shutil.which(words[0], path=self.environment().get("PATH")) is None:
            raise ConfigError(
                f"engine {spec.name}: {words[0]}: no such program; install it, or give `command` "
                "with its whole path"
            )

    def _check_prefix_cache(self) -> None:
        if (
            self.spec.prefix_cache
            or self.has_cache_field
            or (self.is_ours and self.no_prefix_cache)
        ):
            return
        flag = " ".join(self.no_prefix_cache) or "its own option"
        raise ConfigError(
            f"engine {self.spec.name}: `prefix_cache = false` cannot be had from here; start the "
            f"server with {flag}, and leave this line out"
        )


def option(command: Sequence[str], flags: Sequence[str]) -> str:
    """Return the value of the last of `flags` in a command line; empty where there is none."""
    found = ""
    for word, following in zip(command, [*command[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in flags:
            found = value if equals else following
    return found


def has_option(command: Sequence[str], *flags: str) -> bool:
    """Return whether a command line has one of `flags`."""
    return any(word.partition("=")[0] in flags for word in command)


async def ask(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """Return the JSON object at `path`; empty where there is none: a courtesy of some servers."""
    try:
        answer = await fetch(endpoint, "GET", path, timeout_s=ASK_TIMEOUT_S)
        found = json.loads(answer.body) if answer.status == 200 else {}
    except (OSError, WireError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
