"""Products of int8 rows and an int8 weight for Hopper: loads run beside products, products queue.

`triton_int8` says what is computed. Its compiler lets one product wait for the one before only
where sums are float32; of int32 sums every step of 128 inputs is waited for, and the tensor cores
idle meanwhile. Gluon, the language below Triton's, leaves that to us:

    producer    1 warp: copies steps of x8 [128, 128] and w8 [BLOCK_N, 128] into a ring in shared
                memory (TMA), tile after tile, ahead of those who multiply
    side 0, 1   4 warps each, 64 rows of the tile: one step's product is queued behind the last's;
                a slot of the ring is free once the product after it has begun

Programs are persistent, one a multiprocessor; tiles go in the order of `triton_int8`. While sums
are scaled and stored, the ring fills for the next tile.
"""

from __future__ import annotations

from dataclasses import dataclass
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

from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.int8 import Int8Weight
    from tailrace.kernels.linear.int8_rows import Int8Rows

_SIDE, _SIDES, _STEP = 64, 2, 128
SIDE = gl.constexpr(_SIDE)
"""Rows of one side."""
SIDES = gl.constexpr(_SIDES)
STEP = gl.constexpr(_STEP)
"""Inputs of one slot of the ring."""


@gluon.jit
def _place(tile, sizes, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """Return the first row and output of a tile: bands of GROUP_M tiles of rows, by columns."""
    num_rows, N, steps, tiles, programs = sizes
    row_tiles = gl.cdiv(num_rows, SIDES * SIDE)
    column_tiles = gl.cdiv(N, BLOCK_N)
    band = tile // (GROUP_M * column_tiles)
    band_rows = gl.minimum(row_tiles - band * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * column_tiles)
    row = (band * GROUP_M + within % band_rows) * (SIDES * SIDE)
    return row, (within // band_rows) * BLOCK_N


@gluon.jit
def _produce(descs, rings, bars, sizes, GROUP_M: gl.constexpr):
    """Keep the ring full, a step a slot."""
    x_desc, w_desc = descs
    x_ring, w_ring = rings
    full, free = bars
    num_rows, N, steps, tiles, programs = sizes
    STAGES: gl.constexpr = x_ring.shape[0]
    slot = 0
    phase = 1  # a new barrier's last phase counts as done: the first round finds every slot free
    for tile in range(gl.program_id(0), tiles, programs):
        row, column = _place(tile, sizes, w_ring.shape[1], GROUP_M)
        for step in range(steps):
            bar = full.index(slot)
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            at = step * STEP
            tma.async_copy_global_to_shared(x_desc, [row, at], bar, x_ring.index(slot))
            tma.async_copy_global_to_shared(w_desc, [column, at], bar, w_ring.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _consume(common, side: gl.constexpr, GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Multiply 64 rows of each tile, and write them."""
    rings, bars, pointers, sizes = common
    x_ring, w_ring = rings
    full, free = bars
    num_rows, N, steps, tiles, programs = sizes
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    # Instructions of 256 outputs are not compiled for int8: two of 128 are.
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, programs):
        row, column = _place(tile, sizes, BLOCK_N, GROUP_M)
        acc = gl.zeros([SIDE, BLOCK_N], gl.int32, layout=sums)
        before = 0
        for step in range(steps):
            mbarrier.wait(full.index(slot), phase)
            x = x_ring.index(slot).slice(side * SIDE, SIDE)
            w = w_ring.index(slot).permute((1, 0))
            acc = warpgroup_mma(x, w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # The product before this one is done, in all four warps, with its slot.
            gl.thread_barrier()
            mbarrier.arrive(free.index(before), count=1, pred=step > 0)
            before = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(free.index(before), count=1)
        _write(acc, pointers, sizes, row + side * SIDE, column, HAS_BIAS)


@gluon.jit
def _write(acc, pointers, sizes, row, column, HAS_BIAS: gl.constexpr):
    """Scale sums and write them to out [T, N], 16 bytes of a row a thread."""
    x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr = pointers
    num_rows, N, steps, tiles, programs = sizes
    BLOCK_N: gl.constexpr = acc.shape[1]
    rows = row + gl.arange(0, SIDE, layout=gl.SliceLayout(1, acc.type.layout))
    outputs = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, acc.type.layout))
    x_scale = gl.load(x_scale_ptr + rows, mask=rows < num_rows, other=0.0)
    w_scale = gl.load(w_scale_ptr + outputs, mask=outputs < N, other=0.0)
    y = acc.to(gl.float32) * x_scale[:, None] * w_scale[None, :]
    if HAS_BIAS:
        bias = gl.load(bias_ptr + outputs, mask=outputs < N, other=0.0)
        y += bias.to(gl.float32)[None, :]
    order: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(y.to(out_ptr.dtype.element_ty), order)
    rows = row + gl.arange(0, SIDE, layout=gl.SliceLayout(1, order))
    outputs = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, order))
    is_place = (rows < num_rows)[:, None] & (outputs < N)[None, :]
    gl.store(out_ptr + rows.to(gl.int64)[:, None] * N + outputs[None, :], values, mask=is_place)


@gluon.jit(do_not_specialize=["num_rows", "steps", "tiles", "programs"])
def int8_hopper_kernel(
    x_desc,
    w_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    steps,
    tiles,
    programs,
    GROUP_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(gl.int8, [STAGES, SIDES * SIDE, STEP], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, STEP], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=SIDES)
    rings = (x_ring, w_ring)
    bars = (full, free)
    pointers = (x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr)
    sizes = (num_rows, N, steps, tiles, programs)
    common = (rings, bars, pointers, sizes)
    gl.warp_specialize(
        [
            (_consume, (common, 0, GROUP_M, HAS_BIAS)),
            (_consume, (common, 1, GROUP_M, HAS_BIAS)),
            (_produce, ((x_desc, w_desc), rings, bars, sizes, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )


@dataclass(frozen=True)
class HopperInt8Shape:
    """How the kernel is specialised."""

    block_n: int
    """Outputs of a tile, of 128 rows: 128 or 256."""
    stages: int
    """Slots of the ring."""
    group_m: int = 8
    """Tiles of rows in a band."""


USUAL = HopperInt8Shape(256, 4)
CANDIDATES = (
    USUAL,
    HopperInt8Shape(256, 4, 4),
    HopperInt8Shape(256, 4, 16),
    HopperInt8Shape(256, 3),
    HopperInt8Shape(128, 5),
    HopperInt8Shape(128, 6),
)
"""What `benchmarks/gpu_gemm.py --sweep` tries; compiled ahead, none is timed yet."""
REGISTERS = 168
"""A thread at the start: the producer's warps hand most of theirs over."""


def shared_layout() -> gl.NVMMASharedLayout:
    """Return the order of 128 inputs of int8 in shared memory, swizzled over 128 bytes."""
    return gl.NVMMASharedLayout(128, 8, 2)


def int8_hopper(
    x: Int8Rows,
    weight: Int8Weight,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    out_TO: Tensor | None = None,
    shape: HopperInt8Shape = USUAL,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in `dtype`; see `int8_rows.int8_product`.

    Args:
        x: Rows, at least one, on a Hopper GPU.
        weight: On x's device.
        bias_O: In any float dtype, or none.
        dtype: Of the result: bfloat16 or float16.
        out_TO: Where to write it; contiguous, in `dtype`.
        shape: Instead of the usual one.
    """
    rows, inputs = x.values.shape
    outputs = weight.shape[0]
    device = x.values.device
    if out_TO is None:
        out_TO = torch.empty(rows, outputs, dtype=dtype, device=device)
    tiles = -(-rows // (_SIDES * _SIDE)) * -(-outputs // shape.block_n)
    programs = min(tiles, multiprocessors(device))
    layout = shared_layout()
    int8_hopper_kernel[(programs,)](
        TensorDescriptor(x.values, [rows, inputs], [inputs, 1], [_SIDES * _SIDE, _STEP], layout),
        TensorDescriptor(
            weight.values, [outputs, inputs], [inputs, 1], [shape.block_n, _STEP], layout
        ),
        x.scales,
        weight.scales,
        out_TO if bias_O is None else bias_O,
        out_TO,
        rows,
        outputs,
        -(-inputs // _STEP),
        tiles,
        programs,
        GROUP_M=shape.group_m,
        HAS_BIAS=bias_O is not None,
        STAGES=shape.stages,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    return out_TO
