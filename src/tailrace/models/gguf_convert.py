"""Writes the model of a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.errors import ModelError
from tailrace.models.gguf_config import ROPE_FACTORS, architecture, hf_config, hf_name, special_ids
from tailrace.models.gguf_file import GgufFile
from tailrace.models.gguf_tokenizer import build_tokenizer
from tailrace.models.safetensors_writer import write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder, weights in float32.

    Raises:
        ModelError: The file is damaged, or holds what is not supported.
    """
    file = GgufFile(path)
    config = hf_config(file)
    names = {hf_name(file, name): name for name in file.tensors if name != ROPE_FACTORS}
    tokenizer, settings = build_tokenizer(file)
    if tokenizer.get_vocab_size() > config["vocab_size"]:
        raise ModelError(
            f"{path}: {tokenizer.get_vocab_size()} tokens, but token_embd.weight has only "
            f"{config['vocab_size']} rows"
        )
    settings["model_max_length"] = config["max_position_embeddings"]
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_ids(file))
    shapes = {name: file.tensors[source].shape for name, source in names.items()}
    weights = ((name, _weight(file, source, config)) for name, source in names.items())
    write_safetensors(folder / "model.safetensors", shapes, weights)


def _weight(file: GgufFile, name: str, config: dict[str, Any]) -> NDArray[np.float32]:
    values = file.read(name)
    heads = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
    for part, count in heads.items():
        if part in name and architecture(file) == "llama":
            return _unpermuted(file, name, values, config[count])
    return values


def _unpermuted(
    file: GgufFile, name: str, values: NDArray[np.float32], heads: int
) -> NDArray[np.float32]:
    """Undo llama.cpp's order of a head's rows, which it uses for architecture "llama" alone.

    It rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates halves (0, D/2), (1, D/2 + 1):

        in the file    a0 b0 a1 b1 a2 b2        [heads, D/2, 2]
        here           a0 a1 a2 b0 b1 b2        [heads, 2, D/2]
    """
    rows = values.shape[0]
    if rows % (2 * heads):
        raise ModelError(
            f"{file.path}: tensor {name}: {rows} rows do not divide into {heads} heads"
        )
    pairs = values.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
