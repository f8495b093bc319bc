"""Hopper's kernel over int8: what fits, who takes it, and on a GPU that it gives Triton's bits.

The interpreter knows no Gluon, so what the kernel computes is seen on a GPU alone, here and by
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


def test_rings_fit_a_multiprocessor():
    assert hopper.USUAL in hopper.CANDIDATES
    for shape in hopper.CANDIDATES:
        # Beside the ring: two sides' results on their way to the order of stores, and barriers.
        assert shape.stages * (128 + shape.block_n) * 128 + (17 << 10) <= 227 << 10
        assert shape.stages >= 3


def test_it_serves_from_so_many_rows_on(interpreter, monkeypatch):
    """Not yet at all, as long as it has not run on a GPU."""
    assert HOPPER_ROWS == 1 << 30
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
