"""silu(gate) * up in Triton: reads 4 bytes and writes 2 for each value of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import launch_options, take_turn

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


@triton.jit
def silu_mul_kernel(
    x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    take_turn(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + columns, mask=is_column, other=0.0)
    y = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, y.to(out_ptr.dtype.element_ty), mask=is_column)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return silu of the left half times the right half, [T, F] in the input's dtype.

    Args:
        gate_up_T2F: Contiguous.
    """
    rows, twice = gate_up_T2F.shape
    width = twice // 2
    out_TF = torch.empty(rows, width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if rows == 0:
        return out_TF
    silu_mul_kernel[(triton.cdiv(width, BLOCK), rows)](
        gate_up_T2F, out_TF, WIDTH=width, BLOCK=BLOCK, num_warps=4, **launch_options()
    )
    return out_TF
