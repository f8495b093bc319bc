"""Activations rotated, in int8, with a scale a row: what an int8 product multiplies.

    rotated[t, k] = value[t, k] * scale[t]        rotated: see `int8`

The scale is measured from the row ("dynamic"). Nothing saturates, and a row's values depend on that
row alone. The function here is the truth for the Triton ones (`triton_int8_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.linear.int8 import INT8_MAX, LEAST_SCALE, Int8Weight, rotate


@dataclass(frozen=True)
class Int8Rows:
    """Rows in int8; both tensors are contiguous."""

    values: Tensor
    """int8 [T, K]."""
    scales: Tensor
    """float32 [T]; NaN where the row held anything that is not finite."""

    def dequantize(self) -> Tensor:
        """Return float32 [T, K], rotated back."""
        return rotate(self.values.to(torch.float32) * self.scales.unsqueeze(1))


def quantize_rows(x_TK: Tensor) -> Int8Rows:
    """Rotate rows and round them to int8, the largest value of each mapped to 127.

    Args:
        x_TK: Any float dtype. What is not finite makes NaN of its row's scale.
    """
    wide = rotate(x_TK)
    peaks = wide.abs().amax(1)
    scales = (peaks / INT8_MAX).clamp(min=LEAST_SCALE)
    scales = torch.where(wide.isfinite().all(1), scales, torch.nan)
    values = (wide * (1.0 / scales).unsqueeze(1)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return Int8Rows(values.nan_to_num_().to(torch.int8).contiguous(), scales)


def int8_product(
    x: Int8Rows,
    weight: Int8Weight,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in `dtype`: the truth for `triton_int8.int8_product`.

    Args:
        x: Rows.
        weight: On x's device.
        bias_O: In any float dtype, or none.
        dtype: Of the result.
        out_TO: Where to write it; in `dtype`.
    """
    sums = x.values.to(torch.float64) @ weight.values.to(torch.float64).t()  # whole numbers: exact
    y_TO = sums.to(torch.float32) * x.scales.unsqueeze(1) * weight.scales
    if bias_O is not None:
        y_TO += bias_O.to(torch.float32)
    return y_TO.to(dtype) if out_TO is None else out_TO.copy_(y_TO)
