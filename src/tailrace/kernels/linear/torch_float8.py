"""FP8 products of many rows by torch: with a scale an output, or a block of 128 x 128 by cuBLAS.

cuBLAS has its own order of the scales of blocks (`Float8Rows` has that of the rows):

    rows      [T, K / 128]            the rows of a group together, in multiples of 4
    weight    [K / 128, N / 128]      the groups of an output together, zeros up to a multiple of 4
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tailrace.kernels.linear.float8 import BLOCK
from tailrace.kernels.linear.float8_rows import ROWS_TOGETHER

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.float8 import Float8Weight
    from tailrace.kernels.linear.float8_rows import Float8Rows

HOPPER = (9, 0)
CUDA = (12, 9)
"""Whose cuBLAS was the first to take scales by blocks; it does so on Hopper alone."""


def has_blocks(device: torch.device) -> bool:
    """Tell whether torch multiplies by blocks of 128 x 128 on a device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return version >= CUDA and torch.cuda.get_device_capability(device) == HOPPER


def multiplies(weight: Float8Weight, device: torch.device) -> bool:
    """Tell whether torch takes a weight: by blocks only whole ones."""
    if weight.scheme != "block128":
        return True
    return all(size % BLOCK == 0 for size in weight.shape) and has_blocks(device)


class TorchFloat8:
    """x @ weight.T + bias for rows in FP8.

    Args:
        weight: On the device, of scheme "channel" or, in whole blocks, "block128".
        bias_O: In the results' dtype, or none.
    """

    def __init__(self, weight: Float8Weight, bias_O: Tensor | None) -> None:
        self._weight, self._bias_O = weight, bias_O
        self._is_by_blocks = weight.scheme == "block128"
        self._scales = weight.scales.unsqueeze(0)
        if self._is_by_blocks:
            self._scales = weight_scales(weight)

    @property
    def nbytes(self) -> int:
        """Bytes beside the weight's own."""
        return self._scales.nbytes if self._is_by_blocks else 0

    def write(self, x: Float8Rows, out_TO: Tensor) -> None:
        """Write the product into `out_TO`, bfloat16 or (rounded twice) float16.

        Args:
            x: With one scale a row, or for a weight by blocks in groups of 128.
            out_TO: Contiguous.
        """
        if self._is_by_blocks:
            self._write_by_blocks(x, out_TO)
        else:
            self._write_by_rows(x, out_TO)

    def _write_by_rows(self, x: Float8Rows, out_TO: Tensor) -> None:
        # Scales by row come with results, and biases, in bfloat16 only.
        is_direct = out_TO.dtype == torch.bfloat16
        y_TO = out_TO if is_direct else out_TO.new_empty(out_TO.shape, dtype=torch.bfloat16)
        torch._scaled_mm(  # noqa: SLF001 - the only name for it that takes an output
            x.values,
            self._weight.values.t(),
            scale_a=x.scales,
            scale_b=self._scales,
            bias=self._bias_O if is_direct else None,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=y_TO,
        )
        if not is_direct:
            self._finish(y_TO, out_TO)

    def _write_by_blocks(self, x: Float8Rows, out_TO: Tensor) -> None:
        rows = x.values.shape[0]
        filled = x.filled()
        # Results are bfloat16 or float32; float16's are rounded once, from the latter.
        is_direct = out_TO.dtype == torch.bfloat16 and rows % ROWS_TOGETHER == 0
        y_TO = out_TO
        if not is_direct:
            y_TO = out_TO.new_empty(
                filled.values.shape[0],
                out_TO.shape[1],
                dtype=torch.bfloat16 if out_TO.dtype == torch.bfloat16 else torch.float32,
            )
        multiply_blocks(filled, self._weight.values, self._scales, y_TO)
        self._finish(y_TO[:rows], out_TO)

    def _finish(self, y_TO: Tensor, out_TO: Tensor) -> None:
        """Add the bias, in the pass that brings y where it belongs, if there is one."""
        if self._bias_O is not None:
            torch.add(y_TO, self._bias_O, out=out_TO)
        elif y_TO.data_ptr() != out_TO.data_ptr():
            out_TO.copy_(y_TO)


def weight_scales(weight: Float8Weight) -> Tensor:
    """Return the scales of a weight by blocks, in cuBLAS's order.

    Returns:
        float32 [K / 128 rounded up to 4, N / 128], the first dimension's stride 1.
    """
    return functional.pad(weight.scales, (0, -weight.scales.shape[1] % ROWS_TOGETHER)).t()


def multiply_blocks(x: Float8Rows, values_OI: Tensor, scales: Tensor, out_TO: Tensor) -> None:
    """Write x @ values.T, each block scaled, into `out_TO`, bfloat16 or float32.

    Args:
        x: `filled`, in groups of 128.
        values_OI: float8.
        scales: See `weight_scales`.
        out_TO: As many rows as x has, contiguous.
    """
    kinds = functional.ScalingType
    # `functional.scaled_mm` is the same, into new memory only.
    torch.ops.aten._scaled_mm_v2.out(  # noqa: SLF001
        x.values,
        values_OI.t(),
        [x.scales],
        [kinds.BlockWise1x128.value],
        [],
        [scales],
        [kinds.BlockWise128x128.value],
        [],
        None,
        out_TO.dtype,
        out=out_TO,
    )
