"""Rows to float8 in Triton: alone, or in the pass that makes them (RMS norm, SiLU-mul).

One program a row. Rounded where it is made, a value is written once, in one byte, where it would be
written in two, read and written again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import launch_options, take_turn
from tailrace.kernels.linear.float8_rows import LEAST_SCALE, Float8Rows, empty_rows

if TYPE_CHECKING:
    from torch import Tensor

_LEAST: tl.constexpr = tl.constexpr(LEAST_SCALE)


@triton.jit
def _store_float8(
    values, row, values_ptr, scales_ptr, scales_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Scale and store a row, float32 [BLOCK], whose columns from WIDTH on are 0; GROUP 0: whole.

    From one group's scales to the next it is scales_stride.
    """
    columns = tl.arange(0, BLOCK)
    out = values_ptr + row * WIDTH + columns
    if GROUP == 0:
        scale = tl.maximum(tl.max(tl.abs(values), 0) / 448.0, _LEAST)
        scaled = values / scale
        tl.store(scales_ptr + row, scale)
    else:
        GROUPS: tl.constexpr = BLOCK // GROUP
        wide = tl.reshape(values, [GROUPS, GROUP])
        scale = tl.maximum(tl.max(tl.abs(wide), 1) / 448.0, _LEAST)
        scaled = tl.reshape(wide / scale[:, None], [BLOCK])
        count: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        groups = tl.arange(0, GROUPS)
        tl.store(scales_ptr + groups * scales_stride + row, scale, mask=groups < count)
    scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out, scaled.to(values_ptr.dtype.element_ty), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["scales_stride"])
def quantize_rows_kernel(
    x_ptr, values_ptr, scales_ptr, scales_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    _store_float8(x, row, values_ptr, scales_ptr, scales_stride, WIDTH, BLOCK, GROUP)


@triton.jit(do_not_specialize=["scales_stride"])
def rms_norm_float8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    values_ptr,
    scales_ptr,
    scales_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_X: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    values = tl.load(residual_ptr + row * WIDTH + columns, mask=is_column, other=0.0)
    if HAS_X:
        x = tl.load(x_ptr + row * WIDTH + columns, mask=is_column, other=0.0)
        values += x.to(tl.float32)
        tl.store(residual_ptr + row * WIDTH + columns, values, mask=is_column)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    _store_float8(
        values * scale * weight, row, values_ptr, scales_ptr, scales_stride, WIDTH, BLOCK, GROUP
    )


@triton.jit(do_not_specialize=["scales_stride"])
def silu_mul_float8_kernel(
    x_ptr, values_ptr, scales_ptr, scales_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + columns, mask=is_column, other=0.0)
    y = gate * tl.sigmoid(gate) * up.to(tl.float32)
    _store_float8(y, row, values_ptr, scales_ptr, scales_stride, WIDTH, BLOCK, GROUP)


def quantize_rows(x_TK: Tensor, group: int = 0) -> Float8Rows:
    """See `float8_rows.quantize_rows`; x is contiguous."""
    rows, width = x_TK.shape
    out = empty_rows(rows, width, group, x_TK.device)
    if rows:
        quantize_rows_kernel[(rows,)](
            x_TK, out.values, out.scales, out.scales.stride(1), **_constants(width, group)
        )
    return out


def add_rms_norm_float8(
    x_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, eps: float, *, group: int = 0
) -> Float8Rows:
    """Add x to the residual in place and return the RMS norm of the sum in float8.

    Args:
        x_TD: Any float dtype, contiguous; None adds nothing, and the residual is only read.
        residual_TD: float32, contiguous.
        weight_D: float32.
        eps: Added to the mean square.
        group: Inputs that share a scale; 0 takes the whole row.
    """
    rows, width = residual_TD.shape
    out = empty_rows(rows, width, group, residual_TD.device)
    if rows:
        rms_norm_float8_kernel[(rows,)](
            residual_TD if x_TD is None else x_TD,
            residual_TD,
            weight_D,
            out.values,
            out.scales,
            out.scales.stride(1),
            eps,
            HAS_X=x_TD is not None,
            **_constants(width, group),
        )
    return out


def silu_mul_float8(gate_up_T2F: Tensor, *, group: int = 0) -> Float8Rows:
    """Return silu of the left half times the right half in float8; the input is contiguous."""
    rows, twice = gate_up_T2F.shape
    out = empty_rows(rows, twice // 2, group, gate_up_T2F.device)
    if rows:
        silu_mul_float8_kernel[(rows,)](
            gate_up_T2F,
            out.values,
            out.scales,
            out.scales.stride(1),
            **_constants(twice // 2, group),
        )
    return out


def _constants(width: int, group: int) -> dict[str, int | bool]:
    block = max(triton.next_power_of_2(width), group)
    warps = min(max(block // 512, 1), 16)
    sizes = {"WIDTH": width, "BLOCK": block, "GROUP": group, "num_warps": warps}
    return sizes | launch_options()
