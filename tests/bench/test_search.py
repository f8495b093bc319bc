"""The search, on servers that exist only as a curve or as a queue in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tailrace.bench.limits import read_limit
from tailrace.bench.records import Record
from tailrace.bench.search import (
    FoundRate,
    ProbeResult,
    SearchOptions,
    crossing_rps,
    draw_of,
    find_max_rate,
    point_of,
    probe_result,
)
from tailrace.bench.wilson import Tally, tally_of
from tailrace.errors import ConfigError
from tests.bench.queue_model import Queue, latencies_s, probe_of, run, true_rps

P95 = read_limit("p95_ttft=1.0")
P99 = read_limit("p99_e2e=5.0")


def spread(share: float, count: int = 400) -> Tally:
    """Return a tally with its slow requests spread evenly."""
    slow = {int(k / share) for k in range(round(share * count))} if share else set()
    return tally_of([(int(index in slow), 1) for index in range(count)])


class Curve:
    """A server whose share of slow requests is a function of the rate; it keeps what was asked."""

    def __init__(self, *shares, count=400, faults=()):
        self.shares = shares
        self.count = count
        self.faults = dict(faults)
        self.asked: list[tuple[float, int]] = []

    async def __call__(self, rate_rps: float, seed: int) -> ProbeResult:
        fault = self.faults.get(len(self.asked))
        self.asked.append((rate_rps, seed))
        if isinstance(fault, str):
            return ProbeResult((), (fault,))
        shares = [share(rate_rps) for share in self.shares] if fault is None else [fault]
        return ProbeResult(tuple(spread(share, self.count) for share in shares))


def step(at_rps: float):
    return lambda rate_rps: 0.0 if rate_rps <= at_rps else 1.0


def smooth(at_rps: float, allowed: float = 0.05):
    """Meet the allowed share at a rate, and rise around it as queues do."""
    return lambda rate_rps: min(allowed * (rate_rps / at_rps) ** 8, 1.0)


def options(*limits, **changes) -> SearchOptions:
    return replace(SearchOptions(limits=limits or (P95,)), **changes)


def search(curve, chosen=None, **keywords) -> FoundRate:
    return run(find_max_rate(curve, chosen or options(), **keywords))


@pytest.mark.parametrize("truth", [0.031, 0.5, 1.0, 3.7, 64.0, 411.0])
def test_a_sharp_limit_is_bracketed_within_the_resolution(truth):
    found = search(Curve(step(truth)))
    assert found.reasons == ()
    assert found.holds_rps <= truth < found.fails_rps
    assert found.fails_rps / found.holds_rps <= 1.051
    assert found.holds_rps <= found.max_rps <= found.fails_rps


@pytest.mark.parametrize("start", [0.02, 1.0, 90.0])
def test_a_smooth_limit_is_estimated_closer_than_the_bracket(start):
    found = search(Curve(smooth(3.7)), options(start_rps=start))
    assert found.max_rps == pytest.approx(3.7, rel=0.02)


def test_the_tightest_of_several_limits_decides():
    for pair in ((4.0, 9.0), (9.0, 4.0)):
        curve = Curve(smooth(pair[0]), smooth(pair[1], 0.01), count=2000)
        found = search(curve, options(P95, P99))
        assert found.max_rps == pytest.approx(4.0, rel=0.03)


def test_rates_and_seeds_depend_on_the_answers_alone():
    first, second = Curve(smooth(3.7)), Curve(smooth(3.7))
    assert search(first) == search(second)
    assert first.asked == second.asked
    other = Curve(smooth(3.7))
    search(other, options(seed=1))
    assert [rate for rate, _ in other.asked] == [rate for rate, _ in first.asked]
    assert not {seed for _, seed in other.asked} & {seed for _, seed in first.asked}


def test_no_seed_is_used_twice_and_first_trials_share_a_draw():
    curve = Curve(smooth(3.7))
    found = search(curve, options(seed=5))
    seeds = [seed for _, seed in curve.asked]
    assert len(set(seeds)) == len(seeds) == found.trials
    draws: dict[float, list[int]] = {}
    for rate, seed in curve.asked:
        draws.setdefault(rate, []).append(draw_of(seed))
    assert len(draws) > 4
    for of_rate in draws.values():
        assert of_rate == [500 + number for number in range(len(of_rate))]


def test_every_requests_seed_fits_31_bits():
    curve = Curve(smooth(3.7))
    search(curve, options(seed=20_000))
    assert max(seed for _, seed in curve.asked) + 100_000 < 2**31


def test_a_clear_rate_takes_one_trial_and_both_ends_two():
    found = search(Curve(step(3.7)))
    counts = {point.rate_rps: len(point.results) for point in found.points}
    assert counts.pop(found.holds_rps) == counts.pop(found.fails_rps) == 2
    assert set(counts.values()) == {1}
    assert all(point.is_decided for point in found.points)
    assert found.cautions == ()


def test_a_rate_that_straddles_is_repeated_then_marked_undecided():
    """At 1/s the share is a hair under the allowed one: no sample of this size can tell."""
    seen = []
    found = search(
        Curve(lambda rate: {1.0: 0.048}.get(rate, step(1.0)(rate))),
        options(repeats=3),
        on_point=seen.append,
    )
    point = next(point for point in found.points if point.rate_rps == 1.0)
    assert point.outcome == "undecided"
    assert point.holds
    assert len(point.results) == 3
    assert [p.rate_rps for p in seen[:3]] == [1.0] * 3
    assert [p.outcome for p in seen[:3]] == ["undecided"] * 3
    assert len(seen) == found.trials
    assert any("point estimate" in caution for caution in found.cautions)


def test_a_warm_start_takes_few_trials_and_ends_in_the_same_place():
    cold_curve, warm_curve = Curve(smooth(37.0)), Curve(smooth(37.0))
    cold = search(cold_curve)
    warm = search(warm_curve, options(seed=1), warm=cold)
    assert len({rate for rate, _ in warm_curve.asked}) == 3
    assert len(warm_curve.asked) < len(cold_curve.asked)
    assert warm.max_rps == pytest.approx(37.0, rel=0.02)


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.4, 10.0])
def test_a_warm_start_that_is_far_off_still_finds_it(factor):
    hint = search(Curve(smooth(37.0 * factor)))
    found = search(Curve(smooth(37.0)), warm=hint)
    assert found.max_rps == pytest.approx(37.0, rel=0.02)
    # It gallops: no slower than a cold search by more than a few rates.
    assert len(found.points) <= 12


def test_an_unresolved_search_warms_nothing():
    unresolved = search(Curve(lambda _: 0.0))
    assert not unresolved.is_resolved
    curve = Curve(smooth(3.7))
    search(curve, warm=unresolved)
    assert curve.asked[0][0] == 1.0


def test_a_limit_that_fails_at_the_lowest_rate_is_named():
    found = search(Curve(lambda _: 0.5), options(low_rps=0.25))
    assert found.max_rps is None
    assert found.holds_rps is None
    assert found.fails_rps == 0.25
    (reason,) = found.reasons
    assert "lowest rate allowed, 0.25/s: 200 of 400 exceed p95_ttft=1" in reason


def test_limits_that_hold_at_the_highest_rate_are_no_answer():
    curve = Curve(lambda _: 0.0)
    found = search(curve, options(high_rps=6.0))
    assert found.max_rps is None
    assert found.holds_rps == 6.0
    assert "highest rate allowed, 6/s" in found.reasons[0]
    assert max(rate for rate, _ in curve.asked) == 6.0


def test_an_invalid_trial_is_repeated_once():
    curve = Curve(step(3.7), faults={2: "the client was late"})
    found = search(curve)
    assert found.is_resolved
    assert curve.asked[2][0] == curve.asked[3][0]
    assert curve.asked[2][1] != curve.asked[3][1]
    assert found.trials == len(curve.asked) - 1


@pytest.mark.parametrize("at", [0, 3])
def test_two_invalid_trials_end_the_search_with_their_reason(at):
    curve = Curve(step(3.7), faults={at: "the client was late", at + 1: "the client was late"})
    found = search(curve)
    assert found.max_rps is None
    assert "invalid: the client was late" in found.reasons[0]
    assert len(curve.asked) == at + 2
    assert found.trials == at


def test_one_stalled_trial_does_not_become_the_answer():
    """The third trial (4/s) stalls: the rate is confirmed, and refuted."""
    found = search(Curve(step(30.0), faults={2: 0.9}))
    assert found.max_rps is None
    assert "at 4/s 2 trials hold, and in another 90%" in found.reasons[0]


@pytest.mark.parametrize("repeats", [1, 2])
def test_of_two_trials_that_contradict_each_other_a_third_decides(repeats):
    """4/s stalls when it is first tried; a search of few repeats must not make it the answer."""
    stalled = search(Curve(step(30.0), faults={2: 0.9}), options(repeats=repeats))
    assert stalled.max_rps is None
    assert "at 4/s 2 trials hold, and in another 90%" in stalled.reasons[0]
    # At the end, 3.668/s is confirmed, and stalls in the trial that should do so.
    calm = Curve(step(3.7))
    trials = search(calm, options(repeats=repeats)).trials
    lucky = search(Curve(step(3.7), faults={trials - 1: 0.0}), options(repeats=repeats))
    assert lucky.max_rps is not None
    assert [len(point.results) for point in lucky.points].count(3) == 1


def test_a_server_that_drifts_is_contradictory():
    """It is sick from 4/s down to 2.2/s, then well again: the end that failed is refuted."""
    found = search(Curve(step(30.0), faults={2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}))
    assert found.max_rps is None
    assert found.fails_rps == 2.181
    assert "at 2.181/s 2 trials hold, and in another 100%" in found.reasons[0]


@pytest.mark.parametrize("seed", range(20))
def test_no_rate_is_tried_above_one_that_failed(seed):
    """So a rate that holds above a failure cannot be the answer."""
    seen = []
    probe = probe_of(Queue(10.0), 1.0, 200)
    search(probe, options(read_limit("p95_e2e=1.0"), seed=seed), on_point=seen.append)
    for number, point in enumerate(seen):
        failed = [p.rate_rps for p in seen[:number] if p.is_decided and not p.holds]
        assert point.rate_rps <= min(failed, default=math.inf)
    assert len(seen) > 5


@pytest.mark.parametrize(
    ("limit", "count", "fewest", "to_show"), [(P95, 5, 20, 73), (P99, 30, 100, 381)]
)
def test_too_few_observations_say_how_many_are_needed(limit, count, fewest, to_show):
    found = search(Curve(lambda _: 0.0, count=count), options(limit))
    assert found.max_rps is None
    reason = found.reasons[0]
    assert f"{3 * count} observations in 3 trials" in reason
    assert f"needs {fewest}, and {to_show} to show that it holds" in reason


def test_a_metric_that_nothing_observes_is_too_few():
    async def probe(rate_rps, seed):
        return ProbeResult((tally_of([(0, 0)] * 50),))

    found = search(probe)
    assert "p95_ttft=1: 0 observations" in found.reasons[0]


def test_a_search_without_end_ends():
    found = search(Curve(smooth(3.7)), options(max_trials=4))
    assert found.max_rps is None
    assert "still open after 4 trials" in found.reasons[0]
    assert found.trials == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"limits": ()}, "no limit"),
        ({"start_rps": 0.001}, "in this order"),
        ({"high_rps": math.inf}, "in this order"),
        ({"low_rps": 0.0}, "in this order"),
        ({"resolution": 0.0}, "resolution"),
        ({"repeats": 0}, "repeats 0"),
        ({"max_trials": 5000}, "max_trials 5000"),
        ({"trial_s": 0.0}, "trial_s"),
        ({"seed": 20261129}, "seed 20261129; must be 0 to 20000"),
    ],
)
def test_options_out_of_range_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        options(**changes)


def test_a_trials_length_comes_from_what_a_decision_needs():
    chosen = options(P95, repeats=3)
    # 292 requests tell half the allowed share from it, over three trials; 1 s / 5 % = 20 s.
    assert chosen.needed_requests == 98
    assert chosen.duration_s(1.0) == 98
    assert chosen.duration_s(1000.0) == 20
    assert options(P99, repeats=3).needed_requests == 508
    assert options(P95, repeats=30).needed_requests == 73
    assert options(read_limit("p95_itl=0.1")).duration_s(1000.0) == 10
    assert options(P95, trial_s=7.0).duration_s(1.0) == 7.0


def test_the_advice_names_the_counts():
    assert options(P95, P99).advice() == (
        "p95_ttft=1: 73 requests can show that it holds, 292 tell half the allowed share from it; "
        "p99_e2e=5: 381 requests can show that it holds, 1522 tell half the allowed share from "
        "it. With up to 3 trials at a rate, give each 508 requests and 100 s at least"
    )


def test_short_trials_flatter_the_server_as_the_documents_say():
    queue = Queue(10.0)
    assert true_rps(queue, 1.0, 0.05, 25, trials=800) == pytest.approx(9.3, abs=0.4)
    assert true_rps(queue, 1.0, 0.05, 140, trials=400) == pytest.approx(7.2, abs=0.15)


def test_trials_too_short_to_show_an_overload_are_cautioned():
    found = search(Curve(step(3.7)), options(trial_s=7.0))
    assert any("flatters the server" in caution for caution in found.cautions)
    assert not search(Curve(step(3.7)), options(trial_s=30.0)).cautions


def test_probe_result_counts_records_for_each_limit():
    records = [
        Record(
            index=index,
            scheduled_s=float(index),
            planned_input_tokens=1,
            planned_output_tokens=1,
            status="ok",
            first_token_s=index + (2.0 if index == 7 else 0.5),
            finished_s=index + 6.0,
        )
        for index in range(10)
    ]
    result = probe_result((P95, P99), records, ["why"])
    assert [(t.exceeded, t.observations) for t in result.tallies] == [(1, 10), (10, 10)]
    assert not result.is_valid
    assert probe_result((P95,), records).is_valid


def estimate(shares: dict[float, float], bracket=(1.0, 2.0), count=400) -> float:
    points = [
        point_of(rate, [ProbeResult((spread(share, count),))], (P95,))
        for rate, share in shares.items()
    ]
    return crossing_rps(points, (P95,), bracket)


def test_the_estimate_interpolates_between_a_bracket():
    assert 1.0 < estimate({1.0: 0.0, 2.0: 0.2}) < 2.0
    assert estimate({1.0: 0.0, 2.0: 0.8}) < estimate({1.0: 0.0, 2.0: 0.2})
    assert estimate({1.0: 0.05, 2.0: 0.5}) == pytest.approx(1.0)


def test_neighbours_that_contradict_are_averaged():
    """2.1/s failed by a hair and 2.2/s held by a hair: the crossing lies between."""
    got = estimate({1.0: 0.0, 2.1: 0.055, 2.2: 0.045, 3.0: 0.5}, (1.0, 2.1))
    assert got == pytest.approx(math.sqrt(2.1 * 2.2), rel=0.01)


def test_rates_far_below_do_not_pull_the_estimate():
    near = {2.0: 0.0, 2.2: 0.3}
    assert estimate({0.1: 0.0, 1.0: 0.0, **near}) == pytest.approx(estimate(near))


def test_noise_that_levels_everything_gives_the_brackets_middle():
    assert estimate({1.0: 0.06, 2.0: 0.045}, (1.0, 4.0)) == 2.0


# --- queues --------------------------------------------------------------------------------------


def test_the_queue_model_is_the_textbooks():
    queue = Queue(10.0)
    values_s = queue.draw(7.0, 400_000, seed=1)
    # M/M/1: time in the system is exponential with rate 10 - 7.
    assert np.mean(values_s) == pytest.approx(1 / 3, rel=0.05)
    assert np.quantile(values_s, 0.95) == pytest.approx(math.log(20) / 3, rel=0.05)
    assert queue.highest_rps(1.0, 0.05) == pytest.approx(10 - math.log(20))


@pytest.mark.parametrize("servers", [1, 3])
def test_the_queue_model_is_first_come_first_served(servers):
    random = np.random.default_rng(4)
    arrivals_s = np.cumsum(random.exponential(1.0, 200))
    services_s = random.exponential(0.8 * servers, 200)
    ends_s = arrivals_s + latencies_s(arrivals_s, services_s, servers=servers)
    starts_s = ends_s - services_s
    assert np.all(starts_s >= arrivals_s - 1e-9)
    assert np.all(np.diff(starts_s) >= -1e-9)
    busy = [np.sum((starts_s <= t) & (t < ends_s - 1e-9)) for t in starts_s + 1e-9]
    assert max(busy) == servers
    # Nobody waits while a server is free.
    for index in np.flatnonzero(starts_s > arrivals_s + 1e-9):
        t = (arrivals_s[index] + starts_s[index]) / 2
        assert np.sum((starts_s <= t) & (t < ends_s)) == servers


def test_the_highest_rate_of_a_known_queue_is_found():
    """M/M/1 at 10/s, P95 <= 1 s: 7.00/s in the long run; such trials hold a little more."""
    truth = true_rps(Queue(10.0), 1.0, 0.05, 1000, trials=600)
    assert truth == pytest.approx(10 - math.log(20), rel=0.01)
    limits = (read_limit("p95_e2e=1.0"),)
    errors = []
    for seed in range(60):
        probe = probe_of(Queue(10.0), 1.0, 1000, shares_draws=False)
        found = search(probe, options(*limits, seed=seed))
        assert found.is_resolved
        errors.append(math.log(found.max_rps / truth))
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.06
    assert max(map(abs, errors)) < 0.2


def test_the_estimate_is_closer_than_the_brackets_ends():
    limits = (read_limit("p95_e2e=1.0"),)
    truth = 10 - math.log(20)
    found = [
        search(probe_of(Queue(10.0), 1.0, 1000, shares_draws=False), options(*limits, seed=seed))
        for seed in range(60)
    ]
    estimates, held = (
        [math.log(v / truth) for v in values]
        for values in zip(*((f.max_rps, f.holds_rps) for f in found), strict=True)
    )
    assert np.sqrt(np.mean(np.square(estimates))) < np.sqrt(np.mean(np.square(held)))


def test_common_draws_make_a_pairs_ratio_steadier():
    limits = (read_limit("p95_e2e=1.0"),)
    spreads = []
    for shares_draws in (True, False):
        ratios = []
        for seed in range(40):
            rates = [
                search(
                    probe_of(Queue(mu), 1.0, 400, shares_draws=shares_draws),
                    options(*limits, seed=seed if shares_draws else seed + 1000 * int(mu)),
                ).max_rps
                for mu in (10.0, 8.0)
            ]
            ratios.append(math.log(rates[0] / rates[1]))
        spreads.append(np.std(ratios))
    assert spreads[0] < 0.7 * spreads[1]
