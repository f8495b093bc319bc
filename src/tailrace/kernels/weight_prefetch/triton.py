"""Bytes asked for in the second-level cache, by programs at the end of another kernel's grid.

    grid   [ the kernel's own programs ........ | programs that only ask, and end ]

Programs start in the order of the grid. So these start once all of the kernel's own have: not
before the product ahead has ended, whose bandwidth they would take, and in a kernel of several
waves only where its last one leaves room. Nobody waits for what they ask for.

There is no reference: nothing is computed and nothing is written. What is asked for twice, or for
nothing, costs time and changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tailrace.kernels.dependent_launch import LINE_BYTES

NOT_SPECIALIZED = (
    "first_stride", "first_piece", "first_count", "second_stride", "second_piece", "second_count",
)  # fmt: skip
"""Arguments of a kernel that hosts such programs: one compilation serves all sizes."""


@triton.jit
def past_own(AHEAD: tl.constexpr):
    """Return which of the grid's last AHEAD programs this is; below 0: none of them."""
    n0, n1 = tl.num_programs(0), tl.num_programs(1)
    place = tl.program_id(0) + n0 * (tl.program_id(1) + n1 * tl.program_id(2))
    return place - (n0 * n1 * tl.num_programs(2) - AHEAD)


@triton.jit
def ask_ahead(
    program,
    programs,
    first,
    first_stride,
    first_piece,
    first_count,
    second,
    second_stride,
    second_piece,
    second_count,
    BULK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Ask for this program's share of two spans of memory; of a weight, then of the next.

    A span is `count` pieces of `piece` bytes, a multiple of 128, `stride` bytes apart. Neighbouring
    pieces go to neighbouring programs, that is to other multiprocessors. BULK: a piece is asked for
    by one instruction (Hopper), else each of its lines by one. KEPT: what is asked for outlives
    what others stream through the cache meanwhile.
    """
    _ask_span(program, programs, first, first_stride, first_piece, first_count, BULK, KEPT)
    _ask_span(program, programs, second, second_stride, second_piece, second_count, BULK, KEPT)


@triton.jit
def _ask_span(
    program, programs, memory, stride, piece, count, BULK: tl.constexpr, KEPT: tl.constexpr
):
    threads = tl.arange(0, tl.extra.cuda.num_threads())
    if BULK:
        size = piece
        total = count
    else:
        size = piece * 0 + LINE_BYTES
        total = count * (piece // LINE_BYTES)
    a_piece = piece // size
    for start in range(program, total, programs * tl.extra.cuda.num_threads()):
        index = start + threads * programs
        place = (index // a_piece).to(tl.int64) * stride + (index % a_piece) * size
        # Each thread asks once, those beyond the end for nothing.
        ask((memory + place).to(tl.int64), tl.where(index < total, size, 0), BULK, KEPT)


@triton.jit
def ask(addresses, sizes, BULK: tl.constexpr, KEPT: tl.constexpr):
    """Ask for the bytes at each address; a size of 0 asks for nothing."""
    if BULK:
        if KEPT:
            _run(
                "{ .reg .pred p; .reg .b64 h; setp.ne.u32 p, $2, 0;"
                " createpolicy.fractional.L2::evict_last.b64 h, 1.0;"
                " @p cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, h;"
                " mov.u32 $0, 0; }",
                addresses,
                sizes,
            )
        else:
            _run(
                "{ .reg .pred p; setp.ne.u32 p, $2, 0;"
                " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                addresses,
                sizes,
            )
    elif KEPT:
        _run(
            "{ .reg .pred p; setp.ne.u32 p, $2, 0;"
            " @p prefetch.global.L2::evict_last [$1]; mov.u32 $0, 0; }",
            addresses,
            sizes,
        )
    else:
        _run(
            "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            addresses,
            sizes,
        )


@triton.jit
def _run(assembly: tl.constexpr, addresses, sizes):
    tl.inline_asm_elementwise(
        assembly, "=r,l,r", args=[addresses, sizes], dtype=tl.int32, is_pure=False, pack=1
    )
