"""Every operation by Triton, the linear layers by cuBLAS: the GPU behind the `Kernels` protocol.

Activations are bfloat16 or float16; the residual, norms' weights and rotary tables are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.attention_shapes import (
    INTERPRETER,
    Capability,
    decode_shape,
    prefill_shape,
)
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.paged_attention.device_batch import plan
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch, decode
from tailrace.kernels.paged_attention.triton_prefill import prefill
from tailrace.kernels.rms_norm.triton import add_rms_norm
from tailrace.kernels.rope_cache.triton import rope_and_cache
from tailrace.kernels.silu_mul.triton import silu_mul

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.kernels import Linear, WeightDtype
    from tailrace.kernels.rotary import Rotary

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def capability_of(device: torch.device) -> Capability:
    """Return the compute capability that shapes are chosen for."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return INTERPRETER


class TritonKernels:
    """The Triton operations behind the `Kernels` protocol, whose docstrings apply.

    Args:
        device: A CUDA device, or the CPU under Triton's interpreter.
        dtype: Of activations: bfloat16, float16 (or float32, for tests).
    """

    def __init__(self, device: torch.device, dtype: WeightDtype) -> None:
        self.device = device
        self.capability = capability_of(device)
        self.dtype = DTYPES[dtype]
        self.name = f"triton ({dtype})"
        self._scratch: DecodeScratch | None = None

    def reserve(self, *, rows: int, num_heads: int, head_dim: int, max_kv_len: int) -> None:
        """Make the decode kernel's scratch, once, for the largest step there will be."""
        split = decode_shape(head_dim, self.capability).split
        self._scratch = DecodeScratch.allocate(
            rows, num_heads, head_dim, max_kv_len, split, str(self.device)
        )

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`; x is float32, the result in the activations' dtype."""
        return add_rms_norm(None, x_TD, weight_D, eps, out_dtype=self.dtype)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Tensor:
        """See `Kernels.add_rms_norm`; the residual is float32."""
        return add_rms_norm(x_TD, residual_TD, weight_D, eps, out_dtype=self.dtype)

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
    ) -> Tensor:
        """See `Kernels.rope_and_cache`; a negative slot writes nothing."""
        return rope_and_cache(
            qkv_TE,
            rotary,
            batch.positions,
            batch.slots,
            k_cache,
            v_cache,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=norm_eps,
        )

    def paged_attention(
        self, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        _, num_heads, head_dim = q_THD.shape
        planned = plan(batch, prefill_shape(head_dim, batch.max_kv_len, self.capability))
        out_THD = torch.empty_like(q_THD)
        decodes = planned.num_decodes
        if decodes:
            decode(
                q_THD[:decodes],
                k_cache,
                v_cache,
                out_THD[:decodes],
                kv_lens=planned.kv_lens,
                block_tables=planned.block_tables,
                scale=scale,
                shape=decode_shape(head_dim, self.capability),
                scratch=self._scratch_for(decodes, num_heads, head_dim, batch.max_kv_len),
            )
        if len(planned.tiles):
            prefill(
                q_THD,
                k_cache,
                v_cache,
                out_THD,
                tiles=planned.tiles,
                query_starts=planned.query_starts,
                kv_lens=planned.kv_lens,
                block_tables=planned.block_tables,
                scale=scale,
                shape=planned.shape,
            )
        return out_THD.flatten(1)

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        return silu_mul(gate_up_T2F)

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None, dtype: WeightDtype) -> Linear:
        """See `Kernels.pack_linear`."""
        if DTYPES[dtype] != self.dtype:
            raise ConfigError(f"weights in {dtype} do not go with activations in {self.dtype}")
        return CublasLinear(weight_OI, bias_O, self.dtype, self.device)

    def head_dtype(self, dtype: WeightDtype) -> WeightDtype:
        """See `Kernels.head_dtype`."""
        return dtype

    def _scratch_for(
        self, rows: int, num_heads: int, head_dim: int, max_kv_len: int
    ) -> DecodeScratch:
        scratch = self._scratch
        split = decode_shape(head_dim, self.capability).split
        if scratch is not None:
            fits = scratch.lses.shape[0] >= rows and scratch.max_splits * split >= max_kv_len
            if fits:
                return scratch
            raise EngineError(f"{rows} rows of {max_kv_len} tokens exceed what was reserved")
        return DecodeScratch.allocate(
            rows, num_heads, head_dim, max_kv_len, split, str(self.device)
        )
