"""FP8 products: rows rounded alone or where they are made, few rows, many, and the layer."""

from __future__ import annotations

import pytest
import torch

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.linear import float8_rows, torch_float8, triton_float8_rows
from tailrace.kernels.linear.float8 import (
    FLOAT8,
    Float8Weight,
    quantize_blocks,
    quantize_channels,
)
from tailrace.kernels.linear.float8_linear import Float8Linear
from tailrace.kernels.linear.torch_float8 import TorchFloat8
from tailrace.kernels.linear.triton_float8 import (
    MOST_ROWS,
    SkinnyFloat8Shape,
    float8_many,
    float8_skinny,
    skinny_splits,
)
from tailrace.kernels.linear.workspace import Workspace
from tailrace.kernels.rms_norm.reference import add_rms_norm, rms_norm
from tailrace.kernels.silu_mul.reference import silu_mul
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN

QUANTIZE = {"channel": quantize_channels, "block128": quantize_blocks}
GROUPS = [0, 128]


@pytest.fixture(autouse=True)
def _float8_here(request):
    if "on_triton" in request.fixturenames:
        on_triton = request.getfixturevalue("on_triton")
        if on_triton.kernels.capability < (8, 9):
            pytest.skip("this GPU has no float8")


def poisoned(on_triton, rows, inputs):
    """Return x at the head of a larger block that holds NaN, as freed memory may."""
    whole = on_triton.half(torch.full((rows + 40, inputs), NAN))
    whole[:rows] = on_triton.half(torch.randn(rows, inputs))
    return whole[:rows]


def held(weight, device):
    return Float8Weight(weight.values.to(device), weight.scales.to(device), weight.scheme)


def assert_rounded(found, exact):
    """Each value lies within half a step of the exact one; scales are those of the truth."""
    truth = float8_rows.quantize_rows(exact, 0 if found.scales.shape[1] == 1 else found.group)
    assert_close("scales", found.scales.cpu(), truth.scales, rtol=1e-2, atol=1e-30)
    spread = truth.scales.repeat_interleave(found.group, 1)[:, : exact.shape[1]]
    # Half a step of 3 bits, or of the last octave's fixed step, and what a GPU's formula differs.
    bound = exact.abs() / 15 + spread * 2**-9
    assert bool(((found.dequantize().cpu() - exact).abs() <= bound).all())


# Rounding alone


@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (2, 576), (5, 1000)])
@pytest.mark.parametrize("group", GROUPS)
def test_the_reference_maps_each_groups_largest_to_448(shape, group):
    x = torch.randn(shape) * 10
    x[0] = 0.0
    rows = float8_rows.quantize_rows(x, group)
    assert rows.scales.shape == (shape[0], -(-shape[1] // (group or shape[1])))
    assert_rounded(rows, x)
    assert torch.equal(rows.dequantize()[0], torch.zeros(shape[1]))
    if shape[0] > 1:
        peaks = rows.values.float().abs().amax(1)
        assert peaks[1:].tolist() == [448.0] * (shape[0] - 1)


@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (2, 576), (5, 1000)])
@pytest.mark.parametrize("group", GROUPS)
def test_rows_are_rounded_as_by_the_reference(on_triton, shape, group):
    x = poisoned(on_triton, *shape) * 7
    found = triton_float8_rows.quantize_rows(x, group)
    truth = float8_rows.quantize_rows(x.cpu().float(), group)
    assert_rounded(found, x.cpu().float())
    if not x.is_cuda:  # a GPU's quotients may differ in the last bit
        assert torch.equal(found.scales, truth.scales)
        assert torch.equal(found.values.float(), truth.values.float())


def test_nan_stays_where_it_is(on_triton):
    x = poisoned(on_triton, 3, 200)
    x[1, 150] = NAN
    found = triton_float8_rows.quantize_rows(x, 128).dequantize().cpu()
    assert bool(found[1, 150].isnan())
    assert bool(found[[0, 2]].isfinite().all())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("with_x", [False, True])
def test_a_norm_rounds_its_own_result(on_triton, group, with_x):
    residual, weight = torch.randn(4, 300) * 2, torch.randn(300)
    x = on_triton.rounded(torch.randn(4, 300))
    kept = on_triton.float(residual)
    given = on_triton.half(x) if with_x else None
    found = triton_float8_rows.add_rms_norm_float8(
        given, kept, on_triton.float(weight), 1e-5, group=group
    )
    if with_x:
        exact = add_rms_norm(x, residual, weight, 1e-5)
    else:
        exact = rms_norm(residual, weight, 1e-5)
    assert torch.equal(kept.cpu(), residual)  # the reference adds in place
    assert_rounded(found, exact)


@pytest.mark.parametrize("group", GROUPS)
def test_silu_mul_rounds_its_own_result(on_triton, group):
    x = on_triton.rounded(torch.randn(3, 2 * 1536) * 3)
    assert_rounded(triton_float8_rows.silu_mul_float8(on_triton.half(x), group=group), silu_mul(x))


@pytest.mark.parametrize("rows", [1, 4, 5, 7])
@pytest.mark.parametrize("inputs", [128, 300])
def test_scales_of_a_group_lie_together_in_whole_fours(on_triton, rows, inputs):
    x = poisoned(on_triton, rows, inputs)
    for found in (triton_float8_rows.quantize_rows(x, 128), float8_rows.quantize_rows(x, 128)):
        whole = found.filled()
        assert whole.values.shape == (-(-rows // 4) * 4, inputs)
        assert whole.scales.shape == (whole.values.shape[0], -(-inputs // 128))
        assert whole.scales.stride() == (1, whole.values.shape[0])
        assert torch.equal(whole.values[:rows].float(), found.values.float())
        assert torch.equal(whole.scales[:rows], found.scales)
        assert found.values.is_contiguous()


def test_rows_without_what_fills_up_their_four_are_refused():
    rows = float8_rows.Float8Rows(torch.zeros(5, 128).to(FLOAT8), torch.ones(5, 1), 128)
    with pytest.raises(RuntimeError, match="out of bounds"):
        rows.filled()


def test_no_rows_are_no_error(on_triton):
    none = triton_float8_rows.quantize_rows(on_triton.half(torch.zeros(0, 64)))
    assert none.values.shape == (0, 64)


# Products

SKINNY = [(1, 128, 48), (7, 576, 144), (17, 300, 77), (32, 1040, 200)]  # rows, inputs, outputs


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SKINNY)
@pytest.mark.parametrize("scheme", QUANTIZE)
@pytest.mark.parametrize("with_bias", [False, True])
def test_few_rows_equal_the_product_with_the_dequantised_weight(
    on_triton, rows, inputs, outputs, scheme, with_bias
):
    weight = QUANTIZE[scheme](torch.randn(outputs, inputs) * inputs**-0.5)
    device = on_triton.kernels.device
    x = poisoned(on_triton, rows, inputs)
    bias = on_triton.half(torch.randn(outputs)) if with_bias else None
    workspace = Workspace(device, x.dtype)
    workspace.reserve(outputs=outputs, splits=8, rows=MOST_ROWS)
    workspace.scratch.parts.fill_(NAN)
    y = float8_skinny(x, held(weight, device), bias, scratch=workspace.scratch)
    truth = x.cpu().double() @ weight.dequantize(torch.float64).t()
    if bias is not None:
        truth += bias.cpu().double()
    assert_close("y", y.cpu(), truth, **on_triton.tolerance)
    assert not workspace.scratch.arrivals.any()


@pytest.mark.parametrize("scheme", QUANTIZE)
def test_a_row_does_not_depend_on_its_neighbours_of_the_same_tile(on_triton, scheme):
    weight = held(QUANTIZE[scheme](torch.randn(130, 1100)), on_triton.kernels.device)
    assert skinny_splits(130, 1100)[0] > 1
    x = poisoned(on_triton, 15, 1100)
    workspace = Workspace(on_triton.kernels.device, x.dtype)
    workspace.reserve(outputs=130, splits=8, rows=MOST_ROWS)
    shape = SkinnyFloat8Shape(128, 4, 3)
    together = float8_skinny(x, weight, None, scratch=workspace.scratch, shape=shape)
    for row in (0, 14):
        one = x[row : row + 1]
        alone = float8_skinny(one, weight, None, scratch=workspace.scratch, shape=shape)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(3, 128, 48), (130, 576, 144), (140, 300, 270)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_many_rows_by_blocks_equal_the_product_of_what_is_held(
    on_triton, rows, inputs, outputs, with_bias
):
    weight = quantize_blocks(torch.randn(outputs, inputs) * inputs**-0.5)
    dtype = on_triton.kernels.dtype
    x = triton_float8_rows.quantize_rows(poisoned(on_triton, rows, inputs), 128)
    bias = on_triton.half(torch.randn(outputs)) if with_bias else None
    y = float8_many(x, held(weight, on_triton.kernels.device), bias, dtype)
    truth = x.dequantize().cpu().double() @ weight.dequantize(torch.float64).t()
    if bias is not None:
        truth += bias.cpu().double()
    assert y.dtype == dtype
    assert_close("y", y.cpu(), truth, **on_triton.tolerance)


def test_every_split_has_a_step_of_work():
    for outputs in (16, 576, 4608, 37888):
        for inputs in (64, 128, 576, 3584, 18944):
            splits, span = skinny_splits(outputs, inputs)
            steps = -(-inputs // 128)
            assert span * (splits - 1) < steps <= span * splits


# The layer


@pytest.mark.parametrize("scheme", ["tensor", "channel", "block128"])
@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS, MOST_ROWS + 3])
def test_a_layer_serves_any_number_of_rows(on_triton, scheme, rows):
    dtype = on_triton.kernels.dtype
    if scheme == "tensor":
        values = torch.randn(48, 160).to(torch.float8_e4m3fn)
        weight = Float8Weight(values, torch.tensor([0.08]), "tensor")
    else:
        weight = QUANTIZE[scheme](torch.randn(48, 160) * 160**-0.5)
    bias = torch.randn(48)
    layer = Float8Linear(weight, bias, Workspace(on_triton.kernels.device, dtype))
    x = poisoned(on_triton, rows, 160)
    y = layer(x).cpu().double()
    used = x.cpu()
    if layer.rounds(rows):
        # The kernel's own rounding, which other tests compare: a tie may go either way, and one
        # does not stay within the tolerance below.
        rows_in_float8 = triton_float8_rows.quantize_rows(x, layer.group)
        used = rows_in_float8.dequantize().cpu()
        assert torch.equal(layer(rows_in_float8).cpu().double(), y)
    truth = used.double() @ weight.dequantize(torch.float64).t() + on_triton.rounded(bias).double()
    # torch rounds such results to bfloat16 where scales go by rows.
    rounded = layer.rounds(rows) and not layer.group
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if rounded else on_triton.tolerance
    assert_close("y", y, truth, **tolerance)


def test_layers_are_counted_and_none_is_added_late(on_triton):
    workspace = Workspace(on_triton.kernels.device, on_triton.kernels.dtype)
    layer = Float8Linear(quantize_channels(torch.randn(48, 160)), None, workspace)
    assert layer.nbytes == 48 * 160 + 48 * 4
    layer(poisoned(on_triton, 2, 160))
    with pytest.raises(EngineError, match="after one had run"):
        Float8Linear(quantize_channels(torch.randn(48, 160)), None, workspace)


def test_sizes_that_the_hardware_does_not_take_are_refused_here_and_unpacked_by_the_kernels(
    on_triton,
):
    weight = quantize_channels(torch.randn(47, 160))
    with pytest.raises(ConfigError, match=r"\[47, 160\]: inputs and outputs must be"):
        Float8Linear(weight, None, Workspace(on_triton.kernels.device, torch.float16))
    dtype = str(on_triton.kernels.dtype).removeprefix("torch.")
    assert on_triton.kernels.pack_linear(weight, None, dtype).name.startswith(f"cuBLAS {dtype}")
    whole = quantize_channels(torch.randn(48, 160))
    assert on_triton.kernels.pack_linear(whole, None, dtype).name == "FP8 by channel"


@pytest.mark.parametrize("scheme", QUANTIZE)
@pytest.mark.parametrize("rows", [2, MOST_ROWS + 2])
def test_rows_are_rounded_where_they_are_made(on_triton, scheme, rows):
    kernels = on_triton.kernels
    dtype = str(kernels.dtype).removeprefix("torch.")
    layers = [
        kernels.pack_linear(QUANTIZE[scheme](torch.randn(48, n) * n**-0.5), None, dtype)
        for n in (160, 96)
    ]
    weight = on_triton.float(torch.randn(160))
    x = poisoned(on_triton, rows, 160)
    residual = on_triton.float(torch.randn(rows, 160))
    # The same in steps: half precision in between is rounded once more.
    by_steps = residual.clone()
    expected = layers[0](kernels.add_rms_norm(x, by_steps, weight, 1e-5))
    fused = residual.clone()
    found = kernels.norm_into(layers[0], x, fused, weight, 1e-5)
    assert torch.equal(fused, by_steps)
    assert_near(found, expected)
    alone = kernels.norm_into(layers[0], None, fused, weight, 1e-5)
    assert torch.equal(fused, by_steps)
    assert_near(alone, expected)
    gate_up = poisoned(on_triton, rows, 192)
    assert_near(kernels.silu_mul_into(layers[1], gate_up), layers[1](kernels.silu_mul(gate_up)))


def assert_near(found, expected):
    """A value near the middle of two float8 ones may go either way: few do, and by one step."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(difference) < 0.02


# By blocks of torch's, on Hopper


def cublas_blocks(x, values, scales, out):
    """What torch asks of both layouts (ScaledBlas.cpp) and, from the memory alone, its product."""
    (rows, inputs), outputs = x.values.shape, values.shape[0]
    groups, strips = inputs // 128, outputs // 128
    padded = -(-groups // 4) * 4
    assert rows % 4 == inputs % 128 == outputs % 128 == 0
    assert x.scales.shape == (rows, groups)
    assert x.scales.stride() == (1, rows)
    assert scales.shape == (padded, strips)
    assert scales.stride() == (1, padded)
    assert out.shape == (rows, outputs)
    assert out.is_contiguous()
    assert out.dtype in (torch.bfloat16, torch.float32)
    of_rows = torch.as_strided(x.scales, (rows * groups,), (1,))
    of_weight = torch.as_strided(scales, (padded * strips,), (1,))
    for row in range(rows):
        sums = torch.zeros(outputs)
        for group in range(groups):
            piece = slice(128 * group, 128 * group + 128)
            part = values[:, piece].float() @ x.values[row, piece].float()
            of_outputs = of_weight[group::padded].repeat_interleave(128)
            sums += part * of_rows[group * rows + row] * of_outputs
        out[row] = sums.to(out.dtype)


@pytest.fixture
def _cublas_here(monkeypatch):
    """Have this machine be one whose torch multiplies by blocks."""
    monkeypatch.setattr(torch_float8, "has_blocks", lambda device: True)
    monkeypatch.setattr(torch_float8, "multiply_blocks", cublas_blocks)


def layer_by_torch(bias, dtype, inputs=384):
    weight = quantize_blocks(torch.randn(256, inputs) * inputs**-0.5)
    layer = Float8Linear(weight, bias, Workspace(torch.device("cpu"), dtype))
    assert layer.name == "FP8 by block128, many rows by torch"
    assert [layer.planned[1].serving(rows) for rows in layer.planned[1].classes] == ["torch"] * 5
    return weight, layer


@pytest.mark.usefixtures("_cublas_here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [MOST_ROWS + 1, MOST_ROWS + 4])
@pytest.mark.parametrize("inputs", [128, 384])
@pytest.mark.parametrize("with_bias", [False, True])
def test_torch_is_given_blocks_as_cublas_reads_them(dtype, rows, inputs, with_bias):
    bias = torch.randn(256) if with_bias else None
    weight, layer = layer_by_torch(bias, dtype, inputs)
    x = float8_rows.quantize_rows(torch.randn(rows, inputs), 128)
    exact = x.dequantize().double() @ weight.dequantize(torch.float64).t()
    if bias is not None:
        exact += bias.to(dtype).double()
    found = layer(x)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    # bfloat16 is rounded before the bias is added, and after; float16 once.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2**-10
    assert_close("y", found.double(), exact, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.usefixtures("_cublas_here")
def test_a_product_by_torch_stays_within_its_rows_of_the_result():
    _, layer = layer_by_torch(torch.randn(256), torch.bfloat16)
    rows = MOST_ROWS + 3
    x = float8_rows.quantize_rows(torch.randn(rows, 384), 128)
    whole = torch.full((rows + 6, 256), 7.0, dtype=torch.bfloat16)
    layer._multiply(x, whole[3 : 3 + rows])
    assert torch.equal(whole[3 : 3 + rows], layer(x))
    assert bool((whole[:3] == 7.0).all())
    assert bool((whole[3 + rows :] == 7.0).all())


@pytest.mark.usefixtures("_cublas_here")
def test_cut_blocks_are_left_to_our_own_kernel():
    for shape in ((256, 400), (144, 256)):
        layer = Float8Linear(
            quantize_blocks(torch.randn(shape)), None, Workspace(torch.device("cpu"), torch.float32)
        )
        assert layer.name.endswith("many rows by Triton")
        assert "torch" not in layer.planned[1].options(128)


def test_torch_multiplies_by_blocks_on_hopper_with_cuda_12_9(monkeypatch):
    gpu = torch.device("cuda", 0)
    cases = [("12.9", (9, 0), True), ("13.0", (9, 0), True), ("12.8", (9, 0), False)]
    cases += [("13.0", (8, 9), False), ("13.0", (10, 0), False), (None, (9, 0), False)]
    for version, capability, expected in cases:
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert torch_float8.has_blocks(gpu) is expected
        assert not torch_float8.has_blocks(torch.device("cpu"))


SIZES = [(33, 384, 256), (100, 512, 384), (131, 128, 128)]  # rows, inputs, outputs


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_hopper_both_products_by_blocks_agree_and_are_captured(
    on_triton, rows, inputs, outputs, with_bias
):
    device, dtype = on_triton.kernels.device, on_triton.kernels.dtype
    if not torch_float8.has_blocks(device):
        pytest.skip("torch multiplies by blocks on Hopper only, with CUDA 12.9 or later")
    weight = held(quantize_blocks(torch.randn(outputs, inputs) * inputs**-0.5), device)
    bias = on_triton.half(torch.randn(outputs)) if with_bias else None
    by_torch = TorchFloat8(weight, bias)
    x = triton_float8_rows.quantize_rows(poisoned(on_triton, rows, inputs), 128)
    found = torch.full((rows, outputs), NAN, dtype=dtype, device=device)
    by_torch.write(x, found)
    ours = float8_many(x, weight, bias, dtype)
    assert_close("y", found.cpu(), ours.cpu().double(), **on_triton.tolerance)
    again = torch.full_like(found, NAN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_torch.write(x, again)
    graph.replay()
    assert torch.equal(again, found)


@pytest.mark.parametrize("has_bias", [True, False])
def test_in_bfloat16_the_bias_is_added_before_the_result_is_rounded(has_bias):
    """By torch alone: the interpreter has no bfloat16, and rows come rounded here."""
    weight, bias = quantize_channels(torch.randn(48, 160)), torch.randn(48)
    workspace = Workspace(torch.device("cpu"), torch.bfloat16)
    layer = Float8Linear(weight, bias if has_bias else None, workspace)
    rows = float8_rows.quantize_rows(torch.randn(5, 160))
    exact = rows.dequantize() @ weight.dequantize().t()
    if has_bias:
        exact += bias.bfloat16().float()
    # Half a step of bfloat16's 8 bits, and the sum's own noise.
    assert_close("y", layer(rows).float(), exact, rtol=2**-8, atol=1e-3)
