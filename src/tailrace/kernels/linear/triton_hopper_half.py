"""A linear layer of few rows over a weight in half precision, for Hopper: waiting for bytes only.

cuBLAS multiplies as well, and can neither be launched dependently nor ask for its weight before its
turn. Here the weight goes as it lies from memory into the tensor cores:

    producer    1 warp: copies units, 64 or 128 inputs of a tile's weights and of the rows, into a
                ring in shared memory (`triton_hopper_ring`), as many ahead as fit
    slice p     4 or 8 warps: of the units p, p + SLICES ... the products of each band of outputs

    acc [BAND outputs, ROWS] += w [BAND, 64] @ x.T [64, ROWS]

Sums are float32 and stay where the tensor cores add, over all units of a tile: with a ring of many
slots a unit's products are in flight while the next unit's are queued, and its slot goes back when
those are; with few slots a slot goes back as soon as it can.

A layer is laid over the multiprocessors in one of two ways, by its shape and the GPU alone:

    runs        one slice; programs take equal runs of units, tile after tile, and parts of a tile
                meet in memory: pair by pair (`met`), or whoever comes last adds them all in order
    whole       a program takes whole tiles: no parts. Of one slice where so many outputs divide the
                layer evenly among multiprocessors (288 of 37888 by 132); of two, which deal a
                tile's units and meet in shared memory, where there is a tile for each at most

A tile need not be a multiple of a band: what its last band has beyond it is zeros, no bytes of
memory. A row's sum depends on no neighbour within its class of rows.

What a multiprocessor of an H200, one of 132, loads in Qwen2.5-7B at 64 rows, kilobytes of weights
(32 a microsecond is its share of the memory) and of rows, which the second-level cache has:

    layer    outputs x inputs   weights   rows, by tiles of           runs, programs to a tile
                                           128     224     288          of 128 / of 224
    qkv       4608 x 3584           250    125      72      56           3.7 / 6.3
    o         3584 x 3584           195     98      56      44           4.7 / 8.3
    gate_up  37888 x 3584          2057   1029     588     459           0.4 / 0.8
    down      3584 x 18944         1029    514     294     229           4.7 / 8.3
    head    152064 x 3584          8258   4129    2359    1835           0.1 / 0.2

By that, before any of it was measured: gate_up and the head want "whole 288", which leaves no parts
and the fewest rows; down the 112 or 224 outputs that 3584 is a multiple of, in quarters or eighths
of their inputs; qkv and o are short, so that fewer parts count for more than rows do, and tiles of
112 or 128 in quarters should win, or slices of 32 or 40 outputs, whose programs have no parts at
all and load more rows than weights: up to 32 rows, where those are fewer.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import launch_options
from tailrace.kernels.linear.triton_hopper_ring import (
    OTHER_SHARED_BYTES,
    SHARED_BYTES,
    Cut,
    added_up,
    new_tile_ring,
    of_outputs,
    produce_tiles,
    put,
    shared_layout,
    slices_met,
    store,
    turn,
)
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.workspace import SplitScratch

_BOX_INPUTS = 64
"""As many as lie in one line of shared memory."""


@gluon.jit
def _unit(accs, rings, bars, slot):
    """Queue a unit's products, each a group of its own."""
    w_ring, x_ring = rings
    BANDS: gl.constexpr = len(accs)
    BAND: gl.constexpr = 16 * gl.num_warps()
    INPUTS: gl.constexpr = w_ring.shape[2]
    STEPS: gl.constexpr = x_ring.shape[0] // bars[0].shape[0]
    COUNT: gl.constexpr = w_ring.shape[0] * w_ring.shape[1] // BAND
    bands = w_ring._reinterpret(w_ring.dtype, [COUNT, BAND, INPUTS], w_ring.layout)  # noqa: SLF001
    for step in gl.static_range(STEPS):
        x = x_ring.index(slot * STEPS + step).permute((1, 0))
        for band in gl.static_range(BANDS):
            w = bands.index((slot * STEPS + step) * BANDS + band)
            accs = put(accs, band, warpgroup_mma(w, x, accs[band], is_async=True))
    return accs


@gluon.jit
def _waited(accs, LEFT: gl.constexpr):
    """Return the sums when no more than so many products are under way."""
    if len(accs) == 1:
        accs = (warpgroup_mma_wait(LEFT, deps=accs),)
    else:
        accs = warpgroup_mma_wait(LEFT, deps=accs)
    return accs


@gluon.jit
def _consume(
    common,
    slice_: gl.constexpr,
    SLICES: gl.constexpr,
    TILE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    MEETS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Multiply a slice's units; the first slice writes the sums."""
    rings, bars, meeting, pointers, sizes, low, high = common
    full, free = bars
    bias_ptr, out_ptr, part_ptr, arrivals = pointers
    N, padded_n, num_rows, chunks, units, span = sizes
    STAGES: gl.constexpr = full.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    BAND: gl.constexpr = 16 * WARPS
    BANDS: gl.constexpr = (TILE + BAND - 1) // BAND
    ROWS: gl.constexpr = rings[1].shape[1]
    LEFT: gl.constexpr = BANDS * (rings[1].shape[0] // STAGES) if AHEAD else 0
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    no_value = (gl.zeros([BAND], gl.float32, layout=gl.SliceLayout(1, sums)),) * BANDS
    for tile in range(low // chunks, (high - 1) // chunks + 1):
        output = tile * TILE
        bias = no_value
        if HAS_BIAS and slice_ == 0:
            bias = of_outputs(bias_ptr, no_value, N, output)
        begin = gl.maximum(low, tile * chunks) + slice_
        end = gl.minimum(high, (tile + 1) * chunks)
        accs = (gl.zeros([BAND, ROWS], gl.float32, layout=sums),) * BANDS
        slot = 0
        for unit in range(begin, end, SLICES):
            before = slot
            slot = (unit - low) % STAGES
            mbarrier.wait(full.index(slot), (unit - low) // STAGES % 2)
            accs = _unit(accs, rings, bars, slot)
            accs = _waited(accs, LEFT)
            gl.thread_barrier()  # all warps are done with the slot
            if AHEAD:
                mbarrier.arrive(free.index(before), count=1, pred=unit > begin)
            else:
                mbarrier.arrive(free.index(slot), count=1)
        if AHEAD:
            accs = _waited(accs, 0)
            gl.thread_barrier()
            mbarrier.arrive(free.index(slot), count=1, pred=begin < end)
        accs = slices_met(accs, meeting, slice_, SLICES)
        if slice_ == 0:
            is_whole = True
            if MEETS != "whole":
                accs, is_whole = added_up(accs, pointers, sizes, tile, MEETS == "pairs")
            if is_whole:
                dtype: gl.constexpr = rings[0].dtype
                for band in gl.static_range(BANDS):
                    y = accs[band] + bias[band][:, None]
                    store(y, pointers, sizes, output, band, 0, False, dtype, TILE)


@gluon.jit(do_not_specialize=["num_rows", "chunks", "units", "span"])
def half_hopper_kernel(
    w_desc,
    x_desc,
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
    STEPS: gl.constexpr,
    SLICES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    MEETS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    if DEPENDENT:
        turn("griddepcontrol.launch_dependents; // $0")
    descs = (w_desc, x_desc)
    BAND: gl.constexpr = 16 * gl.num_warps()
    BANDS: gl.constexpr = (TILE + BAND - 1) // BAND
    BOXES: gl.constexpr = BANDS * BAND // w_desc.block_type.shape[0]
    rings, bars = new_tile_ring(descs, STAGES, BOXES, STEPS)
    low = gl.program_id(0) * span
    high = gl.minimum(low + span, units)
    pointers = (bias_ptr, out_ptr, part_ptr, arrivals)
    sizes = (N, N, num_rows, chunks, units, span)
    producer = (descs, rings, bars, low, high, chunks, N, TILE, DEPENDENT)
    if SLICES == 1:
        common = (rings, bars, bars, pointers, sizes, low, high)
        gl.warp_specialize(
            [
                (_consume, (common, 0, 1, TILE, HAS_BIAS, MEETS, AHEAD)),
                (produce_tiles, producer),
            ],
            [1],
            [24],
        )
    else:
        order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        sums_ring = gl.allocate_shared_memory(
            gl.float32, [(SLICES - 1) * BANDS, BAND, rings[1].shape[1]], order
        )
        done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(done.index(0), count=SLICES - 1)
        meeting = (sums_ring, done)
        common = (rings, bars, meeting, pointers, sizes, low, high)
        gl.warp_specialize(
            [
                (_consume, (common, 0, SLICES, TILE, HAS_BIAS, MEETS, AHEAD)),
                (_consume, (common, 1, SLICES, TILE, HAS_BIAS, MEETS, AHEAD)),
                (produce_tiles, producer),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


PAIRS, LAST, WHOLE = "pairs", "last", "whole"


@dataclass(frozen=True)
class HopperHalfShape:
    """How the kernel is specialised, and how it is laid over the multiprocessors."""

    tile: int
    """Outputs, a multiple of 8."""
    inputs: int
    """Of a unit: 64 or 128."""
    warps: int
    """Of a slice: 4 take bands of 64 outputs, 8 of 128."""
    programs: int = 1
    """A multiprocessor: 2 of 4 warps, or 1."""
    least_span: int = 0
    """Fewest units a program, of runs."""
    meets: str = WHOLE
    """How parts of runs are added up: "pairs", or "last" for all by whoever comes last; or "whole":
    tiles have no parts."""
    slices: int = 1
    """2 share the inputs of a whole tile, within a program."""

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread: at the start, and of the second slice in the end."""
        return _REGISTERS[self.slices, self.warps, self.programs]

    @property
    def band(self) -> int:
        """Outputs that are multiplied at a time."""
        return 16 * self.warps

    @property
    def padded(self) -> int:
        """Outputs that a slot has room for: whole bands."""
        return -(-self.tile // self.band) * self.band

    @property
    def box(self) -> int:
        """Outputs that are loaded at a time: a power of two that divides tile and band."""
        return min(self.tile & -self.tile, self.band)

    @property
    def steps(self) -> int:
        """Boxes side by side in a unit."""
        return self.inputs // _BOX_INPUTS

    @property
    def words(self) -> str:
        """Its name in a plan."""
        size = f"Hopper {self.tile}x{self.inputs}"
        if self.slices > 1:
            return f"{size}, {self.slices} slices"
        if self.meets == WHOLE:
            return f"{size}/{self.warps} whole"
        return f"{size}/{self.warps}/{self.programs}/{self.least_span} {self.meets}"

    def fits(self, outputs: int, multiprocessors: int) -> bool:
        """Tell whether whole tiles lie well on so many multiprocessors.

        Of two slices, one on each at most: the narrowest, and the widest. Of one, so that hardly
        one of them waits at the end; and only of the size that does best.
        """
        if self.meets != WHOLE:
            return True
        if self.slices > 1:
            fit = [tile for tile in SLICE_TILES if -(-outputs // tile) <= multiprocessors]
            return self.tile in {*fit[:1], *fit[-1:]}
        return self.tile == _even_tile(outputs, multiprocessors)

    def stages(self, rows: int) -> int:
        """Return how many units the ring holds, for tiles of so many rows.

        A multiple of the slices: see `HopperFloat8Shape.stages`.
        """
        unit = (self.padded + rows) * self.inputs * 2
        meeting = (self.slices - 1) * 4 * self.padded * rows
        room = SHARED_BYTES // self.programs - OTHER_SHARED_BYTES - meeting
        return min(_MOST_STAGES, room // unit) // self.slices * self.slices

    def is_ahead(self, rows: int) -> bool:
        """Tell whether a unit's products may run on while the next one's are queued."""
        return self.stages(rows) >= _AHEAD_STAGES * self.slices

    def chunks(self, inputs: int) -> int:
        """Return the units of a tile."""
        return -(-inputs // self.inputs)

    def cut(self, outputs: int, inputs: int, multiprocessors: int) -> Cut:
        """Return how a layer is laid over so many multiprocessors."""
        tiles, chunks = -(-outputs // self.tile), self.chunks(inputs)
        if self.slices > 1:
            return Cut(tiles, chunks, tiles)
        if self.meets == WHOLE:
            each = -(-tiles // multiprocessors)
            return Cut(tiles, each * chunks, -(-tiles // each))
        return Cut.of(tiles, chunks, multiprocessors * self.programs, self.least_span)

    def parts(self, outputs: int, inputs: int, rows: int, multiprocessors: int) -> int:
        """Return the floats that parts of sums take, for tiles of so many rows."""
        if self.meets == WHOLE:
            return 0
        cut = self.cut(outputs, inputs, multiprocessors)
        return (min(cut.tiles, cut.programs) + cut.programs) * self.padded * rows


_MOST_STAGES = 24
_AHEAD_STAGES = 8
"""Slots of a slice: of fewer, one that is held for a unit longer would be missed."""
_REGISTERS = {
    (1, 4, 1): (128, 24),
    (1, 8, 1): (168, 24),
    (1, 4, 2): (128, 24),
    (2, 4, 1): (168, 232),
}

WHOLE_TILES = (160, 192, 224, 256, 288, 320)
"""Of one slice."""
SLICE_TILES = (32, 40, 64)
_MOST_WASTE = 1.08
"""Outputs that the busiest multiprocessor has, over an equal share."""


def _even_tile(outputs: int, multiprocessors: int) -> int:
    """Return the size of whole tiles that leaves the least waste, the widest of several; or 0."""

    def waste(tile: int) -> float:
        tiles = -(-outputs // tile)
        return -(-tiles // multiprocessors) * tile * multiprocessors / outputs

    best = min(reversed(WHOLE_TILES), key=waste)
    return best if waste(best) <= _MOST_WASTE else 0


def _candidates(rows: int) -> tuple[HopperHalfShape, ...]:
    """Return the shapes of a tile's rows: what sums have registers for, cut in some ways."""
    wide = 4 if rows < MOST_ROWS else 8  # a thread has at most 160, or 192, sums
    long = 128 if rows < MOST_ROWS else 64  # of which a ring has several
    runs = [
        HopperHalfShape(tile, inputs, warps, programs, least, meets)
        for tile, inputs, warps, programs, least, meets in (
            (128, 64, 4, 1, 8, PAIRS),
            (128, 64, 4, 1, 8, LAST),
            (128, 64, 4, 1, 14, PAIRS),  # o of a 7B model: four programs a tile, and no other
            (112, long, 4, 1, 4, PAIRS),
            (112, long, 4, 1, 4, LAST),
            (224, 64, wide, 1, 4, PAIRS),
            (224, 64, wide, 1, 4, LAST),
            (256, 64, 8, 1, 8, PAIRS),
            (64, long, 4, 2, 4, PAIRS),
        )
    ]
    whole = [HopperHalfShape(tile, 64, wide) for tile in WHOLE_TILES]
    slices = [HopperHalfShape(tile, 128, 4, slices=2) for tile in SLICE_TILES]
    slices = slices if rows < MOST_ROWS else []
    return (*runs, *whole, *slices)


MOST_ROWS = 128

CANDIDATES: dict[int, tuple[HopperHalfShape, ...]] = {
    rows: _candidates(rows) for rows in (16, 32, 64, MOST_ROWS)
}
"""By the rows of the tile, ascending: what a plan or a sweep may try."""


def reserved(outputs: int, inputs: int, count: int) -> tuple[int, int]:
    """Return the floats of parts and the arrivals that any candidate needs for a layer.

    Args:
        outputs: Of the layer.
        inputs: Likewise.
        count: Multiprocessors.
    """
    shapes = [(rows, shape) for rows, several in CANDIDATES.items() for shape in several]
    return (
        max(shape.parts(outputs, inputs, rows, count) for rows, shape in shapes),
        max(shape.cut(outputs, inputs, count).programs for _, shape in shapes),
    )


def takes(weight_OI: Tensor) -> bool:
    """Tell whether TMA can copy a weight: in half precision, rows at multiples of 16 bytes."""
    is_half = weight_OI.dtype in {torch.bfloat16, torch.float16}
    return is_half and weight_OI.shape[1] % 8 == 0 and weight_OI.data_ptr() % 16 == 0


def half_hopper(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    shape: HopperHalfShape,
    scratch: SplitScratch,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype; sums are float32.

    Args:
        x_TI: Contiguous; 1 to `MOST_ROWS` rows, at a multiple of 16 bytes.
        weight_OI: As x, on a Hopper GPU; one that the kernel `takes`.
        bias_O: In x's dtype, or none.
        shape: A candidate of the rows' class.
        scratch: Large enough for the layer: `reserved`.
        out_TO: Where the result goes, contiguous; by default into new memory.

    Raises:
        EngineError: There are no rows, or too many.
    """
    rows, inputs = x_TI.shape
    outputs = weight_OI.shape[0]
    if not 0 < rows <= MOST_ROWS:
        raise EngineError(f"{rows} rows: this product takes 1 to {MOST_ROWS}")
    block_m = next(size for size in CANDIDATES if rows <= size)
    cut = shape.cut(outputs, inputs, multiprocessors(x_TI.device))
    if out_TO is None:
        out_TO = torch.empty(rows, outputs, dtype=x_TI.dtype, device=x_TI.device)
    registers, slice_registers = shape.registers
    chunks = shape.chunks(inputs)
    half_hopper_kernel[(cut.programs,)](
        _boxes(weight_OI, shape.box),
        _boxes(x_TI, block_m),
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
        STEPS=shape.steps,
        SLICES=shape.slices,
        HAS_BIAS=bias_O is not None,
        MEETS=shape.meets,
        STAGES=shape.stages(block_m),
        AHEAD=shape.is_ahead(block_m),
        REGISTERS=slice_registers,
        **launch_options(),
        num_warps=shape.warps,
        maxnreg=registers,
    )
    return out_TO


BOX_LAYOUT = shared_layout(_BOX_INPUTS)
"""Rows of 128 bytes in shared memory, swizzled over all of them."""


def _boxes(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Return what copies so many rows of a matrix at a time, 128 bytes of each."""
    return TensorDescriptor(
        matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, _BOX_INPUTS], BOX_LAYOUT
    )
