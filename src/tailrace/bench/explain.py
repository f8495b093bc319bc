"""Why a server's slowest requests were slow, told by its request log alone.

A request's time stands in the log by phase (docs/why-slow.md). Of the slowest 1 % and 5 % of the
answers, by time to first token and by the whole time, this says how their time divides, by length
of the prompt and by cause. The cause of one slow request is the phase by which it exceeds the
median request most: a long answer takes most of everybody's time and makes nobody slow.

Who got no whole answer is in no tail, for no latency is his: those are told beside, by their ends.
The harness explains its own trials (root_cause.py): it also knows what its clients saw.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.stats import percentile
from tailrace.errors import ConfigError
from tailrace.telemetry.phases import PHASES
from tailrace.telemetry.request_log import read_records, rotated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tailrace.telemetry.phases import Phases
    from tailrace.telemetry.request_log import RequestRecord

SLOW_SHARES = (0.01, 0.05)
EXAMPLES = 3
METRICS = {"ttft": "time to first token", "e2e": "end-to-end time"}
LENGTH_CLASSES = (("<1K", 1024), ("1-3K", 3072), (">3K", math.inf))
"""Name, and the prompt tokens below which it is this one."""
CAUSES = {
    **{
        name: label for name, label in PHASES.items() if name not in ("preempted", "emit", "socket")
    },
    "decode_wait": "its answer, while prompts of others were computed",
    **{name: PHASES[name] for name in ("preempted", "emit", "socket")},
}
"""Name and label of the phases, the decode's divided in two: `decode_wait` is not its own."""
CUT_OFF = frozenset({"disconnect", "slow_reader", "error", "refused", "abort", ""})
"""Ends without a whole answer."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """How the time of some requests divides."""

    count: int
    mean_s: float
    phases: dict[str, float]
    """Mean seconds by phase; they add up to `mean_s`."""

    def share(self, phase: str) -> float:
        """Return a phase's part of the time, 0 to 1."""
        return self.phases[phase] / self.mean_s if self.mean_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class LengthRow:
    """The slow requests whose prompts are of one length class."""

    name: str
    total: int
    """Requests of this class, slow or not."""
    slow: Division


@dataclass(frozen=True, kw_only=True)
class CauseRow:
    """One phase as the cause of slow requests."""

    phase: str
    """Of `CAUSES`."""
    label: str
    count: int
    """Slow requests that exceed the median request by it most."""
    share: float
    """Of all slow requests' time."""
    mean_s: float
    """Of those of which it is the cause; of all slow ones where it is nobody's."""
    usual_s: float
    """The median over all requests."""
    examples: tuple[str, ...]
    """Their ids, slowest first."""


@dataclass(frozen=True, kw_only=True)
class SlowTail:
    """The slowest requests by one latency."""

    metric: str
    """"ttft" or "e2e"."""
    share: float
    """0.01 or 0.05; at least one request is taken."""
    total: int
    threshold_s: float
    """The least latency among the slow ones."""
    median_s: float
    """Of all."""
    slow: Division
    usual: dict[str, float]
    """Median seconds of each phase, over all."""
    lengths: tuple[LengthRow, ...]
    """Classes without a slow request are left out."""
    causes: tuple[CauseRow, ...]
    """Most often the cause first."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Requests that got no whole answer, by how they ended."""

    finish_reason: str
    status: int
    count: int
    median_s: float
    phase: str
    """In which most of their time went."""
    reason: str
    """The most frequent one, where they were refused."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a request log says."""

    files: tuple[str, ...]
    total: int
    answered: int
    first_unix_s: float
    last_unix_s: float
    tails: tuple[SlowTail, ...]
    endings: tuple[Ending, ...]
    notes: tuple[str, ...]


def explain(logs: Sequence[Path]) -> Explanation:
    """Read logs, their rotated files included, and say why the slowest were slow.

    Raises:
        ConfigError: A log is not there or cannot be read, or holds no record with phases.
    """
    files = [file for log in logs for file in _files(log)]
    try:
        records, damaged = read_records(files)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    told = [record for record in records if record.phases is not None]
    if not told:
        raise ConfigError(
            f"{', '.join(map(str, files))}: no record with phases among {len(records)} "
            f"({damaged} damaged lines): is it a request log of this version?"
        )
    answered = [record for record in told if record.finish_reason not in CUT_OFF]
    tails = [_tail(answered, metric, share) for metric in METRICS for share in SLOW_SHARES]
    return Explanation(
        files=tuple(map(str, files)),
        total=len(told),
        answered=len(answered),
        first_unix_s=min(record.unix_s for record in told),
        last_unix_s=max(record.unix_s for record in told),
        tails=tuple(tail for tail in tails if tail is not None),
        endings=_endings([record for record in told if record.finish_reason in CUT_OFF]),
        notes=_notes(answered, damaged=damaged, silent=len(records) - len(told)),
    )


def length_class(prompt_tokens: int) -> str:
    """Return the name of a prompt's length class."""
    return next(name for name, below in LENGTH_CLASSES if prompt_tokens < below)


def told(seconds: float) -> str:
    """Return a time as a person reads it: three digits, with its unit."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.0005 or seconds == 0 else "under 1 ms"


def _files(log: Path) -> list[Path]:
    files = rotated(log)
    if not files:
        raise ConfigError(
            f"{log}: there is no such request log; `tailrace serve --request-log FILE` writes one"
        )
    return files


def _phases(record: RequestRecord, metric: str) -> Phases | None:
    return record.ttft_phases if metric == "ttft" else record.phases


def _parts(phases: Phases, record: RequestRecord) -> dict[str, float]:
    """Return the seconds of each of `CAUSES`."""
    parts = phases.by_name()
    wait_s = min(record.decode_wait_s, phases.decode_s)  # none before the first token
    return parts | {"decode": phases.decode_s - wait_s, "decode_wait": wait_s}


def _tail(records: Sequence[RequestRecord], metric: str, share: float) -> SlowTail | None:
    """Return the slowest by one latency; None where it was never observed."""
    observed = [
        (phases.total_s, _parts(phases, record), record)
        for record in records
        if (phases := _phases(record, metric)) is not None
    ]
    if not observed:
        return None
    observed.sort(key=lambda entry: -entry[0])
    slow = observed[: max(math.ceil(share * len(observed)), 1)]
    usual = {name: statistics.median(parts[name] for _, parts, _ in observed) for name in CAUSES}
    totals = Counter(length_class(record.prompt_tokens) for _, _, record in observed)
    by_class: dict[str, list[dict[str, float]]] = {name: [] for name, _ in LENGTH_CLASSES}
    for _, parts, record in slow:
        by_class[length_class(record.prompt_tokens)].append(parts)
    causes = _causes([(parts, record) for _, parts, record in slow], usual)
    division = _division([parts for _, parts, _ in slow])
    threshold_s, median_s = slow[-1][0], statistics.median_low([entry[0] for entry in observed])
    first = causes[0]
    return SlowTail(
        metric=metric,
        share=share,
        total=len(observed),
        threshold_s=threshold_s,
        median_s=median_s,
        slow=division,
        usual=usual,
        lengths=tuple(
            LengthRow(name=name, total=totals[name], slow=_division(parts))
            for name, parts in by_class.items()
            if parts
        ),
        causes=causes,
        sentence=(
            f"The slowest {share:.0%} by {METRICS[metric]} ({len(slow)} of {len(observed)}; "
            f"{told(threshold_s)} and more, median {told(median_s)}): {first.count} by "
            f'"{first.label}", {told(first.mean_s)} against {told(first.usual_s)} in the median '
            f"request."
        ),
    )


def _division(parts: Sequence[Mapping[str, float]]) -> Division:
    phases = {name: statistics.fmean(part[name] for part in parts) for name in CAUSES}
    return Division(count=len(parts), mean_s=math.fsum(phases.values()), phases=phases)


def _causes(
    slow: Sequence[tuple[Mapping[str, float], RequestRecord]], usual: Mapping[str, float]
) -> tuple[CauseRow, ...]:
    mains = [_main(parts, usual) for parts, _ in slow]
    whole_s = math.fsum(math.fsum(parts.values()) for parts, _ in slow)
    found = []
    for phase, label in CAUSES.items():
        mine = [entry for entry, main in zip(slow, mains, strict=True) if main == phase]
        spent_s = math.fsum(parts[phase] for parts, _ in slow)
        share = spent_s / whole_s if whole_s > 0 else 0.0
        if not mine and share < 0.005:
            continue
        found.append(
            CauseRow(
                phase=phase,
                label=label,
                count=len(mine),
                share=share,
                mean_s=statistics.fmean(parts[phase] for parts, _ in mine or slow),
                usual_s=usual[phase],
                examples=tuple(
                    record.http_request_id or record.request_id for _, record in mine[:EXAMPLES]
                ),
            )
        )
    return tuple(sorted(found, key=lambda row: (-row.count, -row.share)))


def _main(parts: Mapping[str, float], usual: Mapping[str, float]) -> str:
    """Return the phase by which a request exceeds the median request most."""
    return max(CAUSES, key=lambda name: parts[name] - usual[name])


def _endings(records: Sequence[RequestRecord]) -> tuple[Ending, ...]:
    groups: dict[tuple[str, int], list[RequestRecord]] = {}
    for record in records:
        groups.setdefault((record.finish_reason, record.status), []).append(record)
    found = []
    for (finish_reason, status), group in groups.items():
        parts = [_parts(record.phases, record) for record in group if record.phases is not None]
        division = _division(parts)
        reasons = Counter(record.reason for record in group if record.reason)
        found.append(
            Ending(
                finish_reason=finish_reason or "unknown",
                status=status,
                count=len(group),
                median_s=statistics.median(
                    record.finished_s - record.received_s for record in group
                ),
                phase=max(CAUSES, key=division.phases.__getitem__),
                reason=reasons.most_common(1)[0][0] if reasons else "",
            )
        )
    return tuple(sorted(found, key=lambda ending: -ending.count))


def _notes(answered: Sequence[RequestRecord], *, damaged: int, silent: int) -> tuple[str, ...]:
    notes = []
    if damaged:
        notes.append(f"{damaged} damaged lines were left out")
    if silent:
        notes.append(f"{silent} records of an earlier version have no phases and were left out")
    if 0 < len(answered) < 1 / min(SLOW_SHARES):
        notes.append(
            f"only {len(answered)} requests were answered: the slowest 1 % is a single one"
        )
    errors_s = sorted(
        abs(record.ttft_phases.total_s - record.predicted_ttft_s)
        for record in answered
        if record.ttft_phases is not None and record.predicted_ttft_s is not None
    )
    if errors_s:
        notes.append(
            f"the time to first token was predicted for {len(errors_s)} requests, and off by "
            f"{told(percentile(errors_s, 50))} at the median, {told(percentile(errors_s, 95))} at "
            "P95"
        )
    return tuple(notes)
