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
from functools import cache
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tailrace.kernels.dependent_launch import launch_options
from tailrace.kernels.linear.triton_int4 import UNPACK_BFLOAT16, UNPACK_FLOAT16

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
def _weights(codes, meta, dtype: gl.constexpr, layout: gl.constexpr):
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
def _meta(meta_ring, slot, first, sums: gl.constexpr):
    """Return the scales and zero points of a half's outputs: int32 [HALF]."""
    return meta_ring.index(slot).slice(first, HALF).load(gl.SliceLayout(1, sums))


@gluon.jit
def _flat(ring):
    """Return int32 [STAGES, BLOCK_N] of a ring of rows, [STAGES, 1, BLOCK_N]."""
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape: gl.constexpr = [ring.shape[0], ring.shape[2]]
    return ring._reinterpret(gl.int32, shape, order)  # noqa: SLF001 - there is no other way


@gluon.jit
def _scale(meta):
    return (meta & -16).to(gl.float32, bitcast=True)[:, None]


@gluon.jit
def _load_weights(descs, rings, bar, slot, tile, chunk, sizes, CHUNKS_A_GROUP: gl.constexpr):
    """Begin a unit: of the slot's bytes, all that no kernel of a step writes."""
    codes_desc, x_desc, meta_desc = descs
    codes_ring, x_ring, meta_ring = rings
    N, padded_n, num_rows, chunks, units, span = sizes
    PIECES: gl.constexpr = x_ring.shape[0] // codes_ring.shape[0]
    BLOCK_N: gl.constexpr = codes_ring.shape[1]
    mbarrier.expect(
        bar,
        codes_desc.block_type.nbytes
        + PIECES * x_desc.block_type.nbytes
        + meta_desc.block_type.nbytes,
    )
    at = chunk * padded_n + tile * BLOCK_N
    tma.async_copy_global_to_shared(codes_desc, [at, 0], bar, codes_ring.index(slot))
    tma.async_copy_global_to_shared(
        meta_desc, [chunk // CHUNKS_A_GROUP, tile * BLOCK_N], bar, meta_ring.index(slot)
    )


@gluon.jit
def _load_rows(descs, rings, bar, slot, chunk):
    codes_desc, x_desc, meta_desc = descs
    codes_ring, x_ring, meta_ring = rings
    PIECES: gl.constexpr = x_ring.shape[0] // codes_ring.shape[0]
    PIECE: gl.constexpr = x_ring.shape[1]
    CHUNK: gl.constexpr = x_ring.shape[2]
    for piece in gl.static_range(PIECES):
        tma.async_copy_global_to_shared(
            x_desc, [piece * PIECE, chunk * CHUNK], bar, x_ring.index(slot * PIECES + piece)
        )


@gluon.jit
def _produce(
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
    STAGES: gl.constexpr = rings[0].shape[0]
    slot = 0
    phase = 1  # a new barrier's last phase counts as done: the first round finds every slot free
    if DEPENDENT:
        begun = gl.minimum(high, low + STAGES)
        for unit in range(low, begun):
            tile = unit // chunks
            at = unit - low
            _load_weights(
                descs, rings, full.index(at), at, tile, unit - tile * chunks, sizes, CHUNKS_A_GROUP
            )
        _turn("griddepcontrol.wait; // $0")
        for unit in range(low, begun):
            at = unit - low
            _load_rows(descs, rings, full.index(at), at, unit % chunks)
        low = begun
        phase = 0
    tile = low // chunks
    chunk = low - tile * chunks
    for _ in range(low, high):
        bar = full.index(slot)
        mbarrier.wait(free.index(slot), phase)
        _load_weights(descs, rings, bar, slot, tile, chunk, sizes, CHUNKS_A_GROUP)
        _load_rows(descs, rings, bar, slot, chunk)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        chunk += 1
        if chunk == chunks:
            chunk = 0
            tile += 1


@gluon.jit
def _turn(instruction: gl.constexpr):
    """Let the next kernel start, or wait for the one before: see `dependent_launch`."""
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _parts_at(acc, part_ptr, half: gl.constexpr, piece: gl.constexpr, PIECES: gl.constexpr):
    """Return where a part's sums [HALF, PIECE] lie, of [SIDE, PIECES * PIECE]."""
    ROWS: gl.constexpr = PIECES * acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    inner = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    rows = piece * acc.shape[1] + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    return part_ptr + inner[:, None] * ROWS + rows[None, :]


@gluon.jit
def _save(acc, part_ptr, half: gl.constexpr, piece: gl.constexpr, PIECES: gl.constexpr):
    gl.store(_parts_at(acc, part_ptr, half, piece, PIECES), acc)


@gluon.jit
def _gathered(
    acc, part_ptr, count, apart, half: gl.constexpr, piece: gl.constexpr, PIECES: gl.constexpr
):
    """Return the sum of `count` parts, in order; `apart` floats lie between them."""
    # As many are loaded at a time as registers hold.
    TOGETHER: gl.constexpr = 128 // (PIECES * acc.shape[1])
    at = _parts_at(acc, part_ptr, half, piece, PIECES)
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
def _part(at, index, count, apart):
    return gl.load(at + index * apart, mask=index < count, other=0.0, cache_modifier=".cg")


@gluon.jit
def _store(
    acc,
    pointers,
    sizes,
    output,
    half: gl.constexpr,
    piece: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    dtype: gl.constexpr,
):
    """Write sums [HALF, PIECE] to out [T, N], 16 bytes of a row a thread."""
    bias_ptr, out_ptr, part_ptr, arrivals = pointers
    N, padded_n, num_rows, chunks, units, span = sizes
    first = output + half * HALF
    if HAS_BIAS:
        outputs = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, acc.type.layout))
        bias = gl.load(bias_ptr + outputs, mask=outputs < N, other=0.0)
        acc += bias.to(gl.float32)[:, None]
    order: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    values = gl.convert_layout(acc.to(dtype), order)
    outputs = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, order))
    rows = piece * acc.shape[1] + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, order))
    is_place = (outputs < N)[:, None] & (rows < num_rows)[None, :]
    gl.store(out_ptr + rows[None, :] * N + outputs[:, None], values, mask=is_place)


@gluon.jit
def _sharers(sizes, tile):
    """Return the first program of a tile, and how many others it has."""
    N, padded_n, num_rows, chunks, units, span = sizes
    first = (tile * chunks) // span
    last = (gl.minimum((tile + 1) * chunks, units) - 1) // span
    return first, last - first


@gluon.jit
def _arrived_last(arrival, others):
    """Tell whether all other programs of a tile have stored their parts; the last resets."""
    gl.thread_barrier()  # all of this side's stores, before its arrival
    is_last = gl.atomic_add(arrival, 1, sem="acq_rel") == others
    if is_last:
        gl.store(arrival, 0)  # for the next launch
    return is_last


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
    meta_ring = _flat(meta_rows)
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
            meta0 = _meta(meta_ring, slot, side * SIDE, sums)
            meta1 = _meta(meta_ring, slot, side * SIDE + HALF, sums)
            w0 = _weights(codes.slice(side * SIDE, HALF).load(left), meta0, dtype, left)
            part0 = warpgroup_mma(w0, x, zero, use_acc=False, is_async=True)
            if ORDER == "in turn":
                part0, w0 = warpgroup_mma_wait(0, deps=[part0, w0])
                acc0 += part0 * _scale(meta0)
            w1 = _weights(codes.slice(side * SIDE + HALF, HALF).load(left), meta1, dtype, left)
            part1 = warpgroup_mma(w1, x, zero, use_acc=False, is_async=True)
            if ORDER != "in turn":
                part0, w0 = warpgroup_mma_wait(1, deps=[part0, w0])
                acc0 += part0 * _scale(meta0)
            if UNITS == 2:
                before = slot
                before1 = meta1
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
                mbarrier.wait(full.index(slot), phase)
                x = x_ring.index(slot).permute((1, 0))
                codes = codes_ring.index(slot)
                meta0 = _meta(meta_ring, slot, side * SIDE, sums)
                meta1 = _meta(meta_ring, slot, side * SIDE + HALF, sums)
                w0 = _weights(codes.slice(side * SIDE, HALF).load(left), meta0, dtype, left)
                part0 = warpgroup_mma(w0, x, zero, use_acc=False, is_async=True)
                part1, w1 = warpgroup_mma_wait(1, deps=[part1, w1])
                gl.thread_barrier()
                mbarrier.arrive(free.index(before), count=1)
                acc1 += part1 * _scale(before1)
                w1 = _weights(codes.slice(side * SIDE + HALF, HALF).load(left), meta1, dtype, left)
                part1 = warpgroup_mma(w1, x, zero, use_acc=False, is_async=True)
                part0, w0 = warpgroup_mma_wait(1, deps=[part0, w0])
                acc0 += part0 * _scale(meta0)
            part1, w1 = warpgroup_mma_wait(0, deps=[part1, w1])
            gl.thread_barrier()  # all four warps are done with the slot
            mbarrier.arrive(free.index(slot), count=1)
            acc1 += part1 * _scale(meta1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        first, others = _sharers(sizes, tile)
        is_last = others == 0
        if others > 0:
            parts = part_ptr + ((tile + first) * SIDES + side) * (SIDE * ROWS)
            mine = parts + (gl.program_id(0) - first) * (SIDES * SIDE * ROWS)
            _save(acc0, mine, 0, 0, 1)
            _save(acc1, mine, 1, 0, 1)
            is_last = _arrived_last(arrivals + tile * SIDES + side, others)
            if is_last:
                acc0 = _gathered(acc0, parts, others + 1, SIDES * SIDE * ROWS, 0, 0, 1)
                acc1 = _gathered(acc1, parts, others + 1, SIDES * SIDE * ROWS, 1, 0, 1)
        if is_last:
            _store(acc0, pointers, sizes, output, 0, 0, HAS_BIAS, dtype)
            _store(acc1, pointers, sizes, output, 1, 0, HAS_BIAS, dtype)


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
    meta_ring = _flat(meta_rows)
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
            meta0 = _meta(meta_ring, slot, side * SIDE, sums)
            meta1 = _meta(meta_ring, slot, side * SIDE + HALF, sums)
            w = _weights(codes.slice(side * SIDE, HALF).load(left), meta0, dtype, left)
            part = warpgroup_mma(w, x0, zero, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            acc00 += part * _scale(meta0)
            part = warpgroup_mma(w, x1, zero, use_acc=False, is_async=True)
            part, w = warpgroup_mma_wait(0, deps=[part, w])
            acc01 += part * _scale(meta0)
            w = _weights(codes.slice(side * SIDE + HALF, HALF).load(left), meta1, dtype, left)
            part = warpgroup_mma(w, x0, zero, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            acc10 += part * _scale(meta1)
            part = warpgroup_mma(w, x1, zero, use_acc=False, is_async=True)
            part, w = warpgroup_mma_wait(0, deps=[part, w])
            gl.thread_barrier()  # all four warps are done with the slot
            mbarrier.arrive(free.index(slot), count=1)
            acc11 += part * _scale(meta1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        first, others = _sharers(sizes, tile)
        is_last = others == 0
        if others > 0:
            parts = part_ptr + ((tile + first) * SIDES + side) * PART
            mine = parts + (gl.program_id(0) - first) * (SIDES * PART)
            _save(acc00, mine, 0, 0, 2)
            _save(acc01, mine, 0, 1, 2)
            _save(acc10, mine, 1, 0, 2)
            _save(acc11, mine, 1, 1, 2)
            is_last = _arrived_last(arrivals + tile * SIDES + side, others)
            if is_last:
                acc00 = _gathered(acc00, parts, others + 1, SIDES * PART, 0, 0, 2)
                acc01 = _gathered(acc01, parts, others + 1, SIDES * PART, 0, 1, 2)
                acc10 = _gathered(acc10, parts, others + 1, SIDES * PART, 1, 0, 2)
                acc11 = _gathered(acc11, parts, others + 1, SIDES * PART, 1, 1, 2)
        if is_last:
            _store(acc00, pointers, sizes, output, 0, 0, HAS_BIAS, dtype)
            _store(acc01, pointers, sizes, output, 0, 1, HAS_BIAS, dtype)
            _store(acc10, pointers, sizes, output, 1, 0, HAS_BIAS, dtype)
            _store(acc11, pointers, sizes, output, 1, 1, HAS_BIAS, dtype)


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
        _turn("griddepcontrol.launch_dependents; // $0")
    BLOCK_N: gl.constexpr = codes_desc.block_type.shape[0]
    QUARTER: gl.constexpr = codes_desc.block_type.shape[1]
    PIECE: gl.constexpr = x_desc.block_type.shape[0]
    SIDES: gl.constexpr = BLOCK_N // SIDE
    codes_ring = gl.allocate_shared_memory(
        codes_desc.dtype, [STAGES, BLOCK_N, QUARTER], codes_desc.layout
    )
    x_ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * PIECES, PIECE, QUARTER * 4], x_desc.layout
    )
    meta_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 1, BLOCK_N], meta_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=SIDES)
    low = gl.program_id(0) * span
    high = gl.minimum(low + span, units)
    rings = (codes_ring, x_ring, meta_ring)
    bars = (full, free)
    pointers = (bias_ptr, out_ptr, part_ptr, arrivals)
    sizes = (N, padded_n, num_rows, chunks, units, span)
    descs = (codes_desc, x_desc, meta_desc)
    producer = (descs, rings, bars, low, high, sizes, CHUNKS_A_GROUP, DEPENDENT)
    common = (rings, bars, pointers, sizes, low, high)
    if SIDES == 2:
        gl.warp_specialize(
            [
                (_consume, (common, 0, SIDES, HAS_BIAS, ORDER)),
                (_consume, (common, 1, SIDES, HAS_BIAS, ORDER)),
                (_produce, producer),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [(_consume, (common, 0, SIDES, HAS_BIAS, ORDER)), (_produce, producer)],
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
        unit = self.sides * _SIDE * (chunk // 2 + 4) + rows * chunk * 2
        return min(_MOST_STAGES, (_SHARED_BYTES // self.programs - _OTHER_SHARED_BYTES) // unit)

    def cut(self, outputs: int, chunks: int, multiprocessors: int) -> tuple[int, int, int]:
        """Return tiles, units a program and programs: of the layer and the GPU alone."""
        tiles = -(-outputs // (self.sides * _SIDE))
        units = tiles * chunks
        span = max(-(-units // (multiprocessors * self.programs)), min(self.least_span, chunks))
        if self.order == "two units":  # of the same tile: so chunks are even, and spans are
            span += span % 2
        return tiles, span, -(-units // span)

    def parts(self, outputs: int, chunks: int, rows: int, multiprocessors: int) -> int:
        """Return the floats that parts of sums take, for tiles of so many rows."""
        tiles, _, programs = self.cut(outputs, chunks, multiprocessors)
        return (tiles + programs) * self.sides * _SIDE * rows


_SHARED_BYTES = 227 * 1024
"""Of a Hopper multiprocessor's programs together."""
_OTHER_SHARED_BYTES = 9 * 1024
"""Of a program beside the ring: for the order of stores, barriers, and what the runtime takes."""
_MOST_STAGES = 8
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


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def reserved_parts(outputs: int, chunks: int, device: torch.device) -> int:
    """Return the floats of parts that any candidate needs for a layer."""
    return max(
        shape.parts(outputs, chunks, rows, _multiprocessors(device))
        for rows, shapes in CANDIDATES.items()
        for shape in shapes
    )


META_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)
"""Scales and zero points in shared memory: one row, as it is."""


def shared_layout(columns: int) -> gl.NVMMASharedLayout:
    """Return the order of 16-bit rows in shared memory, swizzled over up to 128 bytes."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16, 2)


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
    rows, inputs = x_TI.shape
    chunks, padded, quarter = weight.codes.shape
    block_m, usual = shape_for(rows, weight.outputs)
    shape = shape or usual
    pieces = 2 if block_m > 64 else 1
    registers, side_registers = shape.registers
    block_n = shape.sides * _SIDE
    tiles, span, programs = shape.cut(weight.outputs, chunks, _multiprocessors(x_TI.device))
    if out_TO is None:
        out_TO = torch.empty(rows, weight.outputs, dtype=x_TI.dtype, device=x_TI.device)
    codes = TensorDescriptor(
        weight.codes,
        [chunks * padded, quarter],
        [quarter, 1],
        [block_n, quarter],
        shared_layout(quarter),
    )
    x = TensorDescriptor(
        x_TI,
        [rows, inputs],
        [inputs, 1],
        [block_m // pieces, weight.chunk],
        shared_layout(weight.chunk),
    )
    groups = weight.meta.shape[0]
    meta = TensorDescriptor(weight.meta, [groups, padded], [padded, 1], [1, block_n], META_LAYOUT)
    int4_hopper_kernel[(programs,)](
        codes,
        x,
        meta,
        x_TI if bias_O is None else bias_O,
        out_TO,
        scratch.parts,
        scratch.arrivals,
        rows,
        weight.outputs,
        padded,
        chunks,
        tiles * chunks,
        span,
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
