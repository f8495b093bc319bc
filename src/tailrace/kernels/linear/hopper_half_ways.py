"""What can multiply few rows by a weight in half precision on a Hopper GPU, and which of it serves.

    None              cuBLAS
    SkinnyShape       tiles of Triton's kernel, `triton_skinny`, up to 32 rows
    HopperHalfShape   `triton_hopper_half`: runs of units, or whole tiles

All add in float32, each in an order of its own: within a class of rows a row's result by ours
depends on nothing beside it, and the last bits may differ from one class to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.kernels.linear.triton_hopper_half import (
    CANDIDATES,
    HopperHalfShape,
    half_hopper,
    reserved,
)
from tailrace.kernels.linear.triton_skinny import CUBLAS, SkinnyShape, few_options, skinny_linear
from tailrace.kernels.linear.ways import Ways
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tailrace.kernels.linear.triton_skinny import SkinnyScratch
    from tailrace.kernels.linear.workspace import Workspace

Shape = SkinnyShape | HopperHalfShape

ELSEWHERE = "as elsewhere"
"""In `SERVED`: what serves on other GPUs, cuBLAS beyond 32 rows."""

_SLICES, _PAIRS = "Hopper 64x128, 2 slices", "Hopper 128x64/4/1/8 pairs"
SERVED: tuple[tuple[int, int, tuple[str, str, str, str]], ...] = (
    (132 * 64 + 1, 0, (ELSEWHERE, ELSEWHERE, _PAIRS, ELSEWHERE)),
    (4097, 0, (_SLICES, _SLICES, ELSEWHERE, ELSEWHERE)),
    (0, 40_000_000, (_SLICES, _SLICES, ELSEWHERE, ELSEWHERE)),
    (0, 0, (_SLICES, _SLICES, _SLICES, ELSEWHERE)),
)
"""What serves without a plan, unless --decode-kernels triton leaves it out: the least outputs and
weights of a layer, the first line that holds; and by up to 16, 32, 64 and 128 rows a name as a plan
and gpu_half.py have it.

More tiles of 64 outputs than multiprocessors, for which slices would wait; and by sizes the rest.
A name that does not fit a layer leaves it as elsewhere.

Seen on an H200 (gpu_half.py, 2026-11-30), microseconds by cuBLAS / Triton's / Hopper's own, plainly
/ by dependent launches:

    rows             16                    32               50             64
    head     263/251/254/253       266/256/261/259    270/264/262    273/264/263     152064 x 3584
    gate_up  73.3/66.1/69.9/68.6   74.0/67.9/71/70    73.5/73.1/72   74.6/73.7/73     37888 x 3584
    down     40.0/38.3/36.2/36.1   40.1/68.6/38/37    41.4/42.6/42   41.0/42.9/42     3584 x 18944
    qkv      11.2/12.2/11.7/10.6   11.4/15.5/12/11    11.0/12.6/12   11.4/12.2/12      4608 x 3584
    o        11.6/ 9.9/ 9.6/ 8.7   11.8/14.7/10/ 9    10.2/11.4/10    9.8/11.2/10      3584 x 3584

At 128 rows cuBLAS wins everywhere, by 2 (head) to 60 % (o).
"""


def served(outputs: int, inputs: int) -> tuple[str, str, str, str]:
    """Return the names of `SERVED` for a layer."""
    return next(
        names
        for least_outputs, least_weights, names in SERVED
        if outputs >= least_outputs and outputs * inputs >= least_weights
    )


def ways(outputs: int, inputs: int, device: torch.device) -> Ways[object]:
    """Return what can serve a layer up to 128 rows, by classes of them.

    Args:
        outputs: Of the layer.
        inputs: Likewise.
        device: A Hopper GPU.
    """
    count = multiprocessors(device)
    names = zip(CANDIDATES, served(outputs, inputs), strict=True)
    classes = {most_rows: options(outputs, most_rows, name, count) for most_rows, name in names}
    return Ways(classes, compiles_long=True)


def options(outputs: int, most_rows: int, name: str, count: int) -> dict[str, Shape | None]:
    """Return what can serve a class of rows, by its names, what serves without a plan first.

    Args:
        outputs: Of the layer; whole tiles are for layers that they fit.
        most_rows: Of the class.
        name: What serves; what does elsewhere, where it fits no such layer.
        count: Multiprocessors.
    """
    usual: dict[str, SkinnyShape | None] = few_options(outputs).get(most_rows, {CUBLAS: None})
    fitting = {s.words: s for s in CANDIDATES[most_rows] if s.fits(outputs, count)}
    found: dict[str, Shape | None] = {**usual, **fitting}
    first = name if name in found else next(iter(usual))
    return {first: found[first]} | found


def room(outputs: int, inputs: int, device: torch.device) -> dict[str, int]:
    """Return what a workspace is to reserve, `parts` and `arrivals`, for whatever may serve."""
    parts, arrivals = reserved(outputs, inputs, multiprocessors(device))
    return {"parts": parts, "arrivals": arrivals}


def multiply(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    shape: Shape,
    scratch: SkinnyScratch,
    workspace: Workspace,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype, by the kernel of a shape.

    Args:
        x_TI: Contiguous; rows of the shape's class.
        weight_OI: As x, contiguous.
        bias_O: Or none.
        shape: An option of the layer and the rows.
        scratch: For Triton's kernel.
        workspace: For Hopper's, with `room` for the layer.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    if isinstance(shape, SkinnyShape):
        return skinny_linear(x_TI, weight_OI, bias_O, shape=shape, scratch=scratch, out_TO=out_TO)
    return half_hopper(
        x_TI, weight_OI, bias_O, shape=shape, scratch=workspace.scratch, out_TO=out_TO
    )
