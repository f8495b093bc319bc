"""Which packed form a weight takes on a CPU.

Quantised weights are unpacked once, at load, and then served like any other: torch's 4- and 8-bit
products for CPUs want bfloat16 activations and are two to three times slower than float16 weights
at every batch (docs/adr/0007). In float32 this is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.kernels.linear.bfloat16 import Bfloat16Linear
from tailrace.kernels.linear.fbgemm import Float16Linear
from tailrace.kernels.linear.mkldnn import PackedFloat32Linear
from tailrace.kernels.linear.reference import Float32Linear
from tailrace.kernels.linear.weight import plain

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.kernels import Linear, WeightDtype
    from tailrace.kernels.linear.weight import Weight


def pack_linear(weight: Weight, bias_O: Tensor | None, dtype: WeightDtype) -> Linear:
    """Pack a weight for the machine; float16 and bfloat16 round it.

    Raises:
        ConfigError: The weight does not fit float16's range, or the processor has no bfloat16.
    """
    weight_OI = plain(weight)
    if dtype == "float16":
        return Float16Linear(weight_OI, bias_O)
    if dtype == "bfloat16":
        return Bfloat16Linear(weight_OI, bias_O)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call] # torch's own gap
        return PackedFloat32Linear(weight_OI, bias_O)
    return Float32Linear(weight_OI, bias_O)


def head_dtype(dtype: WeightDtype) -> WeightDtype:
    """Return float16 for bfloat16: logits rounded to 8 bits would tie, and the head is cheap.

    It sees the sampled rows only, so that its speed hardly counts.
    """
    return "float16" if dtype == "bfloat16" else dtype
