"""A layer with two copies: which rows go by which, and that nothing else decides it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.config import PREFILL_WEIGHTS
from tailrace.errors import EngineError
from tailrace.kernels.linear import prefill_format, triton_float8, triton_int4
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.float8 import quantize_channels
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.prefill_format import FORMATS, quantize_in_parts
from tailrace.kernels.linear.triton_skinny import SkinnyLinear, SkinnyScratch

OUTPUTS, INPUTS = 48, 128


def layer_of(kernels, kind, inputs=INPUTS):
    weight = torch.randn(OUTPUTS, inputs) * inputs**-0.5
    bias = torch.randn(OUTPUTS)
    name = kernels.name_of_dtype
    if kind == "4 bits":
        return kernels.pack_linear(quantize_groups(weight, 64), bias, name)
    plain = CublasLinear(weight, bias, kernels.dtype, kernels.device)
    if kind == "plain":
        return plain
    return SkinnyLinear(plain, SkinnyScratch.allocate(kernels.device))


def random_rows(on_triton, rows, width=INPUTS):
    return on_triton.half(torch.randn(rows, width))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["4 bits", "plain", "plain, few rows by Triton"])
# The prompts' rows: few, which no copy rounds, and more.
@pytest.mark.parametrize("prompts", [0, 3, triton_float8.MOST_ROWS + 1])
@pytest.mark.parametrize("decodes", [0, 2])
def test_each_row_is_served_by_the_copy_of_its_phase(on_triton, name, kind, prompts, decodes):
    kernels, rows = on_triton.kernels, decodes + prompts
    layer = layer_of(kernels, kind)
    phased = kernels.with_copy(layer, FORMATS[name])
    assert phased.sizes == (OUTPUTS, INPUTS)
    assert phased.nbytes == layer.nbytes + phased.many.nbytes
    x = random_rows(on_triton, rows)
    found = kernels.multiply(phased, x, decodes=decodes)
    assert found.shape == (rows, OUTPUTS)
    if decodes:
        assert torch.equal(found[:decodes], layer(x[:decodes]))
    assert torch.equal(found[decodes:], phased.many(x[decodes:]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("decodes", [0, 2, triton_float8.MOST_ROWS + 4])
def test_rows_are_made_for_the_copy_that_takes_them(on_triton, name, decodes):
    """In norm and SiLU-mul: rounded for the prompts of a copy that rounds, for no decode."""
    kernels, rows = on_triton.kernels, triton_float8.MOST_ROWS + 4
    phased = kernels.with_copy(layer_of(kernels, "4 bits"), FORMATS[name])
    few, many = phased.few, phased.many
    weight = on_triton.float(torch.randn(INPUTS))
    x, residual = random_rows(on_triton, rows), on_triton.float(torch.randn(rows, INPUTS))
    pieces = [(few, slice(decodes))] if decodes else []
    pieces += [(many, slice(decodes, rows))] if decodes < rows else []
    for added in (x, None):
        summed, apart = residual.clone(), residual.clone()
        found = kernels.norm_into(phased, added, summed, weight, 1e-5, decodes=decodes)
        parts = []
        for part, piece in pieces:
            beside = None if added is None else added[piece]
            parts.append(kernels.norm_into(part, beside, apart[piece], weight, 1e-5))
        assert torch.equal(found, torch.cat(parts))
        assert torch.equal(summed, apart)
    gate_up = random_rows(on_triton, rows, 2 * INPUTS)
    found = kernels.silu_mul_into(phased, gate_up, decodes=decodes)
    parts = [kernels.silu_mul_into(part, gate_up[piece]) for part, piece in pieces]
    assert torch.equal(found, torch.cat(parts))


@pytest.mark.parametrize("name", FORMATS)
def test_a_decode_depends_on_nothing_beside_it(on_triton, name):
    kernels = on_triton.kernels
    phased = kernels.with_copy(layer_of(kernels, "4 bits"), FORMATS[name])
    x = random_rows(on_triton, 9)
    alone = kernels.multiply(phased, x[:1], decodes=1)
    for rows, decodes in ((5, 5), (9, 1), (9, 5)):
        beside = kernels.multiply(phased, x[:rows], decodes=decodes)
        assert torch.equal(beside[:1], alone)


def test_more_decodes_than_the_kernel_takes_are_still_served_by_the_codes(on_triton, monkeypatch):
    kernels = on_triton.kernels
    layer = layer_of(kernels, "4 bits")
    phased = kernels.with_copy(layer, FORMATS["fp8"])
    x = random_rows(on_triton, 21)
    # In parts of as many rows: the interpreter's sums, NumPy's, may hang on how many there are.
    expected = torch.cat([layer(part) for part in x.split(8)])
    monkeypatch.setattr("tailrace.kernels.linear.int4_linear.MOST_ROWS", 8)
    assert torch.equal(kernels.multiply(phased, x, decodes=21), expected)
    assert kernels._workspace._wide is None


def test_prompts_by_half_precision_are_those_of_one_copy(on_triton):
    """A 4-bit layer writes its weight out for many rows: a copy is that, kept."""
    kernels = on_triton.kernels
    layer = layer_of(kernels, "4 bits")
    x = random_rows(on_triton, triton_int4.MOST_ROWS + 1)
    assert torch.equal(kernels.with_copy(layer, FORMATS["bf16"])(x), layer(x))


@pytest.mark.parametrize("rows_a_part", [1, 7, 48, 100])
def test_a_weight_is_rounded_in_parts_as_in_one(rows_a_part, monkeypatch):
    monkeypatch.setattr(prefill_format, "_PART_BYTES", 4 * INPUTS * rows_a_part)
    weight = torch.randn(OUTPUTS, INPUTS)
    whole, parts = quantize_channels(weight), quantize_in_parts(weight)
    assert torch.equal(parts.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("name", FORMATS)
def test_a_copys_bytes_are_known_before_it_is_made(interpreter, name):
    from tailrace.kernels.triton_kernels import TritonKernels  # noqa: PLC0415

    kernels = TritonKernels(torch.device("cpu"), "float16")
    layer = layer_of(kernels, "4 bits")
    made = kernels.with_copy(layer, FORMATS[name]).many
    assert FORMATS[name].weight_bytes(OUTPUTS, INPUTS) == made.nbytes - layer.bias_O.nbytes


def test_a_layer_in_float8_has_no_copy(interpreter):
    from tailrace.kernels.triton_kernels import TritonKernels  # noqa: PLC0415

    kernels = TritonKernels(torch.device("cpu"), "float16")
    layer = kernels.pack_linear(quantize_channels(torch.randn(48, 64)), None, "float16")
    with pytest.raises(EngineError, match="FP8 by channel has no copy"):
        kernels.with_copy(layer, FORMATS["fp8"])


def test_the_settings_are_the_formats():
    assert set(PREFILL_WEIGHTS) == {"auto", "same", *FORMATS}
