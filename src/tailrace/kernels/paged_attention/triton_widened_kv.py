"""The keys and values of a step's prompts, widened from a float8 cache for Hopper's kernel.

Hopper's kernel copies keys and values from the cache to its products by hardware, which does not
convert. So those of a layer's prompts are written out first, in the activations' dtype, to a
scratch that all layers share: a cache of its own, of larger units, one sequence after the other.

    pool      [5 ][0 ]..[9 ]                  units of 8, 16 or 32, anywhere; float8
    scratch   [a . . .][a .    ][b . .  ]     units of 128, each sequence from a new one on
    tables    a: 0 1   b: 2                   written beside them

Float8 fits in either half exactly, and the layer's scales are not multiplied in: prompts see the
values that decodes will. What a launch has to do stands on the device alone, so that a captured one
serves any step that fits: programs go round over however many pieces there are.

Slots behind a sequence's last key hold what was there before, NaN perhaps: Hopper's kernel hides
such keys and clears such values (`triton_hopper_prefill`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

UNIT_TOKENS = 128
"""Of the scratch: the widest tile of Hopper's kernel, which then copies a tile in few boxes."""
USUAL_TOKENS = 65_536
"""Of the scratch, where a step can have so many keys and one sequence has no more."""
LEAST_SEQUENCES = 32
"""That a kernel is compiled for: a warp's threads have one each."""
PIECE = 32
"""Tokens of one head that a program widens at a time; it divides `UNIT_TOKENS`."""
MOST_PROGRAMS = 1024
"""Of a launch, about as many as an H200 runs at once: they go round, so no step is bound by it, and
those of a small one that find nothing to do cost no second wave."""


def units_of(kv_lens: np.ndarray) -> int:
    """Return the units of the scratch that sequences of so many keys take."""
    return int((-(-kv_lens // UNIT_TOKENS)).sum())


def scratch_units(sequences: int, longest: int) -> int:
    """Return the units of a server's scratch.

    As many as a step can fill, but no more than for `USUAL_TOKENS`, or for one sequence where that
    is longer.

    Args:
        sequences: Of a step, at most.
        longest: Tokens of one, at most.
    """
    one = -(-longest // UNIT_TOKENS)
    return min(sequences * one, max(USUAL_TOKENS // UNIT_TOKENS, one))


@dataclass(frozen=True)
class WidenedKv:
    """The scratch."""

    keys: Tensor
    """[units, 128, Hkv, D], of the activations' dtype."""
    values: Tensor
    sequences: int = LEAST_SEQUENCES
    """Up to so many in a step are served by one compiled kernel; more by another."""

    @classmethod
    def allocate(
        cls,
        units: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sequences: int = LEAST_SEQUENCES,
    ) -> WidenedKv:
        """Make room for so many units."""
        shape = (units, UNIT_TOKENS, num_kv_heads, head_dim)
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, sequences)

    @staticmethod
    def bytes_of(units: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return what `allocate` takes."""
        return 2 * units * UNIT_TOKENS * num_kv_heads * head_dim * dtype.itemsize

    @property
    def units(self) -> int:
        """There is room for."""
        return self.keys.shape[0]

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Keys [units, Hkv, D, 128] and values [units, Hkv, 128, D], as kernels address a cache."""
        return self.keys.permute(0, 2, 3, 1), self.values.permute(0, 2, 1, 3)


@triton.jit
def _widened(x, dtype: tl.constexpr):
    # Hopper converts float16 to bfloat16 at a fraction of the rate of the way by float32.
    half = x.to(tl.float16)
    return half if dtype == tl.float16 else half.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["table_stride", "wide_stride", "first", "count", "wide_units"])
def widen_kernel(
    k_cache,
    v_cache,
    wide_k,
    wide_v,
    kv_lens,
    tables,
    wide_tables,
    table_stride,
    wide_stride,
    first,
    count,
    wide_units,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE_UNIT: tl.constexpr,
    PIECE: tl.constexpr,
    PADDED: tl.constexpr,
):
    PIECES: tl.constexpr = WIDE_UNIT // PIECE
    sequences = tl.arange(0, PADDED)
    lens = tl.load(kv_lens + first + sequences, mask=sequences < count, other=0)
    units = (lens + WIDE_UNIT - 1) // WIDE_UNIT
    ends = tl.cumsum(units, 0)
    # A step that does not fit is never sent here; beyond the scratch nothing is written even so.
    pieces = tl.minimum(tl.sum(units), wide_units) * PIECES
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM)
    k_cache += head * stride_kh
    v_cache += head * stride_vh
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        wide_unit = piece // PIECES
        place = tl.sum((ends <= wide_unit).to(tl.int32))
        is_owner = sequences == place
        kv_len = tl.sum(tl.where(is_owner, lens, 0))
        inner = wide_unit - tl.sum(tl.where(is_owner, ends - units, 0))
        sequence = (first + place).to(tl.int64)
        within = piece % PIECES * PIECE + tl.arange(0, PIECE)
        tokens = inner * WIDE_UNIT + within
        is_key = tokens < kv_len
        at = tl.load(tables + sequence * table_stride + tokens // UNIT, mask=is_key, other=0)
        at = at.to(tl.int64)
        # Slots never written may hold NaN: they are not even read.
        k_rows = at * stride_kb + (tokens % UNIT) * stride_kt
        k = tl.load(
            k_cache + k_rows[:, None] + (dims * stride_kd)[None, :],
            mask=is_key[:, None], other=0.0,
        )  # fmt: skip
        v_rows = at * stride_vb + (tokens % UNIT) * stride_vt
        v = tl.load(
            v_cache + v_rows[:, None] + (dims * stride_vd)[None, :],
            mask=is_key[:, None], other=0.0,
        )  # fmt: skip
        rows = wide_unit.to(tl.int64) * WIDE_UNIT + within
        target = ((rows * NUM_KV_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(wide_k + target, _widened(k, wide_k.dtype.element_ty), mask=is_key[:, None])
        tl.store(wide_v + target, _widened(v, wide_v.dtype.element_ty), mask=is_key[:, None])
        if (head == 0) & (piece % PIECES == 0):
            tl.store(wide_tables + sequence * wide_stride + inner, wide_unit)


def widen(
    k_cache: Tensor,
    v_cache: Tensor,
    wide: WidenedKv,
    *,
    kv_lens: Tensor,
    block_tables: Tensor,
    first: int,
) -> Tensor:
    """Write the keys and values of the sequences from `first` on into the scratch.

    Args:
        k_cache: [num_blocks, Hkv, D, block_size], any strides.
        v_cache: [num_blocks, Hkv, block_size, D], any strides.
        wide: Has room for them (`units_of`), which the device alone knows: the caller sees to it.
        kv_lens: int32 [B].
        block_tables: int32 [B, W], contiguous rows.
        first: How many sequences, at the front, are left out.

    Returns:
        int32 [B, units]: the sequences' tables in the scratch; what is not theirs is undefined.

    Raises:
        EngineError: The scratch is of other heads.
    """
    _, num_kv_heads, unit, head_dim = v_cache.shape
    if (num_kv_heads, head_dim) != wide.values.shape[2:]:
        raise EngineError(
            f"a scratch of {list(wide.values.shape[2:])} for KV of {[num_kv_heads, head_dim]}"
        )
    sequences = len(kv_lens)
    tables = torch.empty(sequences, wide.units, dtype=torch.int32, device=kv_lens.device)
    count = sequences - first
    if not count:
        return tables
    pieces = wide.units * (UNIT_TOKENS // PIECE)
    programs = min(pieces, max(MOST_PROGRAMS // num_kv_heads, 1))
    widen_kernel[(programs, num_kv_heads)](
        k_cache,
        v_cache,
        wide.keys,
        wide.values,
        kv_lens,
        block_tables,
        tables,
        block_tables.stride(0),
        tables.stride(0),
        first,
        count,
        wide.units,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(3),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        v_cache.stride(3),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        UNIT=unit,
        WIDE_UNIT=UNIT_TOKENS,
        PIECE=PIECE,
        PADDED=triton.next_power_of_2(max(count, wide.sequences)),
        num_warps=4,
    )
    return tables
