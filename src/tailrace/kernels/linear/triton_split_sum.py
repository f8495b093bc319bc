"""Split sums: each program leaves its part of a tile, and the last to arrive adds them all.

The parts of a tile are [splits, rows, outputs] in scratch, added in their order whoever is last, so
that bits do not depend on it. Arrivals are zero between launches (workspace.py).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrives_last(acc, part_ptr, arrivals, tile, split, splits, size, places, is_place):
    """Leave this program's part, and tell whether all parts of its tile are there.

    Args:
        acc: float32 [BLOCK_N, BLOCK_M], its part.
        part_ptr: float32 scratch.
        arrivals: int32 a tile.
        tile: Whose parts are added.
        split: Which of them this one is.
        splits: How many there are.
        size: Values of one split: rows x outputs.
        places: Of acc's values among those.
        is_place: Which of them there are.
    """
    tl.store(part_ptr + split * size + places, acc, mask=is_place)
    tl.debug_barrier()  # all of this program's stores, before its arrival
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == splits - 1


@triton.jit
def added_parts(part_ptr, arrivals, tile, splits, size, places, is_place):
    """Return the sum of all parts of a tile, and make its arrivals zero for the next launch.

    Args:
        part_ptr: See `arrives_last`, as all others.
        arrivals: As above.
        tile: As above.
        splits: As above.
        size: As above.
        places: As above.
        is_place: As above.
    """
    tl.store(arrivals + tile, 0)
    acc = tl.zeros(places.shape, tl.float32)
    for index in range(splits):
        other = part_ptr + index * size
        acc += tl.load(other + places, mask=is_place, other=0.0, cache_modifier=".cg")
    return acc
