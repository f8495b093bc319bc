"""One request's time cut into pieces, each with a cause.

    scheduled --client-- dispatched --network-- received --ingest-- submitted --queue-- first step
      --own prompt | other prompts | full batch-- first token made --emission-- first token read
      --own answer | other prompts | full batch | preemption-- last token made --emission-- end

The inner moments come from Tailrace's request log; without it the server is one piece, from sent to
the first token, and only what the client's records and the readings prove is taken out of it. What
nothing proves stays "unknown".

Where the log tells the phases (docs/why-slow.md), prefill, other prompts and preemptions are what
the engine measured; only decode is split further, into its own answer at the trial's median pace
and a full batch. Elsewhere prefill and decode are split on figures of the same trial:
- Own prompt: uncached tokens x the pace of the fastest tenth of the longer prompts.
- Other prompts: what others prefilled meanwhile x the same pace; in decode only what exceeds the
  trial's usual amount, since the usual pace of decode has paid for that.
- Own answer: tokens x the trial's median time per output token.
- Preemption: the longest gaps of the stream, as many as the log counts, less the usual gap; what no
  gap shows came before the first token.
- Full batch: what is left, where more streams ran than is usual; else it is unknown.

The log's clock and the client's are the same machine's, but count from other zeros. No stamp can
come before what caused it, so every joined request bounds the distance from both sides; the middle
is taken, half the width is the error, and bounds that contradict each other are not used.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tailrace.bench.stats import gaps_s, percentile
from tailrace.telemetry.request_log import RequestRecord, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tailrace.bench.records import Record
    from tailrace.bench.scrape import Scrape
    from tailrace.telemetry.phases import Phases

CAUSES = {
    "failed": "failed",
    "client": "late client",
    "network": "connecting and network",
    "ingest": "reading and tokenising",
    "queue": "waiting for a slot",
    "own_prefill": "its own prompt",
    "others_prefill": "other prompts",
    "preemption": "preempted and computed again",
    "own_decode": "its own answer, at the usual pace",
    "batch": "slower steps in a full batch",
    "emission": "made, but not yet delivered",
    "unknown": "not known",
}
"""Key and label, in the order of a request's life."""

PACE_PERCENT = 10
FEWEST_FOR_PACE = 5
"""Requests below which the trial says nothing about the pace of a prompt."""
STALL_FACTOR = 2.0
"""A gap of so many usual ones may be a preemption."""
LEAST_WIDTH_S = 0.001
DUST_S = 1e-9
"""Pieces below it are rounding."""
READING_AGE_S = 2.0
"""A reading tells about the time up to so long after it."""


LogLine = RequestRecord


@dataclass(frozen=True)
class ServerLog:
    """The request log of one trial, joined to the client's records."""

    lines: Mapping[int, LogLine]
    """By the record's index; stamps still count from the log's zero."""
    offset_s: float
    """A log stamp minus this is trial time."""
    error_s: float
    """How far the offset may be wrong."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When things happened to one complete request, in trial time and never going back."""

    scheduled_s: float
    dispatched_s: float
    sent_s: float
    """Without a log; with one, when the server began to read."""
    submitted_s: float
    slot_s: float
    """First step; without a log the same as sent."""
    first_made_s: float
    first_read_s: float
    last_made_s: float
    finished_s: float
    is_logged: bool


@dataclass(frozen=True)
class Company:
    """What the server did for others within a span."""

    tokens: float
    """Prompt tokens of others, prefilled meanwhile (without a log: waiting for it or prefilled)."""
    streams: float
    """Other answers under way, on average."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """One request that ended, in pieces."""

    record: Record
    line: LogLine | None
    moments: Moments | None
    """None for a failed request, and for one without text."""
    ttft: dict[str, float]
    """Seconds by cause, to the first token; empty where it has none."""
    e2e: dict[str, float]
    """Seconds by cause, to the end."""
    prompt_tokens: int
    """Not found in a prefix cache."""
    waiting: Company | None = None
    """Who else was served from its first step (without a log: from sent) to its first token."""
    answering: Company | None = None
    """The same from its first to its last token."""

    @property
    def name(self) -> str:
        """The id that was sent, or "#INDEX"."""
        return self.record.request_id or f"#{self.record.index}"

    @property
    def preemptions(self) -> int:
        """As the log counts them; 0 without one."""
        return self.line.preemptions if self.line else 0


@dataclass(frozen=True, kw_only=True)
class Dissection:
    """All requests of a trial in pieces, and the figures that the cuts were made with."""

    requests: tuple[Anatomy, ...]
    pace_s: float | None
    """Of one prompt token; None where too few requests tell."""
    tpot_s: float | None
    """The median time per output token."""
    joined: int
    error_s: float | None
    """Of the join in time; None without a log."""


class _Flow:
    """Amounts spread evenly over spans: how much of them falls between two moments.

    Args:
        spans: [n, 2] seconds.
        amounts: [n]
    """

    def __init__(self, spans: NDArray[np.float64], amounts: NDArray[np.float64]) -> None:
        self._starts = spans[:, 0]
        # A width of nothing would be a rate of infinity.
        self._ends = np.maximum(spans[:, 1], spans[:, 0] + LEAST_WIDTH_S)
        self._rates = amounts / (self._ends - self._starts)
        edges = np.concatenate([self._starts, self._ends])
        order = np.argsort(edges, kind="stable")
        self._edges = edges[order]
        slopes = np.cumsum(np.concatenate([self._rates, -self._rates])[order])
        self._sums = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(self._edges))])

    def others(self, index: int, start_s: float, end_s: float) -> float:
        """Return the amount between two moments, without that of span `index`."""
        low, high = np.interp([start_s, end_s], self._edges, self._sums)
        own_s = min(end_s, self._ends[index]) - max(start_s, self._starts[index])
        return max(float(high - low - max(own_s, 0.0) * self._rates[index]), 0.0)


class _Load:
    """What all requests did to each other."""

    def __init__(self, moments: Sequence[Moments | None], tokens: Sequence[int]) -> None:
        prefill = [(m.slot_s, m.first_made_s) if m else (0.0, 0.0) for m in moments]
        decode = [(m.first_made_s, m.last_made_s) if m else (0.0, 0.0) for m in moments]
        known = [count if m else 0 for m, count in zip(moments, tokens, strict=True)]
        self._prefill = _Flow(np.array(prefill, np.float64), np.array(known, np.float64))
        spans = np.array(decode, np.float64)
        self._decode = _Flow(spans, spans[:, 1] - spans[:, 0])
        answers = [(i, start, end) for i, (start, end) in enumerate(decode) if end > start]
        found = [(self.company(*a), a[2] - a[1]) for a in answers]
        self.usual_tokens_per_s = _median(c.tokens / span_s for c, span_s in found) or 0.0
        """Prompt tokens of others in a second of an answer, median over the answers."""
        self.usual_streams = _median(company.streams for company, _ in found) or 0.0

    def company(self, index: int, start_s: float, end_s: float) -> Company:
        """Return what the server did for others than request `index` within a span."""
        if end_s <= start_s:
            return Company(0.0, 0.0)
        streamed_s = self._decode.others(index, start_s, end_s)
        return Company(self._prefill.others(index, start_s, end_s), streamed_s / (end_s - start_s))


def read_log(file: Path) -> tuple[list[LogLine], int]:
    """Return the lines of a request log, and how many could not be read.

    A full disk may have torn a line; the file may hold requests of other trials.
    """
    return read_records([file]) if file.exists() else ([], 0)


def join(records: Sequence[Record], lines: Iterable[LogLine]) -> tuple[ServerLog | None, str]:
    """Find each record's line and the distance of the clocks.

    Returns:
        The join, or None with the reason.
    """
    by_id = {key: line for line in lines for key in (line.request_id, line.http_request_id) if key}
    if not by_id:
        return None, "no request log"
    found = {r.index: by_id[r.request_id] for r in records if r.request_id in by_id}
    if not found:
        return None, (
            "the request log names none of the trial's requests: it must carry the client's "
            "X-Request-Id"
        )
    lows = [-math.inf]
    highs = [math.inf]
    for record in records:
        line = found.get(record.index)
        if line and record.is_ok:
            low, high = _offset_bounds(record, line)
            lows.append(low)
            highs.append(high)
    low, high = max(lows), min(highs)
    if not (math.isfinite(low) and math.isfinite(high)):
        return None, "no complete request is in the request log with all its stamps"
    if low > high:
        return None, (
            f"the request log's clock contradicts the client's by {(low - high) * 1e3:.1f} ms: "
            "do both run on one machine?"
        )
    return ServerLog(found, (low + high) / 2, (high - low) / 2), ""


def _offset_bounds(record: Record, line: LogLine) -> tuple[float, float]:
    """Return the least and the greatest distance that this request allows."""
    causes = (
        (record.dispatched_s, line.received_s),
        (record.sent_s, line.prompt_ready_s),
    )
    effects = (
        (record.first_token_s, line.first_token_s),
        (record.chunk_s[-1] if record.chunk_s else None, line.last_token_s),
    )
    lows = [server - client for client, server in effects if client is not None and server]
    highs = [server - client for client, server in causes if client is not None and server]
    return max(lows, default=-math.inf), min(highs, default=math.inf)


def dissect(
    records: Sequence[Record], log: ServerLog | None, server: Scrape | None = None
) -> Dissection:
    """Cut every request that ended into pieces.

    Args:
        records: Of one trial.
        log: The server's side, where there is one.
        server: The server's readings; its `waiting` tells queueing where no log does.
    """
    ended = [record for record in records if record.status != "cancelled"]
    moments = [_moments(record, log) for record in ended]
    tokens = [_prompt_tokens(record) for record in ended]
    pace_s = _pace_s(moments, tokens, server)
    tpot_s = _median(
        _decoded_s(m, log.lines.get(r.index) if log else None) / (_output_tokens(r) - 1)
        for r, m in zip(ended, moments, strict=True)
        if m and _output_tokens(r) > 1
    )
    if not ended:
        return Dissection(requests=(), pace_s=None, tpot_s=None, joined=0, error_s=None)
    cut = _Cut(pace_s, tpot_s, _Load(moments, tokens), server)
    requests = tuple(
        cut.anatomy(index, record, log.lines.get(record.index) if log else None, moment, token)
        for index, (record, moment, token) in enumerate(zip(ended, moments, tokens, strict=True))
    )
    return Dissection(
        requests=requests,
        pace_s=pace_s,
        tpot_s=tpot_s,
        joined=sum(request.line is not None for request in requests),
        error_s=log.error_s if log else None,
    )


def _decoded_s(m: Moments, line: LogLine | None) -> float:
    """Return the time of an answer; other prompts and preemptions taken out where that is told."""
    if line is None or line.phases is None or not m.is_logged:
        return m.last_made_s - m.first_made_s
    return line.phases.decode_s - line.decode_wait_s


def _prompt_tokens(record: Record) -> int:
    asked = record.planned_input_tokens if record.input_tokens is None else record.input_tokens
    return max(asked - (record.cached_tokens or 0), 0)


def _output_tokens(record: Record) -> int:
    return record.output_tokens or len(record.chunk_s)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _moments(record: Record, log: ServerLog | None) -> Moments | None:
    if not record.is_ok or record.first_token_s is None or record.finished_s is None:
        return None
    line = log.lines.get(record.index) if log else None
    inner = _logged(line, log.offset_s) if line and log else None
    first_read_s = record.first_token_s
    last_read_s = record.chunk_s[-1] if record.chunk_s else first_read_s
    dispatched_s = record.dispatched_s or record.scheduled_s
    sent_s = record.sent_s or dispatched_s
    received_s, submitted_s, slot_s, first_made_s, last_made_s = inner or (
        *(sent_s, sent_s, sent_s),
        *(first_read_s, last_read_s),
    )
    # Stamps of two clocks may cross by the join's error: no moment may go back, none pass its end.
    so_far = itertools.accumulate(
        (record.scheduled_s, dispatched_s, received_s, submitted_s, slot_s, first_made_s), max
    )
    scheduled_s, dispatched_s, sent_s, submitted_s, slot_s, first_made_s = (
        min(moment, first_read_s) for moment in so_far
    )
    return Moments(
        scheduled_s=scheduled_s,
        dispatched_s=dispatched_s,
        sent_s=sent_s,
        submitted_s=submitted_s,
        slot_s=slot_s,
        first_made_s=first_made_s,
        first_read_s=first_read_s,
        last_made_s=min(max(last_made_s, first_made_s), last_read_s),
        finished_s=max(record.finished_s, last_read_s),
        is_logged=inner is not None,
    )


def _logged(line: LogLine, offset_s: float) -> tuple[float, float, float, float, float] | None:
    stamps = (
        line.received_s,
        line.submitted_s,
        line.scheduled_s,
        line.first_token_s,
        line.last_token_s,
    )
    known = [stamp - offset_s for stamp in stamps if stamp is not None]
    return (known[0], known[1], known[2], known[3], known[4]) if len(known) == 5 else None


def _pace_s(
    moments: Sequence[Moments | None], tokens: Sequence[int], server: Scrape | None
) -> float | None:
    """Return the seconds of one prompt token at the trial's fastest, from its longer prompts.

    Short prompts cost a whole step whatever their length, so they would tell too slow a pace; so
    would those that queued, where no log takes the queue out. Where all queued, the single fastest
    one comes nearest.
    """
    known = [(m, t) for m, t in zip(moments, tokens, strict=True) if m and t]
    if len(known) < FEWEST_FOR_PACE:
        return None
    middle = statistics.median(t for _, t in known)
    longer = [(m, t) for m, t in known if t >= middle]
    alone = [(m, t) for m, t in longer if m.is_logged or not _queued_share(server, m)]
    percent = PACE_PERCENT if len(alone) >= FEWEST_FOR_PACE else 0
    paces = sorted((m.first_made_s - m.slot_s) / t for m, t in (alone if percent else longer))
    return percentile(paces, percent)


def _queued_share(server: Scrape | None, m: Moments) -> float:
    """Return the share of readings within a wait that saw somebody wait for a slot."""
    waiting = readings(server, "waiting", m.sent_s, m.first_made_s)
    return sum(value >= 1 for value in waiting) / len(waiting) if waiting else 0.0


@dataclass
class _Cut:
    """Cuts requests with the trial's own figures."""

    pace_s: float | None
    tpot_s: float | None
    load: _Load
    server: Scrape | None

    def anatomy(
        self,
        index: int,
        record: Record,
        line: LogLine | None,
        moments: Moments | None,
        tokens: int,
    ) -> Anatomy:
        if moments is None:
            cause = "failed" if record.is_failure else "unknown"
            took_s = (record.finished_s or record.scheduled_s) - record.scheduled_s
            pieces = {cause: max(took_s, 0.0)}
            return Anatomy(
                record=record,
                line=line,
                moments=None,
                ttft=pieces if record.is_failure else {},
                e2e=pieces,
                prompt_tokens=tokens,
            )
        waiting = self.load.company(index, moments.slot_s, moments.first_made_s)
        answering = self.load.company(index, moments.first_made_s, moments.last_made_s)
        output_tokens = _output_tokens(record)
        if line is not None and moments.is_logged and line.phases and line.ttft_phases:
            before = _told_before(moments, line.ttft_phases)
            after = self._told_after(moments, output_tokens, answering, line)
        else:
            stalls_s = self._stalls_s(record, line.preemptions if line else 0)
            is_preempted_before = bool(line and line.preemptions > len(stalls_s))
            before = self._before(moments, tokens, waiting, is_preempted_before)
            after = self._after(moments, output_tokens, answering, stalls_s)
        ttft = _sum(before, {"emission": moments.first_read_s - moments.first_made_s})
        last = {"emission": moments.finished_s - moments.last_made_s}
        return Anatomy(
            record=record,
            line=line,
            moments=moments,
            ttft=_positive(ttft),
            e2e=_positive(_sum(before, after, last)),
            prompt_tokens=tokens,
            waiting=waiting,
            answering=answering,
        )

    def _before(
        self, m: Moments, tokens: int, company: Company, is_preempted: bool
    ) -> dict[str, float]:
        """Cut the time to the first token made."""
        pieces = {
            "client": m.dispatched_s - m.scheduled_s,
            "network": m.sent_s - m.dispatched_s,
            "ingest": m.submitted_s - m.sent_s,
            "queue": m.slot_s - m.submitted_s,
        }
        left_s = m.first_made_s - m.slot_s
        if self.pace_s is None:
            return pieces | {"unknown": left_s}
        pieces["own_prefill"] = min(left_s, self.pace_s * tokens)
        left_s -= pieces["own_prefill"]
        if not m.is_logged:
            pieces["queue"] = left_s * _queued_share(self.server, m)
            left_s -= pieces["queue"]
        pieces["others_prefill"] = min(left_s, self.pace_s * company.tokens)
        left_s -= pieces["others_prefill"]
        rest = "preemption" if is_preempted else _rest(company.streams >= 1)
        return _sum(pieces, {rest: left_s})

    def _after(
        self, m: Moments, tokens: int, company: Company, stalls_s: Sequence[float]
    ) -> dict[str, float]:
        """Cut the time from the first token made to the last."""
        span_s = m.last_made_s - m.first_made_s
        if self.tpot_s is None:
            return {"unknown": span_s}
        # A gap is seen, the usual pace is inferred: what is seen goes first.
        stalled_s = min(span_s, sum(stalls_s) - self.tpot_s * len(stalls_s))
        own_s = min(span_s - stalled_s, self.tpot_s * max(tokens - 1, 0))
        pieces = {"preemption": stalled_s, "own_decode": own_s}
        left_s = span_s - stalled_s - own_s
        extra = company.tokens - self.load.usual_tokens_per_s * span_s
        pieces["others_prefill"] = min(left_s, (self.pace_s or 0.0) * max(extra, 0.0))
        left_s -= pieces["others_prefill"]
        is_crowded = company.streams > self.load.usual_streams
        return _sum(pieces, {_rest(is_crowded): left_s})

    def _told_after(
        self, m: Moments, tokens: int, company: Company, line: LogLine
    ) -> dict[str, float]:
        """Cut the time from the first token made to the last, as the log tells it."""
        left_s = m.last_made_s - m.first_made_s
        phases, first = line.phases, line.ttft_phases
        if phases is None or first is None:
            return {"unknown": left_s}
        pieces: dict[str, float] = {}
        for cause, seconds in (
            ("preemption", phases.preempted_s - first.preempted_s),
            ("others_prefill", line.decode_wait_s),
            ("own_decode", (self.tpot_s or 0.0) * max(tokens - 1, 0)),
        ):
            pieces[cause] = min(left_s, max(seconds, 0.0))
            left_s -= pieces[cause]
        is_crowded = company.streams > self.load.usual_streams
        return _sum(pieces, {_rest(is_crowded): left_s})

    def _stalls_s(self, record: Record, preemptions: int) -> list[float]:
        """Return the longest gaps of a stream, as many as it was preempted.

        A gap that is no longer than usual shows none: that preemption came before the first token.
        """
        least_s = STALL_FACTOR * (self.tpot_s or 0.0)
        longest = sorted(gaps_s(record), reverse=True)[:preemptions]
        return [gap for gap in longest if gap >= least_s]


def _told_before(m: Moments, phases: Phases) -> dict[str, float]:
    """Cut the time to the first token made, as the log tells it."""
    admission_s = min(phases.admission_s, m.submitted_s - m.sent_s)
    pieces = {
        "client": m.dispatched_s - m.scheduled_s,
        "network": m.sent_s - m.dispatched_s,
        "ingest": m.submitted_s - m.sent_s - admission_s,
        "queue": m.slot_s - m.submitted_s + admission_s,
    }
    left_s = m.first_made_s - m.slot_s
    for cause, seconds in (
        ("own_prefill", phases.prefill_s),
        ("others_prefill", phases.prefill_wait_s),
        ("preemption", phases.preempted_s),
    ):
        pieces[cause] = min(left_s, seconds)
        left_s -= pieces[cause]
    # The log's stamp is the front end's: the rest is the way there from the engine.
    return _sum(pieces, {"emission": left_s})


def _rest(is_crowded: bool) -> str:
    return "batch" if is_crowded else "unknown"


def _sum(*pieces: dict[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for piece in pieces:
        for cause, seconds in piece.items():
            total[cause] = total.get(cause, 0.0) + seconds
    return total


def _positive(pieces: dict[str, float]) -> dict[str, float]:
    return {cause: pieces[cause] for cause in CAUSES if pieces.get(cause, 0.0) > DUST_S}


def readings(scrape: Scrape | None, name: str, start_s: float, end_s: float) -> list[float]:
    """Return what was read within a span, or just before it where nothing was read within."""
    if scrape is None or name not in scrape.values:
        return []
    known = [
        (at_s, value)
        for at_s, value in zip(scrape.at_s, scrape.values[name], strict=True)
        if start_s - READING_AGE_S <= at_s <= end_s and not math.isnan(value)
    ]
    within = [value for at_s, value in known if at_s >= start_s]
    return within or [value for _, value in known[-1:]]
