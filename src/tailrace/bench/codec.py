"""Whose tokenizer counts: the server's own, asked over HTTP before the run, or a local file's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from tailrace.bench.wire import Endpoint, WireError, fetch
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
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


@runtime_checkable
class BatchCodec(Protocol):
    """A codec that is faster when asked for many texts at once."""

    async def count_all(self, texts: Sequence[str]) -> list[int]:
        """Return how many ids each text has, special ones included."""
        ...

    async def decode_all(self, many: Sequence[list[int]]) -> list[str]:
        """Return the text of each list of ids."""
        ...


PARALLEL = 8
"""Questions asked at once of a codec that takes one text at a time."""
A = TypeVar("A")
B = TypeVar("B")


async def count_all(codec: Codec, texts: Sequence[str]) -> list[int]:
    """Return how many ids each text has, special ones included.

    Raises:
        ConfigError: The tokenizer does not answer.
    """
    if isinstance(codec, BatchCodec):
        return await codec.count_all(texts)
    return [len(ids) for ids in await _each(codec.encode, texts)]


async def decode_all(codec: Codec, many: Sequence[list[int]]) -> list[str]:
    """Return the text of each list of ids.

    Raises:
        ConfigError: The tokenizer does not answer.
    """
    if isinstance(codec, BatchCodec):
        return await codec.decode_all(many)
    return await _each(codec.decode, many)


async def _each(ask: Callable[[A], Awaitable[B]], items: Sequence[A]) -> list[B]:
    gate = asyncio.Semaphore(PARALLEL)

    async def one(item: A) -> B:
        async with gate:
            return await ask(item)

    # Not a TaskGroup: its ExceptionGroup would hide the readable error.
    return await asyncio.gather(*map(one, items))


@dataclass(frozen=True)
class Dialect:
    """How a kind of server words /tokenize and /detokenize; both answer or take `tokens`."""

    text: str
    """What /tokenize calls the text."""
    decoded: str
    """What /detokenize calls it in its answer."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further fields of /tokenize."""


VLLM = Dialect("prompt", "prompt")
"""Tailrace's too."""
SGLANG = Dialect("prompt", "text")
LLAMACPP = Dialect("content", "content", (("add_special", True), ("parse_special", True)))


class ServerCodec:
    """POST /tokenize and /detokenize of the server under test.

    Args:
        endpoint: The server.
        model: The name to ask for.
        dialects: Tried in turn with the first text; the first that is understood stays.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        dialects: tuple[Dialect, ...] = (VLLM, SGLANG, LLAMACPP),
    ) -> None:
        self.name = f"{endpoint.url}/tokenize"
        self._endpoint = endpoint
        self._model = model
        self._dialects = dialects

    async def encode(self, text: str) -> list[int]:
        """Ask the server.

        Raises:
            ConfigError: The server has no such route, or answers something else.
        """
        spoken: dict[str, Dialect] = {}
        for dialect in self._dialects:
            spoken.setdefault(dialect.text, dialect)
        found: list[int] | None = None
        for dialect in spoken.values():
            found = await self._encoded(text, dialect)
            # llama.cpp answers a text that it was not asked for by no tokens at all.
            if found or (found is not None and not text):
                self._dialects = tuple(d for d in self._dialects if d.text == dialect.text)
                return found
        raise ConfigError(f"{self.name}: 'tokens' is no list of ids; {_REMEDY}")

    async def decode(self, ids: list[int]) -> str:
        """Ask the server.

        Raises:
            ConfigError: The server has no such route, or answers something else.
        """
        path = "/detokenize"
        answer = await self._ask(path, {"model": self._model, "tokens": ids})
        texts = (answer.get(dialect.decoded) for dialect in self._dialects)
        text = next((text for text in texts if isinstance(text, str)), None)
        if text is None:
            keys = " or ".join(sorted({repr(dialect.decoded) for dialect in self._dialects}))
            raise ConfigError(f"{self._endpoint.url}{path}: no text in {keys}; {_REMEDY}")
        return text

    async def _encoded(self, text: str, dialect: Dialect) -> list[int] | None:
        body = {"model": self._model, dialect.text: text} | dict(dialect.options)
        ids = (await self._ask("/tokenize", body)).get("tokens")
        if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            return ids
        return None

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        where = self._endpoint.url + path
        try:
            answer = await fetch(self._endpoint, "POST", path, json.dumps(body).encode())
            found = json.loads(answer.body) if answer.status == 200 else None
        except (OSError, WireError, ValueError) as error:
            raise ConfigError(f"{where}: {error or type(error).__name__}; {_REMEDY}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{where}: HTTP {answer.status} without an answer; {_REMEDY}")
        return found


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

    async def count_all(self, texts: Sequence[str]) -> list[int]:
        """Encode on all cores, off the event loop."""
        if not texts:
            return []
        batch = await asyncio.to_thread(self._tokenizer.encode_batch_fast, list(texts))
        return [len(encoding) for encoding in batch]

    async def decode_all(self, many: Sequence[list[int]]) -> list[str]:
        """Decode on all cores, off the event loop."""
        return await asyncio.to_thread(self._tokenizer.decode_batch, list(many))


def _load(file: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415  # slow to import, and rarely needed here

    if not file.is_file():
        raise ConfigError(f"--tokenizer {file}: no such file; give a folder with tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    # The Rust binding raises plain Exception for a file it cannot parse.
    except Exception as error:
        raise ConfigError(f"--tokenizer {file}: {error}") from error
