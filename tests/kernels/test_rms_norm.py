from __future__ import annotations

import pytest
import torch

from tailrace.errors import EngineError
from tests.kernels.compare import assert_close

SHAPES = [(1, 1), (1, 7), (3, 16), (5, 33), (2, 47), (17, 576), (300, 576), (64, 1000)]


def truth(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_the_formula(kernels, shape):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[1])
    assert_close("y", kernels.rms_norm(x, weight, 1e-5), truth(x, weight, 1e-5))


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_adds_in_place_and_norms_the_sum(kernels, shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    before, total = x.clone(), x + residual
    y = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    assert_close("y", y, truth(total, weight, 1e-5))


def test_eps_keeps_a_row_of_zeros_at_zero(kernels):
    y = kernels.rms_norm(torch.zeros(2, 40), torch.ones(40), 1e-6)
    assert torch.equal(y, torch.zeros(2, 40))


def test_a_row_does_not_depend_on_its_neighbours(native):
    x, weight = torch.randn(257, 575), torch.randn(575)
    together = native.rms_norm(x, weight, 1e-5)
    for row in (0, 100, 256):
        assert torch.equal(native.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


def test_no_rows_are_no_error(kernels):
    assert kernels.rms_norm(torch.zeros(0, 64), torch.ones(64), 1e-5).shape == (0, 64)


@pytest.mark.parametrize(
    "x", [torch.zeros(4, 8).t(), torch.zeros(8, 4, dtype=torch.float64), torch.zeros(8, 4)[:, ::2]]
)
def test_a_tensor_of_another_type_or_layout_is_refused(native, x):
    with pytest.raises(EngineError, match="a native kernel wants"):
        native.rms_norm(x, torch.ones(x.shape[1]), 1e-5)


def test_a_residual_of_another_size_is_refused(native):
    with pytest.raises(EngineError, match="32 contiguous elements"):
        native.add_rms_norm(torch.zeros(4, 8), torch.zeros(3, 8), torch.ones(8), 1e-5)
