"""A linear layer over FP8 weights on a GPU: few rows in half precision, many in FP8.

Up to `MOST_ROWS` rows a product is bound by the weight's bytes: it is widened in registers, and
activations are not rounded. Beyond, arithmetic counts, and FP8 has twice as much of it: rows are
rounded to FP8 by scales of their own (`float8_rows`), unless they come so, and multiplied by torch
(a scale an output) or by our own kernel (a scale for each block of 128 x 128).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError
from tailrace.kernels.linear.float8 import BLOCK, Float8Weight
from tailrace.kernels.linear.float8_rows import Float8Rows
from tailrace.kernels.linear.triton_float8 import (
    MOST_ROWS,
    float8_blocks,
    float8_skinny,
    skinny_splits,
)
from tailrace.kernels.linear.triton_float8_rows import quantize_rows

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.workspace import Workspace

ALIGNMENT = 16
"""Inputs and outputs are multiples of it, or the hardware's products do not take them."""


def takes(weight: Float8Weight) -> bool:
    """Tell whether the sizes of a weight allow FP8 products."""
    return all(size % ALIGNMENT == 0 for size in weight.shape)


class Float8Linear:
    """x @ weight.T + bias; sums are float32.

    Args:
        weight: Of any device; may be freed after packing.
        bias_O: Likewise, or none.
        workspace: Shared by all layers of a stream.

    Raises:
        ConfigError: Inputs or outputs are no multiple of 16.
    """

    def __init__(self, weight: Float8Weight, bias_O: Tensor | None, workspace: Workspace) -> None:
        if not takes(weight):
            raise ConfigError(
                f"FP8 weight {list(weight.shape)}: inputs and outputs must be multiples of "
                f"{ALIGNMENT}"
            )
        self._weight = _held(weight, workspace.device)
        self._dtype = workspace.dtype
        self._bias_O = None
        if bias_O is not None:
            self._bias_O = bias_O.to(workspace.device, workspace.dtype).contiguous()
        self._workspace = workspace
        outputs, inputs = weight.shape
        splits, _ = skinny_splits(outputs, inputs)
        workspace.reserve(outputs=outputs, splits=splits, rows=MOST_ROWS)
        self.group = BLOCK if weight.scheme == "block128" else 0
        """Inputs that share a scale in the rows that it takes; 0: all."""
        self.name = f"FP8 by {weight.scheme}"

    @property
    def nbytes(self) -> int:
        """Bytes of weight, scales and bias."""
        return self._weight.nbytes + (0 if self._bias_O is None else self._bias_O.nbytes)

    def takes_float8(self, rows: int) -> bool:
        """Tell whether so many rows are multiplied in FP8."""
        return rows > MOST_ROWS

    def __call__(self, x_TI: Tensor | Float8Rows) -> Tensor:
        """Return [T, O] in the activations' dtype.

        Args:
            x_TI: Contiguous; float8 only where `takes_float8`, in groups of `group`.
        """
        if isinstance(x_TI, Float8Rows):
            return self._multiplied(x_TI)
        rows = x_TI.shape[0]
        if not rows:
            return x_TI.new_empty(0, self._weight.shape[0])
        if not self.takes_float8(rows):
            scratch = self._workspace.scratch
            return float8_skinny(x_TI, self._weight, self._bias_O, scratch=scratch)
        return self._multiplied(quantize_rows(x_TI, self.group))

    def _multiplied(self, x: Float8Rows) -> Tensor:
        if self.group:
            return float8_blocks(x, self._weight, self._bias_O, self._dtype)
        y_TO: Tensor = torch._scaled_mm(  # noqa: SLF001 - torch's only name for it before 2.10
            x.values,
            self._weight.values.t(),
            scale_a=x.scales,
            scale_b=self._weight.scales.unsqueeze(0),
            # Scales by row come with results in bfloat16 only.
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).to(self._dtype)
        return y_TO if self._bias_O is None else y_TO.add_(self._bias_O)


def _held(weight: Float8Weight, device: torch.device) -> Float8Weight:
    """Return the weight on the device, one scale for all as one an output."""
    scales = weight.scales
    scheme = weight.scheme
    if scheme == "tensor":
        scales, scheme = scales.expand(weight.shape[0]), "channel"
    return Float8Weight(
        weight.values.to(device).contiguous(),
        scales.to(device, torch.float32).contiguous(),
        scheme,
    )
