"""A step's index arrays, padded to a frame: what every kernel of the step finds its rows by.

    chunks     [d][d][aaa][bb]                  decodes first, then prompts
    rows       [d d . .][a a a b b . . .]       the frame's; dots are padding: no KV, no keys
    a row      its token or where the device has it, its position, its slot in the KV pool

Nothing here touches the device: NumPy in, NumPy out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tailrace.engine.frames import Frame
from tailrace.kernels.paged_attention.device_batch import cut_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.scheduler import Chunk, Step
    from tailrace.engine.slot_tables import SlotTables
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape


def step_arrays(
    step: Step,
    decodes: int,
    frame: Frame,
    tiles: np.ndarray,
    blocks: BlockManager | None,
    *,
    tables: SlotTables,
    num_slots: int,
) -> dict[str, np.ndarray]:
    """Return the step's arrays, padded to the frame: padding writes no KV and has no keys.

    Those of a frame have its shapes, so that a graph finds them; what tables grew by comes
    last, for its size is free.
    """
    chunks = step.chunks
    count = len(chunks)
    slots = np.array([chunk.slot for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    ends = np.array([chunk.end for chunk in chunks], np.int32)
    samples = np.array([chunk.samples for chunk in chunks], np.bool_)
    rows = ends - starts
    growth = {} if blocks is None else tables.extend(step, slots, ends, blocks)
    # Where each chunk's rows, and the chunk itself, stand in the frame.
    firsts = np.cumsum(rows, dtype=np.int32) - rows
    firsts[decodes:] += frame.decodes - decodes
    places = np.arange(count)
    places[decodes:] += frame.decodes - decodes
    owner = np.repeat(np.arange(count), rows)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(rows) - rows, rows)
    row = firsts[owner] + within
    position = starts[owner] + within
    units = tables.host[slots[owner], position // tables.unit_tokens]
    ids, pending = _tokens_of(chunks, slots, rows)
    sequences = frame.decodes + frame.prompts + 1
    query_starts = np.arange(sequences + 1, dtype=np.int32)
    query_starts[frame.decodes :] = frame.decodes + int(rows[decodes:].sum())
    query_starts[places[decodes:]] = firsts[decodes:]
    sampled = firsts[samples] + rows[samples] - 1
    size = frame.decodes + frame.prompts
    return {
        "ids": _placed(ids, row, frame.rows, 0),
        "pending": _placed(pending, row, frame.rows, -1),
        "positions": _placed(position, row, frame.rows, 0),
        "slots": _placed(
            units * tables.unit_tokens + position % tables.unit_tokens, row, frame.rows, -1
        ),
        "kv_lens": _placed(ends, places, sequences, 0),
        "query_starts": query_starts,
        "sample_rows": _placed(sampled, np.arange(len(sampled)), size, 0),
        "sample_slots": _placed(slots[samples], np.arange(len(sampled)), size, num_slots),
        "table_rows": _placed(slots, places, sequences, tables.no_slot),
        "tiles": tiles,
        **growth,
    }


def leading_decodes(chunks: Sequence[Chunk], *, prompts_apart: bool = False) -> int:
    """Return how many chunks, at the front, are served as decodes: they have one row.

    Args:
        chunks: Of the step.
        prompts_apart: Whether a prompt's single row is none, since another copy of the weights
            serves it.
    """
    for index, chunk in enumerate(chunks):
        is_prompt = prompts_apart and chunk.start < chunk.sequence.num_prompt
        if chunk.num_tokens != 1 or is_prompt:
            return index
    return len(chunks)


def cut_prompts(
    chunks: Sequence[Chunk], decodes: int, frame: Frame | None, shape: PrefillShape
) -> np.ndarray:
    """Cut the prompts' chunks; a captured frame gets as many tiles as it has, some without work."""
    prompts = chunks[decodes:]
    if not prompts:
        return no_tiles(frame or Frame(decodes))
    cut = cut_tiles(
        np.array([chunk.num_tokens for chunk in prompts], dtype=np.int32),
        np.array([chunk.end for chunk in prompts], dtype=np.int32),
        first_sequence=decodes if frame is None else frame.decodes,
        block_m=shape.block_m,
    )
    if frame is None:
        return cut
    tiles = no_tiles(frame)
    tiles[: len(cut)] = cut
    return tiles


def no_tiles(frame: Frame) -> np.ndarray:
    """Return the frame's tiles, all of the sequence without rows."""
    tiles = np.zeros((frame.tiles, 2), dtype=np.int32)
    tiles[:, 0] = frame.decodes + frame.prompts
    return tiles


def _tokens_of(
    chunks: Sequence[Chunk], slots: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and, where only the device knows one, its slot; both int32 [T]."""
    firsts = np.cumsum(rows) - rows
    ids = np.zeros(int(rows.sum()), dtype=np.int32)
    pending = np.full(len(ids), -1, dtype=np.int32)
    from_device = np.array([chunk.from_device for chunk in chunks], np.bool_)
    pending[firsts[from_device]] = slots[from_device]
    for index in np.flatnonzero(~from_device).tolist():
        chunk, first = chunks[index], int(firsts[index])
        ids[first : first + chunk.num_tokens] = chunk.sequence.token_ids[chunk.start : chunk.end]
    return ids, pending


def _placed(values: np.ndarray, places: np.ndarray, size: int, filler: int) -> np.ndarray:
    placed = np.full(size, filler, dtype=np.int32)
    placed[places] = values
    return placed
