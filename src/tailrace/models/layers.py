"""The layers that all families share.

Legend of shape suffixes (`x_TH` is tokens x hidden):
  T  rows of the step: the sequences' chunks, one after the other
  R  rows that are sampled
  H  hidden size                 F  intermediate size of the MLP
  E  width of [q | k | v]        D  head dimension
  V  vocabulary                  P  positions
  O, I  a linear layer's outputs and inputs

Two fusions shape the code. q, k and v are one matrix, and so are gate and up: one wide product
beats three narrow ones. And the residual sum is added where the next norm reads it, so a block
hands on its own output and the residual separately:

    embed -> residual
    layer    residual += x, qkv(norm(residual))     (x: of the layer before; one kernel, then qkv)
             x = attention(...)
             residual += x, gate_up(norm(residual)) (likewise)
             x = mlp(...)
    ...
    residual += x, final_norm(residual)

A norm and the layer that reads it are asked for together (`Kernels.norm_into`), as are the MLP's
product and its last layer: where that one multiplies in FP8, rows are rounded as they are made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.kv_scales import UNSCALED, KVScales

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.kernels import Kernels, Linear
    from tailrace.kernels.rotary import Rotary
    from tailrace.models.causal_lm import KVCache
    from tailrace.models.config import ModelConfig


@dataclass(frozen=True)
class Attention:
    """Causal grouped-query attention over the paged cache."""

    qkv: Linear
    out: Linear
    rotary: Rotary
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]

    def __call__(
        self,
        kernels: Kernels,
        qkv_TE: Tensor,
        batch: AttentionBatch,
        kv_cache: KVCache,
        kv_scales: KVScales = UNSCALED,
    ) -> Tensor:
        """Return [T, H] for what `qkv` made; the step's KV is in the cache afterwards."""
        k_cache, v_cache = kv_cache
        q_THd = kernels.rope_and_cache(
            qkv_TE,
            self.rotary,
            batch,
            k_cache,
            v_cache,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_eps=self.norm_eps,
            kv_scales=kv_scales,
        )
        scale = self.head_dim**-0.5
        attended = kernels.paged_attention(
            q_THd, k_cache, v_cache, batch, scale, kv_scales=kv_scales
        )
        return kernels.multiply(self.out, attended, decodes=batch.num_decodes)


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear

    def __call__(self, kernels: Kernels, gate_up_T2F: Tensor, decodes: int = 0) -> Tensor:
        """Return [T, H] for what `gate_up` made; the first `decodes` rows are decodes."""
        return kernels.silu_mul_into(self.down, gate_up_T2F, decodes=decodes)


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and MLP, each behind its norm."""

    attention_norm: Tensor  # [H]
    attention: Attention
    mlp_norm: Tensor  # [H]
    mlp: GatedMlp


@dataclass(frozen=True)
class Decoder:
    """A whole model: `CausalLM` for every family here, which differ in how it is put together."""

    config: ModelConfig
    kernels: Kernels
    embedding: Tensor  # [V, H]
    layers: Sequence[DecoderLayer]
    final_norm: Tensor  # [H]
    head: Linear

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_caches: Sequence[KVCache],
        kv_scales: Sequence[KVScales] | None = None,
    ) -> Tensor:
        """Run one step; see `CausalLM.forward`."""
        kernels, eps, decodes = self.kernels, self.config.rms_norm_eps, batch.num_decodes
        # `index_select` copies, so the residual may be summed in place.
        residual_TH = self.embedding.index_select(0, token_ids).to(torch.float32)
        scales = kv_scales or [UNSCALED] * len(self.layers)
        x_TH: Tensor | None = None  # before the first layer there is nothing to add
        for layer, kv_cache, layer_scales in zip(self.layers, kv_caches, scales, strict=True):
            attention, mlp = layer.attention, layer.mlp
            y = kernels.norm_into(
                attention.qkv, x_TH, residual_TH, layer.attention_norm, eps, decodes=decodes
            )
            x_TH = attention(kernels, y, batch, kv_cache, layer_scales)
            y = kernels.norm_into(
                mlp.gate_up, x_TH, residual_TH, layer.mlp_norm, eps, decodes=decodes
            )
            x_TH = mlp(kernels, y, decodes)
        if x_TH is None:
            return kernels.rms_norm(residual_TH, self.final_norm, eps)
        return kernels.add_rms_norm(x_TH, residual_TH, self.final_norm, eps)

    def shallow(self) -> tuple[Decoder, list[int]]:
        """Return the model with one layer of each kind; see `CausalLM.shallow`."""
        first: dict[object, int] = {}
        for index, layer in enumerate(self.layers):
            # The first one's norm has nothing to add, which is another kernel.
            first.setdefault((index == 0, _kind(layer)), index)
        indices = list(first.values())
        return replace(self, layers=[self.layers[index] for index in indices]), indices

    @torch.inference_mode()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return float32 [R, V]."""
        return self.head(hidden_RH)

    @property
    def layer_linears(self) -> list[Linear]:
        """The linear layers, without the head."""
        linears: list[Linear] = []
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            linears += (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        return linears

    def with_linears(self, change: Callable[[Linear], Linear]) -> Decoder:
        """See `CausalLM.with_linears`."""

        def changed(layer: DecoderLayer) -> DecoderLayer:
            attention, mlp = layer.attention, layer.mlp
            return replace(
                layer,
                attention=replace(attention, qkv=change(attention.qkv), out=change(attention.out)),
                mlp=replace(mlp, gate_up=change(mlp.gate_up), down=change(mlp.down)),
            )

        return replace(self, layers=[changed(layer) for layer in self.layers])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are held; a storage that embedding and head share, twice."""
        norms = [self.final_norm]
        for layer in self.layers:
            attention = layer.attention
            parts = (layer.attention_norm, layer.mlp_norm, attention.q_norm, attention.k_norm)
            norms += [norm for norm in parts if norm is not None]
        total = sum(linear.nbytes for linear in self._linears())
        return total + _bytes(self.embedding) + sum(map(_bytes, norms))

    @property
    def linear_names(self) -> Counter[str]:
        """How many linear layers are computed in which way, the head among them."""
        return Counter(linear.name for linear in self._linears())

    def _linears(self) -> list[Linear]:
        return [self.head, *self.layer_linears]


def _kind(layer: DecoderLayer) -> object:
    """Return what layers that are computed alike have in common."""
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    norms = (attention.q_norm is None, attention.k_norm is None)
    return tuple((linear.name, linear.nbytes) for linear in linears), sizes, norms


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
