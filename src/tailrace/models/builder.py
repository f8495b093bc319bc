"""Turns named tensors into layers: what the family files are written with.

Tensor names are those of Hugging Face checkpoints. Each is taken at the shape the config
implies, so a checkpoint that contradicts its config is caught here, by name.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError, ModelError
from tailrace.kernels.rotary import Rotary
from tailrace.models.layers import Attention, GatedMlp
from tailrace.models.rope import rotary_of
from tailrace.models.weight_reader import WeightReader, stack, stack_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.kernels import Kernels, Linear, WeightDtype
    from tailrace.kernels.linear.weight import Weight
    from tailrace.models.config import ModelConfig
    from tailrace.models.layers import DecoderLayer
    from tailrace.models.weight_reader import TensorSource

_FLOAT16_MAX = 65504.0
_MOST_AT_ONCE = 4
"""Layers packed on a GPU: of 70B's largest, 4-bit, each takes 1.4 GB meanwhile, or 3 of dummies."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Builder:
    """Takes tensors from `source` and packs them for `kernels`.

    Args:
        config: Gives every shape, and says how the linear layers' weights are stored.
        source: Gives every tensor.
        kernels: Pack and run the linear layers.
        dtype: Of the matrices as held; norms and biases stay float32.
    """

    config: ModelConfig
    source: TensorSource
    kernels: Kernels
    dtype: WeightDtype

    def layers(self, build: Callable[[str], DecoderLayer]) -> list[DecoderLayer]:
        """Build every layer, several at once: packing uses one thread a matrix.

        On a GPU the threads only hide what the host does, and each takes several times its layer's
        memory while it packs: there they are few, however many cores there are.

        Args:
            build: Builds the layer whose tensors' names start with its argument.
        """
        places = [f"model.layers.{index}" for index in range(self.config.num_layers)]
        is_gpu = self.kernels.device.type == "cuda"
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(min(threads, _MOST_AT_ONCE) if is_gpu else threads) as pool:
            return list(pool.map(build, places))

    def rotary(self) -> Rotary:
        """Return the rotary tables, on the device."""
        rotary = rotary_of(self.config)
        device = self.kernels.device
        return Rotary(cos_PD=rotary.cos_PD.to(device), sin_PD=rotary.sin_PD.to(device))

    def norm(self, name: str, size: int) -> Tensor:
        """Return a norm's weight, float32 [size]."""
        return self._copied(name, (size,), torch.float32)

    def linear(self, names: list[str], out_sizes: list[int], in_size: int, *, bias: bool) -> Linear:
        """Pack one linear layer out of the projections `names`, stacked along their outputs."""
        sizes = list(zip(names, out_sizes, strict=True))
        # All shapes are checked before memory is asked for: a config can claim anything.
        weight_OI = stack([self._weight(name, size, in_size) for name, size in sizes])
        bias_O = (
            stack_plain([self.source.take(f"{name}.bias", (size,)) for name, size in sizes])
            if bias
            else None
        )
        return self._packed(names[0], weight_OI, bias_O, self.dtype)

    def attention(self, at: str, rotary: Rotary) -> Attention:
        """Build the attention whose tensors' names start with `at`."""
        config = self.config
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        qk_norm = config.qk_norm
        return Attention(
            qkv=self.linear(
                [f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"],
                [q_size, kv_size, kv_size],
                config.hidden_size,
                bias=config.attention_bias,
            ),
            out=self.linear(
                [f"{at}.o_proj"], [config.hidden_size], q_size, bias=config.attention_out_bias
            ),
            rotary=rotary,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
            q_norm=self.norm(f"{at}.q_norm.weight", config.head_dim) if qk_norm else None,
            k_norm=self.norm(f"{at}.k_norm.weight", config.head_dim) if qk_norm else None,
        )

    def mlp(self, at: str) -> GatedMlp:
        """Build the gated MLP whose tensors' names start with `at`."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        bias = self.config.mlp_bias
        return GatedMlp(
            gate_up=self.linear(
                [f"{at}.gate_proj", f"{at}.up_proj"], [inner, inner], hidden, bias=bias
            ),
            down=self.linear([f"{at}.down_proj"], [hidden], inner, bias=bias),
        )

    def embedding_and_head(self, embedding: str, head: str) -> tuple[Tensor, Linear]:
        """Return the embedding [V, H], held in `dtype`, and the head that may share its values."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        embedding_VH = self._copied(embedding, shape, _DTYPES[self.dtype])
        if self.config.tie_word_embeddings:
            # In float32 nothing is copied here: one storage serves both.
            return embedding_VH, self._head(embedding, embedding_VH.to(torch.float32))
        head_VH = stack([self._weight(head.removesuffix(".weight"), *shape)])
        return embedding_VH, self._head(head, head_VH)

    def _weight(self, module: str, outputs: int, inputs: int) -> Weight:
        quantization = self.config.quantization
        layout = None if quantization is None else quantization.layout_of(module)
        return WeightReader(self.source, self.kernels.device).read(module, layout, outputs, inputs)

    def _head(self, name: str, weight_VH: Weight) -> Linear:
        return self._packed(name, weight_VH, None, self.kernels.head_dtype(self.dtype))

    def _packed(
        self, name: str, weight_OI: Weight, bias_O: Tensor | None, dtype: WeightDtype
    ) -> Linear:
        try:
            return self.kernels.pack_linear(weight_OI, bias_O, dtype)
        except ConfigError as error:
            raise ModelError(f"tensor {name} (or one that is stacked with it): {error}") from error

    def _copied(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a copy: pages of a mapped file may be dropped, and read again mid-request."""
        tensor = self.source.take(name, shape)
        low, high = torch.aminmax(tensor)
        if dtype == torch.float16 and max(-low.item(), high.item()) > _FLOAT16_MAX:
            raise ModelError(
                f"tensor {name} holds values beyond {_FLOAT16_MAX:.0f}, float16's limit; "
                "use --dtype float32"
            )
        return tensor.to(self.kernels.device, dtype, copy=True)
