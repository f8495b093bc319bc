"""Activations in float8 with scales of their own: what an FP8 product multiplies.

    x[t, k] = value[t, k] * scale[t, k // group]

In memory the scales of a group of inputs lie together, one for each row, and both rows and scales
may be followed by a few that no one reads, up to a multiple of 4: so cuBLAS wants them where the
weight is scaled by blocks, and our own kernel reads them so as well.

    scales [T, G], in memory    g0: t0 t1 t2 .. ..    g1: t0 t1 t2 .. ..

A scale is measured from what it scales ("dynamic"): its row, or 128 neighbours of it where the
weight is scaled by blocks. Nothing saturates, and a row's values depend on that row alone. The
functions here are the truth for the Triton ones (`triton_float8_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailrace.errors import EngineError
from tailrace.kernels.linear.float8 import FLOAT8, FLOAT8_MAX

if TYPE_CHECKING:
    from tailrace.kernels.linear.float8 import Float8Weight

LEAST_SCALE = 2.0**-100
"""Of a row of zeros, which has a scale all the same."""

ROWS_TOGETHER = 4
"""cuBLAS takes rows with scales by blocks in multiples of it: 16 bytes of scales."""


@dataclass(frozen=True)
class Float8Rows:
    """Rows in float8."""

    values: Tensor
    """float8_e4m3fn [T, K], contiguous."""
    scales: Tensor
    """float32 [T, ceil(K / group)], the rows of a group together."""
    group: int
    """Inputs that share a scale: K, or 128."""

    def dequantize(self) -> Tensor:
        """Return float32 [T, K]."""
        spread = self.scales.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return self.values.to(torch.float32) * spread

    def filled(self) -> Float8Rows:
        """Return the same memory with the rows that fill up the last `ROWS_TOGETHER`.

        Raises:
            RuntimeError: They were not made by `empty_rows`, and there are none.
        """
        rows, inputs = self.values.shape
        whole = rows + -rows % ROWS_TOGETHER
        groups = self.scales.shape[1]
        return Float8Rows(
            self.values.as_strided((whole, inputs), (inputs, 1)),
            self.scales.as_strided((whole, groups), (1, whole)),
            self.group,
        )


def require_few(x: Float8Rows, weight: Float8Weight, most_rows: int) -> None:
    """See that there are rows, no more than a kernel takes, and with scales as the weight's.

    Raises:
        EngineError: There are none, or too many; or their scales do not go with the weight's.
    """
    rows = len(x.values)
    if not 0 < rows <= most_rows:
        raise EngineError(f"{rows} rows: this FP8 product takes 1 to {most_rows}")
    if x.scales.shape[1] != (weight.scales.shape[1] if weight.scheme == "block128" else 1):
        raise EngineError(f"rows in groups of {x.group}: not those of a weight by {weight.scheme}")


def empty_rows(rows: int, inputs: int, group: int, device: torch.device) -> Float8Rows:
    """Return memory for rows, and for what fills up the last `ROWS_TOGETHER`.

    Args:
        rows: T.
        inputs: K.
        group: Inputs that share a scale; 0: all of them.
        device: Of both tensors.
    """
    group = group or inputs
    whole = rows + -rows % ROWS_TOGETHER
    values = torch.empty(whole, inputs, dtype=FLOAT8, device=device)
    groups = -(-inputs // group)
    scales = torch.empty(groups, whole, dtype=torch.float32, device=device).t()
    if groups == 1:
        scales = scales.as_strided((whole, 1), (1, 1))  # the only strides that torch takes of it
    return Float8Rows(values[:rows], scales[:rows], group)


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
    out = empty_rows(rows, inputs, group, x_TK.device)
    out.values.view(torch.uint8).copy_(values.flatten(1)[:, :inputs].view(torch.uint8))
    out.scales.copy_(scales)
    return out
