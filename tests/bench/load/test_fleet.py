"""Several client processes against one scripted server: they count as one, and fail as one."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tailrace.bench.load import Fleet, Load, loader_for, processes_for
from tailrace.bench.load import fleet as fleet_module
from tailrace.bench.load.fleet import CHUNKS_PER_S_OF_ONE
from tailrace.bench.wire import Endpoint, resolve
from tailrace.errors import ConfigError
from tests.bench.load.test_client import chained, shots
from tests.bench.mock_server import Behaviour, MockServer, running

pytestmark = pytest.mark.slow
"""Each starts processes."""


def run(script, planned, *, processes=2, on_start=None, stop_after=None, **more):
    """Return the records, the fleet and the server after one run."""

    async def go():
        async with MockServer(script=script) as server:
            stop = asyncio.Event()

            def on_record(_):
                if stop_after is not None and len(fleet.state.done) >= stop_after:
                    stop.set()

            fields = {"timeout_s": 20.0} | more
            fleet = Fleet(
                await resolve(server.url),
                planned,
                processes=processes,
                on_record=on_record,
                **fields,
            )
            task = asyncio.create_task(fleet.run(stop))
            if on_start is not None:
                await fleet.state.has_started.wait()
                await on_start(fleet)
            return await task, fleet, server

    return asyncio.run(go())


def test_the_processes_share_the_requests_evenly_and_against_one_clock():
    planned = [
        replace(shot, request_id=f"r{shot.index}", session=shot.index)
        for shot in shots([0.05 * i for i in range(8)])
    ]
    records, fleet, server = run(lambda _: Behaviour(ttft_s=0.01, gap_s=0.01), planned)
    assert [record.index for record in records] == list(range(8))
    assert [record.status for record in records] == ["ok"] * 8
    # Dealt out in turn over time.
    assert [record.worker for record in records] == [0, 1] * 4
    assert [record.request_id for record in records] == [f"r{i}" for i in range(8)]
    assert sorted(server.request_ids) == [f"r{i}" for i in range(8)]
    for record in records:
        assert record.dispatched_s >= record.scheduled_s
        assert record.first_token_s >= record.scheduled_s + 0.009
    assert fleet.faults == []
    assert fleet.state.sent == 8
    assert fleet.state.in_flight == 0
    assert fleet.state.chunks == 8 * 5


def test_the_event_loops_lags_of_every_process_come_back():
    _, fleet, _ = run(lambda _: Behaviour(ttft_s=0.5), shots([0.0, 0.0]))
    assert len(fleet.lags_s) > 10
    assert all(lag_s >= 0 for lag_s in fleet.lags_s)


def test_the_latest_process_stands_for_all():
    fleet = Fleet(Endpoint("http://x", "x", "127.0.0.1", 1), [], processes=2, timeout_s=1)
    assert fleet.lags_s == []
    calm, late = [0.001] * 1000, [0.001] * 90 + [0.5] * 10
    fleet._workers = [SimpleNamespace(lags_s=calm), SimpleNamespace(lags_s=late)]
    assert fleet.lags_s == late


def test_a_chain_stays_in_one_process():
    planned = [
        *chained(3, think_s=0.0),
        *[
            replace(s, index=s.index + 10, after=None if s.after is None else s.after + 10)
            for s in chained(3, think_s=0.0)
        ],
    ]
    records, *_ = run(lambda _: Behaviour(), planned)
    assert [record.worker for record in records] == [0, 0, 0, 1, 1, 1]


def test_a_process_that_dies_makes_its_requests_failures_of_the_client():
    async def kill(fleet):
        async with asyncio.timeout(120):
            while len(fleet.state.done) < 3:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0.02)
        os.kill(fleet._workers[1].process.pid, signal.SIGKILL)

    planned = shots([0.0, 0.0, 0.0, 300.0])
    records, fleet, _ = run(lambda _: Behaviour(), planned, on_start=kill)
    assert [record.status for record in records] == ["ok", "ok", "ok", "client"]
    assert "client process 1 died (status -9)" in records[3].error
    assert fleet.faults == ["client process 1 died (status -9) with 1 of its requests open"]
    assert fleet.state.in_flight == 0


def test_a_process_that_hangs_is_given_up(monkeypatch):
    # Not less: on a busy machine a process that is well may be silent for a second.
    monkeypatch.setattr(fleet_module, "SILENCE_S", 3.0)

    async def freeze(fleet):
        os.kill(fleet._workers[0].process.pid, signal.SIGSTOP)

    # Neither has its answer before the freeze, were that a second late.
    script = Behaviour(ttft_s=1.0)
    records, fleet, _ = run(lambda _: script, shots([0.3, 0.3]), on_start=freeze)
    assert [record.status for record in records] == ["client", "ok"]
    assert "client process 0 died" in fleet.faults[0]


def test_an_interrupt_reaches_every_process_and_keeps_what_was_measured():
    script = {0: Behaviour(), 1: Behaviour()}
    planned = shots([0.0, 0.0, 0.1, 0.1, 60.0, 60.0])
    records, fleet, _ = run(
        lambda index: script.get(index, Behaviour(fault="silent")), planned, stop_after=2
    )
    assert [record.status for record in records[:2]] == ["ok", "ok"]
    assert {record.status for record in records[2:]} <= {"cancelled"}
    assert len(records) < 6
    assert fleet.faults == []


def test_processes_that_do_not_start_are_an_error_and_none_is_left(monkeypatch):
    monkeypatch.setattr(fleet_module.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="client process"):
        run(lambda _: Behaviour(), shots([0.0, 0.0]))


def test_more_processes_than_chains_are_not_started():
    records, fleet, _ = run(lambda _: Behaviour(), shots([0.0]), processes=4)
    assert len(records) == 1
    assert len(fleet._workers) == 1


@pytest.mark.parametrize(
    ("chunks_per_s", "cores", "processes"),
    [
        (0, 8, 1),
        (CHUNKS_PER_S_OF_ONE, 8, 1),
        (CHUNKS_PER_S_OF_ONE * 1.01, 8, 2),
        (CHUNKS_PER_S_OF_ONE * 100, 8, 8),
        (CHUNKS_PER_S_OF_ONE * 100, 1, 1),
        (math.inf, 4, 4),
    ],
)
def test_as_many_processes_as_the_load_needs_and_the_machine_has(chunks_per_s, cores, processes):
    assert processes_for(chunks_per_s, cores=cores) == processes


def test_requests_cost_too():
    assert processes_for(0, CHUNKS_PER_S_OF_ONE / 10, cores=8) == 2


def test_one_process_is_this_one():
    endpoint = Endpoint("http://x", "x", "127.0.0.1", 1)
    assert isinstance(loader_for(endpoint, shots([0.0]), processes=1, timeout_s=1), Load)
    assert isinstance(loader_for(endpoint, shots([0.0]), processes=2, timeout_s=1), Fleet)


ORPHANS = """
import asyncio, json, sys
from tailrace.bench.load import Fleet, Shot
from tailrace.bench.wire import resolve

async def go():
    body = json.dumps({"prompt": "a", "max_tokens": 2, "seed": 0}).encode()
    shots = [Shot(i, 0.0, 1, 2, body) for i in range(2)]
    fleet = Fleet(await resolve(sys.argv[1]), shots, processes=2, timeout_s=60)
    task = asyncio.create_task(fleet.run(asyncio.Event()))
    await fleet.state.has_started.wait()
    print(*(worker.process.pid for worker in fleet._workers), flush=True)
    await task

asyncio.run(go())
"""


def test_no_process_outlives_its_parent_and_none_complains():
    with running(script=lambda _: Behaviour(fault="silent")) as server:
        parent = subprocess.Popen(  # our own program
            [sys.executable, "-c", ORPHANS, server.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait()
        parent.stdout.close()
        deadline_s = time.monotonic() + 120
        while any(map(is_running, pids)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
        assert parent.stderr.read() == b""
        parent.stderr.close()


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie that nobody has reaped."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
