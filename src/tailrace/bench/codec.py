"""Whose tokenizer counts: the server's own, asked over HTTP before the run, or a local file's."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Protocol

from tailrace.bench.wire import Endpoint, WireError, fetch
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers


class Codec(Protocol):
    """Text to ids and back, as the server under test counts a completion's prompt."""

    name: str

    async def encode(self, text: str) -> list[int]:
        """Return the ids, special ones that open every prompt included."""
        ...

    async def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        ...


class ServerCodec:
    """POST /tokenize and /detokenize of the server under test (vLLM's names for them)."""

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self.name = f"{endpoint.url}/tokenize"
        self._endpoint = endpoint
        self._model = model

    async def encode(self, text: str) -> list[int]:
        """Ask the server.

        Raises:
            ConfigError: The server has no such route, or answers something else.
        """
        ids = await self._ask("/tokenize", {"model": self._model, "prompt": text}, "tokens")
        if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            return ids
        raise ConfigError(f"{self.name}: 'tokens' is no list of ids; {_REMEDY}")

    async def decode(self, ids: list[int]) -> str:
        """Ask the server.

        Raises:
            ConfigError: The server has no such route, or answers something else.
        """
        text = await self._ask("/detokenize", {"model": self._model, "tokens": ids}, "prompt")
        if isinstance(text, str):
            return text
        raise ConfigError(f"{self._endpoint.url}/detokenize: 'prompt' is no text; {_REMEDY}")

    async def _ask(self, path: str, body: dict[str, Any], key: str) -> Any:
        where = self._endpoint.url + path
        try:
            answer = await fetch(self._endpoint, "POST", path, json.dumps(body).encode())
            found = json.loads(answer.body) if answer.status == 200 else {}
        except (OSError, WireError, ValueError) as error:
            raise ConfigError(f"{where}: {error or type(error).__name__}; {_REMEDY}") from error
        if not isinstance(found, dict) or key not in found:
            raise ConfigError(f"{where}: HTTP {answer.status} without {key!r}; {_REMEDY}")
        return found[key]


_REMEDY = "if this server cannot tokenise, give its tokenizer with --tokenizer DIR"


class FileCodec:
    """A tokenizer.json on this machine."""

    def __init__(self, folder: Path) -> None:
        """Load `folder`/tokenizer.json, or the file itself.

        Raises:
            ConfigError: There is none, or it cannot be read.
        """
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        self.name = str(file)
        self._tokenizer = _load(file)

    async def encode(self, text: str) -> list[int]:
        """Encode off the event loop."""
        encoding = await asyncio.to_thread(self._tokenizer.encode, text)
        return list(encoding.ids)

    async def decode(self, ids: list[int]) -> str:
        """Decode off the event loop."""
        return await asyncio.to_thread(self._tokenizer.decode, ids)


def _load(file: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415  # slow to import, and rarely needed here

    if not file.is_file():
        raise ConfigError(f"--tokenizer {file}: no such file; give a folder with tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    # The Rust binding raises plain Exception for a file it cannot parse.
    except Exception as error:
        raise ConfigError(f"--tokenizer {file}: {error}") from error
