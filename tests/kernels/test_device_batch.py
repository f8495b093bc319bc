from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.paged import make_batch

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels.paged_attention.device_batch import cut_tiles, plan
from tailrace.kernels.paged_attention.triton_prefill import Shape

SHAPE = Shape(64, 32, 4, 2)


def cut(chunks, *, first_sequence=0, block_m=64):
    rows = np.array([rows for rows, _ in chunks], dtype=np.int32)
    kv_lens = np.array([kv_len for _, kv_len in chunks], dtype=np.int32)
    return cut_tiles(rows, kv_lens, first_sequence=first_sequence, block_m=block_m)


@given(
    chunks=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), max_size=6),
    block_m=st.sampled_from([16, 64, 128]),
)
def test_tiles_cover_every_row_once_and_those_with_most_keys_come_first(chunks, block_m):
    chunks = [(rows, rows + prefix) for rows, prefix in chunks]
    tiles = cut(chunks, first_sequence=3, block_m=block_m)
    assert tiles.dtype == np.int32
    assert tiles.flags.c_contiguous
    covered = {
        (sequence, row)
        for sequence, first in tiles.tolist()
        for row in range(first, min(first + block_m, chunks[sequence - 3][0]))
    }
    assert covered == {(i + 3, row) for i, (rows, _) in enumerate(chunks) for row in range(rows)}
    assert len(tiles) == sum(-(-rows // block_m) for rows, _ in chunks)

    def keys(sequence, first):
        rows, kv_len = chunks[sequence - 3]
        return min(kv_len - rows + first + block_m, kv_len)

    counts = [keys(*tile) for tile in tiles.tolist()]
    assert counts == sorted(counts, reverse=True)


def test_the_rows_before_the_first_chunk_are_decodes():
    batch = make_batch([(1, 9), (1, 70), (5, 5), (1, 40), (70, 100)], 16)
    planned = plan(batch, SHAPE)
    assert planned.num_decodes == 2
    # A single row that comes after a chunk is a tile like any other.
    assert planned.tiles.tolist() == [[4, 64], [4, 0], [3, 0], [2, 0]]
    assert planned.shape == SHAPE
    assert torch.equal(planned.kv_lens, batch.kv_lens)
    assert plan(planned, Shape(128, 64, 8, 3)) is planned


@pytest.mark.parametrize(
    ("chunks", "decodes", "tiles"), [([(1, 3), (1, 4)], 2, 0), ([(3, 3)], 0, 1), ([], 0, 0)]
)
def test_a_step_of_one_kind_has_no_part_of_the_other(chunks, decodes, tiles):
    planned = plan(make_batch(chunks, 16), SHAPE)
    assert planned.num_decodes == decodes
    assert planned.tiles.shape == (tiles, 2)
