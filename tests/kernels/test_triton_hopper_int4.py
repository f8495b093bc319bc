"""Hopper's kernel over 4-bit weights: how work is cut, where it runs, and on a GPU what it gives.

What the kernel computes is seen on the CPU in our interpreter of Gluon, and on a GPU, here and,
with every candidate under a timeout, by benchmarks/gpu_int4.py; test_compile_ahead compiles it.
"""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels.linear import int4_linear
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.int4_linear import has_hopper_kernel
from tailrace.kernels.linear.workspace import Workspace

hopper = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int4", reason="Triton with Gluon is not installed"
)
hopper_int4_ways = pytest.importorskip(
    "tailrace.kernels.linear.hopper_int4_ways", reason="Triton with Gluon is not installed"
)
SHAPES = sorted(
    {
        (shape.sides, shape.programs, shape.least_span, shape.order)
        for shapes in hopper.CANDIDATES.values()
        for shape in shapes
    }
)
on_gluon = pytest.importorskip(
    "tests.kernels.on_gluon", reason="Triton with Gluon is not installed"
)

LAYERS = [(48, 1), (4608, 28), (3584, 28), (37888, 28), (3584, 148), (200, 10), (257, 3)]
"""Outputs, chunks."""


@pytest.mark.parametrize(("outputs", "chunks"), LAYERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_units_are_of_one_tile(outputs, chunks, shape):
    shape = hopper.HopperShape(*shape)
    if shape.order != "two units":
        assert shape.fits(chunks)
    elif shape.fits(chunks):
        assert shape.cut(outputs, chunks, 132).span % 2 == 0
    else:
        assert chunks % 2


@pytest.mark.parametrize(("outputs", "chunks"), LAYERS)
def test_arrivals_have_room(outputs, chunks):
    workspace = Workspace(torch.device("cpu"), torch.bfloat16)
    workspace.reserve(outputs=outputs, splits=1, rows=128, parts=5)
    for numbers in SHAPES:
        shape = hopper.HopperShape(*numbers)
        tiles = shape.cut(outputs, chunks, 132).tiles
        assert tiles * shape.sides <= workspace.scratch.arrivals.numel()
    assert workspace.scratch.parts.numel() == 5


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 128])
def test_the_usual_shape_is_a_candidate_of_the_tile_that_holds_the_rows(rows):
    for outputs, chunks in LAYERS:
        block_m, shape = hopper.shape_for(rows, outputs)
        assert rows <= block_m
        assert block_m == 16 or rows > block_m // 2
        assert shape in hopper.CANDIDATES[block_m]
        assert shape.fits(chunks)


def test_it_is_chosen_on_hopper_with_its_own_release_of_triton_alone():
    assert has_hopper_kernel((9, 0), "3.6.0")
    assert not has_hopper_kernel((9, 0), "3.5.1")
    assert not has_hopper_kernel((9, 0), "3.60")
    assert not has_hopper_kernel((8, 9), "3.6.0")
    assert not has_hopper_kernel((10, 0), "3.6.0")
    assert not has_hopper_kernel(None, "3.6.0")


def interpreted(monkeypatch, seed, rows, chunk, shape, *, dependent=False):
    """Return a product of a small layer by the kernel on the CPU, and its error."""
    layer = on_gluon.Layer(group=chunk)
    weight = layer.weight()
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: layer.multiprocessors)
    x, bias, y = on_gluon.product(
        monkeypatch, hopper, hopper.int4_hopper, layer, weight, rows, seed=seed,
        room={"parts": hopper.reserved_parts(layer.outputs, layer.chunks, torch.device("cpu"))},
        dtype=torch.bfloat16 if chunk == 128 else torch.float16, shape=shape, dependent=dependent,
    )  # fmt: skip
    return y, on_gluon.error(x, bias, y, weight.dequantize())


INTERPRETED = [
    (block, chunk, shape)
    for block, shapes in hopper.CANDIDATES.items()
    for chunk, shape in zip((64, 128) * len(shapes), shapes, strict=False)
    if shape.least_span == (4 if chunk == 64 else 7)
]
"""Each order of each tile of rows, in one of two groups and halves."""


@pytest.mark.parametrize(("block", "chunk", "shape"), INTERPRETED, ids=str)
def test_in_the_interpreter_it_equals_the_product(monkeypatch, block, chunk, shape):
    y, error = interpreted(monkeypatch, block + chunk, block - 3, chunk, shape)
    assert error < (0.003 if y.dtype == torch.bfloat16 else 0.0004)


def test_sums_are_the_same_bits_in_whatever_order_programs_and_copies_come(monkeypatch):
    """Also where it starts before the kernel before has ended, whose results it does not touch."""
    shape = hopper.HopperShape(1, 2, 4)
    seen = []
    for seed in range(5):
        torch.manual_seed(3)
        y, _ = interpreted(monkeypatch, seed, 20, 128, shape, dependent=seed > 2)
        seen.append(y)
    assert all(torch.equal(seen[0], y) for y in seen[1:])


@pytest.fixture
def on_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernel needs a Hopper GPU")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 128])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(256, 40, 64), (3584, 520, 128)])
def test_it_equals_the_product_with_the_dequantised_weight(
    on_hopper, monkeypatch, rows, inputs, outputs, group
):
    weight = quantize_groups(torch.randn(outputs, inputs) * inputs**-0.5, group)
    bias = torch.randn(outputs)
    workspace = Workspace(on_hopper, torch.bfloat16)
    usual = tuple(hopper.shape_for(most, outputs)[1].words for most in hopper.CANDIDATES)
    monkeypatch.setattr(hopper_int4_ways, "SERVED", ((0, 0, usual),))
    layer = int4_linear.Int4Linear(weight, bias, workspace)
    assert "for Hopper" in layer.name
    whole = torch.full((rows + 40, inputs), float("nan"), device=on_hopper).bfloat16()
    whole[:rows] = torch.randn(rows, inputs, device=on_hopper)
    x = whole[:rows]
    truth = x.double() @ weight.dequantize().to(on_hopper).double().t()
    truth += bias.to(on_hopper).bfloat16().double()
    y = layer(x)
    assert float((y.double() - truth).norm() / truth.norm()) < 0.006
    assert torch.equal(y, layer(x))
    assert not workspace.scratch.arrivals.any()
