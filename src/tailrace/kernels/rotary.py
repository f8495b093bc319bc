"""The angles of rotary position embedding, as tables that models make once from their config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of every position, float32 [max_position, head_dim / 2], contiguous.

    The convention is Llama's in Hugging Face ("NeoX"): dimension d turns with d + head_dim / 2.
    """

    cos_PD: torch.Tensor  # noqa: N815 - the shape suffixes of models/layers.py
    sin_PD: torch.Tensor  # noqa: N815 - likewise
