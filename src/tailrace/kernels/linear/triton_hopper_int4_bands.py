"""A linear layer of few rows over a weight in 4 bits, for Hopper: a product is always in flight.

`triton_hopper_int4` has each of two sides unpack, multiply, wait and scale by itself. Here all
warps of a program take its outputs band after band, 64 inputs a step, and unpack a step while the
tensor cores multiply the one before:

    warps         unpack 0 | unpack 1  | unpack 2  | ...      before unpack i + 1: wait for i - 1
    tensor cores           | product 0 | product 1 | ...

code - zero, a whole number, is multiplied; a band's sums of a chunk are scaled in float32 when they
are there, and nothing is in flight from one chunk to the next. No weight is rounded.

Parts of a tile meet pair by pair; that, and what the rest is, says `triton_hopper_ring`.
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
from tailrace.kernels.linear.triton_hopper_int4 import scale_of
from tailrace.kernels.linear.triton_hopper_ring import (
    Cut,
    descriptors,
    flat,
    met,
    meta_of,
    most_reserved,
    new_ring,
    produce,
    put,
    run_arguments,
    sharers,
    stages,
    store,
    turn,
    unit_bytes,
)
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.workspace import SplitScratch

_STEP = 64
STEP = gl.constexpr(_STEP)
"""Inputs of one product."""

# A register holds two neighbouring int16 words, and a word four nibbles; $0 and $1 become the
# floats of two nibbles of both. $3 (and $4 in float16) hold minus the zero point with the
# exponent's offset, twice each. 0xea is (a & b) | c.
_BFLOAT16 = """
{
    .reg .b32 shifted, value, one;
    mov.b32 one, 0x3f803f80;
    FIRST
    lop3.b32 value, shifted, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, value, one, $3;
    shr.u32 shifted, $2, SECOND;
    lop3.b32 value, shifted, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, value, one, $3;
}
"""
# float16 has ten bits of mantissa: the second nibble need not be shifted down, as 16 x it fits.
_FLOAT16 = """
{
    .reg .b32 shifted, value, sixteenth;
    mov.b32 sixteenth, 0x2c002c00;
    FIRST
    lop3.b32 value, shifted, 0x000f000f, 0x64006400, 0xea;
    add.rn.f16x2 $0, value, $3;
    lop3.b32 value, shifted, 0x00f000f0, 0x64006400, 0xea;
    fma.rn.f16x2 $1, value, sixteenth, $4;
}
"""


def _assembler(text: str, *, high: bool) -> gl.constexpr:
    first = "shr.u32 shifted, $2, 8;" if high else "mov.b32 shifted, $2;"
    return gl.constexpr(text.replace("FIRST", first).replace("SECOND", "12" if high else "4"))


BFLOAT16_LOW = _assembler(_BFLOAT16, high=False)
BFLOAT16_HIGH = _assembler(_BFLOAT16, high=True)
FLOAT16_LOW = _assembler(_FLOAT16, high=False)
FLOAT16_HIGH = _assembler(_FLOAT16, high=True)


@gluon.jit
def _nibbles(codes, meta, dtype: gl.constexpr, IS_HIGH: gl.constexpr):
    """Return code - zero of two nibbles, in `dtype`, each [BAND, CHUNK / 4], from int16 of that."""
    zeros = meta & 15
    if dtype == gl.bfloat16:
        offsets = (zeros | 0xC300).to(gl.int16)[:, None].broadcast_to(codes.shape)
        w0, w1 = gl.inline_asm_elementwise(
            BFLOAT16_HIGH if IS_HIGH else BFLOAT16_LOW,
            "=r,=r,r,r",
            args=(codes, offsets),
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        offsets = (zeros | 0xE400).to(gl.int16)[:, None].broadcast_to(codes.shape)
        sixteenths = ((zeros << 4) | 0xD400).to(gl.int16)[:, None].broadcast_to(codes.shape)
        w0, w1 = gl.inline_asm_elementwise(
            FLOAT16_HIGH if IS_HIGH else FLOAT16_LOW,
            "=r,=r,r,r,r",
            args=(codes, offsets, sixteenths),
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    return w0, w1


@gluon.jit
def _weights(codes, meta, dtype: gl.constexpr, step: gl.constexpr, layout: gl.constexpr):
    """Return [BAND, STEP] of code - zero, in registers, from int16 [BAND, CHUNK / 4]."""
    # The same registers hold them: a thread's outputs are those of its sums.
    meta = gl.convert_layout(meta, gl.SliceLayout(1, layout), assert_trivial=True)
    # Nibble i is the i-th quarter of the chunk: the quarters side by side, without a move.
    if codes.shape[1] * 4 == STEP:
        w0, w1 = _nibbles(codes, meta, dtype, False)
        w2, w3 = _nibbles(codes, meta, dtype, True)
        quarters = gl.join(gl.join(w0, w1), gl.join(w2, w3)).permute(0, 3, 2, 1)
    else:
        w0, w1 = _nibbles(codes, meta, dtype, step == 1)
        quarters = gl.join(w0, w1).permute(0, 2, 1)
    return gl.convert_layout(quarters.reshape(codes.shape[0], STEP), layout, assert_trivial=True)


@gluon.jit
def _unit(accs, rings, bars, slot, sums: gl.constexpr):
    """Return the sums with a unit's products, and hand back its slot.

    What is in flight at the end of a loop's turn may not be what its next turn reads: the sums of a
    chunk would be moved, for ptxas sees no reason to wait.
    """
    codes_ring, x_ring, meta_rows = rings
    meta_ring = flat(meta_rows)
    full, free = bars
    BANDS: gl.constexpr = len(accs)
    BAND: gl.constexpr = 16 * gl.num_warps()
    BOXES: gl.constexpr = codes_ring.shape[0] // full.shape[0]
    BOX: gl.constexpr = codes_ring.shape[1]
    STEPS: gl.constexpr = x_ring.shape[0] // full.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    dtype: gl.constexpr = x_ring.dtype
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    zero = gl.zeros([BAND, ROWS], gl.float32, layout=sums)
    part, scale = zero, zero  # of the band before
    for band in gl.static_range(BANDS):
        box = slot * BOXES + band * BAND // BOX
        codes = codes_ring.index(box).slice(band * BAND % BOX, BAND)
        meta = meta_of(meta_ring, box, band * BAND % BOX, BAND, sums)
        for step in gl.static_range(STEPS):
            # Loaded again: with the first step's words, all of a band would be unpacked before its
            # first product begins.
            words = codes.load(left)
            w = _weights(words, meta, dtype, step, left)
            x = x_ring.index(slot * STEPS + step).permute((1, 0))
            if step > 0:
                part = warpgroup_mma(w, x, part, is_async=True)
                w = warpgroup_mma_wait(1, deps=[w])
            else:
                begun = warpgroup_mma(w, x, zero, use_acc=False, is_async=True)
                if band > 0:
                    done = warpgroup_mma_wait(1, deps=[part])
                    accs = put(accs, band - 1, accs[band - 1] + done * scale)
                part = begun
                scale = scale_of(meta)
    done = warpgroup_mma_wait(0, deps=[part])
    gl.thread_barrier()  # all warps are done with the slot
    mbarrier.arrive(free.index(slot), count=1)
    return put(accs, BANDS - 1, accs[BANDS - 1] + done * scale)


@gluon.jit
def consume(common, TILE: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Multiply each unit by its rows, band after band of its outputs."""
    rings, bars, pointers, sizes, low, high = common
    full, free = bars
    bias_ptr, out_ptr, part_ptr, arrivals = pointers
    N, padded_n, num_rows, chunks, units, span = sizes
    STAGES: gl.constexpr = full.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    BAND: gl.constexpr = 16 * WARPS
    ROWS: gl.constexpr = rings[1].shape[1]
    PART: gl.constexpr = TILE * ROWS
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    slot = 0
    phase = 0
    for tile in range(low // chunks, (high - 1) // chunks + 1):
        begin = gl.maximum(low - tile * chunks, 0)
        end = gl.minimum(high - tile * chunks, chunks)
        zero = gl.zeros([BAND, ROWS], gl.float32, layout=sums)
        accs = (zero,) * (TILE // BAND)
        for _ in range(begin, end):
            mbarrier.wait(full.index(slot), phase)
            accs = _unit(accs, rings, bars, slot, sums)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        first, others = sharers(sizes, tile)
        parts = part_ptr + (tile + first) * PART
        mine = gl.program_id(0) - first
        accs, is_last = met(accs, parts, arrivals + first, mine, others, PART)
        if is_last:
            for band in gl.static_range(len(accs)):
                store(accs[band], pointers, sizes, tile * TILE, band, 0, HAS_BIAS, rings[1].dtype)


@gluon.jit(do_not_specialize=["num_rows", "chunks", "units", "span"])
def int4_bands_kernel(
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
    TILE: gl.constexpr,
    CHUNKS_A_GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    if DEPENDENT:
        turn("griddepcontrol.launch_dependents; // $0")
    BOXES: gl.constexpr = TILE // codes_desc.block_type.shape[0]
    STEPS: gl.constexpr = codes_desc.block_type.shape[1] * 4 // STEP
    descs = (codes_desc, x_desc, meta_desc)
    rings, bars = new_ring(descs, STAGES, BOXES, STEPS, 1)
    low = gl.program_id(0) * span
    high = gl.minimum(low + span, units)
    pointers = (bias_ptr, out_ptr, part_ptr, arrivals)
    sizes = (N, padded_n, num_rows, chunks, units, span)
    producer = (descs, rings, bars, low, high, sizes, CHUNKS_A_GROUP, DEPENDENT)
    common = (rings, bars, pointers, sizes, low, high)
    gl.warp_specialize([(consume, (common, TILE, HAS_BIAS)), (produce, producer)], [1], [24])


@dataclass(frozen=True)
class BandShape:
    """How the kernel is specialised, and how it is laid over the multiprocessors."""

    tile: int
    """Outputs: 128, 256 or 512."""
    warps: int
    """Of a program, beside the one that loads: 4 take bands of 64 outputs, 8 of 128."""
    programs: int
    """A multiprocessor: 2 of 4 warps, or 1."""
    least_span: int
    """Fewest units a program: small layers are cut into fewer parts than there is room for."""

    @property
    def registers(self) -> int:
        """A thread's at the start; the loader hands most of its own over."""
        return _REGISTERS[self.warps, self.programs]

    @property
    def box(self) -> int:
        """Outputs that are loaded at a time."""
        return min(self.tile, _MOST_BOXED)

    @property
    def words(self) -> str:
        """Its name in a table."""
        return f"{self.tile}/{self.warps}/{self.programs}/{self.least_span} whole"

    def stages(self, rows: int, chunk: int) -> int:
        """Return how many units the ring holds, for tiles of so many rows."""
        return stages(unit_bytes(self.tile, rows, chunk), self.programs)

    def cut(self, outputs: int, chunks: int, multiprocessors: int) -> Cut:
        """Return how a layer is laid over so many multiprocessors."""
        tiles = -(-outputs // self.tile)
        return Cut.of(tiles, chunks, multiprocessors * self.programs, self.least_span)

    def parts(self, outputs: int, chunks: int, rows: int, multiprocessors: int) -> int:
        """Return the floats that parts of sums take, for tiles of so many rows."""
        cut = self.cut(outputs, chunks, multiprocessors)
        return (cut.tiles + cut.programs) * self.tile * rows


_MOST_BOXED = 256
_REGISTERS = {(4, 2): 128, (8, 1): 168}


def _candidates(rows: int) -> tuple[BandShape, ...]:
    """Return the shapes of a tile's rows: kinds whose sums fit into registers, cut in some ways."""
    kinds = [(128, 8, 1)]
    if rows < MOST_ROWS:
        kinds += [(256, 8, 1), (128, 4, 2)]
    if rows < _WIDE_SUMS:
        kinds += [(512, 8, 1)]
    return tuple(
        BandShape(*kind, least)
        for kind in kinds
        for least in ((4, 7, 14) if kind[0] == 128 else (4, 7))
    )


_WIDE_SUMS = 64
MOST_ROWS = 128

CANDIDATES: dict[int, tuple[BandShape, ...]] = {
    rows: _candidates(rows) for rows in (16, 32, 64, MOST_ROWS)
}
"""By the rows of the tile, ascending: what a plan or a sweep may try."""


def shape_for(rows: int, outputs: int) -> tuple[int, BandShape]:
    """Return the tile's rows, and its shape, for at most `MOST_ROWS` rows of a layer.

    By reckoning, for where no shape is named: wide tiles read rows less often, narrow ones leave
    fewer programs to a tile. What an H200 found quickest is named in `hopper_int4_ways.SERVED`.
    """
    block_m = next(size for size in CANDIDATES if rows <= size)
    is_wide = outputs >= _WIDE and block_m < MOST_ROWS
    return block_m, BandShape(256 if is_wide else 128, 8, 1, 4)


_WIDE = 132 * 128
"""Outputs: a tile of 128 for each multiprocessor."""


def reserved(outputs: int, chunks: int, device: torch.device) -> tuple[int, int]:
    """Return the floats of parts and the arrivals that any candidate needs for a layer."""
    return most_reserved(CANDIDATES, outputs, chunks, multiprocessors(device))


def int4_bands(
    x_TI: Tensor,
    weight: PackedInt4,
    bias_O: Tensor | None,
    *,
    scratch: SplitScratch,
    shape: BandShape | None = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype; sums are float32.

    Args:
        x_TI: Contiguous; 1 to `MOST_ROWS` rows, bfloat16 or float16, at a multiple of 16 bytes.
        weight: On x's device, a Hopper GPU.
        bias_O: In x's dtype, or none.
        scratch: Large enough for the layer: `reserved`.
        shape: Instead of the usual one.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    rows = x_TI.shape[0]
    block_m, usual = shape_for(rows, weight.outputs)
    shape = shape or usual
    cut = shape.cut(weight.outputs, weight.codes.shape[0], multiprocessors(x_TI.device))
    if out_TO is None:
        out_TO = torch.empty(rows, weight.outputs, dtype=x_TI.dtype, device=x_TI.device)
    descs = descriptors(x_TI, weight, shape.box, block_m, _STEP)
    int4_bands_kernel[(cut.programs,)](
        *descs,
        *run_arguments(x_TI, weight, bias_O, scratch, cut, out_TO),
        TILE=shape.tile,
        CHUNKS_A_GROUP=weight.chunks_a_group,
        HAS_BIAS=bias_O is not None,
        STAGES=shape.stages(block_m, weight.chunk),
        **launch_options(),
        num_warps=shape.warps,
        maxnreg=shape.registers,
    )
    return out_TO
