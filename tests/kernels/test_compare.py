from __future__ import annotations

import pytest
import torch

from tests.kernels.compare import assert_close

NAN = float("nan")


def test_equal_tensors_pass():
    x = torch.tensor([1.0, NAN, -2.0])
    assert_close("x", x, x.clone())


def test_a_mismatch_names_tensor_worst_index_and_both_values():
    expected = torch.zeros(2, 3)
    found = torch.tensor([[0.0, 0.1, 0.0], [0.0, 0.0, -7.5]])
    with pytest.raises(AssertionError, match=r"q\[1, 2\]: found -7\.5, expected 0 .*2 of 6 differ"):
        assert_close("q", found, expected)


@pytest.mark.parametrize(("found", "expected"), [(NAN, 1.0), (1.0, NAN), (float("inf"), 1.0)])
def test_what_is_not_finite_on_one_side_only_fails(found, expected):
    with pytest.raises(AssertionError, match=r"y\[1\]"):
        assert_close("y", torch.tensor([0.0, found]), torch.tensor([0.0, expected]))


def test_another_shape_fails():
    with pytest.raises(AssertionError, match=r"y: shape \[2\], expected \[3\]"):
        assert_close("y", torch.zeros(2), torch.zeros(3))
