"""What a linear layer is packed from: a plain matrix, or one in 4 bits or in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from tailrace.kernels.linear.float8 import Float8Weight
from tailrace.kernels.linear.int4 import GroupInt4

Weight = Tensor | GroupInt4 | Float8Weight
"""[outputs, inputs]; `shape` tells which."""


def plain(weight: Weight) -> Tensor:
    """Return the matrix itself; of a quantised one the values it stands for, float32."""
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def format_of(weight: Weight) -> str:
    """Say the format as a person would, such as "4 bits in groups of 64"; "plain" is a matrix."""
    if isinstance(weight, GroupInt4):
        return f"4 bits in groups of {weight.group}"
    if isinstance(weight, Float8Weight):
        return f"FP8 with a scale a {weight.scheme.replace('128', ' of 128 x 128')}"
    return "plain"
