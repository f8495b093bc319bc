"""The kernel for Hopper that takes outputs band after band, on the CPU in our Gluon interpreter.

On a GPU every candidate is checked, under a timeout, by benchmarks/gpu_int4.py; test_compile_ahead
compiles them, and looks for products in flight whose registers are written.
"""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels.linear import int4_linear
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.workspace import Workspace

bands = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int4_bands",
    reason="Triton with Gluon is not installed",
)
on_gluon = pytest.importorskip("tests.kernels.on_gluon", reason="Triton with Gluon is missing")
Language = pytest.importorskip("tests.kernels.gluon_interpreter.language").Language

BOUNDS = {torch.bfloat16: 0.0019, torch.float16: 0.00022}
"""Of the error: the result's own rounding is 0.0017 and 0.0002, that of weights would be seen."""


def multiplied(monkeypatch, layer, rows, shape, dtype, *, seed=0, dependent=False):
    """Return x, the result, and its error."""
    weight = layer.weight()
    sizes = layer.outputs, layer.chunks
    cut = shape.cut(*sizes, layer.multiprocessors)
    block_m, _ = bands.shape_for(rows, layer.outputs)
    room = {
        "parts": shape.parts(*sizes, block_m, layer.multiprocessors), "arrivals": cut.programs,
    }  # fmt: skip
    x, bias, y = on_gluon.product(
        monkeypatch, bands, bands.int4_bands, layer, weight, rows, room=room, seed=seed,
        dtype=dtype, shape=shape, dependent=dependent,
    )  # fmt: skip
    return x, y, on_gluon.error(x, bias, y, weight.dequantize())


CASES = [
    (block, group, dtype, shape)
    for block, shapes in bands.CANDIDATES.items()
    for shape in shapes
    for least, group, dtype in ((4, 64, torch.float16), (7, 128, torch.bfloat16))
    if shape.least_span == least
]


@pytest.mark.parametrize(("block", "group", "dtype", "shape"), CASES, ids=str)
def test_it_equals_the_product(monkeypatch, block, group, dtype, shape):
    torch.manual_seed(block + group)
    layer = on_gluon.Layer(group=group, multiprocessors=2)
    *_, error = multiplied(monkeypatch, layer, block - 3, shape, dtype, seed=block + group)
    assert error < BOUNDS[dtype]


SMALL = bands.BandShape(128, 4, 2, 2)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(64, torch.bfloat16), (128, torch.float16), (192, torch.bfloat16), (256, torch.float16)],
    ids=str,
)
def test_groups_of_one_chunk_or_several_in_either_half(monkeypatch, group, dtype):
    layer = on_gluon.Layer(outputs=130, group=group)
    *_, error = multiplied(monkeypatch, layer, 5, SMALL, dtype, seed=group)
    assert error < BOUNDS[dtype]


@pytest.mark.parametrize(
    "shape", [SMALL, bands.BandShape(128, 8, 1, 2), bands.BandShape(512, 8, 1, 2)], ids=str
)
@pytest.mark.parametrize("stages", [2, 3])
def test_slots_are_filled_again_only_when_all_are_done_with_them(monkeypatch, shape, stages):
    monkeypatch.setattr(bands, "stages", lambda unit_bytes, programs: stages)
    for group in (64, 128):
        layer = on_gluon.Layer(outputs=200, chunks=9, group=group, multiprocessors=1)
        *_, error = multiplied(monkeypatch, layer, 7, shape, torch.bfloat16, seed=stages)
        assert error < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("sharers", [2, 3, 5, 8])
def test_a_tile_of_several_programs_is_the_same_bits_whoever_comes_last(monkeypatch, sharers):
    """Also where it starts before the kernel before has ended, whose results it does not touch."""
    layer = on_gluon.Layer(outputs=90, chunks=2 * sharers, group=64, multiprocessors=8)
    assert SMALL.cut(layer.outputs, layer.chunks, 8).programs == sharers

    def product(**given):
        return multiplied(monkeypatch, layer, 11, SMALL, torch.bfloat16, **given)[1:]

    on_gluon.assert_same_bits(product, BOUNDS[torch.bfloat16])


def test_programs_that_meet_at_once_add_each_part_once(monkeypatch):
    """Each finds that nobody has come yet, leaves its sums, and counts itself."""
    counted = Language.atomic_add

    def late(language, pointer, value, mask=None, sem=None, scope=None):
        before = counted(language, pointer, value, mask, sem, scope)
        return before * 0 if value == 0 else before

    layer = on_gluon.Layer(outputs=90, chunks=10, group=64, multiprocessors=8)
    results = []
    for atomic_add in (counted, late):
        monkeypatch.setattr(Language, "atomic_add", atomic_add)
        torch.manual_seed(3)
        results.append(multiplied(monkeypatch, layer, 11, SMALL, torch.bfloat16)[1])
    assert torch.equal(*results)


def test_a_row_is_the_same_beside_fewer_rows(monkeypatch):
    layer = on_gluon.Layer(outputs=200, chunks=5, group=64)
    results = []
    for rows in (14, 3):
        torch.manual_seed(9)
        x, y, _ = multiplied(monkeypatch, layer, rows, SMALL, torch.bfloat16, seed=rows)
        results.append((x[:3], y[:3]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 128])
def test_the_usual_shape_is_a_candidate_of_the_tile_that_holds_the_rows(rows):
    for outputs in (48, 4608, 37888):
        block_m, shape = bands.shape_for(rows, outputs)
        assert rows <= block_m
        assert block_m == 16 or rows > block_m // 2
        assert shape in bands.CANDIDATES[block_m]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 128])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(256, 40, 64), (3584, 520, 128)])
def test_on_a_gpu_a_layer_in_bands_equals_the_product(rows, inputs, outputs, group):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernel needs a Hopper GPU")
    device = torch.device("cuda")
    weight = quantize_groups(torch.randn(outputs, inputs) * inputs**-0.5, group)
    workspace = Workspace(device, torch.bfloat16)
    layer = int4_linear.Int4Linear(weight, None, workspace)
    block_m, shape = bands.shape_for(rows, outputs)
    layer.by_codes.serve(block_m, shape.words)
    assert "for Hopper in bands" in layer.name
    whole = torch.full((rows + 40, inputs), float("nan"), device=device).bfloat16()
    whole[:rows] = torch.randn(rows, inputs, device=device)
    x = whole[:rows]
    truth = x.double() @ weight.dequantize().to(device).double().t()
    y = layer(x)
    assert float((y.double() - truth).norm() / truth.norm()) < BOUNDS[torch.bfloat16]
    assert torch.equal(y, layer(x))
    assert not workspace.scratch.arrivals.any()
