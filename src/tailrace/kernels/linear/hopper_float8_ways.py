"""What can multiply few FP8 rows by an FP8 weight on a Hopper GPU, and which of it serves.

    FewFloat8Shape      tiles of Triton's kernel, `triton_float8_few`
    HopperFloat8Shape   `triton_hopper_float8`: runs of units, or slices of a tile's inputs

Both multiply what is stored, and add chunks of 128 inputs in float32, each shape in an order of its
own: within a class of rows a row's result depends on nothing beside it, and the last bits may
differ from one class to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.kernels.linear.float8 import BLOCK
from tailrace.kernels.linear.triton_float8_few import FewFloat8Shape, few_options, float8_few
from tailrace.kernels.linear.triton_hopper_float8 import (
    CANDIDATES,
    HopperFloat8Shape,
    float8_hopper,
    reserved,
)
from tailrace.kernels.linear.triton_hopper_ring import multiprocessors
from tailrace.kernels.linear.ways import Ways

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tailrace.kernels.linear.float8 import Float8Weight
    from tailrace.kernels.linear.float8_rows import Float8Rows
    from tailrace.kernels.linear.workspace import SplitScratch

Shape = FewFloat8Shape | HopperFloat8Shape

TRITON = "Triton"
"""In `SERVED`: the shape that Triton's own table has."""

SERVED: tuple[tuple[int, int, tuple[str, str, str, str]], ...] = ((0, 0, (TRITON,) * 4),)
"""What serves without a plan: the least outputs and weights of a layer, the first line that holds;
and by up to 16, 32, 64 and 128 rows a name as a plan and gpu_float8.py have it.

Triton's everywhere until an H200 has been asked. A name that does not fit a layer (`options`)
leaves it to Triton's.
"""


def served(outputs: int, inputs: int) -> tuple[str, str, str, str]:
    """Return the names of `SERVED` for a layer."""
    return next(
        names
        for least_outputs, least_weights, names in SERVED
        if outputs >= least_outputs and outputs * inputs >= least_weights
    )


def ways(outputs: int, inputs: int, device: torch.device) -> Ways[object]:
    """Return what can serve a layer up to 128 rows that come rounded, by classes of them.

    Args:
        outputs: Of the layer.
        inputs: Likewise.
        device: A Hopper GPU.
    """
    count = multiprocessors(device)
    tiles = few_options(_HOPPER)
    names = served(outputs, inputs)
    classes = {
        most_rows: options(outputs, most_rows, name, tiles[most_rows], count)
        for most_rows, name in zip(tiles, names, strict=True)
    }
    return Ways(classes, compiles_long=True)


_HOPPER = (9, 0)


def options(
    outputs: int, most_rows: int, name: str, tiles: dict[str, FewFloat8Shape], count: int
) -> dict[str, Shape]:
    """Return what can serve a class of rows, by its names, what serves without a plan first.

    Args:
        outputs: Of the layer; slices are for layers of which each tile has a multiprocessor.
        most_rows: Of the class.
        name: What serves; `TRITON` where it fits no such layer.
        tiles: Triton's, the usual one first.
        count: Multiprocessors.
    """
    fitting = {s.words: s for s in CANDIDATES[most_rows] if s.fits(outputs, count)}
    found: dict[str, Shape] = {**tiles, **fitting}
    first = name if name in found else next(iter(tiles))
    return {first: found[first]} | found


def room(outputs: int, inputs: int, device: torch.device) -> dict[str, int]:
    """Return what a workspace is to reserve, `parts` and `arrivals`, for whatever may serve."""
    parts, arrivals = reserved(outputs, -(-inputs // BLOCK), multiprocessors(device))
    return {"parts": parts, "arrivals": arrivals}


def multiply(
    x: Float8Rows,
    weight: Float8Weight,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    scratch: SplitScratch,
    shape: Shape,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in `dtype`, by the kernel of a shape.

    Args:
        x: Rows of the shape's class, in groups of 128 where the weight is scaled by blocks, else
            with one scale a row.
        weight: On x's device, of scheme "channel" or "block128".
        bias_O: In `dtype`, or none.
        dtype: Of the result.
        scratch: Large enough for the layer: `room`, and what `few_splits` asks for.
        shape: An option of the layer and the rows.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    if isinstance(shape, FewFloat8Shape):
        return float8_few(x, weight, bias_O, dtype, scratch=scratch, shape=shape, out_TO=out_TO)
    return float8_hopper(x, weight, bias_O, dtype, scratch=scratch, shape=shape, out_TO=out_TO)
