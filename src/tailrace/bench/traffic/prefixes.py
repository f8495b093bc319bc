"""Which prompts begin like earlier ones: figures of a trace, and prefix blocks drawn from them.

    prompt = common blocks | blocks of an earlier prompt | blocks of its own
             every prompt    with a probability that
             has them        depends on its length

A prompt that follows another takes over a beta-distributed share of its own blocks from a prompt
some distance back, counted in requests, or from the nearest one that is long enough. This gives
back how much of the text an endless cache would have seen before (within 0.03 of the trace's share
of tokens, a test says) and roughly how soon it is seen again. It does not give back which prompts
are followed by many: a small cache hits up to 0.14 more often than on the trace itself.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailrace.bench.traffic.schedule import Arrival

BANDS = 10
"""Prompts are grouped by length into so many bands of equal size."""
DISTANCE_LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""The shares at which the distances' quantiles are taken."""


@dataclass(frozen=True)
class PrefixFigures:
    """How prompts share their beginnings."""

    block_tokens: int
    common_blocks: int
    """Leading blocks that every prompt has: a system prompt."""
    follow_shares: tuple[float, ...]
    """For each band of length: the share of prompts that follow an earlier one."""
    taken_shares: tuple[float, ...]
    """For each band of length: the share of its blocks that a follower takes over."""
    taken_evenness: float
    """The two parameters of the beta distribution of these shares add up to this."""
    distances: tuple[int, ...]
    """Requests back to the last one with the same prefix: a quantile for each level."""
    hit_share: float
    """The share of all prompt tokens in whole blocks that an earlier prompt began with."""


class PrefixDraw:
    """Draws the blocks of one prompt after another."""

    def __init__(self, figures: PrefixFigures, *, seed: int) -> None:
        self._figures = figures
        self._rng = random.Random(f"{seed}:prefixes")
        self._chains: list[tuple[int, ...]] = []
        self._last: dict[int, int] = {}
        """The last prompt with each block."""
        self._fresh = itertools.count(figures.common_blocks)

    def next(self, input_tokens: int, length_share: float) -> tuple[int, ...]:
        """Return the ids of a prompt's whole blocks; `length_share` is its rank by length, 0-1."""
        figures = self._figures
        count = input_tokens // figures.block_tokens
        band = min(int(length_share * BANDS), BANDS - 1)
        chain = tuple(range(min(figures.common_blocks, count)))
        # Both are drawn always, so that prompts do not change with the history's luck.
        is_follower = self._rng.random() < figures.follow_shares[band]
        taken = self._taken(band, count)
        distance = self._distance()
        if is_follower and figures.common_blocks < taken <= count:
            chain = self._earlier(taken, distance) or chain
        chain += tuple(next(self._fresh) for _ in range(count - len(chain)))
        self._last.update(dict.fromkeys(chain, len(self._chains)))
        self._chains.append(chain)
        return chain

    def _taken(self, band: int, count: int) -> int:
        mean = min(max(self._figures.taken_shares[band], 0.001), 0.999)
        evenness = self._figures.taken_evenness
        share = self._rng.betavariate(mean * evenness, (1 - mean) * evenness)
        return max(round(share * count), self._figures.common_blocks + 1)

    def _distance(self) -> int:
        level = self._rng.random()
        pairs = itertools.pairwise(
            zip(DISTANCE_LEVELS, self._figures.distances, strict=True),
        )
        for (low, near), (high, far) in pairs:
            if level <= high:
                return round(near + (level - low) / (high - low) * (far - near))
        raise AssertionError(level)

    def _earlier(self, taken: int, distance: int) -> tuple[int, ...]:
        """Return `taken` blocks last seen that many prompts ago, or as near to it as there are."""
        middle = len(self._chains) - distance
        if middle < 0:
            return ()
        for step in range(len(self._chains)):
            for place in (middle - step, middle + step):
                if self._has_last(place, taken):
                    return self._chains[place][:taken]
        return ()

    def _has_last(self, place: int, taken: int) -> bool:
        """Return whether prompt `place` has so many blocks, and no later one has them too."""
        if not 0 <= place < len(self._chains) or len(self._chains[place]) < taken:
            return False
        return self._last[self._chains[place][taken - 1]] == place


def measure_prefixes(arrivals: Sequence[Arrival], block_tokens: int) -> PrefixFigures:
    """Return a trace's figures: how those in the profiles were made."""
    common = _common_blocks(arrivals, block_tokens)
    found = list(_follows(arrivals, block_tokens, common))
    bands = _bands(arrivals)
    distances = sorted(follow.distance for follow in found if follow.taken)
    # A distance beyond the trace's start cannot be seen: what is drawn then does not follow, so
    # that the share to draw is a little above the share that is seen.
    seen = fmean(
        sum(distance <= place for distance in distances) / len(distances)
        for place in range(0, len(arrivals), max(len(arrivals) // 200, 1))
    )
    follow_shares, taken_shares = [], []
    for band in bands:
        members = [found[index] for index in band]
        followers = [member for member in members if member.taken]
        follow_shares.append(min(len(followers) / len(members) / seen, 1.0))
        blocks = sum(member.blocks for member in followers)
        taken_shares.append(sum(member.taken for member in followers) / blocks if blocks else 0.0)
    return PrefixFigures(
        block_tokens=block_tokens,
        common_blocks=common,
        follow_shares=tuple(follow_shares),
        taken_shares=tuple(taken_shares),
        taken_evenness=_evenness([f.taken / f.blocks for f in found if f.taken]),
        distances=tuple(
            distances[round(level * (len(distances) - 1))] for level in DISTANCE_LEVELS
        ),
        hit_share=hit_share(arrivals, block_tokens),
    )


def hit_share(arrivals: Sequence[Arrival], block_tokens: int) -> float:
    """Return the share of prompt tokens in whole leading blocks that an earlier prompt had.

    What a prefix cache without end could save.
    """
    seen: set[int] = set()
    hit = 0
    for arrival in arrivals:
        hit += sum(1 for _ in itertools.takewhile(seen.__contains__, arrival.prefix_ids))
        seen.update(arrival.prefix_ids)
    return hit * block_tokens / sum(arrival.input_tokens for arrival in arrivals)


@dataclass(frozen=True)
class _Follow:
    """What one prompt of a trace has taken over, beyond the common blocks."""

    blocks: int
    taken: int
    distance: int


def _follows(arrivals: Sequence[Arrival], block_tokens: int, common: int) -> Iterator[_Follow]:
    last: dict[int, int] = {}
    for place, arrival in enumerate(arrivals):
        blocks = arrival.input_tokens // block_tokens
        taken = sum(1 for _ in itertools.takewhile(last.__contains__, arrival.prefix_ids))
        if taken > common:
            yield _Follow(blocks, taken, place - last[arrival.prefix_ids[taken - 1]])
        else:
            yield _Follow(blocks, 0, 0)
        last.update(dict.fromkeys(arrival.prefix_ids, place))


def _common_blocks(arrivals: Sequence[Arrival], block_tokens: int) -> int:
    """Return how many leading blocks all prompts have that are long enough for them."""
    for depth in itertools.count():
        ids = {
            arrival.prefix_ids[depth] if depth < len(arrival.prefix_ids) else None
            for arrival in arrivals
            if arrival.input_tokens // block_tokens > depth
        }
        if len(ids) != 1 or None in ids:
            return depth
    raise AssertionError


def _bands(arrivals: Sequence[Arrival]) -> list[list[int]]:
    order = sorted(range(len(arrivals)), key=lambda index: arrivals[index].input_tokens)
    bounds = [band * len(order) // BANDS for band in range(BANDS + 1)]
    return [order[low:high] for low, high in itertools.pairwise(bounds)]


def _evenness(shares: Sequence[float]) -> float:
    """Return what the parameters of a beta distribution with these moments add up to."""
    mean = fmean(shares)
    return max(mean * (1 - mean) / max(pvariance(shares), 1e-9) - 1, 0.1)
