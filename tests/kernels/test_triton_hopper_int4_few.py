"""The kernel for Hopper of at most 32 rows, on the CPU in our Gluon interpreter.

On a GPU every candidate is checked, under a timeout, by benchmarks/gpu_int4.py; test_compile_ahead
compiles them.
"""

from __future__ import annotations

import pytest
import torch

few = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int4_few", reason="Triton with Gluon is not installed"
)
on_gluon = pytest.importorskip(
    "tests.kernels.on_gluon", reason="Triton with Gluon is not installed"
)

CASES = [(block, shape) for block, shapes in few.CANDIDATES.items() for shape in shapes]


def multiplied(monkeypatch, layer, rows, shape, dtype, *, seed=0, dependent=False):
    """Return x, the result, and its error against the product with the weight as it is."""
    weight = layer.weight()

    def launch(x, packed, bias, *, scratch, **options):
        return few.int4_few(x, packed, bias, **options)

    x, bias, y = on_gluon.product(
        monkeypatch, few, launch, layer, weight, rows, room={}, seed=seed, dtype=dtype,
        shape=shape, dependent=dependent,
    )  # fmt: skip
    return x, y, on_gluon.error(x, bias, y, weight.dequantize())


@pytest.mark.parametrize(("block", "shape"), CASES, ids=str)
@pytest.mark.parametrize(
    ("group", "dtype", "bound"),
    [(64, torch.float16, 0.0004), (128, torch.bfloat16, 0.003), (256, torch.bfloat16, 0.003)],
    ids=str,
)
def test_it_equals_the_product(monkeypatch, block, shape, group, dtype, bound):
    layer = on_gluon.Layer(outputs=150, group=group)
    *_, error = multiplied(monkeypatch, layer, block - 3, shape, dtype, seed=block)
    assert error < bound


@pytest.mark.parametrize("chunks", [1, 2, 3, 21])
@pytest.mark.parametrize("shape", few.CANDIDATES[16], ids=str)
def test_slices_of_unequal_length_or_without_a_unit(monkeypatch, shape, chunks):
    layer = on_gluon.Layer(outputs=70, chunks=chunks, group=64)
    *_, error = multiplied(monkeypatch, layer, 4, shape, torch.bfloat16, seed=chunks)
    assert error < 0.003


@pytest.mark.parametrize("shape", few.CANDIDATES[16], ids=str)
@pytest.mark.parametrize("rounds", [1, 2])
def test_slots_are_filled_again_only_when_a_slice_is_done_with_them(monkeypatch, shape, rounds):
    monkeypatch.setattr(few.FewShape, "stages", lambda self, rows, chunk: rounds * self.slices)
    layer = on_gluon.Layer(outputs=70, chunks=11, group=64)
    *_, error = multiplied(monkeypatch, layer, 4, shape, torch.bfloat16, seed=rounds)
    assert error < 0.003


@pytest.mark.parametrize("shape", few.CANDIDATES[16], ids=str)
def test_sums_are_the_same_bits_in_whatever_order_warps_and_copies_come(monkeypatch, shape):
    """Also where it starts before the kernel before has ended, whose results it does not touch."""
    layer = on_gluon.Layer(outputs=64, chunks=7, group=64)
    seen = []
    for seed in range(6):
        torch.manual_seed(5)
        _, y, _ = multiplied(
            monkeypatch, layer, 9, shape, torch.bfloat16, seed=seed, dependent=seed > 3
        )
        seen.append(y)
    assert all(torch.equal(seen[0], y) for y in seen[1:])


def test_a_row_is_the_same_beside_fewer_rows(monkeypatch):
    layer = on_gluon.Layer(outputs=100, chunks=5, group=64)
    results = []
    for rows in (14, 3):
        torch.manual_seed(9)
        x, y, _ = multiplied(monkeypatch, layer, rows, few.FewShape(4), torch.bfloat16, seed=rows)
        results.append((x[:3], y[:3]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize(("block", "shape"), CASES, ids=str)
def test_rings_hold_many_units_and_fit(block, shape, chunk):
    stages = shape.stages(block, chunk)
    unit = 64 * (chunk // 2 + 4) + block * chunk * 2
    assert stages >= 2 * shape.slices, "a slice would wait for the one before it"
    assert stages % shape.slices == 0, "slices would meet at a slot"
    assert stages * unit + (shape.slices - 1) * 64 * block * 4 < 227 * 1024
