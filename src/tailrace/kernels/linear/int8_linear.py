"""A linear layer over int8 weights on a GPU: the copy that prompts may be multiplied by.

Rows are rotated and rounded to int8 by scales of their own (`int8_rows`), unless they come so, and
multiplied in int8 (`triton_int8`), which Hopper does twice as fast as in half precision. Any number
of rows takes this way, so a row's result depends on that row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError
from tailrace.kernels.linear.int8 import quantize_channels
from tailrace.kernels.linear.int8_rows import Int8Rows
from tailrace.kernels.linear.triton_int8 import int8_product
from tailrace.kernels.linear.triton_int8_rows import quantize_rows

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 16
"""Inputs and outputs are multiples of it, or descriptors do not take them."""


def takes(outputs: int, inputs: int) -> bool:
    """Tell whether the sizes of a weight allow int8 products."""
    return outputs % ALIGNMENT == 0 and inputs % ALIGNMENT == 0


class Int8Linear:
    """x @ weight.T + bias; sums are exact.

    Args:
        weight_OI: Any float dtype and device; it is rounded here.
        bias_O: Likewise, or none.
        dtype: Of activations.
        device: Where the weight is held.

    Raises:
        ConfigError: Inputs or outputs are no multiple of 16.
    """

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        if not takes(*weight_OI.shape):
            raise ConfigError(
                f"int8 weight {list(weight_OI.shape)}: inputs and outputs must be multiples of "
                f"{ALIGNMENT}"
            )
        self._weight = quantize_channels(weight_OI.to(device))
        self._dtype = dtype
        self._bias_O = None if bias_O is None else bias_O.to(device, dtype).contiguous()
        self.name = "int8 by channel"

    @property
    def nbytes(self) -> int:
        """Bytes of weight, scales and bias."""
        return self._weight.nbytes + (0 if self._bias_O is None else self._bias_O.nbytes)

    def __call__(self, x_TI: Tensor | Int8Rows, *, out_TO: Tensor | None = None) -> Tensor:
        """Return [T, O] in the activations' dtype.

        Args:
            x_TI: Contiguous, in the activations' dtype or rounded already.
            out_TO: Where to write it, such as some rows of a larger result; contiguous.
        """
        rows = x_TI.values.shape[0] if isinstance(x_TI, Int8Rows) else x_TI.shape[0]
        if not rows:
            device = self._weight.values.device
            empty = torch.empty(0, self._weight.shape[0], dtype=self._dtype, device=device)
            return empty if out_TO is None else out_TO
        x8 = x_TI if isinstance(x_TI, Int8Rows) else quantize_rows(x_TI)
        return int8_product(x8, self._weight, self._bias_O, self._dtype, out_TO=out_TO)
