"""A weight in float8 (e4m3) with scales: FP8 checkpoints' arithmetic, in one form for all of them.

    w[n, k] = value[n, k] * scale          scheme "tensor":    scales [1]
                          * scale[n]               "channel":   scales [N]
                          * scale[n // 128, k // 128]  "block128":  [ceil(N / 128), ceil(K / 128)]

Scales multiply: a checkpoint's `weight_scale_inv` is, against its name, such a scale too. The last
row and column of blocks may be cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tailrace.errors import ConfigError

Float8Scheme = Literal["tensor", "channel", "block128"]

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
BLOCK = 128


@dataclass(frozen=True)
class Float8Weight:
    """One weight [N, K]; both tensors are contiguous and on one device.

    Raises:
        ConfigError: Shapes, dtypes and the scheme do not go together; says which.
    """

    values: Tensor
    """float8_e4m3fn [N, K]."""
    scales: Tensor
    """float32, of the scheme's shape."""
    scheme: Float8Scheme

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        if self.values.dtype != FLOAT8 or self.scales.dtype != torch.float32:
            raise ConfigError(
                f"float8 values and scales are {self.values.dtype} and {self.scales.dtype}: must "
                "be float8_e4m3fn and float32"
            )
        expected = scales_shape(self.scheme, *self.values.shape)
        if tuple(self.scales.shape) != expected:
            raise ConfigError(
                f"float8 scales have shape {list(self.scales.shape)}, expected {list(expected)} "
                f'for a weight {list(self.values.shape)} of scheme "{self.scheme}"'
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, (N, K)."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K] in `dtype`; products are float32, then rounded once."""
        outputs, inputs = self.shape
        scales = self.scales
        if self.scheme == "channel":
            scales = scales.unsqueeze(1)
        elif self.scheme == "block128":
            scales = scales.repeat_interleave(BLOCK, 0)[:outputs]
            scales = scales.repeat_interleave(BLOCK, 1)[:, :inputs]
        return (self.values.to(torch.float32) * scales).to(dtype)


def scales_shape(scheme: Float8Scheme, outputs: int, inputs: int) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [outputs, inputs].

    Raises:
        ConfigError: The scheme is unknown.
    """
    if scheme == "tensor":
        return (1,)
    if scheme == "channel":
        return (outputs,)
    if scheme == "block128":
        return (-(-outputs // BLOCK), -(-inputs // BLOCK))
    raise ConfigError(f'float8 scheme "{scheme}": must be tensor, channel or block128')


def quantize_channels(weight_OI: Tensor) -> Float8Weight:
    """Round a weight to float8 with a scale for each output, its largest value mapped to 448.

    Args:
        weight_OI: Any float dtype.
    """
    wide = weight_OI.to(torch.float32)
    scales = _scales(wide.abs().amax(1))
    return Float8Weight(_rounded(wide / scales.unsqueeze(1)), scales, "channel")


def quantize_blocks(weight_OI: Tensor) -> Float8Weight:
    """Round a weight to float8 with a scale for each 128 x 128 block.

    Args:
        weight_OI: Any float dtype.
    """
    outputs, inputs = weight_OI.shape
    rows, columns = scales_shape("block128", outputs, inputs)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, device=weight_OI.device)
    padded[:outputs, :inputs] = weight_OI
    scales = _scales(padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)))
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    values = _rounded((padded / spread)[:outputs, :inputs])
    return Float8Weight(values, scales, "block128")


def _scales(peaks: Tensor) -> Tensor:
    # Zeros have a scale all the same, or 0 / 0 would make NaN of them.
    return (peaks / FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)


def _rounded(values: Tensor) -> Tensor:
    # The conversion makes NaN of what is beyond the largest value by more than rounding.
    return values.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).contiguous()
