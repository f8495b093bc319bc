"""What went on around a trial's slow requests: signals, the KV curve, rejected drafts.

A signal is a circumstance that can be counted for each request, slow or not. It explains nothing
by itself; it speaks where slow requests met it much more often than the others did. A reading
that the server or the machine does not export is named as missing, never assumed.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.anatomy import readings
from tailrace.bench.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tailrace.bench.anatomy import Anatomy
    from tailrace.bench.scrape import Scrape

LONG_SHARE = 0.1
"""A prompt (a burst) is a long one where at most so many are as long."""
KV_FULL = 0.95
BUSY = 0.95
STOLEN = 0.05
ACCEPTANCE_FALL = 0.8
"""Acceptance below this share of the trial's own is falling."""
BURST_S = 1.0
SWING = 0.1
"""A rise or fall of the KV curve, in share of the cache, that counts as one."""
FEWEST_READINGS = 5
LEAST_LIFT = 0.1
"""What slow requests met hardly more often than the others does not set them apart."""

_GPU = re.compile(r"gpu\d+_utilisation")


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A circumstance, and how much more often slow requests met it."""

    name: str
    slow_share: float
    """Of the slow requests for which it is known, 0 to 1."""
    other_share: float
    """Of the others."""
    sentence: str

    @property
    def lift(self) -> float:
        """By how much more of the slow requests met it."""
        return self.slow_share - self.other_share


@dataclass(frozen=True)
class _Question:
    """One circumstance: its name, and whether a request met it (None: not known)."""

    name: str
    asks: Callable[[Anatomy], bool | None]


def signals(
    slow: Sequence[Anatomy], others: Sequence[Anatomy], scrapes: Mapping[str, Scrape]
) -> tuple[tuple[Signal, ...], tuple[str, ...]]:
    """Return the signals, those that set slow requests apart first, and what was not exported."""
    found, missing = [], []
    for question in _questions([*slow, *others], scrapes):
        of_slow = [met for met in map(question.asks, slow) if met is not None]
        of_others = [met for met in map(question.asks, others) if met is not None]
        if not of_slow:
            missing.append(question.name)
        elif (signal := _signal(question.name, of_slow, of_others)).lift >= LEAST_LIFT:
            found.append(signal)
    found.sort(key=lambda signal: -signal.lift)
    return tuple(found), tuple(missing)


def _signal(name: str, slow: Sequence[bool], others: Sequence[bool]) -> Signal:
    other_share = sum(others) / len(others) if others else 0.0
    beside = f", {other_share:.0%} of the others" if others else "; nothing to compare it with"
    return Signal(
        name=name,
        slow_share=sum(slow) / len(slow),
        other_share=other_share,
        sentence=f"{name}: {sum(slow)} of {len(slow)} slow requests{beside}",
    )


def _questions(requests: Sequence[Anatomy], scrapes: Mapping[str, Scrape]) -> list[_Question]:
    server, gpu, client = (scrapes.get(source) for source in ("server", "gpu", "client"))
    return [
        _long_prompt(requests),
        _burst(requests),
        _Question(
            "others waited for a slot when it arrived",
            lambda r: _any(readings(server, "waiting", *_arrival(r)), lambda value: value >= 1),
        ),
        _Question(
            f"KV cache above {KV_FULL:.0%} until its first token",
            lambda r: _any(readings(server, "kv_usage", *_wait(r)), lambda value: value > KV_FULL),
        ),
        _Question(
            "preemptions while it was served",
            lambda r: _rise(readings(server, "preemptions_total", *_life(r, around=True))),
        ),
        _drafts_rejected(server),
        _Question(f"a GPU at {BUSY:.0%} and more until its first token", lambda r: _busy(gpu, r)),
        _Question(
            f"the client's CPUs at {BUSY:.0%} and more while it was served",
            lambda r: _mean(readings(client, "cpu_busy", *_life(r)), lambda value: value >= BUSY),
        ),
        _Question(
            f"{STOLEN:.0%} and more of the CPU stolen by other machines",
            lambda r: _any(readings(client, "cpu_steal", *_life(r)), lambda value: value >= STOLEN),
        ),
    ]


def _any(values: Sequence[float], is_met: Callable[[float], bool]) -> bool | None:
    return any(map(is_met, values)) if values else None


def _mean(values: Sequence[float], is_met: Callable[[float], bool]) -> bool | None:
    return is_met(statistics.fmean(values)) if values else None


def _arrival(request: Anatomy) -> tuple[float, float]:
    return request.record.scheduled_s, request.record.scheduled_s


def _wait(request: Anatomy) -> tuple[float, float]:
    record = request.record
    return record.scheduled_s, record.first_token_s or record.finished_s or record.scheduled_s


def _life(request: Anatomy, *, around: bool = False) -> tuple[float, float]:
    """Return the request's span; `around` adds a reading's distance, so that a counter can rise."""
    record = request.record
    return record.scheduled_s - around, (record.finished_s or record.scheduled_s) + around


def _long_prompt(requests: Sequence[Anatomy]) -> _Question:
    bound = long_from([request.prompt_tokens for request in requests])
    if bound is None:
        return _Question("one of the longest prompts", lambda _: False)
    return _Question(
        f"one of the longest prompts ({bound:,} tokens and more)",
        lambda r: r.prompt_tokens >= bound,
    )


def long_from(lengths: Sequence[int]) -> int | None:
    """Return the least length that is a long one; None where all are alike.

    Not a percentile: where most lengths are equal, the 90 % point is the usual length itself.
    """
    counts = sorted(Counter(lengths).items(), reverse=True)
    if len(counts) < 2:
        return None
    bound, above = counts[0]
    for length, count in counts[1:]:
        above += count
        if above > math.ceil(LONG_SHARE * len(lengths)):
            break
        bound = length
    return bound


def _burst(requests: Sequence[Anatomy]) -> _Question:
    arrivals = sorted(request.record.scheduled_s for request in requests)

    def before(request: Anatomy) -> int:
        at_s = request.record.scheduled_s
        earliest = bisect.bisect_left(arrivals, at_s - BURST_S)
        return bisect.bisect_right(arrivals, at_s) - earliest

    bound = long_from(list(map(before, requests)))
    if bound is None:
        return _Question("arrived in a burst", lambda _: False)
    return _Question(
        f"arrived in a burst ({bound} and more within {BURST_S:g} s)",
        lambda r: before(r) >= bound,
    )


def _busy(gpu: Scrape | None, request: Anatomy) -> bool | None:
    names = [name for name in (gpu.values if gpu else ()) if _GPU.fullmatch(name)]
    means = [statistics.fmean(v) for n in names if (v := readings(gpu, n, *_wait(request)))]
    return max(means) >= BUSY if means else None


def _rise(counter: Sequence[float]) -> bool | None:
    return increase(counter) > 0 if len(counter) > 1 else None


def _drafts_rejected(server: Scrape | None) -> _Question:
    name = f"drafts accepted at less than {ACCEPTANCE_FALL:.0%} of the trial's rate"
    usual = _acceptance(server, -math.inf, math.inf)

    def asks(request: Anatomy) -> bool | None:
        now = _acceptance(server, *_life(request, around=True))
        return None if now is None or usual is None else now < ACCEPTANCE_FALL * usual

    return _Question(name, asks)


def _acceptance(server: Scrape | None, start_s: float, end_s: float) -> float | None:
    drafted = increase(readings(server, "draft_tokens_total", start_s, end_s))
    if drafted > 0:
        return increase(readings(server, "accepted_tokens_total", start_s, end_s)) / drafted
    gauge = readings(server, "acceptance_rate", start_s, end_s)
    return statistics.fmean(gauge) if gauge else None


def increase(counter: Sequence[float]) -> float:
    """Return by how much a counter grew; one that fell had begun anew from zero."""
    return sum(
        later - earlier if later >= earlier else later
        for earlier, later in itertools.pairwise(counter)
    )


@dataclass(frozen=True)
class KvCurve:
    """How full the KV cache was over a trial."""

    shape: str
    """"flat", "sawtooth", "saturated", "rising", "varying" or "not known"."""
    sentence: str


def kv_curve(server: Scrape | None) -> KvCurve:
    """Return the shape of the KV-cache curve, with the numbers that make it that.

    saturated: a fifth of the readings above 95 %. sawtooth: three falls or more of 10 points.
    rising: the last third is 20 points above the first. flat: nine tenths within 10 points.
    varying: none of these.
    """
    values = readings(server, "kv_usage", -math.inf, math.inf)
    if len(values) < FEWEST_READINGS:
        why = f"{len(values)} readings" if values else "the server exports no KV-cache use"
        return KvCurve("not known", f"KV curve not known: {why}.")
    ordered = sorted(values)
    full = sum(value > KV_FULL for value in values) / len(values)
    falls = count_falls(values, SWING)
    third = max(len(values) // 3, 1)
    first, last = statistics.fmean(values[:third]), statistics.fmean(values[-third:])
    spread = percentile(ordered, 95) - percentile(ordered, 5)
    if full >= 0.2:
        shape = "saturated"
    elif falls >= 3:
        shape = "sawtooth"
    elif last - first >= 2 * SWING:
        shape = "rising"
    else:
        shape = "flat" if spread <= SWING else "varying"
    return KvCurve(
        shape,
        f"KV curve {shape}: {statistics.fmean(values):.0%} on average, {ordered[0]:.0%} to "
        f"{ordered[-1]:.0%}, above {KV_FULL:.0%} in {full:.0%} of {len(values)} readings, "
        f"{falls} fall{'s' * (falls != 1)} of {SWING:.0%} or more, {first:.0%} in the first third "
        f"and {last:.0%} in the last.{_fragmented(server)}{_preempted(server)}",
    )


def _fragmented(server: Scrape | None) -> str:
    values = readings(server, "kv_fragmentation", -math.inf, math.inf)
    if not values:
        return " Fragmentation is not exported."
    return f" Fragmentation {statistics.fmean(values):.1%} on average, {max(values):.1%} at most."


def _preempted(server: Scrape | None) -> str:
    values = readings(server, "preemptions_total", -math.inf, math.inf)
    return f" Preemptions: {increase(values):,.0f}." if values else ""


def count_falls(values: Sequence[float], depth: float) -> int:
    """Return how often a curve fell by `depth` or more from a peak and rose by it again.

    The last fall counts without its rise.
    """
    falls, peak, trough, is_falling = 0, values[0], values[0], False
    for value in values:
        if is_falling:
            trough = min(trough, value)
            if value - trough >= depth:
                is_falling, peak = False, value
        else:
            peak = max(peak, value)
            if peak - value >= depth:
                falls, is_falling, trough = falls + 1, True, value
    return falls


def drafts(server: Scrape | None) -> str:
    """Return what became of draft tokens, as a sentence."""
    drafted = increase(readings(server, "draft_tokens_total", -math.inf, math.inf))
    accepted = increase(readings(server, "accepted_tokens_total", -math.inf, math.inf))
    if drafted > 0:
        times = server.at_s if server else []
        middle_s = (times[0] + times[-1]) / 2
        halves = [
            _acceptance(server, -math.inf, middle_s),
            _acceptance(server, middle_s, math.inf),
        ]
        told = " and ".join("-" if half is None else f"{half:.0%}" for half in halves)
        return (
            f"{drafted - accepted:,.0f} of {drafted:,.0f} draft tokens were rejected: acceptance "
            f"{accepted / drafted:.0%} ({told} in the trial's halves)."
        )
    gauge = readings(server, "acceptance_rate", -math.inf, math.inf)
    if gauge:
        return (
            f"Draft acceptance {statistics.fmean(gauge):.0%} on average, {min(gauge):.0%} at "
            "least; how many tokens were rejected is not exported."
        )
    return "No draft tokens: the server drafts none, or does not export them."


def prefill_share(requests: Sequence[Anatomy]) -> str:
    """Return how much of a long prompt's time is its own prefill, as a sentence."""
    known = [request for request in requests if request.moments]
    bound = long_from([request.prompt_tokens for request in known])
    if bound is None:
        return "All prompts are of one length: long ones cannot be told from others."
    long = [request for request in known if request.prompt_tokens >= bound]
    rest = [request for request in known if request.prompt_tokens < bound]
    if not any("own_prefill" in request.e2e for request in known):
        return "The share of prefill is not known: too few requests tell the pace of a prompt."
    served = (
        "first step to first token"
        if long[0].moments and long[0].moments.is_logged
        else ("sent to first token, queueing included")
    )
    return (
        f"In prompts of {bound:,} tokens and more, their own prefill is {_share(long, 'ttft'):.0%} "
        f"of the time to first token and {_share(long, 'e2e'):.0%} of the whole; in the others "
        f"{_share(rest, 'ttft'):.0%} and {_share(rest, 'e2e'):.0%}. From {served} they took "
        f"{_served_s(long):.2f} s, the others {_served_s(rest):.2f} s (medians)."
    )


def _share(requests: Sequence[Anatomy], part: str) -> float:
    pieces = [request.ttft if part == "ttft" else request.e2e for request in requests]
    total = sum(sum(piece.values()) for piece in pieces)
    return sum(piece.get("own_prefill", 0.0) for piece in pieces) / total if total else 0.0


def _served_s(requests: Sequence[Anatomy]) -> float:
    spans = [r.moments.first_made_s - r.moments.slot_s for r in requests if r.moments]
    return statistics.median(spans) if spans else 0.0
