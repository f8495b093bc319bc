"""Sampling in Triton: thresholds are sought on the weights' bits, so nothing is sorted.

    adjust     blocks, row   bias, masks, penalties; the largest logit, the raw log-sum-exp
    weigh      blocks, row   exp((x - peak) / T); how much lies above eight coarse pivots
    aim        row           between which pivots the threshold lies
    gather     blocks, row   the weights between them: mostly some hundred
    search     row           the threshold among these, to the last bit
    sum_kept   blocks, row   what the filters leave of each block
    draw       row           the block, then the token, at which the running sum passes the aim
    rank       blocks, row   how many raw logits are larger, where that is asked for

A positive float's bits, read as an integer, are ordered as the floats are. The threshold of top_k
is the least t with fewer than k weights above t; that of top_p the least t with less than p of
the mass above t. Both are found by one search, eight pivots at a time: as weights are gathered by
their own value, equally likely ones stay or go together. Sums are integers (see `rows`), so the
order in which programs gather and add changes nothing.

What a row does not ask for is neither written nor read: a greedy one has no weights, one without
edits, mask and history no adjusted logits. `weigh` opens the range in which a threshold is sought;
it is empty, low above high, where there is none, and no later kernel asks why. Each block has
maxima and sums of its own, whichever program computes it, so how many programs a row has, which
depends on how many rows there are, changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.errors import EngineError
from tailrace.kernels.sampling.rows import EVERYTHING, MAX_VOCAB, Asked, Drawn, SamplingRows

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
"""Tokens that are looked at together, by a program and by a step of the search."""
MOST_PROGRAMS = 2112
"""About so many programs a launch has: as many of four warps as an H200 holds at once. One that
ends at once costs its start, so more rows have programs that walk over several blocks."""
WEIGH_REGISTERS = 64
"""A thread: with the 103 that Hopper's would take, half as many programs fit beside each other."""

_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight
_UNIT = tl.constexpr(17592186044416.0)  # 2^44: the weight 1 in the sums
_TINY = tl.constexpr(1.1754943508222875e-38)
_HUGE = tl.constexpr(1.2676506002282294e30)  # beyond it, division is not exact about infinity
_NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _fixed(weights):
    return (weights * _UNIT).to(tl.int64)


@triton.jit
def _bits(weights):
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def _largest(values):
    """Return the maximum, NaN where one value is NaN: `tl.max` alone may drop it."""
    is_nan = values != values  # noqa: PLR0124  # Triton's way to ask
    largest = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    return tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), largest)


@triton.jit
def _peak(peaks, row, num_blocks, PARTS: tl.constexpr):
    """Return the largest of a row's block maxima: NaN where one is NaN."""
    parts = tl.arange(0, PARTS)
    values = tl.load(peaks + row * num_blocks + parts, mask=parts < num_blocks, other=float("-inf"))
    return _largest(values)


@triton.jit
def _coarse_pivots():
    """Return bits of 0, 2^-22, 2^-16, 2^-11, 2^-7, 2^-4, 2^-2, 2^-1: finer at the top."""
    step = 7 - tl.arange(0, 8)
    return tl.where(step == 7, 0, _ONE - ((1 + step * (step + 1) // 2) << 23))


@triton.jit
def _is_changed(edit_starts, mask_rows, history_rows, row):
    """Whether a row's adjusted logits may be others than its raw ones."""
    has_edits = tl.load(edit_starts + row) < tl.load(edit_starts + row + 1)
    return has_edits | (tl.load(mask_rows + row) >= 0) | (tl.load(history_rows + row) >= 0)


@triton.jit
def _changed(
    x, columns, is_column, row, edit_starts, edit_ids, edit_values, mask_rows, masks, mask_words,
    history_rows, history, presence, frequency, repetition, vocab_size,
):  # fmt: skip
    """Return a block's logits with bias, mask and penalties, in this order."""
    for edit in range(tl.load(edit_starts + row), tl.load(edit_starts + row + 1)):
        is_edited = columns == tl.load(edit_ids + edit)
        x = tl.where(is_edited, x + tl.load(edit_values + edit), x)
    masked = tl.load(mask_rows + row).to(tl.int64)
    if masked >= 0:
        words = tl.load(masks + masked * mask_words + columns // 32, mask=is_column, other=0)
        x = tl.where(((words >> (columns % 32)) & 1) != 0, x, float("-inf"))
    kept = tl.load(history_rows + row).to(tl.int64)
    if kept >= 0:
        past = tl.load(history + kept * vocab_size + columns, mask=is_column, other=0)
        penalty = tl.load(repetition + row)
        penalised = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + penalty), x * penalty)
        x = tl.where((past & 1) != 0, penalised, x)
        counts = past >> 1
        x -= tl.load(frequency + row) * counts.to(tl.float32)
        x -= tl.load(presence + row) * (counts > 0).to(tl.float32)
    return x


@triton.jit
def adjust_kernel(
    logits,
    logits_stride,
    weights,
    temperatures,
    raw_peaks,
    raw_sums,
    peaks,
    best_ids,
    edit_starts,
    edit_ids,
    edit_values,
    mask_rows,
    masks,
    mask_words,
    history_rows,
    history,
    presence,
    frequency,
    repetition,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    is_greedy = tl.load(temperatures + row) == 0.0
    is_changed = _is_changed(edit_starts, mask_rows, history_rows, row)
    logits += row * logits_stride
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        x = raw.to(tl.float32)
        # The next block's come while this one is reduced.
        columns = (block + tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
        columns = block * BLOCK + tl.arange(0, BLOCK)
        is_column = columns < vocab_size
        peak = tl.max(x, 0)
        total = tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 0)
        # The sum is NaN where a value is NaN or infinity, which the maximum may have dropped.
        peak = tl.where(total == total, peak, float("nan"))  # noqa: PLR0124
        place = row * num_blocks + block
        tl.store(raw_peaks + place, peak)
        tl.store(raw_sums + place, total)
        if is_changed:
            x = _changed(
                x, columns, is_column, row, edit_starts, edit_ids, edit_values, mask_rows, masks,
                mask_words, history_rows, history, presence, frequency, repetition, vocab_size,
            )  # fmt: skip
            peak = _largest(x)
            if not is_greedy:
                tl.store(weights + row * vocab_size + columns, x, mask=is_column)
        tl.store(peaks + place, peak)
        if is_greedy:
            best = tl.min(tl.where(is_column & (x == peak), columns, _NOBODY), 0)
            tl.store(best_ids + place, best)


@triton.jit
def _is_counted(top_k, row, vocab_size):
    k = tl.load(top_k + row)
    return (k > 0) & (k < vocab_size)


@triton.jit
def weigh_kernel(
    logits,
    logits_stride,
    weights,
    temperatures,
    top_k,
    top_p,
    min_p,
    edit_starts,
    mask_rows,
    history_rows,
    peaks,
    sums,
    coarse_counts,
    coarse_sums,
    lows,
    highs,
    sizes,
    thresholds,
    vocab_size,
    num_blocks,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    is_first = tl.program_id(0) == 0
    if is_first:
        # Of a row that is greedy or broken nothing is sought, and nothing kept out.
        tl.store(lows + row, 1)
        tl.store(highs + row, 0)
        tl.store(thresholds + row, 0)
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        return
    peak = _peak(peaks, row, num_blocks, PARTS)
    if not (tl.abs(peak) < float("inf")):
        return
    is_counted = _is_counted(top_k, row, vocab_size)
    is_searched = is_counted | (tl.load(top_p + row) < 1.0)
    if is_first:
        # At the most, only the most likely token stays.
        tl.store(thresholds + row, tl.minimum(_bits(tl.load(min_p + row)), _ONE))
        tl.store(sizes + row, 0)
        if is_searched:
            tl.store(lows + row, 0)
            tl.store(highs + row, _ONE)
    temperature = tl.minimum(tl.maximum(temperature, _TINY), _HUGE)
    is_changed = _is_changed(edit_starts, mask_rows, history_rows, row)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        is_column = columns < vocab_size
        pointers = weights + row * vocab_size + columns
        if is_changed:
            x = tl.load(pointers, mask=is_column, other=float("-inf"))
        else:
            raw = logits + row * logits_stride + columns
            x = tl.load(raw, mask=is_column, other=float("-inf")).to(tl.float32)
        w = tl.minimum(tl.exp((x - peak) / temperature), 1.0)
        tl.store(pointers, w, mask=is_column)
        fixed = _fixed(w)
        place = row * num_blocks + block
        tl.store(sums + place, tl.sum(fixed, 0))
        if is_searched:
            is_above = _bits(w)[:, None] > _coarse_pivots()[None, :]
            target = place * 8 + tl.arange(0, 8)
            if is_counted:
                tl.store(coarse_counts + target, tl.sum(is_above.to(tl.int32), 0))
            else:
                tl.store(coarse_sums + target, tl.sum(tl.where(is_above, fixed[:, None], 0), 0))


@triton.jit
def _narrow(pivots, found, low, high, above, limit):
    """Return the part of [low, high] that holds the threshold, and what lies above it."""
    is_enough = found.to(tl.float64) < limit
    new_high = tl.min(tl.where(is_enough, pivots, high), 0)
    new_low = tl.max(tl.where(is_enough, low, pivots + 1), 0)
    above = tl.max(tl.where(is_enough, found, above), 0)
    return new_low, new_high, above


@triton.jit
def aim_kernel(
    top_k,
    top_p,
    sums,
    coarse_counts,
    coarse_sums,
    lows,
    highs,
    aboves,
    vocab_size,
    num_blocks,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(lows + row) > tl.load(highs + row):
        return
    parts = tl.arange(0, PARTS)
    is_part = parts < num_blocks
    places = (row * num_blocks + parts)[:, None] * 8 + tl.arange(0, 8)[None, :]
    pivots = _coarse_pivots()
    nothing = tl.zeros([8], tl.int64)
    if _is_counted(top_k, row, vocab_size):
        k = tl.load(top_k + row)
        # Everything above is gathered as well: top_p takes its share of it.
        counts = tl.sum(tl.load(coarse_counts + places, mask=is_part[:, None], other=0), 0)
        low, _, _ = _narrow(pivots, counts.to(tl.int64), 0, _ONE, nothing, k.to(tl.float64))
        tl.store(lows + row, low)
        tl.store(highs + row, _ONE)
        tl.store(aboves + row, tl.max(nothing, 0))
    else:
        masses = tl.sum(tl.load(coarse_sums + places, mask=is_part[:, None], other=0), 0)
        total = tl.sum(tl.load(sums + row * num_blocks + parts, mask=is_part, other=0), 0)
        limit = tl.load(top_p + row) * total.to(tl.float64)
        low, high, above = _narrow(pivots, masses, 0, _ONE, nothing, limit)
        tl.store(lows + row, low)
        tl.store(highs + row, high)
        tl.store(aboves + row, above)


@triton.jit
def gather_kernel(
    weights, lows, highs, sizes, gathered, vocab_size, num_blocks, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    low, high = tl.load(lows + row), tl.load(highs + row)
    if low > high:
        return
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(weights + row * vocab_size + columns, mask=columns < vocab_size, other=-1.0)
        bits = _bits(w)
        is_wanted = (bits >= low) & (bits <= high)
        count = tl.sum(is_wanted.to(tl.int32), 0)
        if count > 0:
            start = tl.atomic_add(sizes + row, count)
            place = start + tl.cumsum(is_wanted.to(tl.int32), 0) - 1
            tl.store(gathered + row * vocab_size + place, w, mask=is_wanted)


@triton.jit
def _above(weights, size, pivots, high, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many of `size` weights, or how much, lie above each pivot and not above high."""
    total = tl.zeros([BLOCK, 8], tl.int64)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        w = tl.load(weights + places, mask=places < size, other=0.0)
        bits = _bits(w)
        is_above = (bits[:, None] > pivots[None, :]) & (bits <= high)[:, None]
        if COUNTS:
            total += is_above.to(tl.int64)
        else:
            total += tl.where(is_above, _fixed(w)[:, None], 0)
    return tl.sum(total, 0)


@triton.jit
def _squeeze(weights, size, low, high, BLOCK: tl.constexpr):
    """Move the weights between low and high to the front, and return how many there are."""
    count = 0
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        w = tl.load(weights + places, mask=places < size, other=-1.0)
        bits = _bits(w)
        is_wanted = (bits >= low) & (bits <= high)
        ranks = tl.cumsum(is_wanted.to(tl.int32), 0)
        tl.debug_barrier()  # all have read this block before any writes into it
        tl.store(weights + count + ranks - 1, w, mask=is_wanted)
        count += tl.sum(is_wanted.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def _find(weights, size, low, high, above, limit, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least t of [low, high] with less than `limit` above t, as bits; and the size.

    Args:
        weights: Those between low and high, and maybe others. Where they are many, those that no
            longer matter are dropped; where counted, those above t stay.
        size: How many there are.
        low: Bits.
        high: Bits; where no t serves, it is the answer.
        above: What lies above high.
        limit: float64.
        COUNTS: Whether weights are counted, or summed.
        BLOCK: Weights looked at together.
    """
    eighths = tl.arange(0, 8)
    while low < high:
        span = high - low
        pivots = low + span // 8 * eighths + span % 8 * eighths // 8
        found = above + _above(weights, size, pivots, high, COUNTS, BLOCK)
        low, high, above = _narrow(pivots, found, low, high, above, limit)
        if size > BLOCK:
            size = _squeeze(weights, size, low, _ONE if COUNTS else high, BLOCK)
    return high, size


@triton.jit
def search_kernel(
    gathered,
    top_k,
    top_p,
    sums,
    lows,
    highs,
    aboves,
    sizes,
    thresholds,
    vocab_size,
    num_blocks,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    low, high = tl.load(lows + row), tl.load(highs + row)
    if low > high:
        return
    gathered += row * vocab_size
    size = tl.load(sizes + row)
    least = tl.load(thresholds + row)  # min_p's
    above = tl.load(aboves + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    parts = tl.arange(0, PARTS)
    mass = tl.sum(tl.load(sums + row * num_blocks + parts, mask=parts < num_blocks, other=0), 0)
    if (k > 0) & (k < vocab_size):
        low, size = _find(gathered, size, low, high, above, k.to(tl.float64), True, BLOCK)
        size = _squeeze(gathered, size, low, high, BLOCK)
        mass = tl.max(_above(gathered, size, tl.zeros([8], tl.int32), high, False, BLOCK), 0)
    if p < 1.0:
        low = tl.minimum(tl.maximum(low, least), high)
        low, _ = _find(gathered, size, low, high, above, p * mass.to(tl.float64), False, BLOCK)
    tl.store(thresholds + row, tl.maximum(low, least))


@triton.jit
def sum_kept_kernel(weights, thresholds, sums, vocab_size, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    threshold = tl.load(thresholds + row)
    if threshold == 0:
        return
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(weights + row * vocab_size + columns, mask=columns < vocab_size, other=0.0)
        kept = tl.where(_bits(w) >= threshold, _fixed(w), 0)
        tl.store(sums + row * num_blocks + block, tl.sum(kept, 0))


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(seed, position):
    start = _mix(seed.to(tl.uint64))
    mixed = _mix(start + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    return (mixed >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _invert(
    weights, sums, threshold, draw, vocab_size, num_blocks,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the first id at which the running sum of what is kept exceeds draw x total."""
    parts = tl.arange(0, PARTS)
    ends = tl.cumsum(tl.load(sums + parts, mask=parts < num_blocks, other=0), 0)
    total = tl.max(ends, 0)
    aim = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
    block = tl.sum((ends <= aim).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= aim, ends, 0), 0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weights + columns, mask=columns < vocab_size, other=0.0)
    inside = tl.cumsum(tl.where(_bits(w) >= threshold, _fixed(w), 0), 0)
    return block * BLOCK + tl.sum((inside <= aim - before).to(tl.int32), 0)


@triton.jit
def draw_kernel(
    logits,
    logits_stride,
    weights,
    temperatures,
    seeds,
    positions,
    raw_peaks,
    raw_sums,
    peaks,
    best_ids,
    sums,
    thresholds,
    history_rows,
    history,
    token_ids,
    logprobs,
    ranks,
    vocab_size,
    num_blocks,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_blocks
    places = row * num_blocks + parts
    raw_tops = tl.load(raw_peaks + places, mask=is_part, other=float("-inf"))
    shares = tl.load(raw_sums + places, mask=is_part, other=0.0)
    tops = tl.load(peaks + places, mask=is_part, other=float("-inf"))
    raw_peak, peak = _largest(raw_tops), _largest(tops)
    tl.store(ranks + row, 1)
    tl.store(logprobs + row, float("nan"))
    if not (tl.abs(raw_peak) < float("inf")):
        tl.store(token_ids + row, -1)
        return
    if not (tl.abs(peak) < float("inf")):
        tl.store(token_ids + row, -2)
        return
    if tl.load(temperatures + row) == 0.0:
        firsts = tl.load(best_ids + places, mask=is_part, other=_NOBODY)
        token_id = tl.min(tl.where(tops == peak, firsts, _NOBODY), 0)
    else:
        token_id = _invert(
            weights + row * vocab_size, sums + row * num_blocks, tl.load(thresholds + row),
            _uniform(tl.load(seeds + row), tl.load(positions + row)),
            vocab_size, num_blocks, PARTS, BLOCK,
        )  # fmt: skip
    tl.store(token_ids + row, token_id.to(tl.int64))
    total = tl.sum(shares * tl.exp(raw_tops - raw_peak), 0)
    chosen = tl.load(logits + row * logits_stride + token_id).to(tl.float32)
    tl.store(logprobs + row, chosen - raw_peak - tl.log(total))
    kept = tl.load(history_rows + row).to(tl.int64)
    if kept >= 0:
        place = history + kept * vocab_size + token_id
        tl.store(place, (tl.load(place) + 2) | 1)


@triton.jit
def rank_kernel(
    logits, logits_stride, token_ids, wants_rank, ranks, vocab_size, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    if tl.load(wants_rank + row) == 0:
        return
    token_id = tl.load(token_ids + row)
    if token_id < 0:
        return
    logits += row * logits_stride
    chosen = tl.load(logits + token_id)
    larger = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
        larger += (x > chosen).to(tl.int32)
    count = tl.sum(larger, 0)
    if count > 0:
        tl.atomic_add(ranks + row, count)


@dataclass(frozen=True)
class SamplingScratch:
    """What the kernels hand to each other; one serves all steps, in order."""

    weights: Tensor
    """float32 [R, V]: adjusted logits, then weights."""
    gathered: Tensor
    """float32 [R, V]: weights among which a threshold is sought."""
    floats: Tensor
    """float32 [3, R, blocks]: block maxima, raw and adjusted, and raw sums."""
    best_ids: Tensor
    """int32 [R, blocks]."""
    sums: Tensor
    """int64 [R, blocks]."""
    coarse_counts: Tensor
    """int32 [R, blocks, 8]."""
    coarse_sums: Tensor
    """int64 [R, blocks, 8]."""
    limits: Tensor
    """int32 [4, R]: low, high, size, threshold."""
    aboves: Tensor
    """int64 [R]."""

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device | str) -> SamplingScratch:
        """Make scratch for steps of at most `rows` rows.

        Raises:
            EngineError: The vocabulary is larger than sums can hold.
        """
        if vocab_size > MAX_VOCAB:
            raise EngineError(f"a vocabulary of {vocab_size}: the sampler takes {MAX_VOCAB}")
        blocks = triton.cdiv(vocab_size, BLOCK)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            weights=empty(torch.float32, rows, vocab_size),
            gathered=empty(torch.float32, rows, vocab_size),
            floats=empty(torch.float32, 3, rows, blocks),
            best_ids=empty(torch.int32, rows, blocks),
            sums=empty(torch.int64, rows, blocks),
            coarse_counts=empty(torch.int32, rows, blocks, 8),
            coarse_sums=empty(torch.int64, rows, blocks, 8),
            limits=empty(torch.int32, 4, rows),
            aboves=empty(torch.int64, rows),
        )


def sample(
    logits_RV: Tensor, rows: SamplingRows, scratch: SamplingScratch, asked: Asked = EVERYTHING
) -> Drawn:
    """Draw one token a row and count it in the row's history; queues kernels and waits for none.

    Args:
        logits_RV: Any float dtype, contiguous rows; left as they are.
        rows: How to draw, on the logits' device.
        scratch: For at least R rows of the same V.
        asked: What some row may ask for, as far as the host knows; the kernels of the rest are not
            launched. What a row asks for and this denies gives wrong tokens.

    Raises:
        EngineError: The scratch does not fit the logits.
    """
    count, vocab_size = logits_RV.shape
    if scratch.weights.shape[0] < count or scratch.weights.shape[1] != vocab_size:
        raise EngineError(
            f"logits {[count, vocab_size]} do not fit scratch {list(scratch.weights.shape)}"
        )
    device = logits_RV.device
    drawn = Drawn(
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
    )
    if count == 0:
        return drawn
    _launch(logits_RV, rows, scratch, drawn, asked)
    return drawn


def programs_a_row(rows: int, blocks: int) -> int:
    """Return how many programs share a row's blocks, so that a launch has `MOST_PROGRAMS`."""
    blocks_a_program = -(-rows * blocks // MOST_PROGRAMS)
    return -(-blocks // blocks_a_program)


def _launch(
    logits: Tensor, rows: SamplingRows, scratch: SamplingScratch, drawn: Drawn, asked: Asked
) -> None:
    count, vocab_size = logits.shape
    blocks = scratch.sums.shape[1]
    stride = logits.stride(0)
    grid = (programs_a_row(count, blocks), count)
    raw_peaks, raw_sums, peaks = scratch.floats
    lows, highs, sizes, thresholds = scratch.limits
    parts = triton.next_power_of_2(blocks)
    coarse = (scratch.sums, scratch.coarse_counts, scratch.coarse_sums)
    adjust_kernel[grid](
        logits, stride, scratch.weights, rows.temperatures, raw_peaks, raw_sums, peaks,
        scratch.best_ids, rows.edit_starts, rows.edit_ids, rows.edit_values, rows.mask_rows,
        rows.masks, rows.masks.shape[1], rows.history_rows, rows.history, rows.presence,
        rows.frequency, rows.repetition, vocab_size, blocks, BLOCK=BLOCK,
    )  # fmt: skip
    if asked.draws:
        weigh_kernel[grid](
            logits, stride, scratch.weights, rows.temperatures, rows.top_k, rows.top_p, rows.min_p,
            rows.edit_starts, rows.mask_rows, rows.history_rows, peaks, *coarse, lows, highs,
            sizes, thresholds, vocab_size, blocks, PARTS=parts, BLOCK=BLOCK, num_warps=8,
            maxnreg=WEIGH_REGISTERS,
        )  # fmt: skip
    if asked.searches:
        aim_kernel[(count,)](
            rows.top_k, rows.top_p, *coarse, lows, highs, scratch.aboves, vocab_size, blocks,
            PARTS=parts, num_warps=8,
        )  # fmt: skip
        gather_kernel[grid](
            scratch.weights, lows, highs, sizes, scratch.gathered, vocab_size, blocks, BLOCK=BLOCK
        )
        search_kernel[(count,)](
            scratch.gathered, rows.top_k, rows.top_p, scratch.sums, lows, highs, scratch.aboves,
            sizes, thresholds, vocab_size, blocks, PARTS=parts, BLOCK=BLOCK, num_warps=16,
        )  # fmt: skip
    if asked.filters:
        sum_kept_kernel[grid](
            scratch.weights, thresholds, scratch.sums, vocab_size, blocks, BLOCK=BLOCK
        )
    draw_kernel[(count,)](
        logits, stride, scratch.weights, rows.temperatures, rows.seeds, rows.positions,
        raw_peaks, raw_sums, peaks, scratch.best_ids, scratch.sums, thresholds,
        rows.history_rows, rows.history, drawn.token_ids, drawn.logprobs, drawn.ranks,
        vocab_size, blocks, PARTS=parts, BLOCK=BLOCK,
    )  # fmt: skip
    if asked.ranks:
        rank_kernel[grid](
            logits, stride, drawn.token_ids, rows.wants_rank, drawn.ranks, vocab_size, blocks,
            BLOCK=BLOCK,
        )  # fmt: skip
