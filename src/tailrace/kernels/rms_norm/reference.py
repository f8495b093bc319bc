"""RMS norm in PyTorch: the truth that other kernels are held to."""

from __future__ import annotations

import torch


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    mean_square = x_TD.square().mean(-1, keepdim=True)
    return x_TD * torch.rsqrt(mean_square + eps) * weight_D


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to residual in place and return the RMS norm of the sum."""
    residual_TD.add_(x_TD)
    return rms_norm(residual_TD, weight_D, eps)
