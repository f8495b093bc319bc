"""A linear layer with float16 weights, computed in float32 by the fbgemm that torch carries.

Half the bytes of float32 are read per decode step, which is what bounds small batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

FLOAT16_MAX = 65504.0


class Float16Linear:
    """x @ weight.T + bias with the weight rounded to float16 once, at packing."""

    name = "fbgemm float16"

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        _check_range(weight_OI)
        weight_OI = weight_OI.float().contiguous()
        bias_O = None if bias_O is None else bias_O.float().contiguous()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, bias_O)
        bias_bytes = 0 if bias_O is None else bias_O.nbytes
        self._nbytes = weight_OI.numel() * 2 + bias_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and the bias."""
        return self._nbytes

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return float32 [T, O]."""
        # torch's operator namespace is untyped.
        return cast("Tensor", torch.ops.quantized.linear_dynamic_fp16(x_TI, self._packed))


def _check_range(weight_OI: Tensor) -> None:
    """Refuse what float16 would turn into infinity."""
    low, high = torch.aminmax(weight_OI)
    largest = max(abs(low.item()), abs(high.item()))
    if not largest <= FLOAT16_MAX:
        shape = list(weight_OI.shape)
        raise ConfigError(
            f"--dtype float16: a weight of shape {shape} holds |w| = {largest:g}, above float16's "
            f"largest value {FLOAT16_MAX:g}; serve this checkpoint with --dtype float32"
        )
