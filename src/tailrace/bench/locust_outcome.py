"""What a Locust run came to: figures from the records, the verdict, the exit status."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from tailrace.bench.locust_options import limits_of
from tailrace.bench.machine import CpuTimes, cpu_times, describe, steal_share
from tailrace.bench.run import Run
from tailrace.bench.stats import Limits, Stats, percentile, summarise
from tailrace.bench.validity import Observed, judge

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from tailrace.bench.locust_plan import Plan
    from tailrace.bench.records import Record

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INVALID = 3


class ClientState(msgspec.Struct):
    """What a client process knows of itself at its end."""

    lags_s: list[float]
    requests: int
    is_done: bool


@dataclass(frozen=True)
class Clients:
    """All client processes of a run."""

    ended: Sequence[ClientState]
    processes: int
    """How many there were; those that are not among `ended` died."""
    driver: str
    cpu_before: CpuTimes | None

    @property
    def lags_s(self) -> list[float]:
        """Event-loop lags of the latest process: eight calm ones must not hide it."""
        every = (client.lags_s for client in self.ended)
        return max(every, key=lambda lags_s: percentile(sorted(lags_s) or [0.0], 99), default=[])


def judged(plan: Plan, options: Namespace, records: Sequence[Record], clients: Clients) -> Run:
    """Return the run's figures and whether they may be believed."""
    stats = summarise(records)
    is_whole = all(client.is_done for client in clients.ended) and not stats.cancelled
    missing = clients.processes - len(clients.ended)
    observed = Observed(
        loop_lags_s=clients.lags_s,
        steal_share=steal_share(clients.cpu_before, cpu_times()),
        is_interrupted=plan.loop == "open" and not is_whole,
        planned_requests=plan.requests,
        shared_tokens=plan.shared_tokens,
        client_faults=(f"{missing} worker processes did not end in order",) if missing else (),
    )
    verdict = judge(records, stats, observed, max_lag_s=options.max_lag_s)
    return Run(
        title="Locust",
        conditions=_conditions(plan, options, clients),
        records=records,
        stats=stats,
        verdict=replace(verdict, cautions=verdict.cautions + _cut_off(plan, stats)),
        limits=Limits(),
        duration_s=plan.duration_s if plan.loop == "open" and is_whole else _last_s(records),
        limit=limits_of(options),
    )


def _conditions(plan: Plan, options: Namespace, clients: Clients) -> dict[str, str]:
    return {
        "Server": plan.url + (f" (server version {plan.version})" if plan.version else ""),
        "Model": plan.model,
        "Driver": f"{clients.driver}, {plan.loop} loop",
        "Client processes": str(clients.processes),
        "Traffic": plan.traffic,
        "Prompts": plan.prompts,
        "Time limit": f"{options.request_timeout_s:g} s a request, from when it was due",
        "Client lag bound": f"{options.max_lag_s * 1e3:g} ms at p99",
    } | describe()


def _last_s(records: Sequence[Record]) -> float:
    return max((record.scheduled_s for record in records), default=0.0)


def _cut_off(plan: Plan, stats: Stats) -> tuple[str, ...]:
    if plan.loop == "open" or not stats.cancelled:
        return ()
    return (
        (
            f"{stats.cancelled} answers were cut off at the end and are left out, long ones rather "
            "than short ones; give --stop-timeout so that Locust waits for them"
        ),
    )


def exit_code(run: Run, max_failures: float) -> int:
    """Return Locust's exit status; `max_failures` is the share of requests that may fail."""
    if not run.verdict.is_valid:
        return EXIT_INVALID
    ended = run.stats.requests - run.stats.cancelled
    has_failed = run.stats.failed > max_failures * ended or not ended
    return EXIT_FAILED if has_failed or not all(run.held.values()) else EXIT_OK
