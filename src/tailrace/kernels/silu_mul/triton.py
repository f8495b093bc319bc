"""silu(gate) * up in Triton: reads 4 bytes and writes 2 for each value of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import launch_options, take_turn
from tailrace.kernels.weight_prefetch.gaps import asked_ahead
from tailrace.kernels.weight_prefetch.triton import NOT_SPECIALIZED, ask_ahead, past_own

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def silu_mul_kernel(
    x_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ahead_first=None,
    first_stride=0,
    first_piece=0,
    first_count=0,
    ahead_second=None,
    second_stride=0,
    second_piece=0,
    second_count=0,
    AHEAD: tl.constexpr = 0,
    BULK: tl.constexpr = False,
    KEPT: tl.constexpr = False,
):
    take_turn(DEPENDENT)
    if AHEAD > 0:
        program = past_own(AHEAD)
        if program >= 0:
            ask_ahead(
                program, AHEAD, ahead_first, first_stride, first_piece, first_count, ahead_second,
                second_stride, second_piece, second_count, BULK, KEPT,
            )  # fmt: skip
            return
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
    blocks = triton.cdiv(width, BLOCK)
    ahead = asked_ahead("silu")
    silu_mul_kernel[(blocks, rows + ahead.programs(blocks))](
        gate_up_T2F,
        out_TF,
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=4,
        **ahead.arguments(blocks),
        **launch_options(),
    )
    return out_TF
