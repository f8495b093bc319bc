from __future__ import annotations

import pytest
import torch

from tailrace.errors import ConfigError
from tailrace.kernels.linear.bfloat16 import require_hardware
from tailrace.kernels.linear.float8 import quantize_blocks, quantize_channels
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.weight import plain
from tests.kernels.compare import assert_close


def has_bfloat16() -> bool:
    try:
        require_hardware()
    except ConfigError:
        return False
    return True


needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(), reason="no AVX512-BF16 and no AMX here")

SHAPES = [(1, 576, 960), (7, 33, 17), (64, 48, 5), (16, 1, 1)]  # rows, inputs, outputs


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_float32_equals_the_formula(kernels, shape, with_bias):
    rows, inputs, outputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5
    bias = torch.randn(outputs) if with_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert_close("y", kernels.pack_linear(weight, bias, "float32")(x), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_float16_rounds_the_weight_and_nothing_else(kernels, shape, with_bias):
    rows, inputs, outputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5
    bias = torch.randn(outputs) if with_bias else None
    rounded = weight.half().double()
    expected = x.double() @ rounded.t() + (0 if bias is None else bias.double())
    assert_close("y", kernels.pack_linear(weight, bias, "float16")(x), expected)


def test_nbytes_counts_weight_and_bias(kernels):
    weight, bias = torch.randn(20, 30), torch.randn(20)
    assert kernels.pack_linear(weight, None, "float32").nbytes == 2400
    assert kernels.pack_linear(weight, bias, "float32").nbytes == 2480
    assert kernels.pack_linear(weight, None, "float16").nbytes == 1200
    assert kernels.pack_linear(weight, bias, "float16").nbytes == 1280


def test_packing_takes_a_transposed_or_half_precision_weight(kernels):
    weight, x = torch.randn(30, 20).half(), torch.randn(4, 30)
    for dtype in ("float32", "float16"):
        packed = kernels.pack_linear(weight.t(), None, dtype)
        assert_close(dtype, packed(x), x.double() @ weight.double())


@pytest.mark.parametrize("value", [65520.0, -1e6, float("inf"), float("nan")])
def test_a_weight_beyond_float16_is_refused_with_the_remedy(kernels, value):
    weight = torch.randn(8, 8)
    weight[3, 4] = value
    with pytest.raises(ConfigError, match=r"shape \[8, 8\].*65504.*--dtype float32"):
        kernels.pack_linear(weight, None, "float16")
    kernels.pack_linear(weight, None, "float32")


def test_the_largest_float16_is_taken(kernels):
    weight = torch.full((2, 2), 65504.0)
    y = kernels.pack_linear(weight, None, "float16")(torch.tensor([[1.0, 0.0]]))
    assert y.tolist() == [[65504.0, 65504.0]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_has_the_same_bits_alone_and_beside_any_number_of_others(kernels, dtype):
    linear = kernels.pack_linear(torch.randn(192, 1536), torch.randn(192), dtype)
    x = torch.randn(130, 1536)
    whole = linear(x)
    assert [n for n in range(1, 130) if not torch.equal(linear(x[:n]), whole[:n])] == []


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_rows_are_no_error(kernels, dtype):
    assert kernels.pack_linear(torch.randn(6, 8), None, dtype)(torch.zeros(0, 8)).shape == (0, 6)


QUANTISED = {
    "int4": lambda weight: quantize_groups(weight, 32),
    "float8-channel": quantize_channels,
    "float8-block": quantize_blocks,
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", QUANTISED)
def test_a_cpu_serves_the_values_of_a_quantised_weight(kernels, form, dtype):
    weight = QUANTISED[form](torch.randn(40, 96) * 0.1)
    bias, x = torch.randn(40), torch.randn(3, 96)
    expected = kernels.pack_linear(plain(weight), bias, dtype)
    packed = kernels.pack_linear(weight, bias, dtype)
    assert torch.equal(packed(x), expected(x))
    assert (packed.name, packed.nbytes) == (expected.name, expected.nbytes)


@pytest.mark.parametrize("form", QUANTISED)
def test_on_a_gpu_the_reference_of_accuracy_checks_is_unpacked(interpreter, form):
    pytest.importorskip("triton", reason="Triton is not installed")
    from tailrace.kernels.triton_kernels import UnpackedTritonKernels  # noqa: PLC0415

    unpacked = UnpackedTritonKernels(torch.device("cpu"), "float32")
    weight, x = QUANTISED[form](torch.randn(40, 96) * 0.1), torch.randn(3, 96)
    linear = unpacked.pack_linear(weight, None, "float32")
    assert linear.name == "cuBLAS float32"
    assert_close("y", linear(x), x.double() @ plain(weight).double().t())


@needs_bfloat16
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16_rounds_weight_input_and_result_and_nothing_else(kernels, shape, with_bias):
    rows, inputs, outputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5
    bias = torch.randn(outputs) if with_bias else None
    exact = x.bfloat16().double() @ weight.bfloat16().double().t()
    exact += 0 if bias is None else bias.bfloat16().double()
    # The sum is float32; its rounding to bfloat16 is half a unit of 2**-8, relative.
    bound = 2.0**-8 * exact.abs() + 1e-4
    y = kernels.pack_linear(weight, bias, "bfloat16")(x)
    assert y.dtype == torch.float32
    assert bool(((y.double() - exact).abs() <= bound).all())


@needs_bfloat16
def test_bfloat16_takes_no_rows_and_counts_its_bytes(kernels):
    packed = kernels.pack_linear(torch.randn(20, 30), torch.randn(20), "bfloat16")
    assert packed(torch.zeros(0, 30)).shape == (0, 20)
    assert packed.nbytes == 1240


def test_bfloat16_without_hardware_is_refused_with_the_remedy(kernels, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(ConfigError, match="neither AVX512-BF16 nor AMX.*--dtype auto"):
        kernels.pack_linear(torch.randn(4, 4), None, "bfloat16")
