"""Prompts of the exact token length, and no two with a common beginning by accident.

    prompt = salt + decode(ids[offset : offset + take])      ids: the corpus, tokenised once
             ^ unique to (seed, index), so that no prefix cache helps by chance

Decoding a slice of ids and encoding it again need not give as many ids (a cut may fall inside a
word or a character), so each prompt is encoded again, and the slice grown or shrunk until the
count is right. Where it never is, the next offset is tried; what stays wrong is a miss, counted.
All of this happens before the run. A prompt too short for its salt goes without (it is shorter
than any block of a prefix cache).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tailrace.bench.codec import Codec

PIECE_CHARACTERS = 50_000
"""The corpus is tokenised in pieces, so that a server's limits are no obstacle."""
CORPUS_CHARACTERS = 600_000
OFFSETS = 4
"""Places in the corpus that are tried for one prompt."""
ADJUSTMENTS = 6
"""Corrections of the length at one place."""
PARALLEL = 4


@dataclass(frozen=True)
class Prompt:
    """One prompt and how long the tokenizer says it is."""

    text: str
    tokens: int
    wanted_tokens: int

    @property
    def is_miss(self) -> bool:
        """Whether the length could not be made exact."""
        return self.tokens != self.wanted_tokens


def python_text() -> str:
    """Return the language reference that every Python carries, as flowing text."""
    from pydoc_data.topics import topics  # noqa: PLC0415  # half a megabyte, needed only here

    return " ".join(" ".join(topics[name].split()) for name in sorted(topics))


def corpus_text(file: Path | None) -> tuple[str, str]:
    """Return the text that prompts are cut from, and its name for the report.

    Raises:
        ConfigError: The file cannot be read or is too short.
    """
    if file is None:
        return python_text()[:CORPUS_CHARACTERS], "pydoc_data.topics of this Python"
    try:
        text = file.read_text(encoding="utf-8")[:CORPUS_CHARACTERS]
    except OSError as error:
        raise ConfigError(f"--text-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text-file {file}: not UTF-8 text ({error.reason})") from error
    if len(text) < 1000:
        raise ConfigError(f"--text-file {file}: {len(text)} characters; at least 1000 are needed")
    return text, file.name


class PromptMaker:
    """Makes the prompts of one run."""

    def __init__(self, codec: Codec, ids: list[int], opening: int, *, seed: int) -> None:
        self._codec = codec
        self._ids = ids
        self._opening = opening
        self._seed = seed

    @classmethod
    async def create(cls, codec: Codec, text: str, *, seed: int) -> PromptMaker:
        """Tokenise the corpus.

        Raises:
            ConfigError: The tokenizer does not answer.
        """
        opening = await _opening(codec)
        ids: list[int] = []
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = await codec.encode(text[start : start + PIECE_CHARACTERS])
            ids += piece[opening:]
        if not ids:
            raise ConfigError(f"{codec.name}: the corpus has no tokens; is it the right tokenizer?")
        return cls(codec, ids, opening, seed=seed)

    async def make_all(
        self, lengths: Sequence[int], on_prompt: Callable[[], None] = lambda: None
    ) -> list[Prompt]:
        """Return one prompt for each length, in order.

        Raises:
            ConfigError: The tokenizer does not answer.
        """
        gate = asyncio.Semaphore(PARALLEL)

        async def make(index: int, length: int) -> Prompt:
            async with gate:
                prompt = await self.make(index, length)
            on_prompt()
            return prompt

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(make(*item)) for item in enumerate(lengths)]
        return [task.result() for task in tasks]

    async def make(self, index: int, length: int) -> Prompt:
        """Return the prompt of request `index`, the closest found where none is exact."""
        rng = random.Random(f"{self._seed}:{index}")
        salt = _salt(self._seed, index)
        salt_tokens = len(await self._codec.encode(salt))
        if salt_tokens >= length:
            salt, salt_tokens = "", self._opening
        best: Prompt | None = None
        for _ in range(OFFSETS):
            prompt = await self._fit(salt, salt_tokens, rng.randrange(len(self._ids)), length)
            if best is None or _distance(prompt) < _distance(best):
                best = prompt
            if not best.is_miss:
                break
        assert best is not None  # noqa: S101  # OFFSETS is above 0: for the type checker
        return best

    async def _fit(self, salt: str, salt_tokens: int, offset: int, length: int) -> Prompt:
        take = max(length - salt_tokens, 0)
        best: Prompt | None = None
        tried: set[int] = set()
        while take not in tried and len(tried) < ADJUSTMENTS:
            tried.add(take)
            text = salt + await self._codec.decode(self._slice(offset, take))
            prompt = Prompt(text, len(await self._codec.encode(text)), length)
            if best is None or _distance(prompt) < _distance(best):
                best = prompt
            if not prompt.is_miss:
                break
            take = max(take + _step(prompt, take, salt_tokens), 0)
        assert best is not None  # noqa: S101  # the first round always runs: for the type checker
        return best

    def _slice(self, offset: int, count: int) -> list[int]:
        """Return `count` ids from `offset` on, starting over at the corpus's end."""
        found = self._ids[offset : offset + count]
        while len(found) < count:
            found += self._ids[: count - len(found)]
        return found


async def _opening(codec: Codec) -> int:
    """Return how many special ids (a BOS, say) open every prompt: what "a" and "b" share."""
    pairs = zip(await codec.encode("a"), await codec.encode("b"), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _step(prompt: Prompt, take: int, salt_tokens: int) -> int:
    """Return by how many ids to grow a slice of `take`, from the tokens each id has given."""
    missing = prompt.wanted_tokens - prompt.tokens
    scaled = round(missing * take / max(prompt.tokens - salt_tokens, 1))
    return scaled or (1 if missing > 0 else -1)


def _distance(prompt: Prompt) -> int:
    return abs(prompt.tokens - prompt.wanted_tokens)


def _salt(seed: int, index: int) -> str:
    return hashlib.sha256(f"{seed}:{index}".encode()).hexdigest()[:10] + ": "
