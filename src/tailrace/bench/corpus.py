"""The text that prompts are cut from: Python's own, a file, or a folder of files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

CORPUS_CHARACTERS = 600_000
"""So much of each file is used."""
LEAST_CHARACTERS = 1000


def python_text() -> str:
    """Return the language reference that every Python carries, as flowing text."""
    from pydoc_data.topics import topics  # noqa: PLC0415  # half a megabyte, needed only here

    return " ".join(" ".join(topics[name].split()) for name in sorted(topics))


def corpus_text(path: Path | None) -> tuple[str, str]:
    """Return the text that prompts are cut from, and its name for the report.

    Of a folder, all its .txt files one after another: prompts are cut at random places, so each
    file gives as many of them as its share of the tokens.

    Raises:
        ConfigError: A file cannot be read, or there is too little text.
    """
    if path is None:
        return python_text()[:CORPUS_CHARACTERS], "pydoc_data.topics of this Python"
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    text = "\n".join(_read(file) for file in files)
    if len(text) < LEAST_CHARACTERS:
        kind = ".txt files with " if path.is_dir() else ""
        raise ConfigError(
            f"--text-file {path}: {kind}{len(text)} characters; at least {LEAST_CHARACTERS} are "
            "needed"
        )
    return text, path.name if not path.is_dir() else ", ".join(file.name for file in files)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")[:CORPUS_CHARACTERS]
    except OSError as error:
        raise ConfigError(f"--text-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text-file {file}: not UTF-8 text ({error.reason})") from error
