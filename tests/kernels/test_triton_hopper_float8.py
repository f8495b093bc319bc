"""The kernel for Hopper of few FP8 rows, on the CPU in our Gluon interpreter.

On a GPU every candidate is checked, under a timeout, by benchmarks/gpu_float8.py;
test_compile_ahead compiles them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.linear.float8 import FLOAT8, quantize_blocks, quantize_channels
from tailrace.kernels.linear.float8_rows import Float8Rows, empty_rows, quantize_rows
from tailrace.kernels.linear.workspace import Workspace

hopper = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_float8", reason="Triton with Gluon is not installed"
)
gluon_interpreter = pytest.importorskip(
    "tests.kernels.gluon_interpreter", reason="Triton with Gluon is not installed"
)
Language = pytest.importorskip("tests.kernels.gluon_interpreter.language").Language

WRITTEN_BEFORE = frozenset(
    {"x_desc", "scale_desc", "x_scale_ptr", "out_ptr", "part_ptr", "arrivals"}
)
"""Arguments that kernels of a step write."""
BOUNDS = {torch.bfloat16: 0.0019, torch.float16: 0.00022}
"""Of the error: the result's own rounding is 0.0017 and 0.0002."""
CASES = [(block, shape) for block, shapes in hopper.CANDIDATES.items() for shape in shapes]
SMALL = hopper.HopperFloat8Shape(128, 1, 4, 2, 2)
SLICED = hopper.HopperFloat8Shape(64, 4, 4, 1, 0)


@dataclass(frozen=True)
class Layer:
    """Sizes of a weight, and of the GPU that it is cut for."""

    outputs: int = 304
    inputs: int = 656
    by_blocks: bool = False
    multiprocessors: int = 3

    @property
    def chunks(self) -> int:
        return -(-self.inputs // 128)

    def weight(self):
        matrix = torch.randn(self.outputs, self.inputs) * self.inputs**-0.5
        return (quantize_blocks if self.by_blocks else quantize_channels)(matrix)


def rows_amid_nan(layer, rows):
    """Return rows in float8 with NaN behind them and behind their scales."""
    given = quantize_rows(torch.randn(rows, layer.inputs), 128 if layer.by_blocks else 0)
    around = empty_rows(rows + 40, layer.inputs, given.group, torch.device("cpu"))
    around.values.view(torch.uint8).fill_(0x7F)
    around.values[:rows].view(torch.uint8).copy_(given.values.view(torch.uint8))
    around.scales.fill_(float("nan"))
    around.scales[:rows].copy_(given.scales)
    return Float8Rows(around.values[:rows], around.scales[:rows], given.group)


def multiplied(monkeypatch, layer, rows, shape, dtype, *, seed=0, dependent=False, stages=3):
    """Return the rows, the result and its error; memory around and before them is NaN."""
    kernel = gluon_interpreter.Interpreter(
        hopper.float8_hopper_kernel, seed=seed, late=WRITTEN_BEFORE
    )
    weight, x = layer.weight(), rows_amid_nan(layer, rows)
    bias = torch.randn(layer.outputs).to(dtype)
    block = next(size for size in hopper.CANDIDATES if rows <= size)
    sizes = layer.outputs, layer.chunks
    workspace = Workspace(torch.device("cpu"), dtype)
    workspace.reserve(
        outputs=layer.outputs, splits=1, rows=rows,
        parts=shape.parts(*sizes, block, layer.multiprocessors),
        arrivals=shape.cut(*sizes, layer.multiprocessors).programs,
    )  # fmt: skip
    workspace.scratch.parts.fill_(float("nan"))
    out = torch.full((rows + 2, layer.outputs), float("nan"), dtype=dtype)
    few = min(shape.stages(block), max(stages // shape.slices, 1) * shape.slices)
    with monkeypatch.context() as patched, dependent_launches(on=dependent):
        patched.setattr(hopper, "multiprocessors", lambda device: layer.multiprocessors)
        patched.setattr(hopper, "float8_hopper_kernel", kernel)
        patched.setattr(hopper.HopperFloat8Shape, "stages", lambda self, rows: few)
        hopper.float8_hopper(
            x, weight, bias, dtype, scratch=workspace.scratch, shape=shape, out_TO=out[1:-1]
        )
    assert not workspace.scratch.arrivals.any(), "the next launch finds arrivals"
    assert bool(out[[0, -1]].isnan().all()), "rows beyond the result are written"
    y = out[1:-1]
    truth = x.dequantize().double() @ weight.dequantize().double().t() + bias.double()
    return x, y, float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(
    ("by_blocks", "dtype"), [(False, torch.bfloat16), (True, torch.float16)], ids=str
)
@pytest.mark.parametrize(("block", "shape"), CASES, ids=str)
def test_it_equals_the_product(monkeypatch, block, shape, by_blocks, dtype):
    torch.manual_seed(block)
    layer = Layer(by_blocks=by_blocks, multiprocessors=2)
    *_, error = multiplied(monkeypatch, layer, block - 3, shape, dtype, seed=block)
    assert error < BOUNDS[dtype]
