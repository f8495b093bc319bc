"""A linear layer as PyTorch computes it, from the weight as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


class Float32Linear:
    """x @ weight.T + bias in float32; a float32 weight is kept as it is, not copied."""

    name = "torch float32"

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI = weight_OI.float()
        self._bias_O = None if bias_O is None else bias_O.float()

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self._weight_OI.nbytes + (0 if self._bias_O is None else self._bias_O.nbytes)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return float32 [T, O]."""
        return functional.linear(x_TI, self._weight_OI, self._bias_O)
