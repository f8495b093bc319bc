"""Whether a run may be believed; each reason says what was seen, the bound and the remedy.

A reason makes the run INVALID: its figures are about the client or about other work than was
asked for. A caution leaves it valid, and tells the reader what to keep in mind.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailrace.bench.scrape import Scrape
from tailrace.bench.stats import distribution, lag_s, percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tailrace.bench.records import Record
    from tailrace.bench.stats import Stats

WRONG_LENGTH_SHARE = 0.01
"""Requests whose prompt or output length may differ from the plan, or be unknown."""
REFUSED_SHARE = 0.01
"""Requests that the server may turn away as wrong ones."""
OVERLOADED = frozenset({408, 425, 429})
"""Statuses of 400 to 499 that do not say that the request is a wrong one."""
OWN_ENDS = frozenset({"stop", "length", None})
"""Finish reasons of an answer that ended by itself; all others, "abort" say, are a server's ends
of what it could not go on with, for want of room or by a fault of its own."""
MOST_TEXT = 200
"""Characters of a server's own words in a reason."""
MERGED_TOKENS = 1.2
"""Tokens a chunk from which on the gaps between chunks are not those between tokens."""
CACHED_SHARE = 0.01
"""Prompt tokens that the server may have had cached beyond what was planned to be shared."""
STEAL_CAUTION_SHARE = 0.05
"""CPU time that the hypervisor may have taken away before a caution is due."""
STEAL_SHARE = 0.1
"""And before the run is invalid: a tenth of the time, nobody here was measured."""
OTHERS_SHARE = 0.1
"""CPU time of this machine that programs other than client and server may use."""
FEW = "P99 of a request's latency is simply the slowest of them"
"""What a caution says of a run of few requests."""
HELD_BACK_SHARE = 0.1
"""Readings in which power or heat may hold a GPU's clocks back before a caution is due."""
SLOW_GOVERNORS = frozenset({"powersave", "ondemand", "conservative", "schedutil"})
"""Linux's CPU frequency governors that let an idle CPU slow down."""


@dataclass(frozen=True)
class Verdict:
    """Why a run is invalid, and what to keep in mind where it is not."""

    reasons: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether nothing speaks against the run."""
        return not self.reasons

    def also(self, *reasons: str) -> Verdict:
        """Return the verdict with further reasons; empty ones say nothing."""
        return Verdict((*self.reasons, *filter(None, reasons)), self.cautions)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the client saw of itself, beside the records."""

    loop_lags_s: Sequence[float]
    steal_share: float | None
    is_interrupted: bool
    planned_requests: int
    client_faults: Sequence[str] = ()
    """Client processes that died, in words."""
    shared_tokens: Mapping[int, int] = field(default_factory=dict)
    """By a request's index: the prompt tokens that a prefix cache may rightly have."""
    user_requests: Mapping[int, int] = field(default_factory=dict)
    """Closed loop: by user, how many requests were prepared for it."""
    longest_think_s: float = 0.0
    arrivals_s: float = math.inf
    """Closed loop: nothing that is due later is sent."""
    server: Scrape = field(default_factory=Scrape)
    """The server's own counters over the run."""
    gpu: Scrape = field(default_factory=Scrape)
    """What the machine's GPUs told over the run."""
    others_share: float | None = None
    """CPU time of this machine that went neither to the client nor to the server; None: unknown."""
    governor: str = ""
    """Of the client's CPU frequency; empty where the system does not tell."""
    monitor_fault: str = ""
    """Why the monitor ended before the run did."""


def judge(
    records: Sequence[Record], stats: Stats, observed: Observed, *, max_lag_s: float
) -> Verdict:
    """Return the verdict on a run."""
    reasons = [
        _interrupted(records, observed),
        _late("p99 dispatch lag", _worst_dispatch(records), max_lag_s),
        _late("p99 event-loop lag", _p99(observed.loop_lags_s), max_lag_s),
        _stolen(observed.steal_share),
        _dead(observed.client_faults),
        _own_limits(records),
        _refused(records),
        _wrong_inputs(records),
        _wrong_outputs(records),
        _cached(records, observed),
    ]
    cautions = [
        _few(stats),
        _some_stolen(observed.steal_share),
        _cache_unknown(records, observed),
        _idle_users(records, observed),
        _merged(records),
        _blind(observed.monitor_fault),
        _not_alone(observed.others_share),
        _slow_clock(observed.governor),
        *_held_back(observed.gpu),
    ]
    return Verdict(tuple(filter(None, reasons)), tuple(filter(None, cautions)))


def unresolved(contender: str, reasons: Sequence[str]) -> str:
    """Return the reason that a search which found no highest rate gives; empty where it did."""
    if not reasons:
        return ""
    return f"the search for the highest rate of {contender} did not resolve: {'; '.join(reasons)}"


def _p99(lags_s: Sequence[float]) -> float | None:
    return distribution("", "", lags_s).at(99)


def _worst_dispatch(records: Sequence[Record]) -> float | None:
    """Return the p99 dispatch lag of the client process that was latest."""
    lags: dict[int, list[float]] = {}
    for record in records:
        late_s = lag_s(record)
        if late_s is not None:
            lags.setdefault(record.worker, []).append(late_s)
    return max((percentile(sorted(one), 99) for one in lags.values()), default=None)


def _interrupted(records: Sequence[Record], observed: Observed) -> str:
    if not observed.is_interrupted:
        return ""
    return (
        f"interrupted: {_ended(records)} of {observed.planned_requests} requests ended; those in "
        "flight are left out, which flatters the figures"
    )


def _ended(records: Sequence[Record]) -> int:
    return sum(record.status != "cancelled" for record in records)


def _late(what: str, seen_s: float | None, bound_s: float) -> str:
    if seen_s is None or seen_s <= bound_s:
        return ""
    return (
        f"the client was late: {what} {seen_s * 1e3:.1f} ms, bound {bound_s * 1e3:g} ms; free the "
        "client's CPU, move it to another machine, or raise --max-lag"
    )


def _dead(faults: Sequence[str]) -> str:
    return f"the client is not whole: {'; '.join(faults)}" if faults else ""


def _own_limits(records: Sequence[Record]) -> str:
    own = [record for record in records if record.status == "client"]
    if not own:
        return ""
    return f"{len(own)} requests failed in the client itself, the first with: {own[0].error}"


def _refused(records: Sequence[Record]) -> str:
    """Too long a prompt, say: whoever refuses part of the work was not asked for as much."""
    refused = [
        record
        for record in records
        if record.status in {"http", "stream"}
        and 400 <= (record.http_status or 0) < 500
        and record.http_status not in OVERLOADED
    ]
    ended = _ended(records)
    if len(refused) <= REFUSED_SHARE * ended:
        return ""
    return (
        f"{len(refused)} of {ended} requests were refused as wrong ones, not for want of room "
        f"(bound {REFUSED_SHARE:.0%}), the first with: {(refused[0].error or '')[:MOST_TEXT]}"
    )


def _wrong_inputs(records: Sequence[Record]) -> str:
    known = [r for r in records if r.is_ok]
    wrong = sum(r.input_tokens not in {None, r.planned_input_tokens} for r in known)
    unknown = sum(r.input_tokens is None for r in known)
    return _lengths("prompt", wrong, unknown, _ended(records))


def _wrong_outputs(records: Sequence[Record]) -> str:
    """Too short an answer counts where the model ended it; one cut off is the server's failure."""
    short = sum(r.status == "short" and r.finish_reason in OWN_ENDS for r in records)
    known = [r for r in records if r.is_ok]
    wrong = sum(r.output_tokens not in {None, r.planned_output_tokens} for r in known)
    unknown = sum(r.output_tokens is None for r in known)
    reason = _lengths("output", wrong + short, unknown, _ended(records))
    if not reason or not short:
        return reason
    return (
        f"{reason}; {short} ended early, which leaves the server less to do: does it heed "
        "`ignore_eos`, and does its context hold the longest request?"
    )


def _lengths(what: str, wrong: int, unknown: int, ended: int) -> str:
    if wrong + unknown <= WRONG_LENGTH_SHARE * ended:
        return ""
    return (
        f"{what} lengths: {wrong} of {ended} requests differ from the plan by the server's usage, "
        f"{unknown} carry no usage; bound {WRONG_LENGTH_SHARE:.0%}"
    )


def _cached(records: Sequence[Record], observed: Observed) -> str:
    asked = _asked(records)
    beyond = _cached_beyond_plan(records, observed)
    if beyond is None or beyond <= CACHED_SHARE * asked:
        return ""
    return (
        f"the server had {beyond:.0f} of {asked} prompt tokens cached beyond what the traffic "
        f"shares by plan (bound {CACHED_SHARE:.0%}): was this seed replayed before? Restart the "
        "server or change --seed"
    )


def _cache_unknown(records: Sequence[Record], observed: Observed) -> str:
    if not _asked(records) or _cached_beyond_plan(records, observed) is not None:
        return ""
    return (
        "whether a prefix cache helped by accident could not be checked: the server reports "
        "cached tokens neither in its usage nor in its metrics"
    )


def _asked(records: Sequence[Record]) -> int:
    return sum(r.input_tokens or 0 for r in records if r.is_ok)


def _cached_beyond_plan(records: Sequence[Record], observed: Observed) -> float | None:
    """Return the prompt tokens cached by accident, by the usage or else by the server's counters.

    None where neither is told.
    """
    told = [r for r in records if r.is_ok and r.cached_tokens is not None]
    plan = observed.shared_tokens
    if told:
        return sum(max((r.cached_tokens or 0) - plan.get(r.index, 0), 0) for r in told)
    share = hit_share(observed.server)
    if share is None:
        return None
    planned = sum(plan.get(r.index, 0) for r in records if r.is_ok)
    return max(share * _asked(records) - planned, 0.0)


def hit_share(server: Scrape) -> float | None:
    """Return the share of prefix look-ups that hit over a run, or None where none were counted."""
    hits, queries = (_grown(server, f"prefix_{what}_total") for what in ("hits", "queries"))
    return None if hits is None or not queries else hits / queries


def _grown(server: Scrape, counter: str) -> float | None:
    """Return by how much a counter grew between its first reading and its last."""
    known = [value for value in server.values.get(counter, ()) if not math.isnan(value)]
    return known[-1] - known[0] if len(known) > 1 else None


def _idle_users(records: Sequence[Record], observed: Observed) -> str:
    ended_s: dict[int, list[float]] = {}
    for record in records:
        if record.user is not None:
            ended_s.setdefault(record.user, []).append(record.finished_s or math.inf)
    # One that had more to send, or could not have sent more in time, was at it to the end.
    latest_s = observed.arrivals_s - observed.longest_think_s
    idle = sum(
        len(ended_s.get(user, ())) == count and max(ended_s[user]) < latest_s
        for user, count in observed.user_requests.items()
    )
    if not idle:
        return ""
    return (
        f"{idle} of {len(observed.user_requests)} users sent all that was prepared for them and "
        "then idled: fewer users than said were active at the end; prepare more requests"
    )


def _merged(records: Sequence[Record]) -> str:
    known = [r for r in records if r.is_ok and r.output_tokens and r.chunk_s]
    tokens = sum(r.output_tokens or 0 for r in known)
    chunks = sum(len(r.chunk_s) for r in known)
    if tokens < MERGED_TOKENS * chunks or not chunks:
        return ""
    return (
        f"the server sent {tokens / chunks:.1f} tokens a chunk: inter-token times are those of "
        "chunks, fewer and longer than those of tokens; compare time per output token with "
        "servers that send each token by itself"
    )


def _blind(fault: str) -> str:
    return f"the monitor broke off before the run's end ({fault})" if fault else ""


def _not_alone(share: float | None) -> str:
    if share is None or share <= OTHERS_SHARE:
        return ""
    return (
        f"{share:.0%} of this machine's CPU time went to programs that are neither the server nor "
        "the client: whatever ran on these cores was slower for it; measure on a quiet machine"
    )


def _slow_clock(governor: str) -> str:
    if governor not in SLOW_GOVERNORS:
        return ""
    return (
        f"the client's CPU governor is {governor}: it lowers the clock between requests, which can "
        "nearly double what the client adds to first tokens; set it to performance"
    )


def _held_back(gpu: Scrape) -> list[str]:
    """Return a caution for each GPU whose clocks were lowered for a good part of the run."""
    told = []
    for name, readings in gpu.values.items():
        device, _, what = name.partition("_")
        known = [value for value in readings if not math.isnan(value)]
        share = sum(known) / len(known) if known else 0.0
        if what != "held_back" or share <= HELD_BACK_SHARE:
            continue
        clocks = [c for c in gpu.values.get(f"{device}_sm_clock_mhz", ()) if not math.isnan(c)]
        at = f", to {statistics.median(clocks):,.0f} MHz at the median" if clocks else ""
        told.append(
            f"GPU {device.removeprefix('gpu')} lowered its clocks for power or heat in {share:.0%} "
            f"of the readings{at}: rates hold for this board's power limit and cooling"
        )
    return told


def _few(stats: Stats) -> str:
    ended = stats.requests - stats.cancelled
    if not 0 < ended < 100:
        return ""
    return f"{ended} requests: {FEW}"


def _some_stolen(share: float | None) -> str:
    if share is None or not STEAL_CAUTION_SHARE < share <= STEAL_SHARE:
        return ""
    return f"{share:.1%} of CPU time was stolen by other machines on this host"


def _stolen(share: float | None) -> str:
    if share is None or share <= STEAL_SHARE:
        return ""
    return (
        f"{share:.1%} of CPU time was stolen by other machines on this host, bound "
        f"{STEAL_SHARE:.0%}; measure at a calmer time or on a machine of your own"
    )
