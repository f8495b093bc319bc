"""How much memory a process may still take, told from made-up trees of /proc and control groups."""

from pathlib import Path

import pytest

from tailrace.telemetry.host_memory import Room, host_room

MIB = 2**20


class Host:
    """A machine of 1000 MiB free, with files written by the test."""

    def __init__(self, folder: Path):
        self.proc = folder / "proc"
        self.cgroups = folder / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 2048000 kB\nMemAvailable: 1024000 kB\n")

    def write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def is_in(self, *lines: str) -> None:
        self.write(self.proc / "self" / "cgroup", "".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: object) -> None:
        for name, value in files.items():
            self.write(self.cgroups / path / name.replace("_", ".", 1), f"{value}\n")

    def room(self) -> Room:
        return host_room(proc=self.proc, cgroups=self.cgroups)


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_without_groups_the_machine_has_what_is_available(host):
    assert host.room() == Room(1000 * MIB, "MemAvailable of this machine")
    host.is_in("0::/")
    assert host.room().free_bytes == 1000 * MIB


def test_the_tightest_group_on_the_way_up_decides(host):
    host.is_in("0::/pods/pod7/server")
    host.group("pods", memory_max=900 * MIB, memory_current=100 * MIB)
    host.group("pods/pod7", memory_max=600 * MIB, memory_current=90 * MIB)
    host.group("pods/pod7/server", memory_max="max", memory_current=80 * MIB)
    room = host.room()
    assert room.free_bytes == 510 * MIB
    assert "pods/pod7/memory.max (629145600 bytes, 94371840 taken)" in room.limit
    # What others in the pods took counts at the group that holds them all.
    host.group("pods", memory_current=500 * MIB)
    assert host.room().free_bytes == 400 * MIB


def test_pages_of_files_that_were_read_are_not_taken(host):
    host.is_in("0::/server")
    host.group("server", memory_max=500 * MIB, memory_current=450 * MIB)
    assert host.room().free_bytes == 50 * MIB
    stat = f"anon {50 * MIB}\nfile {400 * MIB}\ninactive_file {300 * MIB}\nactive_file {90 * MIB}"
    host.group("server", memory_stat=stat)
    assert host.room().free_bytes == 440 * MIB


def test_where_a_group_is_slowed_down_its_room_ends_too(host):
    host.is_in("0::/server")
    host.group("server", memory_max=500 * MIB, memory_high=200 * MIB, memory_current=20 * MIB)
    assert host.room().free_bytes == 180 * MIB
    assert "memory.high" in host.room().limit


def test_a_container_sees_its_group_at_the_mount_whatever_its_path(host):
    host.group("", memory_max=300 * MIB, memory_current=100 * MIB)
    for path in ("/", "/docker/7f3a", "/../other"):
        host.is_in(f"0::{path}")
        assert host.room().free_bytes == 200 * MIB


def test_a_group_that_took_more_than_its_limit_leaves_nothing(host):
    host.is_in("0::/server")
    host.group("server", memory_max=100 * MIB, memory_current=101 * MIB)
    assert host.room().free_bytes == 0


def test_version_1_has_names_of_its_own_and_counts_everything_below(host):
    host.is_in("5:cpu:/x", "4:cpuset,memory:/docker/7f3a", "0::/")
    host.group(
        "memory/docker",
        memory_limit_in_bytes=400 * MIB,
        memory_usage_in_bytes=350 * MIB,
        memory_stat=f"inactive_file 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file 0",
    )
    # No limit: a number beyond any machine.
    host.group(
        "memory/docker/7f3a",
        memory_limit_in_bytes=9223372036854771712,
        memory_usage_in_bytes=350 * MIB,
    )
    room = host.room()
    assert room.free_bytes == 150 * MIB
    assert "memory/docker/memory.limit_in_bytes" in room.limit


def test_the_second_hierarchy_of_a_mixed_system_is_read_where_it_lies(host):
    host.is_in("1:cpu:/", "0::/server")
    host.group("unified/server", memory_max=70 * MIB, memory_current=20 * MIB)
    assert host.room().free_bytes == 50 * MIB


def test_a_system_without_any_of_it_has_its_physical_memory(tmp_path):
    room = host_room(proc=tmp_path, cgroups=tmp_path)
    assert room.free_bytes > 0
    assert room.limit == "the memory of this machine"


def test_this_machine_has_some_room_left():
    assert 0 < host_room().free_bytes < 2**60
