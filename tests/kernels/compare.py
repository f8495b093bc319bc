"""Compare a kernel's result with the truth, and say where it is worst."""

from __future__ import annotations

import torch


def assert_close(name, found, expected, *, rtol=2e-5, atol=2e-5):
    """Fail with the tensor's name, its worst index and both values there."""
    assert found.shape == expected.shape, (
        f"{name}: shape {list(found.shape)}, expected {list(expected.shape)}"
    )
    found, expected = found.double(), expected.double()
    excess = (found - expected).abs() - atol - rtol * expected.abs()
    excess = excess.masked_fill((found == expected) | (found.isnan() & expected.isnan()), -1.0)
    if expected.numel() == 0 or not bool((~(excess <= 0)).any()):
        return
    worst = int(excess.nan_to_num(nan=float("inf")).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), found.shape))
    raise AssertionError(
        f"{name}{list(index)}: found {found[index]:.9g}, expected {expected[index]:.9g} "
        f"(rtol {rtol:g}, atol {atol:g}; {int((~(excess <= 0)).sum())} of {found.numel()} differ)"
    )
