"""A linear layer with float16 weights, computed in float32 by the fbgemm that torch carries.

Half the bytes of float32 are read per decode step, which is what bounds small batches.

fbgemm cuts rows into blocks of up to six. With AVX2 it adds up the products of a block of one or
two rows in another order than those of larger blocks, so that a row's last bits would tell how many
others there are. There rows are padded until no such block is left.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

import torch

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

FLOAT16_MAX = 65504.0
_BLOCK_ROWS = 6
_ALIKE_ROWS = 3
"""Blocks of so many rows, and larger ones, add up alike."""


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
        num_rows = len(x_TI)
        last = num_rows % _BLOCK_ROWS
        if 0 < last < _ALIKE_ROWS and _has_other_sums_for_few_rows():
            padding = x_TI[-1:].expand(_ALIKE_ROWS - last, -1)
            return _multiplied(torch.cat([x_TI, padding]), self._packed)[:num_rows]
        return _multiplied(x_TI, self._packed)


@cache
def _has_other_sums_for_few_rows() -> bool:
    """Whether one row and several give it other bits on this machine."""
    drawn = torch.Generator().manual_seed(0)
    weight_OI, row_I = (torch.rand(size, 96, generator=drawn) for size in (32, 1))
    packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, None)
    several = _multiplied(row_I.expand(_BLOCK_ROWS, -1).contiguous(), packed)
    return not torch.equal(_multiplied(row_I, packed), several[:1])


def _multiplied(x_TI: Tensor, packed: object) -> Tensor:
    # torch's operator namespace is untyped.
    return cast("Tensor", torch.ops.quantized.linear_dynamic_fp16(x_TI, packed))


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
