from __future__ import annotations

import sys

import pytest

from tailrace.bench import machine
from tailrace.bench.machine import (
    TICKS_PER_S,
    CpuTimes,
    cpu_times,
    describe,
    others_share,
    steal_share,
)


def test_the_machine_is_described():
    found = describe()
    assert found["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(found.values())


def test_what_the_system_does_not_tell_is_left_out(monkeypatch, tmp_path):
    for name in ("CPUINFO", "STAT", "MEMINFO", "GOVERNOR"):
        monkeypatch.setattr(machine, name, tmp_path / "none")
    found = describe()
    assert "Memory" not in found
    assert "CPU governor" not in found
    assert cpu_times() is None


STAT = """\
cpu  100 1 50 800 20 3 4 22 5 6
cpu0 10 0 0 0 0 0 0 0 0 0
cpu1 20 1 5 100 2 3 4 7 8 9
cpu2 1 0 0 50 0 0 0 1 0 0
intr 1 2 3
"""


def counted(monkeypatch, tmp_path, cpus, text=STAT):
    stat = tmp_path / "stat"
    stat.write_text(text)
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: cpus)
    return cpu_times()


def test_cpu_time_is_that_of_the_cpus_that_we_may_use(monkeypatch, tmp_path):
    """On the host's other CPUs anybody may do as they like."""
    found = counted(monkeypatch, tmp_path, {1, 2})
    assert found == CpuTimes(total=142 + 52, stolen=7 + 1, idle=102 + 50)


def test_where_cpus_are_numbered_otherwise_the_first_line_is_ours(monkeypatch, tmp_path):
    found = counted(monkeypatch, tmp_path, {1, 77})
    assert found == CpuTimes(total=1000, stolen=22, idle=820)


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\ncpu0 1 2 3\n", "intr 1 2 3 4 5 6 7 8 9\n"])
def test_a_kernel_that_does_not_count_so_tells_nothing(monkeypatch, tmp_path, text):
    assert counted(monkeypatch, tmp_path, {0}, text) is None


def test_steal_is_a_share_of_the_time_between():
    assert steal_share(CpuTimes(1000, 10), CpuTimes(1200, 20)) == pytest.approx(0.05)
    assert steal_share(CpuTimes(1000, 10), CpuTimes(1000, 10)) is None
    assert steal_share(None, CpuTimes(1, 1)) is None


def test_what_is_neither_ours_nor_idle_nor_stolen_is_others():
    before, after = CpuTimes(1000, 10, 500), CpuTimes(2000, 110, 800)
    own_s = 350 / TICKS_PER_S
    assert others_share(before, after, own_s) == pytest.approx(0.25)
    assert others_share(before, after, 2 * own_s) == 0
    assert others_share(before, before, 0.0) is None
    assert others_share(before, after, None) is None
    assert others_share(None, after, 0.0) is None
