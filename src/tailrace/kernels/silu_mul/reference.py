"""silu(gate) * up in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return silu of the left half times the right half, float32 [T, F]."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return functional.silu(gate_TF).mul_(up_TF)
