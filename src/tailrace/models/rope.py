"""The rotary tables of a config, computed in float32 exactly as transformers does.

Float32 rounding of position x frequency is part of what a model was trained and is compared
with, so the order of operations here is not free.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.rotary import Rotary

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.models.config import Llama3Scaling, ModelConfig


def rotary_of(config: ModelConfig) -> Rotary:
    """Return cos and sin, float32 [max_position, head_dim / 2]."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta)
    if config.rope_scaling is not None:
        frequencies = llama3_frequencies(frequencies, config.rope_scaling)
    positions = torch.arange(config.max_position, dtype=torch.float32)
    angles_PD = torch.outer(positions, frequencies)
    return Rotary(cos_PD=angles_PD.cos(), sin_PD=angles_PD.sin())


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return float32 [head_dim / 2]: radians a token, fastest first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow the slow waves down, in radians a token.

    turns within the original context
    0 -------- low_freq_factor -------- high_freq_factor -------->
    | f / factor |   blended between the two   |   f
    """
    turns = scaling.original_max_position / (2 * math.pi / frequencies)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
