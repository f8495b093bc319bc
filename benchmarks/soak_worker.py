"""A worker of gpu_soak.py: launches one family's kernels, and says beforehand what it launches.

    make inputs, first results, graphs | say | launch | wait | compare | say | launch ...

Two thirds into the time that a batch may take, a thread copies its results, NaN before, on a stream
of its own, and writes down what of them is there: the first launch whose results are not whole is
the one that hangs, and its rows tell which programs do.

Processes that disturb are here as well.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import json
import mmap
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from threading import Timer
from typing import TYPE_CHECKING, Any

import torch
from benchmarks import soak_families

from tailrace.kernels.dependent_launch import dependent_launches

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.soak_families import Job, Maker

    Drawn = tuple[list["Unit"], bool]
    """Launches to come, and whether they are dependent ones."""

POOL, MOST_LAUNCHES = {"cuda": 8, "cpu": 2}, {"cuda": 50, "cpu": 3}
"""Inputs of a round; launches of a batch without graphs, at most."""
GRAPHS, MOST_CAPTURED, BATCHES = 4, 12, 60
"""Of a round; launches of a graph, at most; batches of a round."""
PREPARE_S = 120.0
"""Most that anything takes before a batch: start, weights, a job's first launch, compiled."""
LINE_BYTES = 1 << 14
MOST_WORDS, MOST_FAULTS, FAULT_WORDS, SHOWN = 6000, 5, 1200, 16
"""Of what a worker does, characters; faults that are kept, their characters, and of where results
differ, rows, columns and values."""
WITH_PARENT, ANY_TRACER = (1, signal.SIGKILL), (0x59616D61, ctypes.c_ulong(-1))
"""Of prctl: to end when the parent does; that a debugger may attach which is no ancestor."""
NOTHING = {"launches": 0, "batches": 0, "differed": 0, "faults": (), "is_done": False}
"""What a worker has to tell when it starts."""


class Board:
    """A line in shared memory: who writes it is heard of when it comes no further."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        if is_new:
            path.write_bytes(b"{}".ljust(LINE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), LINE_BYTES)

    def say(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write facts and the time, and return them; `words` are cut to what there is room for."""
        facts = facts | {"beat_s": time.monotonic(), "words": facts["words"][:MOST_WORDS]}
        self._map[:] = json.dumps(facts).encode().ljust(LINE_BYTES)
        return facts

    def read(self) -> dict[str, Any] | None:
        """Return what was said last; None while it is being written."""
        try:
            return json.loads(self._map[:])
        except ValueError:
            return None


@dataclass(frozen=True)
class Unit:
    """A launch to come: of which job, into which memory."""

    index: int
    out: list[torch.Tensor]


@dataclass(frozen=True)
class Captured:
    units: list[Unit]
    graph: torch.cuda.CUDAGraph
    words: str


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return what 16-bit values are made of."""
    return x.view(torch.int16)


class Worker:
    """Launches one family's jobs.

    Args:
        given: family, seed, round (the first one), seconds, hang_s, one_by_one, device, any_shape.
        board: Where it says what it does.
        found: Where it leaves how far a batch has come that does not end.
    """

    def __init__(self, given: dict[str, Any], board: Board, found: Path) -> None:
        self.given, self.board, self.found = given, board, found
        self.is_gpu = given["device"] == "cuda"
        self.device = torch.device("cuda:0" if self.is_gpu else "cpu")
        self.aside = torch.cuda.Stream() if self.is_gpu else None
        self.facts: dict[str, Any] = NOTHING | {"round": given["round"]}

    def say(self, words: str, limit_s: float, **more: object) -> None:
        self.facts |= {"words": words, "limit_s": limit_s, **more}
        self.board.say(self.facts)

    def run(self, make: Maker) -> None:
        """Launch rounds for the seconds given, which begin when the first one is compiled."""
        ends = None
        for number in itertools.count(self.given["round"]):
            rng = Random(f"{self.given['seed']} {self.given['family']} {number}")
            self.prepare(make, rng, number)
            ends = ends or time.monotonic() + self.given["seconds"]
            for batch in range(BATCHES):
                if time.monotonic() > ends:
                    self.say("done", PREPARE_S, is_done=True)
                    return
                self.batch(f"round {number}, batch {batch}", rng)

    def prepare(self, make: Maker, rng: Random, number: int) -> None:
        """Make a round's inputs, their first results, and graphs."""
        self.say(f"round {number}, making inputs", PREPARE_S, round=number)
        torch.manual_seed(rng.getrandbits(32))
        self.graphs: list[Captured] = []
        self.pool, self.truths = [], []  # not twice in memory
        self.pool = [make(rng) for _ in range(POOL[self.device.type])]
        self.truths = [self.first(number, job) for job in self.pool]
        if self.is_gpu and not self.given["one_by_one"]:
            self.graphs = [
                self.captured(number, self.drawn(rng, MOST_CAPTURED, odd % 2 == 1))
                for odd in range(GRAPHS)
            ]

    def first(self, number: int, job: Job) -> list[torch.Tensor]:
        """Return a job's first results; compile what it needs."""
        self.say(f"round {number}, for the first time, plainly: {job.words}", PREPARE_S)
        truth = self.room(job)
        job.launch(truth)
        self.synchronize()
        if any(bool(x.isnan().any()) for x in truth):
            self.fault(f"NaN in the first result of {job.words}")
        if job.may_depend:
            self.say(f"round {number}, for the first time, dependently: {job.words}", PREPARE_S)
            again = self.room(job)
            with dependent_launches():
                job.launch(again)
            self.synchronize()
            self.compare("the first dependent launch", job, again, truth)
        return truth

    def captured(self, number: int, drawn: Drawn) -> Captured:
        units, dependent = drawn
        self.say(f"round {number}, capturing a graph", PREPARE_S)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), dependent_launches(on=dependent):
            for unit in units:
                self.pool[unit.index].launch(unit.out)
        self.synchronize()
        return Captured(units, graph, f"{'dependent' if dependent else 'plain'} {len(units)}")

    def drawn(self, rng: Random, most: int, dependent: bool) -> Drawn:
        """Draw jobs to launch, one after the other or the same several times, as layers are.

        Dependently, if that is asked for and some job here may go so.
        """
        able = [i for i, job in enumerate(self.pool) if job.may_depend] if dependent else []
        count, indices = rng.randint(1, most), []
        while len(indices) < count:
            index = rng.choice(able or range(len(self.pool)))
            indices += [index] * min(rng.choice((1, 1, 4)), count - len(indices))
        return [Unit(index, self.room(self.pool[index])) for index in indices], bool(able)

    def room(self, job: Job) -> list[torch.Tensor]:
        """Return memory for results, NaN."""
        return [
            torch.full(shape, float("nan"), dtype=job.dtype, device=self.device)
            for shape in job.results
        ]

    def batch(self, where: str, rng: Random) -> None:
        """Launch some, wait for them, and compare."""
        kind = rng.choice(("plain", "dependent", "graphs", "graphs"))
        dependent = False
        if kind == "graphs" and self.graphs:
            several = rng.sample(self.graphs, rng.randint(1, len(self.graphs)))
            units = [unit for one in several for unit in one.units]
            for out in (out for unit in units for out in unit.out):
                out.fill_(float("nan"))
            calls: list[Callable[[], object]] = [one.graph.replay for one in several]
            how = f"graphs of {', '.join(one.words for one in several)} launches"
        else:
            most = MOST_LAUNCHES[self.device.type]
            units, dependent = self.drawn(rng, most, kind == "dependent")
            calls = [partial(self.pool[unit.index].launch, unit.out) for unit in units]
            how = f"{'dependent' if dependent else 'plain'} launches"
        self.facts["launches"] += len(units)
        self.facts["batches"] += 1
        where = f"{where}, {how}"
        with dependent_launches(on=dependent):
            self.queue(where, units, calls)
        for unit in units:
            self.compare(where, self.pool[unit.index], unit.out, self.truths[unit.index])
        self.check_arrivals(where)
        self.say(f"{where}: ended", self.given["hang_s"])

    def queue(self, where: str, units: list[Unit], calls: list[Callable[[], object]]) -> None:
        """Say what is launched, launch it and wait; one by one, if that was asked for."""
        hang_s = self.given["hang_s"]
        self.synchronize()
        self.say(f"{where}: {self.told(units)}", hang_s)
        doctor = Timer(hang_s * 2 / 3, self.examine, (units,))
        doctor.daemon = True
        doctor.start()
        for place, launch in enumerate(calls):
            if self.given["one_by_one"]:
                words = f"{where}, launch {place} alone: {self.pool[units[place].index].words}"
                self.say(words, hang_s)
            launch()
            if self.given["one_by_one"]:
                self.synchronize()
        self.synchronize()
        doctor.cancel()
        self.found.unlink(missing_ok=True)  # slow, and no more

    def told(self, units: list[Unit]) -> str:
        """Say which jobs a batch launches, in order, and what they are."""
        order = [unit.index for unit in units]
        jobs = (f"\n    [{index}] {self.pool[index].words}" for index in sorted(set(order)))
        return f"{' '.join(map(str, order))}{''.join(jobs)}"

    def examine(self, units: list[Unit]) -> None:
        """Write down how much of each launch's results is there."""
        aside = torch.cuda.stream(self.aside) if self.aside else nullcontext()
        with torch.inference_mode(), aside, self.found.open("w") as file:
            for place, unit in enumerate(units):
                told = [
                    progress(out.cpu(), truth.cpu())
                    for out, truth in zip(unit.out, self.truths[unit.index], strict=True)
                ]
                file.write(f"launch {place} [{unit.index}]: {', '.join(told)}\n")
                file.flush()

    def compare(
        self, where: str, job: Job, found: list[torch.Tensor], truth: list[torch.Tensor]
    ) -> None:
        """Note where bits differ from the first ones."""
        for out, first in zip(found, truth, strict=True):
            differs = bits(out) != bits(first)
            if bool(differs.any()):
                self.fault(f"{where}: {apart(out, first, differs)} of {job.words}")

    def check_arrivals(self, where: str) -> None:
        for job in self.pool:
            if job.arrivals is not None and bool(job.arrivals.any()):
                job.arrivals.zero_()
                self.fault(f"{where}: arrivals are left behind, maybe by {job.words}")

    def fault(self, words: str) -> None:
        self.facts["differed"] += 1
        if len(self.facts["faults"]) < MOST_FAULTS:
            self.facts["faults"] += (words[:FAULT_WORDS],)

    def synchronize(self) -> None:
        """Wait for the stream that all others join; for the device, no thread could look at it."""
        if self.is_gpu:
            torch.cuda.current_stream().synchronize()


def apart(found: torch.Tensor, truth: torch.Tensor, differs: torch.Tensor) -> str:
    """Say where results differ, and by what: rows, columns, some values."""
    places = differs.flatten(1).nonzero()
    rows, columns = (places[:, dim].unique().tolist() for dim in (0, 1))
    some = [
        f"{tuple(at)} {found.flatten(1)[*at].item():.4g} for {truth.flatten(1)[*at].item():.4g}"
        for at in places[:: -(-len(places) // SHOWN)].tolist()
    ]
    return (
        f"{len(places)} of {found.numel()} values, the first at "
        f"{differs.nonzero()[0].tolist()}, rows {rows[:SHOWN]} of {len(rows)}, columns "
        f"{columns[:SHOWN]} to {columns[-1]} of {len(columns)}: {'; '.join(some)};"
    )


def progress(found: torch.Tensor, truth: torch.Tensor) -> str:
    """Say how much of a result, NaN before, has been written."""
    if torch.equal(bits(found), bits(truth)):
        return "whole"
    missing = found.isnan()
    if bool(missing.all()):
        return "nothing written"
    if not bool(missing.any()):
        return "other bits"
    rows = missing.flatten(1).any(1).nonzero().flatten().tolist()
    return f"{int(missing.sum())} of {found.numel()} values missing, of rows {rows[:12]}"


def work(given: dict[str, Any]) -> None:
    """Be a worker."""
    files = Path(given["files"])
    board = Board(files.with_suffix(".line"))
    with files.with_suffix(".stack").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        if given["device"] == "cpu":
            torch.set_num_threads(1)
            soak_families.interpret()
        with torch.inference_mode():
            worker = Worker(given, board, files.with_suffix(".found"))
            worker.say("making weights", PREPARE_S)
            family = soak_families.FAMILIES[given["family"]]
            worker.run(family(worker.device, any_shape=given["any_shape"]))


def disturb(given: dict[str, Any]) -> None:
    """Keep the device busy by fits: products, copies, nothing."""
    device, rng = torch.device(given["device"]), Random(given["seed"])
    is_gpu = device.type == "cuda"
    size = 6144 if is_gpu else 64
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    host = torch.empty(size, size, dtype=a.dtype, pin_memory=is_gpu)
    while True:
        for _ in range(rng.randint(1, 30)):
            rng.choice((lambda: a @ b, lambda: b.copy_(a), lambda: host.copy_(a)))()
        if is_gpu:
            torch.cuda.synchronize()
        time.sleep(rng.choice((0.0, 0.001, 0.01, 0.1)))


def main() -> None:
    role, given = sys.argv[1], json.loads(sys.argv[2])
    for option in (WITH_PARENT, ANY_TRACER):
        ctypes.CDLL(None).prctl(*option)
    (work if role == "work" else disturb)(given)


if __name__ == "__main__":
    main()
