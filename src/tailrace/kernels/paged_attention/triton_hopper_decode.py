"""Decode over the paged cache for Hopper: bytes flow, and what waits for them is short.

`triton_decode` says what is computed, how rows are split and how parts are merged; splits are the
same here. Its programs load a tile and compute on it in turn, and what they compute is mostly
addresses. Here the hardware copies (TMA), a unit of 8 tokens and all dimensions at a time:

    producer    1 warp: asks for all keys of a split, tile after tile, then for all its values, into
                one ring, as many tiles ahead as it holds
    consumer    4 warps: [scores of each tile] [one softmax over the split] [values of each tile]

A split's scores stay in registers, four a thread and tile, so their maximum is known before the
first weight: no sum is ever rescaled, warps meet twice a split and not nine times a tile, and
values come while keys are still multiplied.

Products are swapped, for they take 64 rows and a group has some 8 heads: scores are [keys, heads] =
keys x queries', sums [dimensions, heads] = values' x weights'. Keys and values are read where the
copies put them, by a layout that says so (`ring_layout`); weights go through shared memory.

Beyond a sequence's last unit the producer asks for unit -1, which TMA fills with zeros. The rest of
the last unit may hold NaN, and 0 x NaN is NaN: there the consumer writes zeros before it multiplies
values.

A float8 cache comes in boxes of half the bytes, which the consumer widens in registers, 64 keys a
product (`triton_hopper_float8_kv`).
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import launch_options
from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.linear.triton_hopper_ring import arrived_last, turn
from tailrace.kernels.paged_attention import triton_hopper_prefill
from tailrace.kernels.paged_attention.triton_float8 import RAISED
from tailrace.kernels.paged_attention.triton_hopper_float8_kv import (
    PART,
    in_dims,
    queries_in_float16,
    scored_float8,
    summed_float8,
)
from tailrace.kernels.paged_attention.triton_prefill import LOG2_E

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.paged_attention.triton_decode import DecodeScratch

_ATOM, _COLUMNS = 8, 64
ATOM = gl.constexpr(_ATOM)
"""Tokens of a box: the rows of one atom of the swizzle, and of the least unit."""
COLUMNS = gl.constexpr(_COLUMNS)
"""Dimensions of an atom: 128 bytes, the swizzle's width."""
TOGETHER = gl.constexpr(4)
"""Parts that a merging program loads at a time."""


@gluon.constexpr_function
def ring_layout(tile: int, head_dim: int) -> gl.SharedLinearLayout:
    """Return the order of a tile [tile, head_dim] of 16 bits that boxes of 8 tokens make.

    A box is atoms of 8 tokens and 64 dimensions, swizzled over 128 bytes, one for each 64
    dimensions; boxes lie one after the other.
    """
    dims = [[0, 1 << bit] for bit in range(6)]
    # Pieces of 16 bytes, 8 dimensions, change places by their token's number in the atom.
    tokens = [[1 << bit, 8 << bit] for bit in range(3)]
    halves = [[0, 1 << bit] for bit in range(6, head_dim.bit_length() - 1)]
    atoms = [[1 << bit, 0] for bit in range(3, tile.bit_length() - 1)]
    return gl.SharedLinearLayout([*dims, *tokens, *halves, *atoms], [], 1024)


@gluon.jit
def _units(table, start, kv_len, BOXES: gl.constexpr, UNIT: gl.constexpr):
    """Return the units that hold a tile's boxes, -1 beyond the sequence's end."""
    # A tile begins with a unit or lies within one, so that all boxes' places follow from its own.
    at = table + start // UNIT
    units = (gl.load(at, mask=start < kv_len, other=-1),)
    for box in gl.static_range(1, BOXES):
        token = start + box * ATOM
        unit = gl.load(at + box * ATOM // UNIT, mask=token < kv_len, other=-1)
        units = units + (unit,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuple
    return units


@gluon.jit
def _ask(desc, into, bar, units, start, kv_head, UNIT: gl.constexpr):
    """Begin to copy a tile of keys or values into a slot, a box after the other."""
    for box in gl.static_range(len(units)):
        inner = start % UNIT + box * ATOM % UNIT
        at = [units[box], kv_head, 0, inner, 0]
        tma.async_copy_global_to_shared(desc, at, bar, into.slice(box, 1))


@gluon.jit
def _start(low, step, tiles, TILE: gl.constexpr):
    """Return where the tile of a split's step begins: all its keys, then all its values."""
    return low + gl.where(step < tiles, step, step - tiles) * TILE


@gluon.jit
def _produce(
    common,
    descs,
    place,
    head,
    SPLIT: gl.constexpr,
    UNIT: gl.constexpr,
    IN_TURN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Copy the queries and keep the ring full: a split's keys, then its values.

    A dependent launch asks for keys of earlier steps before it waits for the kernel ahead.
    """
    q_smem, boxes, _, bars = common
    q_bar, full, free = bars
    q_desc, k_desc, v_desc = descs
    table, kv_head, first, kv_len = place
    STAGES: gl.constexpr = full.shape[0]
    BOXES: gl.constexpr = boxes.shape[1]
    TILE: gl.constexpr = BOXES * ATOM
    # Nobody writes a table in a step: the first units are known when the kernel before has ended.
    low = first * SPLIT
    units = _units(table, low, kv_len, BOXES, UNIT)
    tiles = gl.cdiv(gl.minimum(kv_len - low, SPLIT), TILE)
    begun = 0
    if DEPENDENT:
        # Nor any of its keys but a sequence's last: tiles before that one are asked for at once.
        begun = gl.minimum(gl.minimum(kv_len - 1 - low, SPLIT) // TILE, STAGES)
        for tile in range(begun):
            bar = full.index(tile)
            mbarrier.expect(bar, BOXES * k_desc.block_type.nbytes)
            _ask(k_desc, boxes.index(tile), bar, units, low + tile * TILE, kv_head, UNIT)
            units = _units(table, _start(low, tile + 1, tiles, TILE), kv_len, BOXES, UNIT)
        turn("griddepcontrol.wait; // $0")
    mbarrier.expect(q_bar, q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [head, 0], q_bar, q_smem)
    slot = begun % STAGES
    # A new barrier's last phase counts as done: the first round finds every slot free.
    phase = 1 - begun // STAGES
    end = gl.cdiv(kv_len, SPLIT) if IN_TURN else first + 1
    for split in range(first, end, gl.num_programs(2)):
        low = split * SPLIT
        tiles = gl.cdiv(gl.minimum(kv_len - low, SPLIT), TILE)
        # `begun = 0` at the loop's end would do in Python; Triton's loops do not carry literals.
        for step in range(gl.where(split == first, begun, 0), 2 * tiles):
            start = _start(low, step, tiles, TILE)
            bar = full.index(slot)
            into = boxes.index(slot)
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(bar, BOXES * k_desc.block_type.nbytes)
            if step < tiles:
                _ask(k_desc, into, bar, units, start, kv_head, UNIT)
            else:
                _ask(v_desc, into, bar, units, start, kv_head, UNIT)
            following = _start(low, step + 1, tiles, TILE)
            if IN_TURN:
                is_last = step + 1 == 2 * tiles
                following = gl.where(is_last, low + gl.num_programs(2) * SPLIT, following)
            units = _units(table, following, kv_len, BOXES, UNIT)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _clear(boxes, box, kept):
    """Write zeros to a box's tokens from `kept` on."""
    HALVES: gl.constexpr = boxes.shape[3]
    COUNT: gl.constexpr = boxes.shape[0] * boxes.shape[1] * HALVES
    # Whole rows of 128 bytes are cleared: how they are swizzled within is all one.
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    atoms = boxes._reinterpret(boxes.dtype, [COUNT, ATOM, COLUMNS], plain)  # noqa: SLF001
    order: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    is_kept = (gl.arange(0, ATOM, layout=gl.SliceLayout(1, order)) < kept)[:, None]
    for half in gl.static_range(HALVES):
        at = atoms.index(box * HALVES + half)
        values = at.load(order)
        at.store(gl.where(is_kept, values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _hide(scores, start, kv_len):
    """Return scores with -inf where there is no key."""
    layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    keys = start + gl.arange(0, scores.shape[0], layout=layout)
    return gl.where((keys < kv_len)[:, None], scores, float("-inf"))


@gluon.jit
def _scored(common, ring, low, kv_len, tiles, slot, phase, sums: gl.constexpr):
    """Return the scores of a split's tiles, the last ones last, and where the ring stands then."""
    q_smem, boxes, weights, bars = common
    q_bar, full, free = bars
    STAGES: gl.constexpr = full.shape[0]
    TILES: gl.constexpr = weights.shape[0]
    PADDED: gl.constexpr = weights.shape[1]
    TILE: gl.constexpr = weights.shape[2]
    zero = gl.zeros([TILE, PADDED], gl.float32, layout=sums)
    scores = (gl.full([TILE, PADDED], float("-inf"), gl.float32, layout=sums),) * TILES
    mbarrier.wait(q_bar, 0)
    for tile in range(tiles):
        mbarrier.wait(full.index(slot), phase)
        queries = q_smem.permute((1, 0))
        found = warpgroup_mma(ring.index(slot), queries, zero, use_acc=False, is_async=True)
        found = warpgroup_mma_wait(0, deps=[found])
        gl.thread_barrier()  # all four warps are done with the keys
        mbarrier.arrive(free.index(slot), count=1)
        found = _hide(found, low + tile * TILE, kv_len)
        scores = scores[1:] + (found,)  # noqa: RUF005 - Gluon knows no stars
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return scores, slot, phase


@gluon.jit
def _paired(tiles):
    """Return half as many tensors, each of two with a dimension more."""
    HALF: gl.constexpr = len(tiles) // 2
    pairs = (gl.join(tiles[0], tiles[HALF]),)
    for tile in gl.static_range(1, HALF):
        pair = gl.join(tiles[tile], tiles[HALF + tile])
        pairs = pairs + (pair,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuple
    return pairs


@gluon.jit
def _in_one(tiles):
    """Return 1, 2, 4 or 8 tiles [TILE, PADDED] as one, the same registers."""
    ROWS: gl.constexpr = len(tiles) * tiles[0].shape[0]
    HEADS: gl.constexpr = tiles[0].shape[1]
    if len(tiles) == 8:
        whole = _paired(_paired(_paired(tiles)))[0].permute(2, 3, 4, 0, 1)
    elif len(tiles) == 4:
        whole = _paired(_paired(tiles))[0].permute(2, 3, 0, 1)
    elif len(tiles) == 2:
        whole = _paired(tiles)[0].permute(2, 0, 1)
    else:
        whole = tiles[0]
    return whole.reshape(ROWS, HEADS)


@gluon.jit
def _softened(scores, weights, factors, RAISED_BY: gl.constexpr):
    """Leave a split's weights in shared memory; return their sum, and its base 2 log with the peak.

    Peaks are of scores before `factors`, a head each, so that scaling and taking the peak off are
    one fma. Weights are larger than the softmax's by RAISED_BY powers of two.
    """
    TILES: gl.constexpr = len(scores)
    peak = scores[0]
    for tile in gl.static_range(1, TILES):
        peak = gl.maximum(peak, scores[tile])
    peak = gl.max(peak, 0) * factors
    if RAISED_BY > 0:
        peak -= RAISED_BY
    total = gl.zeros_like(scores[0])
    softened = ()
    for tile in gl.static_range(TILES):
        weight = gl.exp2(scores[tile] * factors[None, :] - peak[None, :])
        total += weight
        softened = softened + (weight.to(weights.dtype),)  # type: ignore[assignment]  # noqa: RUF005
    # One store: between several the compiler has all warps meet.
    whole: gl.constexpr = [weights.shape[1], TILES * weights.shape[2]]
    layout: gl.constexpr = weights.layout
    at = weights._reinterpret(weights.dtype, whole, layout)  # noqa: SLF001 - the only way
    at.permute((1, 0)).store(_in_one(softened))
    fence_async_shared()
    gl.thread_barrier()
    total = gl.sum(total, 0)
    return total, peak + gl.log2(total)


@gluon.jit
def _summed(common, ring, held, tiles, slot, phase, sums: gl.constexpr):
    """Return the sums of a split's values by their weights [dimensions, heads], and the ring's."""
    q_smem, boxes, weights, bars = common
    q_bar, full, free = bars
    STAGES: gl.constexpr = full.shape[0]
    BOXES: gl.constexpr = boxes.shape[1]
    TILES: gl.constexpr = weights.shape[0]
    TILE: gl.constexpr = weights.shape[2]
    PADDED: gl.constexpr = weights.shape[1]
    HEAD_DIM: gl.constexpr = ring.shape[2]
    acc = gl.zeros([HEAD_DIM, PADDED], gl.float32, layout=sums)
    for tile in range(tiles):
        mbarrier.wait(full.index(slot), phase)
        kept = held - tile * TILE
        if (kept < TILE) & (kept % ATOM > 0):
            _clear(boxes, slot * BOXES + kept // ATOM, kept % ATOM)
        values = ring.index(slot).permute((1, 0))
        weight = weights.index(TILES - tiles + tile).permute((1, 0))
        acc = warpgroup_mma(values, weight, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return acc, slot, phase


@gluon.jit
def _attended(common, low, kv_len, slot, phase, scale_log2, sums: gl.constexpr):
    """Return a split's attention [dimensions, heads], its log sum, and where the ring stands."""
    q_smem, boxes, weights, bars = common
    TILE: gl.constexpr = weights.shape[2]
    ring_shape: gl.constexpr = [boxes.shape[0], TILE, q_smem.shape[1]]
    layout: gl.constexpr = ring_layout(TILE, q_smem.shape[1])
    ring = boxes._reinterpret(boxes.dtype, ring_shape, layout)  # noqa: SLF001 - the only way
    held = gl.minimum(kv_len - low, weights.shape[0] * TILE)
    tiles = gl.cdiv(held, TILE)
    scores, slot, phase = _scored(common, ring, low, kv_len, tiles, slot, phase, sums)
    columns: gl.constexpr = gl.SliceLayout(0, sums)
    factors = gl.full([weights.shape[1]], 1.0, gl.float32, layout=columns) * scale_log2
    total, lse = _softened(scores, weights, factors, 0)
    acc, slot, phase = _summed(common, ring, held, tiles, slot, phase, sums)
    return acc / total[None, :], lse, slot, phase


@gluon.jit
def _attended_float8(common, low, kv_len, slot, phase, factors, sums: gl.constexpr):
    """Return a split's attention [dimensions, heads], its log sum, and where the ring stands."""
    weights = common[2]
    held = gl.minimum(kv_len - low, weights.shape[0] * weights.shape[2])
    scores, slot, phase = scored_float8(common, held, slot, phase, sums)
    total, lse = _softened(scores, weights, factors, RAISED)
    low_acc, high_acc, slot, phase = summed_float8(common, held, slot, phase, sums)
    acc = in_dims(low_acc / total[None, :], high_acc / total[None, :])
    return acc, lse, slot, phase


@gluon.jit
def _consume(
    common,
    pointers,
    place,
    max_splits,
    scales,
    GROUP: gl.constexpr,
    IN_TURN: gl.constexpr,
):
    """Attend over splits, and merge the row's parts where all others are there."""
    q_smem, boxes, weights, bars = common
    table, kv_head, first, kv_len = place
    scale_log2, v_scale = scales
    IS_FLOAT8: gl.constexpr = boxes.dtype == gl.float8e4nv
    PADDED: gl.constexpr = q_smem.shape[0]
    SPLIT: gl.constexpr = weights.shape[0] * weights.shape[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED, 16])
    count = gl.cdiv(kv_len, SPLIT)
    slot = count * 0
    phase = count * 0
    if IS_FLOAT8:
        queries, downs = queries_in_float16(q_smem, bars[0], sums)
        common = (queries, boxes, weights, bars)
        factors = downs * scale_log2
    end = count if IN_TURN else first + 1
    for split in range(first, end, gl.num_programs(2)):
        low = split * SPLIT
        if IS_FLOAT8:
            acc, lse, slot, phase = _attended_float8(
                common, low, kv_len, slot, phase, factors, sums
            )
        else:
            acc, lse, slot, phase = _attended(common, low, kv_len, slot, phase, scale_log2, sums)
        _write(acc, lse, pointers, split, count, max_splits, v_scale, GROUP)


@gluon.jit
def _write(acc, lse, pointers, split, count, max_splits, v_scale, GROUP: gl.constexpr):
    """Write a split's result [dimensions, heads], or leave it as a part; who is last merges."""
    out_ptr, part_ptr, lse_ptr, arrival = pointers
    HEAD_DIM: gl.constexpr = acc.shape[0]
    PADDED: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    members = gl.arange(0, PADDED, layout=columns)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, layout))
    is_member = (members < GROUP)[None, :]
    if count == 1:
        out = out_ptr + (members * HEAD_DIM)[None, :] + dims[:, None]
        gl.store(out, (acc * v_scale).to(out_ptr.dtype.element_ty), mask=is_member)
    else:
        parts = members * max_splits + split
        gl.store(part_ptr + (parts * HEAD_DIM)[None, :] + dims[:, None], acc, mask=is_member)
        log_sums = gl.convert_layout(lse, columns, assert_trivial=True)
        gl.store(lse_ptr + parts, log_sums, mask=members < GROUP)
        if arrived_last(arrival, count - 1):
            _merge(out_ptr, part_ptr, lse_ptr, max_splits, count, v_scale, GROUP, PADDED, HEAD_DIM)


@gluon.jit
def _merge(
    out_ptr,
    part_ptr,
    lse_ptr,
    max_splits,
    count,
    v_scale,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Write a row's result from its parts, in the order of the keys."""
    order: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    members = gl.arange(0, PADDED, layout=gl.SliceLayout(1, order))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, order))
    is_member = members < GROUP
    peak = gl.full([PADDED], float("-inf"), gl.float32, layout=gl.SliceLayout(1, order))
    total = gl.zeros([PADDED], gl.float32, layout=gl.SliceLayout(1, order))
    acc = gl.zeros([PADDED, HEAD_DIM], gl.float32, layout=order)
    firsts = members * max_splits
    for begin in range(0, count, TOGETHER):
        found = ()
        for within in gl.static_range(TOGETHER):
            is_there = is_member & (begin + within < count)
            places = firsts + begin + within
            # Past the first-level cache, which may hold what a part was before.
            lse = gl.load(lse_ptr + places, mask=is_there, other=0.0, cache_modifier=".cg")
            at = part_ptr + (places * HEAD_DIM)[:, None] + dims[None, :]
            part = gl.load(at, mask=is_there[:, None], other=0.0, cache_modifier=".cg")
            found = found + ((lse, part),)  # type: ignore[assignment]  # noqa: RUF005
        for within in gl.static_range(TOGETHER):
            lse, part = found[within]
            if begin + within < count:
                higher = gl.maximum(peak, lse)
                rescale = gl.exp2(peak - higher)
                weight = gl.exp2(lse - higher)
                acc = acc * rescale[:, None] + weight[:, None] * part
                total = total * rescale + weight
                peak = higher
    out = out_ptr + (members * HEAD_DIM)[:, None] + dims[None, :]
    acc = acc / total[:, None] * v_scale
    gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_member[:, None])


@gluon.jit
def _write_zeros(out_ptr, GROUP: gl.constexpr, PADDED: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Write the result of a padded row: zeros flow on through the layers."""
    order: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    members = gl.arange(0, PADDED, layout=gl.SliceLayout(1, order))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, order))
    zeros = gl.zeros([PADDED, HEAD_DIM], out_ptr.dtype.element_ty, layout=order)
    out = out_ptr + (members * HEAD_DIM)[:, None] + dims[None, :]
    gl.store(out, zeros, mask=(members < GROUP)[:, None])


@gluon.jit(do_not_specialize=["table_stride", "max_splits"])
def hopper_decode_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    part_ptr,
    lse_ptr,
    arrivals,
    kv_lens,
    tables,
    table_stride,
    max_splits,
    scale_log2,
    v_scale,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    UNIT: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    IN_TURN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    if DEPENDENT:
        turn("griddepcontrol.launch_dependents; // $0")
    kv_head = gl.program_id(0)
    row = gl.program_id(1)
    first = gl.program_id(2)
    kv_len = gl.load(kv_lens + row)
    # Lengths are the step's own, and the first program of a row waits: see `dependent_launch`.
    if (first * SPLIT >= kv_len) & (first > 0):
        return
    IS_FLOAT8: gl.constexpr = k_desc.dtype == gl.float8e4nv
    # Of products, and the keys that one takes.
    dtype: gl.constexpr = gl.float16 if IS_FLOAT8 else k_desc.dtype
    KEYS: gl.constexpr = PART if IS_FLOAT8 else TILE
    PADDED: gl.constexpr = q_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[1]
    head = row * NUM_HEADS + kv_head * GROUP
    first_head = row.to(gl.int64) * NUM_HEADS + kv_head * GROUP
    out_ptr += first_head * HEAD_DIM
    if kv_len == 0:
        if DEPENDENT:
            turn("griddepcontrol.wait; // $0")
        _write_zeros(out_ptr, GROUP, PADDED, HEAD_DIM)
        return
    box: gl.constexpr = k_desc.block_type.shape
    ring_shape: gl.constexpr = [STAGES, TILE // ATOM, 1, box[2], ATOM, box[4]]
    weights_shape: gl.constexpr = [SPLIT // KEYS, PADDED, KEYS]
    boxes = gl.allocate_shared_memory(k_desc.dtype, ring_shape, k_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [PADDED, HEAD_DIM], q_desc.layout)
    weights = gl.allocate_shared_memory(dtype, weights_shape, q_desc.layout)
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bar, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()  # the copies' side is to see what barriers begin with
    common = (q_smem, boxes, weights, (q_bar, full, free))
    scales = (scale_log2, v_scale if IS_FLOAT8 else 1.0)
    place = (tables + row.to(gl.int64) * table_stride, kv_head, first, kv_len)
    pointers = (
        out_ptr,
        part_ptr + first_head * max_splits * HEAD_DIM,
        lse_ptr + first_head * max_splits,
        arrivals + row * NUM_HEADS + kv_head,
    )
    gl.warp_specialize(
        [
            (
                _consume,
                (common, pointers, place, max_splits, scales, GROUP, IN_TURN),
            ),
            (
                _produce,
                (common, (q_desc, k_desc, v_desc), place, head, SPLIT, UNIT, IN_TURN, DEPENDENT),
            ),
        ],
        [1],
        [REGISTERS],
    )


@dataclass(frozen=True)
class HopperDecodeShape:
    """How the kernel is specialised.

    Raises:
        EngineError: A split is not 1, 2, 4 or 8 tiles.
    """

    tile: int = 64
    """Keys of a tile: 64 or 128."""
    stages: int = 2
    """Tiles of keys or values in the ring."""
    split: int = 512
    """Tokens of a split."""
    registers: int = 64
    """A thread at the start, of two groups of four warps: 80 for three programs a multiprocessor,
    64 for four."""

    def __post_init__(self) -> None:
        if self.tile not in _PRODUCER_REGISTERS:
            raise EngineError(f"Hopper's decode kernel: tiles of {self.tile} keys, not 64 or 128")
        if self.split not in {self.tile << bit for bit in range(4)}:
            raise EngineError(
                f"Hopper's decode kernel: splits of {self.split} keys, not 1, 2, 4 or 8 tiles of "
                f"{self.tile}"
            )

    @property
    def producer_registers(self) -> int:
        """Of a thread that asks for tiles."""
        return _PRODUCER_REGISTERS[self.tile]

    @property
    def words(self) -> str:
        """Its name."""
        cut = "" if self.split == 512 else f", split {self.split}"
        return f"TMA, {self.tile} keys, ring of {self.stages}, {self.registers} registers{cut}"


_PRODUCER_REGISTERS = {64: 24, 128: 40}
"""By tile: the units of a tile's boxes are registers."""
MOST_GROUP = 16
"""Query heads of a KV head; more than 8 take twice the registers for scores."""

USUAL = HopperDecodeShape()
"""As timed on an H200: four programs fit a multiprocessor, with two tiles each."""
RINGS = (HopperDecodeShape(stages=4, registers=80), HopperDecodeShape(stages=3, registers=80))
"""What a plan may choose instead: tiles and splits, so bits, are the same."""
CANDIDATES = (
    USUAL,
    *RINGS,
    HopperDecodeShape(stages=3, split=256),
    HopperDecodeShape(tile=128, stages=2, registers=80),
)
"""What benchmarks/gpu_decode.py tries; rings of 6 and more tiles lose, for fewer programs fit."""

USUAL_FLOAT8 = HopperDecodeShape(stages=8, registers=80)
"""Over a float8 cache, likewise: three programs, with eight tiles of half the bytes each."""
FLOAT8_RINGS = (HopperDecodeShape(stages=5),)
FLOAT8_CANDIDATES = (
    USUAL_FLOAT8,
    *FLOAT8_RINGS,
    HopperDecodeShape(stages=5, split=256),
    HopperDecodeShape(tile=128, stages=2, registers=80),
    HopperDecodeShape(tile=128, stages=4, registers=80),
)
"""What a plan may choose there, and what benchmarks/gpu_decode.py tries."""
FLOAT8_DIM = 128
"""Dimensions of a head in float8, a line of a box."""


def box_layout(*, is_float8: bool = False) -> gl.NVMMASharedLayout:
    """Return the order of a box in shared memory, [1, 1, D / 64, 8, 64] or [1, 1, 1, 8, 128]."""
    return gl.NVMMASharedLayout(128, 8 if is_float8 else 16, 5)


def query_layout() -> gl.NVMMASharedLayout:
    """Return the order of a group's queries in shared memory, and of weights."""
    return gl.NVMMASharedLayout(128, 16, 2)


def padded(group: int) -> int:
    """Return the columns of products for so many heads: 8 or 16."""
    return 8 if group <= 8 else 16


def serves(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Say why the kernel does not serve these, or None where it does.

    Args:
        q_BHD: See `decode`.
        k_cache: As there.
        v_cache: As there.
    """
    num_heads, num_kv_heads = q_BHD.shape[1], v_cache.shape[1]
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MOST_GROUP:
        return f"{num_heads} heads over {num_kv_heads}: up to {MOST_GROUP} a KV head are served"
    if k_cache.dtype != FLOAT8 or v_cache.dtype != FLOAT8:
        # Boxes are cut from the same caches there, and products take the same halves.
        return triton_hopper_prefill.serves(q_BHD, k_cache, v_cache)
    return _serves_float8(q_BHD, k_cache, v_cache)


def _serves_float8(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Say why the kernel does not serve these over float8, or None where it does."""
    head_dim, unit = q_BHD.shape[2], v_cache.shape[2]
    if head_dim != FLOAT8_DIM:
        return f"{head_dim} dimensions a head over a float8 cache: {FLOAT8_DIM} are served"
    if q_BHD.dtype not in {torch.bfloat16, torch.float16}:
        return f"queries in {q_BHD.dtype}: bfloat16 and float16 are served"
    if unit % _ATOM or unit & (unit - 1):
        return f"units of {unit} tokens: powers of two from {_ATOM} on are served"
    if not (_is_boxable(k_cache.transpose(2, 3)) and _is_boxable(v_cache)):
        return "dimensions that lie apart, or tokens not at multiples of 16 bytes"
    return None


def _is_boxable(cache: Tensor) -> bool:
    """Whether TMA can copy boxes of a float8 cache [num_blocks, Hkv, block_size, D]."""
    *strides, dims = cache.stride()
    return dims == 1 and not any(x % 16 for x in strides) and cache.data_ptr() % 16 == 0


PROGRAMS = 1056
"""Of a grid, about: eight a multiprocessor of an H200. One without work costs a nanosecond."""


def programs_a_row(max_splits: int, rows: int) -> int:
    """Return how many programs share the splits of a row and KV head, of so many of them.

    Taking splits in turn costs nothing here: the next split's keys are asked for while values of
    the last are summed.
    """
    return min(max_splits, -(-PROGRAMS // rows))


def decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_BHD: Tensor,
    *,
    kv_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    shape: HopperDecodeShape,
    scratch: DecodeScratch,
    kv_scales: KVScales = UNSCALED,
) -> None:
    """Write attention of one row a sequence into `out_BHD`, on a Hopper GPU.

    Args:
        q_BHD: [B, Hq, D], contiguous; float16 or bfloat16, D 64 or 128.
        k_cache: [num_blocks, Hkv, D, block_size], dimensions side by side; q's dtype or, of 128
            dimensions, float8.
        v_cache: [num_blocks, Hkv, block_size, D], dimensions side by side; k_cache's dtype.
        out_BHD: As q.
        kv_lens: int32 [B]; 0 marks a padded row, whose output is zeros.
        block_tables: int32 [B, W], contiguous rows.
        scale: Of the scores; positive.
        shape: Tile, ring and split.
        scratch: For at least B rows and the longest of `kv_lens`.
        kv_scales: Of a float8 cache.

    Raises:
        EngineError: The kernel does not serve these tensors.
    """
    reason = serves(q_BHD, k_cache, v_cache)
    if reason is None and kv_scales != UNSCALED and k_cache.dtype != FLOAT8:
        reason = f"scales of a cache in {k_cache.dtype}: only float8 has them"
    if reason is not None:
        raise EngineError(f"Hopper's decode kernel: {reason}")
    num_rows, num_heads, head_dim = q_BHD.shape
    num_kv_heads, unit = v_cache.shape[1:3]
    group = num_heads // num_kv_heads
    sharers = programs_a_row(scratch.max_splits, num_rows * num_kv_heads)
    hopper_decode_kernel[(num_kv_heads, num_rows, sharers)](
        TensorDescriptor(
            q_BHD, [num_rows * num_heads, head_dim], [head_dim, 1], [padded(group), head_dim],
            query_layout(),
        ),
        _boxes(k_cache.transpose(2, 3)),
        _boxes(v_cache),
        out_BHD,
        scratch.parts,
        scratch.lses,
        scratch.arrivals,
        kv_lens,
        block_tables,
        block_tables.stride(0),
        scratch.max_splits,
        scale * kv_scales.k * LOG2_E,
        kv_scales.v,
        NUM_HEADS=num_heads,
        GROUP=group,
        UNIT=unit,
        TILE=shape.tile,
        SPLIT=shape.split,
        STAGES=shape.stages,
        REGISTERS=shape.producer_registers,
        IN_TURN=sharers < scratch.max_splits,
        num_warps=4,
        maxnreg=shape.registers,
        **launch_options(),
    )  # fmt: skip


def _boxes(cache: Tensor) -> TensorDescriptor:
    """Return the descriptor of a cache [num_blocks, Hkv, block_size, D] by 128 bytes a piece.

    So a box of 8 tokens and all dimensions is one copy: half as many as by pieces.
    """
    units, heads, tokens, head_dim = cache.shape
    unit_step, head_step, token_step, _ = cache.stride()
    columns = _COLUMNS * 2 // cache.element_size()
    pieces = head_dim // columns
    return TensorDescriptor(
        cache,
        [units, heads, pieces, tokens, columns],
        [unit_step, head_step, columns, token_step, 1],
        [1, 1, pieces, _ATOM, columns],
        box_layout(is_float8=cache.dtype == FLOAT8),
    )
