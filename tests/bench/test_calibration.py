"""The harness against a server whose every latency is known: real sockets, real time.

The server is a scripted queue in a process of its own; the same queue in virtual time
(`queue_model`) says what each request, each search and each ratio must come to. What is stated:

- P50, P95 and P99 of all four metrics within ERROR_S of the truth, where the run is valid;
- the highest rate within RATE_ERROR of the one found in virtual time on the same requests;
- the known ratio of two servers inside the interval of six pairs;
- a client whose event loop is blocked is called invalid, for that reason.

A machine too busy to be believed makes these runs invalid; then they are skipped, with the reason
that the harness itself gives.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tailrace.bench.limits import read_limit
from tailrace.bench.prompts import Prompt
from tailrace.bench.ratio import ratio_of
from tailrace.bench.search import (
    ProbeResult,
    SearchOptions,
    draw_of,
    find_max_rate,
    probe_result,
)
from tailrace.bench.stats import percentile
from tailrace.bench.target import Target
from tailrace.bench.traffic.schedule import Arrival, Schedule
from tailrace.bench.trial import Server, TrialOptions, Work, run_trial
from tailrace.bench.wire import fetch, resolve
from tests.bench.queue_model import latencies_s, run, tally
from tests.bench.scripted_queue import Script, serving, speed_of

if TYPE_CHECKING:
    from tailrace.bench.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ERROR_S = 0.03
RATE_ERROR = 0.1
MAX_LAG_S = 0.1
FAST, SLOW = "mock@1.0", "mock@0.7"
SCRIPT = Script(slots=2, prefill_s=0.06, token_s=0.02)


def work_of(rate_rps: float, duration_s: float, seed: int) -> Work:
    """Return Poisson arrivals of 1 to 8 tokens, drawn alike for every rate."""
    random = np.random.default_rng(draw_of(seed))
    count = max(round(rate_rps * duration_s), 1)
    times_s = np.cumsum(random.exponential(1.0, count)) / rate_rps
    lengths = random.integers(1, 9, count)
    arrivals = tuple(
        Arrival(float(at_s), 3, int(tokens)) for at_s, tokens in zip(times_s, lengths, strict=True)
    )
    prompts = [Prompt("a b c", 3, 3)] * count
    return Work(Schedule(arrivals, "scripted", float(times_s[-1])), prompts, seed=seed)


def truth_of(work: Work, model: str) -> dict[str, list[float]]:
    """Return every latency of the work, from the script alone."""
    speed = speed_of(model)
    arrivals = work.schedule.arrivals
    services_s = np.array([SCRIPT.service_s(a.output_tokens, speed) for a in arrivals])
    times_s = np.array([a.arrival_s for a in arrivals])
    e2e_s = latencies_s(times_s, services_s, servers=SCRIPT.slots)
    gap_s = SCRIPT.token_s / speed
    return {
        "e2e": sorted(e2e_s),
        "ttft": sorted(e2e_s - services_s + SCRIPT.first_s(speed)),
        "tpot": [gap_s for a in arrivals if a.output_tokens > 1],
        "itl": [gap_s for a in arrivals for _ in range(a.output_tokens - 1)],
    }


async def measure(
    url: str, model: str, work: Work, folder, helper=None, max_lag_s: float = MAX_LAG_S
) -> Run:
    server = Server(await resolve(url), Target(model, None, ""))
    options = TrialOptions(max_lag_s=max_lag_s, timeout_s=60.0, processes=1)
    helping = asyncio.create_task(helper()) if helper else None
    try:
        return await run_trial(server, work, folder, options, stop=asyncio.Event())
    finally:
        if helping:
            helping.cancel()
            await asyncio.gather(helping, return_exceptions=True)


def measured(run_: Run) -> dict[str, tuple[float, ...]]:
    stats = run_.stats
    return {
        "e2e": stats.e2e.ordered,
        "ttft": stats.ttft.ordered,
        "tpot": stats.tpot.ordered,
        "itl": stats.gap.ordered,
    }


def test_percentiles_are_recovered(tmp_path):
    """The queue is at 80 % of its capacity: waits from nothing to several services."""
    work = work_of(11.4, 10.0, seed=7000)

    async def go(url):
        # The machine may be disturbed for a moment; a valid run is what the bound is about, of a
        # client and a server that were not later than it.
        for attempt in range(3):
            found = await measure(url, FAST, work, tmp_path / str(attempt), max_lag_s=ERROR_S)
            log = json.loads((await fetch(await resolve(url), "GET", "/log", timeout_s=120)).body)
            log = log[-len(work.prompts) :]
            if found.verdict.is_valid and lateness_s(log) < ERROR_S:
                break
        return found, log

    with serving(SCRIPT) as url:
        found, log = asyncio.run(go(url))
    if not found.verdict.is_valid or lateness_s(log) >= ERROR_S:
        late = f"the script was late by {lateness_s(log):.3f} s"
        pytest.skip(f"this machine is too busy: {late}, {found.verdict.reasons}")
    assert found.stats.completed == len(work.prompts)
    truth = truth_of(work, FAST)
    assert truth["ttft"][-1] > 4 * truth["ttft"][0]
    for name, values in measured(found).items():
        assert len(values) == len(truth[name])
        for percent in (50, 95, 99):
            expected_s = percentile(truth[name], percent)
            assert percentile(values, percent) == pytest.approx(expected_s, abs=ERROR_S), (
                name,
                percent,
            )
    _agrees_with_the_servers_own_log(found, log)


def lateness_s(log: list[dict]) -> float:
    """Return by how much the server wrote what was due too late, for the latest in a hundred."""
    pairs = [zip(entry["due_s"], entry["written_s"], strict=True) for entry in log]
    return percentile(sorted(written - due for pair in pairs for due, written in pair), 99)


def _agrees_with_the_servers_own_log(found: Run, log: list[dict]) -> None:
    """Beside the script: chunks are stamped soon after the server wrote them, in the same order."""
    by_seed = {entry["seed"]: entry for entry in log}
    first_seed = min(by_seed)
    start_s, late_s = [], []
    for record in found.records:
        entry = by_seed[first_seed + record.index]
        assert len(record.chunk_s) == len(entry["written_s"])
        start_s.append(entry["arrived_s"] - record.sent_s)
        late_s += [
            read - written for read, written in zip(record.chunk_s, entry["written_s"], strict=True)
        ]
    # The trial's zero on the machine's clock is not told. The request that reached the server
    # soonest after it was sent tells it, but for that time, which makes a lag look smaller.
    lag_s = np.sort(np.array(late_s) + min(start_s))
    assert lag_s[0] > -ERROR_S
    assert lag_s[int(0.99 * len(lag_s))] < MAX_LAG_S


# --- the search and the ratio --------------------------------------------------------------------

TRIAL_S = 2.5
LIMITS = (read_limit("p90_e2e=0.6"),)
PAIRS = 6


def options_of(pair: int) -> SearchOptions:
    return SearchOptions(
        limits=LIMITS, start_rps=8.0, resolution=0.1, trial_s=TRIAL_S, seed=pair, repeats=2
    )


async def virtual(model: str, rate_rps: float, seed: int) -> ProbeResult:
    truth = truth_of(work_of(rate_rps, TRIAL_S, seed), model)
    return ProbeResult((tally(np.array(truth["e2e"]), LIMITS[0].bound_s),))


def true_rps(model: str) -> float:
    """Return where the expected share of such trials is the allowed one, by long simulation."""
    low, high = 2.0, 40.0
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        shares = [
            np.mean(np.array(truth_of(work, model)["e2e"]) > LIMITS[0].bound_s)
            for work in (work_of(middle, TRIAL_S, seed * 1000) for seed in range(300))
        ]
        low, high = (middle, high) if np.mean(shares) <= 0.1 else (low, middle)
    return math.sqrt(low * high)


def test_the_highest_rates_and_their_ratio_are_recovered(tmp_path, monkeypatch):
    """Six pairs search at once: a server that sleeps can be shared, unlike one that computes."""
    # A trial sweeps garbage before it starts, which here would stop eleven others in mid-trial.
    monkeypatch.setattr(gc, "collect", lambda: 0)

    async def search(url, model, pair):
        async def probe(rate_rps, seed):
            folder = tmp_path / f"{model}-{pair}-{seed}"
            name = f"pair{pair}-{model}"
            run_ = await measure(url, name, work_of(rate_rps, TRIAL_S, seed), folder)
            return probe_result(LIMITS, run_.records, run_.verdict.reasons)

        return await find_max_rate(probe, options_of(pair))

    async def all_pairs(url):
        searches = [search(url, model, pair) for pair in range(PAIRS) for model in (FAST, SLOW)]
        return await asyncio.gather(*searches)

    with serving(SCRIPT) as url:
        found = asyncio.run(all_pairs(url))
    busy = [reason for f in found for reason in f.reasons if "invalid" in reason]
    if busy:
        pytest.skip(f"this machine is too busy: {busy}")
    expected = [
        run(find_max_rate(partial(virtual, model), options_of(pair)))
        for pair in range(PAIRS)
        for model in (FAST, SLOW)
    ]
    rates = [f.max_rps for f in found]
    assert rates == pytest.approx([e.max_rps for e in expected], rel=RATE_ERROR)
    figures = ratio_of(list(zip(rates[::2], rates[1::2], strict=True)))
    assert figures.low < true_rps(FAST) / true_rps(SLOW) < figures.high
    assert figures.high / figures.low < 1.5


# --- a client that cannot keep up ----------------------------------------------------------------


def test_a_blocked_client_is_called_invalid(tmp_path):
    async def block():
        while True:
            await asyncio.sleep(0.15)
            time.sleep(0.3)  # noqa: ASYNC251  # on purpose: this is the fault

    with serving(SCRIPT) as url:
        found = asyncio.run(measure(url, FAST, work_of(10.0, 3.0, 1000), tmp_path, block))
    assert not found.verdict.is_valid
    reasons = " ".join(found.verdict.reasons)
    assert "the client was late: p99 dispatch lag" in reasons
    assert "the client was late: p99 event-loop lag" in reasons
    # And rightly so: what it measured is far from the truth.
    truth = truth_of(work_of(10.0, 3.0, 1000), FAST)
    assert percentile(measured(found)["ttft"], 50) > percentile(truth["ttft"], 50) + ERROR_S
