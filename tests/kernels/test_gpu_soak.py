"""The soak of kernels: what hangs, dies or differs is found and named; its families on the CPU."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

from benchmarks import gpu_soak, soak_families, soak_worker
from benchmarks.soak_families import Job

from tailrace.kernels import dependent_launch
from tests.support.interpreter import quietly

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GIVEN = {
    "family": "made up", "seed": 0, "round": 0, "seconds": 0.0, "hang_s": 60.0, "one_by_one": False,
    "device": "cpu", "any_shape": False,
}  # fmt: skip


class Kernel:
    """A family of one kernel, which writes what its job says; at one of its launches, a fault."""

    def __init__(self, fault=None, at=9, arrivals=None):
        self.fault, self.at, self.arrivals = fault, at, arrivals
        self.launches = []

    def __call__(self, device, *, any_shape):
        return self.make

    def make(self, rng):
        number = rng.randint(1, 100)

        def launch(out):
            self.launches.append(dependent_launch.launch_options()["DEPENDENT"])
            if self.fault and len(self.launches) == self.at:
                self.fault(out)
            else:
                out[0].fill_(number)

        return Job(f"job {number}", ((3, 2),), launch, arrivals=self.arrivals)


def worker(tmp_path, **given):
    board = soak_worker.Board(tmp_path / "line", is_new=True)
    return soak_worker.Worker(GIVEN | given, board, tmp_path / "found")


def soaked(worker, kernel, batches=4):
    """Let a worker launch some batches; return its line."""
    rng = Random(1)
    worker.prepare(kernel.make, rng, 0)
    for number in range(batches):
        worker.batch(f"batch {number}", rng)
    return worker.board.read()


def test_equal_results_are_no_fault_and_launches_are_counted(tmp_path):
    kernel = Kernel()
    line = soaked(worker(tmp_path), kernel)
    assert (line["batches"], line["differed"], line["faults"]) == (4, 0, [])
    # The first of each job, plain and dependent, are not counted.
    assert line["launches"] == len(kernel.launches) - 4 > 0
    assert line["words"].endswith(": ended")


def test_batches_are_plain_and_dependent(tmp_path):
    kernel = Kernel()
    soaked(worker(tmp_path), kernel, batches=12)
    assert set(kernel.launches[4:]) == {False, True}


def test_a_job_that_no_server_launches_dependently_never_is(tmp_path):
    kernel = Kernel()
    made = kernel.make

    def make(rng):
        job = made(rng)
        return Job(job.words, job.results, job.launch, may_depend=False)

    kernel.make = make
    soaked(worker(tmp_path), kernel, batches=12)
    assert set(kernel.launches) == {False}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda out: out[0].fill_(101), "6 of 6 values, the first at [0, 0]"),
        (lambda out: out[0][:2].fill_(101), "6 of 6 values"),
        (lambda out: None, "6 of 6 values"),
    ],
    ids=["other bits", "rows left out", "not written"],
)
def test_bits_that_change_are_found_and_named(tmp_path, fault, words):
    line = soaked(worker(tmp_path), Kernel(fault))
    assert line["differed"] == 1
    assert words in line["faults"][0]
    assert " of job " in line["faults"][0]


@pytest.mark.parametrize("at", [1, 2], ids=["at first", "by the first dependent launch"])
def test_first_results_are_looked_at(tmp_path, at):
    kernel = Kernel(lambda out: out[0][0].fill_(0), at=at)
    assert soaked(worker(tmp_path), kernel)["differed"] >= 1


def test_arrivals_that_are_left_behind_are_a_fault_once(tmp_path):
    arrivals = torch.zeros(4, dtype=torch.int32)
    kernel = Kernel(lambda out: arrivals.fill_(1), arrivals=arrivals, at=5)
    line = soaked(worker(tmp_path), kernel, batches=3)
    assert [fault for fault in line["faults"] if "arrivals are left behind" in fault]
    assert not arrivals.any()
    assert line["differed"] == 2  # and its results are missing


def test_one_by_one_each_launch_is_said_alone_before_it_begins(tmp_path):
    said = []
    kernel = Kernel(lambda out: said.append(one.board.read()["words"]), at=6)
    one = worker(tmp_path, one_by_one=True)
    soaked(one, kernel)
    assert "launch 1 alone: job " in said[0]


def test_a_batch_is_said_with_its_jobs_in_order_before_it_begins(tmp_path):
    said = []
    one = worker(tmp_path)
    kernel = Kernel(lambda out: said.append(one.board.read()["words"]), at=6)
    soaked(one, kernel)
    assert said[0].startswith("batch 0, ")
    assert f"[0] {one.pool[0].words}" in said[0] or f"[1] {one.pool[1].words}" in said[0]


def test_graphs_are_captured_of_launches_and_replayed(tmp_path, monkeypatch):
    """A graph here is a list of what was launched while it was captured."""
    recording = []

    class Graph(list):
        def replay(self):
            for call in self:
                call()

    @contextmanager
    def capture(graph):
        recording.append(graph)
        yield
        recording.pop()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    kernel = Kernel(lambda out: out[0].fill_(101), at=30)
    made = kernel.make

    def make(rng):
        job = made(rng)

        def launch(out):
            if recording:
                recording[-1].append(lambda: job.launch(out))
            else:
                job.launch(out)

        return Job(job.words, job.results, launch)

    kernel.make = make
    one = worker(tmp_path)
    one.is_gpu = True
    line = soaked(one, kernel, batches=16)
    assert [graph.words.split()[0] for graph in one.graphs] == ["plain", "dependent"] * 2
    assert line["launches"] == len(kernel.launches) - 4
    assert line["differed"] == 1


def test_how_far_a_launch_has_come_is_told_by_its_rows():
    truth = torch.arange(6.0).bfloat16().view(3, 2)
    found = torch.full_like(truth, float("nan"))
    assert soak_worker.progress(found, truth) == "nothing written"
    found[:2] = truth[:2]
    assert soak_worker.progress(found, truth) == "2 of 6 values missing, of rows [2]"
    found[2] = truth[2]
    assert soak_worker.progress(found, truth) == "whole"
    found[2, 1] = 9
    assert soak_worker.progress(found, truth) == "other bits"


def test_a_line_is_cut_to_its_room_and_half_a_line_is_none(tmp_path):
    board = soak_worker.Board(tmp_path / "line", is_new=True)
    board.say({"words": "x" * soak_worker.LINE_BYTES, "faults": ["y" * 600] * 5})
    assert len(board.read()["words"]) == soak_worker.MOST_WORDS
    board._map[:10] = b"{" * 10
    assert board.read() is None


WORKERS = """
import sys, time
from random import Random
sys.path[:0] = {path!r}
from benchmarks import soak_families, soak_worker
from tests.kernels.test_gpu_soak import Kernel

def for_ever(out):
    while True:
        time.sleep(1)

def die(out):
    raise RuntimeError("an illegal address")

soak_families.FAMILIES.update(
    fine=Kernel(), stuck=Kernel(for_ever), dead=Kernel(die),
    other=Kernel(lambda out: out[0].fill_(101)),
    crowded=Kernel(None if '"one_by_one": true' in sys.argv[2] else for_ever),
)
soak_families.interpret = lambda: None
soak_worker.main()
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Have workers of families that are made up; return how the script is run."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS.format(path=[str(ROOT), str(ROOT / "src")]))
    monkeypatch.setattr(gpu_soak, "SCRIPT", script)
    families = dict.fromkeys(("fine", "stuck", "dead", "other", "crowded"))
    monkeypatch.setattr(gpu_soak, "FAMILIES", families)

    def run(*arguments):
        given = ["gpu_soak.py", "--device", "cpu", "--out", str(tmp_path), "--seconds", "0.3"]
        monkeypatch.setattr(sys, "argv", [*given, "--hang-s", "1.5", *arguments])
        with pytest.raises(SystemExit) as ended:
            gpu_soak.main()
        found = json.loads((tmp_path / "gpu_soak.json").read_text())
        return ended.value.code, {row["family"]: row for row in found}

    return run


def test_what_hangs_dies_and_differs_is_named_while_the_others_go_on(made_up, capsys):
    code, rows = made_up("--together", "--disturb", "1")
    assert code == 1
    said = capsys.readouterr().out
    assert "ended early" not in said
    batch, alone = rows["stuck"]["hangs"]
    assert "round 0, batch " in batch
    assert "nothing written" in batch
    assert "for_ever" in batch, "the stack is missing"
    assert "cuda-gdb is not on the PATH" in batch
    assert " alone: job " in alone
    (crowded,) = rows["crowded"]["hangs"]
    assert "one by one it did not, in " in crowded
    (death,) = rows["dead"]["deaths"]
    assert "an illegal address" in death
    assert "round 0, batch " in death
    assert rows["other"]["differed"] == 1
    assert rows["fine"]["launches"] > 4
    wrong = {name: [row[k] for k in ("hangs", "deaths", "faults")] for name, row in rows.items()}
    assert wrong["fine"] == [[], [], []]
    assert all(any(wrong[name]) for name in rows if name != "fine")


def test_what_is_right_ends_with_0(made_up):
    code, rows = made_up("--families", "fine")
    assert code == 0
    assert list(rows) == ["fine"]


def test_an_unknown_family_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_soak.py", "--families", "decode,decod"])
    with pytest.raises(SystemExit):
        gpu_soak.parsed()
    assert "--families decod: there are decode, half, " in " ".join(capsys.readouterr().err.split())


def test_the_table_has_a_line_a_family_and_what_was_wrong(capsys):
    row = {"launches": 1200, "batches": 60, "differed": 1, "deaths": []}
    gpu_soak.print_table(
        [
            row | {"family": "half", "hangs": ["no line"], "faults": ["2 of 6 values"]},
            row | {"family": "decode", "differed": 0, "hangs": [], "faults": []},
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert {"half, hangs: no line", "half, faults: 2 of 6 values"} < set(lines)
    assert [line.split() for line in lines[-2:]] == [
        ["half", "1200", "60", "1", "1", "0"],
        ["decode", "1200", "60", "0", "0", "0"],
    ]


def test_a_debugger_is_asked_where_it_is_installed(tmp_path, monkeypatch):
    asked = tmp_path / "cuda-gdb"
    asked.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    file = tmp_path / "said"
    assert gpu_soak.debugged(42, file) == f"cuda-gdb ended with 3: {file}"
    assert file.read_text() == "-p 42 -batch -ex info cuda kernels -ex info cuda warps -ex bt\n"


@pytest.mark.parametrize("name", soak_families.FAMILIES)
def test_a_familys_jobs_give_the_same_bits_again(name, monkeypatch):
    """By their kernels, in interpreters; dependently too."""
    soak_families.interpret(monkeypatch.setattr)
    rng = Random(3)
    torch.manual_seed(3)
    job = soak_families.FAMILIES[name](CPU, any_shape=False)(rng)
    results = []
    for dependent in (False, job.may_depend):
        out = [torch.full(shape, float("nan"), dtype=job.dtype) for shape in job.results]
        with quietly(), torch.inference_mode(), dependent_launch.dependent_launches(on=dependent):
            job.launch(out)
        assert not any(x.isnan().any() for x in out)
        results.append(out)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert job.arrivals is None or not job.arrivals.any()
