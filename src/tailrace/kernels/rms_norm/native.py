"""RMS norm by the compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.kernels.native.memory import address

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.native.library import Library


def rms_norm(
    library: Library,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
) -> Tensor:
    """Return the norm of x, or, with a residual, of residual += x."""
    y_TD = torch.empty_like(x_TD)
    width = weight_D.numel()
    num_rows = x_TD.numel() // width
    residual = None if residual_TD is None else address(residual_TD, x_TD.numel())
    library.rms_norm(
        address(x_TD, num_rows * width),
        residual,
        address(weight_D, width),
        y_TD.data_ptr(),
        num_rows,
        width,
        eps,
        library.threads,
    )
    return y_TD
