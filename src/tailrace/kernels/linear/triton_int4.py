"""A linear layer of few rows over a weight in 4 bits, in Triton: bound by the codes' bytes.

As in `triton_skinny`, the matrix is the left operand of `tl.dot`, so that its outputs fill the
tensor core's wide side and the few rows the narrow one, and layers with few outputs split their
inputs among several programs, the last of which adds the parts in order. What differs is the
weight, whose order in memory `packed_int4` draws:

    part = (code - zero) @ x             whole numbers: exact in half precision
    acc += scale * part                  once a chunk, float32

The scale never touches the codes, so no weight is rounded: the result is that of the dequantised
float32 weight, but for the sum's order. That order is fixed by the chunk and the splits, which
depend on the layer alone, never on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import (
    AHEAD,
    LINE_BYTES,
    launch_options,
    let_next_start,
    prefetch,
    wait_for_last,
)
from tailrace.kernels.linear.triton_split_sum import added_parts, arrives_last
from tailrace.kernels.linear.ways import MANY, Ways

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.workspace import SplitScratch


# A register holds two neighbouring int16: `(r >> 4i) & 0x000f000f` are two codes, and with the
# exponent of 128 (bfloat16) or 1024 (float16) or-ed in, two floats 128 + code. $5 holds minus the
# zero point with the same offset, so the sum is exact. 0xea is (a & b) | c.
_UNPACK = """
{
    .reg .b32 shifted, value, one;
    mov.b32 one, 0x3f803f80;
    lop3.b32 value, $4, 0x000f000f, MAGIC, 0xea;
    PLUS $0, value, ONE $5;
    shr.u32 shifted, $4, 4;
    lop3.b32 value, shifted, 0x000f000f, MAGIC, 0xea;
    PLUS $1, value, ONE $5;
    shr.u32 shifted, $4, 8;
    lop3.b32 value, shifted, 0x000f000f, MAGIC, 0xea;
    PLUS $2, value, ONE $5;
    shr.u32 shifted, $4, 12;
    lop3.b32 value, shifted, 0x000f000f, MAGIC, 0xea;
    PLUS $3, value, ONE $5;
}
"""


def _assembler(magic: str, plus: str, one: str) -> tl.constexpr:
    text = _UNPACK.replace("MAGIC", magic).replace("PLUS", plus).replace("ONE", one)
    return tl.constexpr(text)


# bfloat16 has no plain packed sum before Hopper.
UNPACK_BFLOAT16: tl.constexpr = _assembler("0x43004300", "fma.rn.bf16x2", "one,")
UNPACK_FLOAT16: tl.constexpr = _assembler("0x64006400", "add.rn.f16x2", "")


@triton.jit
def _unpack(codes, zeros, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the four nibbles' tiles less the zero points, in DTYPE.

    Args:
        codes: int16 [BLOCK_N, CHUNK / 4].
        zeros: int32 [BLOCK_N].
        DTYPE: Of the result.
        COMPILED: False in the interpreter, which knows no assembler.
    """
    if COMPILED and tl.bfloat16 == DTYPE:
        offsets = tl.broadcast_to((zeros | 0xC300).to(tl.int16)[:, None], codes.shape)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            UNPACK_BFLOAT16,
            "=r,=r,=r,=r,r,r",
            args=[codes, offsets],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif COMPILED:
        offsets = tl.broadcast_to((zeros | 0xE400).to(tl.int16)[:, None], codes.shape)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            UNPACK_FLOAT16,
            "=r,=r,=r,=r,r,r",
            args=[codes, offsets],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = codes.to(tl.int32)
        w0 = ((wide & 15) - zeros[:, None]).to(DTYPE)
        w1 = (((wide >> 4) & 15) - zeros[:, None]).to(DTYPE)
        w2 = (((wide >> 8) & 15) - zeros[:, None]).to(DTYPE)
        w3 = (((wide >> 12) & 15) - zeros[:, None]).to(DTYPE)
    return w0, w1, w2, w3


@triton.jit(do_not_specialize=["num_rows", "chunks", "chunks_a_split", "splits"])
def int4_kernel(
    x_ptr,
    codes_ptr,
    meta_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals,
    num_rows,
    N,
    padded_n,
    K,
    chunks,
    chunks_a_split,
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_A_GROUP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COMPILED: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_start(DEPENDENT)
    QUARTER: tl.constexpr = CHUNK // 4
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, QUARTER)
    is_row = (rows < num_rows)[None, :]
    low = split * chunks_a_split
    high = min(low + chunks_a_split, chunks)
    codes_at = codes_ptr + outputs[:, None] * QUARTER + inner[None, :]
    x_at = x_ptr + rows[None, :] * K + inner[:, None]
    dtype = x_ptr.dtype.element_ty
    if DEPENDENT:
        # A tile's codes of a chunk lie in one piece.
        early = tl.minimum(low + tl.arange(0, AHEAD), high - 1)[:, None]
        lines = tl.arange(0, BLOCK_N * QUARTER * 2 // LINE_BYTES)[None, :] * (LINE_BYTES // 2)
        piece = (early * padded_n + tile * BLOCK_N) * QUARTER
        prefetch(codes_ptr + piece + lines, DEPENDENT)
        words = tl.arange(0, BLOCK_N * 4 // LINE_BYTES)[None, :] * (LINE_BYTES // 4)
        scales = (early // CHUNKS_A_GROUP) * padded_n + tile * BLOCK_N
        prefetch(meta_ptr + scales + words, DEPENDENT)
        wait_for_last(DEPENDENT)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in tl.range(low, high, num_stages=STAGES):
        codes = tl.load(codes_at + chunk * padded_n * QUARTER, eviction_policy="evict_first")
        meta = tl.load(meta_ptr + (chunk // CHUNKS_A_GROUP) * padded_n + outputs)
        x_chunk = x_at + chunk * CHUNK
        x0 = tl.load(x_chunk, mask=is_row, other=0.0)
        x1 = tl.load(x_chunk + QUARTER, mask=is_row, other=0.0)
        x2 = tl.load(x_chunk + 2 * QUARTER, mask=is_row, other=0.0)
        x3 = tl.load(x_chunk + 3 * QUARTER, mask=is_row, other=0.0)
        w0, w1, w2, w3 = _unpack(codes, meta & 15, dtype, COMPILED)
        scale = (meta & -16).to(tl.float32, bitcast=True)
        part = tl.dot(w0, x0, input_precision="ieee")
        part = tl.dot(w1, x1, part, input_precision="ieee")
        part = tl.dot(w2, x2, part, input_precision="ieee")
        part = tl.dot(w3, x3, part, input_precision="ieee")
        acc += part * scale[:, None]
    places = rows[None, :] * N + outputs[:, None]
    is_place = (outputs < N)[:, None] & is_row
    if IS_SPLIT:
        size = num_rows * N
        if not arrives_last(acc, part_ptr, arrivals, tile, split, splits, size, places, is_place):
            return
        acc = added_parts(part_ptr, arrivals, tile, splits, size, places, is_place)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        acc += bias[:, None]
    tl.store(out_ptr + places, acc.to(dtype), mask=is_place)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    meta_ptr,
    out_ptr,
    N,
    padded_n,
    K,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_A_GROUP: tl.constexpr,
):
    QUARTER: tl.constexpr = CHUNK // 4
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    inner = tl.arange(0, QUARTER)
    at = (chunk.to(tl.int64) * padded_n + outputs)[:, None] * QUARTER + inner[None, :]
    wide = tl.load(codes_ptr + at).to(tl.int32)
    meta = tl.load(meta_ptr + (chunk // CHUNKS_A_GROUP) * padded_n + outputs)
    scale = (meta & -16).to(tl.float32, bitcast=True)[:, None]
    zeros = (meta & 15)[:, None]
    places = outputs.to(tl.int64)[:, None] * K + chunk * CHUNK + inner[None, :]
    is_output = (outputs < N)[:, None]
    dtype = out_ptr.dtype.element_ty
    for nibble in tl.static_range(4):
        w = (((wide >> (4 * nibble)) & 15) - zeros).to(tl.float32) * scale
        tl.store(out_ptr + places + nibble * QUARTER, w.to(dtype), mask=is_output)


@dataclass(frozen=True)
class Int4Shape:
    """How the kernel is specialised for a number of rows."""

    block_n: int
    num_warps: int
    num_stages: int

    @property
    def words(self) -> str:
        """Its name in a plan."""
        return f"{self.block_n} outputs, {self.num_warps} warps, {self.num_stages} stages"


@dataclass(frozen=True)
class WritingShape:
    """How the kernel that writes a weight out is specialised."""

    block_n: int
    num_warps: int

    @property
    def words(self) -> str:
        """Its name in a plan."""
        return f"written out by {self.block_n} outputs, {self.num_warps} warps"


SHAPES: dict[int, Int4Shape] = {
    16: Int4Shape(128, 4, 4),
    32: Int4Shape(128, 4, 4),
    64: Int4Shape(128, 8, 3),
    128: Int4Shape(128, 8, 3),
}
"""By the rows of the tile, ascending: the fastest on an H200 for the wide layers of a 7B model, or
within 3 % of it (`gpu_gemm.py --sweep`). Compiled without a spill for Ampere, Ada and Hopper."""
SMALL_SHAPE = Int4Shape(64, 4, 3)
"""Likewise, for layers of fewer than `_SMALL_WEIGHTS` and up to `_FEWER_ROWS`."""
_SMALL_WEIGHTS = 1 << 25
_FEWER_ROWS = 64

MOST_ROWS = max(SHAPES)

TILES = "as tiles"
"""What a layer's name calls this kernel where another one serves fewer rows."""

WRITING = WritingShape(64, 4)

CANDIDATES: dict[int, tuple[Int4Shape, ...]] = {
    16: (SMALL_SHAPE, Int4Shape(128, 8, 4), Int4Shape(128, 4, 6), Int4Shape(64, 4, 6)),
    32: (SMALL_SHAPE, Int4Shape(128, 8, 4), Int4Shape(64, 4, 6)),
    64: (SMALL_SHAPE, Int4Shape(128, 4, 3), Int4Shape(64, 4, 4)),
    128: (Int4Shape(64, 8, 3),),
}
"""What a plan may choose beside `SHAPES`, by the rows of the tile."""

WRITING_CANDIDATES = (WritingShape(32, 4), WritingShape(128, 8))
"""Likewise, beside `WRITING`."""


def tile_options(weights: int) -> dict[int, dict[str, Int4Shape]]:
    """Return the tiles that can serve a layer of so many weights, by the most rows of a class."""
    tiles = {}
    for most_rows, wide in SHAPES.items():
        _, usual = shape_for(most_rows, weights)
        options = (usual, wide, *CANDIDATES[most_rows])
        tiles[most_rows] = {shape.words: shape for shape in options}
    return tiles


def writing_ways() -> Ways[WritingShape]:
    """Return what can write a weight out, for more rows than tiles take."""
    writing = {MANY: {shape.words: shape for shape in (WRITING, *WRITING_CANDIDATES)}}
    # The fewest of its rows: there writing takes most of the time.
    return Ways(writing, many_rows=MOST_ROWS + 1, is_exact=True)


def shape_for(rows: int, weights: int) -> tuple[int, Int4Shape]:
    """Return the tile's rows, and its shape, for at most `MOST_ROWS` rows of a layer's weights."""
    block_m = next(size for size in SHAPES if rows <= size)
    is_small = weights < _SMALL_WEIGHTS and rows <= _FEWER_ROWS
    return block_m, SMALL_SHAPE if is_small else SHAPES[block_m]


def int4_linear(
    x_TI: Tensor,
    weight: PackedInt4,
    bias_O: Tensor | None,
    *,
    scratch: SplitScratch,
    shape: Int4Shape | None = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype; sums are float32.

    Args:
        x_TI: Contiguous; 1 to `MOST_ROWS` rows, bfloat16 or float16 (float32 in the interpreter).
        weight: On x's device.
        bias_O: In x's dtype, or none.
        scratch: Large enough for the layer and the rows.
        shape: Instead of the one in `SHAPES`.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    rows = x_TI.shape[0]
    block_m, usual = shape_for(rows, weight.outputs * weight.inputs)
    shape = shape or usual
    if out_TO is None:
        out_TO = torch.empty(rows, weight.outputs, dtype=x_TI.dtype, device=x_TI.device)
    int4_kernel[(triton.cdiv(weight.outputs, shape.block_n), weight.splits)](
        x_TI,
        weight.codes,
        weight.meta,
        x_TI if bias_O is None else bias_O,
        out_TO,
        scratch.parts,
        scratch.arrivals,
        rows,
        weight.outputs,
        weight.codes.shape[1],
        weight.inputs,
        weight.codes.shape[0],
        weight.span,
        weight.splits,
        BLOCK_M=block_m,
        BLOCK_N=shape.block_n,
        CHUNK=weight.chunk,
        CHUNKS_A_GROUP=weight.chunks_a_group,
        IS_SPLIT=weight.splits > 1,
        HAS_BIAS=bias_O is not None,
        COMPILED=x_TI.device.type == "cuda",
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out_TO


def dequantize(weight: PackedInt4, out_OI: Tensor, shape: WritingShape = WRITING) -> Tensor:
    """Write the weight it stands for into `out_OI` [N, K], contiguous, and return that."""
    dequantize_kernel[(triton.cdiv(weight.outputs, shape.block_n), weight.codes.shape[0])](
        weight.codes,
        weight.meta,
        out_OI,
        weight.outputs,
        weight.codes.shape[1],
        weight.inputs,
        BLOCK_N=shape.block_n,
        CHUNK=weight.chunk,
        CHUNKS_A_GROUP=weight.chunks_a_group,
        num_warps=shape.num_warps,
    )
    return out_OI
