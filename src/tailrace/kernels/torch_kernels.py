"""Every operation by its PyTorch reference: correct anywhere, and the truth for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.linear.pack import head_dtype, pack_linear
from tailrace.kernels.paged_attention.reference import paged_attention
from tailrace.kernels.rms_norm.reference import add_rms_norm, rms_norm
from tailrace.kernels.rope_cache.reference import rope_and_cache
from tailrace.kernels.silu_mul.reference import silu_mul

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.kernels import Linear, WeightDtype
    from tailrace.kernels.linear.weight import Weight
    from tailrace.kernels.rotary import Rotary


class TorchKernels:
    """The reference operations behind the `Kernels` protocol, whose docstrings apply."""

    def __init__(self, name: str = "torch") -> None:
        self.name = name
        self.device = torch.device("cpu")

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        return add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def rope_and_cache(
        self,
        qkv_TE: Tensor,
        rotary: Rotary,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
        kv_scales: KVScales = UNSCALED,
    ) -> Tensor:
        """See `Kernels.rope_and_cache`."""
        return rope_and_cache(
            qkv_TE,
            rotary,
            batch,
            k_cache,
            v_cache,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=norm_eps,
            kv_scales=kv_scales,
        )

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        *,
        kv_scales: KVScales = UNSCALED,
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        return paged_attention(q_THD, k_cache, v_cache, batch, scale, kv_scales=kv_scales)

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        return silu_mul(gate_up_T2F)

    def multiply(self, linear: Linear, x_TI: Tensor, *, decodes: int = 0) -> Tensor:  # noqa: ARG002 - one copy serves both phases
        """See `Kernels.multiply`."""
        return linear(x_TI)

    def norm_into(
        self,
        linear: Linear,
        x_TD: Tensor | None,
        residual_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        *,
        decodes: int = 0,  # noqa: ARG002 - as above
    ) -> Tensor:
        """See `Kernels.norm_into`."""
        if x_TD is None:
            return linear(self.rms_norm(residual_TD, weight_D, eps))
        return linear(self.add_rms_norm(x_TD, residual_TD, weight_D, eps))

    def silu_mul_into(self, linear: Linear, gate_up_T2F: Tensor, *, decodes: int = 0) -> Tensor:  # noqa: ARG002 - as above
        """See `Kernels.silu_mul_into`."""
        return linear(self.silu_mul(gate_up_T2F))

    def head_dtype(self, dtype: WeightDtype) -> WeightDtype:
        """See `Kernels.head_dtype`."""
        return head_dtype(dtype)

    def pack_linear(self, weight: Weight, bias_O: Tensor | None, dtype: WeightDtype) -> Linear:
        """See `Kernels.pack_linear`."""
        return pack_linear(weight, bias_O, dtype)
