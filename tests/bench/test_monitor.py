from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from types import SimpleNamespace

import pytest

from tailrace.bench.metrics_source import Figures
from tailrace.bench.monitor import Monitor, Reading, read_readings, to_line
from tailrace.errors import ConfigError

QUICK_S = 0.02


class Script:
    """A source that tells what it was given, one call at a time."""

    interval_s = QUICK_S

    def __init__(self, *answers):
        self.answers = list(answers)

    async def read(self):
        return self.answers.pop(0) if self.answers else []


class FakeGpus:
    def __init__(self, *readings):
        self.readings = list(readings)

    def read(self):
        return self.readings


def gpu(index, *, busy=0.5, memory=100, power=70.5, clock=None, held=None):
    return SimpleNamespace(
        index=index,
        busy_share=busy,
        memory_used_bytes=memory,
        power_w=power,
        sm_clock_mhz=clock,
        is_held_back=held,
    )


def watch(monitor, until, elapsed_s=lambda: 10.0):
    """Watch until `until(readings)` holds, and return the readings."""
    found = []

    async def go():
        task = asyncio.create_task(monitor.watch(elapsed_s, found.append))
        end_s = time.monotonic() + 120
        while not until(found) and not task.done():
            assert time.monotonic() < end_s, found
            await asyncio.sleep(QUICK_S)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(go())
    return found


def of(readings, source):
    return [reading for reading in readings if reading.source == source]


def test_the_servers_figures_come_at_their_own_time_with_the_constants():
    source = Script([Figures(2.0, {"running": 1.0}), Figures(0.5, {"running": 2.0, "hits": 3.0})])
    constants = {"max_running": 8.0, "hits": 0.0}
    monitor = Monitor(source, constants=constants, interval_s=QUICK_S)
    found = of(watch(monitor, lambda seen: len(of(seen, "server")) == 2), "server")
    assert found == [
        Reading("server", 8.0, {"max_running": 8.0, "hits": 0.0, "running": 1.0}),
        Reading("server", 9.5, {"max_running": 8.0, "hits": 3.0, "running": 2.0}),
    ]


def test_what_a_lagging_source_knows_at_the_end_still_counts():
    slow = Script([], [Figures(1.0, {"running": 1.0})])
    slow.interval_s = 1000.0
    monitor = Monitor(slow, interval_s=QUICK_S)
    found = watch(monitor, lambda seen: len(slow.answers) == 1 and seen)
    assert of(found, "server") == [Reading("server", 9.0, {"running": 1.0})]


def test_our_own_view_of_the_gpus_wins_over_a_collectors():
    source = Script([Figures(0.0, {"running": 1.0}, {"gpu0_power_w": 1.0})])
    ours = FakeGpus(gpu(0), gpu(1), gpu(2, busy=None, power=None, clock=1400, held=True))
    monitor = Monitor(source, gpus=ours, devices=frozenset({0, 2}), interval_s=QUICK_S)
    found = watch(monitor, lambda seen: of(seen, "gpu") and of(seen, "server"))
    assert of(found, "gpu")[0].values == {
        "gpu0_utilisation": 0.5,
        "gpu0_memory_bytes": 100.0,
        "gpu0_power_w": 70.5,
        "gpu2_memory_bytes": 100.0,
        "gpu2_sm_clock_mhz": 1400.0,
        "gpu2_held_back": 1.0,
    }
    assert not any(reading.values == {"gpu0_power_w": 1.0} for reading in found)


def test_a_collectors_gpus_count_where_we_see_none():
    source = Script([Figures(0.0, {}, {"gpu0_power_w": 1.0})])
    found = watch(Monitor(source, interval_s=QUICK_S), lambda seen: of(seen, "gpu"))
    assert of(found, "gpu")[0].values == {"gpu0_power_w": 1.0}
    assert of(found, "server") == []


@pytest.mark.parametrize("pid", [None, os.getpid()], ids=["none", "ours"])
def test_what_a_server_says_of_its_processes_counts_where_they_are_not_ours(pid):
    source = Script([Figures(0.0, {"running": 1.0}, {}, {"rss_bytes": 7.0})])
    monitor = Monitor(source, pid=pid, interval_s=QUICK_S)
    found = watch(monitor, lambda seen: of(seen, "process") and of(seen, "server"))
    told = [reading.values for reading in of(found, "process")]
    assert ({"rss_bytes": 7.0} in told) == (pid is None)


def test_processes_and_client_are_read_from_the_kernel():
    monitor = Monitor(None, pid=os.getpid(), interval_s=0.1)
    found = watch(monitor, lambda seen: len(of(seen, "process")) >= 3 and of(seen, "client"))
    first, second = of(found, "process")[:2]
    assert first.values["processes"] >= 1
    assert first.values["rss_bytes"] > 2**20
    assert "cpu_cores" not in first.values  # one reading alone tells no rate
    assert 0 <= second.values["cpu_cores"] < 1000
    client = of(found, "client")[0].values
    assert 0 <= client["cpu_steal"] <= 1
    assert 0 <= client["cpu_busy"] <= 1


def test_a_process_that_is_gone_is_left_out():
    monitor = Monitor(None, pid=2**22 + 1, interval_s=QUICK_S)
    assert of(watch(monitor, lambda seen: len(of(seen, "client")) > 2), "process") == []


def test_a_source_that_breaks_ends_the_watch_with_its_error():
    class Broken(Script):
        async def read(self):
            raise ConfigError("several servers")

    async def go():
        await Monitor(Broken(), interval_s=QUICK_S).watch(lambda: 0.0, lambda _: None)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(go())
    assert isinstance(caught.value.exceptions[0], ConfigError)


def test_readings_come_back_by_source_in_order_of_time(tmp_path):
    file = tmp_path / "monitor.jsonl"
    readings = [
        Reading("server", 2.0, {"running": 2.0}),
        Reading("gpu", 1.0, {"gpu0_power_w": 70.5}),
        Reading("server", 1.0, {"running": 1.0, "kv_usage": 0.5}),
    ]
    file.write_bytes(b"".join(map(to_line, readings)) + b'{"source": "ser')
    found = read_readings(file)
    assert found["server"].at_s == [1.0, 2.0]
    assert found["server"].values["running"] == [1.0, 2.0]
    assert math.isnan(found["server"].values["kv_usage"][1])
    assert found["gpu"].values == {"gpu0_power_w": [70.5]}
    assert read_readings(tmp_path / "none") == {}


def test_a_file_of_something_else_is_an_error(tmp_path):
    file = tmp_path / "monitor.jsonl"
    file.write_text('{"source": "server"}\n')
    with pytest.raises(ConfigError, match="line 1: not a reading"):
        read_readings(file)
