"""A linear layer of few FP8 rows over an FP8 weight in Triton: nothing is widened on the way.

As in `triton_skinny` the weight is the left operand and is streamed once. Rows come rounded
(`float8_rows`), so both operands go from shared memory to the tensor cores as they are:

    acc [BLOCK_N outputs, BLOCK_M rows] += w8 [BLOCK_N, 128] @ x8.T [128, BLOCK_M]
        by channels: ... at the end, * w_scale[n] * x_scale[m]
        by blocks:   each step       * w_scale[n // 128, k // 128] * x_scale[m, k // 128]

Hopper's tensor cores keep some 14 bits of a float8 sum. So a step's 128 inputs are summed there,
and steps in float32: with few rows these additions are hidden by the weight's bytes. (On Ada the
compiler adds steps by channels in the tensor cores as well.)

Tiles come through tensor descriptors on Hopper, and through pointers elsewhere. Layers with few
outputs split their inputs, the same for any number of rows; who comes last adds the parts in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tailrace.kernels.attention_shapes import INTERPRETER
from tailrace.kernels.dependent_launch import (
    AHEAD,
    launch_options,
    let_next_start,
    prefetch,
    wait_for_last,
)
from tailrace.kernels.linear.float8 import BLOCK
from tailrace.kernels.linear.float8_rows import require_few
from tailrace.kernels.linear.triton_split_sum import added_parts, arrives_last
from tailrace.kernels.linear.ways import Ways

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.attention_shapes import Capability
    from tailrace.kernels.linear.float8 import Float8Weight
    from tailrace.kernels.linear.float8_rows import Float8Rows
    from tailrace.kernels.linear.workspace import SplitScratch


@triton.jit
def _load(
    pointer, source, low, begin, limit, K,
    BLOCK_ROWS: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Return rows `low`.., inputs `begin`.. of a matrix [limit, K]; beyond them lie zeros."""
    if BY_DESCRIPTOR:
        tile = source.load([low, begin])
    else:
        rows = low + tl.arange(0, BLOCK_ROWS)
        columns = begin + tl.arange(0, 128)
        tile = tl.load(
            pointer + rows.to(tl.int64)[:, None] * K + columns[None, :],
            mask=(rows < limit)[:, None] & (columns < K)[None, :],
            other=0.0,
        )
    return tile


@triton.jit(do_not_specialize=["num_rows", "x_scale_stride", "steps", "steps_a_split", "splits"])
def float8_few_kernel(
    x_ptr,
    x_desc,
    x_scale_ptr,
    x_scale_stride,
    w_ptr,
    w_desc,
    w_scale_ptr,
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
    BY_BLOCKS: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_start(DEPENDENT)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = tile * BLOCK_N
    outputs = first + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    is_output = outputs < N
    is_row = rows < num_rows
    low = split * steps_a_split
    high = min(low + steps_a_split, steps)
    if DEPENDENT:
        # A step of an output is one line.
        early = (low + tl.arange(0, AHEAD)) * 128
        known = tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * K
        prefetch(w_ptr + known + tl.minimum(early, K - 1)[None, :], DEPENDENT)
        wait_for_last(DEPENDENT)
    # BLOCK_N divides 128: a tile lies in one row of blocks.
    block_scale_at = w_scale_ptr + (first // 128) * steps
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(low, high, num_stages=STAGES):
        w = _load(w_ptr, w_desc, first, step * 128, N, K, BLOCK_N, BY_DESCRIPTOR)
        x = _load(x_ptr, x_desc, 0, step * 128, num_rows, K, BLOCK_M, BY_DESCRIPTOR)
        if BY_BLOCKS:
            scale = tl.load(x_scale_ptr + step * x_scale_stride + rows, mask=is_row, other=0.0)
            scale *= tl.load(block_scale_at + step)
            acc += tl.dot(w, x.T) * scale[None, :]
        else:
            acc += tl.dot(w, x.T)
    places = rows[None, :] * N + outputs[:, None]
    is_place = is_output[:, None] & is_row[None, :]
    if IS_SPLIT:
        size = num_rows * N
        if not arrives_last(acc, part_ptr, arrivals, tile, split, splits, size, places, is_place):
            return
        acc = added_parts(part_ptr, arrivals, tile, splits, size, places, is_place)
    if not BY_BLOCKS:
        acc *= tl.load(w_scale_ptr + outputs, mask=is_output, other=0.0)[:, None]
        acc *= tl.load(x_scale_ptr + rows, mask=is_row, other=0.0)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
        acc += bias[:, None]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=is_place)


@dataclass(frozen=True)
class FewFloat8Shape:
    """How the kernel is specialised for a number of rows."""

    block_n: int
    """Outputs of a tile: 64 or 128."""
    num_warps: int
    num_stages: int

    @property
    def words(self) -> str:
        """Its name in a plan."""
        return f"FP8 {self.block_n} outputs, {self.num_warps} warps, {self.num_stages} stages"


_DESCRIPTORS = 9
"""The generation of GPUs (Hopper) whose wgmma and descriptors the kernel is written for."""

HOPPER: tuple[tuple[int, FewFloat8Shape], ...] = (
    (16, FewFloat8Shape(64, 4, 4)),
    (32, FewFloat8Shape(64, 4, 3)),
    (64, FewFloat8Shape(128, 4, 3)),
    (128, FewFloat8Shape(64, 4, 3)),
)
"""By the rows of the tile, ascending. Counted, not timed: stages leave room for as many programs on
a multiprocessor as make gate and up of a 7B model one wave on an H200 (5, 5, 2.2 of 3). At 64 rows
a tile of 64 outputs would read as many bytes of rows as of weights, so it is wider; at 128 sums of
128 outputs fill the registers, and a multiprocessor holds but one such program."""

OTHERS: tuple[tuple[int, FewFloat8Shape], ...] = (
    (16, FewFloat8Shape(64, 4, 5)),
    (32, FewFloat8Shape(64, 4, 4)),
    (64, FewFloat8Shape(64, 4, 4)),
    (128, FewFloat8Shape(128, 8, 3)),
)
"""Likewise on Ada, with 99 KiB of shared memory."""

HOPPER_CANDIDATES: dict[int, tuple[FewFloat8Shape, ...]] = {
    16: (FewFloat8Shape(64, 4, 3), FewFloat8Shape(64, 4, 6), FewFloat8Shape(128, 4, 4)),
    32: (FewFloat8Shape(64, 4, 4), FewFloat8Shape(64, 4, 6), FewFloat8Shape(128, 4, 3)),
    64: (FewFloat8Shape(64, 4, 3), FewFloat8Shape(128, 8, 3), FewFloat8Shape(128, 4, 4)),
    128: (FewFloat8Shape(128, 8, 3), FewFloat8Shape(128, 8, 4), FewFloat8Shape(128, 8, 6)),
}
"""What a plan may choose beside `HOPPER`, by the rows of the tile."""

OTHER_CANDIDATES: dict[int, tuple[FewFloat8Shape, ...]] = {
    16: (FewFloat8Shape(64, 4, 4), FewFloat8Shape(128, 4, 4)),
    32: (FewFloat8Shape(64, 4, 3), FewFloat8Shape(128, 4, 3)),
    64: (FewFloat8Shape(64, 4, 3), FewFloat8Shape(128, 8, 3)),
    128: (FewFloat8Shape(64, 8, 3),),
}
"""Likewise, beside `OTHERS`."""

MOST_FEW_ROWS = HOPPER[-1][0]


def few_shapes(capability: Capability) -> tuple[tuple[int, FewFloat8Shape], ...]:
    """Return a GPU's shapes by the rows of the tile."""
    return HOPPER if capability[0] == _DESCRIPTORS else OTHERS


def few_options(capability: Capability) -> dict[int, dict[str, FewFloat8Shape]]:
    """Return what can serve 1 to `MOST_FEW_ROWS` rows that come rounded, by the rows of the tile.

    The usual shape of a class comes first.
    """
    more = HOPPER_CANDIDATES if capability[0] == _DESCRIPTORS else OTHER_CANDIDATES
    return {
        most_rows: {shape.words: shape for shape in (usual, *more[most_rows])}
        for most_rows, usual in few_shapes(capability)
    }


def few_ways(capability: Capability) -> Ways[FewFloat8Shape]:
    """Return what can serve 1 to `MOST_FEW_ROWS` rows that come rounded, by this kernel."""
    return Ways(few_options(capability))


_PROGRAMS, _MOST_SPLITS, _LEAST_STEPS = 264, 8, 4
"""Two programs a multiprocessor keep an H200's memory busy, and with more rows the parts of more
splits would be as many bytes as the weight."""


def few_splits(outputs: int, inputs: int) -> tuple[int, int]:
    """Return into how many parts a layer's inputs are split, and the steps of 128 of one.

    It depends on the layer alone, so a row's sum is cut at the same places in any batch.
    """
    tiles, steps = -(-outputs // 64), -(-inputs // BLOCK)
    splits = max(1, min(_PROGRAMS // tiles, _MOST_SPLITS, steps // _LEAST_STEPS))
    span = -(-steps // splits)
    return -(-steps // span), span


def float8_few(
    x: Float8Rows,
    weight: Float8Weight,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    scratch: SplitScratch,
    shape: FewFloat8Shape | None = None,
    by_descriptor: bool | None = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in `dtype`; on Hopper, steps are added in float32.

    Args:
        x: 1 to `MOST_FEW_ROWS` rows, in groups of 128 where the weight is scaled by blocks, else
            with one scale a row.
        weight: On x's device, of scheme "channel" or "block128".
        bias_O: In `dtype`, or none.
        dtype: Of the result.
        scratch: Large enough for the layer and the rows.
        shape: Instead of the GPU's usual one.
        by_descriptor: Instead of what this GPU has.
        out_TO: Where the result goes, contiguous; by default into new memory.

    Raises:
        EngineError: There are no rows, or too many; or their scales do not go with the weight's.
    """
    require_few(x, weight, MOST_FEW_ROWS)
    rows, inputs = x.values.shape
    outputs = weight.shape[0]
    by_blocks = weight.scheme == "block128"
    device = x.values.device
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else INTERPRETER
    if by_descriptor is None:
        by_descriptor = capability[0] == _DESCRIPTORS
    block_m, usual = next(pair for pair in few_shapes(capability) if rows <= pair[0])
    shape = shape or usual
    splits, span = few_splits(outputs, inputs)
    if out_TO is None:
        out_TO = torch.empty(rows, outputs, dtype=dtype, device=device)
    x8: Tensor | TensorDescriptor = x.values
    w8: Tensor | TensorDescriptor = weight.values
    if by_descriptor:
        x8 = TensorDescriptor.from_tensor(x.values, [block_m, BLOCK])
        w8 = TensorDescriptor.from_tensor(weight.values, [shape.block_n, BLOCK])
    float8_few_kernel[(triton.cdiv(outputs, shape.block_n), splits)](
        x.values,
        x8,
        x.scales,
        x.scales.stride(1),
        weight.values,
        w8,
        weight.scales,
        out_TO if bias_O is None else bias_O,
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
        BY_BLOCKS=by_blocks,
        BY_DESCRIPTOR=by_descriptor,
        IS_SPLIT=splits > 1,
        HAS_BIAS=bias_O is not None,
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out_TO
