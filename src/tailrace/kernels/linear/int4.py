"""A weight in 4 bits with a scale and a zero point for each group of inputs: AWQ's arithmetic.

    w[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group]

This is the form that every checkpoint layout is read into, and that every kernel packs from: plain
rows, two codes a byte, nothing interleaved. Its `dequantize` is the truth for the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.errors import ConfigError

LARGEST_CODE = 15


@dataclass(frozen=True)
class GroupInt4:
    """One weight [N, K]; all tensors are contiguous and on one device.

    Raises:
        ConfigError: Shapes, dtypes or the group do not go together; says which.
    """

    codes: Tensor
    """uint8 [N, K // 2]: the low nibble is the even k."""
    scales: Tensor
    """float16 or bfloat16 [N, K // group]."""
    zeros: Tensor
    """uint8 [N, K // group], 0 to 15; 8 everywhere where the checkpoint is symmetric."""
    group: int
    """Inputs that share a scale; even, and K is a multiple of it."""

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        if self.group < 2 or self.group % 2:
            raise ConfigError(f"int4 group {self.group}: must be even and at least 2")
        if self.codes.dtype != torch.uint8 or self.zeros.dtype != torch.uint8:
            raise ConfigError(
                f"int4 codes and zeros are {self.codes.dtype} and {self.zeros.dtype}: must be uint8"
            )
        if self.scales.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(f"int4 scales are {self.scales.dtype}: must be float16 or bfloat16")
        outputs, half = self.codes.shape
        if 2 * half % self.group:
            raise ConfigError(
                f"int4 weight [{outputs}, {2 * half}]: {2 * half} inputs are no multiple of the "
                f"group, {self.group}"
            )
        expected = (outputs, 2 * half // self.group)
        for name, part in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(part.shape) != expected:
                raise ConfigError(
                    f"int4 {name} have shape {list(part.shape)}, expected {list(expected)} for a "
                    f"weight [{outputs}, {2 * half}] in groups of {self.group}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, (N, K)."""
        outputs, half = self.codes.shape
        return outputs, 2 * half

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes

    def unpacked(self) -> Tensor:
        """Return the codes, uint8 [N, K]."""
        return torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K] in `dtype`; products are exact in float32, then rounded once."""
        outputs, inputs = self.shape
        codes = self.unpacked().view(outputs, inputs // self.group, self.group)
        # In float32: a code less a zero has 5 bits, a scale at most 11.
        steps = codes.to(torch.float32) - self.zeros.to(torch.float32).unsqueeze(-1)
        return (steps * self.scales.to(torch.float32).unsqueeze(-1)).flatten(1).to(dtype)


def quantize_groups(
    weight_OI: Tensor, group: int, scale_dtype: torch.dtype = torch.float16
) -> GroupInt4:
    """Round a weight to 4 bits, each group between its own least and greatest value.

    Args:
        weight_OI: Any float dtype; its inputs are a multiple of `group`.
        group: Inputs that share a scale.
        scale_dtype: float16 or bfloat16.

    Raises:
        ConfigError: The inputs are no multiple of the group.
    """
    outputs, inputs = weight_OI.shape
    if inputs % group:
        raise ConfigError(f"int4: {inputs} inputs are no multiple of the group, {group}")
    groups = weight_OI.to(torch.float32).view(outputs, inputs // group, group)
    low = groups.amin(-1).clamp(max=0.0)
    high = groups.amax(-1).clamp(min=0.0)
    least = torch.finfo(scale_dtype).tiny  # a group of zeros has a scale all the same
    scales = ((high - low) / LARGEST_CODE).clamp(min=least).to(scale_dtype)
    wide = scales.to(torch.float32)
    zeros = (-low / wide).round().clamp(0, LARGEST_CODE)
    codes = (groups / wide.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    flat = codes.clamp(0, LARGEST_CODE).to(torch.uint8).flatten(1)
    packed = flat[:, 0::2] | (flat[:, 1::2] << 4)
    return GroupInt4(packed.contiguous(), scales, zeros.to(torch.uint8), group)
