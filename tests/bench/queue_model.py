"""Queues in virtual time: the truth that the search and the intervals are held against.

A request waits for one of k servers, first come, first served, and is served for its own time;
its latency is counted from its arrival, as the client does. No clock, no sleep: a trial of some
hundred requests is a few numpy calls.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tailrace.bench.search import ProbeResult, draw_of
from tailrace.bench.wilson import BATCH_REQUESTS, BATCHES, Tally

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def latencies_s(arrivals_s: Floats, services_s: Floats, *, servers: int = 1) -> Floats:
    """Return each request's time from arrival to end, first come, first served.

    Args:
        arrivals_s: Of one trial; where there is one server, of several too, a row each.
        services_s: How long each is served for.
        servers: How many serve at once.
    """
    if servers == 1:
        # Lindley: a request ends at the busy work so far, counted from the idle moment that
        # keeps it latest.
        work_s = np.cumsum(services_s, axis=-1)
        before_s = work_s - services_s
        return work_s + np.maximum.accumulate(arrivals_s - before_s, axis=-1) - arrivals_s
    free_s = [0.0] * servers
    found = np.empty_like(arrivals_s)
    for index, (arrival_s, service_s) in enumerate(zip(arrivals_s, services_s, strict=True)):
        end_s = max(heapq.heappop(free_s), arrival_s) + service_s
        heapq.heappush(free_s, end_s)
        found[index] = end_s - arrival_s
    return found


@dataclass(frozen=True)
class Queue:
    """A server with exponential service times: M/M/1 under Poisson arrivals."""

    service_rps: float
    """Requests/s that one always busy server ends."""

    def draw(self, rate_rps: float, requests: int, seed: int, noise: int = 0) -> Floats:
        """Return the latencies of one trial that starts empty.

        Args:
            rate_rps: Offered.
            requests: How many.
            seed: Of arrivals and of the work that each request asks for.
            noise: Of the server itself, where it is not 0: it then serves at its own whim.
        """
        random = np.random.default_rng(seed)
        arrivals_s = np.cumsum(random.exponential(1 / rate_rps, requests))
        work = random.exponential(1.0, requests)
        if noise:
            work = np.random.default_rng([seed, noise]).exponential(1.0, requests)
        return latencies_s(arrivals_s, work / self.service_rps)

    def highest_rps(self, bound_s: float, allowed_share: float) -> float:
        """Return the exact highest rate in the long run: time in M/M/1 is exponential."""
        return self.service_rps + math.log(allowed_share) / bound_s


def tally(values_s: Floats, bound_s: float) -> Tally:
    """Count a trial's latencies in batches, as wilson.tally_of does (and much faster)."""
    batches = max(min(BATCHES, len(values_s) // BATCH_REQUESTS), 1)
    edges = np.arange(batches + 1) * len(values_s) // batches
    slow = np.add.reduceat(values_s > bound_s, edges[:-1], dtype=np.int64)
    return Tally(tuple(zip(slow.tolist(), np.diff(edges).tolist(), strict=True)), len(values_s))


def probe_of(
    queue: Queue, bound_s: float, requests: int, *, noise: int = 0, shares_draws: bool = True
) -> Callable[[float, int], Awaitable[ProbeResult]]:
    """Return a probe of `requests` a trial that answers from the model."""

    async def probe(rate_rps: float, seed: int) -> ProbeResult:
        draw = draw_of(seed) if shares_draws else seed
        values_s = queue.draw(rate_rps, requests, draw, noise and noise + seed)
        return ProbeResult((tally(values_s, bound_s),))

    return probe


def run(search):
    """Run a coroutine that never waits, without an event loop."""
    try:
        search.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the search waited for something")


def true_rps(
    queue: Queue, bound_s: float, allowed_share: float, requests: int, *, trials: int = 4000
) -> float:
    """Return where the EXPECTED share of slow requests of such a trial is the allowed one.

    Numerical, by bisection over the same `trials` draws: trials start empty, so a short one
    holds a little more than the long run (`highest_rps`).
    """
    low, high = 0.1 * queue.service_rps, 2.0 * queue.service_rps
    drawn = [np.random.default_rng(seed).exponential(1.0, (2, requests)) for seed in range(trials)]
    gaps, work = np.stack(drawn, axis=1)
    ends, services_s = np.cumsum(gaps, axis=1), work / queue.service_rps
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        share = np.mean(latencies_s(ends / middle, services_s) > bound_s)
        low, high = (middle, high) if share <= allowed_share else (low, middle)
    return math.sqrt(low * high)
