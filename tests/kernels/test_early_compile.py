"""What is compiled ahead is what is launched: for Hopper, by processes that see no GPU.

In processes of their own, without Triton's interpreter (tests/kernels/early_kernels.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tailrace.errors import ConfigError
from tailrace.kernels import compile_worker
from tailrace.kernels.compile_order import CompileOrder, is_on_disk
from tailrace.kernels.compile_worker import Compiled
from tailrace.kernels.early_compile import EarlyCompile

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]

DRIVER = """
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuGetErrorString) NOTHING(cuCtxGetCurrent) NOTHING(cuDeviceGet) NOTHING(cuCtxSetCurrent)
NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuPointerGetAttribute) NOTHING(cuFuncSetAttribute)
NOTHING(cuLaunchKernelEx)
"""
"""What a launcher is linked with; none of it is called."""
LAUNCHES = [
    "plain_kernel", "plain_kernel", "constants_kernel", "constants_kernel", "dependent_kernel",
    "gluon_kernel", "gluon_kernel", "boxes_kernel", "gluon_boxes_kernel", "first_caller_kernel",
    "second_caller_kernel",
]  # fmt: skip
AHEAD, LEFT = "kernels_compiled_ahead", "kernels_left_to_be_compiled_here"


def found(*names, **environment):
    """Return what a run of early_kernels.py says."""
    own = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.early_kernels", *names],
        env={**own, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def runs():
    return found("collected", "faulty", "dying", "few", "hopper")


def logged(lines, event):
    return [line for line in lines if line["event"] == event]


def test_what_workers_compiled_is_loaded_and_not_compiled_again(tmp_path):
    """Plain, Gluon and dependent kernels; constants of all kinds, descriptors, registers."""
    library = tmp_path / "libcuda.so.1"
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    place = {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    run = found("compiled", **place)["compiled"]
    assert run["is_ready"]
    assert run["is_used"]
    assert run["meanwhile"] == [None]  # once, while it compiles
    assert run["hashed"] == 1
    assert run["loaded"] == LAUNCHES
    first, again = logged(run["log"], AHEAD)
    count = len(LAUNCHES)
    assert (first["kernels"], first["on_disk"], first["compiled"]) == (count, 0, count)
    assert first["launchers"] == count
    assert first["workers"] > 1
    assert (again["on_disk"], again["compiled"], again["workers"]) == (count, 0, 0)
    assert not logged(run["log"], LEFT)
    assert run["marks"] == ["before", "kernels", "between", "kernels"]


def test_nothing_is_launched_while_launches_are_collected(runs):
    """The one that is in memory already is not wanted, and is not launched either.

    What is launched again and again is asked for once.
    """
    run = runs["collected"]
    assert run["names"] == sorted(LAUNCHES[1:])
    assert run["made"] == len(LAUNCHES[1:])
    assert run["left"] == {}


def test_hoppers_own_kernels_go_over_a_line(runs):
    """Descriptors with layouts, registers, names of orders; in both ways of launching."""
    run = runs["hopper"]
    expected = {
        "int4_hopper_kernel": 6, "int4_bands_kernel": 6, "half_hopper_kernel": 8,
        "hopper_prefill_kernel": 1, "hopper_decode_kernel": 2,
    }  # fmt: skip
    assert {name: run["names"].count(name) for name in run["names"]} == expected
    assert run["gluon"]
    assert run["left"] == {}


def test_what_a_runner_rehearses_is_all_that_its_requests_want():
    """On memory filled with NaN, so no operation of torch's indexes by what kernels leave out."""
    said = found("models")["models"]
    assert set(said) == {"plain", "awq", "fp8 blocks"}
    for name, run in said.items():
        assert run["kept"], name
        assert run["missing"] == [], name
        assert run["left"] == {}, name
        assert run["is_found_by_few_layers"], name
        assert "prefill_kernel" in run["largest"]
        assert {"decode_kernel", "prefill_kernel", "draw_kernel"} < set(run["rehearsed"])
    assert "int4_kernel" in said["awq"]["rehearsed"]
    assert "float8_skinny_kernel" in said["fp8 blocks"]["rehearsed"]


def test_a_kernel_that_does_not_compile_or_cannot_be_ordered_is_left_and_told(runs):
    lines = runs["faulty"]["log"]
    (ahead,), (left,) = logged(lines, AHEAD), logged(lines, LEFT)
    assert ahead["kernels"] == len(LAUNCHES) + 2
    assert ahead["compiled"] == len(LAUNCHES)
    assert left["count"] == 2
    told = " | ".join(left["reasons"])
    assert "function_kernel: a JITFunction does not go over a line" in told
    assert "failing_kernel: CompileTimeAssertionFailure: never" in told


def test_workers_that_die_hang_or_are_not_there_cost_time_alone(runs):
    lines = runs["dying"]["log"]
    assert [line["compiled"] for line in logged(lines, AHEAD)] == [0, 0, 0, 0]
    reasons = [line["reasons"] for line in logged(lines, LEFT)]
    assert [told[0] for told in reasons] == [
        "a worker died (status 3)",
        "no end after 1 s",
        "a worker died (status -9)",
        "no worker could be started",
    ]


def test_a_few_kernels_or_a_few_cores_are_no_work_for_workers(runs):
    lines = runs["few"]["log"]
    assert [line["workers"] for line in logged(lines, AHEAD)] == [0, 0]
    assert not logged(lines, LEFT)
    (here,) = logged(lines, "kernels_compiled_here")  # and once more from disk
    assert (here["count"], here["names"]) == (1, ["plain_kernel"])
    assert here["seconds"] > 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_worker_runs_on_all_cores_whatever_its_starter_is_bound_to(monkeypatch):
    """As the runner's thread is bound to one, by OpenMP, when torch is imported."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("GOMP_CPU_AFFINITY", str(cores[0]))
    script = "import os, torch; print(sorted(os.sched_getaffinity(0)), torch.cuda.is_available())"
    early = EarlyCompile((sys.executable, "-c", script))
    os.sched_setaffinity(0, cores[:1])
    try:
        worker = early._start()
        assert os.sched_getaffinity(0) == {cores[0]}
    finally:
        os.sched_setaffinity(0, cores)
    assert worker.communicate(timeout=120)[0].decode().split("\n")[0] == f"{cores} False"


def test_cores_that_are_taken_away_are_no_error_of_the_start():
    own = os.sched_getaffinity(0)
    assert EarlyCompile((sys.executable, "-c", ""), cores=[4095])._start() is None
    assert os.sched_getaffinity(0) == own


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_dies_takes_one_kernel_with_it(monkeypatch):
    """Four orders, of which the second ends whoever compiles it."""

    def compiled(index, _):
        if index == 1:
            os._exit(7)
        return Compiled(index, 0.0)

    monkeypatch.setattr(compile_worker, "_compiled", compiled)
    numbers, ahead = os.pipe()
    os.write(ahead, b"".join(i.to_bytes(4, "little") for i in range(4)))
    os.close(ahead)
    answers, out = os.pipe()
    children = [compile_worker._child([None] * 4, numbers, out) for _ in range(2)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.close(out)
    with os.fdopen(answers, "rb") as lines:
        indices = sorted(json.loads(line)["index"] for line in lines)
    os.close(numbers)
    assert indices == [0, 2, 3]
    assert sorted(statuses) == [0, 7]


def test_a_worker_that_still_imports_gets_more_orders_than_a_pipe_holds():
    """And one that ends before it has read them holds nobody up."""
    script = "import sys, time; time.sleep(1); print(len(sys.stdin.buffer.read()))"
    done = []
    early = EarlyCompile(
        (sys.executable, "-c", script), timeout_s=60, meanwhile=lambda: done.append("read")
    )
    lines = b"x" * 1_000_000
    worker = early._start()
    assert early._answered(worker, lines) == b"1000000\n"
    assert done == ["read"]
    gone = EarlyCompile((sys.executable, "-c", ""), meanwhile=lambda: done.append("read"))
    assert gone._answered(gone._start(), lines) == b""
    assert done == ["read", "read"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """As on a read-only root file system; what the cache has already is taken from it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    order = CompileOrder(
        module="m", name="kernel", target=("cuda", 90, 32), signature=[], constants=[],
        attributes=[], options={}, key="0" * 64, is_gluon=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"file/cache.*Not a directory.*set TRITON_CACHE_DIR"):
        is_on_disk(order)
