"""The slow tail of each contender at the load that the pictures show.

Each valid trial at that load is explained by itself; shares are then averaged over all slow
requests of all of them. The sentences are those of one trial, the one in the time lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.anatomy import CAUSES
from tailrace.bench.root_cause import RootCause, Tail, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.report.findings import Load, PlatformFindings, TrialRow


@dataclass(frozen=True, kw_only=True)
class SlowTail:
    """Why one contender's slowest requests were slow."""

    platform: str
    contender: str
    load: Load
    shares: dict[str, dict[str, float]]
    """By latency ("ttft", "e2e"), then by cause (root_cause.CAUSES); they sum to 1."""
    slow: dict[str, int]
    """Slow requests behind the shares, by latency."""
    shown: RootCause
    """The explanation of the trial that the time lines show."""
    trial: str
    """That trial's folder."""


def explain_tails(
    platform: PlatformFindings, load: Load, shown: dict[str, TrialRow]
) -> list[SlowTail]:
    """Return the slow tail of every contender at a load.

    Args:
        platform: What was measured.
        load: The load that the pictures show.
        shown: By contender, the trial that the time lines show.

    Raises:
        ConfigError: A trial's files cannot be read.
    """
    found = []
    for contender, row in shown.items():
        trials = [other.trial for other in platform.samples[contender, load].rows]
        causes = {trial.folder: explain(platform.folder, trial) for trial in trials}
        tails = [tail for cause in causes.values() for tail in cause.tails]
        by_metric = {m: [tail for tail in tails if tail.metric == m] for m in ("ttft", "e2e")}
        found.append(
            SlowTail(
                platform=platform.name,
                contender=contender,
                load=load,
                shares={metric: _shares(tails) for metric, tails in by_metric.items()},
                slow={m: sum(len(t.requests) for t in tails) for m, tails in by_metric.items()},
                shown=causes[row.trial.folder],
                trial=row.trial.folder,
            )
        )
    return found


def _shares(tails: Sequence[Tail]) -> dict[str, float]:
    requests = [request for tail in tails for request in tail.requests]
    if not requests:
        return {}
    means = {
        key: math.fsum(request.shares.get(key, 0.0) for request in requests) / len(requests)
        for key in CAUSES
    }
    return {key: share for key, share in means.items() if share > 0}
