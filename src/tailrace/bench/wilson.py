"""How sure a share of slow observations is: Wilson's bounds, and the counts a decision needs.

Wilson's interval is the score test turned round: it leaves a share q out exactly where
|p - q| > z sqrt(q (1 - q) / n). So the requests that a decision needs have a closed form, and the
search and its planning cannot disagree. (E. B. Wilson, JASA 22 (1927) 209-212.)

Requests of one run are not independent: a stalled server makes its neighbours slow together, and
n of them are worth fewer. The worth is estimated from the spread between successive batches of
the run (the survey statistician's effective sample size, n over the design effect), and the
bounds are those of so many independent observations.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CONFIDENCE = 0.95
BATCHES = 10
"""Successive parts of a run whose spread tells how much its observations hang together."""
BATCH_REQUESTS = 5
"""Fewest requests that make a batch."""


@cache
def z_of(confidence: float) -> float:
    """Return the two-sided normal quantile: 1.96 for 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


@dataclass(frozen=True)
class Tally:
    """How many observations exceeded a limit, of how many, in successive batches of requests."""

    batches: tuple[tuple[int, int], ...]
    """(exceeded, observations) of each, in order of time."""
    requests: int
    """Requests that the observations come from."""

    # A search asks for these again and again.
    @cached_property
    def exceeded(self) -> int:
        """Observations beyond the limit."""
        return sum(exceeded for exceeded, _ in self.batches)

    @cached_property
    def observations(self) -> int:
        """All observations."""
        return sum(observations for _, observations in self.batches)

    @property
    def share(self) -> float:
        """The share that exceeded; 0 where nothing was observed."""
        return self.exceeded / self.observations if self.observations else 0.0

    @property
    def design_effect(self) -> float:
        """How many observations are worth one independent one; at least 1.

        It cannot be seen where nothing, or everything, was slow, and is then taken to be 1.
        """
        share, count, batches = self.share, self.observations, len(self.batches)
        if batches < 2:
            # Too few requests to compare: one request's observations count as one.
            return max(count / self.requests, 1.0) if self.requests else 1.0
        if not 0 < share < 1:
            return 1.0
        residues = sum((x - share * n) ** 2 for x, n in self.batches)
        return max(batches / (batches - 1) * residues / (count * share * (1 - share)), 1.0)

    @property
    def effective(self) -> float:
        """Independent observations that would tell as much."""
        return self.observations / self.design_effect

    def bounds(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return Wilson's bounds of the share; 0 and 1 where nothing was observed."""
        return wilson(self.share, self.effective, confidence)

    def differs(self, other: Tally, confidence: float) -> bool:
        """Return whether two shares differ by more than noise.

        What the observations are worth is judged from both together: a run in which nothing was
        slow cannot tell by itself how much its requests hang together.
        """
        both = pool((self, other))
        if not (self.observations and other.observations and 0 < both.share < 1):
            return False
        each = 1 / self.observations + 1 / other.observations
        variance = both.share * (1 - both.share) * each * both.design_effect
        return abs(self.share - other.share) > z_of(confidence) * math.sqrt(variance)


def tally_of(requests: Sequence[tuple[int, int]]) -> Tally:
    """Count (exceeded, observations) of requests in order of schedule."""
    count = max(min(BATCHES, len(requests) // BATCH_REQUESTS), 1)
    edges = [len(requests) * number // count for number in range(count + 1)]
    batches = (requests[start:end] for start, end in itertools.pairwise(edges))
    sums = tuple((sum(x for x, _ in batch), sum(n for _, n in batch)) for batch in batches)
    return Tally(sums, sum(n > 0 for _, n in requests))


def pool(tallies: Iterable[Tally]) -> Tally:
    """Put the tallies of several runs together."""
    found = list(tallies)
    batches = itertools.chain.from_iterable(tally.batches for tally in found)
    return Tally(tuple(batches), sum(tally.requests for tally in found))


def wilson(share: float, count: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's bounds of a share seen in `count` independent observations."""
    if count <= 0:
        return 0.0, 1.0
    z2 = z_of(confidence) ** 2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return max(centre - spread, 0.0), min(centre + spread, 1.0)


def needed_requests(
    allowed_share: float, share: float = 0.0, confidence: float = CONFIDENCE
) -> int:
    """Return how many requests show that a true `share` differs from the allowed one.

    With share 0 it is the fewest that can ever show that a limit holds: 73 at P95, 381 at P99.
    MLPerf's LoadGen counts alike ("early stopping": how few queries make a percentile's claim
    safe), with exact binomial bounds and 99 % confidence.
    """
    z2 = z_of(confidence) ** 2
    return math.ceil(z2 * allowed_share * (1 - allowed_share) / (allowed_share - share) ** 2)


def fewest_observations(percent: float) -> int:
    """Return how many observations give a percentile a meaning: below it, it is the maximum.

    20 at P95, 100 at P99.
    """
    return math.ceil(round(100 / (100 - percent), 9))
