"""One trial against a scripted server, with a monitor that is scripted too."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass

import msgspec
import pytest

from tailrace.bench import machine
from tailrace.bench.limits import read_limit
from tailrace.bench.load.fleet import LEAD_S
from tailrace.bench.machine import CpuTimes
from tailrace.bench.monitor import Reading, read_readings
from tailrace.bench.prompts import Prompt
from tailrace.bench.records import read_records
from tailrace.bench.stats import Limits, e2e_s, ttft_s
from tailrace.bench.target import Target
from tailrace.bench.traffic.schedule import Arrival, Schedule
from tailrace.bench.trial import Server, TrialOptions, Work, make_shots, run_trial
from tailrace.bench.wire import Endpoint, resolve
from tailrace.clock import monotonic
from tailrace.errors import ConfigError
from tests.bench.mock_server import Behaviour, MockServer

TARGET = Target("mock", None, "")
QUICK = Behaviour(ttft_s=0.02, gap_s=0.002)
NOWHERE = Endpoint("http://x", "x", "127.0.0.1", 1)


def work(arrivals, *, duration_s=1.0, shared=0, **more) -> Work:
    prompts = [
        Prompt("a b c", 3, 3, shared_tokens=shared if index else 0)
        for index in range(len(arrivals))
    ]
    return Work(Schedule(tuple(arrivals), "made up", duration_s), prompts, **more)


def spread(count=6, **fields) -> list[Arrival]:
    return [Arrival(0.02 * index, 3, 5, **fields) for index in range(count)]


@dataclass
class FakeMonitor:
    """Tells what it was given, ten times a second, in the trial's time."""

    values: dict[str, list[float]]
    breaks: bool = False
    source: str = "server"

    async def watch(self, elapsed_s, on_reading):
        for number in range(len(next(iter(self.values.values())))):
            reading = {name: values[number] for name, values in self.values.items()}
            on_reading(Reading(self.source, elapsed_s(), reading))
            if self.breaks:
                raise RuntimeError("no such gauge")
            await asyncio.sleep(0.02)
        await asyncio.sleep(3600)


def trial(
    folder, asked, *, script=lambda _: QUICK, monitor=None, stop_when=None, body=None, **more
):
    """Return the run, the server, and the states that were told."""
    states = []

    async def watch(stop):
        while not (states and stop_when(states[0])):  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.02)
        stop.set()

    async def go():
        async with MockServer(script=script) as server:
            stop = asyncio.Event()
            watching = asyncio.create_task(watch(stop)) if stop_when is not None else None
            run = await run_trial(
                Server(await resolve(server.url), TARGET, body or {}, monitor),
                asked,
                folder,
                TrialOptions(**({"max_lag_s": 5.0, "timeout_s": 20.0, "processes": 1} | more)),
                stop=stop,
                on_state=states.append,
            )
            if watching is not None:
                watching.cancel()
            return run, server

    run, server = asyncio.run(go())
    return run, server, states


def test_a_trial_leaves_its_records_and_readings_and_returns_its_run(tmp_path):
    monitor = FakeMonitor({"kv_usage": [0.25, 0.5]})
    run, server, states = trial(tmp_path / "t", work(spread()), monitor=monitor)
    assert run.verdict.reasons == ()
    assert run.stats.completed == 6
    assert run.duration_s == 1.0
    assert read_records(tmp_path / "t" / "records.jsonl") == list(run.records)
    readings = read_readings(tmp_path / "t" / "monitor.jsonl")
    assert readings["server"].values["kv_usage"][0] == 0.25
    assert run.scrape.values["kv_usage"][0] == 0.25
    assert all(-0.01 <= at_s < 5 for at_s in run.scrape.at_s)
    assert states[0].total == 6
    assert len(states) == 1
    ids = [record.request_id for record in run.records]
    assert len(set(ids)) == 6
    assert sorted(server.request_ids) == sorted(ids)


def test_records_are_on_disk_before_the_trial_ends(tmp_path):
    seen = []

    def script(index):
        if index == 5:
            lines = (tmp_path / "records.jsonl").read_bytes().splitlines()
            seen.append([msgspec.json.decode(line)["index"] for line in lines])
        return QUICK

    arrivals = [*spread(5), Arrival(1.2, 3, 5)]
    trial(tmp_path, work(arrivals), script=script)
    assert sorted(seen[0]) == [0, 1, 2, 3, 4]


def test_the_limits_are_judged_and_each_has_its_goodput(tmp_path):
    script = {3: Behaviour(ttft_s=1.5, gap_s=0.002)}
    run, *_ = trial(
        tmp_path,
        work(spread(10)),
        script=lambda index: script.get(index, QUICK),
        limits=(read_limit("p90_ttft=1.2"), read_limit("p99_ttft=1.2"), read_limit("p50_e2e=9")),
        goodput=Limits(e2e_s=9.0),
    )
    # A machine that stalls makes others late too, of which limits and goodput then know.
    over = [(ttft_s(record) > 1.2, e2e_s(record) > 9) for record in run.records]
    late, long = (sum(column) for column in zip(*over, strict=True))
    good = 10 - sum(map(any, over))
    assert over[3][0]
    assert run.held == {"p90_ttft=1.2": late == 1, "p99_ttft=1.2": False, "p50_e2e=9": long <= 5}
    assert run.good == {
        "ttft <= 1.2 s": 10 - late,
        "e2e <= 9 s": 10 - long,
        "as asked": 10 - long,
        "all of them": good,
    }
    summary = json.loads(run.summary_json())
    assert summary["limits"]["p99_ttft=1.2"] is False
    assert summary["goodput"]["all of them"]["requests"] == good


def test_an_interrupted_trial_keeps_what_was_measured_and_says_so(tmp_path):
    script = {1: Behaviour(fault="silent")}
    arrivals = [*spread(2), Arrival(30.0, 3, 5)]
    run, *_ = trial(
        tmp_path,
        work(arrivals, duration_s=30.0),
        script=lambda index: script.get(index, QUICK),
        stop_when=lambda state: state.sent == 2 and len(state.done) == 1,
    )
    assert [record.status for record in run.records] == ["ok", "cancelled"]
    assert run.verdict.reasons[0].startswith("interrupted: 1 of 3")
    assert run.duration_s == pytest.approx(0.02)


def test_a_closed_loop_ends_with_its_time_and_tells_users_apart(tmp_path):
    arrivals = [
        Arrival(0.0, 3, 5, user=index % 2, think_s=0.02 if index > 1 else 0.0)
        for index in range(200)
    ]
    run, *_ = trial(tmp_path, work(arrivals, duration_s=1.0, users=2))
    assert 2 < run.stats.requests < 120
    assert run.stats.completed == run.stats.requests
    assert {record.user for record in run.records} == {0, 1}
    assert run.verdict.is_valid
    assert not any("idled" in caution for caution in run.verdict.cautions)


def test_users_that_run_out_of_requests_are_a_caution(tmp_path):
    arrivals = [Arrival(0.0, 3, 5, user=0), Arrival(0.0, 3, 5, user=0)]
    run, *_ = trial(tmp_path, work(arrivals, duration_s=5.0, users=1))
    assert any("1 of 1 users sent all" in caution for caution in run.verdict.cautions)


def test_a_sessions_turns_are_sent_in_order_and_each_waits_for_the_answer(tmp_path):
    arrivals = [
        Arrival(0.0, 3, 5, session=1, turn=0),
        Arrival(0.01, 3, 5, session=2, turn=0),
        Arrival(0.02, 3, 5, session=1, turn=1, think_s=0.05),
    ]
    run, *_ = trial(tmp_path, work(arrivals, duration_s=0.02))
    first, other, later = run.records
    assert later.scheduled_s == pytest.approx(first.finished_s + 0.05, abs=1e-9)
    assert (later.session, later.turn) == (1, 1)
    assert other.scheduled_s == 0.01


def test_the_body_carries_priority_and_the_servers_own_fields():
    asked = work([Arrival(0.0, 3, 5), Arrival(0.0, 3, 5, priority=2)])
    server = Server(NOWHERE, TARGET, {"cache_prompt": False, "min_tokens": None})
    plain, urgent = (json.loads(shot.body) for shot in make_shots(server, asked, TrialOptions()))
    assert "priority" not in plain
    assert urgent["priority"] == 2
    assert plain["cache_prompt"] is False
    assert "min_tokens" not in plain
    assert plain["ignore_eos"] is True
    (shot, _) = make_shots(server, asked, TrialOptions(ignore_eos=False))
    assert "ignore_eos" not in json.loads(shot.body)


def test_request_ids_of_two_trials_differ():
    server = Server(NOWHERE, TARGET)
    first, second = (
        {shot.request_id for shot in make_shots(server, work(spread()), TrialOptions())}
        for _ in range(2)
    )
    assert first.isdisjoint(second)


def test_cache_hits_that_the_traffic_plans_are_no_accident(tmp_path):
    cached = {"script": lambda _: Behaviour(0.01, 0.001, cached_tokens=3)}
    run, *_ = trial(tmp_path / "planned", work(spread(300), shared=3), **cached)
    assert run.verdict.is_valid, run.verdict.reasons
    run, *_ = trial(tmp_path / "accident", work(spread()), **cached)
    assert "cached beyond what the traffic shares by plan" in run.verdict.reasons[0]


def test_a_monitor_that_breaks_off_is_said(tmp_path):
    monitor = FakeMonitor({"kv_usage": [0.25, 0.5]}, breaks=True)
    run, *_ = trial(tmp_path, work(spread()), monitor=monitor)
    assert run.verdict.is_valid
    assert any("no such gauge" in caution for caution in run.verdict.cautions)


@pytest.mark.parametrize("cores", [0.0, 1e9])
def test_cpu_time_that_is_neither_the_servers_nor_ours_is_said(tmp_path, monkeypatch, cores):
    """The kernel counts 10,000 ticks, all busy; the server has used none of them, or all."""
    counted = iter([CpuTimes(0, 0, 0), CpuTimes(10_000, 0, 0)])
    monkeypatch.setattr(machine, "cpu_times", lambda: next(counted))
    monitor = FakeMonitor({"cpu_cores": [math.nan, cores, cores]}, source="process")
    run, *_ = trial(tmp_path, work(spread()), monitor=monitor)
    said = any("neither the server nor the client" in text for text in run.verdict.cautions)
    assert said == (not cores)


def watch_readings(monkeypatch):
    """Return a list that gets the time of each reading of the kernel's CPU times."""
    read_s = []
    count = machine.cpu_times

    def cpu_times():
        read_s.append(monotonic())
        return count()

    monkeypatch.setattr(machine, "cpu_times", cpu_times)
    return read_s


def test_cpu_time_counts_from_the_loads_start(tmp_path, monkeypatch):
    read_s = watch_readings(monkeypatch)
    _, _, (state,) = trial(tmp_path, work(spread()))
    assert len(read_s) == 2
    assert min(read_s) >= state.started_s


@pytest.mark.slow
def test_several_processes_give_the_same_trial(tmp_path, monkeypatch):
    read_s = watch_readings(monkeypatch)
    run, _, (state,) = trial(tmp_path, work(spread(8)), processes=2)
    assert min(read_s) >= state.started_s - LEAD_S, "their own start is no part of the trial"
    assert run.stats.completed == 8
    assert {record.worker for record in run.records} == {0, 1}
    assert run.conditions["Client processes"] == "2"
    assert len(read_records(tmp_path / "records.jsonl")) == 8


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give a folder to write to"):
        trial(tmp_path / "file" / "t", work(spread()))


@pytest.mark.parametrize(
    "change", [{"timeout_s": 0}, {"max_lag_s": 0}, {"temperature": 3}, {"processes": -1}]
)
def test_options_that_mean_nothing_are_refused(change):
    with pytest.raises(ConfigError):
        TrialOptions(**change)


def test_work_that_does_not_fit_together_is_refused():
    schedule = Schedule(tuple(spread(2)), "made up", 1.0)
    with pytest.raises(ValueError, match="0 prompts for 2 arrivals"):
        Work(schedule, [])
    with pytest.raises(ValueError, match="no users"):
        work(spread(2), users=3)
