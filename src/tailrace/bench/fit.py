"""Pieces of text that are an exact number of tokens long, fitted many at a time.

    piece = lead + body + closing      body: decode(ids[offset : offset + take]) of the corpus

Decoding a slice of ids and encoding it again need not give as many ids (a cut may fall inside a
word or a character), so each piece is encoded again, and its slice grown or shrunk until the count
is right. Where it is close but jumps over the right one (a Chinese character may be three tokens),
plain words fill the last few. Where nothing helps, the next offset is tried; the closest is kept.
One round asks the tokenizer about all unfinished pieces at once: that it can do in parallel.

A prompt may be several pieces one after another. They must not melt into each other where they
meet, or the first ones would not be the same tokens in two prompts. So a piece that others follow
ends in a plain word, and a piece that follows another begins with a new line, and is counted
behind a word: no common tokenizer joins a letter and a line end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.codec import count_all, decode_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailrace.bench.codec import Codec

OFFSETS = 4
"""Places in the corpus that are tried for one piece."""
ADJUSTMENTS = 6
"""Corrections of the length at one place."""
ROUND = 256
"""Pieces in one call of the tokenizer."""
MOST_FILLING = 4
"""Tokens that plain words may fill."""
NEW_LINE = "\n"
CLOSING = " and"
BEFORE = "so"
"""Stands before a piece that follows another, while it is counted."""


@dataclass(frozen=True)
class Wanted:
    """One piece to be made."""

    name: str
    """Seeds the piece's place in the corpus: equal names and lengths are equal text."""
    tokens: int
    """Of a piece that opens a prompt, with the special tokens that open every prompt."""
    salt: str = ""
    """Stands first, so that no two pieces begin alike; left out where the piece is too short."""
    is_first: bool = True
    """Whether it opens the prompt."""
    is_followed: bool = False
    """Whether another piece may come after it."""


@dataclass(frozen=True)
class Piece:
    """A piece of text, and how many tokens it is."""

    text: str
    tokens: int


class _Fitting:
    """One piece on its way to the right length."""

    def __init__(self, wanted: Wanted, ids: Sequence[int], lead_tokens: int, before: int) -> None:
        self._wanted = wanted
        self._ids = ids
        self._before = before
        self._rng = random.Random(wanted.name)
        self._closing = CLOSING if wanted.is_followed else ""
        self._lead = ("" if wanted.is_first else NEW_LINE) + wanted.salt
        self._lead_tokens = lead_tokens
        closing_tokens = 1 if self._closing else 0
        if lead_tokens + closing_tokens >= wanted.tokens:
            self._lead = "" if wanted.is_first else NEW_LINE
            self._closing = ""
            self._lead_tokens = 0 if wanted.is_first else 1
        self.best: Piece | None = None
        self._text = ""
        self._places = 0
        self._offset = self._take = self._filling = 0
        self._tried: set[tuple[int, int]] = set()
        self._next_place()

    @property
    def is_done(self) -> bool:
        """Whether the length is right, or all places have been tried."""
        return self._miss(self.best) == 0 or self._places > OFFSETS

    @property
    def slice(self) -> list[int]:
        """The ids to be decoded next; the corpus starts over at its end."""
        found = list(self._ids[self._offset : self._offset + self._take])
        while len(found) < self._take:
            found += self._ids[: self._take - len(found)]
        return found

    def text(self, body: str) -> str:
        """Return the text to be counted next."""
        # A character that was cut in two decodes to this mark.
        body = body.strip("\ufffd") + CLOSING * self._filling
        self._text = self._lead + body + self._closing
        return self._text if self._wanted.is_first else BEFORE + self._text

    def feed(self, count: int) -> None:
        """Take the count of the last text, and choose the next slice."""
        piece = Piece(self._text, count - (0 if self._wanted.is_first else self._before))
        if self.best is None or abs(self._miss(piece)) < abs(self._miss(self.best)):
            self.best = piece
        self._tried.add((self._take, self._filling))
        if len(self._tried) > 1 and not self._filling and 0 < self._miss(piece) <= MOST_FILLING:
            self._filling = self._miss(piece)
        else:
            self._filling = 0
            self._take = max(self._take + self._step(piece), 0)
        if (self._take, self._filling) in self._tried or len(self._tried) == ADJUSTMENTS:
            self._next_place()

    def _next_place(self) -> None:
        self._places += 1
        self._offset = self._rng.randrange(len(self._ids))
        self._take = max(self._wanted.tokens - self._lead_tokens - bool(self._closing), 0)
        self._filling = 0
        self._tried = set()

    def _miss(self, piece: Piece | None) -> int:
        """Return how many tokens are missing."""
        return self._wanted.tokens - piece.tokens if piece is not None else self._wanted.tokens + 1

    def _step(self, piece: Piece) -> int:
        """Return by how many ids to grow the slice, from the tokens that each id has given."""
        missing = self._miss(piece)
        scaled = round(missing * self._take / max(piece.tokens - self._lead_tokens, 1))
        return scaled or (1 if missing > 0 else -1)


async def fit_all(
    codec: Codec,
    ids: Sequence[int],
    wanted: Sequence[Wanted],
    on_piece: Callable[[], None] = lambda: None,
) -> list[Piece]:
    """Return one piece for each of `wanted`, in order.

    Args:
        codec: Counts.
        ids: The corpus, tokenised.
        wanted: What is to be made.
        on_piece: Called after each.

    Raises:
        ConfigError: The tokenizer does not answer.
    """
    (before,) = await count_all(codec, [BEFORE])
    found: list[Piece] = []
    for start in range(0, len(wanted), ROUND):
        part = wanted[start : start + ROUND]
        leads = await count_all(codec, [_counted_lead(piece) for piece in part])
        fittings = [
            _Fitting(piece, ids, lead - (0 if piece.is_first else before), before)
            for piece, lead in zip(part, leads, strict=True)
        ]
        await _fit(codec, fittings, on_piece)
        found += [fitting.best for fitting in fittings if fitting.best is not None]
    return found


async def _fit(codec: Codec, fittings: list[_Fitting], on_piece: Callable[[], None]) -> None:
    open_ones = fittings
    while open_ones:
        bodies = await decode_all(codec, [fitting.slice for fitting in open_ones])
        texts = [fitting.text(body) for fitting, body in zip(open_ones, bodies, strict=True)]
        for fitting, count in zip(open_ones, await count_all(codec, texts), strict=True):
            fitting.feed(count)
            if fitting.is_done:
                on_piece()
        open_ones = [fitting for fitting in open_ones if not fitting.is_done]


def _counted_lead(wanted: Wanted) -> str:
    return wanted.salt if wanted.is_first else BEFORE + NEW_LINE + wanted.salt
