"""A linear layer of few FP8 rows over a weight in 4 bits, for Hopper: codes are float8 as they are.

A byte from 0 to 15, read as e4m3, is as many times 2^-9: up to 7 a subnormal, from 8 on the first
of the normal numbers. So a code needs a mask to be multiplied in float8, and no conversion; rows
are what is rounded, each by a scale of its own, and no weight is. Zero points are taken off
afterwards, with the sum of each row, which the tensor cores compute as well, as a product by ones:

    sum of (code - zero) x  =  2^9 (codes . x  -  zero (ones . x))          of a group's inputs

Beside products in half precision that is half of the tensor cores' time, and a quarter of the
instructions that unpack. How programs and warps are laid over a layer is `triton_hopper_float8`'s:
runs whose parts meet, or slices of a tile's inputs; how codes come, `triton_hopper_ring`'s.

A unit's 128 inputs are summed by the tensor cores, to some 14 bits, and units in float32. A row's
sum depends on no neighbour within its class of rows.
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

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.dependent_launch import launch_options
from tailrace.kernels.linear.float8 import BLOCK
from tailrace.kernels.linear.triton_hopper_float8 import (
    MOST_SUMS,
    HopperFloat8Shape,
    added_up,
    byte_boxes,
    slices_met,
)
from tailrace.kernels.linear.triton_hopper_int4 import scale_of
from tailrace.kernels.linear.triton_hopper_ring import (
    MOST_STAGES,
    OTHER_SHARED_BYTES,
    SHARED_BYTES,
    code_descriptors,
    flat,
    meta_of,
    most_reserved,
    new_ring,
    produce,
    put,
    store,
    turn,
)
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.float8_rows import Float8Rows
    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.workspace import SplitScratch

CHUNK = gl.constexpr(BLOCK)
"""Inputs of a unit, all of one group."""
ONE = gl.constexpr(512.0)
"""What a code is multiplied by where 1 is meant."""

# Two registers hold four neighbouring int16 words, $4 the first two, and a word four nibbles: $0 to
# $3 become a byte of each word, in order, for nibbles 0 to 3.
NIBBLES = gl.constexpr("""
{
    .reg .b32 low, high;
    prmt.b32 low, $4, $5, 0x6420;
    prmt.b32 high, $4, $5, 0x7531;
    and.b32 $0, low, 0x0f0f0f0f;
    shr.u32 low, low, 4;
    and.b32 $1, low, 0x0f0f0f0f;
    and.b32 $2, high, 0x0f0f0f0f;
    shr.u32 high, high, 4;
    and.b32 $3, high, 0x0f0f0f0f;
}
""")


@gluon.jit
def _codes(words, layout: gl.constexpr):
    """Return codes as float8 [BAND, CHUNK], 2^-9 of each, from int16 [BAND, CHUNK / 4]."""
    q0, q1, q2, q3 = gl.inline_asm_elementwise(
        NIBBLES,
        "=r,=r,=r,=r,r,r",
        args=(words,),
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )
    # Nibble i is the i-th quarter of the chunk: the quarters side by side, without a move.
    quarters = gl.join(gl.join(q0, q1), gl.join(q2, q3)).permute(0, 3, 2, 1)
    codes = quarters.reshape(words.shape[0], CHUNK).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(codes, layout, assert_trivial=True)


@gluon.jit
def _added(accs, band: gl.constexpr, done, level, meta):
    """Return the sums with a band's of a unit, the zero point taken off, scaled."""
    zeros = (meta & 15).to(gl.float32)[:, None]
    return put(accs, band, accs[band] + (done - level * zeros) * (scale_of(meta) * ONE))


@gluon.jit
def _unit(accs, rings, bars, slot, sums: gl.constexpr):
    """Return the sums with a unit's products, and hand back its slot."""
    codes_ring, x_ring, meta_rows = rings
    meta_ring = flat(meta_rows)
    full, free = bars
    BANDS: gl.constexpr = len(accs)
    BAND: gl.constexpr = 16 * gl.num_warps()
    BOXES: gl.constexpr = codes_ring.shape[0] // full.shape[0]
    BOX: gl.constexpr = codes_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    # A thread has half as many sums of a band as there are rows.
    BESIDE: gl.constexpr = (BANDS + 3) * ROWS // 2 <= MOST_SUMS
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    zero = gl.zeros([BAND, ROWS], gl.float32, layout=sums)
    x = x_ring.index(slot).permute((1, 0))
    ones = gl.full([BAND, CHUNK], 1, gl.int8, layout=left).to(gl.float8e4nv, bitcast=True)
    level = warpgroup_mma(ones, x, zero, use_acc=False, is_async=True)
    part = zero
    before = meta_of(meta_ring, slot * BOXES, 0, BAND, sums)  # of the band in flight
    for band in gl.static_range(BANDS):
        box = slot * BOXES + band * BAND // BOX
        w = _codes(codes_ring.index(box).slice(band * BAND % BOX, BAND).load(left), left)
        meta = meta_of(meta_ring, box, band * BAND % BOX, BAND, sums)
        if band == 0:
            level = warpgroup_mma_wait(0, deps=[level])
        elif not BESIDE:
            done = warpgroup_mma_wait(0, deps=[part])
            accs = _added(accs, band - 1, done, level, before)
        begun = warpgroup_mma(w, x, zero, use_acc=False, is_async=True)
        if band > 0 and BESIDE:
            done = warpgroup_mma_wait(1, deps=[part])
            accs = _added(accs, band - 1, done, level, before)
        part = begun
        before = meta
    done = warpgroup_mma_wait(0, deps=[part])
    accs = _added(accs, BANDS - 1, done, level, before)
    gl.thread_barrier()  # all warps are done with the slot
    mbarrier.arrive(free.index(slot), count=1)
    return accs


@gluon.jit
def _write(accs, x_scale_ptr, pointers, sizes, output, HAS_BIAS: gl.constexpr):
    """Scale a tile's sums by rows, add the bias and write them."""
    num_rows = sizes[2]
    columns: gl.constexpr = gl.SliceLayout(0, accs[0].type.layout)
    dtype: gl.constexpr = pointers[1].dtype.element_ty
    rows = gl.arange(0, accs[0].shape[1], layout=columns)
    x_scale = gl.load(x_scale_ptr + rows, mask=rows < num_rows, other=0.0)
    for band in gl.static_range(len(accs)):
        store(accs[band] * x_scale[None, :], pointers, sizes, output, band, 0, HAS_BIAS, dtype)


@gluon.jit
def _consume(
    common,
    slice_: gl.constexpr,
    SLICES: gl.constexpr,
    TILE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IN_PAIRS: gl.constexpr,
):
    """Multiply a slice's units; the first slice scales and writes the sums."""
    rings, bars, meeting, x_scale_ptr, pointers, sizes, low, high = common
    full, free = bars
    N, padded_n, num_rows, chunks, units, span = sizes
    STAGES: gl.constexpr = full.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    BAND: gl.constexpr = 16 * WARPS
    BANDS: gl.constexpr = TILE // BAND
    ROWS: gl.constexpr = rings[1].shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 32])
    for tile in range(low // chunks, (high - 1) // chunks + 1):
        begin = gl.maximum(low, tile * chunks)
        end = gl.minimum(high, (tile + 1) * chunks)
        accs = (gl.zeros([BAND, ROWS], gl.float32, layout=sums),) * BANDS
        for unit in range(begin + slice_, end, SLICES):
            slot = (unit - low) % STAGES
            mbarrier.wait(full.index(slot), (unit - low) // STAGES % 2)
            accs = _unit(accs, rings, bars, slot, sums)
        accs = slices_met(accs, meeting, slice_, SLICES)
        if slice_ == 0:
            is_whole = True
            if SLICES == 1:
                accs, is_whole = added_up(accs, pointers, sizes, tile, IN_PAIRS)
            if is_whole:
                _write(accs, x_scale_ptr, pointers, sizes, tile * TILE, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_rows", "chunks", "units", "span"])
def int4_float8_kernel(
    codes_desc,
    x_desc,
    meta_desc,
    x_scale_ptr,
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
    TILE: gl.constexpr,
    SLICES: gl.constexpr,
    CHUNKS_A_GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IN_PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    if DEPENDENT:
        turn("griddepcontrol.launch_dependents; // $0")
    descs = (codes_desc, x_desc, meta_desc)
    rings, bars = new_ring(descs, STAGES, TILE // codes_desc.block_type.shape[0], 1, 1)
    low = gl.program_id(0) * span
    high = gl.minimum(low + span, units)
    pointers = (bias_ptr, out_ptr, part_ptr, arrivals)
    sizes = (N, padded_n, num_rows, chunks, units, span)
    producer = (descs, rings, bars, low, high, sizes, CHUNKS_A_GROUP, DEPENDENT)
    if SLICES == 1:
        common = (rings, bars, bars, x_scale_ptr, pointers, sizes, low, high)
        gl.warp_specialize(
            [(_consume, (common, 0, 1, TILE, HAS_BIAS, IN_PAIRS)), (produce, producer)], [1], [24]
        )
    else:
        order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        BANDS: gl.constexpr = TILE // (16 * gl.num_warps())
        sums_ring = gl.allocate_shared_memory(
            gl.float32, [(SLICES - 1) * BANDS, TILE // BANDS, rings[1].shape[1]], order
        )
        done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(done.index(0), count=SLICES - 1)
        common = (rings, bars, (sums_ring, done), x_scale_ptr, pointers, sizes, low, high)
        if SLICES == 2:
            gl.warp_specialize(
                [
                    (_consume, (common, 0, SLICES, TILE, HAS_BIAS, IN_PAIRS)),
                    (_consume, (common, 1, SLICES, TILE, HAS_BIAS, IN_PAIRS)),
                    (produce, producer),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (common, 0, SLICES, TILE, HAS_BIAS, IN_PAIRS)),
                    (_consume, (common, 1, SLICES, TILE, HAS_BIAS, IN_PAIRS)),
                    (_consume, (common, 2, SLICES, TILE, HAS_BIAS, IN_PAIRS)),
                    (_consume, (common, 3, SLICES, TILE, HAS_BIAS, IN_PAIRS)),
                    (produce, producer),
                ],
                [4, 4, 4, 1],
                [REGISTERS, REGISTERS, REGISTERS, 24],
            )


@dataclass(frozen=True)
class Int4Float8Shape(HopperFloat8Shape):
    """How the kernel is specialised, and how it is laid over the multiprocessors."""

    @property
    def words(self) -> str:
        """Its name in a plan."""
        return f"4 bits by {super().words}"

    def stages(self, rows: int) -> int:
        """Return how many units the ring holds, for tiles of so many rows; see the class above."""
        unit = self.tile * (BLOCK // 2 + 4) + rows * BLOCK
        meeting = (self.slices - 1) * 4 * self.tile * rows
        room = SHARED_BYTES // self.programs - OTHER_SHARED_BYTES - meeting
        return min(_MOST_STAGES, room // unit) // self.slices * self.slices


_MOST_STAGES = 2 * MOST_STAGES
"""Units are half as many bytes as those of rows in half precision."""
_WIDE_ROWS = 64
"""Of as many, sums of 256 outputs have registers; of fewer, those of 512 and of four slices."""


def _candidates(rows: int) -> tuple[Int4Float8Shape, ...]:
    """Return the shapes of a tile's rows: kinds whose sums fit into registers, cut in some ways."""
    runs = [
        Int4Float8Shape(128, 1, 8, 1, least, meets)
        for meets, spans in (("pairs", (4, 7, 14)), ("last", (4, 7)))
        for least in spans
    ]
    kinds = [(64, 4, 1)]
    slices = [2]
    if rows <= _WIDE_ROWS:
        kinds += [(256, 8, 1), (128, 4, 2)]
    if rows < _WIDE_ROWS:
        slices.append(4)
        runs.append(Int4Float8Shape(512, 1, 8, 1, 4))
    runs += [
        Int4Float8Shape(tile, 1, warps, programs, 4, meets)
        for tile, warps, programs in kinds
        for meets in ("pairs", "last")
    ]
    return (*runs, *(Int4Float8Shape(64, count, 4, 1, 0) for count in slices))


CANDIDATES: dict[int, tuple[Int4Float8Shape, ...]] = {
    rows: _candidates(rows) for rows in (16, 32, 64, 128)
}
"""By the rows of the tile, ascending: what a plan or a sweep may try."""

MOST_ROWS = max(CANDIDATES)


def takes(weight: PackedInt4) -> bool:
    """Tell whether a weight's groups are whole units."""
    return weight.chunk == BLOCK


def reserved(outputs: int, chunks: int, count: int) -> tuple[int, int]:
    """Return the floats of parts and the arrivals that any candidate needs for a layer.

    Args:
        outputs: Of the layer.
        chunks: Of 128 of its inputs.
        count: Multiprocessors.
    """
    return most_reserved(CANDIDATES, outputs, chunks, count)


def int4_float8(
    x: Float8Rows,
    weight: PackedInt4,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    scratch: SplitScratch,
    shape: Int4Float8Shape,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in `dtype`; chunks of 128 inputs are added in float32.

    Args:
        x: 1 to `MOST_ROWS` rows as `empty_rows` lays them out, one scale a row.
        weight: On x's device, a Hopper GPU.
        bias_O: In `dtype`, or none.
        dtype: Of the result: bfloat16 or float16.
        scratch: Large enough for the layer: `reserved`.
        shape: A candidate of the rows' class.
        out_TO: Where the result goes, contiguous; by default into new memory.

    Raises:
        ConfigError: The weight's groups are no multiple of 128.
        EngineError: There are no rows, or too many, or with scales of groups.
    """
    rows = x.values.shape[0]
    if not takes(weight):
        raise ConfigError(
            "4-bit weights by rows in FP8: their groups must be multiples of "
            f"{BLOCK} inputs, and those of {weight.chunk * weight.chunks_a_group} are not"
        )
    if not 0 < rows <= MOST_ROWS or x.scales.shape[1] != 1:
        raise EngineError(
            f"{rows} rows by {x.scales.shape[1]} scales: this product takes 1 to {MOST_ROWS} by one"
        )
    block_m = next(size for size in CANDIDATES if rows <= size)
    chunks, padded, _ = weight.codes.shape
    cut = shape.cut(weight.outputs, chunks, multiprocessors(x.values.device))
    if out_TO is None:
        out_TO = torch.empty(rows, weight.outputs, dtype=dtype, device=x.values.device)
    codes, meta = code_descriptors(weight, shape.box)
    registers, slice_registers = shape.registers
    int4_float8_kernel[(cut.programs,)](
        codes,
        byte_boxes(x.values, block_m),
        meta,
        x.scales,
        out_TO if bias_O is None else bias_O,
        out_TO,
        scratch.parts,
        scratch.arrivals,
        rows,
        weight.outputs,
        padded,
        chunks,
        cut.tiles * chunks,
        cut.span,
        TILE=shape.tile,
        SLICES=shape.slices,
        CHUNKS_A_GROUP=weight.chunks_a_group,
        HAS_BIAS=bias_O is not None,
        IN_PAIRS=shape.meets == "pairs",
        STAGES=shape.stages(block_m),
        REGISTERS=slice_registers,
        **launch_options(),
        num_warps=shape.warps,
        maxnreg=registers,
    )
    return out_TO
