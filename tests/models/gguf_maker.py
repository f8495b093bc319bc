"""Writes tiny GGUF files, from tiny checkpoints or from nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.support.tiny import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    SPECIALS,
    byte_symbols,
    make_tiny_checkpoint,
)

if TYPE_CHECKING:
    from pathlib import Path

Kind = gguf.GGMLQuantizationType

VOCAB_SIZE = 256 + len(SPECIALS) + 1
"""The tiny vocabulary and the one merged token that GGUF asks for."""
HE_ID = VOCAB_SIZE - 1

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def tiny_source(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Make the tiny checkpoint that `gguf_of` turns into GGUF."""
    return make_tiny_checkpoint(folder, family, vocab_size=VOCAB_SIZE, **overrides)


def gguf_of(
    checkpoint: Path,
    file: Path,
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a tiny checkpoint as GGUF, as llama.cpp's converter would.

    Args:
        checkpoint: From `tiny_source`.
        file: Where to.
        kind: The type of all matrices; vectors are F32.
        metadata: Overrides by key; None leaves a key out.
        extra: Further F32 tensors, under GGUF names.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"]
    tensors = {}
    for name, values in load_file(checkpoint / "model.safetensors").items():
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
        for letter, key in heads.items():
            if f"{letter}_proj" in name and family == "llama":
                values = _paired(values, config[key])  # noqa: PLW2901
        for theirs, short in _NAMES.items():
            name = name.replace(theirs, short)  # noqa: PLW2901
        tensors[name] = values
    pairs = model_metadata(config) | vocabulary_metadata() | (metadata or {})
    return write_gguf(file, pairs, tensors | (extra or {}), kind)


def model_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that llama.cpp's converter makes of a config."""
    kind = config["model_type"]
    return {
        "general.architecture": kind,
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.embedding_length": config["hidden_size"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.attention.head_count": config["num_attention_heads"],
        f"{kind}.attention.head_count_kv": config["num_key_value_heads"],
        f"{kind}.attention.key_length": config["head_dim"],
        f"{kind}.attention.value_length": config["head_dim"],
        f"{kind}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{kind}.rope.freq_base": config["rope_theta"],
        f"{kind}.rope.dimension_count": config["head_dim"],
    }


def vocabulary_metadata() -> dict[str, Any]:
    """Return the tiny byte-level vocabulary."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*byte_symbols(), *SPECIALS, "he"],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIALS) + [1],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    file: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: Kind = Kind.F32
) -> Path:
    """Write metadata and tensors; uint8 arrays are taken as blocks of `kind` already."""
    writer = gguf.GGUFWriter(str(file), "none")
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    for name, values in tensors.items():
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=kind)
        elif values.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, values.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
        str: writer.add_string,
    }
    add[type(value)](key, value)


def _paired(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the halves of each head's rows: llama.cpp's order."""
    rows = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)
