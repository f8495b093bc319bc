"""Everything a report says, as plain values: computed once, then drawn and written by others.

Each trial is read once and reduced to figures. Trials of one contender at one steady load are
pooled: their observations are thrown together before a percentile is taken, so that a pair with
more requests weighs more and a bad pair cannot be averaged away. Invalid trials are listed and
are in no figure.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tailrace.bench.limits import Limit, read_limit
from tailrace.bench.monitor import read_readings
from tailrace.bench.records import Record, read_records
from tailrace.bench.report import readings
from tailrace.bench.result import (
    Comparison,
    Contender,
    Ratio,
    Search,
    Trial,
    read_result,
)
from tailrace.bench.run import goodput_limits
from tailrace.bench.stats import (
    PERCENTS,
    Stats,
    e2e_s,
    gaps_s,
    percentile,
    strictest,
    summarise,
    tpot_s,
    ttft_s,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

LATENCIES = {
    "ttft": ("Time to first token", "s"),
    "itl": ("Inter-token time", "ms"),
    "tpot": ("Time per output token", "ms"),
    "e2e": ("End to end", "s"),
}
"""Name and unit of each latency, in a table's order."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """One latency's percentiles in seconds; infinite where failures reach that far."""

    observations: int
    failed: int
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, order=True)
class Load:
    """What was offered: a rate (open loop) or users (closed loop)."""

    users: int
    rate_rps: float

    @property
    def is_highest(self) -> bool:
        """Whether it stands for each contender's own highest rate."""
        return self == HIGHEST

    def __str__(self) -> str:
        if self.is_highest:
            return "its own highest rate that held"
        return f"{self.users} users" if self.users else f"{self.rate_rps:g} requests/s"


HIGHEST = Load(0, math.inf)
"""Stands in where a plan names no steady load: the highest rate that held, in each pair."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What came of the requests of one or more trials."""

    requests: int
    completed: int
    failures: dict[str, int]
    """By status."""
    cancelled: int
    span_s: float
    """From the first schedule to the last answer, summed over the trials."""
    input_tokens: int
    output_tokens: int
    good: int | None
    """Requests that kept every limit's bound themselves; None where there are no limits."""
    latency_s: dict[str, Latency]
    readings: dict[str, float]
    """See report.readings.LABELS."""

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return sum(self.failures.values())

    def per_second(self, count: float) -> float:
        """Return a count over the whole span, ramp and drain included."""
        return count / self.span_s if self.span_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One trial in figures."""

    platform: str
    trial: Trial
    work: Work
    limits: dict[str, float | None]
    """What each limit's percentile came to, in seconds, by the limit's name."""

    @property
    def is_valid(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.trial.reasons

    @property
    def load(self) -> Load:
        """What was offered."""
        users = self.trial.users
        return Load(users, 0.0 if users else self.trial.rate_rps)


@dataclass(frozen=True, kw_only=True)
class SteadyRow:
    """One contender at one steady load: its valid trials pooled."""

    contender: str
    load: Load
    trials: int
    work: Work
    p95_ttft_range_s: tuple[float, float] | None
    """The lowest and highest P95 TTFT of its trials."""


@dataclass(frozen=True, kw_only=True)
class RateRow:
    """The highest rate of one contender over its searches, and the ratio to the baseline."""

    contender: Contender
    is_baseline: bool
    searches: list[Search]
    median_rps: float | None
    low_rps: float | None
    high_rps: float | None
    ratio: Ratio | None
    readings: dict[str, float]
    """Over all its valid trials."""

    @property
    def resolved(self) -> int:
        """Searches that found a rate."""
        return sum(search.max_rps is not None for search in self.searches)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The pooled observations behind one SteadyRow, for pictures; seconds."""

    rows: tuple[TrialRow, ...]
    """The trials they come from."""
    observed_s: dict[str, NDArray[np.float64]]
    """Sorted, by latency; infinite ones last."""
    lengths: NDArray[np.float64]
    """Prompt tokens of each request that completed or failed."""
    ttft_s: NDArray[np.float64]
    """Its time to first token, infinite where it failed."""


@dataclass(frozen=True, kw_only=True)
class PlatformFindings:
    """One result folder."""

    name: str
    """The platform's name, made unique within the report."""
    folder: Path
    comparison: Comparison
    limits: tuple[Limit, ...]
    rates: list[RateRow]
    trials: list[TrialRow]
    steady: list[SteadyRow]
    samples: dict[tuple[str, Load], Samples] = field(repr=False)

    @property
    def is_searched(self) -> bool:
        """Whether a highest rate was asked for."""
        return bool(self.comparison.searches) or "search" in self.comparison.plan

    @property
    def invalid(self) -> list[TrialRow]:
        """Trials that are in no figure."""
        return [row for row in self.trials if not row.is_valid]

    @property
    def focus(self) -> Load | None:
        """The load that the pictures show: the hardest that everyone met and someone held.

        None where no steady load was measured for every contender.
        """
        names = {contender.name for contender in self.comparison.contenders}
        rows: dict[Load, list[SteadyRow]] = {}
        for row in self.steady:
            rows.setdefault(row.load, []).append(row)
        common = sorted(load for load, at in rows.items() if {r.contender for r in at} == names)
        held = [load for load in common if self._is_held(load)]
        return held[-1] if held else next(iter(common), None)

    def _is_held(self, load: Load) -> bool:
        rows = [row for (_, at), some in self.samples.items() if at == load for row in some.rows]
        return any(row.trial.outcome != "fails" for row in rows)


def read_findings(folders: Sequence[Path]) -> list[PlatformFindings]:
    """Read result folders and compute every figure.

    Raises:
        ConfigError: A folder is no result, or a file that it names is missing or broken.
    """
    found: list[PlatformFindings] = []
    for folder in folders:
        comparison = read_result(folder)
        taken = [platform.name for platform in found]
        found.append(_platform(folder, comparison, _unique(comparison.platform.name, taken)))
    return found


def _unique(name: str, taken: Sequence[str]) -> str:
    """Return the name, numbered where two folders are of platforms of one name."""
    count = sum(other == name or other.startswith(f"{name} (run ") for other in taken)
    return f"{name} (run {count + 1})" if count else name


def _platform(folder: Path, comparison: Comparison, name: str) -> PlatformFindings:
    limits = tuple(map(read_limit, comparison.limits))
    rows: list[TrialRow] = []
    pools: dict[tuple[str, Load], _Pool] = {}
    for trial in comparison.trials:
        records = read_records(folder / trial.folder / "records.jsonl")
        row = _trial_row(folder, trial, records, limits, name)
        rows.append(row)
        load = _pooled_under(comparison, row)
        if load is not None:
            pools.setdefault((trial.contender, load), _Pool()).add(row, records)
    names = [contender.name for contender in comparison.contenders]
    pools = dict(sorted(pools.items(), key=lambda item: (item[0][1], names.index(item[0][0]))))
    return PlatformFindings(
        name=name,
        folder=folder,
        comparison=comparison,
        limits=limits,
        rates=[_rate_row(comparison, contender, rows) for contender in comparison.contenders],
        trials=rows,
        steady=[pool.row(contender, load) for (contender, load), pool in pools.items()],
        samples={key: pool.samples() for key, pool in pools.items()},
    )


def _pooled_under(comparison: Comparison, row: TrialRow) -> Load | None:
    """Return the load whose figures a trial belongs to; None for most trials of a search."""
    trial = row.trial
    if not row.is_valid:
        return None
    if trial.phase == "steady":
        return row.load
    has_steady = any(other.phase == "steady" for other in comparison.trials)
    is_highest = trial.outcome == "holds" and any(
        search.contender == trial.contender
        and search.pair == trial.pair
        and search.holds_rps == trial.rate_rps
        for search in comparison.searches
    )
    return HIGHEST if is_highest and not has_steady else None


def _trial_row(
    folder: Path, trial: Trial, records: Sequence[Record], limits: Sequence[Limit], name: str
) -> TrialRow:
    # Good is what keeps every limit's bound itself, as everywhere in the harness.
    bounds = strictest(goodput_limits(limits).values())
    stats = summarise(records, bounds)
    monitor = folder / trial.folder / "monitor.jsonl"
    # A server without metrics on a machine without GPUs leaves no readings: not an error.
    scrapes = read_readings(monitor) if monitor.exists() else {}
    return TrialRow(
        platform=name,
        trial=trial,
        work=_work(stats, scrapes),
        limits={limit.name: limit.of(stats).at(limit.percent) for limit in limits},
    )


def _work(stats: Stats, scrapes: readings.Scrapes) -> Work:
    latencies = {"ttft": stats.ttft, "itl": stats.gap, "tpot": stats.tpot, "e2e": stats.e2e}
    return Work(
        requests=stats.requests,
        completed=stats.completed,
        failures=stats.failures,
        cancelled=stats.cancelled,
        span_s=stats.span_s,
        input_tokens=stats.input_tokens,
        output_tokens=stats.output_tokens,
        good=stats.good,
        latency_s={key: _latency(latency.ordered) for key, latency in latencies.items()},
        readings=readings.figures_of(scrapes),
    )


def _latency(ordered_s: Sequence[float]) -> Latency:
    points = [percentile(ordered_s, p) if ordered_s else None for p in PERCENTS]
    return Latency(
        observations=len(ordered_s),
        failed=sum(map(math.isinf, ordered_s)),
        p50=points[0],
        p90=points[1],
        p95=points[2],
        p99=points[3],
    )


class _Pool:
    """Gathers the trials of one contender at one load."""

    def __init__(self) -> None:
        self._rows: list[TrialRow] = []
        self._values: dict[str, list[NDArray[np.float64]]] = {key: [] for key in LATENCIES}
        self._lengths: list[float] = []
        self._ttft: list[float] = []

    def add(self, row: TrialRow, records: Sequence[Record]) -> None:
        self._rows.append(row)
        reads = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}
        for key, read in reads.items():
            values = [v for v in map(read, records) if v is not None]
            self._values[key].append(np.array(values, dtype=np.float64))
        gaps = [gap for record in records for gap in gaps_s(record)]
        self._values["itl"].append(np.array(gaps, dtype=np.float64))
        for record in records:
            first_s = ttft_s(record)
            if first_s is not None:
                self._lengths.append(record.input_tokens or record.planned_input_tokens)
                self._ttft.append(first_s)

    def samples(self) -> Samples:
        return Samples(
            rows=tuple(self._rows),
            observed_s={k: np.sort(np.concatenate(v)) for k, v in self._values.items()},
            lengths=np.array(self._lengths, dtype=np.float64),
            ttft_s=np.array(self._ttft, dtype=np.float64),
        )

    def row(self, contender: str, load: Load) -> SteadyRow:
        works = [row.work for row in self._rows]
        p95s = [p95 for w in works if (p95 := w.latency_s["ttft"].p95) is not None]
        failures: dict[str, int] = {}
        for status, count in ((s, c) for work in works for s, c in work.failures.items()):
            failures[status] = failures.get(status, 0) + count
        goods = [work.good for work in works if work.good is not None]
        observed = self.samples().observed_s
        return SteadyRow(
            contender=contender,
            load=load,
            trials=len(works),
            p95_ttft_range_s=(min(p95s), max(p95s)) if p95s else None,
            work=Work(
                requests=sum(work.requests for work in works),
                completed=sum(work.completed for work in works),
                failures=failures,
                cancelled=sum(work.cancelled for work in works),
                span_s=math.fsum(work.span_s for work in works),
                input_tokens=sum(work.input_tokens for work in works),
                output_tokens=sum(work.output_tokens for work in works),
                good=sum(goods) if goods else None,
                latency_s={key: _latency(v.tolist()) for key, v in observed.items()},
                readings=readings.merge([work.readings for work in works]),
            ),
        )


def _rate_row(comparison: Comparison, contender: Contender, rows: Sequence[TrialRow]) -> RateRow:
    searches = [s for s in comparison.searches if s.contender == contender.name]
    rates = [s.max_rps for s in searches if s.max_rps is not None]
    valid = [r.work for r in rows if r.is_valid and r.trial.contender == contender.name]
    ratios = [r for r in comparison.ratios if r.contender == contender.name]
    baselines = {r.baseline for r in comparison.ratios}
    first = comparison.contenders[0].name
    return RateRow(
        contender=contender,
        is_baseline=contender.name in baselines if baselines else contender.name == first,
        searches=searches,
        median_rps=statistics.median(rates) if rates else None,
        low_rps=min(rates, default=None),
        high_rps=max(rates, default=None),
        ratio=ratios[0] if ratios else None,
        readings=readings.merge([work.readings for work in valid]),
    )
