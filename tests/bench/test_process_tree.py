from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailrace.bench.process_tree import ProcessTree, members, oom_kills, usage

DEADLINE_S = 120.0

# A first process with a child in its session and one that has left it, all busy with nothing.
FAMILY = """
import subprocess, sys, time
rest = [sys.executable, "-c", "import time; time.sleep(100)"]
a = subprocess.Popen(rest)
b = subprocess.Popen(rest, start_new_session=True)
print(a.pid, b.pid, flush=True)
time.sleep(100)
"""


def wait_until(holds, what):
    end_s = time.monotonic() + DEADLINE_S
    while not (found := holds()):
        assert time.monotonic() < end_s, f"still not: {what}"
        time.sleep(0.02)
    return found


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in {"Z", "X"}


def start(tmp_path, script: str) -> ProcessTree:
    return ProcessTree([sys.executable, "-c", script], log_file=tmp_path / "log")


def children(tmp_path) -> list[int]:
    log = tmp_path / "log"
    wait_until(lambda: log.read_text().endswith("\n"), "the children's numbers are printed")
    return [int(word) for word in log.read_text().split()]


@pytest.mark.parametrize("end", [ProcessTree.kill, lambda tree: tree.stop(20.0)])
def test_nothing_of_the_tree_is_left_even_what_left_the_session(tmp_path, end):
    tree = start(tmp_path, FAMILY)
    pids = [tree.pid, *children(tmp_path), tree._guard.pid]
    assert all(map(is_running, pids))
    end(tree)
    assert not any(map(is_running, pids))


def test_the_exit_status_is_told_and_a_deaf_process_is_killed(tmp_path):
    polite = "import signal,sys,time\nsignal.signal(15, lambda *_: sys.exit(7))\n"
    deaf = "import signal,time\nsignal.signal(15, signal.SIG_IGN)\n"
    for script, grace_s, status in ((polite, 20.0, 7), (deaf, 0.2, None)):
        (tmp_path / "log").unlink(missing_ok=True)
        tree = start(tmp_path, script + "print(1, flush=True)\ntime.sleep(100)")
        children(tmp_path)
        assert tree.stop(grace_s) == status
        assert not is_running(tree.pid)


def test_what_a_shell_leaves_running_is_asked_to_end_too(tmp_path):
    polite = (
        "import signal,sys,time\n"
        "signal.signal(15, lambda *_: sys.exit(print('in order', flush=True)))\n"
        "print('up', flush=True)\ntime.sleep(100)"
    )
    command = ["sh", "-c", f'{sys.executable} -c "{polite}"; true']
    tree = ProcessTree(command, log_file=tmp_path / "log")
    log = tmp_path / "log"
    wait_until(lambda: log.read_text().startswith("up"), "the server is up")
    assert tree.stop(20.0) == -15
    assert log.read_text() == "up\nin order\n"


def test_a_tree_that_has_ended_is_stopped_without_a_word(tmp_path):
    tree = start(tmp_path, "raise SystemExit(3)")
    assert tree.wait(DEADLINE_S) == 3
    tree.send_signal(15)
    assert tree.stop(5.0) == 3
    assert usage(tree.pid) is None


def test_the_guard_ends_the_tree_when_we_are_killed(tmp_path):
    ours = (
        "import sys, pathlib\n"
        "from tailrace.bench.process_tree import ProcessTree\n"
        "import time\n"
        f"tree = ProcessTree([sys.executable, '-c', 'import time; time.sleep(100)'],\n"
        f"    log_file=pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "print(tree.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    harness = subprocess.Popen([sys.executable, "-c", ours], stdout=subprocess.PIPE, text=True)
    pid = int(harness.stdout.readline())
    assert is_running(pid)
    harness.kill()
    harness.wait()
    harness.stdout.close()
    wait_until(lambda: not is_running(pid), "the server has ended")


def test_the_output_is_appended(tmp_path):
    for word in ("first", "second"):
        tree = start(tmp_path, f"print({word!r})")
        tree.wait(DEADLINE_S)
        tree.kill()
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_a_program_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        ProcessTree([str(tmp_path / "none")], log_file=tmp_path / "log")


def test_use_covers_the_whole_tree(tmp_path):
    tree = start(tmp_path, FAMILY)
    try:
        a, b = children(tmp_path)
        assert {tree.pid, a, b} == {member.pid for member in members(tree.pid)}
        used = usage(tree.pid)
        assert used.processes == 3
        assert used.rss_bytes > 3 * 2**20
        assert used.cpu_s > 0
    finally:
        tree.kill()
    assert members(tree.pid) == []


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "found"),
    [
        ("0::/a/b\n", "a/b/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        # Inside a container the path is the host's, and the mount shows the group itself.
        ("0::/host/path\n", "memory.events", "oom_kill 4\n", 4),
        ("5:cpu:/x\n4:memory:/x\n0::/\n", "memory/x/memory.oom_control", "oom_kill 5\n", 5),
        ("4:memory:/x\n", "memory/memory.oom_control", "under_oom 0\noom_kill 6\n", 6),
        ("0::/a\n", "elsewhere", "oom_kill 1\n", None),
    ],
)
def test_kills_for_memory_are_read_from_either_version_of_groups(
    tmp_path, cgroup, file, text, found
):
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(cgroup)
    (tmp_path / "groups" / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "groups" / file).write_text(text)
    assert oom_kills(7, proc=tmp_path / "proc", cgroups=tmp_path / "groups") == found
    assert oom_kills(8, proc=tmp_path / "proc", cgroups=tmp_path / "groups") is None


def test_this_machine_may_or_may_not_tell():
    assert (oom_kills(os.getpid()) or 0) >= 0
