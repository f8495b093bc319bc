"""Dependent launches: the next kernel's programs start while the last ones of this one still run.

Without them a kernel starts when the one before has ended and its writes are flushed, which in a
captured step of small kernels is a good part of the time. With them:

    this kernel   | let the next start | wait for the one before | read, compute, write |
    the next one        starts as soon as every program here has  | wait ............... | read ...

What a kernel must keep to, or results are wrong at times:

- It waits before it reads or writes what any kernel of the step writes. The wait is for the whole
  of the kernel before, flushed; since that one has waited too, for all before it. So buffers may
  be handed out again as ever.
- A program that does nothing may return without a wait, if one of its grid waits in any case.
- What nobody writes in a step (weights, the step's index arrays) may be read before the wait.

Kernels of others (cuBLAS, torch) are launched as ever, after all of the kernel before, and their
ends let a dependent one start: they need to know nothing. Hopper and later have it in hardware.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tailrace.kernels.attention_shapes import Capability

LEAST_CAPABILITY = (9, 0)

_is_on: ContextVar[bool] = ContextVar("dependent launches", default=False)


def has_dependent_launches(device: torch.device, capability: Capability) -> bool:
    """Whether a device knows them: a GPU of that compute capability, not the interpreter."""
    return device.type == "cuda" and capability >= LEAST_CAPABILITY


@contextmanager
def dependent_launches(*, on: bool = True) -> Iterator[None]:
    """Launch this package's kernels so, within the block and on this thread."""
    token = _is_on.set(on)
    try:
        yield
    finally:
        _is_on.reset(token)


def launch_options() -> dict[str, bool]:
    """Return what a kernel with a DEPENDENT constant is launched with, besides its arguments."""
    if _is_on.get():
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Let the next kernel's programs start once all programs of this one have come here."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(DEPENDENT: tl.constexpr):
    """Wait until the kernel before has ended and what it wrote can be seen."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def take_turn(DEPENDENT: tl.constexpr):
    """Let the next start and wait for the one before: what a kernel without weights begins with."""
    let_next_start(DEPENDENT)
    wait_for_last(DEPENDENT)


LINE_BYTES: tl.constexpr = tl.constexpr(128)
"""Of the caches: what one prefetch asks for."""
AHEAD: tl.constexpr = tl.constexpr(4)
"""Steps of a linear layer's loop whose weights are asked for before the wait."""


@triton.jit
def prefetch(pointers, DEPENDENT: tl.constexpr):
    """Ask for the lines at `pointers`, which must be valid, in the second-level cache.

    While a kernel waits, memory is idle but for the tail of the one before. What a kernel that is
    bound by its weight asks for by then is at hand when it starts.
    """
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            args=[pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
