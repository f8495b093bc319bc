"""Why the slowest requests of a trial were slow.

The slowest 5 % by time to first token, and by the whole time, are cut into pieces with a cause each
(anatomy.py says how). A cause's share is that of the slow requests' own time. A request's main
cause is another question: the piece by which it exceeds the trial's median request most, since a
long answer takes most of everybody's time and makes nobody slow.

Failed requests are infinitely slow and so come first; their cause is the failure. What no log and
no reading proves is "not known", and the notes say what would tell.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.anatomy import CAUSES, dissect, join, read_log
from tailrace.bench.circumstances import Signal, drafts, kv_curve, prefill_share, signals
from tailrace.bench.monitor import read_readings
from tailrace.bench.records import read_records
from tailrace.bench.stats import e2e_s, ttft_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tailrace.bench.anatomy import Anatomy, Dissection
    from tailrace.bench.records import Record
    from tailrace.bench.result import Trial
    from tailrace.bench.scrape import Scrape

SLOW_SHARE = 0.05
HARDLY_SLOWER = 1.1
"""Times the median, up to which the slowest request is no slow tail."""
EXAMPLES = 3
LOG_SOURCE = "request log"
READINGS_SOURCE = "records and readings"
RECORDS_SOURCE = "records"

_METRICS: dict[str, tuple[str, Callable[[Record], float | None]]] = {
    "ttft": ("time to first token", ttft_s),
    "e2e": ("end-to-end time", e2e_s),
}


@dataclass(frozen=True, kw_only=True)
class SlowRequest:
    """One of the slowest."""

    request_id: str
    """As sent; "#INDEX" where none was."""
    index: int
    value_s: float
    """The latency; infinite for a failed request."""
    shares: dict[str, float]
    """Of its time, by cause; they sum to 1."""
    main: str
    """The cause that sets it apart from the trial's median request."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause over all slow requests."""

    key: str
    """Of CAUSES."""
    label: str
    share: float
    """Mean of its shares of the slow requests' time, 0 to 1; all causes sum to 1."""
    count: int
    """Slow requests whose main cause it is."""
    evidence: str
    """A sentence with numbers."""
    examples: tuple[str, ...]
    """Ids of requests whose main cause it is, slowest first."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The slowest requests by one latency."""

    metric: str
    """"ttft" or "e2e"."""
    total: int
    """Requests that ended."""
    threshold_s: float
    """The least latency among the slow ones; infinite where all of them failed."""
    median_s: float
    """Of all requests that ended."""
    requests: tuple[SlowRequest, ...]
    """Slowest first."""
    causes: tuple[Cause, ...]
    """Most often the main one first, then by share; those without either are left out."""
    sentence: str
    """The tail in one sentence."""


@dataclass(frozen=True, kw_only=True)
class RootCause:
    """Why a trial's slowest requests were slow, and how that is known."""

    contender: str
    source: str
    """"request log", "records and readings" or "records"."""
    joined: int
    """Requests found in the server's request log."""
    tails: tuple[Tail, ...]
    """By TTFT and by E2E; empty where nothing ended."""
    signals: tuple[Signal, ...]
    """Of the slowest by TTFT; those that set them apart most come first."""
    prefill: str
    """The share of prefill in long prompts, as a sentence."""
    kv: str
    """The KV curve's shape with its numbers, as a sentence."""
    kv_shape: str
    """"flat", "sawtooth", "saturated", "rising", "varying" or "not known"."""
    drafts: str
    """Accepted and rejected draft tokens, as a sentence."""
    notes: tuple[str, ...]
    """What could not be known, and what would tell; how well the clocks are joined."""


def explain(folder: Path, trial: Trial) -> RootCause:
    """Return why the slowest 5 % of a trial were slow.

    Args:
        folder: The trial's folder, or the result's folder that `trial.folder` is relative to.
        trial: What was run.

    Raises:
        ConfigError: The records cannot be read.
    """
    inside = folder / trial.folder
    folder = inside if inside.is_dir() else folder
    records = read_records(folder / "records.jsonl")
    scrapes = read_readings(folder / "monitor.jsonl")
    lines, torn = read_log(folder / "requests.jsonl")
    log, why_no_log = join(records, lines)
    server = scrapes.get("server")
    dissection = dissect(records, log, server)
    tails = tuple(tail for metric in _METRICS if (tail := _tail(metric, dissection)) is not None)
    found, missing = _signals(tails, dissection, scrapes)
    curve = kv_curve(server)
    return RootCause(
        contender=trial.contender,
        source=LOG_SOURCE if log else READINGS_SOURCE if scrapes else RECORDS_SOURCE,
        joined=dissection.joined,
        tails=tails,
        signals=found,
        prefill=prefill_share(dissection.requests),
        kv=curve.sentence,
        kv_shape=curve.shape,
        drafts=drafts(server),
        notes=tuple(_notes(dissection, why_no_log, torn, missing)),
    )


def _tail(metric: str, dissection: Dissection) -> Tail | None:
    """Return the slowest requests by one latency, or None where it was never observed."""
    _, read = _METRICS[metric]
    observed = [
        (value, request)
        for request in dissection.requests
        if (value := read(request.record)) is not None
    ]
    if not observed:
        return None
    observed.sort(key=lambda pair: (-pair[0], pair[1].record.index))
    slow = observed[: max(math.ceil(SLOW_SHARE * len(observed)), 1)]
    usual = _usual([_pieces(request, metric) for _, request in observed])
    requests = tuple(_slow_request(value, request, metric, usual) for value, request in slow)
    anatomies = [request for _, request in slow]
    causes = _causes(requests, anatomies, metric, usual, dissection)
    median_s = statistics.median_low([value for value, _ in observed])
    return Tail(
        metric=metric,
        total=len(observed),
        threshold_s=slow[-1][0],
        median_s=median_s,
        requests=requests,
        causes=causes,
        sentence=_sentence(metric, requests, len(observed), median_s, causes),
    )


def _pieces(request: Anatomy, metric: str) -> dict[str, float]:
    return request.ttft if metric == "ttft" else request.e2e


def _usual(pieces: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each cause."""
    return {cause: statistics.median(piece.get(cause, 0.0) for piece in pieces) for cause in CAUSES}


def _slow_request(
    value_s: float, request: Anatomy, metric: str, usual: Mapping[str, float]
) -> SlowRequest:
    pieces = _pieces(request, metric)
    total_s = sum(pieces.values())
    if request.record.is_failure or total_s <= 0:
        main = "failed" if request.record.is_failure else "unknown"
        shares = {main: 1.0}
    else:
        shares = {cause: seconds / total_s for cause, seconds in pieces.items()}
        main = max(pieces, key=lambda cause: pieces[cause] - usual[cause])
    return SlowRequest(
        request_id=request.name,
        index=request.record.index,
        value_s=value_s,
        shares=shares,
        main=main,
    )


def _causes(
    requests: Sequence[SlowRequest],
    anatomies: Sequence[Anatomy],
    metric: str,
    usual: Mapping[str, float],
    dissection: Dissection,
) -> tuple[Cause, ...]:
    found = []
    for key, label in CAUSES.items():
        share = statistics.fmean(request.shares.get(key, 0.0) for request in requests)
        mine = [request for request in requests if request.main == key]
        if share <= 0 and not mine:
            continue
        touched = [
            anatomy
            for anatomy, request in zip(anatomies, requests, strict=True)
            if request.main == key
        ] or anatomies
        seconds = [_pieces(anatomy, metric).get(key, 0.0) for anatomy in touched]
        facts = _Facts(metric, touched, statistics.fmean(seconds), usual[key], dissection)
        found.append(
            Cause(
                key=key,
                label=label,
                share=share,
                count=len(mine),
                evidence=_EVIDENCE[key](facts),
                examples=tuple(request.request_id for request in mine[:EXAMPLES]),
            )
        )
    return tuple(sorted(found, key=lambda cause: (-cause.count, -cause.share)))


@dataclass(frozen=True)
class _Facts:
    """What a cause's sentence is made of."""

    metric: str
    touched: Sequence[Anatomy]
    """The slow requests whose main cause it is; all slow ones where it is nobody's."""
    mean_s: float
    """Of the piece, over `touched`."""
    usual_s: float
    """The median piece of all requests of the trial."""
    trial: Dissection

    @property
    def took(self) -> str:
        return f"{_told(self.mean_s)} on average, {_told(self.usual_s)} in the median request"

    @property
    def is_logged(self) -> bool:
        return any(request.line for request in self.touched)

    @property
    def is_told(self) -> bool:
        """Whether the log tells the phases, so that nothing was inferred."""
        return all(request.line and request.line.phases for request in self.touched)

    def tokens_of_others(self, request: Anatomy) -> float:
        """Return the prompt tokens of others within the latency that is looked at."""
        spans = [request.waiting] + [request.answering] * (self.metric == "e2e")
        return sum(company.tokens for company in spans if company)

    def streams(self, request: Anatomy) -> float:
        """Return the streams beside it: while it waited, or while its answer was made."""
        company = request.answering if self.metric == "e2e" else request.waiting
        return company.streams if company else 0.0

    def compare(self, read: Callable[[Anatomy], float]) -> str:
        """Return the mean of a figure over `touched`, beside the trial's median."""
        mine = statistics.fmean(map(read, self.touched))
        usual = statistics.median(map(read, self._all()))
        return f"{_count(mine)} against a median of {_count(usual)}"

    def _all(self) -> list[Anatomy]:
        return [request for request in self.trial.requests if request.moments] or list(self.touched)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _told(seconds: float) -> str:
    if seconds >= 0.9995:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.0005 or seconds == 0 else "under 1 ms"


def _failed(facts: _Facts) -> str:
    records = [request.record for request in facts.touched]
    statuses = ", ".join(
        f"{count} {name}" for name, count in Counter(map(_status, records)).items()
    )
    errors = Counter(record.error for record in records if record.error).most_common(1)
    said = f'; most often "{errors[0][0]}"' if errors else ""
    failed = sum(request.record.is_failure for request in facts.trial.requests)
    return (
        f"{failed} of {len(facts.trial.requests)} requests failed; among the slow: {statuses}{said}"
    )


def _status(record: Record) -> str:
    return f"HTTP {record.http_status}" if record.status == "http" else record.status


def _client(facts: _Facts) -> str:
    return f"the client turned to them {facts.took} after they were due: its own lateness"


def _network(facts: _Facts) -> str:
    until = "until the server began to read" if facts.is_logged else "until all was sent"
    return f"connecting and sending, {until}: {facts.took}"


def _ingest(facts: _Facts) -> str:
    return f"reading the body and tokenising, until the engine had it: {facts.took}"


def _queue(facts: _Facts) -> str:
    if facts.is_logged:
        return f"from submitted to the first step: {facts.took}"
    return f"readings within the wait saw others waiting for a slot: {facts.took}"


def _own_prefill(facts: _Facts) -> str:
    pace_ms = (facts.trial.pace_s or 0.0) * 1e3
    tokens = facts.compare(lambda request: request.prompt_tokens)
    if facts.is_told:
        return f"prompt tokens {tokens}; as the engine measured: {facts.took}"
    return f"prompt tokens {tokens}; at {pace_ms:.3g} ms a token: {facts.took}"


def _others_prefill(facts: _Facts) -> str:
    tokens = facts.compare(facts.tokens_of_others)
    before = "prefilled meanwhile" if facts.is_logged else "before their first token meanwhile"
    return f"prompt tokens of others {before}: {tokens}; {facts.took}"


def _preemption(facts: _Facts) -> str:
    count = sum(request.preemptions for request in facts.touched)
    what = "waiting and computing again" if facts.is_told else "their gaps beyond the usual"
    return f"preemptions by the request log: {count}; {what}: {facts.took}"


def _own_decode(facts: _Facts) -> str:
    tokens = facts.compare(lambda request: request.record.output_tokens or 0)
    pace_ms = (facts.trial.tpot_s or 0.0) * 1e3
    return f"output tokens {tokens}; at the median {pace_ms:.3g} ms a token: {facts.took}"


def _batch(facts: _Facts) -> str:
    streams = facts.compare(facts.streams)
    return f"other streams under way {streams}; beyond the usual pace: {facts.took}"


def _emission(facts: _Facts) -> str:
    start = "from made to read" if facts.is_logged else "from the last text to the stream's end"
    return f"{start}: {facts.took}"


def _unknown(facts: _Facts) -> str:
    why = (
        "no stamp or reading accounts for it"
        if facts.is_logged
        else "without a request log that knows X-Request-Id, nothing accounts for it"
    )
    return f"{why}: {facts.took}"


_EVIDENCE: dict[str, Callable[[_Facts], str]] = {
    "failed": _failed,
    "client": _client,
    "network": _network,
    "ingest": _ingest,
    "queue": _queue,
    "own_prefill": _own_prefill,
    "others_prefill": _others_prefill,
    "preemption": _preemption,
    "own_decode": _own_decode,
    "batch": _batch,
    "emission": _emission,
    "unknown": _unknown,
}


def _sentence(
    metric: str,
    requests: Sequence[SlowRequest],
    total: int,
    median_s: float,
    causes: Sequence[Cause],
) -> str:
    name, _ = _METRICS[metric]
    least_s = requests[-1].value_s
    bound = "all of them failed" if math.isinf(least_s) else f"{_told(least_s)} and more"
    usual = "failed" if math.isinf(median_s) else _told(median_s)
    if requests[0].value_s <= HARDLY_SLOWER * median_s and not math.isinf(median_s):
        return (
            f"The slowest {len(requests)} of {total} requests by {name} ({bound}; median {usual}) "
            "are hardly slower than the median: there is no slow tail to explain."
        )
    first = causes[0]
    return (
        f"The slowest {len(requests)} of {total} requests by {name} ({bound}; median {usual}): "
        f"{first.count} mainly by {first.label}; {first.evidence}."
    )


def _signals(
    tails: Sequence[Tail], dissection: Dissection, scrapes: Mapping[str, Scrape]
) -> tuple[tuple[Signal, ...], tuple[str, ...]]:
    if not tails:
        return (), ()
    slow = {request.index for request in tails[0].requests}
    return signals(
        [r for r in dissection.requests if r.record.index in slow],
        [r for r in dissection.requests if r.record.index not in slow],
        scrapes,
    )


def _notes(dissection: Dissection, why_no_log: str, torn: int, missing: Sequence[str]) -> list[str]:
    notes = []
    if why_no_log:
        notes.append(
            f"{why_no_log}: what happened inside the server is told by records and readings only, "
            "and time before the first token is given to queueing where readings saw a queue"
        )
    else:
        error_ms = (dissection.error_s or 0.0) * 1e3
        notes.append(
            f"{dissection.joined} of {len(dissection.requests)} requests were found in the request "
            f"log; its clock and the client's are joined within {error_ms:.1f} ms"
        )
    if torn:
        notes.append(f"{torn} lines of the request log could not be read")
    is_told = all(r.line and r.line.phases for r in dissection.requests)
    if dissection.pace_s is None and dissection.requests and not is_told:
        notes.append("too few requests to tell a prompt's pace: prefill is not split")
    if missing:
        notes.append(f"not known for want of readings: {'; '.join(missing)}")
    return notes
