"""The linear layer of few rows."""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.triton_skinny import (
    MOST_SPLIT_ROWS,
    SPLIT,
    WHOLE,
    SkinnyLinear,
    SkinnyScratch,
    SkinnyShape,
    skinny_linear,
    skinny_shape,
)
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN

SHAPES = [(1, 70, 100), (7, 256, 128), (17, 515, 77), (32, 300, 200)]  # rows, inputs, outputs


def scratch(device):
    return SkinnyScratch.allocate(device, 4 * 32 * 256, 8)


def poisoned_rows(on_triton, rows, inputs):
    """Return x at the head of a larger block that holds NaN, as freed memory may."""
    whole = on_triton.half(torch.full((rows + 40, inputs), NAN))
    whole[:rows] = on_triton.half(torch.randn(rows, inputs))
    return whole[:rows]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [1, 3, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_equals_the_product(on_triton, shape, splits, with_bias):
    rows, inputs, outputs = shape
    x = poisoned_rows(on_triton, rows, inputs)
    weight = on_triton.half(torch.randn(outputs, inputs) * inputs**-0.5)
    bias = on_triton.half(torch.randn(outputs)) if with_bias else None
    room = scratch(x.device)
    room.parts.fill_(NAN)
    y = skinny_linear(x, weight, bias, shape=SkinnyShape(64, 64, splits, 4, 3), scratch=room)
    assert y.dtype == x.dtype
    truth = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert_close("y", y.cpu(), truth.cpu(), **on_triton.tolerance)
    assert not room.arrivals.any(), "the next launch would wait for nobody, or merge too early"


def test_a_row_does_not_depend_on_its_neighbours_of_the_same_tile(on_triton):
    weight = on_triton.half(torch.randn(130, 200))
    x = poisoned_rows(on_triton, 9, 200)
    room = scratch(x.device)
    together = skinny_linear(x, weight, None, shape=SPLIT, scratch=room)
    for row in (0, 8):
        alone = skinny_linear(x[row : row + 1], weight, None, shape=SPLIT, scratch=room)
        assert torch.equal(alone[0], together[row])


def test_layers_with_few_tiles_split_their_inputs_and_fit_the_default_scratch():
    room = SkinnyScratch.allocate("cpu")
    assert skinny_shape(37888) == WHOLE
    assert skinny_shape(3584) == SPLIT
    most = 127 * SPLIT.block_n
    assert skinny_shape(most) == SPLIT
    assert room.parts.numel() >= SPLIT.splits * MOST_SPLIT_ROWS * most
    assert room.arrivals.numel() >= 127


def test_more_rows_go_to_the_wide_layer(on_triton):
    device, dtype = on_triton.kernels.device, on_triton.kernels.dtype
    many = CublasLinear(torch.randn(24, 40), torch.randn(24), dtype, device)
    layer = SkinnyLinear(many, SkinnyScratch.allocate(device))
    assert layer.nbytes == many.nbytes
    for rows in (1, MOST_SPLIT_ROWS, MOST_SPLIT_ROWS + 1):
        x = on_triton.half(torch.randn(rows, 40))
        assert_close("y", layer(x).cpu(), many(x).double().cpu(), **on_triton.tolerance)
    assert layer(x[:0]).shape == (0, 24)
