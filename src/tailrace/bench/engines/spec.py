"""What a plan says about one contender."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003  # plans read the annotations at run time
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One `[[engine]]` of a plan; checked by the adapter that `kind` names."""

    name: str
    """Unique in the plan; names its folders, so letters, digits, `.`, `_` and `-` only."""
    kind: str
    """tailrace, vllm, sglang, llamacpp, or openai (any server that speaks OpenAI's API)."""
    strategy: str = "default"
    """A label for the tables, such as "chunked prefill 512"."""
    command: tuple[str, ...] = ()
    """Starts the server; `{port}` and `{host}` are filled in. Empty: the adapter's own command
    where `weights` are given, else it already runs at `url`."""
    weights: str = ""
    """What the adapter's own command serves: a folder, a file, or a name the engine knows."""
    arguments: tuple[str, ...] = ()
    """Added to the command, the plan's or the adapter's."""
    prefix_cache: bool = True
    """False turns prefix caching off: by the engine's flag where we start it, and by request where
    the engine has a field for that."""
    url: str = ""
    """Where it runs, if it is not started by the plan."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    model: str | None = None
    """The name to ask for; None takes the first that the server lists."""
    api_key_env: str = ""
    """The environment variable that holds the key, so that no key stands in a plan."""
    metrics_url: str = ""
    """Where its metrics are read; empty takes /metrics of the server, `prometheus+http://...`
    asks a Prometheus, `telegraf+file:///...` reads telegraf's JSON lines."""
    request_log: Path | None = None
    """Tailrace's request log, where the plan asks for one."""
    ready_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields added to every request, over the adapter's own."""
