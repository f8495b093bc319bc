"""How Hopper's decode kernel multiplies a float8 (e4m3) cache: in float16, out of registers.

`triton_float8` says what is multiplied and why nothing is lost. A box is 8 tokens of 128 bytes, as
the copies swizzle them; a product takes a part, PART keys, whose bytes a thread fetches, widens and
holds as the left side. Which row of a product is which key or dimension, and in which order it adds
inputs up, is free as long as both sides agree. So a thread's bytes are those that lie together:

    rows of keys   the keys of a box with their lowest and highest bit exchanged, so that eight
                   threads' 16 bytes lie in eight banks
    keys           a thread has 16 dimensions that lie together, twice, of two keys for each 64: no
                   byte moves, and queries are put into that order once (`queries_in_float16`)
    values         a thread has 4 dimensions that lie together, of 16 keys: the bytes of two keys
                   are dealt to pairs, by one permutation for two conversions; it ends with the sums
                   of 4 dimensions that lie together (`in_dims`)

What waits for what, in a thread:

    multiplied   half a part: while the other half is widened, then while the next part is fetched
    handed back  a slot of the ring, when the products of its bytes have begun: a load that is only
                 on its way may be overtaken by the next copy into the slot, where contexts are
                 switched
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_PART, _WORDS = 64, 32
PART = gl.constexpr(_PART)
"""Keys of a product."""
WORDS = gl.constexpr(_WORDS)
"""Of 4 bytes, in a key or a value."""
DIMS = gl.constexpr(4 * _WORDS)
HALF = gl.constexpr(2 * _WORDS)
"""Dimensions that are multiplied while others are widened."""
BOX = gl.constexpr(8)
"""Tokens of a box."""

WIDEN = gl.constexpr("""{
    .reg .b16 early, late;
    .reg .b32 first, second;
    mov.b32 {early, late}, $4;
    cvt.rn.f16x2.e4m3x2 first, early;
    cvt.rn.f16x2.e4m3x2 second, late;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")
"""The four numbers of a word in float16."""

_DEAL = """{
    .reg .b16 early, late;
    .reg .b32 dealt, first, second;
    prmt.b32 dealt, $4, $5, SELECTOR;
    mov.b32 {early, late}, dealt;
    cvt.rn.f16x2.e4m3x2 first, early;
    cvt.rn.f16x2.e4m3x2 second, late;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}"""
DEAL_LOWER = gl.constexpr(_DEAL.replace("SELECTOR", "0x5140"))
"""Of two words the first numbers of both in float16, then the second ones."""
DEAL_HIGHER = gl.constexpr(_DEAL.replace("SELECTOR", "0x7362"))
"""The third and the fourth ones."""


@gluon.constexpr_function
def part_layout() -> gl.SharedLinearLayout:
    """Return the order of a part's words [PART, WORDS], by rows, that boxes of 8 tokens make."""
    words = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    # Pieces of 16 bytes, 4 words, change places by their token's number in the box.
    tokens = [[4, 4], [2, 8], [1, 16]]
    return gl.SharedLinearLayout([*words, *tokens, [8, 0], [16, 0], [32, 0]], [], 1024)


@gluon.constexpr_function
def key_words() -> gl.DistributedLinearLayout:
    """Return which thread fetches which of a part's words [PART, WORDS] of keys."""
    together = [[0, 1], [0, 2]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(
        [*together, [8, 0], [0, 16]], lanes, warps, [], [_PART, _WORDS]
    )


@gluon.constexpr_function
def value_words() -> gl.DistributedLinearLayout:
    """Return which thread fetches which of a part's words [PART, WORDS] of values."""
    keys = [[1, 0], [8, 0], [16, 0], [32, 0]]
    # With four keys of four banks each, 8 words of two pieces.
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 16]]
    warps = [[0, 4], [0, 8]]
    return gl.DistributedLinearLayout(keys, lanes, warps, [], [_PART, _WORDS])


@gluon.constexpr_function
def sums_by_dims(heads: int) -> gl.DistributedLinearLayout:
    """Return which thread has which sums [DIMS, heads], in the order of the dimensions."""
    more = [[0, 8]] if heads == 16 else []
    lanes = [[0, 2], [0, 4], [4, 0], [8, 0], [64, 0]]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], *more], lanes, warps, [], [4 * _WORDS, heads]
    )


@gluon.jit
def queries_in_float16(q_smem, q_bar, sums: gl.constexpr):
    """Return queries in float16, once they are there, and what takes their rows' powers back.

    Each row is multiplied by a power of two (`triton_float8`), and its dimensions lie as products
    take those of keys: shared [2, heads, HALF], in the same memory.

    Args:
        q_smem: Shared [heads, DIMS], of 16 bits.
        q_bar: Of their copy.
        sums: The layout of the products.
    """
    HEADS: gl.constexpr = q_smem.shape[0]
    order: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    mbarrier.wait(q_bar, 0)
    q = q_smem.load(order).to(gl.float32)
    exponents = gl.max(gl.abs(q), 1).to(gl.int32, bitcast=True) >> 23
    # Biased by 127: the power takes 2^e to 2^14, and both it and its inverse are normal numbers.
    power = gl.minimum(2 * 127 + 14 - exponents, 253)
    up = (power << 23).to(gl.float32, bitcast=True)
    down = ((2 * 127 - power) << 23).to(gl.float32, bitcast=True)
    q = (q * up[:, None]).to(gl.float16)
    q = q.reshape(HEADS, 2, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(HEADS, DIMS)
    layout: gl.constexpr = q_smem.layout
    whole = q_smem._reinterpret(gl.float16, [HEADS, DIMS], layout)  # noqa: SLF001 - the only way
    # A line of 128 bytes is HALF dimensions: the lines of the second half follow.
    halves = q_smem._reinterpret(gl.float16, [2, HEADS, HALF], layout)  # noqa: SLF001 - likewise
    gl.thread_barrier()  # all four warps have read what is written over
    whole.store(q)
    fence_async_shared()
    gl.thread_barrier()
    return halves, gl.convert_layout(down, gl.SliceLayout(0, sums))


@gluon.jit
def _row_keys(layout: gl.constexpr):
    """Return which key of a part each row is: within 8, bits 0 and 2 change places."""
    rows = gl.arange(0, PART, layout=layout)
    return (rows & (PART - 6)) | ((rows & 1) << 2) | ((rows >> 2) & 1)


@gluon.jit
def _next(place, phase, COUNT: gl.constexpr):
    """Return the place after one in the ring, and the phase there."""
    is_last = place == COUNT - 1
    return gl.where(is_last, 0, place + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def _fetched(boxes, bars, place, phase, order: gl.constexpr):
    """Return the words of the part at a place of the ring, once they are there."""
    q_bar, full, free = bars
    PARTS: gl.constexpr = boxes.shape[1] * BOX // PART
    shape: gl.constexpr = [boxes.shape[0] * PARTS, PART, WORDS]
    layout: gl.constexpr = part_layout()
    ring = boxes._reinterpret(gl.int32, shape, layout)  # noqa: SLF001 - the only way
    mbarrier.wait(full.index(place // PARTS), phase)
    return ring.index(place).load(order)


@gluon.jit
def _hand_back(boxes, bars, place, is_last):
    """Hand the slot of a place back after its last part, or the split's.

    Products of its words have begun, so the words are in registers.
    """
    q_bar, full, free = bars
    PARTS: gl.constexpr = boxes.shape[1] * BOX // PART
    gl.thread_barrier()  # all four warps have theirs
    is_last = is_last | (place % PARTS == PARTS - 1)
    mbarrier.arrive(free.index(place // PARTS), count=1, pred=is_last)


@gluon.jit
def _keys(words, sums: gl.constexpr):
    """Return words [PART, WORDS / 2] of half the dimensions in float16, as a left side."""
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    a, b, c, d = gl.inline_asm_elementwise(
        WIDEN,
        "=h,=h,=h,=h,r",
        args=[words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    # By key: lanes, words together, and of a word's bytes the lower bit before the higher.
    whole = gl.join(gl.join(a, b), gl.join(c, d)).reshape(PART, 4, 4, 2, 2)
    whole = whole.permute(0, 2, 4, 1, 3).reshape(PART, HALF)
    return gl.convert_layout(whole, left, assert_trivial=True)


@gluon.jit
def _values(even, odd, DEAL: gl.constexpr, sums: gl.constexpr):
    """Return two dimensions of each word [PART / 2, WORDS] of even and of odd keys likewise."""
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    a, b, c, d = gl.inline_asm_elementwise(
        DEAL,
        "=h,=h,=h,=h,r,r",
        args=[even, odd],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    # Pairs of keys; bits 4, 3 and 2, 1 and 0 of a word's number; of a pair; the dimension.
    whole = gl.join(gl.join(a, b), gl.join(c, d)).reshape(PART // 2, 2, 4, 4, 2, 2)
    whole = whole.permute(2, 5, 1, 3, 0, 4).reshape(HALF, PART)
    return gl.convert_layout(whole, left, assert_trivial=True)


@gluon.jit
def _begun_scores(words, queries, zero):
    """Begin a part's products with queries; return sums [PART, heads] and what is being read."""
    sums: gl.constexpr = zero.type.layout
    lower, higher = gl.split(words.reshape(PART, 2, WORDS // 2).permute(0, 2, 1))
    lower = _keys(lower, sums)
    first = queries.index(0).permute((1, 0))
    found = warpgroup_mma(lower, first, zero, use_acc=False, is_async=True)
    higher = _keys(higher, sums)
    second = queries.index(1).permute((1, 0))
    return warpgroup_mma(higher, second, found, is_async=True), lower, higher


@gluon.jit
def _begun_sums(words, weight, low_acc, high_acc, sums: gl.constexpr):
    """Begin a part's products with weights; return sums [HALF, heads] and what is being read."""
    even, odd = gl.split(words.reshape(PART // 2, 2, WORDS).permute(0, 2, 1))
    lower = _values(even, odd, DEAL_LOWER, sums)
    low_acc = warpgroup_mma(lower, weight, low_acc, is_async=True)
    higher = _values(even, odd, DEAL_HIGHER, sums)
    high_acc = warpgroup_mma(higher, weight, high_acc, is_async=True)
    return low_acc, high_acc, lower, higher


@gluon.jit
def scored_float8(common, held, slot, phase, sums: gl.constexpr):
    """Return the scores of a split's parts, the last ones last, and where the ring stands then.

    Args:
        common: Queries, ring, room for weights [parts, heads, PART] and barriers.
        held: Keys of the split.
        slot: Of its first tile.
        phase: Of that slot.
        sums: The layout of products.
    """
    queries, boxes, weights, bars = common
    COUNT: gl.constexpr = weights.shape[0]
    HEADS: gl.constexpr = weights.shape[1]
    PARTS: gl.constexpr = boxes.shape[1] * BOX // PART
    PLACES: gl.constexpr = boxes.shape[0] * PARTS
    order: gl.constexpr = key_words()
    zero = gl.zeros([PART, HEADS], gl.float32, layout=sums)
    scores = (gl.full([PART, HEADS], float("-inf"), gl.float32, layout=sums),) * COUNT
    parts = gl.cdiv(held, PART)
    place = slot * PARTS
    words = _fetched(boxes, bars, place, phase, order)
    for _ in range(1, parts):
        found, lower, higher = _begun_scores(words, queries, zero)
        _hand_back(boxes, bars, place, False)
        place, phase = _next(place, phase, PLACES)
        words = _fetched(boxes, bars, place, phase, order)
        found, lower, higher = warpgroup_mma_wait(0, deps=[found, lower, higher])
        scores = scores[1:] + (found,)  # noqa: RUF005 - Gluon knows no stars
    found, lower, higher = _begun_scores(words, queries, zero)
    _hand_back(boxes, bars, place, True)
    found, lower, higher = warpgroup_mma_wait(0, deps=[found, lower, higher])
    # Only the last part may have rows without a key.
    is_key = _row_keys(gl.SliceLayout(1, sums)) < held - (parts - 1) * PART
    found = gl.where(is_key[:, None], found, float("-inf"))
    scores = scores[1:] + (found,)  # noqa: RUF005 - Gluon knows no stars
    slot, phase = _next(place // PARTS, phase, boxes.shape[0])
    return scores, slot, phase


@gluon.jit
def summed_float8(common, held, slot, phase, sums: gl.constexpr):
    """Return sums of a split's values by their weights, for `in_dims`, and the ring's place.

    Args:
        common: As `scored_float8` has it, with weights.
        held: As there.
        slot: As there.
        phase: As there.
        sums: As there.
    """
    queries, boxes, weights, bars = common
    COUNT: gl.constexpr = weights.shape[0]
    HEADS: gl.constexpr = weights.shape[1]
    PARTS: gl.constexpr = boxes.shape[1] * BOX // PART
    PLACES: gl.constexpr = boxes.shape[0] * PARTS
    order: gl.constexpr = value_words()
    low_acc = gl.zeros([HALF, HEADS], gl.float32, layout=sums)
    high_acc = gl.zeros([HALF, HEADS], gl.float32, layout=sums)
    parts = gl.cdiv(held, PART)
    place = slot * PARTS
    words = _fetched(boxes, bars, place, phase, order)
    for part in range(1, parts):
        weight = weights.index(COUNT - 1 - parts + part).permute((1, 0))
        low_acc, high_acc, lower, higher = _begun_sums(words, weight, low_acc, high_acc, sums)
        _hand_back(boxes, bars, place, False)
        place, phase = _next(place, phase, PLACES)
        words = _fetched(boxes, bars, place, phase, order)
        low_acc, high_acc, lower, higher = warpgroup_mma_wait(
            0, deps=[low_acc, high_acc, lower, higher]
        )
    # What no key was written to may be NaN, and 0 x NaN is NaN.
    is_key = _row_keys(gl.SliceLayout(1, order)) < held - (parts - 1) * PART
    words = gl.where(is_key[:, None], words, gl.zeros_like(words))
    weight = weights.index(COUNT - 1).permute((1, 0))
    low_acc, high_acc, lower, higher = _begun_sums(words, weight, low_acc, high_acc, sums)
    _hand_back(boxes, bars, place, True)
    low_acc, high_acc, lower, higher = warpgroup_mma_wait(
        0, deps=[low_acc, high_acc, lower, higher]
    )
    slot, phase = _next(place // PARTS, phase, boxes.shape[0])
    return low_acc, high_acc, slot, phase


@gluon.jit
def in_dims(low_acc, high_acc):
    """Return sums [DIMS, heads] of `summed_float8` in the dimensions' order."""
    HEADS: gl.constexpr = low_acc.shape[1]
    both = gl.join(low_acc, high_acc).reshape(4, 2, 2, 4, HEADS, 2)
    ordered = both.permute(2, 0, 3, 5, 1, 4).reshape(DIMS, HEADS)
    return gl.convert_layout(ordered, sums_by_dims(HEADS), assert_trivial=True)
