"""A linear layer of few rows over a weight in 4 bits, for Hopper: loads run beside products.

`triton_int4` says what is computed, `packed_int4` how the weight lies. What is hard here is
traffic: every tile of outputs reads all rows again, from the L2 cache, and at 64 rows those reads
are twice the weight's bytes where tiles are 128 wide. So a program takes 256 outputs, in two sides
of 128, and Gluon, the language below Triton's, says which warps do what:

    producer    1 warp: copies a chunk of codes, their scales and the rows into a ring in shared
                memory (TMA)
    side 0, 1   4 warps each: codes to registers, unpacked there, multiplied by the rows in the ring

The sides wait for no one but the ring, so one unpacks and scales while the other multiplies. A unit
of work is one chunk of one tile; programs take equal runs of units, tile after tile, one program a
multiprocessor, so no tail of a last wave is left. A tile cut by a run's end is added up by
whichever of its programs comes last, part after part in order: a row's sum depends on no neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tailrace.kernels.dependent_launch import launch_options
from tailrace.kernels.linear.triton_hopper_ring import (
    Cut,
    arrived_last,
    descriptors,
    flat,
    gathered,
    meta_of,
    new_ring,
    produce,
    run_arguments,
    save,
    sharers,
    stages,
    store,
    turn,
    unit_bytes,
)
from tailrace.kernels.linear.triton_int4 import UNPACK_BFLOAT16, UNPACK_FLOAT16
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.workspace import SplitScratch

HALF = gl.constexpr(64)
"""Outputs that four warps multiply at a time: the tensor core's wide side."""
_SIDE = 128
SIDE = gl.constexpr(_SIDE)
"""Outputs of one side: two halves, in turn."""


@gluon.jit
def weights(codes, meta, dtype: gl.constexpr, layout: gl.constexpr):
    """Return [HALF, CHUNK] of code - zero, in registers, from int16 [HALF, CHUNK / 4]."""
    chunk: gl.constexpr = codes.shape[1] * 4
    # The same registers hold them: a thread's outputs are those of its sums.
    zeros = gl.convert_layout(meta & 15, gl.SliceLayout(1, layout), assert_trivial=True)
    if dtype == gl.bfloat16:
        offsets = (zeros | 0xC300).to(gl.int16)[:, None].broadcast_to(codes.shape)
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            UNPACK_BFLOAT16,
            "=r,=r,=r,=r,r,r",
            args=[codes, offsets],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        offsets = (zeros | 0xE400).to(gl.int16)[:, None].broadcast_to(codes.shape)
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            UNPACK_FLOAT16,
            "=r,=r,=r,=r,r,r",
            args=[codes, offsets],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    # Nibble i is the i-th quarter of the chunk: the quarters side by side, without a move.
    nibbles = gl.join(gl.join(w0, w1), gl.join(w2, w3))
    whole = nibbles.permute(0, 3, 2, 1).reshape(HALF, chunk)
    return gl.convert_layout(whole, layout, assert_trivial=True)


@gluon.jit
def scale_of(meta):
    return (meta & -16).to(gl.float32, bitcast=True)[:, None]


@gluon.jit
def _consume_narrow(  # noqa: C901 - as compiled, each order has few branches
    common,
    side: gl.constexpr,
    SIDES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ORDER: gl.constexpr,
):
    """Multiply one side of each unit by up to 64 rows; `HopperShape.order` says in which order."""
    rings, bars, pointers, sizes, low, high = common
    codes_ring, x_ring, meta_rows = rings
    meta_ring = flat(meta_rows)
    full, free = bars
    bias_ptr, out_ptr, part_ptr, arrivals = pointers
    N, padded_n, num_rows, chunks, units, span = sizes
    UNITS: gl.constexpr = 2 if ORDER == "two units" else 1
    STAGES: gl.constexpr = codes_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    dtype: gl.constexpr = x_ring.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    zero = gl.zeros([HALF, ROWS], gl.float32, layout=sums)
    slot = 0
    phase = 0
    for tile in range(low // chunks, (high - 1) // chunks + 1):
        begin = gl.maximum(low - tile * chunks, 0)
        end = gl.minimum(high - tile * chunks, chunks)
        output = (tile * SIDES + side) * SIDE
        acc0 = zero
        acc1 = zero
        for _ in range(begin, end, UNITS):
            mbarrier.wait(full.index(slot), phase)
            x = x_ring.index(slot).permute((1, 0))
            codes = codes_ring.index(slot)
            meta0 = meta_of(meta_ring, slot, side * SIDE, HALF, sums)
            meta1 = meta_of(meta_ring, slot, side * SIDE + HALF, HALF, sums)
            w0 = weights(codes.slice(side * SIDE, HALF).load(left), meta0, dtype, left)
            part0 = warpgroup_mma(w0, x, zero, use_acc=False, is_async=True)
            if ORDER == "in turn":
                part0, w0 = warpgroup_mma_wait(0, deps=[part0, w0])
                acc0 += part0 * scale_of(meta0)
            w1 = weights(codes.slice(side * SIDE + HALF, HALF).load(left), meta1, dtype, left)
            part1 = warpgroup_mma(w1, x, zero, use_acc=False, is_async=True)
            if ORDER != "in turn":
                part0, w0 = warpgroup_mma_wait(1, deps=[part0, w0])
                acc0 += part0 * scale_of(meta0)
            if UNITS == 2:
                before = slot
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
                mbarrier.wait(full.index(slot), phase)
                x = x_ring.index(slot).permute((1, 0))
                codes = codes_ring.index(slot)
                meta0 = meta_of(meta_ring, slot, side * SIDE, HALF, sums)
                w0 = weights(codes.slice(side * SIDE, HALF).load(left), meta0, dtype, left)
                part0 = warpgroup_mma(w0, x, zero, use_acc=False, is_async=True)
                part1, w1 = warpgroup_mma_wait(1, deps=[part1, w1])
                gl.thread_barrier()
                mbarrier.arrive(free.index(before), count=1)
                acc1 += part1 * scale_of(meta1)
                meta1 = meta_of(meta_ring, slot, side * SIDE + HALF, HALF, sums)
                w1 = weights(codes.slice(side * SIDE + HALF, HALF).load(left), meta1, dtype, left)
                part1 = warpgroup_mma(w1, x, zero, use_acc=False, is_async=True)
                part0, w0 = warpgroup_mma_wait(1, deps=[part0, w0])
                acc0 += part0 * scale_of(meta0)
            part1, w1 = warpgroup_mma_wait(0, deps=[part1, w1])
            gl.thread_barrier()  # all four warps are done with the slot
            mbarrier.arrive(free.index(slot), count=1)
            acc1 += part1 * scale_of(meta1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        first, others = sharers(sizes, tile)
        is_last = others == 0
        if others > 0:
            parts = part_ptr + ((tile + first) * SIDES + side) * (SIDE * ROWS)
            mine = parts + (gl.program_id(0) - first) * (SIDES * SIDE * ROWS)
            save(acc0, mine, 0, 0, 1)
            save(acc1, mine, 1, 0, 1)
            is_last = arrived_last(arrivals + tile * SIDES + side, others)
            if is_last:
                acc0 = gathered(acc0, parts, others + 1, SIDES * SIDE * ROWS, 0, 0, 1, 128 // ROWS)
                acc1 = gathered(acc1, parts, others + 1, SIDES * SIDE * ROWS, 1, 0, 1, 128 // ROWS)
        if is_last:
            store(acc0, pointers, sizes, output, 0, 0, HAS_BIAS, dtype)
            store(acc1, pointers, sizes, output, 1, 0, HAS_BIAS, dtype)


@gluon.jit
def _consume_wide(
    common,
    side: gl.constexpr,
    SIDES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Multiply one side of each unit by two pieces of 64 rows.

    Sums fill most registers: one product is in flight at a time, and what overlaps it is the other
    side's work.
    """
    rings, bars, pointers, sizes, low, high = common
    codes_ring, x_ring, meta_rows = rings
    meta_ring = flat(meta_rows)
    full, free = bars
    bias_ptr, out_ptr, part_ptr, arrivals = pointers
    N, padded_n, num_rows, chunks, units, span = sizes
    STAGES: gl.constexpr = codes_ring.shape[0]
    PIECE: gl.constexpr = x_ring.shape[1]
    PART: gl.constexpr = SIDE * 2 * PIECE
    dtype: gl.constexpr = x_ring.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    zero = gl.zeros([HALF, PIECE], gl.float32, layout=sums)
    slot = 0
    phase = 0
    for tile in range(low // chunks, (high - 1) // chunks + 1):
        begin = gl.maximum(low - tile * chunks, 0)
        end = gl.minimum(high - tile * chunks, chunks)
        output = (tile * SIDES + side) * SIDE
        acc00 = zero
        acc01 = zero
        acc10 = zero
        acc11 = zero
        for _ in range(begin, end):
            mbarrier.wait(full.index(slot), phase)
            x0 = x_ring.index(2 * slot).permute((1, 0))
            x1 = x_ring.index(2 * slot + 1).permute((1, 0))
            codes = codes_ring.index(slot)
            meta0 = meta_of(meta_ring, slot, side * SIDE, HALF, sums)
            meta1 = meta_of(meta_ring, slot, side * SIDE + HALF, HALF, sums)
            w = weights(codes.slice(side * SIDE, HALF).load(left), meta0, dtype, left)
            part = warpgroup_mma(w, x0, zero, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            acc00 += part * scale_of(meta0)
            part = warpgroup_mma(w, x1, zero, use_acc=False, is_async=True)
            part, w = warpgroup_mma_wait(0, deps=[part, w])
            acc01 += part * scale_of(meta0)
            w = weights(codes.slice(side * SIDE + HALF, HALF).load(left), meta1, dtype, left)
            part = warpgroup_mma(w, x0, zero, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            acc10 += part * scale_of(meta1)
            part = warpgroup_mma(w, x1, zero, use_acc=False, is_async=True)
            part, w = warpgroup_mma_wait(0, deps=[part, w])
            gl.thread_barrier()  # all four warps are done with the slot
            mbarrier.arrive(free.index(slot), count=1)
            acc11 += part * scale_of(meta1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        first, others = sharers(sizes, tile)
        is_last = others == 0
        if others > 0:
            parts = part_ptr + ((tile + first) * SIDES + side) * PART
            mine = parts + (gl.program_id(0) - first) * (SIDES * PART)
            save(acc00, mine, 0, 0, 2)
            save(acc01, mine, 0, 1, 2)
            save(acc10, mine, 1, 0, 2)
            save(acc11, mine, 1, 1, 2)
            is_last = arrived_last(arrivals + tile * SIDES + side, others)
            if is_last:
                acc00 = gathered(acc00, parts, others + 1, SIDES * PART, 0, 0, 2, 1)
                acc01 = gathered(acc01, parts, others + 1, SIDES * PART, 0, 1, 2, 1)
                acc10 = gathered(acc10, parts, others + 1, SIDES * PART, 1, 0, 2, 1)
                acc11 = gathered(acc11, parts, others + 1, SIDES * PART, 1, 1, 2, 1)
        if is_last:
            store(acc00, pointers, sizes, output, 0, 0, HAS_BIAS, dtype)
            store(acc01, pointers, sizes, output, 0, 1, HAS_BIAS, dtype)
            store(acc10, pointers, sizes, output, 1, 0, HAS_BIAS, dtype)
            store(acc11, pointers, sizes, output, 1, 1, HAS_BIAS, dtype)


@gluon.jit
def _consume(
    common,
    side: gl.constexpr,
    SIDES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ORDER: gl.constexpr,
):
    rings = common[0]
    if rings[0].shape[0] == rings[1].shape[0]:
        _consume_narrow(common, side, SIDES, HAS_BIAS, ORDER)
    else:
        _consume_wide(common, side, SIDES, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_rows", "chunks", "units", "span"])
def int4_hopper_kernel(
    codes_desc,
    x_desc,
    meta_desc,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals,
    num_rows,
    N,
    padded_n,
    chunks,
    units,
    span,
    PIECES: gl.constexpr,
    CHUNKS_A_GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    ORDER: gl.constexpr,
    REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    if DEPENDENT:
        turn("griddepcontrol.launch_dependents; // $0")
    SIDES: gl.constexpr = codes_desc.block_type.shape[0] // SIDE
    descs = (codes_desc, x_desc, meta_desc)
    rings, bars = new_ring(descs, STAGES, 1, PIECES, SIDES)
    low = gl.program_id(0) * span
    high = gl.minimum(low + span, units)
    pointers = (bias_ptr, out_ptr, part_ptr, arrivals)
    sizes = (N, padded_n, num_rows, chunks, units, span)
    producer = (descs, rings, bars, low, high, sizes, CHUNKS_A_GROUP, DEPENDENT)
    common = (rings, bars, pointers, sizes, low, high)
    if SIDES == 2:
        gl.warp_specialize(
            [
                (_consume, (common, 0, SIDES, HAS_BIAS, ORDER)),
                (_consume, (common, 1, SIDES, HAS_BIAS, ORDER)),
                (produce, producer),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [(_consume, (common, 0, SIDES, HAS_BIAS, ORDER)), (produce, producer)],
            [1],
            [24],
        )


@dataclass(frozen=True)
class HopperShape:
    """How the kernel is specialised, and how it is laid over the multiprocessors."""

    sides: int
    """Of a tile: 1 or 2, each 128 outputs wide."""
    programs: int
    """A multiprocessor; at most 2 with one side, else 1."""
    least_span: int
    """Fewest units a program: small layers are cut into fewer parts than there is room for."""
    order: str = "pair"
    """Of up to 64 rows: "pair" unpacks a unit's second half while the first is multiplied, "two
    units" goes on so through two units, "in turn" keeps one half at a time, in few registers."""

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread: at the start, and in a side once the producer has handed its over."""
        return _REGISTERS[self.sides, self.programs]

    @property
    def words(self) -> str:
        """Its name in a table."""
        return f"{self.sides}/{self.programs}/{self.least_span} {self.order}"

    def fits(self, chunks: int) -> bool:
        """Tell whether it can multiply a layer of so many chunks."""
        return self.order != "two units" or chunks % 2 == 0

    def stages(self, rows: int, chunk: int) -> int:
        """Return how many units the ring holds, for tiles of so many rows."""
        return stages(unit_bytes(self.sides * _SIDE, rows, chunk), self.programs)

    def cut(self, outputs: int, chunks: int, multiprocessors: int) -> Cut:
        """Return how a layer is laid over so many multiprocessors."""
        tiles = -(-outputs // (self.sides * _SIDE))
        # Two units of a run are of the same tile: so chunks are even, and spans are.
        multiple = 2 if self.order == "two units" else 1
        return Cut.of(tiles, chunks, multiprocessors * self.programs, self.least_span, multiple)

    def parts(self, outputs: int, chunks: int, rows: int, multiprocessors: int) -> int:
        """Return the floats that parts of sums take, for tiles of so many rows."""
        cut = self.cut(outputs, chunks, multiprocessors)
        return (cut.tiles + cut.programs) * self.sides * _SIDE * rows


_REGISTERS = {(1, 1): (128, 232), (1, 2): (128, 232), (2, 1): (168, 240), (2, 2): (80, 104)}


def _candidates(rows: int) -> tuple[HopperShape, ...]:
    """Return the shapes of a tile's rows: kinds that compile without a spill, cut in some ways."""
    kinds = [(2, 1, "pair"), (1, 2, "pair")]
    if rows <= _NARROWEST:
        kinds += [(2, 1, "two units"), (2, 2, "in turn")]
    elif rows <= _NARROW:
        kinds += [(2, 1, "two units"), (1, 2, "two units")]
    else:
        kinds = [(2, 1, "pair"), (1, 1, "pair")]
    return tuple(
        HopperShape(sides, programs, least, order)
        for sides, programs, order in kinds
        for least in (4, 7)
    )


_NARROWEST, _NARROW = 32, 64
"""Rows: sums of a side that fit into few registers, and beside two products."""

CANDIDATES: dict[int, tuple[HopperShape, ...]] = {
    rows: _candidates(rows) for rows in (16, 32, 64, 128)
}
"""By the rows of the tile, ascending: what a plan or a sweep may try."""

MOST_ROWS = max(CANDIDATES)


def shape_for(rows: int, outputs: int) -> tuple[int, HopperShape]:
    """Return the tile's rows, and its shape, for at most `MOST_ROWS` rows of a layer.

    The fastest on an H200 for the layers of a 7B model that are served so, or within 2 % of it.
    """
    block_m = next(size for size in CANDIDATES if rows <= size)
    if block_m <= _NARROW:
        return block_m, HopperShape(1, 2, 7)
    return block_m, HopperShape(2 if outputs >= _WIDE else 1, 1, 7)


_WIDE = 132 * 2 * _SIDE
"""Outputs: a tile of two sides for each multiprocessor."""


def reserved_parts(outputs: int, chunks: int, device: torch.device) -> int:
    """Return the floats of parts that any candidate needs for a layer."""
    return max(
        shape.parts(outputs, chunks, rows, multiprocessors(device))
        for rows, shapes in CANDIDATES.items()
        for shape in shapes
    )


def int4_hopper(
    x_TI: Tensor,
    weight: PackedInt4,
    bias_O: Tensor | None,
    *,
    scratch: SplitScratch,
    shape: HopperShape | None = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype; sums are float32.

    Args:
        x_TI: Contiguous; 1 to `MOST_ROWS` rows, bfloat16 or float16, at a multiple of 16 bytes.
        weight: On x's device, a Hopper GPU.
        bias_O: In x's dtype, or none.
        scratch: Large enough for the layer and the rows: `reserved_parts`.
        shape: Instead of the usual one.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    rows = x_TI.shape[0]
    block_m, usual = shape_for(rows, weight.outputs)
    shape = shape or usual
    pieces = 2 if block_m > _NARROW else 1
    registers, side_registers = shape.registers
    cut = shape.cut(weight.outputs, weight.codes.shape[0], multiprocessors(x_TI.device))
    if out_TO is None:
        out_TO = torch.empty(rows, weight.outputs, dtype=x_TI.dtype, device=x_TI.device)
    descs = descriptors(x_TI, weight, shape.sides * _SIDE, block_m // pieces, weight.chunk)
    int4_hopper_kernel[(cut.programs,)](
        *descs,
        *run_arguments(x_TI, weight, bias_O, scratch, cut, out_TO),
        PIECES=pieces,
        CHUNKS_A_GROUP=weight.chunks_a_group,
        HAS_BIAS=bias_O is not None,
        STAGES=shape.stages(block_m, weight.chunk),
        ORDER=shape.order,
        REGISTERS=side_registers,
        **launch_options(),
        num_warps=4,
        maxnreg=registers,
    )
    return out_TO
