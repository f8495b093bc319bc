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
from tailrace.kernels.linear.ways import Ways
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tailrace.kernels.linear.float8 import Float8Weight
    from tailrace.kernels.linear.float8_rows import Float8Rows
    from tailrace.kernels.linear.workspace import SplitScratch

Shape = FewFloat8Shape | HopperFloat8Shape

TRITON = "Triton"
"""In `SERVED`: the shape that Triton's own table has."""

_SLICES, _PAIRS = "FP8 Hopper 64 outputs, 2 slices", "FP8 Hopper 128/8/1/4 pairs"
SERVED: tuple[tuple[int, int, tuple[str, str, str, str]], ...] = (
    (132 * 64 + 1, 0, (TRITON, TRITON, _PAIRS, _PAIRS)),
    (0, 40_000_000, (_SLICES, _SLICES, _SLICES, _PAIRS)),
    (0, 0, (_SLICES,) * 4),
)
"""What serves without a plan: the least outputs and weights of a layer, the first line that holds;
and by up to 16, 32, 64 and 128 rows a name as a plan and gpu_float8.py have it.

More tiles of 64 outputs than multiprocessors, for which slices would wait; few outputs of many
inputs; and the rest. A name that does not fit a layer (`options`) leaves it to Triton's.

Seen on an H200 (gpu_float8.py, 2026-11-30), a scale an output, microseconds by Triton's / this line
/ by dependent launches (kernels/dependent_launch.py), as captured steps of decodes may be:

    rows            16                  32                  64                  128
    gate_up   41.3/41.3/37.3   37.6/37.6/40.0   41.3/43.5/42.3   52.1/48.8/48.4     37888 x 3584
    down      25.2/22.3/21.9   28.9/22.9/22.5   35.3/25.1/24.5   37.7/33.8/32.5     3584 x 18944
    qkv        8.9/ 8.2/ 7.5   10.5/ 8.4/ 7.5   13.5/ 8.9/ 8.1   15.6/11.3/10.0     4608 x 3584
    o          8.2/ 7.2/ 6.2    9.4/ 7.4/ 6.3   12.1/ 8.2/ 6.8   15.3/10.8/ 8.9     3584 x 3584

By blocks of 128 x 128, which were timed at 64 rows alone: gate_up 56.6/45.2/44.0, down 34.7/33.8/
32.9 (30.0 and 27.6 by runs, which would lose by channels), qkv 13.1/10.1/8.7, o 12.0/9.6/7.7.
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
