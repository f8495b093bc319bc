"""Every operation by the compiled kernels; the linear layers stay torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.kernels.kv_scales import UNSCALED, KVScales, require_unscaled
from tailrace.kernels.linear.pack import head_dtype, pack_linear
from tailrace.kernels.native.memory import batch_struct
from tailrace.kernels.paged_attention.native import paged_attention
from tailrace.kernels.rms_norm.native import rms_norm
from tailrace.kernels.rope_cache.native import rope_and_cache
from tailrace.kernels.silu_mul.native import silu_mul

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.kernels import Linear, WeightDtype
    from tailrace.kernels.linear.weight import Weight
    from tailrace.kernels.native.library import BatchStruct, Library
    from tailrace.kernels.rotary import Rotary


class NativeKernels:
    """The compiled operations behind the `Kernels` protocol, whose docstrings apply.

    Args:
        library: The compiled kernels, and the threads they use.
    """

    def __init__(self, library: Library) -> None:
        plural = "" if library.threads == 1 else "s"
        self.name = f"native ({library.isa}, {library.threads} thread{plural})"
        self.device = torch.device("cpu")
        self._library = library
        # A step's batch passes through every layer: it is checked and converted once.
        self._last_batch: tuple[AttentionBatch, BatchStruct] | None = None

    def _struct(self, batch: AttentionBatch) -> BatchStruct:
        if self._last_batch is None or self._last_batch[0] is not batch:
            self._last_batch = (batch, batch_struct(batch))
        return self._last_batch[1]

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return rms_norm(self._library, x_TD, None, weight_D, eps)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        return rms_norm(self._library, x_TD, residual_TD, weight_D, eps)

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
        require_unscaled("native", kv_scales)
        return rope_and_cache(
            self._library,
            qkv_TE,
            rotary,
            self._struct(batch),
            k_cache=k_cache,
            v_cache=v_cache,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=norm_eps,
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
        require_unscaled("native", kv_scales)
        return paged_attention(
            self._library, q_THD, k_cache, v_cache, self._struct(batch), scale=scale
        )

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        return silu_mul(self._library, gate_up_T2F)

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
