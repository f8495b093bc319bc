"""A linear layer of at most 32 rows over a weight in 4 bits, for Hopper: inputs split in a program.

A small layer has fewer tiles than a GPU has room for, and splits its inputs among programs, whose
parts then meet in memory: as long as the loop itself. Here a program takes 64 outputs and all
inputs, and deals its units to groups of four warps, which hide each other's waits:

    producer    1 warp: codes, scales and rows into a ring (`triton_hopper_ring`)
    slice p     4 warps: units p, p + SLICES ..., whole numbers multiplied, scaled afterwards

The slices' sums meet in shared memory, and are added in the slices' order: a row's sum depends on
no neighbour, and on the layer alone. No weight is rounded.
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
from tailrace.kernels.linear.triton_hopper_int4 import HALF, scale_of, weights
from tailrace.kernels.linear.triton_hopper_ring import (
    OTHER_SHARED_BYTES,
    SHARED_BYTES,
    descriptors,
    flat,
    meta_of,
    new_ring,
    produce,
    store,
    turn,
    unit_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.packed_int4 import PackedInt4


@gluon.jit
def _consume(common, slice_: gl.constexpr, SLICES: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Multiply a slice's units; the first slice adds the others' sums to its own."""
    rings, bars, sums_ring, done, pointers, sizes, tile = common
    codes_ring, x_ring, meta_rows = rings
    meta_ring = flat(meta_rows)
    full, free = bars
    N, padded_n, num_rows, chunks, units, span = sizes
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    dtype: gl.constexpr = x_ring.dtype
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    zero = gl.zeros([HALF, ROWS], gl.float32, layout=sums)
    acc = zero
    for chunk in range(slice_, chunks, SLICES):
        slot = chunk % STAGES
        mbarrier.wait(full.index(slot), chunk // STAGES % 2)
        meta = meta_of(meta_ring, slot, 0, HALF, sums)
        w = weights(codes_ring.index(slot).load(left), meta, dtype, left)
        x = x_ring.index(slot).permute((1, 0))
        part = warpgroup_mma(w, x, zero, use_acc=False, is_async=True)
        part, w = warpgroup_mma_wait(0, deps=[part, w])
        gl.thread_barrier()  # all four warps are done with the slot
        mbarrier.arrive(free.index(slot), count=1)
        acc += part * scale_of(meta)
    if slice_ > 0:
        sums_ring.index(slice_ - 1).store(acc)
        gl.thread_barrier()
        mbarrier.arrive(done.index(0), count=1)
    else:
        mbarrier.wait(done.index(0), 0)
        for other in gl.static_range(SLICES - 1):
            acc += sums_ring.index(other).load(sums)
        store(acc, pointers, sizes, tile * HALF, 0, 0, HAS_BIAS, dtype)


@gluon.jit(do_not_specialize=["num_rows", "chunks"])
def int4_few_kernel(
    codes_desc,
    x_desc,
    meta_desc,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    padded_n,
    chunks,
    SLICES: gl.constexpr,
    CHUNKS_A_GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    if DEPENDENT:
        turn("griddepcontrol.launch_dependents; // $0")
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    descs = (codes_desc, x_desc, meta_desc)
    rings, bars = new_ring(descs, STAGES, 1, 1, 1)
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums_ring = gl.allocate_shared_memory(gl.float32, [SLICES - 1, HALF, ROWS], order)
    done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(done.index(0), count=SLICES - 1)
    tile = gl.program_id(0)
    pointers = (bias_ptr, out_ptr, out_ptr, out_ptr)
    sizes = (N, padded_n, num_rows, chunks, chunks, chunks)
    low = tile * chunks
    producer = (descs, rings, bars, low, low + chunks, sizes, CHUNKS_A_GROUP, DEPENDENT)
    common = (rings, bars, sums_ring, done, pointers, sizes, tile)
    if SLICES == 4:
        gl.warp_specialize(
            [
                (_consume, (common, 0, SLICES, HAS_BIAS)),
                (_consume, (common, 1, SLICES, HAS_BIAS)),
                (_consume, (common, 2, SLICES, HAS_BIAS)),
                (_consume, (common, 3, SLICES, HAS_BIAS)),
                (produce, producer),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (common, 0, SLICES, HAS_BIAS)),
                (_consume, (common, 1, SLICES, HAS_BIAS)),
                (produce, producer),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


@dataclass(frozen=True)
class FewShape:
    """How the kernel is specialised."""

    slices: int
    """Of a program's units: 2 or 4."""

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread: at the start, and in a slice once the producer has left its own."""
        return _REGISTERS[self.slices]

    @property
    def words(self) -> str:
        """Its name in a table."""
        return f"{self.slices} slices"

    def fits(self, outputs: int, multiprocessors: int) -> bool:
        """Tell whether each tile of a layer has a multiprocessor: others would wait for a turn."""
        return -(-outputs // _HALF) <= multiprocessors

    def stages(self, rows: int, chunk: int) -> int:
        """Return how many units the ring holds, for tiles of so many rows.

        A multiple of the slices, so that one slice takes all units of a slot: another one would not
        know in which of two phases it finds a barrier.
        """
        room = SHARED_BYTES - OTHER_SHARED_BYTES - (self.slices - 1) * 4 * _HALF * rows
        units = min(_MOST_STAGES, room // unit_bytes(_HALF, rows, chunk))
        return units // self.slices * self.slices


_HALF = 64
_MOST_STAGES = 16
"""A multiprocessor needs some 100 KB in flight where every second one has a program."""
_REGISTERS = {2: (168, 232), 4: (96, 112)}

CANDIDATES: dict[int, tuple[FewShape, ...]] = {
    16: (FewShape(4), FewShape(2)),
    32: (FewShape(4), FewShape(2)),
}
"""By the rows of the tile, ascending: what a plan or a sweep may try."""

MOST_ROWS = max(CANDIDATES)


def int4_few(
    x_TI: Tensor,
    weight: PackedInt4,
    bias_O: Tensor | None,
    *,
    shape: FewShape | None = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype; sums are float32.

    Args:
        x_TI: Contiguous; 1 to `MOST_ROWS` rows, bfloat16 or float16, at a multiple of 16 bytes.
        weight: On x's device, a Hopper GPU.
        bias_O: In x's dtype, or none.
        shape: Instead of the usual one.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    rows = x_TI.shape[0]
    chunks, padded, _ = weight.codes.shape
    block_m = next(size for size in CANDIDATES if rows <= size)
    shape = shape or CANDIDATES[block_m][0]
    registers, slice_registers = shape.registers
    if out_TO is None:
        out_TO = torch.empty(rows, weight.outputs, dtype=x_TI.dtype, device=x_TI.device)
    codes, x, meta = descriptors(x_TI, weight, _HALF, block_m, weight.chunk)
    int4_few_kernel[(-(-weight.outputs // _HALF),)](
        codes,
        x,
        meta,
        x_TI if bias_O is None else bias_O,
        out_TO,
        rows,
        weight.outputs,
        padded,
        chunks,
        SLICES=shape.slices,
        CHUNKS_A_GROUP=weight.chunks_a_group,
        HAS_BIAS=bias_O is not None,
        STAGES=shape.stages(block_m, weight.chunk),
        REGISTERS=slice_registers,
        **launch_options(),
        num_warps=4,
        maxnreg=registers,
    )
    return out_TO
