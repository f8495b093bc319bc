"""What can multiply few rows by 4-bit codes on a Hopper GPU, and which of it serves.

    Int4Shape      tiles of Triton's kernel, `triton_int4`
    HopperShape    `triton_hopper_int4`: sides that unpack, multiply, and scale by themselves
    BandShape      `triton_hopper_int4_bands`: a product in flight while others are unpacked
    FewShape       `triton_hopper_int4_few`: up to 32 rows, inputs split within a program

All multiply whole numbers, and scale sums in float32: no weight is rounded, so a plan may choose
among them. Each shape of Hopper's cuts sums at places of its own: within a class of rows a row's
result depends on nothing beside it, and the last bits may differ from one class to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.kernels.linear.triton_hopper_int4 import CANDIDATES as HOPPER
from tailrace.kernels.linear.triton_hopper_int4 import (
    HopperShape,
    int4_hopper,
    reserved_parts,
)
from tailrace.kernels.linear.triton_hopper_int4_bands import CANDIDATES as BANDS
from tailrace.kernels.linear.triton_hopper_int4_bands import (
    BandShape,
    int4_bands,
    reserved,
)
from tailrace.kernels.linear.triton_hopper_int4_few import CANDIDATES as FEW
from tailrace.kernels.linear.triton_hopper_int4_few import FewShape, int4_few
from tailrace.kernels.linear.triton_int4 import TILES, Int4Shape, int4_linear, tile_options
from tailrace.kernels.linear.ways import Ways
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.workspace import SplitScratch

Shape = Int4Shape | HopperShape | BandShape | FewShape

TRITON = "Triton"
"""In `SERVED`: the shape that Triton's own table has."""

_PAIRS = ("1/2/7 pair", "1/2/7 pair", "1/2/7 pair", "128/8/1/4 whole")
SERVED: tuple[tuple[int, int, tuple[str, str, str, str]], ...] = (
    (132 * 64 + 1, 0, _PAIRS),
    (0, 40_000_000, _PAIRS),
    (0, 14_000_000, ("4 slices", "4 slices", "128/8/1/4 whole", "128/8/1/4 whole")),
    (0, 0, ("4 slices", "4 slices", "1/2/7 pair", "128/8/1/7 whole")),
)
"""What serves without a plan: the least outputs and weights of a layer, the first line that holds;
and by up to 16, 32, 64 and 128 rows a name as a plan and gpu_int4.py have it.

More tiles of 64 outputs than multiprocessors, for which slices would wait; few outputs of many
inputs, which a slice takes too long for; and of the rest, weights between those of o, 12.8 million,
and qkv, 16.5. A name that does not fit a layer (`options`) leaves it to Triton's.

Seen on an H200 (gpu_int4.py, 2026-11-30), microseconds by Triton's / this line / by dependent
launches (kernels/dependent_launch.py), as captured steps of decodes are:

    rows            16                  32                  64                   128
    gate_up   31.1/31.7/28.9   37.5/31.6/31.3   58.2/40.0/40.2   102.9/68.9/68.4     37888 x 3584
    down      21.0/20.5/18.4   23.6/21.9/20.1   33.1/27.8/26.9    63.4/41.5/40.5     3584 x 18944
    qkv        9.2/ 8.2/ 7.1   10.5/ 8.9/ 7.9   14.8/13.0/12.1    28.8/17.5/16.5     4608 x 3584
    o          8.3/ 7.9/ 6.2    9.3/ 8.8/ 7.1   12.1/10.7/11.7    19.0/16.2/    -    3584 x 3584
"""


def served(outputs: int, inputs: int) -> tuple[str, str, str, str]:
    """Return the names of `SERVED` for a layer."""
    return next(
        names
        for least_outputs, least_weights, names in SERVED
        if outputs >= least_outputs and outputs * inputs >= least_weights
    )


def ways(weight: PackedInt4, device: torch.device) -> Ways[object]:
    """Return what can serve a layer up to 128 rows, by the usual classes of them.

    Args:
        weight: Of the layer.
        device: A Hopper GPU.
    """
    count = multiprocessors(device)
    names = served(weight.outputs, weight.inputs)
    tiles = tile_options(weight.outputs * weight.inputs)
    classes = {
        most_rows: options(weight, most_rows, name, tiles[most_rows], count)
        for most_rows, name in zip(tiles, names, strict=True)
    }
    return Ways(classes, compiles_long=True)


def options(
    weight: PackedInt4, most_rows: int, name: str, tiles: dict[str, Int4Shape], count: int
) -> dict[str, Shape]:
    """Return what can serve a class of rows, by its names, what serves without a plan first.

    All are a plan's to choose: of the sides' orders of products only "pair", for the others were
    nowhere faster, and slices where each tile has a multiprocessor.

    Args:
        weight: Of the layer.
        most_rows: Of the class.
        name: What serves; `TRITON` where it fits no such layer.
        tiles: Triton's, the usual one first.
        count: Multiprocessors.
    """
    hoppers = [shape for shape in HOPPER[most_rows] if shape.fits(weight.codes.shape[0])]
    few = [shape for shape in FEW.get(most_rows, ()) if shape.fits(weight.outputs, count)]
    pairs = [shape for shape in hoppers if shape.order == "pair"]
    asked: tuple[Shape, ...] = (*pairs, *BANDS[most_rows], *few)
    found: dict[str, Shape] = {**tiles, **{shape.words: shape for shape in asked}}
    known = found | {shape.words: shape for shape in hoppers}
    first = name if name in known else next(iter(tiles))
    return {first: known[first]} | found


def room(weight: PackedInt4, device: torch.device) -> dict[str, int]:
    """Return what a workspace is to reserve, `parts` and `arrivals`, for whatever may serve."""
    layer = weight.outputs, weight.codes.shape[0], device
    parts, arrivals = reserved(*layer)
    return {"parts": max(parts, reserved_parts(*layer)), "arrivals": arrivals}


def kernel_words(shape: object) -> str:
    """Say whose a shape is, after a layer's "Triton 4 bits"."""
    if isinstance(shape, HopperShape):
        return "for Hopper"
    if isinstance(shape, FewShape):
        return "for Hopper in slices"
    if isinstance(shape, BandShape):
        return "for Hopper in bands"
    return TILES


def multiply(
    x_TI: Tensor,
    weight: PackedInt4,
    bias_O: Tensor | None,
    *,
    scratch: SplitScratch,
    shape: Shape,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype, by the kernel of a shape.

    Args:
        x_TI: Contiguous; bfloat16 or float16, at a multiple of 16 bytes, rows of the shape's class.
        weight: On x's device.
        bias_O: In x's dtype, or none.
        scratch: Large enough for the layer: `room`.
        shape: An option of the layer and the rows.
        out_TO: Where the result goes, contiguous; by default into new memory.
    """
    if isinstance(shape, Int4Shape):
        return int4_linear(x_TI, weight, bias_O, scratch=scratch, shape=shape, out_TO=out_TO)
    if isinstance(shape, FewShape):
        return int4_few(x_TI, weight, bias_O, shape=shape, out_TO=out_TO)
    if isinstance(shape, HopperShape):
        return int4_hopper(x_TI, weight, bias_O, scratch=scratch, shape=shape, out_TO=out_TO)
    return int4_bands(x_TI, weight, bias_O, scratch=scratch, shape=shape, out_TO=out_TO)
