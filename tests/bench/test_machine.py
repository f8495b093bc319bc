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


def test_steal_is_the_eighth_field_of_the_kernels_line(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 1 50 800 20 3 4 22 5 6\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(machine, "STAT", stat)
    assert cpu_times() == CpuTimes(total=1000, stolen=22, idle=820)


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
