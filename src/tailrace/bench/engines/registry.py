"""Which adapter a plan's `kind` means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.bench.engines.adapter import Adapter
from tailrace.bench.engines.llamacpp import LlamaCpp
from tailrace.bench.engines.sglang import Sglang
from tailrace.bench.engines.tailrace import Tailrace
from tailrace.bench.engines.vllm import Vllm
from tailrace.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tailrace.bench.engines.spec import EngineSpec

KINDS: dict[str, type[Adapter]] = {
    kind.kind: kind for kind in (Tailrace, Vllm, Sglang, LlamaCpp, Adapter)
}


def adapter_for(spec: EngineSpec) -> Adapter:
    """Return the adapter of `spec`, after checking that `spec` can be run here.

    Raises:
        ConfigError: The kind is unknown, or something that it needs is missing.
    """
    kind = KINDS.get(spec.kind)
    if kind is None:
        raise ConfigError(
            f"engine {spec.name}: kind {spec.kind!r} is not one of {', '.join(KINDS)}"
            f"{nearest(spec.kind, KINDS)}"
        )
    return kind(spec)
