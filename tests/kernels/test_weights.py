"""Quantised weights as values: packing, dequantisation by the formula, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tailrace.errors import ConfigError
from tailrace.kernels.linear.float8 import Float8Weight, quantize_blocks, quantize_channels
from tailrace.kernels.linear.int4 import GroupInt4, quantize_groups


def test_the_low_nibble_is_the_even_input():
    weight = GroupInt4(
        torch.tensor([[0x21, 0x43]], dtype=torch.uint8),
        torch.tensor([[2.0]], dtype=torch.float16),
        torch.tensor([[3]], dtype=torch.uint8),
        4,
    )
    assert weight.unpacked().tolist() == [[1, 2, 3, 4]]
    assert weight.dequantize().tolist() == [[-4.0, -2.0, 0.0, 2.0]]
    assert weight.shape == (1, 4)
    assert weight.nbytes == 2 + 2 + 1


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_four_bits_lie_within_half_a_step_of_the_weight(group, scale_dtype):
    original = torch.randn(33, 384)
    original[5] = 0.0
    weight = quantize_groups(original, group, scale_dtype)
    step = weight.scales.float().repeat_interleave(group, 1)
    # The extremes may fall half a step outside, where the rounded scale or zero moved the range.
    assert bool(((weight.dequantize() - original).abs() <= 1.1 * step + 1e-6).all())
    assert float((weight.dequantize() - original).abs().mean()) < 0.3 * float(step.mean())
    assert torch.equal(weight.dequantize()[5], torch.zeros(384))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"group": 3}, "group 3: must be even"),
        ({"group": 48}, "64 inputs are no multiple of the group, 48"),
        ({"scales": torch.ones(4, 3).half()}, r"scales have shape \[4, 3\], expected \[4, 2\]"),
        ({"scales": torch.ones(4, 2)}, "scales are torch.float32: must be float16 or bfloat16"),
        ({"zeros": torch.ones(4, 2)}, "zeros are torch.uint8 and torch.float32: must be uint8"),
    ],
)
def test_parts_of_four_bits_that_do_not_go_together_are_refused(parts, message):
    whole = {
        "codes": torch.zeros(4, 32, dtype=torch.uint8),
        "scales": torch.ones(4, 2, dtype=torch.float16),
        "zeros": torch.zeros(4, 2, dtype=torch.uint8),
        "group": 32,
    }
    with pytest.raises(ConfigError, match=message):
        GroupInt4(**{**whole, **parts})


@pytest.mark.parametrize("shape", [(3, 5), (128, 128), (130, 576), (257, 100)])
@pytest.mark.parametrize("quantize", [quantize_channels, quantize_blocks])
def test_float8_lies_within_its_rounding_of_the_weight(shape, quantize):
    original = torch.randn(shape)
    original[1] = 0.0
    found = quantize(original).dequantize()
    # 3 bits of mantissa; below 2^-6 of a scale, a fixed step of 2^-9.
    bound = original.abs() / 16 + original.abs().amax() / 448 * 2**-9
    assert bool(((found - original).abs() <= bound).all())


def test_a_block_of_128_has_its_own_scale():
    original = torch.randn(200, 300)
    original[:128, :128] *= 1000
    weight = quantize_blocks(original)
    assert weight.scales.shape == (2, 3)
    alone = quantize_blocks(original[128:, 256:])
    assert torch.equal(weight.dequantize()[128:, 256:], alone.dequantize())


def test_one_scale_multiplies_the_whole_tensor():
    values = torch.tensor([[1.0, -448.0]]).to(torch.float8_e4m3fn)
    weight = Float8Weight(values, torch.tensor([0.5]), "tensor")
    assert weight.dequantize(torch.bfloat16).tolist() == [[0.5, -224.0]]


@pytest.mark.parametrize(
    ("scheme", "scales", "message"),
    [
        ("tensor", torch.ones(2), r"shape \[2\], expected \[1\]"),
        ("channel", torch.ones(1), r"shape \[1\], expected \[130\]"),
        ("block128", torch.ones(1, 3), r"shape \[1, 3\], expected \[2, 2\]"),
        ("rows", torch.ones(1), "must be tensor, channel or block128"),
        ("tensor", torch.ones(1).half(), "must be float8_e4m3fn and float32"),
    ],
)
def test_float8_scales_that_do_not_fit_the_scheme_are_refused(scheme, scales, message):
    values = torch.zeros(130, 200).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=message):
        Float8Weight(values, scales, scheme)
