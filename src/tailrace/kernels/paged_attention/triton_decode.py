"""Decode over the paged cache in Triton: one query row a sequence, its keys split among programs.

A program takes all query heads that share one KV head (their keys are read once) and SPLIT tokens
of one sequence. Of the programs of one sequence and KV head the last to end merges the parts of all
by their log-sum-exp (Dao et al., "Flash-Decoding", 2023), always in the order of the keys. Splits
have a fixed length, not a fixed number, so that a row's sums are cut at the same places whatever
else is in the batch: its result does not depend on its neighbours.

The grid covers the longest sequence there can be, so that one captured graph serves any lengths;
programs beyond their sequence's end return at once. Where there would be too many of those (4 KV
heads and 50 sequences of a context of 131,072 tokens have 51,200 splits), programs take splits of
their sequence in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import launch_options, let_next_start, wait_for_last
from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.paged_attention.triton_float8 import (
    RAISED,
    Reading,
    accumulated,
    in_float16,
    multiplied,
    reading,
)
from tailrace.kernels.paged_attention.triton_prefill import LOG2_E

if TYPE_CHECKING:
    from torch import Tensor


GRAIN = 8
"""Elements by which a tile's places are counted, where the cache's strides are multiples."""
MOST_GRAINS = 2**31 - 1
"""That 32 bits count."""


@dataclass(frozen=True)
class DecodeShape:
    """How the kernel is specialised."""

    split: int
    """Tokens of a split; a multiple of block_n."""
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def words(self) -> str:
        """Its name in a plan."""
        return f"{self.block_n} keys, {self.num_warps} warps, {self.num_stages} stages"


@triton.jit
def decode_kernel(
    q_ptr,
    k_cache,
    v_cache,
    out_ptr,
    part_ptr,
    lse_ptr,
    arrivals,
    kv_lens,
    tables,
    table_stride,
    max_splits,
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
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    IN_TURN: tl.constexpr,
    GRAIN: tl.constexpr,
    ALIKE: tl.constexpr,
    WIDE: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    PAIRED: tl.constexpr,
    COMPILED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_start(DEPENDENT)
    kv_head = tl.program_id(0)
    first = tl.program_id(1)
    row = tl.program_id(2)
    kv_len = tl.load(kv_lens + row)
    # Lengths are the step's own, and the first program of a row waits: see `dependent_launch`.
    if (first * SPLIT >= kv_len) & (first > 0):
        return
    wait_for_last(DEPENDENT)
    # Wide numbers stay scalars, or the many offsets of a tile take twice the registers.
    first_head = row.to(tl.int64) * NUM_HEADS + kv_head * GROUP
    if PAIRED:
        k_cache = k_cache.to(tl.pointer_type(tl.int16))
        v_cache = v_cache.to(tl.pointer_type(tl.int16))
    q_ptr += first_head * HEAD_DIM
    k_cache += kv_head * stride_kh
    v_cache += kv_head * stride_vh
    out_ptr += first_head * HEAD_DIM
    part_ptr += first_head * max_splits * HEAD_DIM
    lse_ptr += first_head * max_splits
    arrivals += row * NUM_HEADS + kv_head
    tables += row * table_stride
    members = tl.arange(0, PADDED)
    is_member = members < GROUP
    dims = tl.arange(0, HEAD_DIM)
    out = out_ptr + (members * HEAD_DIM)[:, None] + dims[None, :]
    count = tl.cdiv(kv_len, SPLIT)
    end = tl.maximum(count, 1) if IN_TURN else first + 1
    step = tl.num_programs(1) if IN_TURN else 1
    # What is the same in each turn is cheaper to compute again than to keep in registers.
    for split in tl.range(first, end, step, disable_licm=True):
        acc, lse = _attended(
            q_ptr, k_cache, v_cache, tables, split * SPLIT,
            tl.minimum((split + 1) * SPLIT, kv_len), scale_log2,
            stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
            GROUP, PADDED, UNIT, HEAD_DIM, BLOCK_N, GRAIN, ALIKE, WIDE,
            IN_FLOAT16, PAIRED, COMPILED,
        )  # fmt: skip
        if count <= 1:
            tl.store(out, (acc * v_scale).to(out_ptr.dtype.element_ty), mask=is_member[:, None])
        else:
            parts = members * max_splits + split
            part = part_ptr + (parts * HEAD_DIM)[:, None] + dims[None, :]
            tl.store(part, acc, mask=is_member[:, None])
            tl.store(lse_ptr + parts, lse, mask=is_member)
            tl.debug_barrier()  # all stores of this program, before its arrival
            if tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1:
                tl.store(arrivals, 0)  # for the next launch
                firsts = members * max_splits
                acc = _merged(part_ptr, lse_ptr, firsts, is_member, count, PADDED, HEAD_DIM)
                tl.store(out, (acc * v_scale).to(out_ptr.dtype.element_ty), mask=is_member[:, None])


@triton.jit
def _attended(
    q_ptr,
    k_cache,
    v_cache,
    table,
    low,
    high,
    scale_log2,
    stride_kb,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vd,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GRAIN: tl.constexpr,
    ALIKE: tl.constexpr,
    WIDE: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    PAIRED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Return attention over the keys from low to high, and the base 2 log of its weights' sum."""
    members = tl.arange(0, PADDED)
    LANES: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    lanes = tl.arange(0, LANES)
    places = (members * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    acc = tl.zeros([PADDED, LANES], tl.float32)
    q = tl.load(q_ptr + places, mask=(members < GROUP)[:, None], other=0.0)
    if IN_FLOAT16:
        q, down = in_float16(q)
        scale_log2 = (scale_log2 * down)[:, None]
    odd_q, odd_acc = q, acc
    if PAIRED:
        q, odd_q = tl.split(q.reshape(PADDED, LANES, 2))
    peak = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    keys = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        left = high - start
        is_key = keys < left
        # Slots never written may hold NaN, and 0 x NaN is NaN: the last key is read instead.
        near = tl.minimum(keys, left - 1)
        # Of whole units a tile begins with one.
        whole = start // UNIT * UNIT if BLOCK_N % UNIT else start
        near += start - whole
        units = tl.load(table + whole // UNIT + near // UNIT)
        if WIDE:
            units = units.to(tl.int64)
        # counted by grains, in 32 bits, and the same for keys and values: products in 64 bits, and
        # masks, were half of a tile's instructions.
        k_rows = (units * stride_kb + near % UNIT * stride_kt).to(tl.int64) * GRAIN
        v_rows = k_rows
        if not ALIKE:
            v_rows = (units * stride_vb + near % UNIT * stride_vt).to(tl.int64) * GRAIN
        k = tl.load(k_cache + k_rows[None, :] + (lanes * stride_kd)[:, None])
        v = tl.load(v_cache + v_rows[:, None] + (lanes * stride_vd)[None, :])
        scores = multiplied(q, odd_q, k, PAIRED, COMPILED) * scale_log2
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        highest = tl.max(scores, 1)
        if IN_FLOAT16:
            highest -= RAISED
        higher = tl.maximum(peak, highest)
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(peak - higher)
        total = total * rescale + tl.sum(weights, 1)
        acc, odd_acc = accumulated(acc, odd_acc, rescale, weights, v, q.dtype, PAIRED, COMPILED)
        peak = higher
    if PAIRED:
        acc = tl.interleave(acc, odd_acc)
    total = tl.where(low < high, total, 1.0)  # a padded row's zeros flow on through the layers
    return acc / total[:, None], peak + tl.log2(total)


@triton.jit
def _merged(
    part_ptr,
    lse_ptr,
    firsts,
    is_member,
    count,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    dims = tl.arange(0, HEAD_DIM)
    peak = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    acc = tl.zeros([PADDED, HEAD_DIM], tl.float32)
    # Parts do not wait for one another: several are asked for at a time.
    for split in tl.range(0, count, loop_unroll_factor=4):
        # Past the first-level cache, which may hold what a part was before.
        lse = tl.load(lse_ptr + firsts + split, mask=is_member, other=0.0, cache_modifier=".cg")
        part = part_ptr + ((firsts + split) * HEAD_DIM)[:, None] + dims[None, :]
        values = tl.load(part, mask=is_member[:, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, lse)
        rescale = tl.exp2(peak - higher)
        weight = tl.exp2(lse - higher)
        acc = acc * rescale[:, None] + weight[:, None] * values
        total = total * rescale + weight
        peak = higher
    return acc / total[:, None]


@dataclass(frozen=True)
class DecodeScratch:
    """Where parts of a step's rows are put; one serves all layers."""

    parts: Tensor
    """float32 [rows, Hq, max_splits, D]."""
    lses: Tensor
    """float32 [rows, Hq, max_splits], base 2."""
    arrivals: Tensor
    """int32 [rows, Hq]: how many parts of a row and KV head are there; 0 between launches."""

    @property
    def max_splits(self) -> int:
        """Splits that a sequence may have."""
        return self.lses.shape[2]

    @classmethod
    def allocate(
        cls, rows: int, num_heads: int, head_dim: int, max_kv_len: int, split: int, device: str
    ) -> DecodeScratch:
        """Make scratch for sequences of at most `max_kv_len` tokens."""
        splits = -(-max_kv_len // split)
        return cls(
            torch.empty(rows, num_heads, splits, head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, num_heads, splits, dtype=torch.float32, device=device),
            torch.zeros(rows, num_heads, dtype=torch.int32, device=device),
        )


MOST_PROGRAMS = 32_768
"""Of a grid in which each split that there could be has its own: those without work cost half a
nanosecond (an H200), so no more than 16 us a layer."""
SHARING_PROGRAMS, LEAST_SHARERS = 4096, 16
"""Of a grid whose programs take splits in turn; the least of a row and KV head."""


def programs_a_row(max_splits: int, rows: int) -> int:
    """Return how many programs share the splits of a row and KV head, of so many of them.

    Programs that take splits in turn need more registers, and lose 6 % over long contexts; they
    halve the time of short ones that have room for 131,072 tokens (benchmarks/gpu_decode.py).
    """
    if max_splits * rows <= MOST_PROGRAMS:
        return max_splits
    return min(max_splits, max(LEAST_SHARERS, SHARING_PROGRAMS // rows))


def decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_BHD: Tensor,
    *,
    kv_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    shape: DecodeShape,
    scratch: DecodeScratch,
    kv_scales: KVScales = UNSCALED,
    by: Reading | None = None,
) -> None:
    """Write attention of one row a sequence into `out_BHD`.

    Args:
        q_BHD: [B, Hq, D], contiguous.
        k_cache: [num_blocks, Hkv, D, block_size], any strides; q's dtype or float8.
        v_cache: [num_blocks, Hkv, block_size, D], any strides.
        out_BHD: As q.
        kv_lens: int32 [B]; 0 marks a padded row, whose output is zeros.
        block_tables: int32 [B, W], contiguous rows.
        scale: Of the scores.
        shape: Split and tile sizes.
        scratch: For at least B rows and the longest of `kv_lens`.
        kv_scales: Of a float8 cache.
        by: How a float8 cache is read, where not by the best `reading`: a benchmark's.

    Raises:
        EngineError: The cache cannot be read `by` that.
    """
    by = reading(q_BHD, k_cache, v_cache, asked=by)
    num_rows, num_heads, head_dim = q_BHD.shape
    num_kv_heads, unit = v_cache.shape[1:3]
    group = num_heads // num_kv_heads
    k_unit, k_token = k_cache.stride(0) // by.lanes, k_cache.stride(3) // by.lanes
    v_unit, v_token = v_cache.stride(0) // by.lanes, v_cache.stride(2) // by.lanes
    grain = math.gcd(k_unit, k_token, v_unit, v_token, GRAIN)
    sharers = programs_a_row(scratch.max_splits, num_rows * num_kv_heads)
    decode_kernel[(num_kv_heads, sharers, num_rows)](
        q_BHD,
        k_cache,
        v_cache,
        out_BHD,
        scratch.parts,
        scratch.lses,
        scratch.arrivals,
        kv_lens,
        block_tables,
        block_tables.stride(0),
        scratch.max_splits,
        scale * kv_scales.k * LOG2_E,
        kv_scales.v,
        k_unit // grain,
        k_cache.stride(1) // by.lanes,
        k_token // grain,
        k_cache.stride(2),
        v_unit // grain,
        v_cache.stride(1) // by.lanes,
        v_token // grain,
        v_cache.stride(3),
        NUM_HEADS=num_heads,
        GROUP=group,
        PADDED=max(16, triton.next_power_of_2(group)),  # tl.dot takes no fewer rows
        UNIT=unit,
        HEAD_DIM=head_dim,
        BLOCK_N=shape.block_n,
        SPLIT=shape.split,
        IN_TURN=sharers < scratch.max_splits,
        GRAIN=grain,
        ALIKE=(k_unit, k_token) == (v_unit, v_token),
        WIDE=max(k_unit, v_unit) * len(v_cache) // grain > MOST_GRAINS,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        COMPILED=q_BHD.is_cuda,
        **by.constants,
        **launch_options(),
    )
