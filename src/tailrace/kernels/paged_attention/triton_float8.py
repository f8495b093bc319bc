"""How the attention kernels read a float8 (e4m3) cache: products in float16, two numbers at a time.

e4m3 is a part of float16, and a GPU widens two numbers to it in one instruction; from there to
bfloat16 it takes three more. So over a float8 cache q and the weights of the softmax go to float16
as well, and lose nothing that bfloat16 had:

    q         each row times the power of two that takes its largest number into [2^14, 2^15); the
              scores' factor takes that back, in float32. So no q that is finite becomes infinite.
              Numbers down to 2^-28 of the largest are exact, others are off by 2^-39 of it at most,
              which is below what sums in float32 hold.
    weights   2^15 times as large, that is, the peak is taken to be 15 lower. They are 11 bits
              wide down to 2^-29 of the largest, where bfloat16's have 8, and off by at most
              2^-40 of the largest below: 2^20 keys of those make less than bfloat16's last bit.

`mma` wants pairs of keys, of one dimension, in a register, and single bytes have to be fetched for
that from a tile whose rows are keys. Two dimensions at a time, read as int16, come as halves of a
16-bit tile do. They part in registers, one permutation for four numbers. Products of even and of
odd dimensions of q and k add up to the scores; those of v are two results, dealt together at the
end.

Products of Hopper and later read keys and values from shared memory, where those must be written
again once they are wide: rows are copied as they lie, and pairs would only cost permutations.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.errors import EngineError
from tailrace.kernels.linear.float8 import FLOAT8

if TYPE_CHECKING:
    from torch import Tensor

RAISED: tl.constexpr = tl.constexpr(15.0)
"""Powers of two by which weights in float16 are larger than those of the softmax."""

_LEAST_PAIRED = 32
"""Dimensions whose halves are what one product takes at least."""

_MOST_PLAIN = 128
"""Dimensions of a row of q that, held in registers as a whole, leave room for all else."""


class Reading(Enum):
    """What keys, values, q and weights are multiplied in."""

    AS_Q = "in q's dtype"
    FLOAT16 = "in float16"
    PAIRS = "in float16, by pairs"

    @property
    def constants(self) -> dict[str, bool]:
        """What a kernel is specialised by."""
        return {"IN_FLOAT16": self is not Reading.AS_Q, "PAIRED": self is Reading.PAIRS}

    @property
    def lanes(self) -> int:
        """Dimensions that are read at a time: what strides are counted in."""
        return 2 if self is Reading.PAIRS else 1


def reading(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    from_shared: bool = False,
    asked: Reading | None = None,
) -> Reading:
    """Return how a cache is read: as asked, or in the best way that its addresses allow, if any.

    Args:
        q: [..., D]; in float32, which no GPU serves, a float8 cache is widened to that.
        k_cache: [num_blocks, Hkv, D, block_size].
        v_cache: [num_blocks, Hkv, block_size, D].
        from_shared: Whether products read keys and values from shared memory.
        asked: By a benchmark or a test.

    Raises:
        EngineError: What is asked for cannot be read so.
    """
    if asked is not None:
        if asked is not Reading.AS_Q and k_cache.dtype != FLOAT8:
            raise EngineError(f"attention {asked.value}: the cache is {k_cache.dtype}, not float8")
        if asked is Reading.PAIRS and not has_pairs(k_cache, v_cache):
            raise EngineError(
                f"attention {asked.value}: no two dimensions of a head lie at an even address, or "
                f"it has fewer than {_LEAST_PAIRED}"
            )
        return asked
    if k_cache.dtype != FLOAT8 or q.dtype == torch.float32:
        return Reading.AS_Q
    is_plain = from_shared and q.shape[-1] <= _MOST_PLAIN
    return Reading.PAIRS if has_pairs(k_cache, v_cache) and not is_plain else Reading.FLOAT16


def has_products_from_shared(device: torch.device) -> bool:
    """Tell whether a GPU multiplies tiles of 64 rows and more by what shared memory holds.

    Hopper (9.0) and the Blackwell of data centres (10.x) do; consumer Blackwell (12.x) does not.
    The interpreter stands in for Hopper.
    """
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device)[0] in {9, 10, 11}


def has_pairs(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Tell whether each two dimensions of a float8 cache are two bytes at an even address."""
    k_block, k_head, k_dim, k_token = k_cache.stride()
    v_block, v_head, v_token, v_dim = v_cache.stride()
    steps = (k_block, k_head, k_token, v_block, v_head, v_token)
    addresses = (k_cache.data_ptr(), v_cache.data_ptr())
    return (
        v_cache.shape[3] >= _LEAST_PAIRED
        and k_dim == v_dim == 1
        and not any(number % 2 for number in (*steps, *addresses))
    )


_PART: tl.constexpr = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 evens, odds;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {evens, odds}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, evens;
    cvt.rn.f16x2.e4m3x2 $1, odds;
}""")


@triton.jit
def parted(pairs, COMPILED: tl.constexpr):
    """Return the first and the second numbers of pairs in float16, exactly; NaN stays NaN.

    Args:
        pairs: int16, of two float8 numbers each, the first in the low byte.
        COMPILED: False in the interpreter, which knows no assembler.
    """
    if COMPILED:
        evens, odds = tl.inline_asm_elementwise(
            _PART,
            "=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (pairs & 0xFF).to(tl.uint8)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8)
        evens = low.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odds = high.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return evens, odds


@triton.jit
def multiplied(q, odd_q, k, PAIRED: tl.constexpr, COMPILED: tl.constexpr):
    """Return q's products with keys, float32 [M, N].

    Args:
        q: [M, D]; by pairs, the even dimensions of it.
        odd_q: By pairs, the odd ones.
        k: [D, N] of any dtype that goes to q's; or int16 pairs [D / 2, N].
        PAIRED: Whether by pairs.
        COMPILED: False in the interpreter.
    """
    if PAIRED:
        k, odd_k = parted(k, COMPILED)
        products = tl.dot(odd_q, odd_k, tl.dot(q, k))
    else:
        products = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    return products


@triton.jit
def accumulated(
    acc,
    odd_acc,
    rescale,
    weights,
    v,
    DTYPE: tl.constexpr,
    PAIRED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Return sums of weighted values, rescaled, with more of them: float32 [M, D], or its halves.

    Args:
        acc: Sums; by pairs, of even dimensions.
        odd_acc: By pairs, of odd ones.
        rescale: [M], of the sums.
        weights: [M, N], of the values.
        v: [N, D] of any dtype that goes to DTYPE; or int16 pairs [N, D / 2].
        DTYPE: Of the factors.
        PAIRED: Whether by pairs.
        COMPILED: False in the interpreter.
    """
    if PAIRED:
        v, odd_v = parted(v, COMPILED)
        weights = weights.to(DTYPE)
        acc = tl.dot(weights, v, acc * rescale[:, None])
        odd_acc = tl.dot(weights, odd_v, odd_acc * rescale[:, None])
    else:
        acc = acc * rescale[:, None] + tl.dot(
            weights.to(DTYPE), v.to(DTYPE), input_precision="ieee"
        )
    return acc, odd_acc


@triton.jit
def in_float16(q):
    """Return rows in float16, each times a power of two, and what takes that back, in float32.

    Args:
        q: [M, D]; a row with infinity or NaN keeps it.
    """
    wide = q.to(tl.float32)
    exponents = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
    # Biased by 127: the power takes 2^e to 2^14, and both it and its inverse are normal numbers.
    power = tl.minimum(2 * 127 + 14 - exponents, 253)
    up = (power << 23).to(tl.float32, bitcast=True)
    down = ((2 * 127 - power) << 23).to(tl.float32, bitcast=True)
    return (wide * up[:, None]).to(tl.float16), down
