"""A linear layer of few rows in Triton: the weight is streamed once, and that is all that counts.

With few rows a product is bound by the weight's bytes. The matrix is the left operand
of `tl.dot`, so that its outputs fill the tensor core's wide side and the few rows the narrow one:

    acc [BLOCK_N outputs, BLOCK_M rows] += w [BLOCK_N, BLOCK_K] @ x.T [BLOCK_K, BLOCK_M]

Layers with few outputs split the inputs among SPLITS programs, or most multiprocessors would idle.
Each writes its part; who comes last adds them up, always in the same order. A row's result depends
on the tile sizes and on nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import (
    AHEAD,
    LINE_BYTES,
    launch_options,
    let_next_start,
    prefetch,
    wait_for_last,
)
from tailrace.kernels.linear.triton_split_sum import added_parts, arrives_last
from tailrace.kernels.linear.ways import Ways
from tailrace.kernels.linear.workspace import SplitScratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.linear.cublas import CublasLinear
    from tailrace.kernels.linear.workspace import Workspace

MOST_ROWS, MOST_SPLIT_ROWS = 32, 16
"""Beyond them cuBLAS is as fast or faster, sooner where inputs are split: see
benchmarks/gpu_skinny.py."""

ROW_CLASSES = (MOST_SPLIT_ROWS, MOST_ROWS)
"""Most rows of each class that a plan chooses a kernel for; with Hopper's own there are more."""

_MOST_TILES = 128
"""A layer of fewer tiles leaves multiprocessors idle, so its inputs are split."""


@dataclass(frozen=True)
class SkinnyShape:
    """How the kernel is specialised."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


WHOLE = SkinnyShape(64, 128, 1, 4, 3)
SPLIT = SkinnyShape(64, 128, 4, 4, 3)


CUBLAS = "cuBLAS"
NAMES: dict[str, SkinnyShape | None] = {
    CUBLAS: None,
    "Triton": WHOLE,
    "Triton, inputs split": SPLIT,
}
"""What serves few rows, as plans call it."""


def skinny_shape(outputs: int) -> SkinnyShape:
    """Return the shape for a layer of so many outputs, as measured on an H200."""
    return SPLIT if triton.cdiv(outputs, SPLIT.block_n) < _MOST_TILES else WHOLE


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals,
    num_rows,
    N,
    K,
    span,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_start(DEPENDENT)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    is_output = outputs < N
    is_row = rows < num_rows
    low = split * span
    w_rows = w_ptr + outputs.to(tl.int64)[:, None] * K
    x_rows = x_ptr + rows[None, :] * K
    if DEPENDENT:
        line: tl.constexpr = LINE_BYTES * 8 // w_ptr.dtype.element_ty.primitive_bitwidth
        early = low + tl.arange(0, AHEAD * BLOCK_K // line) * line
        known = tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * K
        prefetch(w_ptr + known + tl.minimum(early, K - 1)[None, :], DEPENDENT)
        wait_for_last(DEPENDENT)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(low, min(low + span, K), BLOCK_K):
        columns = start + inner
        is_column = columns < K
        w = tl.load(
            w_rows + columns[None, :],
            mask=is_output[:, None] & is_column[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(
            x_rows + columns[:, None],
            mask=is_column[:, None] & is_row[None, :],
            other=0.0,
            eviction_policy="evict_last",
        )
        acc = tl.dot(w, x, acc, input_precision="ieee")
    places = rows[None, :] * N + outputs[:, None]
    is_place = is_output[:, None] & is_row[None, :]
    if SPLITS > 1:
        size = num_rows * N
        if not arrives_last(acc, part_ptr, arrivals, tile, split, SPLITS, size, places, is_place):
            return
        acc = added_parts(part_ptr, arrivals, tile, SPLITS, size, places, is_place)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=is_place)


class SkinnyScratch(SplitScratch):
    """Scratch whose size is known before any layer is; one serves all layers of a stream."""

    @classmethod
    def allocate(
        cls, device: torch.device | str, values: int = 0, tiles: int = _MOST_TILES
    ) -> SkinnyScratch:
        """Make scratch for so many values and tiles; by default what `skinny_shape` needs."""
        values = values or SPLIT.splits * MOST_SPLIT_ROWS * _MOST_TILES * SPLIT.block_n
        return cls(
            torch.empty(values, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )


def padded_rows(rows: int) -> int:
    """Return the rows of the tile that serves `rows`: a power of two, 16 at least."""
    return max(16, 1 << (rows - 1).bit_length())


def skinny_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    shape: SkinnyShape,
    scratch: SkinnyScratch,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype; sums are float32.

    Args:
        x_TI: Contiguous; more rows than `MOST_ROWS` are right too, but slow.
        weight_OI: As x, contiguous.
        bias_O: Or none.
        shape: Tile sizes and splits.
        scratch: Large enough for splits x T x O values and the tiles of O.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    rows, inputs = x_TI.shape
    outputs = weight_OI.shape[0]
    if out_TO is None:
        out_TO = torch.empty(rows, outputs, dtype=x_TI.dtype, device=x_TI.device)
    tiles = triton.cdiv(outputs, shape.block_n)
    span = triton.cdiv(triton.cdiv(inputs, shape.splits), shape.block_k) * shape.block_k
    skinny_kernel[(tiles, shape.splits)](
        x_TI,
        weight_OI,
        x_TI if bias_O is None else bias_O,
        out_TO,
        scratch.parts,
        scratch.arrivals,
        rows,
        outputs,
        inputs,
        span,
        BLOCK_M=padded_rows(rows),
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        SPLITS=shape.splits,
        HAS_BIAS=bias_O is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out_TO


def few_options(outputs: int) -> dict[int, dict[str, SkinnyShape | None]]:
    """Return what can serve few rows of a layer by classes of them, by names; None is cuBLAS.

    What was measured on an H200 comes first. Where the scratch has no room for split sums, they are
    no option.
    """
    usual = skinny_shape(outputs)
    first = (usual, usual if usual == WHOLE else None)
    options = {}
    for most_rows, serving in zip(ROW_CLASSES, first, strict=True):
        fits = most_rows <= MOST_SPLIT_ROWS and usual == SPLIT
        names = {name: shape for name, shape in NAMES.items() if shape != SPLIT or fits}
        options[most_rows] = dict(sorted(names.items(), key=lambda item: item[1] != serving))
    return options


class SkinnyLinear:
    """A cuBLAS layer that serves few rows by this kernel, or by another one for Hopper.

    Args:
        many: The layer; its weight is used in place.
        scratch: Of the stream that all its products run on.
        workspace: Likewise, for Hopper's kernel; None: that is no option.
    """

    operation = "linear"
    has_hopper = False
    """Whether few rows may go by Hopper's kernel."""

    def __init__(
        self, many: CublasLinear, scratch: SkinnyScratch, workspace: Workspace | None = None
    ) -> None:
        self._many = many
        self._scratch = scratch
        self.bias_O = many.bias_O
        outputs, inputs = many.sizes
        self._few: Ways[object] = Ways(few_options(outputs))
        self._multiply_few: Callable[..., Tensor] = skinny_linear
        if workspace is not None:
            from tailrace.kernels.linear import (  # noqa: PLC0415 - see has_hopper_kernel
                hopper_half_ways,
                triton_hopper_half,
            )

            if triton_hopper_half.takes(many.weight_OI):
                layer = outputs, inputs, workspace.device
                self._few = hopper_half_ways.ways(*layer)
                self._multiply_few = partial(hopper_half_ways.multiply, workspace=workspace)
                self.has_hopper = True
                room = hopper_half_ways.room(*layer)
                workspace.reserve(outputs=outputs, splits=1, rows=self._few.classes[-1], **room)
        self.planned = (self._few,)

    @property
    def name(self) -> str:
        """How it computes."""
        shapes = {rows: self._few.of(rows) for rows in self._few.classes}
        most_rows = {  # of each kernel the last
            "Triton" if isinstance(shape, SkinnyShape) else "Hopper's": rows
            for rows, shape in shapes.items()
            if shape is not None
        }
        served = [f", {kernel} up to {rows} rows" for kernel, rows in most_rows.items()]
        return self._many.name + "".join(served)

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._many.sizes

    @property
    def plain(self) -> CublasLinear:
        """The layer as cuBLAS has it: weight and bias."""
        return self._many

    def weight_rows(self, first: int, end: int) -> Tensor:
        """See `PlannedLinear.weight_rows`."""
        return self._many.weight_OI[first:end].float()

    def given(self, x_TI: Tensor) -> Tensor:
        """See `PlannedLinear.given`."""
        return x_TI

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self._many.nbytes

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O] in the weight's dtype."""
        shape = self._shape_for(x_TI.shape[0])
        return self._many(x_TI) if shape is None else self._multiply(x_TI, shape)

    def write(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """See `DeviceLinear.write`."""
        shape = self._shape_for(x_TI.shape[0])
        if shape is None:
            self._many.write(x_TI, out_TO)
        else:
            self._multiply(x_TI, shape, out_TO)

    def _multiply(self, x_TI: Tensor, shape: object, out_TO: Tensor | None = None) -> Tensor:
        return self._multiply_few(
            x_TI,
            self._many.weight_OI,
            self.bias_O,
            shape=shape,
            scratch=self._scratch,
            out_TO=out_TO,
        )

    def _shape_for(self, rows: int) -> object:
        return self._few.of(rows) if 0 < rows <= self._few.classes[-1] else None
