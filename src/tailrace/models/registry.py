"""Which file builds which architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import ModelError, nearest
from tailrace.models import llama, qwen2, qwen3

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.models.builder import Builder
    from tailrace.models.layers import Decoder

ARCHITECTURES: dict[str, Callable[[Builder], Decoder]] = {
    "LlamaForCausalLM": llama.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}


def builder_of(architecture: str) -> Callable[[Builder], Decoder]:
    """Return the function that puts a model of this architecture together.

    Raises:
        ModelError: The architecture is unknown; names it and the known ones.
    """
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture} is not supported{nearest(architecture, ARCHITECTURES)}; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]
