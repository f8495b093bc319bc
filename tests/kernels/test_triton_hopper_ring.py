"""How Hopper's kernels over 4-bit weights cut work, and what their rings hold."""

from __future__ import annotations

import pytest

from tests.kernels.test_triton_hopper_int4 import LAYERS

ring = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_ring", reason="Triton with Gluon is not installed"
)
hopper = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int4", reason="Triton with Gluon is not installed"
)
bands = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int4_bands",
    reason="Triton with Gluon is not installed",
)

CANDIDATES = [
    *(
        (rows, shape, shape.sides * 128)
        for rows, some in hopper.CANDIDATES.items()
        for shape in some
    ),
    *((rows, shape, shape.tile) for rows, some in bands.CANDIDATES.items() for shape in some),
]
"""Rows of the tile, shape, outputs of the tile."""
LARGEST = [(shape, width) for rows, shape, width in CANDIDATES if rows in {64, 128}]


def runs_of(cut, chunks):
    """Return what each program does: (program, tile, its first chunk, one past its last)."""
    units = cut.tiles * chunks
    found = []
    for program in range(cut.programs):
        low, high = program * cut.span, min((program + 1) * cut.span, units)
        assert low < high, "a program without work would be waited for"
        for tile in range(low // chunks, (high - 1) // chunks + 1):
            begin, end = max(low - tile * chunks, 0), min(high - tile * chunks, chunks)
            found.append((program, tile, begin, end))
    return found


@pytest.mark.parametrize(("outputs", "chunks"), LAYERS)
@pytest.mark.parametrize(("shape", "width"), LARGEST, ids=str)
def test_every_unit_is_done_once_and_parts_do_not_meet(outputs, chunks, shape, width):
    cut = shape.cut(outputs, chunks, 132)
    assert (cut.tiles - 1) * width < outputs <= cut.tiles * width
    assert cut.programs <= 132 * shape.programs, "a second wave would leave a tail"
    runs = runs_of(cut, chunks)
    done = sorted((tile, chunk) for _, tile, begin, end in runs for chunk in range(begin, end))
    assert done == [(tile, chunk) for tile in range(cut.tiles) for chunk in range(chunks)]
    # The kernel's own reckoning of who shares a tile.
    met = []
    for tile in range(cut.tiles):
        sharers = [program for program, other, *_ in runs if other == tile]
        first = tile * chunks // cut.span
        last = (min((tile + 1) * chunks, cut.tiles * chunks) - 1) // cut.span
        assert sharers == list(range(first, last + 1))
        met += sharers[1:]
    # Where pairs of parts are counted: a program begins the right side of one pair at most.
    assert len(set(met)) == len(met)
    places = [tile + program for program, tile, *_ in runs]
    assert len(set(places)) == len(places)
    assert (max(places) + 1) * width * 64 <= shape.parts(outputs, chunks, 64, 132)


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize(("rows", "shape", "width"), CANDIDATES, ids=str)
def test_rings_hold_several_units_and_fit(rows, shape, width, chunk):
    stages = shape.stages(rows, chunk)
    unit = width * (chunk // 2 + 4) + rows * chunk * 2
    assert stages >= 4
    assert stages * unit * shape.programs < 227 * 1024


def test_runs_are_as_long_as_a_tile_where_more_is_asked():
    assert ring.Cut.of(3, 5, 132, 7) == ring.Cut(tiles=3, span=5, programs=3)
    assert ring.Cut.of(3, 5, 2, 1) == ring.Cut(tiles=3, span=8, programs=2)
    assert ring.Cut.of(3, 6, 5, 3, multiple=4) == ring.Cut(tiles=3, span=4, programs=5)
