"""Qwen3 (dense): Llama's decoder with an RMS norm on each head's q and k before the rotation.

The head dimension is config.json's own and need not be hidden size / heads. `load_config` sets
`qk_norm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.models import llama

if TYPE_CHECKING:
    from tailrace.models.builder import Builder
    from tailrace.models.layers import Decoder


def build(builder: Builder) -> Decoder:
    """Put the model together; tensor names are Llama's, with q_norm and k_norm beside them."""
    return llama.build(builder)
