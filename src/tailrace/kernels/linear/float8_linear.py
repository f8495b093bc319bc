"""A linear layer over FP8 weights on a GPU: few rows in half precision or rounded, many in FP8.

Up to `MOST_ROWS` rows a product is bound by the weight's bytes: it is widened in registers, and
activations are not rounded. Beyond, arithmetic counts, and FP8 has twice as much of it: rows are
rounded to FP8 by scales of their own (`float8_rows`), unless they come so, and multiplied by torch
(`torch_float8`) or by our own kernel (`triton_float8`). Torch takes a scale an output everywhere,
and blocks of 128 x 128 on Hopper only; elsewhere those are our own kernel's.

    rows             ..32           ..128               more
    by default       widened        rounded, many       rounded, many
    rounding all     rounded, few   rounded, few        rounded, many

Widening takes longer than the weight's bytes do. A layer that rounds all rows multiplies few of
them as they are: a choice of accuracy, which no plan makes. On Hopper one of two kernels does then,
by a table or a plan (`hopper_float8_ways`), elsewhere `triton_float8_few`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.attention_shapes import INTERPRETER
from tailrace.kernels.linear.device_linear import RoundsRows
from tailrace.kernels.linear.float8 import BLOCK, Float8Weight
from tailrace.kernels.linear.float8_rows import Float8Rows
from tailrace.kernels.linear.int4_linear import has_hopper_kernel
from tailrace.kernels.linear.torch_float8 import TorchFloat8, multiplies
from tailrace.kernels.linear.triton_float8 import (
    MOST_ROWS,
    float8_many,
    float8_skinny,
    skinny_splits,
    ways,
)
from tailrace.kernels.linear.triton_float8_few import (
    MOST_FEW_ROWS,
    few_splits,
    few_ways,
    float8_few,
)
from tailrace.kernels.linear.triton_float8_rows import (
    add_rms_norm_float8,
    quantize_rows,
    silu_mul_float8,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.attention_shapes import Capability
    from tailrace.kernels.linear.ways import Ways
    from tailrace.kernels.linear.workspace import Workspace

ALIGNMENT = 16
"""Inputs and outputs are multiples of it, or the hardware's products do not take them."""

ROUNDED = ", few rows rounded"
"""What the name of a layer that rounds all rows ends with."""


def takes(weight: Float8Weight) -> bool:
    """Tell whether the sizes of a weight allow FP8 products."""
    return all(size % ALIGNMENT == 0 for size in weight.shape)


class Float8Linear(RoundsRows):
    """x @ weight.T + bias; sums are float32.

    Args:
        weight: Of any device; may be freed after packing.
        bias_O: Likewise, or none.
        workspace: Shared by all layers of a stream.
        rounds_all: Whether few rows are rounded as well.

    Raises:
        ConfigError: Inputs or outputs are no multiple of 16.
    """

    def __init__(
        self,
        weight: Float8Weight,
        bias_O: Tensor | None,
        workspace: Workspace,
        *,
        rounds_all: bool = False,
    ) -> None:
        if not takes(weight):
            raise ConfigError(
                f"FP8 weight {list(weight.shape)}: inputs and outputs must be multiples of "
                f"{ALIGNMENT}"
            )
        self._weight = _held(weight, workspace.device)
        self._dtype = workspace.dtype
        self.bias_O = None
        if bias_O is not None:
            self.bias_O = bias_O.to(workspace.device, workspace.dtype).contiguous()
        self._workspace = workspace
        outputs, inputs = weight.shape
        most_rows = MOST_FEW_ROWS if rounds_all else MOST_ROWS
        self.group = BLOCK if weight.scheme == "block128" else 0
        """Inputs that share a scale in the rows that it takes; 0: all."""
        self.name = f"FP8 by {weight.scheme}"
        by_torch = multiplies(self._weight, workspace.device)
        if self.group:
            self.name += f", many rows by {'torch' if by_torch else 'Triton'}"
        self.operation = f"fp8/{self._weight.scheme} linear"
        self._torch = TorchFloat8(self._weight, self.bias_O) if by_torch else None
        self._few, self._many = ways(by_torch=by_torch, beyond=most_rows)
        self._rounded: Ways[object] | None = None
        self._multiply_few: Callable[..., Tensor] = float8_few
        room: dict[str, int] = {}
        self.planned: tuple[Ways[object], ...] = (self._few, self._many)
        if rounds_all:
            self.name += ROUNDED
            self.operation += ROUNDED  # plans of the two kinds of layer name other kernels
            self._rounded = few_ways(_capability(workspace.device))
            if _is_hopper(workspace.device):
                from tailrace.kernels.linear import (  # noqa: PLC0415 - see has_hopper_kernel
                    hopper_float8_ways,
                )

                layer = outputs, inputs, workspace.device
                self._rounded = hopper_float8_ways.ways(*layer)
                self._multiply_few = hopper_float8_ways.multiply
                room = hopper_float8_ways.room(*layer)
            self.planned = (self._rounded, self._many)
        splits, _ = (few_splits if rounds_all else skinny_splits)(outputs, inputs)
        workspace.reserve(outputs=outputs, splits=splits, rows=most_rows, **room)

    @property
    def nbytes(self) -> int:
        """Bytes of weight, scales (those in torch's order, too) and bias."""
        own = 0 if self._torch is None else self._torch.nbytes
        return self._weight.nbytes + own + (0 if self.bias_O is None else self.bias_O.nbytes)

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._weight.shape

    def weight_rows(self, first: int, end: int) -> Tensor:
        """See `PlannedLinear.weight_rows`."""
        weight = self._weight
        grain = BLOCK if weight.scheme == "block128" else 1
        scales = weight.scales[first // grain : -(-end // grain)]
        return Float8Weight(weight.values[first:end], scales, weight.scheme).dequantize()

    def given(self, x_TI: Tensor) -> Tensor | Float8Rows:
        """See `PlannedLinear.given`."""
        return quantize_rows(x_TI, self.group) if self.rounds(x_TI.shape[0]) else x_TI

    def rounds(self, rows: int) -> bool:
        """Tell whether so many rows are multiplied in FP8."""
        return rows > (MOST_ROWS if self._rounded is None else 0)

    def write_normed(
        self,
        x_TI: Tensor | None,
        residual_TI: Tensor,
        weight_I: Tensor,
        eps: float,
        out_TO: Tensor,
    ) -> None:
        """See `RoundsRows.write_normed`."""
        rows = add_rms_norm_float8(x_TI, residual_TI, weight_I, eps, group=self.group)
        self._multiply(rows, out_TO)

    def write_silu_mul(self, gate_up_T2I: Tensor, out_TO: Tensor) -> None:
        """See `RoundsRows.write_silu_mul`."""
        self._multiply(silu_mul_float8(gate_up_T2I, group=self.group), out_TO)

    def write(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """See `DeviceLinear.write`."""
        if self.rounds(x_TI.shape[0]):
            self._multiply(quantize_rows(x_TI, self.group), out_TO)
        elif x_TI.shape[0]:
            float8_skinny(
                x_TI,
                self._weight,
                self.bias_O,
                scratch=self._workspace.scratch,
                shape=self._few.of(x_TI.shape[0]),
                out_TO=out_TO,
            )

    def __call__(self, x_TI: Tensor | Float8Rows) -> Tensor:
        """Return [T, O] in the activations' dtype.

        Args:
            x_TI: Contiguous; float8 only where it `rounds`, in groups of `group`.
        """
        if isinstance(x_TI, Float8Rows):
            out_TO = self._empty(x_TI.values.shape[0])
            self._multiply(x_TI, out_TO)
        else:
            out_TO = self._empty(x_TI.shape[0])
            self.write(x_TI, out_TO)
        return out_TO

    def _empty(self, rows: int) -> Tensor:
        device = self._workspace.device
        return torch.empty(rows, self.sizes[0], dtype=self._dtype, device=device)

    def _multiply(self, x: Float8Rows, out_TO: Tensor) -> None:
        rows = x.values.shape[0]
        if self._rounded is not None and rows <= MOST_FEW_ROWS:
            if rows:
                self._multiply_few(
                    x,
                    self._weight,
                    self.bias_O,
                    self._dtype,
                    scratch=self._workspace.scratch,
                    shape=self._rounded.of(rows),
                    out_TO=out_TO,
                )
            return
        shape = self._many.of(rows)
        if shape is not None:
            float8_many(x, self._weight, self.bias_O, self._dtype, shape=shape, out_TO=out_TO)
        elif self._torch is None:
            raise EngineError(f"{self.name}: torch was chosen, which does not take it here")
        else:
            self._torch.write(x, out_TO)


def _is_hopper(device: torch.device) -> bool:
    """Tell whether a GPU runs kernels that are written for Hopper."""
    if device.type != "cuda":
        return False
    return has_hopper_kernel(torch.cuda.get_device_capability(device), triton.__version__)


def _capability(device: torch.device) -> Capability:
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_capability(device) if on_gpu else INTERPRETER


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
