"""In which formats a layer's weight is copied for prompts: one entry each, and nothing else to add.

A copy is made on the device, from the layer that serves decodes, one layer after the other: beside
it there is room for one layer's weight in float32, never for a second model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tailrace.kernels.attention_shapes import FLOAT8_CAPABILITY
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.float8 import FLOAT8, Float8Weight, quantize_channels
from tailrace.kernels.linear.float8_linear import ALIGNMENT, Float8Linear
from tailrace.kernels.linear.int8_linear import ALIGNMENT as INT8_ALIGNMENT
from tailrace.kernels.linear.int8_linear import Int8Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.attention_shapes import Capability
    from tailrace.kernels.linear.device_linear import DeviceLinear
    from tailrace.kernels.linear.workspace import Workspace

_PART_BYTES = 64 << 20
"""Of float32 weight that is rounded at once."""


class CopiedLinear(Protocol):
    """A layer that a copy can be made of."""

    bias_O: Tensor | None  # noqa: N815 - a shape's suffix

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        ...

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I] in `dtype`."""
        ...


@dataclass(frozen=True)
class PrefillFormat:
    """One format of a prompts' copy."""

    name: str
    """As `--prefill-weights` names it."""
    words: str
    make: Callable[[CopiedLinear, Workspace], DeviceLinear]
    """Returns the copy of a layer; it shares the layer's bias."""
    weight_bytes: Callable[[int, int], int]
    """Of a weight of so many outputs and inputs."""
    alignment: int
    """Outputs and inputs are multiples of it."""
    least_capability: Capability
    rounds: bool
    """Whether it is coarser than half precision, so that its accuracy must have been measured."""

    def takes(self, sizes: tuple[int, int]) -> bool:
        """Tell whether a layer of these outputs and inputs can be copied."""
        return all(size % self.alignment == 0 for size in sizes)


def _half(layer: CopiedLinear, workspace: Workspace) -> CublasLinear:
    weight_OI = layer.unpacked(workspace.dtype)
    return CublasLinear(weight_OI, layer.bias_O, workspace.dtype, workspace.device)


def _float8(layer: CopiedLinear, workspace: Workspace) -> Float8Linear:
    weight = quantize_in_parts(layer.unpacked(torch.float32))
    return Float8Linear(weight, layer.bias_O, workspace)


def _int8(layer: CopiedLinear, workspace: Workspace) -> Int8Linear:
    weight_OI = layer.unpacked(torch.float32)
    return Int8Linear(weight_OI, layer.bias_O, workspace.dtype, workspace.device)


def quantize_in_parts(weight_OI: Tensor) -> Float8Weight:
    """Return `float8.quantize_channels` of a weight, made of few outputs at a time."""
    outputs, inputs = weight_OI.shape
    device = weight_OI.device
    values = torch.empty(outputs, inputs, dtype=torch.uint8, device=device)
    scales = torch.empty(outputs, dtype=torch.float32, device=device)
    step = max(1, _PART_BYTES // (4 * inputs))
    for start in range(0, outputs, step):
        part = quantize_channels(weight_OI[start : start + step])
        values[start : start + step] = part.values.view(torch.uint8)
        scales[start : start + step] = part.scales
    return Float8Weight(values.view(FLOAT8), scales, "channel")


HALF = PrefillFormat(
    "bf16",
    "half precision",
    _half,
    lambda outputs, inputs: 2 * outputs * inputs,
    alignment=1,
    least_capability=(8, 0),
    rounds=False,
)
"""The activations' dtype, whichever of the two it is; what 4-bit weights are written out to where
prompts have no copy."""

FORMATS: dict[str, PrefillFormat] = {
    made.name: made
    for made in (
        PrefillFormat(
            "fp8",
            "FP8 with a scale an output",
            _float8,
            lambda outputs, inputs: outputs * (inputs + 4),
            alignment=ALIGNMENT,
            least_capability=FLOAT8_CAPABILITY,
            rounds=True,
        ),
        PrefillFormat(
            "int8",
            "int8 with a scale an output",
            _int8,
            lambda outputs, inputs: outputs * (inputs + 4),
            alignment=INT8_ALIGNMENT,
            least_capability=(8, 0),
            rounds=True,
        ),
        HALF,
    )
}
"""By name, the fastest first: `auto` asks them in this order.

Seen on an H200 at 1024 rows of all layers of Qwen2.5-7B's shape: fp8 10.6 ms, int8 15.2, half
precision 17.2 (docs/performance.md).
"""
