"""Activations in float8 with scales of their own: what an FP8 product multiplies.

    x[t, k] = value[t, k] * scale[t, k // group]

A scale is measured from what it scales ("dynamic"): its row, or 128 neighbours of it where the
weight is scaled by blocks. Nothing saturates, and a row's values depend on that row alone. The
functions here are the truth for the Triton ones (`triton_float8_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.linear.float8 import FLOAT8, FLOAT8_MAX

LEAST_SCALE = 2.0**-100
"""Of a row of zeros, which has a scale all the same."""


@dataclass(frozen=True)
class Float8Rows:
    """Rows in float8; both tensors are contiguous."""

    values: Tensor
    """float8_e4m3fn [T, K]."""
    scales: Tensor
    """float32 [T, ceil(K / group)]."""
    group: int
    """Inputs that share a scale: K, or 128."""

    def dequantize(self) -> Tensor:
        """Return float32 [T, K]."""
        spread = self.scales.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return self.values.to(torch.float32) * spread


def quantize_rows(x_TK: Tensor, group: int = 0) -> Float8Rows:
    """Round rows to float8, the largest value of each group mapped to 448.

    Args:
        x_TK: Any float dtype. A NaN spoils its group, and nothing else.
        group: Inputs that share a scale; 0 takes the whole row.
    """
    rows, inputs = x_TK.shape
    group = group or inputs
    groups = -(-inputs // group)
    padded = torch.zeros(rows, groups * group, device=x_TK.device)
    padded[:, :inputs] = x_TK
    wide = padded.view(rows, groups, group)
    scales = (wide.abs().amax(-1) / FLOAT8_MAX).clamp(min=LEAST_SCALE)
    values = (wide / scales.unsqueeze(-1)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    return Float8Rows(values.flatten(1)[:, :inputs].contiguous(), scales, group)
