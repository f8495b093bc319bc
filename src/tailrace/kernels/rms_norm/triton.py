"""RMS norm in Triton, with the residual's sum: one program a row, one pass over memory.

read x (2 bytes) and residual (4), write residual (4) and y (2): 12 bytes a value
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import launch_options, let_next_start, wait_for_last

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_X: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    wait_for_last(DEPENDENT)
    values = tl.load(residual_ptr + row * WIDTH + columns, mask=is_column, other=0.0)
    values = values.to(tl.float32)
    if HAS_X:
        x = tl.load(x_ptr + row * WIDTH + columns, mask=is_column, other=0.0)
        values += x.to(tl.float32)
        tl.store(residual_ptr + row * WIDTH + columns, values, mask=is_column)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    y = values * scale * weight
    tl.store(out_ptr + row * WIDTH + columns, y.to(out_ptr.dtype.element_ty), mask=is_column)


def add_rms_norm(
    x_TD: Tensor | None,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """Add x to the residual in place and return the RMS norm of the sum, `out_dtype` [T, D].

    Args:
        x_TD: Any float dtype, contiguous; None adds nothing, and the residual is only read.
        residual_TD: float32, contiguous.
        weight_D: float32.
        eps: Added to the mean square.
        out_dtype: Of the result.
    """
    rows, width = residual_TD.shape
    out_TD = torch.empty(rows, width, dtype=out_dtype, device=residual_TD.device)
    if rows == 0:
        return out_TD
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        residual_TD if x_TD is None else x_TD,
        residual_TD,
        weight_D,
        out_TD,
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_X=x_TD is not None,
        num_warps=min(max(block // 512, 1), 8),
        **launch_options(),
    )
    return out_TD
