"""When requests arrive: seeded generators of arrival times, in seconds, without end.

    poisson    independent arrivals at one rate
    gamma      gaps of a gamma distribution; its shape is the burstiness: 1 is Poisson, below 1 is
               burstier (coefficient of variation 1 / sqrt(shape)), above 1 is more even
    constant   equal gaps
    ramp       Poisson whose rate runs in straight lines through given points of time
    step       Poisson whose rate stays at each point's value until the next point

The last two take a Poisson process of rate 1 and bend its time: the k-th arrival comes when the
area under the rate curve reaches the k-th arrival's time of the rate-1 process. So the count in
any span has exactly the mean that the curve says.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

KINDS = ("poisson", "gamma", "constant", "ramp", "step")


def poisson(rng: random.Random, rate_rps: float) -> Iterator[float]:
    """Yield arrivals that do not know of each other."""
    return gamma(rng, rate_rps, 1.0)


def gamma(rng: random.Random, rate_rps: float, burstiness: float) -> Iterator[float]:
    """Yield arrivals whose gaps are gamma distributed with shape `burstiness`."""
    scale_s = 1 / (burstiness * rate_rps)
    gaps_s = (rng.gammavariate(burstiness, scale_s) for _ in itertools.count())
    return itertools.accumulate(gaps_s)


def constant(rate_rps: float) -> Iterator[float]:
    """Yield one arrival each 1 / `rate_rps` seconds, the first at 0."""
    return (count / rate_rps for count in itertools.count())


@dataclass(frozen=True)
class RateCurve:
    """A rate over time, given at points; it stays at the last point's value after it."""

    points: tuple[tuple[float, float], ...]
    """(second, requests per second), from second 0 on."""
    is_ramp: bool
    """Straight lines from point to point, instead of steps."""

    def scaled_to(self, rate_rps: float, duration_s: float) -> RateCurve:
        """Return the same shape with the mean `rate_rps` over `duration_s`.

        Raises:
            ConfigError: The rate is 0 for so long, and no factor changes that.
        """
        area = self.area(duration_s)
        if area <= 0:
            raise ConfigError(
                f"rates: 0 for the whole {duration_s:g} s of a trial, so they cannot come to "
                f"{rate_rps:g}/s; give a longer trial, or rates that begin earlier"
            )
        factor = rate_rps * duration_s / area
        return RateCurve(tuple((at, rate * factor) for at, rate in self.points), self.is_ramp)

    def area(self, end_s: float) -> float:
        """Return how many requests arrive before `end_s`, on average."""
        total = 0.0
        for start_s, stop_s, rate, slope in self._pieces():
            span_s = min(stop_s, end_s) - start_s
            if span_s <= 0:
                break
            total += rate * span_s + slope * span_s**2 / 2
        return total

    def peak_rps(self, end_s: float) -> float:
        """Return the highest rate before `end_s`."""
        pieces = itertools.takewhile(lambda piece: piece[0] < end_s, self._pieces())
        return max(
            max(rate, rate + slope * (min(stop_s, end_s) - start_s))
            for start_s, stop_s, rate, slope in pieces
        )

    def arrivals(self, rng: random.Random) -> Iterator[float]:
        """Yield arrivals, Poisson at the curve's rate; they end where the rate stays at 0."""
        pieces = self._pieces()
        start_s, stop_s, rate, slope = next(pieces)
        passed = 0.0
        for target in poisson(rng, 1.0):
            area = _area(stop_s - start_s, rate, slope)
            while target - passed > area:
                passed += area
                start_s, stop_s, rate, slope = next(pieces)
                area = _area(stop_s - start_s, rate, slope)
            if rate <= 0 and slope <= 0:
                return
            yield start_s + _time_to(target - passed, rate, slope)

    def _pieces(self) -> Iterator[tuple[float, float, float, float]]:
        """Yield start, end, rate at the start and its slope, the last one without end."""
        for (start_s, rate), (stop_s, then) in itertools.pairwise(self.points):
            yield start_s, stop_s, rate, (then - rate) / (stop_s - start_s) if self.is_ramp else 0
        start_s, rate = self.points[-1]
        yield start_s, math.inf, rate, 0.0


def _area(span_s: float, rate: float, slope: float) -> float:
    return math.inf if math.isinf(span_s) else rate * span_s + slope * span_s**2 / 2


def _time_to(area: float, rate: float, slope: float) -> float:
    """Return after how many seconds a rate that starts at `rate` has covered `area`."""
    # The root of rate * t + slope * t**2 / 2 = area, in the form that is stable for small slopes.
    return 2 * area / (rate + math.sqrt(max(rate**2 + 2 * slope * area, 0.0)))


def read_curve(text: str, *, is_ramp: bool) -> RateCurve:
    """Return the curve written "0:1,60:5": 1 request/s at second 0, 5 at second 60.

    Raises:
        ConfigError: It is written otherwise, goes back in time, or has a rate below 0.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        points = tuple((float(at), float(rate)) for at, rate in pairs)
    except ValueError as error:
        raise ConfigError(
            f"rates {text!r}: write second:rate pairs, such as 0:1,60:5 (requests per second)"
        ) from error
    if points[0][0] != 0 or any(b[0] <= a[0] for a, b in itertools.pairwise(points)):
        raise ConfigError(f"rates {text!r}: seconds must start at 0 and grow")
    if not all(0 <= rate < math.inf and at < math.inf for at, rate in points):
        raise ConfigError(f"rates {text!r}: a rate must be 0 or more")
    if not any(rate for _, rate in points):
        raise ConfigError(f"rates {text!r}: no request would ever arrive")
    return RateCurve(points, is_ramp)
