"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v, and on nothing else.

The biases are the architecture's, not config.json's: `load_config` sets `attention_bias`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.models import llama

if TYPE_CHECKING:
    from tailrace.models.builder import Builder
    from tailrace.models.layers import Decoder


def build(builder: Builder) -> Decoder:
    """Put the model together; tensor names are Llama's."""
    return llama.build(builder)
