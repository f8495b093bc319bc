"""What a layer's keys and values are divided by where the cache keeps them in float8 (e4m3).

    written   value = saturate(x / scale)          x of the activations' dtype
    read      x = value * scale

A scale is one number for a layer's keys and one for its values, so reading costs nothing: that of
the keys goes into the factor of the scores, that of the values into the end of the sum. A cache in
another dtype is `UNSCALED`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.errors import EngineError, ModelError
from tailrace.kernels.linear.float8 import FLOAT8, FLOAT8_MAX


@dataclass(frozen=True)
class KVScales:
    """One layer's scales, both finite and above 0.

    Raises:
        ModelError: One is not.
    """

    k: float
    v: float

    def __post_init__(self) -> None:
        """Refuse what would make infinity or NaN of every key."""
        for name, scale in (("k", self.k), ("v", self.v)):
            if not (math.isfinite(scale) and scale > 0):
                raise ModelError(f"KV {name}_scale {scale}: must be finite and above 0")


UNSCALED = KVScales(1.0, 1.0)


def quantised(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return what a cache of `dtype` keeps of x; float8 saturates, NaN stays NaN."""
    if dtype != FLOAT8:
        return x.to(dtype)
    return (x.to(torch.float32) * (1 / scale)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def require_unscaled(kernels: str, scales: KVScales) -> None:
    """Refuse scales where no float8 cache can be.

    Raises:
        EngineError: They are not 1.
    """
    if scales != UNSCALED:
        raise EngineError(f"the {kernels} kernels keep KV in float32 and take no KV scales")
