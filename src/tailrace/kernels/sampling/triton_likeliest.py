"""The likeliest id of each row of logits, in Triton: one pass over them, and one over what it left.

    tops        blocks, row   the largest logit of some blocks, and the lowest id that has it
    likeliest   row           the same of the row; the id is kept for the step after

Torch's own maximum knows no dependent launches, and what is asked of it besides (is it finite, keep
it by slot) are half a dozen kernels more, at the end of every step. A program walks over its
blocks with one running maximum a lane and reduces once, at the end. Neither a maximum nor its
lowest id depends on how blocks are dealt out, so a row's id does not depend on how many rows there
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import launch_options, take_turn
from tailrace.kernels.sampling.rows import NOT_FINITE
from tailrace.kernels.sampling.triton import programs_a_row

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
"""Tokens that a program looks at together."""

_NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def tops_kernel(
    logits, logits_stride, tops, best_ids, vocab_size, num_blocks,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    take_turn(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    logits += row * logits_stride
    best = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
        x = raw.to(tl.float32)
        # NaN is told as infinity is: neither is a row's that can be drawn from.
        x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124
        is_larger = x > top
        top = tl.where(is_larger, x, top)
        best = tl.where(is_larger, columns, best)
    peak = tl.max(top, 0)
    place = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(tops + place, peak)
    tl.store(best_ids + place, tl.min(tl.where(top == peak, best, _NOBODY), 0))


@triton.jit(do_not_specialize=["num_parts"])
def likeliest_kernel(
    tops, best_ids, slots, last_tokens, token_ids, num_parts,
    NOT_FINITE: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    places = row * num_parts + parts
    top = tl.load(tops + places, mask=parts < num_parts, other=float("-inf"))
    best = tl.load(best_ids + places, mask=parts < num_parts, other=_NOBODY)
    peak = tl.max(top, 0)
    token_id = tl.min(tl.where(top == peak, best, _NOBODY), 0).to(tl.int64)
    # An id that there is, whatever the logits: the next step reads it before the host knows.
    tl.store(last_tokens + tl.load(slots + row), token_id)
    tl.store(token_ids + row, tl.where(tl.abs(peak) < float("inf"), token_id, NOT_FINITE))


def likeliest(logits_RV: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    """Queue the choice of each row's largest logit, the lowest id of equals.

    Args:
        logits_RV: Any float dtype, contiguous rows.
        slots: int32 [R]: where in `last_tokens` each row's id is kept, valid though it may mean
            nothing. Of rows with one slot between them, either's is.
        last_tokens: int64, written.

    Returns:
        int64 [R]; `NOT_FINITE` where the largest logit is not, or one is NaN.
    """
    rows, vocab_size = logits_RV.shape
    device = logits_RV.device
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    blocks = triton.cdiv(vocab_size, BLOCK)
    if not rows:
        return token_ids
    parts = programs_a_row(rows, blocks)
    tops = torch.empty(rows, parts, dtype=torch.float32, device=device)
    best_ids = torch.empty(rows, parts, dtype=torch.int32, device=device)
    tops_kernel[(parts, rows)](
        logits_RV, logits_RV.stride(0), tops, best_ids, vocab_size, blocks, BLOCK=BLOCK,
        **launch_options(),
    )  # fmt: skip
    likeliest_kernel[(rows,)](
        tops, best_ids, slots, last_tokens, token_ids, parts, NOT_FINITE=NOT_FINITE,
        PARTS=triton.next_power_of_2(blocks), **launch_options(),
    )  # fmt: skip
    return token_ids
