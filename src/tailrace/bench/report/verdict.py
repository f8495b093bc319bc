"""What the report says first: one sentence a reader without statistics understands.

A winner is named only where the interval of the ratio leaves 1 on one side. Everything else is
said as what it is: no difference shown, or no verdict and why.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.cautions import search_cautions, trial_cautions
from tailrace.bench.wilson import fewest_observations

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tailrace.bench.limits import Limit
    from tailrace.bench.report.findings import PlatformFindings, RateRow, SteadyRow
    from tailrace.bench.result import Ratio

LATENCY_NAMES = {
    "ttft": "TTFT",
    "itl": "inter-token time",
    "tpot": "time per output token",
    "e2e": "end-to-end time",
}
MAX_REASONS = 8
"""Different reasons that one verdict lists; more are counted."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One sentence and what stands behind it."""

    kind: str
    """"ahead", "behind", "even", "measured" (one contender alone) or "none" (no verdict)."""
    platform: str
    contender: str
    sentence: str
    reasons: tuple[str, ...] = ()


def limits_in_words(limits: Sequence[Limit]) -> str:
    """Return "P95 TTFT ≤ 2 s and P99 end-to-end time ≤ 30 s"."""
    return " and ".join(
        f"P{limit.percent:g} {LATENCY_NAMES[limit.metric]} ≤ {bound(limit)}" for limit in limits
    )


def bound(limit: Limit) -> str:
    """Return a limit's bound in the unit that people use for it."""
    if limit.metric in {"itl", "tpot"}:
        return f"{limit.bound_s * 1e3:g} ms"
    return f"{limit.bound_s:g} s"


def statements(platforms: Sequence[PlatformFindings]) -> list[Statement]:
    """Return one statement for each contender beside its baseline, platform by platform."""
    found: list[Statement] = []
    for platform in platforms:
        others = [row for row in platform.rates if not row.is_baseline]
        if not platform.is_searched and platform.steady:
            found += _at_loads(platform)
        elif others:
            where = f" on {platform.name}" if len(platforms) > 1 else ""
            found += [_beside_baseline(platform, row, where) for row in others]
        else:
            found += [_alone(platform, row) for row in platform.rates]
    return found


def cautions(platforms: Sequence[PlatformFindings]) -> list[str]:
    """Return what a reader must keep in mind about the whole report."""
    found = []
    for platform in platforms:
        if platform.comparison.is_interrupted:
            found.append(
                f"{platform.name}: interrupted before the plan's end; only what was measured "
                "until then is shown."
            )
        invalid = platform.invalid
        if invalid:
            found.append(
                f"{platform.name}: {len(invalid)} of {len(platform.trials)} trials are invalid "
                "and in no figure; they are listed with their reasons at the end."
            )
        told = (
            *_died(platform),
            *_models(platform),
            *_few(platform),
            *search_cautions(platform.comparison),
            *trial_cautions(platform.comparison),
        )
        found += [f"{platform.name}: {text}" for text in told]
    if len({platform.comparison.traffic for platform in platforms}) > 1:
        found.append(
            "The platforms were measured with different traffic: their rates cannot be compared "
            "with each other, only the ratios within one platform."
        )
    if len({tuple(platform.comparison.limits) for platform in platforms}) > 1:
        found.append("The platforms were measured under different limits.")
    return found


def _died(platform: PlatformFindings) -> Iterable[str]:
    for contender in platform.comparison.contenders:
        if contender.restarts or contender.out_of_memory:
            yield (
                f"{contender.name} died {times(contender.restarts)} in a trial and was started "
                f"again; it ran out of memory {times(contender.out_of_memory)}."
            )
        if len(contender.versions) > 1:
            yield (
                f"{contender.name} was measured in several versions "
                f"({', '.join(contender.versions)}): its figures mix them."
            )
        yield from (f"{contender.name}: {caution}" for caution in contender.cautions)


def _models(platform: PlatformFindings) -> Iterable[str]:
    """Say that contenders call their models differently; of a path the last name counts."""
    contenders = [c for c in platform.comparison.contenders if c.model]
    if len({c.model.rstrip("/").rpartition("/")[2].casefold() for c in contenders}) > 1:
        named = ", ".join(f"{c.name} {c.model}" for c in contenders)
        yield (
            f"the contenders serve models of different names ({named}): the ratio compares engines "
            "only where the weights are the same."
        )


def _few(platform: PlatformFindings) -> Iterable[str]:
    for row in platform.steady:
        count = row.work.requests - row.work.cancelled
        if 0 < count < fewest_observations(99):
            last = "P99" if count >= fewest_observations(95) else "P95 and P99"
            verb = "is" if last == "P99" else "are"
            yield (
                f"{row.contender} at {row.load}: {count} requests, so that {last} of a request's "
                f"latency {verb} simply the slowest of them."
            )


def times(count: int) -> str:
    """Return a count in words."""
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _beside_baseline(platform: PlatformFindings, row: RateRow, where: str) -> Statement:
    ratio = row.ratio
    name = row.contender.name
    if ratio is None or ratio.estimate is None or ratio.low is None or ratio.high is None:
        baseline = ratio.baseline if ratio else _baseline(platform)
        return Statement(
            kind="none",
            platform=platform.name,
            contender=name,
            sentence=f"No verdict on {name} against {baseline}{where}{_tendency(ratio)}",
            reasons=_why_not(platform, row, baseline),
        )
    behind = f"({_interval(ratio)}, {len(ratio.pairs)} interleaved pairs)"
    limits = limits_in_words(platform.limits)
    if ratio.low <= 1 <= ratio.high:
        kind = "even"
        sentence = (
            f"No difference shown between {name} and {ratio.baseline}{where} at {limits}: "
            f"the ratio of their request rates is {ratio.estimate:.2f} {behind}"
        )
    else:
        kind = "ahead" if ratio.low > 1 else "behind"
        sentence = (
            f"{name} holds {ratio.estimate:.2f} x the request rate of {ratio.baseline}{where} "
            f"at {limits} {behind}"
        )
    return Statement(
        kind=kind,
        platform=platform.name,
        contender=name,
        sentence=f"{sentence}.",
        reasons=_unresolved(platform, (name, ratio.baseline)),
    )


def _interval(ratio: Ratio) -> str:
    return f"{ratio.confidence * 100:g} % interval {ratio.low:.2f} to {ratio.high:.2f}"


def _tendency(ratio: Ratio | None) -> str:
    if ratio is None or ratio.estimate is None:
        return "."
    pairs = "1 pair" if len(ratio.pairs) == 1 else f"{len(ratio.pairs)} pairs"
    return f": a ratio of {ratio.estimate:.2f} was seen in {pairs}, without an interval."


def _baseline(platform: PlatformFindings) -> str:
    return next(row.contender.name for row in platform.rates if row.is_baseline)


def _alone(platform: PlatformFindings, row: RateRow) -> Statement:
    name = row.contender.name
    if row.median_rps is None or row.low_rps is None or row.high_rps is None:
        return Statement(
            kind="none",
            platform=platform.name,
            contender=name,
            sentence=f"No verdict on {name} on {platform.name}.",
            reasons=_why_not(platform, row, name),
        )
    span = f"; {row.low_rps:.3g} to {row.high_rps:.3g} over {row.resolved} searches"
    return Statement(
        kind="measured",
        platform=platform.name,
        contender=name,
        sentence=(
            f"{name} holds {row.median_rps:.3g} requests/s on {platform.name} at "
            f"{limits_in_words(platform.limits)}{span if row.resolved > 1 else ''}."
        ),
        reasons=(*_single(row), *_unresolved(platform, (name,))),
    )


def _single(row: RateRow) -> tuple[str, ...]:
    if row.resolved > 1:
        return ()
    said = (
        "one search: how far another one, with other seeds, would lie from it is not known; "
        "--repetitions (in a plan: pairs) tells"
    )
    return (said,)


def _at_loads(platform: PlatformFindings) -> Iterable[Statement]:
    """Say what each contender did at the load that the pictures show: no rate was asked for."""
    load = platform.focus
    rows = {row.contender: row for row in platform.steady if load in {None, row.load}}
    for contender in platform.comparison.contenders:
        row = rows.get(contender.name)
        reasons = _why_not(platform, _rate_of(platform, contender.name), _baseline(platform))
        if row is None:
            sentence = f"No valid trial of {contender.name} on {platform.name}"
        else:
            sentence = f"{contender.name} at {row.load} on {platform.name}: {_work_text(row)}"
        yield Statement(
            kind="none" if row is None else "measured",
            platform=platform.name,
            contender=contender.name,
            sentence=f"{sentence}.",
            reasons=reasons,
        )


def _rate_of(platform: PlatformFindings, contender: str) -> RateRow:
    return next(row for row in platform.rates if row.contender.name == contender)


def _work_text(row: SteadyRow) -> str:
    p95s = {name: row.work.latency_s[name].p95 for name in ("ttft", "e2e")}
    latencies = [
        f"P95 {LATENCY_NAMES[name]} {'failed' if math.isinf(p95) else f'{p95:.3g} s'}"
        for name, p95 in p95s.items()
        if p95 is not None
    ]
    return ", ".join([*latencies, f"{row.work.completed} of {row.work.requests} requests complete"])


def _why_not(platform: PlatformFindings, row: RateRow, baseline: str) -> tuple[str, ...]:
    """Return every reason that speaks against a verdict, the ratio's own first."""
    names = (row.contender.name, baseline)
    found = list(row.ratio.reasons) if row.ratio else []
    if not platform.comparison.limits:
        found.append("no limit was given, so no highest rate was searched")
    elif not platform.is_searched:
        found.append("no search was asked for, so there is no highest rate")
    elif not any(search.contender in names for search in platform.comparison.searches):
        found.append("no search for the highest rate was made or ended")
    elif row.ratio is None and row.contender.name != baseline:
        found.append("no ratio was computed: too few pairs have a search of both")
    found += _unresolved(platform, names)
    found += _counted(
        (f"a trial of {trial.trial.contender} is invalid: {reason}")
        for trial in platform.invalid
        if trial.trial.contender in names
        for reason in trial.trial.reasons
    )
    if len(found) > MAX_REASONS:
        found = [*found[:MAX_REASONS], f"and {len(found) - MAX_REASONS} more, listed below"]
    return tuple(found)


def _unresolved(platform: PlatformFindings, names: Iterable[str]) -> tuple[str, ...]:
    wanted = set(names)
    return tuple(
        f"pair {search.pair + 1}: the search of {search.contender} did not resolve"
        + (f" ({'; '.join(search.reasons)})" if search.reasons else "")
        for search in platform.comparison.searches
        if search.contender in wanted and search.max_rps is None
    )


def _counted(texts: Iterable[str]) -> list[str]:
    """Return different texts once each, with how often they came."""
    counts = Counter(texts)
    return [text if count == 1 else f"{text} ({count} trials)" for text, count in counts.items()]
