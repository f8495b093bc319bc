"""A linear layer of few FP8 rows over an FP8 weight, for Hopper: nothing but waiting for bytes.

`triton_float8_few` says what is computed. Both operands go from memory into the tensor cores as
they are, so all that is left to win is the waiting, and Gluon, the language below Triton's, says
which warps wait for what:

    producer    1 warp: copies units, 128 inputs of a tile's weights and of the rows, into a ring in
                shared memory (`triton_hopper_ring`), as many ahead as fit
    slice p     4 or 8 warps: of the units p, p + SLICES ... one product each for a band of outputs,
                a band's sums added in float32 while the next band is multiplied

Hopper's tensor cores keep some 14 bits of a float8 sum: so a unit's 128 inputs are summed there,
and units in float32. By channels sums are scaled at the end, by blocks of 128 x 128 each unit's.

A layer is laid over the multiprocessors in one of two ways, by its shape and the GPU alone:

    runs        one slice; programs take equal runs of units, tile after tile, and parts of a tile
                meet in memory: pair by pair (`met`), or whoever comes last adds them all in order
    slices      a program takes a tile of 64 outputs and all inputs, and deals its units to slices,
                whose sums meet in shared memory, in the slices' order: no parts, for layers of
                fewer tiles than there are multiprocessors

A row's sum depends on no neighbour within its class of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tailrace.kernels.dependent_launch import launch_options
from tailrace.kernels.linear.float8 import BLOCK
from tailrace.kernels.linear.float8_rows import ROWS_TOGETHER, require_few
from tailrace.kernels.linear.triton_hopper_ring import (
    META_LAYOUT,
    OTHER_SHARED_BYTES,
    SHARED_BYTES,
    Cut,
    added_up,
    flat,
    most_reserved,
    new_tile_ring,
    of_outputs,
    produce_tiles,
    put,
    slices_met,
    store,
    turn,
)
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.float8 import Float8Weight
    from tailrace.kernels.linear.float8_rows import Float8Rows
    from tailrace.kernels.linear.workspace import SplitScratch

CHUNK = gl.constexpr(BLOCK)
"""Inputs of a unit: as many as lie in one line of shared memory, and share a scale."""
MOST_SUMS = gl.constexpr(192)
"""Registers a thread for sums while two products are under way; where it would be more, one is."""


@gluon.jit
def _added(accs, band: gl.constexpr, done, rings, slot, block_scales):
    """Return the sums with a band's of a unit, which by blocks are scaled."""
    if len(rings) == 3:
        columns: gl.constexpr = gl.SliceLayout(0, done.type.layout)
        scales = flat(rings[2]).index(slot).slice(0, done.shape[1]).load(columns)
        done = done * (scales * block_scales[band])[None, :]
    return put(accs, band, accs[band] + done)


@gluon.jit
def _unit(accs, rings, bars, slot, block_scales, sums: gl.constexpr):
    """Return the sums with a unit's products, and hand back its slot."""
    w_ring, x_ring = rings[0], rings[1]
    full, free = bars
    BANDS: gl.constexpr = len(accs)
    BAND: gl.constexpr = 16 * gl.num_warps()
    BOXES: gl.constexpr = w_ring.shape[0] // full.shape[0]
    BOX: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    # A thread has half as many sums of a band as there are rows.
    BESIDE: gl.constexpr = (BANDS + 2) * ROWS // 2 <= MOST_SUMS
    zero = gl.zeros([BAND, ROWS], gl.float32, layout=sums)
    x = x_ring.index(slot).permute((1, 0))
    part = zero
    for band in gl.static_range(BANDS):
        if band > 0 and not BESIDE:
            done = warpgroup_mma_wait(0, deps=[part])
            accs = _added(accs, band - 1, done, rings, slot, block_scales)
        w = w_ring.index(slot * BOXES + band * BAND // BOX).slice(band * BAND % BOX, BAND)
        begun = warpgroup_mma(w, x, zero, use_acc=False, is_async=True)
        if band > 0 and BESIDE:
            done = warpgroup_mma_wait(1, deps=[part])
            accs = _added(accs, band - 1, done, rings, slot, block_scales)
        part = begun
    done = warpgroup_mma_wait(0, deps=[part])
    accs = _added(accs, BANDS - 1, done, rings, slot, block_scales)
    if len(rings) == 3:
        # The assembler leaves scales on their way past the barrier: the next copy is to find them
        # gone.
        fence_async_shared()
    gl.thread_barrier()  # all warps are done with the slot
    mbarrier.arrive(free.index(slot), count=1)
    return accs


@gluon.jit
def _values(
    w_scale_ptr, bias_ptr, zeros, N, first, BY_BLOCKS: gl.constexpr, HAS_BIAS: gl.constexpr
):
    """Return the scales by channels, and the biases: asked for before the sums, here with them."""
    w_scales = zeros
    bias = zeros
    if not BY_BLOCKS:
        w_scales = of_outputs(w_scale_ptr, zeros, N, first)
    if HAS_BIAS:
        bias = of_outputs(bias_ptr, zeros, N, first)
    return w_scales, bias


@gluon.jit
def _of_blocks(w_scale_ptr, N, first, chunk, chunks, BANDS: gl.constexpr):
    """Return the scale of a chunk in each band, of which each lies in one block."""
    scales = (0.0,) * BANDS
    for band in gl.static_range(BANDS):
        output = first + band * (16 * gl.num_warps())
        at = w_scale_ptr + output // CHUNK * chunks + chunk
        scales = put(scales, band, gl.load(at, mask=output < N, other=0.0))
    return scales


@gluon.jit
def _write(accs, scales, x_scale_ptr, pointers, sizes, output, BY_BLOCKS: gl.constexpr):
    """Scale a tile's sums by channels, add the bias and write them."""
    w_scales, bias = scales
    num_rows = sizes[2]
    columns: gl.constexpr = gl.SliceLayout(0, accs[0].type.layout)
    dtype: gl.constexpr = pointers[1].dtype.element_ty
    rows = gl.arange(0, accs[0].shape[1], layout=columns)
    if not BY_BLOCKS:
        x_scale = gl.load(x_scale_ptr + rows, mask=rows < num_rows, other=0.0)
    for band in gl.static_range(len(accs)):
        y = accs[band]
        if not BY_BLOCKS:
            y = y * w_scales[band][:, None] * x_scale[None, :]
        y = y + bias[band][:, None]
        store(y, pointers, sizes, output, band, 0, False, dtype)


@gluon.jit
def _consume(
    common,
    slice_: gl.constexpr,
    SLICES: gl.constexpr,
    TILE: gl.constexpr,
    BY_BLOCKS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IN_PAIRS: gl.constexpr,
):
    """Multiply a slice's units; the first slice scales and writes the sums."""
    rings, bars, meeting, scale_pointers, pointers, sizes, low, high = common
    full, free = bars
    x_scale_ptr, w_scale_ptr = scale_pointers
    bias_ptr, out_ptr, part_ptr, arrivals = pointers
    N, padded_n, num_rows, chunks, units, span = sizes
    STAGES: gl.constexpr = full.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    BAND: gl.constexpr = 16 * WARPS
    BANDS: gl.constexpr = TILE // BAND
    ROWS: gl.constexpr = rings[1].shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 32])
    no_value = (gl.zeros([BAND], gl.float32, layout=gl.SliceLayout(1, sums)),) * BANDS
    for tile in range(low // chunks, (high - 1) // chunks + 1):
        output = tile * TILE
        scales = (no_value, no_value)
        if slice_ == 0:
            scales = _values(w_scale_ptr, bias_ptr, no_value, N, output, BY_BLOCKS, HAS_BIAS)
        begin = gl.maximum(low, tile * chunks)
        end = gl.minimum(high, (tile + 1) * chunks)
        accs = (gl.zeros([BAND, ROWS], gl.float32, layout=sums),) * BANDS
        for unit in range(begin + slice_, end, SLICES):
            block_scales = (0.0,) * BANDS
            if BY_BLOCKS:
                chunk = unit - tile * chunks
                block_scales = _of_blocks(w_scale_ptr, N, output, chunk, chunks, BANDS)
            slot = (unit - low) % STAGES
            mbarrier.wait(full.index(slot), (unit - low) // STAGES % 2)
            accs = _unit(accs, rings, bars, slot, block_scales, sums)
        accs = slices_met(accs, meeting, slice_, SLICES)
        if slice_ == 0:
            is_whole = True
            if SLICES == 1:
                accs, is_whole = added_up(accs, pointers, sizes, tile, IN_PAIRS)
            if is_whole:
                _write(accs, scales, x_scale_ptr, pointers, sizes, output, BY_BLOCKS)


@gluon.jit(do_not_specialize=["num_rows", "chunks", "units", "span"])
def float8_hopper_kernel(
    w_desc,
    x_desc,
    scale_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals,
    num_rows,
    N,
    chunks,
    units,
    span,
    TILE: gl.constexpr,
    SLICES: gl.constexpr,
    BY_BLOCKS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IN_PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    if DEPENDENT:
        turn("griddepcontrol.launch_dependents; // $0")
    descs = (w_desc, x_desc, scale_desc) if BY_BLOCKS else (w_desc, x_desc)
    rings, bars = new_tile_ring(descs, STAGES, TILE // w_desc.block_type.shape[0], 1)
    low = gl.program_id(0) * span
    high = gl.minimum(low + span, units)
    pointers = (bias_ptr, out_ptr, part_ptr, arrivals)
    sizes = (N, N, num_rows, chunks, units, span)
    producer = (descs, rings, bars, low, high, chunks, N, TILE, DEPENDENT)
    scale_pointers = (x_scale_ptr, w_scale_ptr)
    if SLICES == 1:
        common = (rings, bars, bars, scale_pointers, pointers, sizes, low, high)
        gl.warp_specialize(
            [
                (_consume, (common, 0, 1, TILE, BY_BLOCKS, HAS_BIAS, IN_PAIRS)),
                (produce_tiles, producer),
            ],
            [1],
            [24],
        )
    else:
        order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        BANDS: gl.constexpr = TILE // (16 * gl.num_warps())
        sums_ring = gl.allocate_shared_memory(
            gl.float32, [(SLICES - 1) * BANDS, TILE // BANDS, rings[1].shape[1]], order
        )
        done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(done.index(0), count=SLICES - 1)
        meeting = (sums_ring, done)
        common = (rings, bars, meeting, scale_pointers, pointers, sizes, low, high)
        if SLICES == 2:
            gl.warp_specialize(
                [
                    (_consume, (common, 0, SLICES, TILE, BY_BLOCKS, HAS_BIAS, IN_PAIRS)),
                    (_consume, (common, 1, SLICES, TILE, BY_BLOCKS, HAS_BIAS, IN_PAIRS)),
                    (produce_tiles, producer),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (common, 0, SLICES, TILE, BY_BLOCKS, HAS_BIAS, IN_PAIRS)),
                    (_consume, (common, 1, SLICES, TILE, BY_BLOCKS, HAS_BIAS, IN_PAIRS)),
                    (_consume, (common, 2, SLICES, TILE, BY_BLOCKS, HAS_BIAS, IN_PAIRS)),
                    (_consume, (common, 3, SLICES, TILE, BY_BLOCKS, HAS_BIAS, IN_PAIRS)),
                    (produce_tiles, producer),
                ],
                [4, 4, 4, 1],
                [REGISTERS, REGISTERS, REGISTERS, 24],
            )


_PAIRS, _LAST = "pairs", "last"


@dataclass(frozen=True)
class HopperFloat8Shape:
    """How the kernel is specialised, and how it is laid over the multiprocessors."""

    tile: int
    """Outputs: 64, and of runs also 128, 256 or 512."""
    slices: int
    """1, or 2 or 4 that share a tile's inputs within a program."""
    warps: int
    """Of a slice: 4 take bands of 64 outputs, 8 of 128."""
    programs: int
    """A multiprocessor: 2 of 4 warps, or 1."""
    least_span: int
    """Fewest units a program, of runs; 0: slices take whole tiles."""
    meets: str = _PAIRS
    """How parts of runs are added up: "pairs", or "last" for all by whoever comes last."""

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread: at the start, and of a slice but the first in the end."""
        return _REGISTERS[self.slices, self.warps, self.programs]

    @property
    def box(self) -> int:
        """Outputs that are loaded at a time."""
        return min(self.tile, _MOST_BOXED)

    @property
    def words(self) -> str:
        """Its name in a plan."""
        if self.slices > 1:
            return f"FP8 Hopper {self.tile} outputs, {self.slices} slices"
        span = f"{self.tile}/{self.warps}/{self.programs}/{self.least_span}"
        return f"FP8 Hopper {span} {self.meets}"

    def fits(self, outputs: int, multiprocessors: int) -> bool:
        """Tell whether each slices' tile has a multiprocessor: others would wait for a turn."""
        return self.slices == 1 or -(-outputs // self.tile) <= multiprocessors

    def stages(self, rows: int) -> int:
        """Return how many units the ring holds, for tiles of so many rows.

        A multiple of the slices, so that one slice takes all units of a slot: another one would not
        know in which of two phases it finds a barrier.
        """
        scales = 4 * max(rows, _LEAST_SCALES)
        unit = (self.tile + rows) * BLOCK + scales
        meeting = (self.slices - 1) * 4 * self.tile * rows
        room = SHARED_BYTES // self.programs - OTHER_SHARED_BYTES - meeting
        return min(_MOST_STAGES, room // unit) // self.slices * self.slices

    def cut(self, outputs: int, chunks: int, multiprocessors: int) -> Cut:
        """Return how a layer is laid over so many multiprocessors."""
        tiles = -(-outputs // self.tile)
        if self.slices > 1:
            return Cut(tiles, chunks, tiles)
        return Cut.of(tiles, chunks, multiprocessors * self.programs, self.least_span)

    def parts(self, outputs: int, chunks: int, rows: int, multiprocessors: int) -> int:
        """Return the floats that parts of sums take, for tiles of so many rows."""
        cut = self.cut(outputs, chunks, multiprocessors)
        return 0 if self.slices > 1 else (cut.tiles + cut.programs) * self.tile * rows


_MOST_BOXED = 256
_MOST_STAGES = 16
_LEAST_SCALES = 32
"""Of rows a box: a slot begins at a multiple of 128 bytes, or TMA does not take it."""
_REGISTERS = {
    (1, 4, 1): (128, 24),
    (1, 8, 1): (168, 24),
    (1, 4, 2): (128, 24),
    (2, 4, 1): (168, 232),
    (4, 4, 1): (96, 112),
}
_WIDE_ROWS = 64
"""The most rows that sums of 512 outputs, or of four slices, have registers for."""


def _candidates(rows: int) -> tuple[HopperFloat8Shape, ...]:
    """Return the shapes of a tile's rows: kinds whose sums fit into registers, cut in some ways."""
    runs = [
        HopperFloat8Shape(128, 1, 8, 1, least, meets)
        for meets, spans in ((_PAIRS, (4, 7, 14)), (_LAST, (4, 7)))
        for least in spans
    ]
    kinds = [(256, 8, 1), (64, 4, 1)]
    slices = [2]
    if rows <= _WIDE_ROWS:
        runs.append(HopperFloat8Shape(512, 1, 8, 1, 4))
        kinds.append((128, 4, 2))
        slices.append(4)
    runs += [
        HopperFloat8Shape(tile, 1, warps, programs, 4, meets)
        for tile, warps, programs in kinds
        for meets in (_PAIRS, _LAST)
    ]
    runs.append(HopperFloat8Shape(64, 1, 4, 1, 14))  # o of a 7B model: two programs a tile
    return (*runs, *(HopperFloat8Shape(64, count, 4, 1, 0) for count in slices))


CANDIDATES: dict[int, tuple[HopperFloat8Shape, ...]] = {
    rows: _candidates(rows) for rows in (16, 32, 64, 128)
}
"""By the rows of the tile, ascending: what a plan or a sweep may try."""

MOST_ROWS = max(CANDIDATES)


def reserved(outputs: int, chunks: int, count: int) -> tuple[int, int]:
    """Return the floats of parts and the arrivals that any candidate needs for a layer.

    Args:
        outputs: Of the layer.
        chunks: Of 128 of its inputs.
        count: Multiprocessors.
    """
    return most_reserved(CANDIDATES, outputs, chunks, count)


def float8_hopper(
    x: Float8Rows,
    weight: Float8Weight,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    scratch: SplitScratch,
    shape: HopperFloat8Shape,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in `dtype`; chunks of 128 inputs are added in float32.

    Args:
        x: 1 to `MOST_ROWS` rows as `empty_rows` lays them out, in groups of 128 where the weight is
            scaled by blocks, else with one scale a row.
        weight: On x's device, a Hopper GPU; of scheme "channel" or "block128", inputs a multiple of
            16.
        bias_O: In `dtype`, or none.
        dtype: Of the result: bfloat16 or float16.
        scratch: Large enough for the layer: `reserved`.
        shape: A candidate of the rows' class.
        out_TO: Where the result goes, contiguous; by default into new memory.

    Raises:
        EngineError: There are no rows, or too many; or their scales do not go with the weight's.
    """
    require_few(x, weight, MOST_ROWS)
    rows, inputs = x.values.shape
    outputs = weight.shape[0]
    by_blocks = weight.scheme == "block128"
    block_m = next(size for size in CANDIDATES if rows <= size)
    chunks = -(-inputs // BLOCK)
    cut = shape.cut(outputs, chunks, multiprocessors(x.values.device))
    if out_TO is None:
        out_TO = torch.empty(rows, outputs, dtype=dtype, device=x.values.device)
    registers, slice_registers = shape.registers
    float8_hopper_kernel[(cut.programs,)](
        _boxes(weight.values, shape.box),
        _boxes(x.values, block_m),
        _scale_boxes(x, block_m) if by_blocks else None,
        x.scales,
        weight.scales,
        out_TO if bias_O is None else bias_O,
        out_TO,
        scratch.parts,
        scratch.arrivals,
        rows,
        outputs,
        chunks,
        cut.tiles * chunks,
        cut.span,
        TILE=shape.tile,
        SLICES=shape.slices,
        BY_BLOCKS=by_blocks,
        HAS_BIAS=bias_O is not None,
        IN_PAIRS=shape.meets == _PAIRS,
        STAGES=shape.stages(block_m),
        REGISTERS=slice_registers,
        **launch_options(),
        num_warps=shape.warps,
        maxnreg=registers,
    )
    return out_TO


BYTES_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
"""Rows of 128 bytes in shared memory, swizzled over all of them."""


def _boxes(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Return what copies so many rows of a matrix at a time, 128 bytes of each."""
    return TensorDescriptor(
        matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, BLOCK], BYTES_LAYOUT
    )


def _scale_boxes(x: Float8Rows, rows: int) -> TensorDescriptor:
    """Return what copies the rows' scales of one group at a time."""
    count, groups = x.scales.shape
    apart = x.scales.stride(1) if groups > 1 else count + -count % ROWS_TOGETHER
    box = [1, max(rows, _LEAST_SCALES)]
    return TensorDescriptor(x.scales.t(), [groups, count], [apart, 1], box, META_LAYOUT)
