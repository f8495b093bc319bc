"""Prompts of the exact token length; shared beginnings are planned ones and no others.

    plain prompt           salt + text
    with prefix ids        block, block, ... (whole blocks, text by id), salt + text
    turn 0, 1, 2           salt + text | salt + stand-in answer and text | salt + ...

The salt is unique to (seed, request), so that no prefix cache helps by chance; a block's to (seed,
id), so that two prompts with the same leading ids share exactly these tokens and no more; a turn
begins with all the text of the turn before it. An id that only one prompt of the run has is not
made a block of its own: it shares nothing, and becomes part of the prompt's own text.

All of this happens before the run. What could not be made exact is a miss, counted. A prompt too
short for its salt goes without (it is shorter than any block of a prefix cache).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tailrace.bench.codec import count_all
from tailrace.bench.corpus import corpus_text, python_text
from tailrace.bench.fit import ROUND, Piece, Wanted, fit_all
from tailrace.bench.traffic.schedule import Arrival, Schedule
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailrace.bench.codec import Codec

__all__ = ["Prompt", "PromptMaker", "corpus_text", "python_text"]

PIECE_CHARACTERS = 50_000
"""The corpus is tokenised in pieces, so that a server's limits are no obstacle."""
SHORT_BLOCK = 64
"""Blocks of fewer tokens get a short salt, which leaves room for text."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and how long the tokenizer says it is."""

    text: str
    tokens: int
    wanted_tokens: int
    shared_tokens: int = 0
    """Leading tokens that an earlier request of the run has already sent, by plan. Where requests
    wait for answers (sessions, closed loops) their order is not known: any other request's."""

    @property
    def is_miss(self) -> bool:
        """Whether the length could not be made exact."""
        return self.tokens != self.wanted_tokens


@dataclass
class _Draft:
    """A prompt as the pieces it will be made of."""

    pieces: list[Wanted]
    wanted_tokens: int
    shared_tokens: int = 0


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

    def reseeded(self, codec: Codec, *, seed: int) -> PromptMaker:
        """Return a maker of other prompts from the same corpus, which is not tokenised again.

        `codec` must count as this maker's own does.
        """
        return PromptMaker(codec, self._ids, self._opening, seed=seed)

    async def make_all(
        self, asked: Schedule | Sequence[int], on_piece: Callable[[], None] = lambda: None
    ) -> list[Prompt]:
        """Return one prompt for each request of a schedule (or each length), in order.

        Raises:
            ConfigError: The tokenizer does not answer.
        """
        drafts = self._drafts(_as_schedule(asked))
        # Equal blocks are asked for by many prompts and made once.
        wanted = list(dict.fromkeys(piece for draft in drafts for piece in draft.pieces))
        made = await fit_all(self._codec, self._ids, wanted, on_piece)
        pieces = dict(zip(wanted, made, strict=True))
        return await self._joined(drafts, pieces)

    async def _joined(self, drafts: Sequence[_Draft], pieces: dict[Wanted, Piece]) -> list[Prompt]:
        """Return the prompts; those of several pieces are counted again as a whole."""
        prompts: list[Prompt] = []
        for start in range(0, len(drafts), ROUND):
            part = drafts[start : start + ROUND]
            texts = ["".join(pieces[piece].text for piece in draft.pieces) for draft in part]
            several = [i for i, draft in enumerate(part) if len(draft.pieces) > 1]
            counted = await count_all(self._codec, [texts[i] for i in several])
            counts = dict(zip(several, counted, strict=True))
            prompts += [
                Prompt(
                    text=text,
                    tokens=counts.get(i, pieces[draft.pieces[0]].tokens),
                    wanted_tokens=draft.wanted_tokens,
                    shared_tokens=draft.shared_tokens,
                )
                for i, (draft, text) in enumerate(zip(part, texts, strict=True))
            ]
        return prompts

    def _drafts(self, schedule: Schedule) -> list[_Draft]:
        drafts = [
            _Draft(self._blocks(arrival, schedule.block_tokens), arrival.input_tokens)
            for arrival in _with_shared_blocks(schedule, self._opening)
        ]
        self._plan_shares(schedule, drafts)
        turns: defaultdict[int, list[Wanted]] = defaultdict(list)
        sent_tokens: dict[int, int] = {}
        for index, (arrival, draft) in enumerate(zip(schedule.arrivals, drafts, strict=True)):
            session = arrival.session
            if session is None:
                draft.pieces += self._own(index, arrival, draft)
                continue
            before = sent_tokens.get(session, 0)
            draft.shared_tokens = before or draft.shared_tokens
            turns[session].append(self._turn(index, arrival.input_tokens - before, turns[session]))
            draft.pieces += turns[session]
            sent_tokens[session] = arrival.input_tokens
        return drafts

    def _blocks(self, arrival: Arrival, block_tokens: int) -> list[Wanted]:
        return [
            Wanted(
                name=f"{self._seed}:block {block}",
                tokens=block_tokens + (0 if place else self._opening),
                salt=_salt(f"{self._seed}:block {block}", is_short=block_tokens < SHORT_BLOCK),
                is_first=place == 0,
                is_followed=True,
            )
            for place, block in enumerate(arrival.prefix_ids)
        ]

    def _own(self, index: int, arrival: Arrival, draft: _Draft) -> list[Wanted]:
        """Return the piece that only this prompt has, if its blocks leave room for one."""
        left = arrival.input_tokens - sum(piece.tokens for piece in draft.pieces)
        name = f"{self._seed}:{index}"
        piece = Wanted(name, left, _salt(name), is_first=not draft.pieces)
        return [piece] if left else []

    def _turn(self, index: int, tokens: int, before: list[Wanted]) -> Wanted:
        name = f"{self._seed}:{index}"
        return Wanted(name, tokens, _salt(name), is_first=not before, is_followed=True)

    def _plan_shares(self, schedule: Schedule, drafts: Sequence[_Draft]) -> None:
        """Note how much of each prompt has been sent before it, turns apart."""
        is_ordered = not schedule.users and all(a.session is None for a in schedule.arrivals)
        chains = [_chains(draft.pieces) for draft in drafts]
        holders = Counter(itertools.chain.from_iterable(chains))
        seen: set[int] = set()
        for index, (draft, chain) in enumerate(zip(drafts, chains, strict=True)):
            known = [link in seen if is_ordered else holders[link] > 1 for link in chain]
            blocks = sum(1 for _ in itertools.takewhile(bool, known))
            shared = sum(piece.tokens for piece in draft.pieces[:blocks])
            draft.shared_tokens = shared or (self._opening if index or not is_ordered else 0)
            seen.update(chain)


def _as_schedule(asked: Schedule | Sequence[int]) -> Schedule:
    if isinstance(asked, Schedule):
        return asked
    return Schedule(tuple(Arrival(0.0, length, 1) for length in asked), "lengths", 0.0)


def _with_shared_blocks(schedule: Schedule, opening: int) -> list[Arrival]:
    """Return the requests with those leading blocks only that another one has too, and that fit."""
    holders = Counter(itertools.chain.from_iterable(a.prefix_ids for a in schedule.arrivals))
    found = []
    for arrival in schedule.arrivals:
        shared = itertools.takewhile(lambda block: holders[block] > 1, arrival.prefix_ids)
        fitting = (arrival.input_tokens - opening) // max(schedule.block_tokens, 1)
        found.append(replace(arrival, prefix_ids=tuple(itertools.islice(shared, max(fitting, 0)))))
    return found


def _chains(pieces: Sequence[Wanted]) -> list[int]:
    """Return, for each leading run of pieces, a number that says what it consists of."""
    return list(itertools.accumulate((hash(piece) for piece in pieces), lambda a, b: hash((a, b))))


async def _opening(codec: Codec) -> int:
    """Return how many special ids (a BOS, say) open every prompt: what "a" and "b" share."""
    pairs = zip(await codec.encode("a"), await codec.encode("b"), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _salt(name: str, *, is_short: bool = False) -> str:
    # A line of its own: the text after it is then cut into tokens as in the corpus.
    return hashlib.sha256(name.encode()).hexdigest()[: 4 if is_short else 10] + "\n"
