"""What Hopper's kernels of few rows share: the ring, how work is cut, where split sums meet.

    unit      one chunk of inputs of one tile of outputs: codes and scales in boxes of a side's
              outputs, rows in boxes of some inputs
    ring      slots of a unit each in shared memory; `full` says that a slot's bytes have come,
              `free` that all sides are done with it
    run       the units of one program, tile after tile; programs take equal runs

A tile cut by a run's end is added up by whichever of its programs comes last, part after part in
order: a row's sum depends on no neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.workspace import SplitScratch


@gluon.jit
def meta_of(meta_ring, slot, first, count: gl.constexpr, sums: gl.constexpr):
    """Return the scales and zero points of `count` outputs, int32, for sums in that layout."""
    return meta_ring.index(slot).slice(first, count).load(gl.SliceLayout(1, sums))


@gluon.jit
def flat(ring):
    """Return [STAGES, BLOCK_N] of a ring of single rows, [STAGES, 1, BLOCK_N]."""
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape: gl.constexpr = [ring.shape[0], ring.shape[2]]
    return ring._reinterpret(ring.dtype, shape, order)  # noqa: SLF001 - there is no other way


@gluon.jit
def new_ring(
    descs, STAGES: gl.constexpr, BOXES: gl.constexpr, PIECES: gl.constexpr, SIDES: gl.constexpr
):
    """Return a ring, of units of so many boxes each, and its barriers; `SIDES` hand a slot back."""
    codes_desc, x_desc, meta_desc = descs
    codes: gl.constexpr = codes_desc.block_type.shape
    rows: gl.constexpr = x_desc.block_type.shape
    codes_ring = gl.allocate_shared_memory(
        codes_desc.dtype, [STAGES * BOXES, codes[0], codes[1]], codes_desc.layout
    )
    x_ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * PIECES, rows[0], rows[1]], x_desc.layout
    )
    meta_ring = gl.allocate_shared_memory(gl.int32, [STAGES * BOXES, 1, codes[0]], meta_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=SIDES)
    return (codes_ring, x_ring, meta_ring), (full, free)


@gluon.jit
def load_weights(descs, rings, bars, slot, tile, chunk, sizes, CHUNKS_A_GROUP: gl.constexpr):
    """Begin a unit: of the slot's bytes, all that no kernel of a step writes."""
    codes_desc, x_desc, meta_desc = descs
    codes_ring, x_ring, meta_ring = rings
    full, free = bars
    N, padded_n, num_rows, chunks, units, span = sizes
    STAGES: gl.constexpr = full.shape[0]
    BOXES: gl.constexpr = codes_ring.shape[0] // STAGES
    PIECES: gl.constexpr = x_ring.shape[0] // STAGES
    BOX_N: gl.constexpr = codes_ring.shape[1]
    bar = full.index(slot)
    mbarrier.expect(
        bar,
        BOXES * codes_desc.block_type.nbytes
        + PIECES * x_desc.block_type.nbytes
        + BOXES * meta_desc.block_type.nbytes,
    )
    output = tile * (BOXES * BOX_N)
    for box in gl.static_range(BOXES):
        at = output + box * BOX_N
        tma.async_copy_global_to_shared(
            codes_desc, [chunk * padded_n + at, 0], bar, codes_ring.index(slot * BOXES + box)
        )
        tma.async_copy_global_to_shared(
            meta_desc, [chunk // CHUNKS_A_GROUP, at], bar, meta_ring.index(slot * BOXES + box)
        )


@gluon.jit
def load_rows(descs, rings, bars, slot, chunk):
    """Load the rest of a slot: the rows, some of them or some of their inputs a box."""
    codes_desc, x_desc, meta_desc = descs
    codes_ring, x_ring, meta_ring = rings
    full, free = bars
    PIECES: gl.constexpr = x_ring.shape[0] // full.shape[0]
    BOX_ROWS: gl.constexpr = x_ring.shape[1]
    BOX_INPUTS: gl.constexpr = x_ring.shape[2]
    CHUNK: gl.constexpr = codes_ring.shape[2] * 4
    ACROSS: gl.constexpr = CHUNK // BOX_INPUTS
    bar = full.index(slot)
    for piece in gl.static_range(PIECES):
        row = piece // ACROSS * BOX_ROWS
        column = chunk * CHUNK + piece % ACROSS * BOX_INPUTS
        tma.async_copy_global_to_shared(
            x_desc, [row, column], bar, x_ring.index(slot * PIECES + piece)
        )


@gluon.jit
def produce(
    descs,
    rings,
    bars,
    low,
    high,
    sizes,
    CHUNKS_A_GROUP: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Keep the rings full, a unit a slot.

    A dependent launch asks for as many weights as the ring holds, then waits for the kernel before,
    whose results the rows are. The sides touch nothing that kernels write before rows have come.
    """
    full, free = bars
    N, padded_n, num_rows, chunks, units, span = sizes
    STAGES: gl.constexpr = full.shape[0]
    slot = 0
    phase = 1  # a new barrier's last phase counts as done: the first round finds every slot free
    if DEPENDENT:
        begun = gl.minimum(high, low + STAGES)
        for unit in range(low, begun):
            tile = unit // chunks
            at = unit - low
            load_weights(descs, rings, bars, at, tile, unit - tile * chunks, sizes, CHUNKS_A_GROUP)
        turn("griddepcontrol.wait; // $0")
        for unit in range(low, begun):
            at = unit - low
            load_rows(descs, rings, bars, at, unit % chunks)
        low = begun
        phase = 0
    tile = low // chunks
    chunk = low - tile * chunks
    for _ in range(low, high):
        mbarrier.wait(free.index(slot), phase)
        load_weights(descs, rings, bars, slot, tile, chunk, sizes, CHUNKS_A_GROUP)
        load_rows(descs, rings, bars, slot, chunk)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        chunk += 1
        if chunk == chunks:
            chunk = 0
            tile += 1


@gluon.jit
def new_tile_ring(descs, STAGES: gl.constexpr, BOXES: gl.constexpr, STEPS: gl.constexpr):
    """Return a ring of weights as they lie, of rows and perhaps of their scales, and its barriers.

    A unit has `STEPS` boxes of rows, and of weights so many with `BOXES` each.
    """
    w_ring = _boxes_of(descs[0], STAGES * STEPS * BOXES)
    x_ring = _boxes_of(descs[1], STAGES * STEPS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()  # the copies' side is to see what barriers begin with
    rings = (w_ring, x_ring, _boxes_of(descs[2], STAGES)) if len(descs) == 3 else (w_ring, x_ring)
    return rings, (full, free)


@gluon.jit
def _boxes_of(desc, COUNT: gl.constexpr):
    box: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [COUNT, box[0], box[1]], desc.layout)


@gluon.jit
def _load_tile(descs, rings, bars, slot, tile, chunk, N, TILE: gl.constexpr):
    """Begin a unit: of the slot's bytes, all that no kernel of a step writes."""
    w_desc = descs[0]
    w_ring = rings[0]
    full = bars[0]
    STEPS: gl.constexpr = rings[1].shape[0] // full.shape[0]
    BOXES: gl.constexpr = w_ring.shape[0] // rings[1].shape[0]
    BOX: gl.constexpr = w_ring.shape[1]
    INPUTS: gl.constexpr = w_ring.shape[2]
    bar = full.index(slot)
    bytes_: gl.constexpr = BOXES * w_desc.block_type.nbytes + descs[1].block_type.nbytes
    scales_bytes: gl.constexpr = descs[2].block_type.nbytes if len(descs) == 3 else 0
    mbarrier.expect(bar, STEPS * bytes_ + scales_bytes)
    for step in gl.static_range(STEPS):
        column = (chunk * STEPS + step) * INPUTS
        for box in gl.static_range(BOXES):
            output = tile * TILE + box * BOX
            if box * BOX >= TILE:
                output = N  # none: such a box is zeros, and moves no bytes
            place = (slot * STEPS + step) * BOXES + box
            tma.async_copy_global_to_shared(w_desc, [output, column], bar, w_ring.index(place))


@gluon.jit
def _load_rows_of(descs, rings, bars, slot, chunk):
    """Load the rest of a slot: the rows, and perhaps their scales."""
    bar = bars[0].index(slot)
    STEPS: gl.constexpr = rings[1].shape[0] // bars[0].shape[0]
    INPUTS: gl.constexpr = rings[1].shape[2]
    for step in gl.static_range(STEPS):
        column = (chunk * STEPS + step) * INPUTS
        x = rings[1].index(slot * STEPS + step)
        tma.async_copy_global_to_shared(descs[1], [0, column], bar, x)
    if len(descs) == 3:
        tma.async_copy_global_to_shared(descs[2], [chunk, 0], bar, rings[2].index(slot))


@gluon.jit
def produce_tiles(
    descs, rings, bars, low, high, chunks, N, TILE: gl.constexpr, DEPENDENT: gl.constexpr
):
    """Keep a ring of `new_tile_ring` full, a unit a slot; see `produce`."""
    full, free = bars
    STAGES: gl.constexpr = full.shape[0]
    slot = 0
    phase = 1  # a new barrier's last phase counts as done: the first round finds every slot free
    if DEPENDENT:
        begun = gl.minimum(high, low + STAGES)
        for unit in range(low, begun):
            tile = unit // chunks
            _load_tile(descs, rings, bars, unit - low, tile, unit - tile * chunks, N, TILE)
        turn("griddepcontrol.wait; // $0")
        for unit in range(low, begun):
            _load_rows_of(descs, rings, bars, unit - low, unit % chunks)
        low = begun
        phase = 0
    tile = low // chunks
    chunk = low - tile * chunks
    for _ in range(low, high):
        mbarrier.wait(free.index(slot), phase)
        _load_tile(descs, rings, bars, slot, tile, chunk, N, TILE)
        _load_rows_of(descs, rings, bars, slot, chunk)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        chunk += 1
        if chunk == chunks:
            chunk = 0
            tile += 1


@gluon.jit
def turn(instruction: gl.constexpr):
    """Let the next kernel start, or wait for the one before: see `dependent_launch`."""
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _parts_at(acc, part_ptr, band: gl.constexpr, piece: gl.constexpr, PIECES: gl.constexpr):
    """Return where a part's sums [BAND, PIECE] lie, in squares of 8 x 8: a warp's, side by side."""
    BAND: gl.constexpr = acc.shape[0]
    PIECE: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    outputs = gl.arange(0, BAND, layout=gl.SliceLayout(1, layout))
    rows = gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))
    at_output = outputs // 16 * (16 * PIECE) + outputs // 8 % 2 * 64 + outputs % 8 * 8
    at_row = rows // 8 * 128 + rows % 8
    first = (band * PIECES + piece) * (BAND * PIECE)
    return part_ptr + first + at_output[:, None] + at_row[None, :]


@gluon.jit
def save(acc, part_ptr, band: gl.constexpr, piece: gl.constexpr, PIECES: gl.constexpr):
    """Leave a part's sums where `gathered` finds them."""
    gl.store(_parts_at(acc, part_ptr, band, piece, PIECES), acc)


@gluon.jit
def gathered(
    acc,
    part_ptr,
    count,
    apart,
    band: gl.constexpr,
    piece: gl.constexpr,
    PIECES: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Return the sum of `count` parts, in order; `apart` floats lie between them.

    `TOGETHER`, 1, 2, 4 or 8, are loaded at a time: as many as registers hold.
    """
    at = _parts_at(acc, part_ptr, band, piece, PIECES)
    total = gl.zeros_like(acc)
    for index in range(0, count, TOGETHER):
        if TOGETHER == 8:
            p0 = _part(at, index, count, apart)
            p1 = _part(at, index + 1, count, apart)
            p2 = _part(at, index + 2, count, apart)
            p3 = _part(at, index + 3, count, apart)
            p4 = _part(at, index + 4, count, apart)
            p5 = _part(at, index + 5, count, apart)
            p6 = _part(at, index + 6, count, apart)
            p7 = _part(at, index + 7, count, apart)
            total = total + p0 + p1 + p2 + p3 + p4 + p5 + p6 + p7
        elif TOGETHER == 4:
            p0 = _part(at, index, count, apart)
            p1 = _part(at, index + 1, count, apart)
            p2 = _part(at, index + 2, count, apart)
            p3 = _part(at, index + 3, count, apart)
            total = total + p0 + p1 + p2 + p3
        elif TOGETHER == 2:
            p0 = _part(at, index, count, apart)
            p1 = _part(at, index + 1, count, apart)
            total = total + p0 + p1
        else:
            total = total + _part(at, index, count, apart)
    return total


@gluon.jit
def added(acc, part_ptr, band: gl.constexpr):
    """Return the sums and another part's, of one piece."""
    return acc + gl.load(_parts_at(acc, part_ptr, band, 0, 1), cache_modifier=".cg")


@gluon.jit
def _part(at, index, count, apart):
    return gl.load(at + index * apart, mask=index < count, other=0.0, cache_modifier=".cg")


@gluon.jit
def store(
    acc,
    pointers,
    sizes,
    output,
    band: gl.constexpr,
    piece: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    dtype: gl.constexpr,
    TILE: gl.constexpr = 0,
):
    """Write sums [BAND, PIECE] to out [T, N], 16 bytes of a row a thread.

    Of a tile that ends within its last band, `TILE` says where.
    """
    BAND: gl.constexpr = acc.shape[0]
    bias_ptr, out_ptr, part_ptr, arrivals = pointers
    N, padded_n, num_rows, chunks, units, span = sizes
    first = output + band * BAND
    if HAS_BIAS:
        outputs = first + gl.arange(0, BAND, layout=gl.SliceLayout(1, acc.type.layout))
        bias = gl.load(bias_ptr + outputs, mask=outputs < N, other=0.0)
        acc += bias.to(gl.float32)[:, None]
    order: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    values = gl.convert_layout(acc.to(dtype), order)
    outputs = first + gl.arange(0, BAND, layout=gl.SliceLayout(1, order))
    rows = piece * acc.shape[1] + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, order))
    is_place = (outputs < N)[:, None] & (rows < num_rows)[None, :]
    if TILE != 0:
        within = band * BAND + gl.arange(0, BAND, layout=gl.SliceLayout(1, order))
        is_place = is_place & (within < TILE)[:, None]
    gl.store(out_ptr + rows[None, :] * N + outputs[:, None], values, mask=is_place)


@gluon.jit
def of_outputs(pointer, values, N, first):
    """Return the value of each output, float32, in place of those given, a band each."""
    BAND: gl.constexpr = values[0].shape[0]
    for band in gl.static_range(len(values)):
        outputs = first + band * BAND + gl.arange(0, BAND, layout=values[0].type.layout)
        value = gl.load(pointer + outputs, mask=outputs < N, other=0.0)
        values = put(values, band, value.to(gl.float32))
    return values


@gluon.jit
def sharers(sizes, tile):
    """Return the first program of a tile, and how many others it has."""
    N, padded_n, num_rows, chunks, units, span = sizes
    first = (tile * chunks) // span
    last = (gl.minimum((tile + 1) * chunks, units) - 1) // span
    return first, last - first


@gluon.jit
def arrived_last(arrival, others):
    """Tell whether all other programs of a tile have stored their parts; the last resets."""
    gl.thread_barrier()  # all of this side's stores, before its arrival
    is_last = gl.atomic_add(arrival, 1, sem="acq_rel") == others
    if is_last:
        gl.store(arrival, 0)  # for the next launch
    return is_last


@gluon.jit
def put(accs, band: gl.constexpr, acc):
    """Return the sums with a band's replaced."""
    return accs[:band] + (acc,) + accs[band + 1 :]  # noqa: RUF005 - Gluon knows no stars


@gluon.jit
def met(accs, part_ptr, arrivals, mine, others, PART: gl.constexpr):
    """Add up a tile's parts, pair by pair; return the sums, and whether they are the whole tile's.

    The programs of a tile, 0 to `others`, are the leaves of a tree. Of the two sides of a pair, the
    one that comes first leaves its sums and ends; the other adds them to its own and goes up. So
    the sums' order is the tree's, whoever comes last, and nobody reads more than a part a level.
    """
    BANDS: gl.constexpr = len(accs)
    is_alive = True
    step = 1
    while is_alive & (step <= others):
        left = mine - mine % (2 * step)
        right = left + step
        if right <= others:  # else there is nobody to meet
            # Counted where the right side begins: no other pair begins one there.
            begin = gl.where(mine < right, left, right)
            is_second = gl.atomic_add(arrivals + right, 0, sem="acquire") == 1
            if not is_second:
                for band in gl.static_range(BANDS):
                    save(accs[band], part_ptr + begin * PART, band, 0, 1)
                gl.thread_barrier()  # all stores, before the arrival
                is_second = gl.atomic_add(arrivals + right, 1, sem="acq_rel") == 1
            if is_second:
                gl.store(arrivals + right, 0)  # for the next launch
                other = part_ptr + (left + right - begin) * PART
                for band in gl.static_range(BANDS):
                    acc = added(accs[band], other, band)
                    accs = put(accs, band, acc)
            is_alive = is_second
        step *= 2
    return accs, is_alive


@gluon.jit
def slices_met(accs, meeting, slice_: gl.constexpr, SLICES: gl.constexpr):
    """Leave a slice's sums in shared memory; return the first's with all others' added."""
    BANDS: gl.constexpr = len(accs)
    if SLICES > 1:
        sums_ring, done = meeting
        if slice_ > 0:
            for band in gl.static_range(BANDS):
                sums_ring.index((slice_ - 1) * BANDS + band).store(accs[band])
            gl.thread_barrier()
            mbarrier.arrive(done.index(0), count=1)
        else:
            mbarrier.wait(done.index(0), 0)
            for other in gl.static_range(SLICES - 1):
                for band in gl.static_range(BANDS):
                    part = sums_ring.index(other * BANDS + band).load(accs[band].type.layout)
                    accs = put(accs, band, accs[band] + part)
    return accs


@gluon.jit
def added_up(accs, pointers, sizes, tile, IN_PAIRS: gl.constexpr):
    """Add up the parts of a tile; return the sums, and whether they are the whole tile's."""
    bias_ptr, out_ptr, part_ptr, arrivals = pointers
    BANDS: gl.constexpr = len(accs)
    ROWS: gl.constexpr = accs[0].shape[1]
    PART: gl.constexpr = BANDS * accs[0].shape[0] * ROWS
    TOGETHER: gl.constexpr = 128 // ROWS
    first, others = sharers(sizes, tile)
    # Of the tiles with several programs each begins in another one, where its parts are counted;
    # so there are no more of them before than tiles, or programs.
    parts = part_ptr + (first + gl.minimum(tile, first)) * PART
    mine = gl.program_id(0) - first
    if IN_PAIRS:
        accs, is_last = met(accs, parts, arrivals + first, mine, others, PART)
    else:
        is_last = others == 0
        if others > 0:
            for band in gl.static_range(BANDS):
                save(accs[band], parts + mine * PART, band, 0, 1)
            is_last = arrived_last(arrivals + first, others)
            if is_last:
                for band in gl.static_range(BANDS):
                    total = gathered(accs[band], parts, others + 1, PART, band, 0, 1, TOGETHER)
                    accs = put(accs, band, total)
    return accs, is_last


SHARED_BYTES = 227 * 1024
"""Of a Hopper multiprocessor's programs together."""
OTHER_SHARED_BYTES = 9 * 1024
"""Of a program beside the ring: for the order of stores, barriers, and what the runtime takes."""
MOST_STAGES = 8


def stages(unit_bytes: int, programs: int) -> int:
    """Return how many units the ring holds, of so many programs a multiprocessor."""
    return min(MOST_STAGES, (SHARED_BYTES // programs - OTHER_SHARED_BYTES) // unit_bytes)


def unit_bytes(tile: int, rows: int, chunk: int) -> int:
    """Return the bytes of a chunk of inputs: codes and scales of a tile's outputs, and rows."""
    return tile * (chunk // 2 + 4) + rows * chunk * 2


@dataclass(frozen=True)
class Cut:
    """A layer laid over the multiprocessors: of the layer, the shape and the GPU alone."""

    tiles: int
    span: int
    """Units of a program's run."""
    programs: int

    @classmethod
    def of(
        cls, tiles: int, chunks: int, most_programs: int, least_span: int, multiple: int = 1
    ) -> Cut:
        """Return runs of at least `least_span` units where a tile has as many, of a multiple."""
        units = tiles * chunks
        span = max(-(-units // most_programs), min(least_span, chunks))
        span += -span % multiple
        return cls(tiles, span, -(-units // span))


META_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)
"""Scales and zero points in shared memory: one row, as it is."""


def shared_layout(columns: int) -> gl.NVMMASharedLayout:
    """Return the order of 16-bit rows in shared memory, swizzled over up to 128 bytes."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16, 2)


class RunsShape(Protocol):
    """A candidate that cuts a layer into runs whose parts meet."""

    def parts(self, outputs: int, chunks: int, rows: int, multiprocessors: int, /) -> int:
        """Return the floats of parts."""
        ...

    def cut(self, outputs: int, chunks: int, multiprocessors: int, /) -> Cut:
        """Return how the layer lies over the GPU."""
        ...


def most_reserved(
    candidates: Mapping[int, Sequence[RunsShape]], outputs: int, chunks: int, count: int
) -> tuple[int, int]:
    """Return the floats of parts and the arrivals that any candidate needs for a layer.

    Args:
        candidates: By the rows of the tile.
        outputs: Of the layer.
        chunks: Of its inputs.
        count: Multiprocessors.
    """
    shapes = [(rows, shape) for rows, several in candidates.items() for shape in several]
    return (
        max(shape.parts(outputs, chunks, rows, count) for rows, shape in shapes),
        max(shape.cut(outputs, chunks, count).programs for _, shape in shapes),
    )


def descriptors(
    x_TI: Tensor, weight: PackedInt4, box_outputs: int, box_rows: int, box_inputs: int
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Return those of codes, rows and scales, for boxes of so many."""
    rows, inputs = x_TI.shape
    chunks, padded, quarter = weight.codes.shape
    codes = TensorDescriptor(
        weight.codes,
        [chunks * padded, quarter],
        [quarter, 1],
        [box_outputs, quarter],
        shared_layout(quarter),
    )
    x = TensorDescriptor(
        x_TI, [rows, inputs], [inputs, 1], [box_rows, box_inputs], shared_layout(box_inputs)
    )
    groups = weight.meta.shape[0]
    meta = TensorDescriptor(
        weight.meta, [groups, padded], [padded, 1], [1, box_outputs], META_LAYOUT
    )
    return codes, x, meta


def run_arguments(
    x_TI: Tensor,
    weight: PackedInt4,
    bias_O: Tensor | None,
    scratch: SplitScratch,
    cut: Cut,
    out_TO: Tensor,
) -> tuple[Tensor | int, ...]:
    """Return what a kernel whose programs take runs is given after its descriptors."""
    chunks, padded, _ = weight.codes.shape
    return (
        x_TI if bias_O is None else bias_O,
        out_TO,
        scratch.parts,
        scratch.arrivals,
        x_TI.shape[0],
        weight.outputs,
        padded,
        chunks,
        cut.tiles * chunks,
        cut.span,
    )
