"""Rows to int8 in Triton: alone, or in the pass that makes them (RMS norm, SiLU-mul).

One program a row: the row is made, rotated (`int8`), measured and written once, in one byte a
value. The rotation is a product with the Hadamard matrix on the tensor cores; its entries are 1 and
-1, and the row is rounded to the activations' dtype before it, as it would be without int8.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from tailrace.kernels.linear.int8 import LEAST_SCALE, block_of, hadamard
from tailrace.kernels.linear.int8_rows import Int8Rows

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 2048
"""Columns that an MLP's row is made in at a time."""
_LEAST: tl.constexpr = tl.constexpr(LEAST_SCALE)
_MAGIC: tl.constexpr = tl.constexpr(1.5 * 2**23)
"""Added and taken away again, it rounds a float32 below 2^22 to a whole number, ties to even."""


@triton.jit
def _turned(values, matrix_ptr, BLOCK: tl.constexpr, ROTATED: tl.constexpr):
    """Rotate float32 [BLOCK]: [BLOCK // ROTATED, ROTATED]."""
    inner = tl.arange(0, ROTATED)
    matrix = tl.load(matrix_ptr + inner[:, None] * ROTATED + inner[None, :])
    blocks = tl.reshape(values.to(matrix.dtype), [BLOCK // ROTATED, ROTATED])
    # ROTATED ** -0.5 makes the rows of the matrix unit ones.
    return tl.dot(blocks, matrix, input_precision="ieee") * (ROTATED**-0.5)


@triton.jit
def _peak(turned):
    """Return the largest absolute value, or NaN where anything is not finite."""
    # A maximum alone would step over a NaN; what is finite adds 0.
    spoiled = tl.sum(tl.sum(turned * 0.0, 1), 0)
    return tl.max(tl.max(tl.abs(turned), 1), 0) + spoiled


@triton.jit
def _scale(peak):
    # `peak * 0` is 0, or NaN where the peak is.
    return tl.maximum(peak / 127.0, _LEAST) + peak * 0.0


@triton.jit
def _rounded(turned, scale, BLOCK: tl.constexpr):
    whole = (turned * (1.0 / scale) + _MAGIC) - _MAGIC
    return tl.reshape(tl.clamp(whole, -127.0, 127.0), [BLOCK]).to(tl.int8)


@triton.jit
def _store_int8(
    values, row, matrix_ptr, values_ptr, scales_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    """Rotate, scale and store a row, float32 [BLOCK], whose columns from WIDTH on are 0."""
    columns = tl.arange(0, BLOCK)
    turned = _turned(values, matrix_ptr, BLOCK, ROTATED)
    scale = _scale(_peak(turned))
    tl.store(scales_ptr + row, scale)
    whole = _rounded(turned, scale, BLOCK)
    tl.store(values_ptr + row * WIDTH + columns, whole, mask=columns < WIDTH)


@triton.jit
def quantize_rows_kernel(
    x_ptr, matrix_ptr, values_ptr, scales_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + columns, mask=columns < WIDTH, other=0.0)
    _store_int8(
        x.to(tl.float32), row, matrix_ptr, values_ptr, scales_ptr, WIDTH, BLOCK, ROTATED
    )  # fmt: skip


@triton.jit
def rms_norm_int8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    matrix_ptr,
    values_ptr,
    scales_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    HAS_X: tl.constexpr,
):
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
    y = values * scale * weight
    _store_int8(y, row, matrix_ptr, values_ptr, scales_ptr, WIDTH, BLOCK, ROTATED)


@triton.jit
def _silu_mul(x_ptr, row, begin, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = begin + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + columns, mask=is_column, other=0.0)
    return gate * tl.sigmoid(gate) * up.to(tl.float32)


@triton.jit
def silu_mul_int8_kernel(
    x_ptr, matrix_ptr, values_ptr, scales_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    # In pieces, and twice: a row of an MLP is too long to be held while its peak is found.
    row = tl.program_id(0).to(tl.int64)
    peak = 0.0
    for begin in tl.range(0, WIDTH, BLOCK, num_stages=1):
        found = _peak(
            _turned(_silu_mul(x_ptr, row, begin, WIDTH, BLOCK), matrix_ptr, BLOCK, ROTATED)
        )
        peak = tl.maximum(peak, found, propagate_nan=tl.PropagateNan.ALL)
    scale = _scale(peak)
    tl.store(scales_ptr + row, scale)
    for begin in tl.range(0, WIDTH, BLOCK, num_stages=1):
        turned = _turned(_silu_mul(x_ptr, row, begin, WIDTH, BLOCK), matrix_ptr, BLOCK, ROTATED)
        columns = begin + tl.arange(0, BLOCK)
        whole = _rounded(turned, scale, BLOCK)
        tl.store(values_ptr + row * WIDTH + columns, whole, mask=columns < WIDTH)


def quantize_rows(x_TK: Tensor) -> Int8Rows:
    """See `int8_rows.quantize_rows`; x is contiguous."""
    rows, width = x_TK.shape
    out = _empty(rows, width, x_TK.device)
    if rows:
        quantize_rows_kernel[(rows,)](
            x_TK,
            _matrix(block_of(width), x_TK.dtype, x_TK.device),
            out.values,
            out.scales,
            **_constants(width),
        )
    return out


def add_rms_norm_int8(
    x_TD: Tensor | None,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
) -> Int8Rows:
    """Add x to the residual in place and return the RMS norm of the sum in int8.

    Args:
        x_TD: Any float dtype, contiguous; None adds nothing, and the residual is only read.
        residual_TD: float32, contiguous.
        weight_D: float32.
        eps: Added to the mean square.
        dtype: Of activations.
    """
    rows, width = residual_TD.shape
    out = _empty(rows, width, residual_TD.device)
    if rows:
        rms_norm_int8_kernel[(rows,)](
            residual_TD if x_TD is None else x_TD,
            residual_TD,
            weight_D,
            _matrix(block_of(width), dtype, residual_TD.device),
            out.values,
            out.scales,
            eps,
            HAS_X=x_TD is not None,
            **_constants(width),
        )
    return out


def silu_mul_int8(gate_up_T2F: Tensor) -> Int8Rows:
    """Return silu of the left half times the right half in int8; the input is contiguous."""
    rows, twice = gate_up_T2F.shape
    width = twice // 2
    out = _empty(rows, width, gate_up_T2F.device)
    if rows:
        silu_mul_int8_kernel[(rows,)](
            gate_up_T2F,
            _matrix(block_of(width), gate_up_T2F.dtype, gate_up_T2F.device),
            out.values,
            out.scales,
            **_constants(width, PIECE),
        )
    return out


def keep_matrix(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Have the matrix for rows of this width on the device, before a graph would make it."""
    _matrix(block_of(width), dtype, device)


@lru_cache(maxsize=32)
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A captured graph holds its address, and there are fewer of them than are kept.
    return hadamard(size).to(device, dtype)


def _empty(rows: int, width: int, device: torch.device) -> Int8Rows:
    scales = torch.empty(rows, dtype=torch.float32, device=device)
    return Int8Rows(torch.empty(rows, width, dtype=torch.int8, device=device), scales)


def _constants(width: int, piece: int = 0) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 4), 16)
    if piece:
        block, warps = min(block, piece), 8
    return {"WIDTH": width, "BLOCK": block, "ROTATED": block_of(width), "num_warps": warps}
