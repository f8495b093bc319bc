"""Hopper's kernel over int8: what fits, who takes it, and that it gives the reference's product.

What the kernel computes is seen on the CPU in our interpreter of Gluon, and on a GPU, here and by
benchmarks/gpu_gemm.py; test_compile_ahead compiles it.
"""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels.linear import int8_linear, int8_rows
from tailrace.kernels.linear.int8 import quantize_channels
from tailrace.kernels.linear.int8_linear import HOPPER_ROWS, Int8Linear

hopper = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int8", reason="Triton with Gluon is not installed"
)

gluon_interpreter = pytest.importorskip(
    "tests.kernels.gluon_interpreter", reason="Triton with Gluon is not installed"
)


def test_rings_fit_a_multiprocessor():
    assert hopper.USUAL in hopper.CANDIDATES
    for shape in hopper.CANDIDATES:
        # Beside the ring: two sides' results on their way to the order of stores, and barriers.
        assert shape.stages * (128 + shape.block_n) * 128 + (17 << 10) <= 227 << 10
        assert shape.stages >= 3


def test_it_serves_from_so_many_rows_on(interpreter, monkeypatch):
    """By an H200's times."""
    assert HOPPER_ROWS == 512
    taken = []

    def record(name):
        def product(x, *_, **__):
            taken.append((name, len(x.values)))

        return product

    monkeypatch.setattr(int8_linear, "_hopper_product", lambda device: record("Hopper"))
    monkeypatch.setattr(int8_linear, "int8_product", record("Triton"))
    layer = Int8Linear(torch.randn(32, 16), None, torch.float16, torch.device("cpu"))
    monkeypatch.setattr(int8_linear, "HOPPER_ROWS", 3)
    for rows in (0, 1, 2, 3, 5):
        layer(torch.zeros(rows, 16, dtype=torch.float16))
    assert taken == [("Triton", 1), ("Triton", 2), ("Hopper", 3), ("Hopper", 5)]


def test_no_other_device_has_it():
    assert int8_linear._hopper_product(torch.device("cpu")) is None


KERNEL = hopper.int8_hopper_kernel


def interpreted(monkeypatch, seed, shape, rows, inputs, outputs, dtype, *, with_bias):
    """Return a product by the kernel on the CPU, and in float64; two programs take all tiles."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 2)
    kernel = gluon_interpreter.Interpreter(KERNEL, seed=seed)
    monkeypatch.setattr(hopper, "int8_hopper_kernel", kernel)
    weight = quantize_channels(torch.randn(outputs, inputs))
    x = int8_rows.quantize_rows(torch.randn(rows, inputs))
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    whole = torch.full((rows + 2, outputs), float("nan"), dtype=dtype)
    y = hopper.int8_hopper(x, weight, bias, dtype, out_TO=whole[1:-1], shape=shape)
    assert bool(whole[[0, -1]].isnan().all()), "rows beyond the result are written"
    truth = x.values.double() @ weight.values.double().t()
    truth = truth * x.scales.double()[:, None] * weight.scales.double()
    return y, truth + bias.double() if with_bias else truth


@pytest.mark.parametrize("shape", hopper.CANDIDATES, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 16), (260, 1168, 528)])
def test_in_the_interpreter_its_products_are_the_formulas(
    monkeypatch, shape, rows, inputs, outputs
):
    for dtype, with_bias in ((torch.bfloat16, rows > 1), (torch.float16, rows == 1)):
        y, truth = interpreted(
            monkeypatch, rows, shape, rows, inputs, outputs, dtype, with_bias=with_bias
        )
        assert torch.allclose(y.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_in_whatever_order_warps_and_copies_come_sums_are_the_same(monkeypatch):
    seen = []
    for seed in range(6):
        torch.manual_seed(3)
        y, _ = interpreted(
            monkeypatch, seed, hopper.USUAL, 200, 400, 300, torch.float16, with_bias=True
        )
        seen.append(y)
    assert all(torch.equal(seen[0], y) for y in seen[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", hopper.CANDIDATES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 16, 16), (129, 576, 272), (300, 1040, 528), (2100, 3584, 4608)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_its_products_equal_the_references(shape, rows, inputs, outputs, with_bias):
    device = torch.device("cuda")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("no Hopper here")
    weight = quantize_channels(torch.randn(outputs, inputs, device=device))
    x = int8_rows.quantize_rows(torch.randn(rows, inputs, device=device))
    bias = torch.randn(outputs, device=device).bfloat16() if with_bias else None
    whole = torch.full((rows + 2, outputs), 3.0, dtype=torch.bfloat16, device=device)
    y = hopper.int8_hopper(x, weight, bias, torch.bfloat16, out_TO=whole[1:-1], shape=shape)
    truth = int8_rows.int8_product(x, weight, bias, torch.bfloat16)
    assert torch.allclose(y.float(), truth.float(), rtol=8e-3, atol=1e-5)
    assert bool((whole[[0, -1]] == 3.0).all())
