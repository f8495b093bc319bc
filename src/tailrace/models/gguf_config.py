"""From GGUF metadata to the config.json of the same model, and to its tensors' names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tailrace.errors import ModelError
from tailrace.models.config import Llama3Scaling
from tailrace.models.rope import inverse_frequencies, llama3_frequencies

if TYPE_CHECKING:
    from tailrace.models.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

ROPE_FACTORS = "rope_freqs.weight"
"""What llama.cpp divides each rotary frequency by: how it stores Llama 3's scaling."""

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)")

# Llama 3's published constants; only `factor` differs between its models (8 or 32).
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_FACTOR_TOLERANCE = 1e-5  # relative: float32 rounding of a few operations


@dataclass(frozen=True)
class _Metadata:
    """Typed look-ups whose errors name the key."""

    file: GgufFile

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.file.path}: {key} must be an integer above 0, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelError(f"{self.file.path}: {key} must be a number above 0, is {value!r}")
        # Written as float32: 1e-5 comes back as 0.00000999999974.
        return float(str(np.float32(value)))


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Return what config.json says about this model.

    Raises:
        ModelError: The architecture, or something it asks for, is not supported.
    """
    kind = architecture(file)
    meta = _Metadata(file)
    _refuse_unsupported(file, kind)
    heads = meta.integer(f"{kind}.attention.head_count")
    hidden = meta.integer(f"{kind}.embedding_length")
    head_dim = meta.integer(f"{kind}.attention.key_length", max(hidden // heads, 1))
    for key in (f"{kind}.rope.dimension_count", f"{kind}.attention.value_length"):
        if meta.integer(key, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {key} is {meta.integer(key)}, must be the head dimension {head_dim}"
            )
    theta = meta.number(f"{kind}.rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": meta.integer(f"{kind}.feed_forward_length"),
        "num_hidden_layers": meta.integer(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.integer(f"{kind}.context_length"),
        "rms_norm_eps": meta.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, head_dim, theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": "float32",
    }
    return config | special_ids(file)


def architecture(file: GgufFile) -> str:
    """Return llama.cpp's name of the architecture.

    Raises:
        ModelError: It is not one of `ARCHITECTURES`.
    """
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {kind!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return kind


def special_ids(file: GgufFile) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id (a list where several end a turn) and pad_token_id.

    Raises:
        ModelError: One of them is no row of the embedding.
    """
    named = (_token_id(file, name) for name in ("eos", "eot", "eom"))
    eos = list(dict.fromkeys(token_id for token_id in named if token_id is not None))
    return {
        "bos_token_id": _token_id(file, "bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": _token_id(file, "padding"),
    }


def _token_id(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.metadata.get(key)
    if token_id is None:
        return None
    rows = _vocab_size(file)
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < rows:
        raise ModelError(f"{file.path}: {key} {token_id!r} is not one of the {rows} tokens")
    return token_id


def hf_name(file: GgufFile, name: str) -> str:
    """Return the Hugging Face name of the tensor `name`.

    Raises:
        ModelError: The name belongs to no supported architecture.
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelError(f"{file.path}: tensor {name} has no place in a {architecture(file)} model")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _refuse_unsupported(file: GgufFile, kind: str) -> None:
    harmless: dict[str, tuple[Any, ...]] = {
        f"{kind}.rope.scaling.type": (None, "none"),
        f"{kind}.rope.scale_linear": (None, 1.0),
        f"{kind}.expert_count": (None, 0),
        f"{kind}.attention.sliding_window": (None, 0),
        "split.count": (None, 0, 1),
    }
    for key, values in harmless.items():
        found = file.metadata.get(key)
        if found not in values:
            raise ModelError(f"{file.path}: {key} = {found!r} is not supported")


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _rope_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return the scaling that the file's factors stem from; refuse factors of any other origin."""
    if ROPE_FACTORS not in file.tensors:
        return None
    factors = file.read(ROPE_FACTORS).reshape(-1)
    frequencies = inverse_frequencies(head_dim, theta)
    scaling = Llama3Scaling(
        factor=float(factors.max()),
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
        original_max_position=_LLAMA3_ORIGINAL,
    )
    expected = frequencies / llama3_frequencies(frequencies, scaling)
    if factors.shape != tuple(expected.shape) or not torch.allclose(
        torch.from_numpy(factors.copy()), expected, rtol=_FACTOR_TOLERANCE, atol=0
    ):
        raise ModelError(
            f"{file.path}: tensor {ROPE_FACTORS} holds rotary factors other than Llama 3's, "
            "which are not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
