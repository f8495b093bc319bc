"""Int8 products for prompts: the rotation, rows rounded alone or where they are made, the layer."""

from __future__ import annotations

import pytest
import torch

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.linear import int8_rows, triton_int8_rows
from tailrace.kernels.linear.int8 import (
    MOST_INPUTS,
    Int8Weight,
    block_of,
    hadamard,
    quantize_channels,
    rotate,
)
from tailrace.kernels.linear.int8_linear import Int8Linear
from tailrace.kernels.linear.int8_rows import Int8Rows
from tailrace.kernels.linear.triton_int8 import (
    HOPPER,
    OTHERS,
    SHAPES_TO_TIME,
    Int8Shape,
    int8_product,
    shape_of,
)
from tailrace.kernels.rms_norm.reference import add_rms_norm, rms_norm
from tailrace.kernels.silu_mul.reference import silu_mul
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN

TINY = Int8Shape(32, 64, 64, 4, 2)
"""So that small products have many tiles."""


def poisoned(on_triton, rows, inputs):
    """Return x at the head of a larger block that holds NaN, as freed memory may."""
    whole = on_triton.half(torch.full((rows + 40, inputs), NAN))
    whole[:rows] = on_triton.half(torch.randn(rows, inputs))
    return whole[:rows]


def held(weight, device):
    return Int8Weight(weight.values.to(device), weight.scales.to(device))


def assert_rounded(found, exact, precision):
    """Each rotated value lies within half a step of the exact one, give or take `precision`."""
    turned = rotate(exact)
    scales = turned.abs().amax(1) / 127
    assert_close("scales", found.scales.cpu(), scales, rtol=precision, atol=1e-30)
    error = found.values.cpu().float() * found.scales.cpu().unsqueeze(1) - turned
    # Rounded before it is rotated, a row strays by its own length, spread over its block.
    bound = 0.5 * scales.unsqueeze(1) + precision * turned.abs().amax(1, keepdim=True)
    assert bool((error.abs() <= bound).all())


# The rotation


@pytest.mark.parametrize("inputs", [16, 48, 96, 160, 576, 1024])
def test_a_rotation_keeps_every_product_and_is_its_own_inverse(inputs):
    x, w = torch.randn(3, inputs, dtype=torch.float64), torch.randn(5, inputs, dtype=torch.float64)
    assert_close("products", rotate(x) @ rotate(w).t(), x @ w.t(), rtol=1e-4, atol=1e-4)
    assert_close("x", rotate(rotate(x)), x, rtol=1e-5, atol=1e-5)


def test_blocks_are_the_largest_power_of_two_that_divides_the_inputs():
    assert [block_of(n) for n in (16, 48, 576, 3584, 18944)] == [16, 16, 64, 128, 128]
    assert torch.equal(hadamard(64) @ hadamard(64), 64 * torch.eye(64))


@pytest.mark.parametrize("inputs", [8, 577, MOST_INPUTS + 1])
def test_inputs_that_cannot_be_rotated_or_summed_are_refused(inputs):
    with pytest.raises(ConfigError, match=f"int8 weight of {inputs} inputs: must be a multiple"):
        block_of(inputs)


def test_one_large_input_harms_the_rounding_of_no_other():
    """What the rotation is for: without it, all but the outlier would be rounded to nothing."""
    x = torch.randn(4, 256)
    x[:, 17] = 400.0
    rounded = int8_rows.quantize_rows(x).dequantize()
    others = [column for column in range(256) if column != 17]
    error = (rounded - x)[:, others]
    assert float(error.pow(2).mean().sqrt()) < 0.1
    plain = (x * 127 / 400).round() * 400 / 127
    assert float((plain - x)[:, others].pow(2).mean().sqrt()) > 0.5


def test_a_weight_is_rounded_within_half_a_step():
    weight = torch.randn(7, 96)
    weight[3] = 0.0
    rounded = quantize_channels(weight)
    assert rounded.values.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    error = (rotate(rounded.dequantize()) - rotate(weight)).abs()
    assert bool((error <= 0.5001 * rounded.scales.unsqueeze(1) + 1e-6).all())
    assert rounded.nbytes == 7 * 96 + 7 * 4


def test_parts_that_do_not_belong_together_are_refused():
    values, scales = torch.zeros(4, 32, dtype=torch.int8), torch.ones(4)
    with pytest.raises(ConfigError, match="must be int8 and float32"):
        Int8Weight(values.float(), scales)
    with pytest.raises(ConfigError, match=r"scales have shape \[3\], expected \[4\]"):
        Int8Weight(values, scales[:3])


# Rows


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (2, 576), (5, 2064)])
def test_rows_are_rounded_as_by_the_reference(on_triton, shape):
    x = poisoned(on_triton, *shape) * 7
    x[0] = 0.0
    found = triton_int8_rows.quantize_rows(x)
    truth = int8_rows.quantize_rows(x.cpu())
    assert not found.values[0].any()
    assert_close("scales", found.scales.cpu(), truth.scales, rtol=1e-5, atol=1e-35)
    # Near the middle of two, sums in another order may go either way.
    assert int((found.values.cpu().int() - truth.values.int()).abs().max()) <= 1
    assert_rounded(found, x.cpu().float(), 1e-4)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_is_not_finite_spoils_its_row_and_no_other(on_triton, bad):
    x = poisoned(on_triton, 3, 192)
    x[1, 150] = bad
    gate_up = torch.cat([x, x], 1).contiguous()
    rows = (
        int8_rows.quantize_rows(x.cpu()),
        triton_int8_rows.quantize_rows(x),
        triton_int8_rows.silu_mul_int8(gate_up),
    )
    for found in rows:
        assert bool(found.scales[1].isnan())
        assert bool(found.scales[[0, 2]].isfinite().all())


@pytest.mark.parametrize("with_x", [False, True])
def test_a_norm_rounds_its_own_result(on_triton, with_x):
    residual, weight = torch.randn(4, 304) * 2, torch.randn(304)
    x = on_triton.rounded(torch.randn(4, 304))
    kept = on_triton.float(residual)
    given = on_triton.half(x) if with_x else None
    found = triton_int8_rows.add_rms_norm_int8(
        given, kept, on_triton.float(weight), 1e-5, dtype=on_triton.kernels.dtype
    )
    if with_x:
        exact = add_rms_norm(x, residual, weight, 1e-5)
    else:
        exact = rms_norm(residual, weight, 1e-5)
    assert torch.equal(kept.cpu(), residual)  # the reference adds in place
    assert_rounded(found, exact, on_triton.tolerance["rtol"])


@pytest.mark.parametrize("width", [48, 1536, 2 * triton_int8_rows.PIECE + 64])
def test_silu_mul_rounds_its_own_result(on_triton, width):
    x = on_triton.rounded(torch.randn(3, 2 * width) * 3)
    found = triton_int8_rows.silu_mul_int8(on_triton.half(x))
    assert_rounded(found, silu_mul(x), on_triton.tolerance["rtol"])


def test_no_rows_are_no_error(on_triton):
    none = triton_int8_rows.quantize_rows(on_triton.half(torch.zeros(0, 64)))
    assert none.values.shape == (0, 64)


# Products

SIZES = [(1, 16, 16), (7, 576, 144), (33, 304, 80), (70, 592, 208)]  # rows, inputs, outputs


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("by_descriptor", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_equal_the_references_to_the_last_bit(
    on_triton, rows, inputs, outputs, by_descriptor, with_bias
):
    """Sums are whole numbers; what is left is a scale a row, one an output, and one rounding."""
    device, dtype = on_triton.kernels.device, on_triton.kernels.dtype
    weight = held(quantize_channels(torch.randn(outputs, inputs) * inputs**-0.5), device)
    x = triton_int8_rows.quantize_rows(poisoned(on_triton, rows, inputs))
    bias = on_triton.half(torch.randn(outputs)) if with_bias else None
    shape = TINY if device.type == "cpu" else None
    y = int8_product(x, weight, bias, dtype, shape=shape, by_descriptor=by_descriptor)
    truth = int8_rows.int8_product(x, weight, bias, dtype)
    assert y.dtype == dtype
    assert_close(
        "y", y.cpu(), truth.cpu(), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
    )
    exact = x.dequantize().cpu().double() @ weight.dequantize().cpu().double().t()
    if bias is not None:
        exact += bias.cpu().double()
    assert_close("y beside what is held", y.cpu(), exact, **on_triton.tolerance)


def test_a_row_does_not_depend_on_its_neighbours_or_the_tiles(on_triton):
    device, dtype = on_triton.kernels.device, on_triton.kernels.dtype
    weight = held(quantize_channels(torch.randn(144, 592)), device)
    x = triton_int8_rows.quantize_rows(poisoned(on_triton, 70, 592))
    small = TINY if device.type == "cpu" else HOPPER[0][1]
    together = int8_product(x, weight, None, dtype, shape=small)
    for row in (0, 38, 69):
        alone = Int8Rows(x.values[row : row + 1], x.scales[row : row + 1])
        found = int8_product(alone, weight, None, dtype, shape=HOPPER[0][1])
        assert torch.equal(found[0], together[row])


def test_a_product_is_written_where_it_is_wanted(on_triton):
    device, dtype = on_triton.kernels.device, on_triton.kernels.dtype
    weight = held(quantize_channels(torch.randn(48, 64)), device)
    x = triton_int8_rows.quantize_rows(poisoned(on_triton, 5, 64))
    whole = on_triton.half(torch.full((9, 48), 3.0))
    y = int8_product(x, weight, None, dtype, out_TO=whole[2:7])
    assert y.data_ptr() == whole[2:7].data_ptr()
    assert torch.equal(whole[2:7], int8_product(x, weight, None, dtype))
    assert bool((whole[[0, 1, 7, 8]] == 3.0).all())
    with pytest.raises(EngineError, match=r"must be contiguous"):
        int8_product(x, weight, None, dtype, out_TO=whole[:4])


def test_sums_at_the_far_end_of_int8_are_exact(on_triton):
    device = on_triton.kernels.device
    inputs = 4096
    ones = torch.full((1, inputs), 127, dtype=torch.int8, device=device)
    x = Int8Rows(ones, torch.ones(1, device=device))
    weight = Int8Weight(ones.expand(16, -1).contiguous(), torch.ones(16, device=device))
    y = int8_product(x, weight, None, torch.float32)
    assert y.cpu().tolist() == [[127.0 * 127 * inputs] * 16]


def test_shapes_are_ordered_and_serve_any_number_of_rows():
    for shapes in (HOPPER, OTHERS):
        bounds = [most for most, _ in shapes]
        assert bounds == sorted(bounds)
    assert shape_of(1, (9, 0)) == HOPPER[0][1]
    assert shape_of(16384, (9, 0)) == HOPPER[-1][1]
    assert shape_of(16384, (8, 0)) == OTHERS[-1][1]
    assert {shape for _, shape in HOPPER} <= set(SHAPES_TO_TIME)


def test_two_programs_share_a_multiprocessor_where_they_fit():
    assert Int8Shape(128, 128, 128, 4, 3).programs == 2
    assert Int8Shape(128, 128, 128, 4, 4).programs == 1  # memory
    assert Int8Shape(128, 128, 128, 8, 3).programs == 1  # registers


# The layer


@pytest.mark.parametrize("rows", [0, 1, 67])
def test_a_layer_serves_any_number_of_rows(on_triton, rows):
    device, dtype = on_triton.kernels.device, on_triton.kernels.dtype
    weight, bias = torch.randn(48, 160) * 160**-0.5, torch.randn(48)
    layer = Int8Linear(weight, bias, dtype, device)
    x = poisoned(on_triton, rows, 160)
    y = layer(x)
    assert y.shape == (rows, 48)
    assert layer.sizes == (48, 160)
    into = on_triton.half(torch.zeros(rows + 2, 48))
    layer.write(x, into[1 : 1 + rows])
    assert torch.equal(into[1 : 1 + rows], y)
    assert not into[[0, rows + 1]].any()
    if rows:
        truth = x.cpu().double() @ weight.double().t() + bias.double()
        error = (y.cpu().double() - truth).norm() / truth.norm()
        assert float(error) < 0.02
    assert layer.nbytes == 48 * 160 + 48 * 4 + 48 * dtype.itemsize
    assert layer.name == "int8 by channel"


def test_sizes_that_descriptors_do_not_take_are_refused(on_triton):
    device, dtype = on_triton.kernels.device, on_triton.kernels.dtype
    with pytest.raises(ConfigError, match=r"\[47, 160\]: inputs and outputs must be multiples"):
        Int8Linear(torch.randn(47, 160), None, dtype, device)
