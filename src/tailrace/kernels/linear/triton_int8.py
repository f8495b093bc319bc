"""Products of int8 rows and an int8 weight in Triton, for prompts: exact sums, scaled once.

    y[m, n] = (sum over k of x8[m, k] * w8[n, k]) * x_scale[m] * w_scale[n] + bias[n]

The sum is int32, and exact: 127 * 127 * K stays below 2^31 up to K = 133,143. So a result depends
on its own row and output alone, whatever the tiles.

Persistent programs walk over the tiles of the result, in bands of rows so that those who run
together share weights in the L2 cache. On Hopper tiles come through tensor descriptors, and the
next tile's first loads are under way while a tile is scaled and stored (`flatten`); before Hopper
they come through pointers, one program a tile.

    x8 [M, K]  --- [BLOCK_M, BLOCK_K] --.
                                        dot -> acc int32 [BLOCK_M, BLOCK_N] -> scaled -> out
    w8 [N, K]  --- [BLOCK_N, BLOCK_K] --'       both with k along memory: what wgmma takes in int8
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tailrace.errors import EngineError
from tailrace.kernels.attention_shapes import INTERPRETER
from tailrace.kernels.linear.ways import MANY, Ways
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.attention_shapes import Capability
    from tailrace.kernels.linear.int8 import Int8Weight
    from tailrace.kernels.linear.int8_rows import Int8Rows


@triton.jit
def _load(
    source, low, begin, limit, K,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Return rows `low`.., columns `begin`.. of a matrix [limit, K]; beyond them lie zeros."""
    if BY_DESCRIPTOR:
        tile = source.load([low, begin])
    else:
        rows = low + tl.arange(0, BLOCK)
        columns = begin + tl.arange(0, BLOCK_K)
        tile = tl.load(
            source + rows.to(tl.int64)[:, None] * K + columns[None, :],
            mask=(rows < limit)[:, None] & (columns < K)[None, :],
            other=0,
        )
    return tile


@triton.jit(do_not_specialize=["num_rows", "programs"])
def int8_kernel(
    x,
    w,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    tiles = row_tiles * column_tiles
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=BY_DESCRIPTOR):
        band = tile // (GROUP_M * column_tiles)
        band_rows = min(row_tiles - band * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * column_tiles)
        row = (band * GROUP_M + within % band_rows) * BLOCK_M
        column = (within // band_rows) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for step in tl.range(steps, num_stages=STAGES):
            begin = step * BLOCK_K
            x8 = _load(x, row, begin, num_rows, K, BLOCK_M, BLOCK_K, BY_DESCRIPTOR)
            w8 = _load(w, column, begin, N, K, BLOCK_N, BLOCK_K, BY_DESCRIPTOR)
            acc = tl.dot(x8, w8.T, acc, out_dtype=tl.int32)
        rows = row + tl.arange(0, BLOCK_M)
        outputs = column + tl.arange(0, BLOCK_N)
        is_row = rows < num_rows
        is_output = outputs < N
        x_scale = tl.load(x_scale_ptr + rows, mask=is_row, other=0.0)
        w_scale = tl.load(w_scale_ptr + outputs, mask=is_output, other=0.0)
        y = acc.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
            y += bias.to(tl.float32)[None, :]
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * N + outputs[None, :],
            y.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & is_output[None, :],
        )


_WARPS_OF_TWO = 4
"""Most warps of a program beside which another runs, at up to 255 registers a thread."""
_SHARED_BYTES, _OTHER_SHARED_BYTES = 227 * 1024, 12 * 1024
"""Of a multiprocessor, and of a program beside its stages: results in order, barriers, the rest."""


@dataclass(frozen=True)
class Int8Shape:
    """How the kernel is specialised for a number of rows."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def words(self) -> str:
        """Its name in a plan."""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{tile}, {self.num_warps} warps, {self.num_stages} stages"

    @property
    def programs(self) -> int:
        """How many run on a Hopper multiprocessor: 2 where memory and registers are enough.

        While one waits for its product, which Triton has it do for sums of int32, the other
        multiplies.
        """
        ring = self.num_stages * (self.block_m + self.block_n) * self.block_k
        if self.num_warps > _WARPS_OF_TWO or 2 * (ring + _OTHER_SHARED_BYTES) > _SHARED_BYTES:
            return 1
        return 2


HOPPER: tuple[tuple[int, Int8Shape], ...] = (
    (64, Int8Shape(64, 64, 256, 4, 4)),
    (256, Int8Shape(128, 128, 128, 4, 4)),
    (1 << 30, Int8Shape(128, 256, 128, 8, 3)),
)
OTHERS: tuple[tuple[int, Int8Shape], ...] = (
    (64, Int8Shape(64, 64, 128, 4, 4)),
    (1 << 30, Int8Shape(128, 128, 128, 8, 3)),
)
"""(Up to so many rows, shape), ascending; compiled without a spill, not yet measured."""
SHAPES_TO_TIME = tuple(
    Int8Shape(*sizes)
    for sizes in (
        (64, 64, 128, 4, 4), (64, 64, 256, 4, 4), (64, 128, 128, 4, 5), (64, 128, 256, 4, 4),
        (64, 256, 128, 4, 4), (128, 64, 128, 4, 5), (128, 128, 128, 4, 3), (128, 128, 128, 4, 4),
        (128, 128, 128, 8, 4), (128, 128, 256, 8, 3), (128, 256, 64, 8, 4),
        (128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (256, 64, 128, 8, 4),
    )
)  # fmt: skip
"""What `benchmarks/gpu_gemm.py --sweep` tries on Hopper."""

_NARROW = (Int8Shape(64, 64, 128, 4, 4), Int8Shape(64, 128, 128, 4, 5))
_MIDDLE = (Int8Shape(64, 128, 128, 4, 5), Int8Shape(128, 64, 128, 4, 5))
_WIDE = (
    Int8Shape(128, 128, 128, 4, 4),
    Int8Shape(128, 128, 128, 8, 4),
    Int8Shape(256, 128, 128, 8, 3),
)
HOPPER_CANDIDATES = {64: _NARROW, 128: _MIDDLE, 256: _MIDDLE, 512: _WIDE, MANY: _WIDE}
"""What a plan may choose beside `HOPPER`'s shapes, by classes of rows. Elsewhere it chooses among
those of `OTHERS`."""

GROUP_M = 8
_DESCRIPTORS = 9
"""The generation of GPUs (Hopper) whose wgmma and descriptors the kernel is written for."""


def shape_of(rows: int, capability: Capability) -> Int8Shape:
    """Return how a product of so many rows is computed."""
    shapes = HOPPER if capability[0] == _DESCRIPTORS else OTHERS
    return next(shape for most, shape in shapes if rows <= most)


def ways(capability: Capability) -> tuple[Ways[Int8Shape]]:
    """Return what can serve a layer: sums of whole numbers are exact, however they are cut."""
    is_hopper = capability[0] == _DESCRIPTORS
    options = {}
    for most_rows, more in HOPPER_CANDIDATES.items():
        others = more if is_hopper else tuple(shape for _, shape in OTHERS)
        shapes = (shape_of(most_rows, capability), *others)
        options[most_rows] = {shape.words: shape for shape in shapes}
    return (Ways(options, many_rows=2048, is_exact=True),)


def int8_product(
    x: Int8Rows,
    weight: Int8Weight,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    out_TO: Tensor | None = None,
    shape: Int8Shape | None = None,
    by_descriptor: bool | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in `dtype`; see `int8_rows.int8_product`.

    Args:
        x: Rows, at least one.
        weight: On x's device.
        bias_O: In any float dtype, or none.
        dtype: Of the result: bfloat16 or float16 (float32 in tests).
        out_TO: Where to write it, such as some rows of a larger result; contiguous, in `dtype`.
        shape: Instead of the one for these rows and this GPU.
        by_descriptor: Instead of what this GPU has.

    Raises:
        EngineError: `out_TO` is of another shape or dtype, or not contiguous.
    """
    rows, inputs = x.values.shape
    outputs = weight.shape[0]
    device = x.values.device
    if out_TO is None:
        out_TO = torch.empty(rows, outputs, dtype=dtype, device=device)
    elif (*out_TO.shape, out_TO.dtype) != (rows, outputs, dtype) or not out_TO.is_contiguous():
        raise EngineError(
            f"int8 product into {out_TO.dtype} {list(out_TO.shape)}: must be contiguous, {dtype} "
            f"{[rows, outputs]}"
        )
    capability = capability_of(device)
    shape = shape or shape_of(rows, capability)
    if by_descriptor is None:
        by_descriptor = capability[0] == _DESCRIPTORS
    tiles = triton.cdiv(rows, shape.block_m) * triton.cdiv(outputs, shape.block_n)
    programs = tiles
    if by_descriptor:
        programs = min(tiles, shape.programs * multiprocessors(device))
    x8: Tensor | TensorDescriptor = x.values
    w8: Tensor | TensorDescriptor = weight.values
    if by_descriptor:
        x8 = TensorDescriptor.from_tensor(x8, [shape.block_m, shape.block_k])
        w8 = TensorDescriptor.from_tensor(w8, [shape.block_n, shape.block_k])
    int8_kernel[(programs,)](
        x8,
        w8,
        x.scales,
        weight.scales,
        out_TO if bias_O is None else bias_O,
        out_TO,
        rows,
        outputs,
        inputs,
        programs,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        GROUP_M=GROUP_M,
        BY_DESCRIPTOR=by_descriptor,
        HAS_BIAS=bias_O is not None,
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out_TO


@lru_cache(maxsize=16)
def capability_of(device: torch.device) -> Capability:
    """Return what shapes are chosen for; the interpreter stands in for Hopper."""
    if device.type != "cuda":
        return INTERPRETER
    return torch.cuda.get_device_capability(device)
