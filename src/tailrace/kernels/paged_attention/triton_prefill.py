"""Prefill over the paged cache in Triton: a chunk's queries against the prefix and themselves.

One program computes BLOCK_M query rows of one head of one sequence. Its keys come in tiles of
BLOCK_N tokens, gathered through the block table, in two spans:

    keys     0 ........... full | full ... end
    rows     all visible, no mask | causal mask, end of the sequence

The softmax runs online (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Dao, "FlashAttention-2", 2023), in base 2. `tiles` says which rows each program takes, those
with the most keys first, so that the long ones do not end last. Length classes are
specialisations of this one kernel by tile shape, warps and stages: see `SHAPES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.paged_attention.triton_float8 import (
    RAISED,
    Reading,
    accumulated,
    has_products_from_shared,
    in_float16,
    multiplied,
    reading,
)

if TYPE_CHECKING:
    from torch import Tensor

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Shape:
    """How the kernel is specialised."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def words(self) -> str:
        """Its name in a plan."""
        return f"{self.block_m}x{self.block_n}, {self.num_warps} warps, {self.num_stages} stages"


@triton.jit
def _span(
    acc,
    odd_acc,
    peak,
    total,
    q,
    odd_q,
    k_cache,
    v_cache,
    table,
    positions,
    low,
    high,
    kv_len,
    scale_log2,
    stride_kb,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vd,
    MASKED: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    PAIRED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    dims = tl.arange(0, HEAD_DIM // 2 if PAIRED else HEAD_DIM)
    for start in range(low, high, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        is_key = columns < kv_len
        if MASKED:
            units = tl.load(table + columns // UNIT, mask=is_key, other=0).to(tl.int64)
        else:
            units = tl.load(table + columns // UNIT).to(tl.int64)
        k_rows = units * stride_kb + (columns % UNIT) * stride_kt
        v_rows = units * stride_vb + (columns % UNIT) * stride_vt
        k_pointers = k_cache + k_rows[None, :] + (dims * stride_kd)[:, None]
        v_pointers = v_cache + v_rows[:, None] + (dims * stride_vd)[None, :]
        if MASKED:
            # Slots never written may hold NaN, and 0 x NaN is NaN: they are not even read.
            k = tl.load(k_pointers, mask=is_key[None, :], other=0.0)
            v = tl.load(v_pointers, mask=is_key[:, None], other=0.0)
        else:
            k = tl.load(k_pointers)
            v = tl.load(v_pointers)
        scores = multiplied(q, odd_q, k, PAIRED, COMPILED) * scale_log2
        if MASKED:
            is_visible = (columns[None, :] <= positions[:, None]) & is_key[None, :]
            scores = tl.where(is_visible, scores, float("-inf"))
        highest = tl.max(scores, 1)
        if IN_FLOAT16:
            highest -= RAISED
        higher = tl.maximum(peak, highest)
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(peak - higher)
        total = total * rescale + tl.sum(weights, 1)
        acc, odd_acc = accumulated(acc, odd_acc, rescale, weights, v, q.dtype, PAIRED, COMPILED)
        peak = higher
    return acc, odd_acc, peak, total


@triton.jit
def prefill_kernel(
    q_ptr,
    k_cache,
    v_cache,
    out_ptr,
    tiles,
    query_starts,
    kv_lens,
    tables,
    table_stride,
    scale_log2,
    v_scale,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    PAIRED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    row_start = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - row_start
    kv_len = tl.load(kv_lens + sequence)
    before = kv_len - num_rows  # tokens in the cache before this chunk

    rows = first + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    dims = tl.arange(0, HEAD_DIM)
    places = ((row_start + rows).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    q = tl.load(q_ptr + places[:, None] + dims[None, :], mask=is_row[:, None], other=0.0)

    if IN_FLOAT16:
        q, down = in_float16(q)
        scale_log2 = (scale_log2 * down)[:, None]
    odd_q = q
    LANES: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    if PAIRED:
        q, odd_q = tl.split(q.reshape(BLOCK_M, LANES, 2))
        k_cache = k_cache.to(tl.pointer_type(tl.int16))
        v_cache = v_cache.to(tl.pointer_type(tl.int16))

    kv_head = head // GROUP
    k_cache += kv_head * stride_kh
    v_cache += kv_head * stride_vh
    table = tables + sequence * table_stride
    positions = before + rows
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LANES], tl.float32)
    odd_acc = acc

    full = (before + first + 1) // BLOCK_N * BLOCK_N  # every row of the tile sees these keys
    end = tl.minimum(before + first + BLOCK_M, kv_len)
    acc, odd_acc, peak, total = _span(
        acc, odd_acc, peak, total, q, odd_q, k_cache, v_cache, table, positions, 0, full, kv_len,
        scale_log2, stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
        MASKED=False, UNIT=UNIT, HEAD_DIM=HEAD_DIM, BLOCK_N=BLOCK_N,
        IN_FLOAT16=IN_FLOAT16, PAIRED=PAIRED, COMPILED=COMPILED,
    )  # fmt: skip
    acc, odd_acc, peak, total = _span(
        acc, odd_acc, peak, total, q, odd_q, k_cache, v_cache, table, positions, full, end, kv_len,
        scale_log2, stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
        MASKED=True, UNIT=UNIT, HEAD_DIM=HEAD_DIM, BLOCK_N=BLOCK_N,
        IN_FLOAT16=IN_FLOAT16, PAIRED=PAIRED, COMPILED=COMPILED,
    )  # fmt: skip
    if PAIRED:
        acc = tl.interleave(acc, odd_acc)
    acc = acc / total[:, None] * v_scale
    tl.store(
        out_ptr + places[:, None] + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )


def prefill(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    *,
    tiles: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    shape: Shape,
    kv_scales: KVScales = UNSCALED,
    unit: int | None = None,
    by: Reading | None = None,
) -> None:
    """Write causal attention of the rows in `tiles` into `out_THD`.

    Args:
        q_THD: [T, Hq, D], contiguous; float16, bfloat16 or float32.
        k_cache: [num_blocks, Hkv, D, block_size], any strides; q's dtype or float8.
        v_cache: [num_blocks, Hkv, block_size, D], any strides.
        out_THD: As q; rows of no tile are left as they are.
        tiles: int32 [N, 2]: sequence, and its tile's first row within the chunk.
        query_starts: int32 [B+1].
        kv_lens: int32 [B]; the chunk's own keys are in the cache already.
        block_tables: int32 [B, W], contiguous rows.
        scale: Of the scores.
        shape: Tile sizes; `tiles` are cut for `shape.block_m`.
        kv_scales: Of a float8 cache.
        unit: Tokens of a unit, where the cache's shape does not say it.
        by: How a float8 cache is read, where not by the best `reading`: a benchmark's.

    Raises:
        EngineError: The cache cannot be read `by` that.
    """
    from_shared = has_products_from_shared(q_THD.device)
    by = reading(q_THD, k_cache, v_cache, from_shared=from_shared, asked=by)
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = v_cache.shape[1]
    prefill_kernel[(num_heads, tiles.shape[0])](
        q_THD,
        k_cache,
        v_cache,
        out_THD,
        tiles,
        query_starts,
        kv_lens,
        block_tables,
        block_tables.stride(0),
        scale * kv_scales.k * LOG2_E,
        kv_scales.v,
        k_cache.stride(0) // by.lanes,
        k_cache.stride(1) // by.lanes,
        k_cache.stride(3) // by.lanes,
        k_cache.stride(2),
        v_cache.stride(0) // by.lanes,
        v_cache.stride(1) // by.lanes,
        v_cache.stride(2) // by.lanes,
        v_cache.stride(3),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        UNIT=v_cache.shape[2] if unit is None else unit,
        HEAD_DIM=head_dim,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        COMPILED=q_THD.is_cuda,
        **by.constants,
    )
