"""Tiny random checkpoints with a byte-level tokenizer: a model that every test can afford.

A checkpoint is a Hugging Face folder (config.json, generation_config.json, model.safetensors,
tokenizer.json, tokenizer_config.json). Only torch, safetensors and tokenizers are needed.

Token ids: 0..255 are the bytes, 256.. are `SPECIALS` in order, so that `len(text.encode())`
is the number of tokens of a text without specials.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIALS)
BOS_ID, IM_START_ID, EOS_ID = 256, 257, 258

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class _Family:
    architecture: str
    model_type: str
    config: dict[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": False}, qkv_bias=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM", "qwen3", {"tie_word_embeddings": False, "head_dim": 32}, qk_norm=True
    ),
}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "torch_dtype": "float32",
}


def make_tiny_checkpoint(
    folder: Path | str, family: str = "llama", seed: int = 0, **overrides: Any
) -> Path:
    """Write a tiny random checkpoint into `folder` and return the folder.

    Args:
        folder: Created where missing.
        family: "llama" (tied head), "qwen2" (biases) or "qwen3" (QK-norm, wide heads).
        seed: The same seed gives the same weights.
        overrides: Fields of config.json, such as `num_hidden_layers=1`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kind = _FAMILIES[family]
    config = {"architectures": [kind.architecture], "model_type": kind.model_type}
    config |= _SIZES | kind.config | overrides
    write_json(folder / "config.json", config)
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    write_json(folder / "generation_config.json", generation)
    save_file(_weights(config, kind, seed), folder / "model.safetensors", {"format": "pt"})
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of the byte-level tokenizer."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)


def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer of 256 byte tokens and the specials, without merges."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tokenizer


def byte_symbols() -> list[str]:
    """Return byte-level BPE's printable stand-in for each byte, in byte order.

    Bytes that print keep their Latin-1 character; the others take U+0100 onwards, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def write_json(file: Path, value: Any) -> None:
    """Write `value` as JSON, in UTF-8."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(config: dict[str, Any], kind: _Family, seed: int) -> dict[str, torch.Tensor]:
    """Return random tensors under their Hugging Face names.

    Layers outweigh the embedding in the residual, so that greedy output does not merely repeat.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    def linear(out_size: int, in_size: int) -> torch.Tensor:
        return normal(out_size, in_size, std=1.5 / in_size**0.5)

    def norm(size: int) -> torch.Tensor:
        return 1 + normal(size, std=0.1)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=0.3)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = norm(hidden)
        tensors[at + "post_attention_layernorm.weight"] = norm(hidden)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = linear(size, hidden)
            if kind.qkv_bias or config.get("attention_bias"):
                tensors[f"{at}self_attn.{name}_proj.bias"] = normal(size, std=0.3)
        tensors[at + "self_attn.o_proj.weight"] = linear(hidden, q_size)
        if config.get("attention_bias"):  # Llama's flag covers the output projection too
            tensors[at + "self_attn.o_proj.bias"] = normal(hidden, std=0.3)
        if kind.qk_norm:
            tensors[at + "self_attn.q_norm.weight"] = norm(head_dim)
            tensors[at + "self_attn.k_norm.weight"] = norm(head_dim)
        tensors[at + "mlp.gate_proj.weight"] = linear(inner, hidden)
        tensors[at + "mlp.up_proj.weight"] = linear(inner, hidden)
        tensors[at + "mlp.down_proj.weight"] = linear(hidden, inner)
        if config.get("mlp_bias"):
            for name, size in (("gate", inner), ("up", inner), ("down", hidden)):
                tensors[f"{at}mlp.{name}_proj.bias"] = normal(size, std=0.3)
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden)
    return tensors
