"""A small 4-bit layer on the CPU, by one of Hopper's kernels in the interpreter of Gluon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.linear import triton_hopper_ring
from tailrace.kernels.linear.int4 import GroupInt4, quantize_groups
from tailrace.kernels.linear.packed_int4 import PackedInt4
from tailrace.kernels.linear.workspace import Workspace
from tests.kernels.gluon_interpreter import Interpreter

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import pytest

NAN = float("nan")
WRITTEN_BEFORE = frozenset({"x_desc", "out_ptr", "part_ptr", "arrivals"})
"""Arguments that kernels of a step write."""
_STAGES = 3
"""At most: so that rings go round."""


def assert_same_bits(product: Callable[..., tuple[torch.Tensor, float]], bound: float) -> None:
    """See that a product is the same in every order of its warps, and as dependent launches go.

    Args:
        product: Takes `seed`, of the order, and `dependent`; returns the result and its error.
        bound: Of the error.
    """
    seen = []
    for seed in range(6):
        torch.manual_seed(3)
        y, error = product(seed=seed, dependent=seed > 3)
        assert error < bound
        seen.append(y)
    assert all(torch.equal(seen[0], y) for y in seen[1:])


@dataclass(frozen=True)
class Layer:
    """Sizes of a weight, and of the GPU that it is cut for."""

    outputs: int = 300
    chunks: int = 6
    group: int = 128
    multiprocessors: int = 3

    @property
    def inputs(self) -> int:
        """By chunks of the group's kind."""
        return self.chunks * (64 if self.group % 128 else 128)

    def weight(self) -> GroupInt4:
        """Return one at random."""
        return quantize_groups(
            torch.randn(self.outputs, self.inputs) * self.inputs**-0.5, self.group
        )


def product(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    launch: Callable[..., torch.Tensor],
    layer: Layer,
    weight: GroupInt4,
    rows: int,
    *,
    room: dict[str, int],
    seed: int,
    dtype: torch.dtype,
    shape: object,
    dependent: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, a bias and what a kernel makes of them; memory around and before them is NaN.

    Args:
        monkeypatch: Puts the module's kernel and GPU back.
        module: Of the kernel, the only one there.
        launch: Of the module.
        layer: Sizes.
        weight: Of those.
        rows: Of x.
        room: What its workspace reserves.
        seed: Of the order of programs, partitions and copies.
        dtype: Of x.
        shape: Of the kernel.
        dependent: Whether it starts before the kernel before has ended.
    """
    name = next(name for name in vars(module) if name.endswith("_kernel"))
    kernel = Interpreter(getattr(module, name), seed=seed, late=WRITTEN_BEFORE)
    monkeypatch.setattr(
        module, "multiprocessors", lambda device: layer.multiprocessors, raising=False
    )
    bias = torch.randn(layer.outputs).to(dtype)
    whole = torch.full((rows + 40, layer.inputs), NAN).to(dtype)
    whole[:rows] = torch.randn(rows, layer.inputs)
    workspace = Workspace(torch.device("cpu"), dtype)
    workspace.reserve(outputs=layer.outputs, splits=1, rows=rows, **room)
    workspace.scratch.parts.fill_(NAN)
    out = torch.full((rows + 2, layer.outputs), NAN, dtype=dtype)
    with monkeypatch.context() as patched, dependent_launches(on=dependent):
        patched.setattr(module, name, kernel)
        patched.setattr(triton_hopper_ring, "MOST_STAGES", _STAGES)
        launch(
            whole[:rows], PackedInt4.of(weight, "cpu"), bias, scratch=workspace.scratch,
            shape=shape, out_TO=out[1:-1],
        )  # fmt: skip
    assert not workspace.scratch.arrivals.any(), "the next launch finds arrivals"
    assert bool(out[[0, -1]].isnan().all()), "rows beyond the result are written"
    return whole[:rows], bias, out[1:-1]


def error(x: torch.Tensor, bias: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> float:
    """Return |y - truth| / |truth|, the truth in float64."""
    truth = x.double() @ weight.double().t() + bias.double()
    return float((y.double() - truth).norm() / truth.norm())
