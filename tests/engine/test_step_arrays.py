"""A step's index arrays, padded to a frame."""

from __future__ import annotations

import numpy as np

from tailrace.engine.frames import Frame
from tailrace.engine.step_arrays import leading_decodes, no_tiles


def test_padding_tiles_are_those_of_the_sequence_without_rows():
    tiles = no_tiles(Frame(16, 64, 8, 9))
    assert tiles.shape == (9, 2)
    assert np.all(tiles == [24, 0])


def test_decodes_are_counted_up_to_the_first_longer_chunk():
    class Chunk:
        def __init__(self, num_tokens):
            self.num_tokens = num_tokens

    assert leading_decodes([Chunk(1), Chunk(1), Chunk(5), Chunk(1)]) == 2
    assert leading_decodes([]) == 0
