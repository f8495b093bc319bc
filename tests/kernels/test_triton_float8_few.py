"""Few rows in FP8 over an FP8 weight: by descriptors and by pointers, whole and split."""

from __future__ import annotations

import itertools

import pytest
import torch

from tailrace.errors import EngineError
from tailrace.kernels.linear import triton_float8_rows
from tailrace.kernels.linear.float8 import Float8Weight, quantize_blocks, quantize_channels
from tailrace.kernels.linear.float8_linear import Float8Linear
from tailrace.kernels.linear.float8_rows import Float8Rows
from tailrace.kernels.linear.triton_float8_few import (
    HOPPER,
    HOPPER_CANDIDATES,
    MOST_FEW_ROWS,
    OTHER_CANDIDATES,
    OTHERS,
    FewFloat8Shape,
    few_splits,
    few_ways,
    float8_few,
)
from tailrace.kernels.linear.ways import MANY, words_of
from tailrace.kernels.linear.workspace import Workspace
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN
from tests.support.pairs import dealt

QUANTIZE = {"channel": quantize_channels, "block128": quantize_blocks}
SIZES = [(1, 128, 48), (7, 576, 144), (17, 304, 80), (33, 640, 208), (128, 1040, 208)]
"""Rows, inputs, outputs: within one step, split, with a cut last step and tile."""


@pytest.fixture(autouse=True)
def _float8_here(request):
    if "on_triton" in request.fixturenames:
        on_triton = request.getfixturevalue("on_triton")
        if on_triton.kernels.capability < (8, 9):
            pytest.skip("this GPU has no float8")


def ways_here(on_triton):
    """Both ways of loading in the interpreter; on a GPU the one that it has."""
    device = on_triton.kernels.device
    return [on_triton.kernels.capability[0] == 9] if device.type == "cuda" else [False, True]


def rounded(on_triton, rows, inputs, scheme):
    """Return rows in float8 at the head of larger blocks that hold NaN, as freed memory may."""
    group = 128 if scheme == "block128" else 0
    made = triton_float8_rows.quantize_rows(on_triton.half(torch.randn(rows, inputs)), group)
    values = torch.full((rows + 140, inputs), NAN).to(made.values.dtype).to(made.values.device)
    values[:rows].view(torch.uint8).copy_(made.values.view(torch.uint8))
    groups = made.scales.shape[1]
    scales = torch.full((groups, rows + 140), NAN, device=made.scales.device).t()
    scales[:rows] = made.scales
    return Float8Rows(values[:rows], scales[:rows], made.group)


def held(weight, device):
    return Float8Weight(weight.values.to(device), weight.scales.to(device), weight.scheme)


def scratch_for(on_triton, outputs):
    workspace = Workspace(on_triton.kernels.device, on_triton.kernels.dtype)
    workspace.reserve(outputs=outputs, splits=8, rows=MOST_FEW_ROWS)
    workspace.scratch.parts.fill_(NAN)
    return workspace.scratch


@pytest.mark.parametrize(
    ("sizes", "scheme", "with_bias"), dealt(itertools.product(SIZES, QUANTIZE), (False, True))
)
def test_it_equals_the_product_of_what_is_held(on_triton, sizes, scheme, with_bias):
    """Each size and each scheme, with a bias and without."""
    rows, inputs, outputs = sizes
    weight = QUANTIZE[scheme](torch.randn(outputs, inputs) * inputs**-0.5)
    device, dtype = on_triton.kernels.device, on_triton.kernels.dtype
    x = rounded(on_triton, rows, inputs, scheme)
    bias = on_triton.half(torch.randn(outputs)) if with_bias else None
    scratch = scratch_for(on_triton, outputs)
    truth = x.dequantize().cpu().double() @ weight.dequantize(torch.float64).t()
    if bias is not None:
        truth += bias.cpu().double()
    for by_descriptor in ways_here(on_triton):
        y = float8_few(
            x, held(weight, device), bias, dtype, scratch=scratch, by_descriptor=by_descriptor
        )
        assert y.dtype == dtype
        assert_close("y", y.cpu(), truth, **on_triton.tolerance)
        assert not scratch.arrivals.any()


@pytest.mark.parametrize("scheme", QUANTIZE)
def test_a_row_does_not_depend_on_its_neighbours_of_the_same_tile(on_triton, scheme):
    weight = held(QUANTIZE[scheme](torch.randn(144, 1104)), on_triton.kernels.device)
    assert few_splits(144, 1104)[0] > 1
    x = rounded(on_triton, 15, 1104, scheme)
    given = {"scratch": scratch_for(on_triton, 144), "shape": FewFloat8Shape(128, 4, 3)}
    dtype = on_triton.kernels.dtype
    together = float8_few(x, weight, None, dtype, **given)
    for row in (0, 14):
        one = slice(row, row + 1)
        alone = Float8Rows(x.values[one], x.scales[one], x.group)
        found = float8_few(alone, weight, None, dtype, **given)
        assert torch.equal(found[0], together[row])


def test_the_last_part_to_arrive_changes_nothing(on_triton):
    """Parts are added in order: whatever lies in the scratch before, results are the same."""
    weight = held(quantize_channels(torch.randn(80, 1040)), on_triton.kernels.device)
    x = rounded(on_triton, 3, 1040, "channel")
    scratch = scratch_for(on_triton, 80)
    first = float8_few(x, weight, None, on_triton.kernels.dtype, scratch=scratch)
    again = float8_few(x, weight, None, on_triton.kernels.dtype, scratch=scratch)
    assert torch.equal(first, again)


def test_a_row_of_nan_spoils_itself_alone(on_triton):
    weight = held(quantize_channels(torch.randn(48, 160)), on_triton.kernels.device)
    x = on_triton.half(torch.randn(3, 160))
    x[1, 7] = NAN
    rows = triton_float8_rows.quantize_rows(x)
    y = float8_few(rows, weight, None, x.dtype, scratch=scratch_for(on_triton, 48))
    assert bool(y[1].isnan().all())
    assert bool(y[[0, 2]].isfinite().all())


def test_a_result_is_written_where_it_is_asked_for_and_nowhere_else(on_triton):
    weight = held(quantize_channels(torch.randn(80, 160)), on_triton.kernels.device)
    x = rounded(on_triton, 5, 160, "channel")
    whole = on_triton.half(torch.full((9, 80), 3.0))
    scratch = scratch_for(on_triton, 80)
    y = float8_few(x, weight, None, whole.dtype, scratch=scratch, out_TO=whole[2:7])
    assert y.data_ptr() == whole[2:7].data_ptr()
    assert bool((whole[:2] == 3).all())
    assert bool((whole[7:] == 3).all())
    assert bool(whole[2:7].isfinite().all())


@pytest.mark.parametrize("rows", [0, MOST_FEW_ROWS + 1])
def test_other_numbers_of_rows_are_refused(on_triton, rows):
    weight = held(quantize_channels(torch.randn(48, 160)), on_triton.kernels.device)
    x = triton_float8_rows.quantize_rows(on_triton.half(torch.zeros(rows, 160)))
    with pytest.raises(EngineError, match=f"{rows} rows: this FP8 product takes 1 to 128"):
        float8_few(x, weight, None, torch.float16, scratch=scratch_for(on_triton, 48))


@pytest.mark.parametrize(("scheme", "group"), [("channel", 128), ("block128", 0)])
def test_rows_in_groups_that_are_not_the_weights_are_refused(on_triton, scheme, group):
    weight = held(QUANTIZE[scheme](torch.randn(48, 256)), on_triton.kernels.device)
    x = triton_float8_rows.quantize_rows(on_triton.half(torch.zeros(2, 256)), group)
    with pytest.raises(EngineError, match="not those of a weight by"):
        float8_few(x, weight, None, torch.float16, scratch=scratch_for(on_triton, 48))


# The layer


@pytest.mark.parametrize("scheme", ["tensor", "channel", "block128"])
@pytest.mark.parametrize("rows", [0, 1, 33, MOST_FEW_ROWS, MOST_FEW_ROWS + 3])
def test_a_layer_that_rounds_all_rows_serves_any_number(on_triton, scheme, rows):
    dtype = on_triton.kernels.dtype
    if scheme == "tensor":
        values = torch.randn(48, 160).to(torch.float8_e4m3fn)
        weight = Float8Weight(values, torch.tensor([0.08]), "tensor")
    else:
        weight = QUANTIZE[scheme](torch.randn(48, 160) * 160**-0.5)
    bias = torch.randn(48)
    workspace = Workspace(on_triton.kernels.device, dtype)
    layer = Float8Linear(weight, bias, workspace, rounds_all=True)
    assert layer.rounds(rows) == (rows > 0)
    x = on_triton.half(torch.randn(rows, 160))
    rounded_rows = triton_float8_rows.quantize_rows(x, layer.group)
    y = layer(x).cpu().double()
    assert torch.equal(layer(rounded_rows).cpu().double(), y)
    used = rounded_rows.dequantize().cpu().double()
    truth = used @ weight.dequantize(torch.float64).t() + on_triton.rounded(bias).double()
    # torch rounds results of many rows to bfloat16 where scales go by rows.
    by_torch = rows > MOST_FEW_ROWS and not layer.group
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if by_torch else on_triton.tolerance
    assert_close("y", y, truth, **tolerance)


def test_a_plan_does_not_take_the_two_kinds_of_layer_for_one_another():
    weight = quantize_channels(torch.randn(48, 160))
    some, every = (
        Float8Linear(
            weight, None, Workspace(torch.device("cpu"), torch.float16), rounds_all=rounds_all
        )
        for rounds_all in (False, True)
    )
    assert words_of(some) == "fp8/channel linear 160 to 48"
    assert words_of(every) == "fp8/channel linear, few rows rounded 160 to 48"
    assert [ways.classes for ways in some.planned] == [[16, 32], [64, 128, 256, 512, MANY]]
    assert [ways.classes for ways in every.planned] == [[16, 32, 64, 128], [256, 512, MANY]]


@pytest.mark.parametrize("scheme", QUANTIZE)
def test_the_kernels_round_few_rows_where_they_are_made(interpreter, scheme):
    kernels = TritonKernels(torch.device("cpu"), "float16", rounds_all=True)
    layers = [
        kernels.pack_linear(QUANTIZE[scheme](torch.randn(48, n) * n**-0.5), None, "float16")
        for n in (160, 96)
    ]
    assert [layer.name.endswith(", few rows rounded") for layer in layers] == [True, True]
    weight = torch.randn(160)
    x, residual = torch.randn(2, 160).half(), torch.randn(2, 160)
    by_steps = residual.clone()
    expected = layers[0](kernels.add_rms_norm(x, by_steps, weight, 1e-5))
    found = kernels.norm_into(layers[0], x, residual, weight, 1e-5)
    assert torch.equal(residual, by_steps)
    assert_near(found, expected)
    gate_up = torch.randn(2, 192).half()
    assert_near(kernels.silu_mul_into(layers[1], gate_up), layers[1](kernels.silu_mul(gate_up)))


def assert_near(found, expected):
    """A value near the middle of two float8 ones may go either way: few do, and by one step."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert 0 <= float(difference) < 0.02


def test_every_split_has_a_step_of_work():
    for outputs in (16, 576, 4608, 37888):
        for inputs in (64, 128, 576, 3584, 18944):
            splits, span = few_splits(outputs, inputs)
            steps = -(-inputs // 128)
            assert span * (splits - 1) < steps <= span * splits


@pytest.mark.parametrize("capability", [(9, 0), (8, 9)], ids=["hopper", "ada"])
def test_every_tile_has_its_own_choices_and_the_usual_one_first(capability):
    few, more = (HOPPER, HOPPER_CANDIDATES) if capability[0] == 9 else (OTHERS, OTHER_CANDIDATES)
    ways = few_ways(capability)
    assert ways.classes == [most for most, _ in few] == [*more] == [16, 32, 64, MOST_FEW_ROWS]
    for most, usual in few:
        assert ways.of(most) == usual
        assert len(ways.options(most)) == 1 + len(more[most])
        assert all(128 % shape.block_n == 0 for shape in (usual, *more[most]))
