"""A linear layer as PyTorch computes it, from the weight as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


class Float32Linear:
    """x @ weight.T + bias in float32; keeps the weight it is given and copies nothing."""

    name = "torch float32"

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self._weight_OI.nbytes + (0 if self._bias_O is None else self._bias_O.nbytes)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return float32 [T, O]."""
        return functional.linear(x_TI, self._weight_OI, self._bias_O)
