from __future__ import annotations

import pytest
import torch

from tests.kernels.compare import assert_close


@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (3, 16), (5, 33), (19, 1536), (200, 1536)])
def test_silu_mul_equals_the_formula(kernels, shape):
    rows, width = shape
    x = torch.randn(rows, 2 * width) * 4
    gate, up = x.double().chunk(2, dim=-1)
    assert_close("y", kernels.silu_mul(x), gate * torch.sigmoid(gate) * up)


def test_far_gates_saturate(kernels):
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]])
    y = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 200.0, 1e30]])
    assert_close("y", y, expected, rtol=1e-6, atol=1e-6)


def test_nan_stays_nan(kernels):
    y = kernels.silu_mul(torch.tensor([[float("nan"), 1.0, 1.0, 1.0]]))
    assert y.isnan().tolist() == [[True, False]]


def test_a_row_does_not_depend_on_its_neighbours(native):
    x = torch.randn(129, 2 * 1531)
    together = native.silu_mul(x)
    for row in (0, 64, 128):
        assert torch.equal(native.silu_mul(x[row : row + 1])[0], together[row])
