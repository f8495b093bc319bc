"""A weight in int8 with a scale an output, and its inputs rotated: what prompts are multiplied by.

    w[n, k]        = sum over j of rotated[n, j] * H[j, k]      H orthogonal, in blocks along k
    rotated[n, k]  = value[n, k] * scale[n]

x @ w.T is (x @ H.T) @ rotated.T for any orthogonal H. With blocks of a Hadamard matrix (entries of
one size, either sign) an input that is far larger than its neighbours is spread over its block, so
one scale a row and one an output serve them all, and a product is scaled once, at its end. Why int8
and why rotated: docs/adr/0020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.errors import ConfigError

INT8_MAX = 127.0
LEAST_SCALE = 2.0**-100
"""Of zeros, which have a scale all the same."""
MOST_ROTATED = 128
"""Inputs that are rotated together, at most."""
LEAST_ROTATED = 16
MOST_INPUTS = (2**31 - 1) // int(INT8_MAX) ** 2
"""Beyond, a sum may exceed int32."""
_PART_BYTES = 64 << 20
"""Of float32 weight that is rounded at once."""


@dataclass(frozen=True)
class Int8Weight:
    """One weight [N, K]; both tensors are contiguous and on one device.

    Raises:
        ConfigError: Shapes and dtypes do not go together; says which.
    """

    values: Tensor
    """int8 [N, K], of the rotated weight."""
    scales: Tensor
    """float32 [N]."""

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        if self.values.dtype != torch.int8 or self.scales.dtype != torch.float32:
            raise ConfigError(
                f"int8 values and scales are {self.values.dtype} and {self.scales.dtype}: must be "
                "int8 and float32"
            )
        if tuple(self.scales.shape) != self.values.shape[:1]:
            raise ConfigError(
                f"int8 scales have shape {list(self.scales.shape)}, expected "
                f"{list(self.values.shape[:1])} for a weight {list(self.values.shape)}"
            )
        block_of(self.values.shape[1])

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
        """Return the weight [N, K] in `dtype`, rotated back; products are float32, rounded once."""
        # H is symmetric: it is its own inverse.
        return rotate(self.values.to(torch.float32) * self.scales.unsqueeze(1)).to(dtype)


def quantize_channels(weight_OI: Tensor) -> Int8Weight:
    """Rotate a weight and round it to int8, the largest value of each output mapped to 127.

    A few outputs at a time, so that little is held in float32.

    Args:
        weight_OI: Any float dtype; its inputs are a multiple of 16.

    Raises:
        ConfigError: They are not, or are too many.
    """
    outputs, inputs = weight_OI.shape
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=weight_OI.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weight_OI.device)
    step = max(1, _PART_BYTES // (4 * inputs))
    for start in range(0, outputs, step):
        part = slice(start, start + step)
        wide = rotate(weight_OI[part])
        scales[part] = (wide.abs().amax(1) / INT8_MAX).clamp(min=LEAST_SCALE)
        rounded = (wide / scales[part].unsqueeze(1)).round_().clamp_(-INT8_MAX, INT8_MAX)
        values[part] = rounded.to(torch.int8)
    return Int8Weight(values, scales)


def block_of(inputs: int) -> int:
    """Return how many inputs are rotated together: the largest power of 2 that divides them all.

    Raises:
        ConfigError: It is less than 16, or a sum of so many inputs may exceed int32.
    """
    block = min(inputs & -inputs, MOST_ROTATED)
    if block < LEAST_ROTATED or inputs > MOST_INPUTS:
        raise ConfigError(
            f"int8 weight of {inputs} inputs: must be a multiple of {LEAST_ROTATED}, and at most "
            f"{MOST_INPUTS}"
        )
    return block


def hadamard(size: int) -> Tensor:
    """Return Sylvester's matrix of 1 and -1, float32 [size, size]; size is a power of 2."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate(x: Tensor) -> Tensor:
    """Multiply each block of the last dimension by a Hadamard matrix of unit rows; float32.

    Raises:
        ConfigError: See `block_of`.
    """
    block = block_of(x.shape[-1])
    matrix = hadamard(block).to(x.device)
    blocks = x.to(torch.float32).reshape(-1, block)
    turned: Tensor = (blocks @ matrix) * block**-0.5
    return turned.view(x.shape)
