"""The highest request rate at which all limits hold.

    rate   0.5   1    2    4          brackets: factor 2 up or down, until one holds and one fails
           holds holds     fails
                      2  2.8  4       bisects on a log scale, until fails / holds <= 1 + resolution
                          fails

A rate is one trial; more, with other seeds, while Wilson's bounds of the pooled share of slow
observations straddle the allowed share (see wilson.py). When trials run out the point estimate
decides, and the rate is marked undecided. Both ends of the last bracket are tried at least
twice, and where two trials contradict each other beyond noise a third is made, however few
`repeats` there are: one stalled trial must not become the answer.

A search that follows another begins just below its answer, moved by chance within one bracket's
width, so that the errors of brackets differ from pair to pair and the pairs' spread shows them.

`max_rps` is an estimate from all rates tried, not the bracket's end, which is coarse and hangs
on single trials: see `crossing_rps`.

Pure, given the probe: rates and seeds depend on its answers, the seed and the name alone. The two
engines of a pair search with the same `seed`, so that they meet the same draws (common random
numbers).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tailrace.bench.wilson import (
    fewest_observations,
    needed_requests,
    pool,
)
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tailrace.bench.limits import Limit
    from tailrace.bench.records import Record
    from tailrace.bench.wilson import Tally

    Probe = Callable[[float, int], Awaitable["ProbeResult"]]
    """Runs one trial at a rate (requests/s) with a seed, and says what it saw."""

SEEDS_PER_DRAW = 1000
"""A probe's seed is its draw times this, plus the trial's number in its search."""
DRAWS_PER_SEED = 100
MAX_SEED = 20_000
"""The seeds made from it, one for each request, fit 31 bits: some servers take no more."""
STEP = 2.0
"""Factor between rates while bracketing."""
MIN_TRIAL_S = 10.0
STRICT = 0.999
"""Confidence beyond which two answers that differ may be no noise."""


@dataclass(frozen=True)
class ProbeResult:
    """What one trial says of each limit, in the order of `SearchOptions.limits`."""

    tallies: tuple[Tally, ...]
    reasons: tuple[str, ...] = ()
    """Why the trial is invalid; empty means valid."""

    @property
    def is_valid(self) -> bool:
        """Whether the trial may be believed."""
        return not self.reasons


def probe_result(
    limits: Sequence[Limit], records: Sequence[Record], reasons: Sequence[str] = ()
) -> ProbeResult:
    """Return what the records of a trial say, `reasons` being its verdict's."""
    return ProbeResult(tuple(limit.tally(records) for limit in limits), tuple(reasons))


def draw_of(seed: int) -> int:
    """Return the part of a probe's seed that arrivals and lengths may be drawn from.

    Every trial of a search has a seed of its own, so that prompts made from it are never sent
    twice to one server (its prefix cache would answer). Trials with an equal draw may share
    arrivals and lengths: `build(..., seed=draw_of(seed))` makes the rates of one search, and the
    two engines of a pair, differ by the server alone.
    """
    return seed // SEEDS_PER_DRAW


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search; all rates in requests/s."""

    limits: tuple[Limit, ...]
    start_rps: float = 1.0
    """The first rate, where no earlier search says better."""
    low_rps: float = 0.01
    """Never slower than this."""
    high_rps: float = 1000.0
    """Never faster than this."""
    resolution: float = 0.05
    """The bracket's width at which bisection ends: 0.05 is 5 %."""
    repeats: int = 3
    """Most trials at one rate while it is undecided."""
    confirm: int = 2
    """Fewest trials at either end of the last bracket."""
    max_trials: int = 40
    """A search that needs more ends unresolved."""
    trial_s: float | None = None
    """Seconds of arrivals in a trial; None lets `duration_s` choose."""
    seed: int = 0
    """The same for all engines of a pair; another for each pair."""

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            ConfigError: One is out of range.
        """
        if not self.limits:
            raise ConfigError("search: no limit is given; add one, such as p95_ttft=2.0")
        if not 0 < self.low_rps <= self.start_rps <= self.high_rps < math.inf:
            raise ConfigError(
                f"search: rates {self.low_rps:g} <= {self.start_rps:g} <= {self.high_rps:g} "
                "(lowest, first, highest) must be above 0 and in this order"
            )
        if not 0.005 <= self.resolution <= 1:
            raise ConfigError(f"search: resolution {self.resolution:g}; must be 0.005 to 1")
        for name, value, most in (
            ("repeats", self.repeats, DRAWS_PER_SEED),
            ("confirm", self.confirm, DRAWS_PER_SEED),
            ("max_trials", self.max_trials, SEEDS_PER_DRAW),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"search: {name} {value}; must be 1 to {most}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"search: seed {self.seed}; must be 0 to {MAX_SEED}")
        if self.trial_s is not None and not 0 < self.trial_s < math.inf:
            raise ConfigError(f"search: trial_s {self.trial_s:g}; must be above 0")

    def duration_s(self, rate_rps: float) -> float:
        """Return how long requests should arrive in a trial at this rate.

        Long enough that one trial can show that a limit holds, that all repeats together tell
        half the allowed share (or 1.5 times) from it, and that an overload of `resolution` delays
        the last requests beyond each limit: a shorter trial ends before its queue has grown, and
        flatters the server. (M/M/1 at 10/s, P95 <= 1 s: the long run's highest rate is 7.00/s;
        trials of 20 s, as chosen here, come to 7.2/s on average, trials of 3 s to 9.3/s.)
        """
        if self.trial_s is not None:
            return self.trial_s
        return max(self.needed_requests / rate_rps, self.growth_s, MIN_TRIAL_S)

    @property
    def needed_requests(self) -> int:
        """How many requests a trial should have, so that its rate can be decided."""
        return max(_trial_requests(limit.allowed_share, self.repeats) for limit in self.limits)

    @property
    def growth_s(self) -> float:
        """How long an overload of `resolution` takes to delay requests beyond the limits."""
        waits = [limit.bound_s for limit in self.limits if limit.metric in {"ttft", "e2e"}]
        return max(waits, default=0.0) / self.resolution

    def advice(self) -> str:
        """Return how long trials should be, for the one who plans them."""
        parts = [
            f"{limit}: {needed_requests(limit.allowed_share)} requests can show that it holds, "
            f"{needed_requests(limit.allowed_share, limit.allowed_share / 2)} tell half the "
            "allowed share from it"
            for limit in self.limits
        ]
        return (
            f"{'; '.join(parts)}. With up to {self.repeats} trials at a rate, give each "
            f"{self.needed_requests} requests and {max(self.growth_s, MIN_TRIAL_S):g} s at least"
        )


def _trial_requests(allowed_share: float, repeats: int) -> int:
    half = needed_requests(allowed_share, allowed_share / 2)
    return max(needed_requests(allowed_share), math.ceil(half / repeats))


@dataclass(frozen=True)
class Point:
    """All valid trials at one rate."""

    rate_rps: float
    results: tuple[ProbeResult, ...]
    tallies: tuple[Tally, ...]
    """Pooled over the trials, one for each limit."""
    holds: bool
    is_decided: bool
    """False: the bounds straddle, and the point estimate decided."""

    @property
    def outcome(self) -> str:
        """As result.Trial wants it: "holds", "fails" or "undecided"."""
        if not self.is_decided:
            return "undecided"
        return "holds" if self.holds else "fails"


@dataclass(frozen=True)
class FoundRate:
    """Where the limits stop holding."""

    max_rps: float | None
    """The estimate; None where the search did not resolve."""
    holds_rps: float | None
    """The highest rate that held below `fails_rps`."""
    fails_rps: float | None
    """The lowest rate that failed."""
    points: tuple[Point, ...] = ()
    """In order of rate."""
    reasons: tuple[str, ...] = ()
    """Why it did not resolve; empty means it did."""
    cautions: tuple[str, ...] = ()

    @property
    def is_resolved(self) -> bool:
        """Whether there is an estimate."""
        return self.max_rps is not None

    @property
    def trials(self) -> int:
        """How many valid trials it took."""
        return sum(len(point.results) for point in self.points)


async def find_max_rate(
    probe: Probe,
    options: SearchOptions,
    *,
    warm: FoundRate | None = None,
    name: str = "",
    on_point: Callable[[Point], None] = lambda _: None,
) -> FoundRate:
    """Search the highest rate at which all limits hold.

    Args:
        probe: Runs one trial.
        options: How to search.
        warm: An earlier search of the same engine and traffic, whose answer is tried first.
        name: Of the engine. Where exactly an earlier answer is tried hangs on it and on the seed.
        on_point: Called after each valid trial with all that is known at its rate.

    Returns:
        What was found; an unresolved search says why in `reasons` and does not raise.
    """
    search = _Search(probe, options, on_point)
    reasons: tuple[str, ...] = ()
    try:
        await search.run(_Steps.of(options, warm, name))
    except _UnresolvedError as error:
        reasons = (str(error),)
    return search.found(reasons)


class _UnresolvedError(Exception):
    """The search cannot go on; the message is the reason."""


@dataclass(frozen=True)
class _Steps:
    """The first rate, and how far apart the next ones are until one holds and one fails."""

    first_rps: float
    factor: float

    @classmethod
    def of(cls, options: SearchOptions, warm: FoundRate | None, name: str) -> _Steps:
        if warm is None or warm.max_rps is None:
            return cls(options.start_rps, STEP)
        # Just below the earlier answer, then as far above it: one bisection is left.
        edge = 1 + options.resolution
        # An answer errs by its place within the bracket. Rates that hung on the earlier answer
        # alone would repeat that error in every pair, and the pairs would not show it: so all
        # rates are moved, by chance, within one bracket's width.
        phase = random.Random(f"{options.seed}:{name}").random()
        middle = round(math.log(warm.max_rps, edge) - phase) + phase
        first_rps = edge ** (middle - 1)
        return cls(min(max(first_rps, options.low_rps), options.high_rps), min(edge**2, STEP))

    def after(self, points: int) -> float:
        """Return the factor after so many rates on one side: each squares the last, up to 2."""
        return float(min(self.factor ** (2 ** min(points - 1, 8)), STEP))


class _Search:
    def __init__(
        self, probe: Probe, options: SearchOptions, on_point: Callable[[Point], None]
    ) -> None:
        self._probe = probe
        self._options = options
        self._on_point = on_point
        self._results: dict[float, list[ProbeResult]] = {}
        """Valid trials by rate, at least one for each."""
        self._tried = 0

    @property
    def points(self) -> list[Point]:
        """All rates tried, in order of rate."""
        return [self._point(rate_rps) for rate_rps in sorted(self._results)]

    async def run(self, steps: _Steps) -> None:
        """Try rates until the bracket is narrow and its ends are confirmed."""
        await self._settle(_rounded(steps.first_rps), trials=1)
        while True:
            holds, fails = self._bracket()
            if holds is None or fails is None:
                await self._settle(self._outwards(holds, steps), trials=1)
            elif fails.rate_rps / holds.rate_rps > (1 + self._options.resolution) * 1.001:
                middle_rps = math.sqrt(holds.rate_rps * fails.rate_rps)
                await self._settle(_rounded(middle_rps), trials=1)
            else:
                weak = [p for p in (holds, fails) if len(p.results) < self._options.confirm]
                if not weak:
                    return
                await self._settle(weak[0].rate_rps, trials=self._options.confirm)

    def found(self, reasons: tuple[str, ...]) -> FoundRate:
        """Return what is known now."""
        holds, fails = self._bracket()
        points = tuple(self.points)
        max_rps = None
        if not reasons and holds is not None and fails is not None:
            max_rps = crossing_rps(points, self._options.limits, (holds.rate_rps, fails.rate_rps))
        return FoundRate(
            max_rps,
            holds.rate_rps if holds else None,
            fails.rate_rps if fails else None,
            points,
            reasons,
            _cautions(points, self._options),
        )

    def _bracket(self) -> tuple[Point | None, Point | None]:
        """Return the lowest rate that failed and the highest that held below it."""
        points = self.points
        fails = next((p for p in points if not p.holds), None)
        below = [p for p in points if p.holds and (not fails or p.rate_rps < fails.rate_rps)]
        return (below[-1] if below else None), fails

    def _outwards(self, holds: Point | None, steps: _Steps) -> float:
        options = self._options
        factor = steps.after(len(self._results))
        rates = sorted(self._results)
        if holds is not None:
            if rates[-1] >= options.high_rps:
                raise _UnresolvedError(
                    f"all limits still hold at the highest rate allowed, {options.high_rps:g}/s; "
                    "raise it, or tighten the limits"
                )
            return min(_rounded(rates[-1] * factor), options.high_rps)
        if rates[0] <= options.low_rps:
            raise _UnresolvedError(
                f"a limit fails at the lowest rate allowed, {options.low_rps:g}/s: "
                f"{self._failing(self._point(rates[0]))}; lower the rate, or loosen the limits"
            )
        return max(_rounded(rates[0] / factor), options.low_rps)

    def _failing(self, point: Point) -> str:
        pairs = zip(self._options.limits, point.tallies, strict=True)
        return ", ".join(
            f"{tally.exceeded} of {tally.observations} exceed {limit}"
            for limit, tally in pairs
            if tally.share > limit.allowed_share
        )

    async def _settle(self, rate_rps: float, *, trials: int) -> None:
        """Try a rate until it is decided, `trials` times at least and `repeats` at most.

        Where one trial refutes another there are three, whatever `repeats` says.
        """
        while True:
            result = await self._try(rate_rps)
            results = self._results.setdefault(rate_rps, [])
            results.append(result)
            point = self._point(rate_rps)
            self._on_point(point)
            outlier = _outlier(point, self._options.limits)
            # Of two trials that contradict each other a third must say which was the accident.
            most = self._options.repeats if outlier is None else max(self._options.repeats, 3)
            is_clear = point.is_decided and outlier is None
            if len(results) >= trials and (is_clear or len(results) >= most):
                break
        self._check_agreement(point)
        self._check_count(point)

    async def _try(self, rate_rps: float) -> ProbeResult:
        result = await self._once(rate_rps)
        if not result.is_valid:
            result = await self._once(rate_rps)
        if not result.is_valid:
            reasons = "; ".join(result.reasons)
            raise _UnresolvedError(f"two trials in a row at {rate_rps:g}/s are invalid: {reasons}")
        return result

    async def _once(self, rate_rps: float) -> ProbeResult:
        if self._tried >= self._options.max_trials:
            raise _UnresolvedError(
                f"still open after {self._tried} trials; raise max_trials, coarsen the resolution "
                f"({self._options.resolution:g}), or lengthen the trials"
            )
        # Numbered by trial within its rate first: the k-th trials of all rates share one draw.
        draw = self._options.seed * DRAWS_PER_SEED + len(self._results.get(rate_rps, ()))
        seed = draw * SEEDS_PER_DRAW + self._tried
        self._tried += 1
        return await self._probe(rate_rps, seed)

    def _point(self, rate_rps: float) -> Point:
        return point_of(rate_rps, self._results[rate_rps], self._options.limits)

    def _check_agreement(self, point: Point) -> None:
        """Refuse answers that contradict each other beyond noise.

        It is enough to look at one rate: no rate is tried above one that fails, so a failure
        that was an accident shows when its rate is confirmed.

        Raises:
            _UnresolvedError: They do.
        """
        limits = self._options.limits
        if len(point.results) > 2 and (share := _outlier(point, limits)) is not None:
            raise _UnresolvedError(
                f"at {point.rate_rps:g}/s {len(point.results) - 1} trials hold, and in another "
                f"{share:.0%} of the observations are too slow, beyond noise: something stalled "
                "the server or this machine"
            )

    def _check_count(self, point: Point) -> None:
        """Refuse to read a percentile from too few observations.

        Raises:
            _UnresolvedError: There are too few.
        """
        if point.is_decided:
            return
        for limit, tally in zip(self._options.limits, point.tallies, strict=True):
            fewest = fewest_observations(limit.percent)
            if tally.observations < fewest:
                raise _UnresolvedError(
                    f"{limit}: {tally.observations} observations in {len(point.results)} trials at "
                    f"{point.rate_rps:g}/s; the {limit.percent:g} % point needs {fewest}, and "
                    f"{needed_requests(limit.allowed_share)} to show that it holds; lengthen "
                    "the trials"
                )


def point_of(rate_rps: float, results: Sequence[ProbeResult], limits: Sequence[Limit]) -> Point:
    """Pool the trials at one rate and decide whether the limits hold there."""
    pooled = _pooled(results)
    verdict = _verdict(pooled, limits)
    if verdict is not None:
        return Point(rate_rps, tuple(results), pooled, holds=verdict, is_decided=True)
    shares = zip(pooled, limits, strict=True)
    holds = all(tally.share <= limit.allowed_share for tally, limit in shares)
    return Point(rate_rps, tuple(results), pooled, holds=holds, is_decided=False)


def _pooled(results: Sequence[ProbeResult]) -> tuple[Tally, ...]:
    return tuple(map(pool, zip(*(result.tallies for result in results), strict=True)))


def _verdict(tallies: Sequence[Tally], limits: Sequence[Limit]) -> bool | None:
    """Return whether all limits hold, or None where the bounds straddle an allowed share."""
    holds = True
    for tally, limit in zip(tallies, limits, strict=True):
        low, high = tally.bounds()
        if low > limit.allowed_share:
            return False
        holds &= high <= limit.allowed_share
    return True if holds else None


def _refutes(held: Sequence[Tally], failed: Sequence[Tally], limits: Sequence[Limit]) -> bool:
    """Return whether the first holds, the second fails, and noise does not explain it.

    Bursts make a server at its limit hold in one trial and fail in the next: that is noise, and
    is averaged. A trial that fails grossly, its share of slow observations more than half way from
    the allowed one to all, where another holds, is none.
    """
    if _verdict(held, limits) is not True or _verdict(failed, limits) is not False:
        return False
    return any(
        slow.share > (1 + limit.allowed_share) / 2 and slow.differs(quick, STRICT)
        for quick, slow, limit in zip(held, failed, limits, strict=True)
    )


def _outlier(point: Point, limits: Sequence[Limit]) -> float | None:
    """Return the share of slow observations of the one trial that the others refute, if any."""
    for number, result in enumerate(point.results):
        others = point.results[:number] + point.results[number + 1 :]
        if others and _refutes(_pooled(others), result.tallies, limits):
            return max(tally.share for tally in result.tallies)
    return None


def crossing_rps(
    points: Sequence[Point], limits: Sequence[Limit], bracket: tuple[float, float]
) -> float:
    """Return the rate at which the first limit's share of slow requests meets the allowed one.

    For each limit the shares are made to rise with the rate by centred isotonic regression
    (neighbours that fall are pooled, at the mean of their log rates; weights are what the
    observations are worth), then log(rate) is interpolated where the share crosses. Shares are
    compared as asin(sqrt(share)), whose noise is alike at every share and which is finite at 0.
    So every trial near the crossing counts, and nothing is assumed of the curve but that it
    rises. A bracket's end would hang on one trial, and sit half a step below the truth; its
    middle scatters a fifth more (M/M/1, 600 requests a trial).
    (A. P. Oron and N. Flournoy, "Centered Isotonic Regression", Stat. Biopharm. Res. 9 (2017).)

    Args:
        points: In order of rate.
        limits: As in the points' tallies.
        bracket: The highest rate that held, and the lowest that failed: its middle is the answer
            where noise levels all shares out.
    """
    crossings = [
        crossing
        for number, limit in enumerate(limits)
        if (crossing := _crossing(points, number, limit.allowed_share)) is not None
    ]
    return min(crossings, default=math.sqrt(bracket[0] * bracket[1]))


def _crossing(points: Sequence[Point], number: int, allowed_share: float) -> float | None:
    blocks = _isotonic(
        [
            (math.log(p.rate_rps), _even(p.tallies[number].share), p.tallies[number].effective)
            for p in points
            if p.tallies[number].observations
        ]
    )
    level = _even(allowed_share)
    for (x0, y0), (x1, y1) in pairwise(blocks):
        if y0 <= level < y1:
            return math.exp(x0 + (x1 - x0) * (level - y0) / (y1 - y0))
    return None


def _even(share: float) -> float:
    """Return the share on a scale where its noise is the same everywhere."""
    return math.asin(math.sqrt(share))


def _isotonic(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Return (x, y) with y never falling, from (x, y, weight) in order of x."""
    blocks: list[tuple[float, float, float]] = []
    for point in points:
        blocks.append(point)
        while len(blocks) > 1 and blocks[-2][1] > blocks[-1][1]:
            (x0, y0, w0), (x1, y1, w1) = blocks[-2:]
            weight = w0 + w1
            blocks[-2:] = [((x0 * w0 + x1 * w1) / weight, (y0 * w0 + y1 * w1) / weight, weight)]
    return [(x, y) for x, y, _ in blocks]


def _cautions(points: Sequence[Point], options: SearchOptions) -> tuple[str, ...]:
    found = []
    undecided = [f"{point.rate_rps:g}" for point in points if not point.is_decided]
    if undecided:
        found.append(
            f"decided by the point estimate alone at {', '.join(undecided)}/s: more or longer "
            f"trials would tell ({options.needed_requests} requests a trial are advised)"
        )
    if options.trial_s is not None and options.trial_s < options.growth_s:
        found.append(
            f"trials of {options.trial_s:g} s are too short to show an overload of "
            f"{options.resolution:.0%} (it takes {options.growth_s:g} s to exceed the limits), "
            "which flatters the server"
        )
    return tuple(found)


def _rounded(rate_rps: float) -> float:
    """Return the rate with four significant digits: it names folders."""
    return float(f"{rate_rps:.4g}")
