"""A linear layer over int8 weights on a GPU: the copy that prompts may be multiplied by.

Rows are rotated and rounded to int8 by scales of their own (`int8_rows`), in the norm or SiLU-mul
that makes them where there is one, and multiplied in int8, for which tensor cores have twice the
rate of half precision: by `triton_int8`, or on Hopper, from `HOPPER_ROWS` rows on, by
`triton_hopper_int8`. Both give the same bits. Any number of rows goes this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from tailrace.errors import ConfigError
from tailrace.kernels.linear.device_linear import RoundsRows
from tailrace.kernels.linear.int4_linear import has_hopper_kernel
from tailrace.kernels.linear.int8 import Int8Weight, quantize_channels
from tailrace.kernels.linear.triton_int8 import capability_of, int8_product, ways
from tailrace.kernels.linear.triton_int8_rows import (
    add_rms_norm_int8,
    keep_matrix,
    quantize_rows,
    silu_mul_int8,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.linear.int8_rows import Int8Rows

ALIGNMENT = 16
"""Inputs and outputs are multiples of it, or tensor descriptors do not take them."""
HOPPER_ROWS = 512
"""Rows from which Hopper's kernel serves.

Seen on an H200 (gpu_gemm.py, 2026-11-30), all linear layers of Qwen2.5-7B's shape, milliseconds by
Triton's kernel / Hopper's: 5.27 / 5.78 at 256 rows, 8.69 / 6.81 at 512, 12.4 / 9.93 at 1024, 45.6 /
35.5 at 4096.
"""


def _hopper_product(device: torch.device) -> Callable[..., Tensor] | None:
    """Return Hopper's kernel where the GPU and Triton run it."""
    if device.type != "cuda":
        return None
    if not has_hopper_kernel(torch.cuda.get_device_capability(device), triton.__version__):
        return None
    # Gluon is part of that release of Triton alone.
    from tailrace.kernels.linear.triton_hopper_int8 import int8_hopper  # noqa: PLC0415

    return int8_hopper


class Int8Linear(RoundsRows):
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
        if any(size % ALIGNMENT for size in weight_OI.shape):
            raise ConfigError(
                f"int8 weight {list(weight_OI.shape)}: inputs and outputs must be multiples of "
                f"{ALIGNMENT}"
            )
        self._weight = quantize_channels(weight_OI.to(device))
        self._dtype, self._device = dtype, device
        self.bias_O = None if bias_O is None else bias_O.to(device, dtype).contiguous()
        keep_matrix(self._weight.shape[1], dtype, device)
        self._hopper = _hopper_product(device)
        self.name = "int8 by channel"
        self.operation = "int8/channel linear"
        (self._tiles,) = self.planned = ways(capability_of(device))

    @property
    def nbytes(self) -> int:
        """Bytes of weight, scales and bias."""
        return self._weight.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._weight.shape

    def weight_rows(self, first: int, end: int) -> Tensor:
        """See `PlannedLinear.weight_rows`."""
        held = self._weight
        return Int8Weight(held.values[first:end], held.scales[first:end]).dequantize()

    def given(self, x_TI: Tensor) -> Int8Rows:
        """See `PlannedLinear.given`."""
        return quantize_rows(x_TI)

    def rounds(self, rows: int) -> bool:  # noqa: ARG002 - of others it depends on their number
        """Tell that rows are rounded, however many."""
        return True

    def write_normed(
        self,
        x_TI: Tensor | None,
        residual_TI: Tensor,
        weight_I: Tensor,
        eps: float,
        out_TO: Tensor,
    ) -> None:
        """See `RoundsRows.write_normed`."""
        rows = add_rms_norm_int8(x_TI, residual_TI, weight_I, eps, dtype=self._dtype)
        self._multiply(rows, out_TO)

    def write_silu_mul(self, gate_up_T2I: Tensor, out_TO: Tensor) -> None:
        """See `RoundsRows.write_silu_mul`."""
        self._multiply(silu_mul_int8(gate_up_T2I), out_TO)

    def write(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """See `DeviceLinear.write`."""
        self._multiply(quantize_rows(x_TI), out_TO)

    def __call__(self, x_TI: Tensor | Int8Rows) -> Tensor:
        """Return [T, O] in the activations' dtype; x is contiguous, of that dtype or rounded."""
        x = quantize_rows(x_TI) if isinstance(x_TI, torch.Tensor) else x_TI
        rows = x.values.shape[0]
        out_TO = torch.empty(rows, self.sizes[0], dtype=self._dtype, device=self._device)
        self._multiply(x, out_TO)
        return out_TO

    def _multiply(self, x: Int8Rows, out_TO: Tensor) -> None:
        rows = len(out_TO)
        if not rows:
            return
        if self._hopper is not None and rows >= HOPPER_ROWS:
            self._hopper(x, self._weight, self.bias_O, self._dtype, out_TO=out_TO)
            return
        shape = self._tiles.of(rows)
        int8_product(x, self._weight, self.bias_O, self._dtype, out_TO=out_TO, shape=shape)
