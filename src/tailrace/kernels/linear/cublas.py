"""A linear layer in the weight's own half precision, by cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


class CublasLinear:
    """x @ weight.T + bias.

    Sums are float32, but for parts of a split sum where torch lets cuBLAS add them in half
    precision
    (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`).

    Args:
        weight_OI: Any dtype and device.
        bias_O: Likewise.
        dtype: Of weight, input and result.
        device: Where they are held.
    """

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = f"cuBLAS {str(dtype).removeprefix('torch.')}"
        self.weight_OI = weight_OI.to(device, dtype).contiguous()
        self.bias_O = None if bias_O is None else bias_O.to(device, dtype).contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight_OI.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O] in the weight's dtype."""
        return functional.linear(x_TI, self.weight_OI, self.bias_O)

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.weight_OI.shape
        return outputs, inputs

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I] in `dtype`; the layer's own where it is held so."""
        return self.weight_OI.to(dtype)

    def write(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """See `DeviceLinear.write`."""
        weight_IO = self.weight_OI.t()
        if self.bias_O is None:
            torch.mm(x_TI, weight_IO, out=out_TO)
        else:
            torch.addmm(self.bias_O, x_TI, weight_IO, out=out_TO)
