"""From how many sequences on a captured decode step is launched dependently, by what multiplies.

    sequences             1 ..... 16     17 ........
    half precision        plain          dependent
    by Hopper's kernels   dependent      dependent
    4 bits                dependent      dependent
    FP8, all rounded      from 8 on      dependent
    FP8, few widened      plain          plain: not measured

The bits are the same either way (kernels/dependent_launch.py). Measured on an H200
(`benchmarks/gpu_engine.py --launches`, docs/performance.md), so it holds for Hopper alone. A step
that has prompt tokens beside its decodes is plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.kernels.dependent_launch import has_dependent_launches
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.float8_linear import Float8Linear
from tailrace.kernels.linear.int4_linear import Int4Linear
from tailrace.kernels.linear.phased_linear import PhasedLinear
from tailrace.kernels.linear.triton_skinny import SkinnyLinear

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from tailrace.kernels.attention_shapes import Capability
    from tailrace.kernels.kernels import Linear

LEAST_DECODES: Mapping[type, int | None] = {
    CublasLinear: 17,
    SkinnyLinear: 17,
    Int4Linear: 1,
    Float8Linear: 8,
}
"""The least batch size that wins by each kind of layer; None: plain. FP8 where it rounds all rows.

Half precision saves 75 to 126 us of a step at 20 to 50 sequences, at 128 from nothing to 138. Up to
16 it loses 85 to 100: all of its layers are our own kernel's there, which then asks for its weight
before its turn; by Hopper's kernels it saves 123 us at 1 sequence, 259 at 8, 200 at 16 and at 50,
and 23 at 128. In 4 bits 444 us are saved at 1 sequence, 237 at 20, 89 at 128. FP8 that rounds
all rows saves 87 to 258 us at 8 to 128 sequences and loses 27 at 1; 2 to 7 were not measured.
"""

MEASURED = (9, 0)
"""The compute capability that the table holds for."""


def least_decodes(
    linears: Iterable[Linear], device: torch.device, capability: Capability
) -> int | None:
    """Return from how many sequences on decode steps are launched dependently; None: never.

    Args:
        linears: A model's layers. Of two copies of a weight, the one that serves decodes counts.
        device: That serves.
        capability: Its compute capability.
    """
    if not has_dependent_launches(device, capability) or capability != MEASURED:
        return None
    least = 0
    for wins in {_least(linear) for linear in linears}:
        if wins is None:
            return None
        least = max(least, wins)
    return least or None


def _least(linear: Linear) -> int | None:
    few = linear.few if isinstance(linear, PhasedLinear) else linear
    if isinstance(few, Float8Linear) and not few.rounds(1):
        return None
    if isinstance(few, SkinnyLinear) and few.has_hopper:
        return 1
    return LEAST_DECODES.get(type(few))


def describe(least: int | None) -> str:
    """Say in a few words how decode steps are launched."""
    if least is None:
        return "plain"
    return "dependent" if least == 1 else f"dependent from {least} sequences on"
