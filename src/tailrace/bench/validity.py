"""Whether a run may be believed; each reason says what was seen, the bound and the remedy.

A reason makes the run INVALID: its figures are about the client or about other work than was
asked for. A caution leaves it valid, and tells the reader what to keep in mind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.stats import distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.records import Record
    from tailrace.bench.stats import Stats

WRONG_LENGTH_SHARE = 0.01
"""Requests whose prompt or output length may differ from the plan, or be unknown."""
CACHED_SHARE = 0.01
"""Prompt tokens that the server may have had cached; prompts are salted, so expect none."""
STEAL_SHARE = 0.05
"""CPU time that the hypervisor may have taken away before a caution is due."""


@dataclass(frozen=True)
class Verdict:
    """Why a run is invalid, and what to keep in mind where it is not."""

    reasons: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether nothing speaks against the run."""
        return not self.reasons


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the client saw of itself, beside the records."""

    loop_lags_s: Sequence[float]
    steal_share: float | None
    is_interrupted: bool
    planned_requests: int


def judge(
    records: Sequence[Record], stats: Stats, observed: Observed, *, max_lag_s: float
) -> Verdict:
    """Return the verdict on a run."""
    reasons = [
        _interrupted(records, observed),
        _late("p99 dispatch lag", stats.lag.at(99), max_lag_s),
        _late("p99 event-loop lag", _p99(observed.loop_lags_s), max_lag_s),
        _own_limits(stats),
        _wrong_inputs(records),
        _wrong_outputs(records),
        _cached(records),
    ]
    cautions = [_few(stats), _steal(observed.steal_share)]
    return Verdict(tuple(filter(None, reasons)), tuple(filter(None, cautions)))


def _p99(lags_s: Sequence[float]) -> float | None:
    return distribution("", "", lags_s).at(99)


def _interrupted(records: Sequence[Record], observed: Observed) -> str:
    if not observed.is_interrupted:
        return ""
    ended = sum(record.status != "cancelled" for record in records)
    return (
        f"interrupted: {ended} of {observed.planned_requests} requests ended; those in flight are "
        "left out, which flatters the figures"
    )


def _late(what: str, seen_s: float | None, bound_s: float) -> str:
    if seen_s is None or seen_s <= bound_s:
        return ""
    return (
        f"the client was late: {what} {seen_s * 1e3:.1f} ms, bound {bound_s * 1e3:g} ms; free the "
        "client's CPU, move it to another machine, or raise --max-lag"
    )


def _own_limits(stats: Stats) -> str:
    count = stats.failures.get("client", 0)
    return f"{count} requests failed for want of sockets or files in the client" if count else ""


def _wrong_inputs(records: Sequence[Record]) -> str:
    known = [r for r in records if r.is_ok]
    wrong = sum(r.input_tokens not in {None, r.planned_input_tokens} for r in known)
    return _lengths("prompt", wrong, sum(r.input_tokens is None for r in known), len(known))


def _wrong_outputs(records: Sequence[Record]) -> str:
    known = [r for r in records if r.is_ok]
    wrong = sum(r.output_tokens not in {None, r.planned_output_tokens} for r in known)
    return _lengths("output", wrong, sum(r.output_tokens is None for r in known), len(known))


def _lengths(what: str, wrong: int, unknown: int, total: int) -> str:
    if wrong + unknown <= WRONG_LENGTH_SHARE * total:
        return ""
    return (
        f"{what} lengths: {wrong} of {total} answers differ from the plan by the server's usage, "
        f"{unknown} carry no usage; bound {WRONG_LENGTH_SHARE:.0%}"
    )


def _cached(records: Sequence[Record]) -> str:
    asked = sum(r.input_tokens or 0 for r in records if r.is_ok)
    cached = sum(r.cached_tokens or 0 for r in records if r.is_ok)
    if cached <= CACHED_SHARE * asked:
        return ""
    return (
        f"the server had {cached} of {asked} prompt tokens cached (bound {CACHED_SHARE:.0%}): "
        "was this seed replayed before? Restart the server or change --seed"
    )


def _few(stats: Stats) -> str:
    ended = stats.requests - stats.cancelled
    if not 0 < ended < 100:
        return ""
    return f"{ended} requests: P99 of a request's latency is simply the slowest of them"


def _steal(share: float | None) -> str:
    if share is None or share <= STEAL_SHARE:
        return ""
    return f"{share:.1%} of CPU time was stolen by other machines on this host"
