"""What a model asks of the device.

Shape suffixes: T rows of the step, D model or head dimension, E = (Hq + 2 Hkv) * head_dim,
F feed-forward width, I and O a linear layer's inputs and outputs, H heads. All activations are
contiguous; float32 on the CPU, half precision on a GPU, where the residual stays float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from tailrace.kernels.kv_scales import UNSCALED, KVScales

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.linear.weight import Weight
    from tailrace.kernels.rotary import Rotary

WeightDtype = Literal["float32", "float16", "bfloat16"]


class Linear(Protocol):
    """A weight matrix, packed for the machine."""

    @property
    def name(self) -> str:
        """How it computes, such as "fbgemm float16"."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and bias."""
        ...

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return x @ weight.T + bias as float32 [T, O]."""
        ...


class Kernels(Protocol):
    """One implementation of every operation; all of them agree within their precision's noise."""

    @property
    def name(self) -> str:
        """As a person would say it, such as "native (avx512, 2 threads)"."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight, row by row."""
        ...

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Tensor:
        """Add x to residual in place and return the RMS norm of the sum."""
        ...

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
        """Rotate q and k, write k and v into the caches at `batch.slots`, return q [T, Hq, D].

        Where `q_norm` and `k_norm` (float32 [D]) are given, q and k are RMS-normed per head
        before they are rotated. A float8 cache gets k and v divided by `kv_scales`.
        """
        ...

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
        """Return causal attention of each row over its sequence, float32 [T, Hq * D]."""
        ...

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """Return silu(x[:, :F]) * x[:, F:], float32 [T, F]."""
        ...

    def multiply(self, linear: Linear, x_TI: Tensor, *, decodes: int = 0) -> Tensor:
        """Return linear(x).

        Args:
            linear: Packed here.
            x_TI: The step's rows.
            decodes: How many of them, at the front, are decodes; a layer with two copies of its
                weight serves those by one and all others by the other.
        """
        ...

    def norm_into(
        self,
        linear: Linear,
        x_TD: Tensor | None,
        residual_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        *,
        decodes: int = 0,
    ) -> Tensor:
        """Add x to residual in place (None: nothing), and return linear(RMS norm of the sum).

        Together, since rows that the layer would round first may be rounded where they are made.
        """
        ...

    def silu_mul_into(self, linear: Linear, gate_up_T2F: Tensor, *, decodes: int = 0) -> Tensor:
        """Return linear(silu(x[:, :F]) * x[:, F:]), likewise."""
        ...

    def head_dtype(self, dtype: WeightDtype) -> WeightDtype:
        """Return how the head is held where the other matrices are held in `dtype`."""
        ...

    def pack_linear(self, weight: Weight, bias_O: Tensor | None, dtype: WeightDtype) -> Linear:
        """Pack a weight once, at load: plain, or quantised and then served as the device likes.

        Raises:
            ConfigError: The weight does not fit float16's range, or bfloat16 has no hardware.
        """
        ...
