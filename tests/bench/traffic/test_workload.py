from __future__ import annotations

import itertools
from collections import defaultdict
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.bench.traffic.workload import FASTEST_TOKEN_S, Workload, build
from tailrace.errors import ConfigError


def built(
    source="chat70", *, rate_rps=None, duration_s=100.0, max_requests=None, seed=1, **changed
):
    workload = Workload(source=source, **changed)
    return build(
        workload, rate_rps=rate_rps, duration_s=duration_s, max_requests=max_requests, seed=seed
    )


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.csv"
    rows = "".join(f"{second},{100 + second},{second + 1}\n" for second in range(101))
    file.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    return str(file)


@pytest.fixture
def shared_trace(tmp_path):
    file = tmp_path / "shared.jsonl"
    row = (
        '{{"arrival_s": {0}, "input_tokens": 1300, "output_tokens": 5, "hash_ids": [7, {1}, 0]}}\n'
    )
    file.write_text("".join(row.format(second, second % 2) for second in range(20)))
    return str(file)


# Presets


def test_longdoc_is_the_first_reports_load():
    schedule = built("longdoc", rate_rps=5.0, duration_s=2000.0)
    lengths = [a.input_tokens for a in schedule.arrivals]
    assert fmean(lengths) == pytest.approx(4200, abs=60)
    assert pstdev(lengths) == pytest.approx(1280, abs=45)
    assert min(lengths) >= 300
    assert max(lengths) <= 6800
    assert {a.output_tokens for a in schedule.arrivals} == {512}


def test_chat70_is_the_second_reports_load():
    schedule = built("chat70", rate_rps=20.0, duration_s=500.0)
    lengths = [a.input_tokens for a in schedule.arrivals]
    assert sum(32 <= length <= 128 for length in lengths) / len(lengths) == pytest.approx(
        0.7, abs=0.02
    )
    assert all(32 <= length <= 128 or 512 <= length <= 2048 for length in lengths)
    assert {a.output_tokens for a in schedule.arrivals} == {256}


@pytest.mark.parametrize(
    ("source", "users", "think"), [("longdoc", 128, (0.1, 0.5)), ("chat70", 50, (0.1, 2.0))]
)
def test_presets_bring_their_closed_loop(source, users, think):
    schedule = built(source, arrivals="closed", duration_s=20.0, max_requests=1000)
    assert schedule.users == users
    assert {a.user for a in schedule.arrivals} == set(range(users))
    thinking = [a.think_s for a in schedule.arrivals]
    assert min(thinking) >= think[0]
    assert max(thinking) <= think[1]
    assert fmean(thinking) == pytest.approx(fmean(think), rel=0.1)


# Open loop


def test_the_rate_is_met_and_the_seed_decides():
    schedule, again, other = (built(rate_rps=10.0, seed=seed) for seed in (1, 1, 2))
    assert schedule == again
    assert schedule.arrivals != other.arrivals
    assert schedule.rate_rps == pytest.approx(10, rel=0.13)
    assert schedule.duration_s == 100
    assert all(a.arrival_s < 100 for a in schedule.arrivals)


@pytest.mark.parametrize("source", ["chat70", "azure-code", "mooncake-conversation"])
def test_another_rate_sends_the_same_requests_closer_together(source):
    slow = built(source, rate_rps=2.0, duration_s=200.0)
    fast = built(source, rate_rps=4.0, duration_s=100.0)
    assert len(slow.arrivals) == len(fast.arrivals)
    for one, two in zip(slow.arrivals, fast.arrivals, strict=True):
        assert two.arrival_s == pytest.approx(one.arrival_s / 2)
        assert (one.input_tokens, one.output_tokens, one.prefix_ids) == (
            two.input_tokens,
            two.output_tokens,
            two.prefix_ids,
        )


def test_gamma_constant_ramp_and_step_replace_the_sources_arrivals(trace):
    even = built(trace, arrivals="constant", rate_rps=4.0, duration_s=20.0)
    assert [a.arrival_s for a in even.arrivals] == [i / 4 for i in range(80)]
    assert [a.input_tokens for a in even.arrivals] == [100 + i for i in range(80)]

    bursty = built(arrivals="gamma", burstiness=0.1, rate_rps=20.0, duration_s=500.0)
    times = [a.arrival_s for a in bursty.arrivals]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(10**0.5, rel=0.1)

    ramp = built(arrivals="ramp", rates="0:0,100:20", rate_rps=30.0)
    early = sum(a.arrival_s < 50 for a in ramp.arrivals)
    assert len(ramp.arrivals) == pytest.approx(3000, rel=0.08)
    assert early / len(ramp.arrivals) == pytest.approx(0.25, abs=0.04)

    step = built(arrivals="step", rates="0:1,50:9")
    assert sum(a.arrival_s < 50 for a in step.arrivals) == pytest.approx(50, abs=30)
    assert len(step.arrivals) == pytest.approx(500, rel=0.2)


def test_a_trace_is_replayed_as_it_is_or_stretched(trace):
    whole = built(trace, duration_s=None)
    assert len(whole.arrivals) == 101
    assert whole.duration_s == 100
    doubled = built(trace, rate_rps=2.0, duration_s=10.0)
    assert [a.arrival_s for a in doubled.arrivals] == [i / 2 for i in range(20)]


@pytest.mark.parametrize("changed", [{"duration_s": 200.0}, {"max_requests": 102}])
def test_a_trace_that_is_too_short_is_refused(trace, changed):
    with pytest.raises(ConfigError, match="ends after 101 requests"):
        built(trace, **({"duration_s": None} | changed))


def test_a_rate_that_falls_to_nothing_may_end_early():
    schedule = built(arrivals="ramp", rates="0:20,10:0", duration_s=60.0)
    assert schedule.arrivals[-1].arrival_s < 10.01
    assert schedule.duration_s == 60


def test_lengths_are_replaced_and_cut(trace):
    schedule = built(
        trace, duration_s=50.0, output_tokens="7", max_input_tokens=120, max_output_tokens=5
    )
    assert [a.input_tokens for a in schedule.arrivals] == [min(100 + i, 120) for i in range(50)]
    assert {a.output_tokens for a in schedule.arrivals} == {5}
    assert (schedule.clipped_inputs, schedule.clipped_outputs) == (29, 50)


def test_pairs_of_a_file_stay_together(tmp_path):
    file = tmp_path / "pairs.txt"
    file.write_text("10 1\n20 2\n30 3\n")
    both = {"input_tokens": f"file:{file}", "output_tokens": f"file:{file}"}
    schedule = built(rate_rps=2.0, **both)
    assert {(a.input_tokens, a.output_tokens) for a in schedule.arrivals} == {
        (10, 1), (20, 2), (30, 3)
    }  # fmt: skip


def test_prefixes_of_a_trace_are_kept_unless_its_lengths_are_not(shared_trace):
    schedule = built(shared_trace, duration_s=None)
    assert schedule.block_tokens == 512
    assert {a.prefix_ids for a in schedule.arrivals} == {(7, 0), (7, 1)}
    assert "prefixes shared in blocks of 512" in schedule.source
    cut = built(shared_trace, duration_s=None, max_input_tokens=600)
    assert {a.prefix_ids for a in cut.arrivals} == {(7,)}
    other = built(shared_trace, duration_s=None, input_tokens="600")
    assert not any(a.prefix_ids for a in other.arrivals)
    assert "left out" in other.source


def test_priorities_have_their_shares():
    schedule = built(rate_rps=50.0, priorities="0:0.9,1:0.1")
    low = sum(a.priority == 1 for a in schedule.arrivals)
    assert low / len(schedule.arrivals) == pytest.approx(0.1, abs=0.02)


# Sessions and users


def test_turns_grow_by_the_answer_and_new_text():
    schedule = built(rate_rps=4.0, turns=3, think_s="1-2", max_input_tokens=5000)
    sessions = defaultdict(list)
    for arrival in schedule.arrivals:
        sessions[arrival.session].append(arrival)
    assert max(len(turns) for turns in sessions.values()) == 3
    for turns in sessions.values():
        assert [a.turn for a in turns] == list(range(len(turns)))
        for before, after in itertools.pairwise(turns):
            assert after.input_tokens >= before.input_tokens + before.output_tokens + 32
            assert after.arrival_s == pytest.approx(
                before.arrival_s + before.output_tokens * FASTEST_TOKEN_S + after.think_s
            )
            assert 1 <= after.think_s <= 2
    assert max(a.input_tokens for a in schedule.arrivals) <= 5000
    # The rate is that of requests, not of sessions.
    assert schedule.rate_rps == pytest.approx(4, rel=0.25)


def test_a_session_ends_before_the_turn_that_would_be_too_long():
    schedule = built(
        rate_rps=2.0, turns=3, input_tokens="100", output_tokens="50", max_input_tokens=300
    )
    assert {a.turn for a in schedule.arrivals} == {0, 1}
    assert {a.input_tokens for a in schedule.arrivals} == {100, 250}
    assert "turns too long" in schedule.source


def test_users_take_turns_in_order_and_have_enough_for_the_duration():
    schedule = built(users=4, turns=2, think_s="0.1-0.5", duration_s=60.0)
    own = defaultdict(list)
    for arrival in schedule.arrivals:
        own[arrival.user].append(arrival)
    assert set(own) == {0, 1, 2, 3}
    for requests in own.values():
        order = [(a.session, a.turn) for a in requests]
        assert order == sorted(order)
        assert requests[0].arrival_s == requests[0].think_s
        for before, after in itertools.pairwise(requests):
            assert after.arrival_s == pytest.approx(
                before.arrival_s + before.output_tokens * FASTEST_TOKEN_S + after.think_s
            )
        last = requests[-1]
        assert last.arrival_s + last.output_tokens * FASTEST_TOKEN_S + 0.5 >= 60 - 0.6
    assert schedule.duration_s == 60


def test_a_closed_loop_keeps_its_duration_when_requests_are_counted():
    schedule = built(users=4, duration_s=60.0, max_requests=10)
    assert len(schedule.arrivals) == 10
    assert schedule.duration_s == 60
    assert {a.user for a in schedule.arrivals} == {0, 1, 2, 3}


# What is refused


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"source": "chat7"}, "did you mean 'chat70'"),
        ({"arrivals": "poison"}, "did you mean 'poisson'"),
        ({"arrivals": "ramp"}, "rates"),
        ({"rates": "0:1"}, "rates"),
        ({"burstiness": 0.5}, "gamma"),
        ({"arrivals": "gamma", "burstiness": 0.0}, "above 0"),
        ({"rate_rps": -1.0}, "above 0"),
        ({"rate_rps": float("nan")}, "above 0"),
        ({"users": 3, "arrivals": "poisson"}, "closed loop"),
        ({"users": 3, "rate_rps": 1.0}, "leave it out"),
        ({"users": -1}, "0 .open loop. or more"),
        ({"source": "azure-conv", "arrivals": "closed"}, "how many users"),
        ({"think_s": "x"}, "think_s"),
        ({"think_s": "2-1"}, "think_s"),
        ({"turns": 0}, "above 0"),
        ({"priorities": "0:0.5"}, "add up"),
        ({"priorities": "high"}, "priority:share"),
        ({"input_tokens": "many"}, "lengths"),
        ({"max_output_tokens": 0}, "above 0"),
    ],
)
def test_a_workload_that_means_nothing_is_refused(changed, words):
    with pytest.raises(ConfigError, match=words):
        Workload(**({"source": "chat70"} | changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "no rate of its own"),
        ({"rate_rps": 2.0, "duration_s": None}, "has no end"),
        ({"users": 2, "duration_s": None}, "has no end"),
        ({"users": 2, "rate_rps": 2.0}, "none to set"),
        ({"rate_rps": 0.0}, "above 0"),
        ({"rate_rps": 0.001, "duration_s": 0.1}, "no request is due"),
        ({"source": "longdoc", "arrivals": "closed", "duration_s": 1800.0}, "how many to make"),
        ({"source": "mooncake-synthetic", "turns": 2}, "leave turns at 1"),
    ],
)
def test_a_run_that_cannot_be_built_is_refused(changed, words):
    with pytest.raises(ConfigError, match=words):
        built(**changed)


def test_the_sentence_for_the_report():
    workload = Workload(source="chat70", turns=2, think_s="1-2", priorities="0:0.9,1:0.1")
    text = workload.describe()
    for words in ("chat70", "Poisson", "70% 32-128", "256 tokens", "2 turns", "1-2 s", "0:0.9"):
        assert words in text
    assert "closed loop of 50 users" in Workload(source="chat70", arrivals="closed").describe()


@given(
    source=st.sampled_from(["chat70", "longdoc", "azure-conv", "mooncake-conversation"]),
    rate_rps=st.floats(0.5, 20),
    duration_s=st.floats(5, 40),
    most=st.integers(600, 4000),
    count=st.none() | st.integers(1, 50),
    seed=st.integers(0, 5),
)
@settings(max_examples=25, deadline=None)
def test_any_open_schedule_is_in_order_and_within_its_bounds(
    source, rate_rps, duration_s, most, count, seed
):
    asked = {"rate_rps": rate_rps, "duration_s": duration_s, "max_requests": count, "seed": seed}
    try:
        schedule = built(source, max_input_tokens=most, **asked)
    except ConfigError as error:
        assert "no request is due" in str(error)  # noqa: PT017
        return
    times = [a.arrival_s for a in schedule.arrivals]
    assert times == sorted(times)
    assert times[-1] < duration_s
    assert count is None or len(times) <= count
    assert all(0 < a.input_tokens <= most for a in schedule.arrivals)
    assert all(
        len(a.prefix_ids) * schedule.block_tokens <= a.input_tokens for a in schedule.arrivals
    )
    assert built(source, max_input_tokens=most, **asked) == schedule
