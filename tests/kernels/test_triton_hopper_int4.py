"""Hopper's kernel over 4-bit weights: how work is cut, where it runs, and on a GPU what it gives.

What the kernel computes is seen on the CPU in our interpreter of Gluon, and on a GPU, here and,
with every candidate under a timeout, by benchmarks/gpu_int4.py; test_compile_ahead compiles it.
"""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels.linear import int4_linear
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.int4_linear import has_hopper_kernel, rows_by_triton
from tailrace.kernels.linear.workspace import Workspace

hopper = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int4", reason="Triton with Gluon is not installed"
)

bands = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int4_bands",
    reason="Triton with Gluon is not installed",
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


def test_it_serves_where_it_was_measured_faster():
    layers = {
        "qkv": (4608, 3584),
        "o": (3584, 3584),
        "gate_up": (37888, 3584),
        "down": (3584, 18944),
    }
    served = {name: rows_by_triton(*sizes) for name, sizes in layers.items()}
    assert served == {"qkv": 64, "o": 128, "gate_up": 16, "down": 64}


def test_a_layer_gives_each_number_of_rows_to_its_kernel(monkeypatch):
    taken = []

    def kernel(name):
        def record(x, *_, **__):
            taken.append((name, x.shape[0]))

        return record

    monkeypatch.setattr(hopper, "int4_hopper", kernel("Hopper"))
    monkeypatch.setattr(hopper, "reserved_parts", lambda outputs, chunks, device: 7)
    monkeypatch.setattr(bands, "int4_bands", kernel("scaled"))
    monkeypatch.setattr(bands, "reserved", lambda outputs, chunks, device: (9, 11))
    monkeypatch.setattr(int4_linear, "int4_linear", kernel("Triton"))
    monkeypatch.setattr(int4_linear, "_is_hopper", lambda device: True)
    monkeypatch.setattr(int4_linear, "_WIDE", 40)
    workspace = Workspace(torch.device("cpu"), torch.float32)
    wide, narrow = (
        int4_linear.Int4Linear(quantize_groups(torch.randn(outputs, 64), 64), None, workspace)
        for outputs in (40, 39)
    )
    for rows in (16, 17, 128):
        wide(torch.randn(rows, 64))
        narrow(torch.randn(rows, 64))
    wide.write(torch.randn(300, 64), torch.empty(300, 40))
    assert taken == [
        ("Triton", 16), ("Triton", 16), ("Hopper", 17), ("Triton", 17), ("Hopper", 128),
        ("Triton", 128), ("Hopper", 128), ("Hopper", 128), ("Hopper", 44),
    ]  # fmt: skip
    assert workspace.scratch.parts.numel() == 7


@pytest.mark.parametrize(
    ("unrounded", "served"),
    [
        (128, ["Triton", "Hopper", "Hopper", "Hopper"]),
        (64, ["Triton", "Hopper", "Hopper", "scaled"]),
        (16, ["Triton", "scaled", "scaled", "scaled"]),
        (0, ["scaled"] * 4),
    ],
)  # fmt: skip
def test_weights_are_scaled_first_beyond_the_rows_that_are_not_rounded(
    monkeypatch, unrounded, served
):
    taken = []

    def kernel(name):
        return lambda *_, **__: taken.append(name)

    for module, name in (
        (hopper, "int4_hopper"), (bands, "int4_bands"), (int4_linear, "int4_linear"),
    ):  # fmt: skip
        label = {"int4_linear": "Triton", "int4_hopper": "Hopper"}.get(name, "scaled")
        monkeypatch.setattr(module, name, kernel(label))
    monkeypatch.setattr(hopper, "reserved_parts", lambda *_: 7)
    monkeypatch.setattr(bands, "reserved", lambda *_: (9, 2000))
    monkeypatch.setattr(int4_linear, "_is_hopper", lambda device: True)
    monkeypatch.setattr(int4_linear, "_WIDE", 40)
    monkeypatch.setattr(int4_linear, "rows_unrounded", lambda outputs, inputs: unrounded)
    workspace = Workspace(torch.device("cpu"), torch.float32)
    layer = int4_linear.Int4Linear(quantize_groups(torch.randn(40, 64), 64), None, workspace)
    for rows in (1, 17, 64, 65):
        layer(torch.randn(rows, 64))
    assert taken == served
    assert ("scaled in half precision" in layer.name) == (unrounded < 128)
    assert workspace.scratch.parts.numel() == (9 if unrounded < 128 else 7)
    assert (workspace.scratch.arrivals.numel() >= 2000) == (unrounded < 128)


def test_nobody_is_served_by_rounded_weights_before_they_were_measured():
    assert {int4_linear.rows_unrounded(*sizes) for sizes in LAYERS} == {int4_linear.MOST_ROWS}


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
    monkeypatch.setattr(int4_linear, "rows_by_triton", lambda outputs, inputs: 0)
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
