"""A profile: the published figures of a trace, and requests drawn from them by seed.

A trace file is not ours to ship; figures about it are facts. Lengths come from the inverse of a
piecewise linear distribution through the profile's quantiles, and the link between input and
output length from a Gaussian copula. The time between arrivals comes from its quantiles too where
the profile has them, else from a gamma distribution with the profile's coefficient of variation
(1 would be Poisson, more is burstier).

The coefficient of variation alone says little about bursts. Azure's code trace has 13.2, because
of a few pauses of minutes: a gamma distribution of that variation puts nearly all its requests
into a few instants (variance over mean of the counts in 1 s: 67; the trace's own: 13; drawn from
quantiles: 11). What no profile gives back is the order of the gaps, since each is drawn by itself:
slow swings of the rate (azure-conv) and bursts made of many short gaps in a row
(servegen-m-large: 94 in the trace, 10-20 drawn). Where that matters, replay the trace itself.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev
from typing import TYPE_CHECKING, TypeVar

from tailrace.bench.traffic.prefixes import PrefixDraw, PrefixFigures, measure_prefixes
from tailrace.bench.traffic.schedule import Arrival

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEVELS = (
    *(0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5),
    *(0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 0.995, 0.999, 1.0),
)
"""The shares at which a profile's quantiles are taken; close together in both tails."""

_NORMAL = NormalDist()
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Profile:
    """Figures of one trace."""

    name: str
    source: str
    """Who published the trace, under which licence."""
    rate_rps: float
    arrival_cv: float
    """Standard deviation over mean of the time between arrivals."""
    input_tokens: tuple[int, ...]
    """One quantile for each of `LEVELS`."""
    output_tokens: tuple[int, ...]
    rank_correlation: float
    """Spearman's, between input and output length."""
    gaps: tuple[float, ...] = ()
    """Time between arrivals over its mean, one quantile for each of `LEVELS`; or empty."""
    prefixes: PrefixFigures | None = None
    """How prompts share their beginnings, where the trace says so."""

    @property
    def mean_input_tokens(self) -> float:
        """The mean of what is drawn."""
        return _mean(self.input_tokens)

    @property
    def mean_output_tokens(self) -> float:
        """The mean of what is drawn."""
        return _mean(self.output_tokens)


def draw(profile: Profile, *, seed: int) -> Iterator[Arrival]:
    """Yield requests without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    # Of a bivariate normal, so that the ranks correlate as the profile says.
    rho = 2 * math.sin(math.pi * profile.rank_correlation / 6)
    prefixes = PrefixDraw(profile.prefixes, seed=seed) if profile.prefixes else None
    gaps_s = _gaps(profile, rng)
    now_s = 0.0
    while True:
        now_s += next(gaps_s)
        first, noise = rng.gauss(), rng.gauss()
        second = rho * first + math.sqrt(1 - rho**2) * noise
        length_share = _NORMAL.cdf(first)
        input_tokens = quantile(profile.input_tokens, length_share)
        yield Arrival(
            now_s,
            input_tokens,
            quantile(profile.output_tokens, _NORMAL.cdf(second)),
            prefixes.next(input_tokens, length_share) if prefixes else (),
        )


def _gaps(profile: Profile, rng: random.Random) -> Iterator[float]:
    """Yield seconds between arrivals, whose mean is that of the profile's rate."""
    if not profile.gaps:
        shape = profile.arrival_cv**-2
        while True:
            yield rng.gammavariate(shape, 1 / (shape * profile.rate_rps))
    # Lines between the quantiles of a long tail lie above it: the mean is put right.
    scale_s = 1 / (profile.rate_rps * _mean(profile.gaps))
    while True:
        yield scale_s * _between(profile.gaps, rng.random())


def draw_until(profile: Profile, *, seed: int, end_s: float) -> list[Arrival]:
    """Return the requests that arrive before `end_s` of the profile's own time."""
    return list(itertools.takewhile(lambda a: a.arrival_s < end_s, draw(profile, seed=seed)))


def quantile(values: Sequence[int], share: float) -> int:
    """Return the length below which `share` (0 to 1) of the profile's lengths lie."""
    return round(_between(values, share))


def _between(values: Sequence[float], share: float) -> float:
    right = min(max(bisect.bisect_right(LEVELS, share), 1), len(LEVELS) - 1)
    low, high = LEVELS[right - 1], LEVELS[right]
    weight = (share - low) / (high - low)
    return values[right - 1] + weight * (values[right] - values[right - 1])


def measure(
    arrivals: Sequence[Arrival], *, name: str, source: str, block_tokens: int = 0
) -> Profile:
    """Return a trace's figures: how the profiles in this folder were made."""
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(arrivals)]
    inputs = [arrival.input_tokens for arrival in arrivals]
    outputs = [arrival.output_tokens for arrival in arrivals]
    return Profile(
        name=name,
        source=source,
        rate_rps=1 / fmean(gaps),
        arrival_cv=pstdev(gaps) / fmean(gaps),
        input_tokens=_quantiles(inputs),
        output_tokens=_quantiles(outputs),
        rank_correlation=rank_correlation(inputs, outputs),
        gaps=tuple(gap / fmean(gaps) for gap in _quantiles(gaps)),
        prefixes=measure_prefixes(arrivals, block_tokens) if block_tokens else None,
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's coefficient; ties share their mean rank. 0 where one side is constant."""
    a, b = _ranks(first), _ranks(second)
    mean = fmean(a)
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    shared = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return shared / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    position = 0
    for _, tied in itertools.groupby(order, key=values.__getitem__):
        members = list(tied)
        for member in members:
            ranks[member] = position + (len(members) - 1) / 2
        position += len(members)
    return ranks


def _quantiles(values: list[N]) -> tuple[N, ...]:
    ordered = sorted(values)
    return tuple(ordered[max(math.ceil(level * len(ordered)) - 1, 0)] for level in LEVELS)


def _mean(values: Sequence[float]) -> float:
    steps = zip(itertools.pairwise(LEVELS), itertools.pairwise(values), strict=True)
    return sum((b - a) * (low + high) / 2 for (a, b), (low, high) in steps)
