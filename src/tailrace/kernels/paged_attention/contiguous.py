"""Causal prefill over keys and values in one piece: a cache whose only unit holds a sequence.

A batch as model code pads it, [B, heads, tokens, D], is a step of the paged kernel: its block
table has one entry a sequence, which says where that one's first key lies, and nothing is copied.
An entry counts in steps from token to token, so that left padding is only another beginning:

    keys     [- - a a a a]        entry 2                       -: padding
             [b b b b - -]        entry 6 x (tokens apart), 4 keys

Hopper's kernel copies boxes of keys, whose last may reach behind a sequence: where that is behind
the memory, keys and values are copied to a place with room.

Rows without a query are gaps between the sequences of the step: sequence 2b is row b of the batch,
sequence 2b + 1 what lies between it and the next, of which no tile is cut.

    starts   0   2 . . . 6        chunk a: 2..6, gap 6..6, chunk b: 6..10, gap 10..12
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.errors import EngineError
from tailrace.kernels.attention_shapes import Capability, prefill_shape
from tailrace.kernels.paged_attention.device_batch import cut_tiles
from tailrace.kernels.paged_attention.prefill_kernels import is_hopper, prefill

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape

WHOLE = 1 << 20
"""Tokens of a unit that holds any sequence; a constant, so that no length compiles anew."""

INT32_END = 1 << 31


@dataclass(frozen=True)
class Spans:
    """Which queries and keys of a padded batch are real, and where the queries stand.

    Query i stands at column `query_offset + i` of the keys. Row b's real keys are the columns
    `firsts[b] <= column < ends[b]`, its real queries those that stand there.
    """

    query_length: int
    query_offset: int
    firsts: tuple[int, ...]
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what would read beyond a sequence.

        Raises:
            EngineError: A row's keys begin after they end, or end after its last query.
        """
        last = self.query_offset + self.query_length
        for first, end in zip(self.firsts, self.ends, strict=True):
            if not 0 <= first <= end <= last:
                raise EngineError(f"keys {first}..{end} of a row whose queries end at {last}")

    @property
    def is_padded(self) -> bool:
        """Whether some query is not real."""
        stop = self.query_offset + self.query_length
        rows = zip(self.firsts, self.ends, strict=True)
        return any(first > self.query_offset or end < stop for first, end in rows)

    @classmethod
    def unpadded(cls, batch: int, queries: int, offset: int) -> Spans:
        """Return the spans of a batch without padding."""
        return cls(queries, offset, (0,) * batch, (offset + queries,) * batch)


@dataclass(frozen=True)
class _Indices:
    """What the kernel reads of a batch: int32 views of one tensor on its device."""

    memory: Tensor
    tiles: Tensor
    starts: Tensor
    kv_lens: Tensor
    tables: Tensor


def reaches(k_BHTD: Tensor) -> bool:
    """Say whether the kernel's 32-bit offsets reach all keys (or values) of a sequence."""
    batch, heads, tokens, dims = k_BHTD.shape
    _, head, token, dim = k_BHTD.stride()
    entry = (batch - 1) * (_tokens_apart(k_BHTD) or 0) + tokens
    farthest = max(entry, (heads - 1) * head, (tokens - 1) * token, (dims - 1) * dim)
    return tokens <= WHOLE and max(farthest, k_BHTD.numel()) < INT32_END


def attend(
    q_BHQD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    spans: Spans,
    *,
    scale: float,
    capability: Capability,
    shape: PrefillShape | None = None,
) -> Tensor:
    """Return causal attention [B, Q, Hq, D]; queries that are not real give zeros.

    Args:
        q_BHQD: Any strides; where tokens of all heads lie together (a transposed [B, Q, H, D]) it
            is read in place.
        k_BHTD: [B, Hkv, T, D], q's dtype. Read in place where sequences are a whole number of
            tokens apart, the same number as the values', as they are in a cache and after a
            projection; else copied.
        v_BHTD: As the keys.
        spans: Of B rows.
        scale: Of the scores.
        capability: Of the GPU, for the shape of the kernel.
        shape: Another than the one that usually serves the GPU: of Triton's kernel, or of Hopper's.

    Raises:
        ConfigError: No kernel serves the head dimension or the GPU.
        EngineError: Hopper's kernel does not serve these tensors.
    """
    batch, num_heads, queries, head_dim = q_BHQD.shape
    shape = shape or prefill_shape(head_dim, max(spans.ends), capability)
    apart = _tokens_apart(k_BHTD)
    if apart is None or apart != _tokens_apart(v_BHTD):
        k_BHTD, v_BHTD = (x.clone(memory_format=torch.contiguous_format) for x in (k_BHTD, v_BHTD))
        apart = k_BHTD.stride(0) // k_BHTD.stride(2)
    if is_hopper(shape) and not all(_is_boxable(x, spans, apart) for x in (k_BHTD, v_BHTD)):
        k_BHTD, v_BHTD = (_with_room(x, spans) for x in (k_BHTD, v_BHTD))
        apart = k_BHTD.stride(0) // k_BHTD.stride(2)
    # Of a batch of one, reshape alone would be a view whose heads lie apart.
    q_THD = q_BHQD.transpose(1, 2).reshape(batch * queries, num_heads, head_dim).contiguous()
    out_THD = torch.zeros_like(q_THD) if spans.is_padded else torch.empty_like(q_THD)
    indices = _indices(spans, apart, shape.block_m, q_THD.device)
    if q_THD.is_cuda:
        # Another stream may have made them, and drop them before this one has read them.
        indices.memory.record_stream(torch.cuda.current_stream(q_THD.device))
    if len(indices.tiles):
        reach = _reach(spans, apart) if is_hopper(shape) else (1, k_BHTD.shape[2])
        _launch(
            q_THD, k_BHTD, v_BHTD, out_THD, reach=reach, indices=indices, scale=scale, shape=shape
        )
    return out_THD.view(batch, queries, num_heads, head_dim)


def _launch(
    q_THD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    out_THD: Tensor,
    *,
    reach: tuple[int, int],
    indices: _Indices,
    scale: float,
    shape: PrefillShape,
) -> None:
    """Call the kernel over caches of `reach`: units, and tokens of each.

    Triton's kernel looks at neither, only at a sequence's own keys.
    """
    units, tokens = reach
    heads, dims = k_BHTD.shape[1], k_BHTD.shape[3]
    _, k_head, k_token, k_dim = k_BHTD.stride()
    _, v_head, v_token, v_dim = v_BHTD.stride()
    # Units begin a token apart from each other, each as long as what follows.
    k_cache = k_BHTD.as_strided((units, heads, dims, tokens), (k_token, k_head, k_dim, k_token))
    v_cache = v_BHTD.as_strided((units, heads, tokens, dims), (v_token, v_head, v_token, v_dim))
    prefill(
        q_THD,
        k_cache,
        v_cache,
        out_THD,
        tiles=indices.tiles,
        query_starts=indices.starts,
        kv_lens=indices.kv_lens,
        block_tables=indices.tables,
        scale=scale,
        shape=shape,
        unit=WHOLE,
    )


def _reach(spans: Spans, apart: int) -> tuple[int, int]:
    """Return the units up to that of the last sequence, and the tokens of the longest one."""
    last = max(row * apart + first for row, first in enumerate(spans.firsts))
    lengths = (end - first for first, end in zip(spans.firsts, spans.ends, strict=True))
    return last + 1, max(lengths)


def _is_boxable(x_BHTD: Tensor, spans: Spans, apart: int) -> bool:
    """Whether boxes of every unit can be copied: dimensions side by side, all in the memory."""
    _, heads, _, dims = x_BHTD.shape
    _, head, token, dim = x_BHTD.stride()
    units, tokens = _reach(spans, apart)
    end = (units + tokens - 2) * token + (heads - 1) * head + dims
    held = x_BHTD.untyped_storage().nbytes() // x_BHTD.itemsize - x_BHTD.storage_offset()
    # Copies begin at multiples of 16 bytes.
    is_even = all(x > 0 and x % 8 == 0 for x in (head, token)) and x_BHTD.data_ptr() % 16 == 0
    return dim == 1 and is_even and end <= held


def _with_room(x_BHTD: Tensor, spans: Spans) -> Tensor:
    """Return a copy with room behind each sequence for boxes of any other's length."""
    batch, heads, tokens, dims = x_BHTD.shape
    room = x_BHTD.new_empty(batch, heads, tokens + max(spans.firsts), dims)[:, :, :tokens]
    return room.copy_(x_BHTD)


def _tokens_apart(x_BHTD: Tensor) -> int | None:
    """Return how many steps from token to token lie between sequences, where it is a number."""
    if x_BHTD.shape[0] == 1:
        return 0
    sequence, token = x_BHTD.stride(0), x_BHTD.stride(2)
    if token == 0 or sequence % token:
        return None
    return sequence // token


# Every layer of a pass asks for the same; the next pass for others.
@lru_cache(maxsize=8)
def _indices(spans: Spans, apart: int, block_m: int, device: torch.device) -> _Indices:
    """Return the index arrays of a batch whose sequences lie `apart` tokens from each other."""
    tiles, starts, kv_lens, tables = index_arrays(spans, apart, block_m)
    parts = [tiles.ravel(), starts, kv_lens, tables]
    # Layers inside inference_mode and outside it share them.
    with torch.inference_mode(False):
        memory = torch.from_numpy(np.concatenate(parts)).to(device)
    flat, *rest = torch.split(memory, [len(part) for part in parts])
    return _Indices(memory, flat.view(-1, 2), rest[0], rest[1], rest[2].view(-1, 1))


def index_arrays(spans: Spans, apart: int, block_m: int) -> tuple[np.ndarray, ...]:
    """Return int32 tiles [N, 2], query starts [2B], keys [2B] and first keys [2B].

    Args:
        spans: Of B rows.
        apart: Tokens from a sequence's place for its first key to the next one's.
        block_m: Rows of a tile.
    """
    length, offset = spans.query_length, spans.query_offset
    firsts, ends = np.array(spans.firsts), np.array(spans.ends)
    begin = np.clip(firsts - offset, 0, length)
    end = np.maximum(np.clip(ends - offset, 0, length), begin)
    base = np.arange(len(firsts)) * length
    keys = np.where(end > begin, offset + end - firsts, 0)
    tiles = cut_tiles(end - begin, keys, first_sequence=0, block_m=block_m)
    tiles[:, 0] *= 2
    starts = np.stack([base + begin, base + end], axis=1).ravel()
    gap = np.zeros_like(keys)
    kv_lens = np.stack([keys, gap], axis=1).ravel()
    tables = np.stack([np.arange(len(firsts)) * apart + firsts, gap], axis=1).ravel()
    return tiles, *(x.astype(np.int32) for x in (starts, kv_lens, tables))
