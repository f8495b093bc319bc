"""What the engine's runner sees of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.kernels import Linear
    from tailrace.kernels.kv_scales import KVScales
    from tailrace.models.config import ModelConfig

KVCache = tuple["Tensor", "Tensor"]
"""One layer's (k_cache, v_cache); shapes are the kernels' affair."""


class CausalLM(Protocol):
    """A decoder that continues the sequences of one flat batch."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take as they are held."""
        ...

    @property
    def linear_names(self) -> Counter[str]:
        """How many linear layers are computed in which way, the head among them."""
        ...

    @property
    def layer_linears(self) -> list[Linear]:
        """The linear layers in the order of a step, without the head: qkv, o, gate and up, down."""
        ...

    def with_linears(self, change: Callable[[Linear], Linear]) -> CausalLM:
        """Return a model with other linear layers, the head's excepted, and the rest shared."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_caches: Sequence[KVCache],
        kv_scales: Sequence[KVScales] | None = None,
    ) -> Tensor:
        """Run one step and write its keys and values into the caches.

        Args:
            token_ids: int64 [T], the sequences' chunks one after the other.
            batch: Where each row belongs.
            kv_caches: One pair a layer.
            kv_scales: One a layer, where the caches are float8.

        Returns:
            float32 [T, H], after the final norm.
        """
        ...

    def shallow(self) -> tuple[CausalLM, list[int]]:
        """Return the model with one layer of each kind, and which of its layers those are.

        Layers of a kind are computed in the same way, by the same kernels at the same sizes: what
        this has compiled is compiled for all.
        """
        ...

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return float32 [R, vocabulary] for the rows that are to be sampled."""
        ...
