"""Linear layers over FP8 weights in Triton: few rows in half precision, many in FP8 by blocks.

Few rows: the weight is streamed once and widened in registers; as in `triton_skinny` it is the left
operand, and layers with few outputs split their inputs, the parts being added in order. Activations
are not rounded.

    acc [BLOCK_N, BLOCK_M] += w8 [BLOCK_N, 128].widened @ x.T      then a scale an output
                              ... * scale of the 128 x 128 block    or a scale a step

Many rows: activations are FP8 too, and both operands go to the tensor cores as they are. Where the
weight is scaled by blocks of 128 x 128, rows have a scale for each 128 inputs, and each step of 128
inputs is scaled once; else the sum is, at the end:

    acc [BLOCK_M, BLOCK_N] += (x8 @ w8.T) * x_scale[m, k // 128] * w_scale[n // 128, k // 128]
    acc                    += x8 @ w8.T                 then ... * x_scale[m] * w_scale[n]

(Torch has kernels of both kinds as well: see `torch_float8`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import (
    AHEAD,
    launch_options,
    let_next_start,
    prefetch,
    wait_for_last,
)
from tailrace.kernels.linear.float8 import BLOCK
from tailrace.kernels.linear.triton_split_sum import added_parts, arrives_last
from tailrace.kernels.linear.ways import MANY, Ways

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.float8 import Float8Weight
    from tailrace.kernels.linear.float8_rows import Float8Rows
    from tailrace.kernels.linear.workspace import SplitScratch


@triton.jit(do_not_specialize=["num_rows", "steps", "steps_a_split", "splits"])
def float8_skinny_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals,
    num_rows,
    N,
    K,
    steps,
    steps_a_split,
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_start(DEPENDENT)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    is_output = outputs < N
    is_row = (rows < num_rows)[None, :]
    low = split * steps_a_split
    high = min(low + steps_a_split, steps)
    w_at = w_ptr + outputs.to(tl.int64)[:, None] * K
    x_at = x_ptr + rows[None, :] * K
    dtype = x_ptr.dtype.element_ty
    if DEPENDENT:
        # A step of an output is one line.
        early = (low + tl.arange(0, AHEAD)) * BLOCK_K
        known = tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * K
        prefetch(w_ptr + known + tl.minimum(early, K - 1)[None, :], DEPENDENT)
        wait_for_last(DEPENDENT)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(low, high, num_stages=STAGES):
        columns = step * BLOCK_K + inner
        is_column = columns < K
        w = tl.load(
            w_at + columns[None, :],
            mask=is_output[:, None] & is_column[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_at + columns[:, None], mask=is_column[:, None] & is_row, other=0.0)
        if BY_BLOCKS:
            # BLOCK_N divides 128: a tile lies in one row of blocks.
            scale = tl.load(scale_ptr + (tile * BLOCK_N // 128) * steps + step)
            acc += tl.dot(w.to(dtype), x, input_precision="ieee") * scale
        else:
            acc = tl.dot(w.to(dtype), x, acc, input_precision="ieee")
    places = rows[None, :] * N + outputs[:, None]
    is_place = is_output[:, None] & is_row
    if IS_SPLIT:
        size = num_rows * N
        if not arrives_last(acc, part_ptr, arrivals, tile, split, splits, size, places, is_place):
            return
        acc = added_parts(part_ptr, arrivals, tile, splits, size, places, is_place)
    if not BY_BLOCKS:
        acc *= tl.load(scale_ptr + outputs, mask=is_output, other=0.0)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
        acc += bias[:, None]
    tl.store(out_ptr + places, acc.to(dtype), mask=is_place)


@triton.jit(do_not_specialize=["num_rows", "x_scale_stride"])
def float8_many_kernel(
    x_ptr,
    x_scale_ptr,
    x_scale_stride,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    # Programs that share weights run near one another: GROUP_M rows of tiles, column by column.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(N, BLOCK_N)
    band = program // (GROUP_M * column_tiles)
    band_rows = min(row_tiles - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * column_tiles)
    row_tile = band * GROUP_M + within % band_rows
    column_tile = within // band_rows

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, 128)
    is_row = rows < num_rows
    is_output = outputs < N
    steps = tl.cdiv(K, 128)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * K
    w_at = w_ptr + outputs.to(tl.int64)[None, :] * K
    x_scale_at = x_scale_ptr + rows
    w_scale_at = w_scale_ptr + (column_tile * BLOCK_N // 128) * steps
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps):
        columns = step * 128 + inner
        is_column = columns < K
        x = tl.load(x_at + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        w = tl.load(
            w_at + columns[:, None], mask=is_column[:, None] & is_output[None, :], other=0.0
        )
        if BY_BLOCKS:
            x_scale = tl.load(x_scale_at + step * x_scale_stride, mask=is_row, other=0.0)
            acc += tl.dot(x, w) * (x_scale * tl.load(w_scale_at + step))[:, None]
        else:
            acc = tl.dot(x, w, acc)
    if not BY_BLOCKS:
        acc *= tl.load(x_scale_at, mask=is_row, other=0.0)[:, None]
        acc *= tl.load(w_scale_ptr + outputs, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * N + outputs[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


@dataclass(frozen=True)
class SkinnyFloat8Shape:
    """How the kernel of few rows is specialised for a number of them."""

    block_n: int
    """Divides 128."""
    num_warps: int
    num_stages: int

    @property
    def words(self) -> str:
        """Its name in a plan."""
        return f"{self.block_n} outputs, {self.num_warps} warps, {self.num_stages} stages"


@dataclass(frozen=True)
class Float8Shape:
    """How the kernel of many rows is specialised."""

    block_m: int
    block_n: int
    """Divides 128."""
    num_warps: int
    num_stages: int

    @property
    def words(self) -> str:
        """Its name in a plan."""
        tile = f"{self.block_m}x{self.block_n}"
        return f"Triton {tile}, {self.num_warps} warps, {self.num_stages} stages"


SKINNY_SHAPES: tuple[tuple[int, SkinnyFloat8Shape], ...] = (
    (16, SkinnyFloat8Shape(64, 4, 4)),
    (32, SkinnyFloat8Shape(64, 4, 4)),
)
"""By the rows of the tile, ascending."""

MOST_ROWS = SKINNY_SHAPES[-1][0]
"""That are not rounded. An H200's linear layers of Qwen2.5-7B took 3.78 ms at 32 rows, where
bfloat16 takes 3.80, and 5.17 at 64, where it takes 3.92 and rounded rows take 3.60 at 100."""

GROUP_M = 8
MANY_SHAPE = Float8Shape(128, 128, 8, 3)
"""Of the kernel of many rows; compiled without a spill."""

CANDIDATES: dict[int, tuple[SkinnyFloat8Shape, ...]] = {
    16: (SkinnyFloat8Shape(64, 8, 4), SkinnyFloat8Shape(128, 8, 3)),
    32: (SkinnyFloat8Shape(64, 8, 4), SkinnyFloat8Shape(128, 8, 3)),
}
"""What a plan may choose beside `SKINNY_SHAPES`, by the rows of the tile."""

MANY_CANDIDATES = (
    Float8Shape(64, 128, 4, 3),
    Float8Shape(64, 64, 4, 3),
    Float8Shape(128, 64, 4, 3),
)
"""Likewise, beside `MANY_SHAPE`."""

MANY_CLASSES = (64, 128, 256, 512, MANY)
TORCH = "torch"


def ways(
    *, by_torch: bool, beyond: int = MOST_ROWS
) -> tuple[Ways[SkinnyFloat8Shape], Ways[Float8Shape | None]]:
    """Return what can serve a layer: few rows as they are, and many in FP8; None is torch.

    From how many rows on they are rounded is no choice: see ADR 18.

    Args:
        by_torch: Whether torch multiplies such rows and weights here; it then does by default.
        beyond: The most rows that are few: of classes up to it, many rows are not asked about.
    """
    few = {
        most_rows: {shape.words: shape for shape in (usual, *CANDIDATES[most_rows])}
        for most_rows, usual in SKINNY_SHAPES
    }
    ours: dict[str, Float8Shape | None] = {
        shape.words: shape for shape in (MANY_SHAPE, *MANY_CANDIDATES)
    }
    many = {TORCH: None, **ours} if by_torch else ours
    return Ways(few), Ways(
        {most_rows: many for most_rows in MANY_CLASSES if most_rows > beyond}, many_rows=2048
    )


_PROGRAMS, _MOST_SPLITS, _LEAST_STEPS = 264, 8, 4


def skinny_shape(rows: int) -> tuple[int, SkinnyFloat8Shape]:
    """Return the tile's rows, and its shape, for at most `MOST_ROWS` rows."""
    return next((block_m, shape) for block_m, shape in SKINNY_SHAPES if rows <= block_m)


def skinny_splits(outputs: int, inputs: int) -> tuple[int, int]:
    """Return into how many parts a layer's inputs are split, and the steps of 128 of one.

    It depends on the layer alone, so a row's sum is cut at the same places in any batch.
    """
    tiles, steps = -(-outputs // 128), -(-inputs // BLOCK)
    splits = max(1, min(-(-_PROGRAMS // tiles), _MOST_SPLITS, steps // _LEAST_STEPS))
    span = -(-steps // splits)
    return -(-steps // span), span


def float8_skinny(
    x_TI: Tensor,
    weight: Float8Weight,
    bias_O: Tensor | None,
    *,
    scratch: SplitScratch,
    shape: SkinnyFloat8Shape | None = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype; sums are float32.

    Args:
        x_TI: Contiguous; 1 to `MOST_ROWS` rows.
        weight: On x's device, of scheme "channel" or "block128".
        bias_O: In x's dtype, or none.
        scratch: Large enough for the layer and the rows.
        shape: Instead of the one in `SKINNY_SHAPES`.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    rows = x_TI.shape[0]
    outputs, inputs = weight.shape
    block_m, usual = skinny_shape(rows)
    shape = shape or usual
    splits, span = skinny_splits(outputs, inputs)
    if out_TO is None:
        out_TO = torch.empty(rows, outputs, dtype=x_TI.dtype, device=x_TI.device)
    float8_skinny_kernel[(triton.cdiv(outputs, shape.block_n), splits)](
        x_TI,
        weight.values,
        weight.scales,
        x_TI if bias_O is None else bias_O,
        out_TO,
        scratch.parts,
        scratch.arrivals,
        rows,
        outputs,
        inputs,
        triton.cdiv(inputs, BLOCK),
        span,
        splits,
        BLOCK_M=block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=BLOCK,
        BY_BLOCKS=weight.scheme == "block128",
        IS_SPLIT=splits > 1,
        HAS_BIAS=bias_O is not None,
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out_TO


def float8_many(
    x: Float8Rows,
    weight: Float8Weight,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    shape: Float8Shape = MANY_SHAPE,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in `dtype`; sums are float32.

    Args:
        x: In groups of 128 where the weight is scaled by blocks, else with one scale a row.
        weight: On x's device, of scheme "channel" or "block128".
        bias_O: In `dtype`, or none.
        dtype: Of the result.
        shape: Of the tiles.
        out_TO: Where it goes, contiguous; by default into new memory.
    """
    rows = x.values.shape[0]
    outputs, inputs = weight.shape
    if out_TO is None:
        out_TO = torch.empty(rows, outputs, dtype=dtype, device=x.values.device)
    grid = (triton.cdiv(rows, shape.block_m) * triton.cdiv(outputs, shape.block_n),)
    float8_many_kernel[grid](
        x.values,
        x.scales,
        x.scales.stride(1),
        weight.values,
        weight.scales,
        out_TO if bias_O is None else bias_O,
        out_TO,
        rows,
        outputs,
        inputs,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        GROUP_M=GROUP_M,
        BY_BLOCKS=weight.scheme == "block128",
        HAS_BIAS=bias_O is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out_TO
