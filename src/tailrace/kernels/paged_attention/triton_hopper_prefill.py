"""Prefill over the paged cache for Hopper: loads, softmax and products run beside each other.

`triton_prefill` says what is computed. Its compiler waits for each product before the softmax that
needs it, and the tensor cores idle meanwhile. Gluon, the language below Triton's, leaves the order
to us, and it is FlashAttention-3's (Shah et al., 2024):

    producers   1 warp copies queries once, then tiles of keys into a ring in shared memory (TMA),
                1 warp values; each a box of a unit's tokens and 64 dimensions at a time: 32 boxes
                of 8 tokens are a tile, more than one warp asks for in time
    side 0, 1   4 warps each, 64 query rows of one head

    side 0      [q k1][p0 v0] [softmax 1       ][q k2][p1 v1] [softmax 2      ]
    side 1                    [q k1][p0 v0] [softmax 1       ][q k2][p1 v1]

A side queues two products, the next scores and the last values, and softens the scores while the
values are multiplied. The sides take turns to queue, so one softens while the other multiplies.

A box of 8 tokens is one atom of the swizzle that products read, 8 rows of 128 bytes: boxes one
after the other are a tile, wherever in the pool they come from. Beyond a sequence's last unit the
producers ask for unit -1, which TMA fills with zeros; the rest of the last unit may hold NaN, and
0 x NaN is NaN, so each side writes zeros there before it multiplies values.
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
from tailrace.kernels.paged_attention.triton_prefill import LOG2_E

if TYPE_CHECKING:
    from torch import Tensor

_SIDE, _SIDES, _ATOM, _COLUMNS = 64, 2, 8, 64
SIDE = gl.constexpr(_SIDE)
"""Query rows of one side."""
SIDES = gl.constexpr(_SIDES)
ATOM = gl.constexpr(_ATOM)
"""Tokens of the least unit: rows of one atom of the swizzle."""
COLUMNS = gl.constexpr(_COLUMNS)
"""Dimensions of a box: 128 bytes, the swizzle's width."""
BLOCK_M = _SIDE * _SIDES
"""Rows of a tile of queries."""


@gluon.jit
def _copy(
    desc,
    pieces,
    bar,
    piece,
    table,
    start,
    kv_head,
    kv_len,
    HALVES: gl.constexpr,
    BOXES: gl.constexpr,
    UNIT: gl.constexpr,
):
    """Begin to copy a tile, box after box; pieces of the first 64 dimensions lie first.

    A few boxes are asked for at a time: one warp has registers for no more. The grid is one
    program deep, which compilers do not know, so they leave the loop as it is.
    """
    BOX: gl.constexpr = pieces.shape[2]
    TOGETHER: gl.constexpr = min(BOXES, 4)
    for group in range(0, BOXES * gl.num_programs(2), TOGETHER):
        token = start + group * BOX
        units = (_unit(table, token, kv_len, UNIT),)
        for within in gl.static_range(1, TOGETHER):
            unit = _unit(table, token + within * BOX, kv_len, UNIT)
            units = units + (unit,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuple
        for within in gl.static_range(TOGETHER):
            inner = (token + within * BOX) % UNIT
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    desc, [units[within], inner, kv_head, half * COLUMNS], bar,
                    pieces.index(piece + half * BOXES + group + within),
                )  # fmt: skip


@gluon.jit
def _unit(table, token, kv_len, UNIT: gl.constexpr):
    """Return the unit that holds a token, -1 beyond the sequence's end."""
    return gl.load(table + token // UNIT, mask=token < kv_len, other=-1)


@gluon.jit
def _produce(desc, pieces, full, free, tiles, place, UNIT: gl.constexpr, HALVES: gl.constexpr):
    """Keep a ring full, a tile of keys or values a slot."""
    table, kv_head, kv_len = place
    BOX: gl.constexpr = pieces.shape[2]
    STAGES: gl.constexpr = full.shape[0]
    PIECES: gl.constexpr = pieces.shape[0] // STAGES
    BOXES: gl.constexpr = PIECES // HALVES
    slot = 0
    phase = 1  # a new barrier's last phase counts as done: the first round finds every slot free
    for tile in range(tiles):
        bar = full.index(slot)
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(bar, PIECES * desc.block_type.nbytes)
        _copy(
            desc, pieces, bar, slot * PIECES, table, tile * (BOXES * BOX), kv_head, kv_len,
            HALVES, BOXES, UNIT,
        )  # fmt: skip
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _produce_keys(common, q_desc, k_desc, row, head, place, UNIT: gl.constexpr):
    """Copy the queries, then keys."""
    q_smem, k_pieces, _, bars, tiles, _ = common
    q_bar, k_full, k_free, _, _, _ = bars
    HEAD_DIM: gl.constexpr = q_smem.shape[2]
    if tiles > 0:  # else nobody would wait for them, and the next program's memory is this one's
        mbarrier.expect(q_bar, SIDES * q_desc.block_type.nbytes)
        for side in gl.static_range(SIDES):
            at = [row + side * SIDE, head * HEAD_DIM]
            tma.async_copy_global_to_shared(q_desc, at, q_bar, q_smem.index(side))
    _produce(k_desc, k_pieces, k_full, k_free, tiles, place, UNIT, HEAD_DIM // COLUMNS)


@gluon.jit
def _produce_values(common, v_desc, place, UNIT: gl.constexpr):
    q_smem, _, v_pieces, bars, tiles, _ = common
    _, _, _, v_full, v_free, _ = bars
    HEAD_DIM: gl.constexpr = q_smem.shape[2]
    _produce(v_desc, v_pieces, v_full, v_free, tiles, place, UNIT, HEAD_DIM // COLUMNS)


@gluon.jit
def _as_tiles(pieces, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Return a ring of boxes as [STAGES, BLOCK_N, HEAD_DIM]: the same bytes."""
    BOX: gl.constexpr = pieces.shape[2]
    STAGES: gl.constexpr = pieces.shape[0] * BOX * COLUMNS // (BLOCK_N * HEAD_DIM)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    shape: gl.constexpr = [STAGES, BLOCK_N, HEAD_DIM]
    return pieces._reinterpret(pieces.dtype, shape, layout)  # noqa: SLF001 - there is no other way


@gluon.jit
def _hide(scores, start, position, kv_len):
    """Return scores with -inf where a key is after its row's position, or no key."""
    layout: gl.constexpr = scores.type.layout
    columns = start + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
    positions = position + gl.arange(0, scores.shape[0], layout=gl.SliceLayout(1, layout))
    last = gl.minimum(positions, kv_len - 1)
    return gl.where(columns[None, :] <= last[:, None], scores, float("-inf"))


@gluon.jit
def _soften(scores, peak, total, scale_log2, dtype: gl.constexpr):
    """Return weights as the left side of a product, the new peak and total, and old sums' factor.

    Peaks are of scores before `scale_log2`, so that scaling and taking the peak off are one fma.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, scores.type.layout, 2)
    higher = gl.maximum(peak, gl.max(scores, 1))
    rescale = gl.exp2((peak - higher) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - (higher * scale_log2)[:, None])
    total = total * rescale + gl.sum(weights, 1)
    weights = gl.convert_layout(weights.to(dtype), left, assert_trivial=True)
    return weights, higher, total, rescale


@gluon.jit
def _steps(
    state,
    common,
    low,
    high,
    position,
    kv_len,
    scale_log2,
    side: gl.constexpr,
    MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Take tiles `low` to `high`: queue their scores and the last tile's values, then soften."""
    acc, weights, peak, total, slot, phase, v_slot, v_phase = state
    q_smem, k_pieces, v_pieces, bars, tiles, _ = common
    _, k_full, k_free, v_full, v_free, turns = bars
    STAGES: gl.constexpr = k_full.shape[0]
    VALUE_STAGES: gl.constexpr = v_full.shape[0]
    dtype: gl.constexpr = q_smem.dtype
    k_ring = _as_tiles(k_pieces, BLOCK_N, q_smem.shape[2])
    v_ring = _as_tiles(v_pieces, BLOCK_N, q_smem.shape[2])
    q = q_smem.index(side)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    for tile in range(low, high):
        mbarrier.wait(v_full.index(v_slot), v_phase)
        if TURNS:
            # Side 0 is first: a new barrier's last phase counts as done.
            mbarrier.wait(turns.index(side), (tile & 1) ^ side)
        empty = gl.zeros([SIDE, BLOCK_N], gl.float32, layout=sums)
        k = k_ring.index(slot).permute((1, 0))
        scores = warpgroup_mma(q, k, empty, use_acc=False, is_async=True)
        acc = warpgroup_mma(weights, v_ring.index(v_slot), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - side), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        gl.thread_barrier()  # all four warps are done with the keys
        mbarrier.arrive(k_free.index(slot), count=1)
        if MASKED:
            scores = _hide(scores, tile * BLOCK_N, position, kv_len)
        softened, peak, total, rescale = _soften(scores, peak, total, scale_log2, dtype)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        # The next keys are waited for here, and the softened named below, so that the assembler
        # leaves the softmax before the values' product has ended.
        mbarrier.wait(k_full.index(slot), phase, pred=tile + 1 < tiles)
        acc, weights, softened = warpgroup_mma_wait(0, deps=[acc, weights, softened])
        gl.thread_barrier()
        mbarrier.arrive(v_free.index(v_slot), count=1)
        v_slot += 1
        if v_slot == VALUE_STAGES:
            v_slot = 0
            v_phase ^= 1
        acc_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))
        acc = acc * acc_rescale[:, None]
        weights = softened
    return acc, weights, peak, total, slot, phase, v_slot, v_phase


@gluon.jit
def _clear(pieces, slot, low, high, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Write zeros to a tile's rows from `low` on, up to `high`, the end of an atom.

    Both sides do so, perhaps at once, even while the other multiplies: they write the same bytes.
    """
    BOX: gl.constexpr = pieces.shape[2]
    ATOMS: gl.constexpr = pieces.shape[0] * BOX // ATOM
    A_TILE: gl.constexpr = ATOMS // STAGES
    # Whole rows of 128 bytes are cleared: how they are swizzled within is all one.
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    atoms = pieces._reinterpret(pieces.dtype, [ATOMS, ATOM, COLUMNS], plain)  # noqa: SLF001
    order: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, ATOM, layout=gl.SliceLayout(1, order))
    for atom in range(low // ATOM, high // ATOM):
        is_kept = (atom * ATOM + rows < low)[:, None]
        for half in gl.static_range(HALVES):
            at = atoms.index(slot * A_TILE + half * (A_TILE // HALVES) + atom)
            values = at.load(order)
            at.store(gl.where(is_kept, values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _consume(
    common,
    out_ptr,
    row,
    rows_left,
    head,
    position,
    kv_len,
    scales,
    side: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    UNIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Compute one side of a tile; one without rows, as captured steps are padded with, has none."""
    _, _, _, _, tiles, _ = common
    if tiles > 0:
        _attend(
            common, out_ptr, row, rows_left, head, position, kv_len, scales, side, NUM_HEADS,
            UNIT, BLOCK_N, TURNS,
        )  # fmt: skip


@gluon.jit
def _attend(
    common,
    out_ptr,
    row,
    rows_left,
    head,
    position,
    kv_len,
    scales,
    side: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    UNIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Compute 64 rows of one head, and write them."""
    q_smem, k_pieces, v_pieces, bars, tiles, full = common
    q_bar, k_full, k_free, v_full, v_free, _ = bars
    scale_log2 = scales[0]
    STAGES: gl.constexpr = k_full.shape[0]
    HEAD_DIM: gl.constexpr = q_smem.shape[2]
    dtype: gl.constexpr = q_smem.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    k_ring = _as_tiles(k_pieces, BLOCK_N, HEAD_DIM)
    v_ring = _as_tiles(v_pieces, BLOCK_N, HEAD_DIM)
    position += side * SIDE
    mbarrier.wait(q_bar, 0)
    mbarrier.wait(k_full.index(0), 0)
    empty = gl.zeros([SIDE, BLOCK_N], gl.float32, layout=sums)
    k = k_ring.index(0).permute((1, 0))
    scores = warpgroup_mma(q_smem.index(side), k, empty, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(0), count=1)
    if full == 0:
        scores = _hide(scores, 0, position, kv_len)
    peak = gl.full([SIDE], float("-inf"), gl.float32, layout=gl.SliceLayout(1, sums))
    total = gl.zeros([SIDE], gl.float32, layout=gl.SliceLayout(1, sums))
    weights, peak, total, _ = _soften(scores, peak, total, scale_log2, dtype)
    acc = gl.zeros([SIDE, HEAD_DIM], gl.float32, layout=out_sums)
    one = tiles * 0 + 1
    slot = one % STAGES
    phase = (one // STAGES) & 1
    mbarrier.wait(k_full.index(slot), phase, pred=tiles > 1)
    state = (acc, weights, peak, total, slot, phase, one - 1, one - 1)
    state = _steps(
        state, common, 1, full, position, kv_len, scale_log2, side, False, BLOCK_N, TURNS
    )
    state = _steps(
        state, common, gl.maximum(full, 1), tiles, position, kv_len, scale_log2, side, True,
        BLOCK_N, TURNS,
    )  # fmt: skip
    acc, weights, peak, total, _, _, v_slot, v_phase = state
    mbarrier.wait(v_full.index(v_slot), v_phase)
    held = kv_len - (tiles - 1) * BLOCK_N
    if held < BLOCK_N:
        end = gl.minimum((held + UNIT - 1) // UNIT * UNIT, BLOCK_N)
        _clear(v_pieces, v_slot, held, end, HEAD_DIM // COLUMNS, v_full.shape[0])
    acc = warpgroup_mma(weights, v_ring.index(v_slot), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, out_sums))[:, None]
    if len(scales) > 1:
        acc = acc * scales[1]
    order: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    values = gl.convert_layout(acc.to(dtype), order)
    rows = side * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, order))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, order))
    places = ((row + rows).to(gl.int64) * NUM_HEADS + head) * HEAD_DIM
    gl.store(out_ptr + places[:, None] + dims[None, :], values, mask=(rows < rows_left)[:, None])


@gluon.jit(do_not_specialize=["table_stride"])
def hopper_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    tiles,
    query_starts,
    kv_lens,
    tables,
    table_stride,
    scale_log2,
    v_scale,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    UNIT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    REGISTERS: gl.constexpr,
    IS_SCALED: gl.constexpr,
):
    head = gl.program_id(0)
    tile = gl.program_id(1)
    sequence = gl.load(tiles + 2 * tile)
    first = gl.load(tiles + 2 * tile + 1)
    row_start = gl.load(query_starts + sequence)
    num_rows = gl.load(query_starts + sequence + 1) - row_start
    kv_len = gl.load(kv_lens + sequence)
    position = kv_len - num_rows + first
    table = tables + sequence.to(gl.int64) * table_stride
    end = gl.minimum(position + SIDES * SIDE, kv_len)
    # Keys that every row sees come in `full` tiles; in the others some are hidden.
    full = (position + 1) // BLOCK_N

    dtype: gl.constexpr = q_desc.dtype
    BOX: gl.constexpr = k_desc.block_type.shape[1]
    A_TILE: gl.constexpr = BLOCK_N // BOX * (HEAD_DIM // COLUMNS)
    k_shape: gl.constexpr = [STAGES * A_TILE, 1, BOX, 1, COLUMNS]
    v_shape: gl.constexpr = [VALUE_STAGES * A_TILE, 1, BOX, 1, COLUMNS]
    q_smem = gl.allocate_shared_memory(dtype, [SIDES, SIDE, HEAD_DIM], q_desc.layout)
    k_pieces = gl.allocate_shared_memory(dtype, k_shape, k_desc.layout)
    v_pieces = gl.allocate_shared_memory(dtype, v_shape, v_desc.layout)
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bar, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=SIDES)
    for slot in gl.static_range(VALUE_STAGES):
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_free.index(slot), count=SIDES)
    turns = q_bar
    if TURNS:
        # No barrier that nobody asks: its memory would become other things', and a barrier that
        # was not taken back comes back over them where contexts are switched.
        turns = gl.allocate_shared_memory(gl.int64, [SIDES, 1], mbarrier.MBarrierLayout())
        for side in gl.static_range(SIDES):
            mbarrier.init(turns.index(side), count=1)
    bars = (q_bar, k_full, k_free, v_full, v_free, turns)
    common = (q_smem, k_pieces, v_pieces, bars, gl.cdiv(end, BLOCK_N), full)
    place = (table, head // GROUP, kv_len)
    row = row_start + first
    rows_left = num_rows - first
    # A tuple, so that without a scale of values nothing of it is handed to a side.
    scales = (scale_log2, v_scale) if IS_SCALED else (scale_log2,)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    common, out_ptr, row, rows_left, head, position, kv_len, scales, 0,
                    NUM_HEADS, UNIT, BLOCK_N, TURNS,
                ),
            ),
            (
                _consume,
                (
                    common, out_ptr, row, rows_left, head, position, kv_len, scales, 1,
                    NUM_HEADS, UNIT, BLOCK_N, TURNS,
                ),
            ),
            (_produce_keys, (common, q_desc, k_desc, row, head, place, UNIT)),
            (_produce_values, (common, v_desc, place, UNIT)),
        ],
        [4, 1, 1],
        [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True)
class HopperShape:
    """How the kernel is specialised."""

    block_n: int = 128
    """Keys of a tile."""
    stages: int = 2
    """Tiles of keys in their ring."""
    value_stages: int = 2
    """Tiles of values: theirs are free later than the keys'."""
    turns: bool = True
    """Whether the sides take turns to queue their products."""
    registers: int = 240
    """Of a thread that multiplies."""

    @property
    def block_m(self) -> int:
        """Rows that `tiles` are cut for."""
        return BLOCK_M

    @property
    def words(self) -> str:
        """Its name in a plan."""
        turns = "in turn" if self.turns else "freely"
        stages = f"{self.stages}+{self.value_stages} stages"
        return f"{BLOCK_M}x{self.block_n}, {stages}, {turns}, {self.registers}"


USUAL = {
    128: HopperShape(value_stages=3, turns=False),
    64: HopperShape(stages=4, value_stages=4),
}
"""By head dimension.

Seen on an H200 (gpu_prefill.py, 2026-11-30), 28 query heads and 4 KV heads of 128 dimensions, of
the time of Triton's kernel: 0.83 below 1024 keys, 0.64 below 3072, 0.55 beyond. The other shapes of
tiles of 128 keys are within 3 % of that; tiles of 64 take 0.80, 0.69 and 0.63. Heads of 64 are
right on an H200 and not timed.
"""
CANDIDATES = {
    128: (
        USUAL[128],
        HopperShape(),
        HopperShape(value_stages=3),
        HopperShape(registers=232),
        HopperShape(block_n=64, stages=4, value_stages=4),
    ),
    64: (USUAL[64], HopperShape(stages=4, value_stages=4, turns=False)),
}
"""What a plan and benchmarks/gpu_prefill.py try, the usual one first."""
REGISTERS = 168
"""A thread at the start: the producer's warps hand most of theirs over."""


def query_layout() -> gl.NVMMASharedLayout:
    """Return the order of queries in shared memory."""
    return gl.NVMMASharedLayout(128, 16, 2)


def box_layout() -> gl.NVMMASharedLayout:
    """Return the order of a box of the cache [1, tokens, 1, 64] in shared memory."""
    return gl.NVMMASharedLayout(128, 16, 4)


def box_tokens(unit: int, shape: HopperShape) -> int:
    """Return the tokens of a box: a unit, or a tile of it."""
    return min(unit, shape.block_n)


def serves(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, *, unit: int | None = None
) -> str | None:
    """Say why the kernel does not serve these, or None where it does.

    Args:
        q_THD: See `hopper_prefill`.
        k_cache: As there.
        v_cache: As there.
        unit: As there.
    """
    head_dim = q_THD.shape[2]
    unit = v_cache.shape[2] if unit is None else unit
    if head_dim not in USUAL:
        return f"{head_dim} dimensions a head: 64 or 128 are served"
    if q_THD.dtype not in {torch.bfloat16, torch.float16}:
        return f"queries in {q_THD.dtype}: bfloat16 and float16 are served"
    if {k_cache.dtype, v_cache.dtype} != {q_THD.dtype}:
        return f"a cache in {k_cache.dtype} for queries in {q_THD.dtype}: they must be the same"
    if unit % _ATOM or unit & (unit - 1):
        return f"units of {unit} tokens: powers of two from {_ATOM} on are served"
    if not (_is_boxable(k_cache.transpose(2, 3)) and _is_boxable(v_cache)):
        return "dimensions that lie apart, or tokens not at multiples of 16 bytes"
    return None


def _is_boxable(cache: Tensor) -> bool:
    """Whether TMA can copy boxes of [num_blocks, Hkv, block_size, D] in 16 bits."""
    *strides, dims = cache.stride()
    return dims == 1 and not any(x % 8 for x in strides) and cache.data_ptr() % 16 == 0


def hopper_prefill(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    *,
    tiles: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    shape: HopperShape | None = None,
    unit: int | None = None,
    v_scale: float | None = None,
) -> None:
    """Write causal attention of the rows in `tiles` into `out_THD`, on a Hopper GPU.

    Args:
        q_THD: [T, Hq, D], contiguous; float16 or bfloat16, D 64 or 128.
        k_cache: [num_blocks, Hkv, D, block_size], dimensions side by side; q's dtype.
        v_cache: [num_blocks, Hkv, block_size, D], dimensions side by side; q's dtype.
        out_THD: As q; rows of no tile are left as they are.
        tiles: int32 [N, 2]: sequence, and its tile's first row within the chunk.
        query_starts: int32 [B+1].
        kv_lens: int32 [B]; the chunk's own keys are in the cache already.
        block_tables: int32 [B, W], contiguous rows.
        scale: Of the scores; positive.
        shape: Instead of the usual one; `tiles` are cut for 128 rows.
        unit: Tokens of a unit, where the cache's shape does not say it: at least a tile's, a power
            of two. Boxes then end with the cache's `block_size`, and units may overlap, as many as
            `num_blocks` says; the memory of all of them must be there, for a box is read whole.
        v_scale: What the finished sums are multiplied by, where values were widened from float8;
            that of the keys is a part of `scale`.

    Raises:
        EngineError: The kernel does not serve these tensors.
    """
    reason = serves(q_THD, k_cache, v_cache, unit=unit)
    if reason is not None:
        raise EngineError(f"Hopper's prefill kernel: {reason}")
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = v_cache.shape[1]
    unit = v_cache.shape[2] if unit is None else unit
    shape = shape or USUAL[head_dim]
    hopper_prefill_kernel[(num_heads, tiles.shape[0])](
        TensorDescriptor(
            q_THD, [num_tokens, num_heads * head_dim], [num_heads * head_dim, 1],
            [_SIDE, head_dim], query_layout(),
        ),
        _boxes(k_cache.transpose(2, 3), unit, shape),
        _boxes(v_cache, unit, shape),
        out_THD,
        tiles,
        query_starts,
        kv_lens,
        block_tables,
        block_tables.stride(0),
        scale * LOG2_E,
        1.0 if v_scale is None else v_scale,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        UNIT=unit,
        HEAD_DIM=head_dim,
        BLOCK_N=shape.block_n,
        STAGES=shape.stages,
        VALUE_STAGES=shape.value_stages,
        TURNS=shape.turns,
        REGISTERS=shape.registers,
        IS_SCALED=v_scale is not None,
        num_warps=4,
        maxnreg=REGISTERS,
    )  # fmt: skip


def _boxes(cache: Tensor, unit: int, shape: HopperShape) -> TensorDescriptor:
    """Return the descriptor of a cache [num_blocks, Hkv, block_size, D] by unit and token."""
    by_token = cache.transpose(1, 2)
    box = [1, box_tokens(unit, shape), 1, _COLUMNS]
    return TensorDescriptor(
        by_token, list(by_token.shape), list(by_token.stride()), box, box_layout()
    )
