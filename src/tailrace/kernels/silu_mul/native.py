"""silu(gate) * up by the compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.kernels.native.memory import address

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.native.library import Library


def silu_mul(library: Library, gate_up_T2F: Tensor) -> Tensor:
    """Return silu of the left half times the right half, float32 [T, F]."""
    num_rows, both = gate_up_T2F.shape
    width = both // 2
    y_TF = torch.empty((num_rows, width), dtype=torch.float32)
    library.silu_mul(
        address(gate_up_T2F, num_rows * 2 * width),
        y_TF.data_ptr(),
        num_rows,
        width,
        library.threads,
    )
    return y_TF
