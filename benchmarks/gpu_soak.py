"""Can a kernel hang, or give other bits? Families of them, launched over and over under a watch.

    PYTHONPATH=src:. python benchmarks/gpu_soak.py --seconds 20 --disturb 2 --out DIR
    PYTHONPATH=src:. python benchmarks/gpu_soak.py --seconds 2 --device cpu   (in interpreters)

A worker process (soak_worker.py) for each family (soak_families.py) makes a few inputs of random
sizes, launches them in batches, plainly, dependently or as captured graphs, waits for each batch,
and compares its results with the inputs' first ones, bit by bit; some batches later it makes other
inputs. What it is about to launch it says on a shared line first, so that this process knows what
waits for ever:

    worker    line: what, and for how long at most | launches | synchronises | compares | line ...
    parent    no new line in time: stack, cuda-gdb if it is there, kill, start again one by one

What of a batch's results is there by then is said as well: the first launch whose are not whole is
the one that hangs. The worker begins again with the same inputs and waits for each launch alone,
which names it too, if it hangs then. One family goes after the other, or all `--together`;
`--disturb` has processes beside them that keep the GPU busy by fits, so that the driver slices time
between contexts. Deaths are workers that ended otherwise, of an illegal address say. The exit
status is 1 where anything hung, died or differed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak_families import FAMILIES
from benchmarks.soak_worker import NOTHING, PREPARE_S, Board

SCRIPT = Path(__file__).with_name("soak_worker.py")
"""What workers run."""
LOOK_S, END_S = 0.1, 30.0
"""Between looks at the workers; most that a killed one may take to end."""
GDB_S = 20
"""Of cuda-gdb, at most."""


def started(role: str, given: dict[str, Any], errors: Path) -> subprocess.Popen[bytes]:
    """Start a process of the worker's file: to work, or to disturb."""
    # Read when Triton is imported.
    interpreted = {"TRITON_INTERPRET": "1"} if given["device"] == "cpu" else {}
    command = [sys.executable, str(SCRIPT), role, json.dumps(given)]
    with errors.open("wb") as file:
        return subprocess.Popen(command, stderr=file, stdout=file, env=os.environ | interpreted)


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Kill a process, if it runs; tell whether it has ended."""
    process.kill()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


@dataclass
class Soaked:
    """A family, its worker of now, and what its workers have found."""

    given: dict[str, Any]
    out: Path
    hangs: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    past: list[dict[str, Any]] = field(default_factory=list)
    """The last line of each worker that has ended."""
    process: subprocess.Popen[bytes] | None = None
    excused_s: float = 0.0
    """When somebody held up the device who is no kernel: time without a line counts from there."""

    @property
    def family(self) -> str:
        return self.given["family"]

    def file(self, suffix: str) -> Path:
        return Path(self.given["files"]).with_suffix(suffix)

    def start(self) -> None:
        name = f"soak_{self.family}{'_one_by_one' if self.given['one_by_one'] else ''}"
        self.given["files"] = str(self.out / name)
        for suffix in (".found", ".stack"):
            self.file(suffix).unlink(missing_ok=True)
        self.board = Board(self.file(".line"), is_new=True)
        facts = {"words": "starting", "limit_s": PREPARE_S, "round": self.given["round"]}
        self.last = self.board.say(NOTHING | facts)
        self.process = started("work", self.given, self.file(".errors"))

    def look(self) -> bool:
        """See whether the worker has ended, or hangs: then begin again one by one, and tell so."""
        assert self.process is not None
        has_ended = self.process.poll() is not None
        self.last = self.board.read() or self.last
        if has_ended:
            if self.process.returncode or not self.last["is_done"]:
                said = self.text(".errors").strip()[-1500:]
                words = f"ended with {self.process.returncode} at {self.last['words']}\n{said}"
                self.deaths.append(words)
            elif self.hangs:
                self.hangs[-1] += f"\none by one it did not, in {self.last['launches']} launches"
            self.end()
            return False
        if time.monotonic() - max(self.last["beat_s"], self.excused_s) < self.last["limit_s"]:
            return False
        self.hangs.append(self.told())
        print(f"HUNG {self.family}: {self.hangs[-1]}", flush=True)
        self.end()
        if not self.given["one_by_one"]:
            self.given |= {"one_by_one": True, "round": self.last["round"]}
            self.start()
        return True

    def told(self) -> str:
        """Return all that can be said of a worker that hangs."""
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR1)
        debugger = debugged(self.process.pid, self.file(".cuda-gdb"))
        time.sleep(LOOK_S)
        found = self.text(".found").splitlines()
        cut = [line for line in found if not line.endswith("whole")]
        results = "\n    ".join(cut[:4]) or f"none of the {len(found)} that could be copied"
        return (
            f"no line for {self.last['limit_s']:.0f} s after: {self.last['words']}\n"
            f"  results that are not whole:\n    {results}\n"
            f"  {debugger}\n  the worker's stack:\n{self.text('.stack')[:3000]}"
        )

    def text(self, suffix: str) -> str:
        """Return what a file of the worker says, if there is any."""
        file = self.file(suffix)
        return file.read_text(errors="replace") if file.exists() else ""

    def end(self) -> None:
        """Kill the worker, if it runs; keep its last line."""
        assert self.process is not None
        if not ended(self.process):
            self.deaths.append(f"could not be killed in {END_S:.0f} s: the driver keeps it")
        self.process = None
        self.past.append(self.last)

    def total(self, name: str) -> int:
        return sum(line[name] for line in self.past)

    @property
    def is_right(self) -> bool:
        return not (self.hangs or self.deaths or self.total("differed"))

    def row(self) -> dict[str, Any]:
        faults = [fault for line in self.past for fault in line["faults"]]
        counts = {name: self.total(name) for name in ("launches", "batches", "differed")}
        return {"family": self.family, **counts, "hangs": self.hangs, "deaths": self.deaths,
                "faults": faults}  # fmt: skip


def debugged(pid: int, file: Path) -> str:
    """Have cuda-gdb say where a process's kernels are; say where that stands."""
    if shutil.which("cuda-gdb") is None:
        return "cuda-gdb is not on the PATH"
    command = ["timeout", "-s", "KILL", str(GDB_S), "cuda-gdb", "-p", str(pid), "-batch"]
    for what in ("info cuda kernels", "info cuda warps", "bt"):
        command += ["-ex", what]
    with file.open("wb") as said:
        run = subprocess.run(command, stdout=said, stderr=said, check=False)
    return f"cuda-gdb ended with {run.returncode}: {file}"


def soak(groups: list[list[Soaked]]) -> None:
    """Run groups one after the other, the families of one at once."""
    for group in groups:
        for one in group:
            one.start()
        while any(one.process for one in group):
            time.sleep(LOOK_S)
            if any(one.look() for one in group if one.process):
                for one in group:
                    one.excused_s = time.monotonic()
        for one in group:
            print(line_of(one.row()), flush=True)


HEAD = f"{'family':<14} {'launches':>9} {'batches':>8} {'differed':>9} {'hangs':>6} {'deaths':>7}"


def line_of(row: dict[str, Any]) -> str:
    counts = f"{row['launches']:>9} {row['batches']:>8} {row['differed']:>9}"
    return f"{row['family']:<14} {counts} {len(row['hangs']):>6} {len(row['deaths']):>7}"


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a line a family, and what was wrong."""
    for row in rows:
        for kind in ("hangs", "deaths", "faults"):
            for words in row[kind]:
                print(f"\n{row['family']}, {kind}: {words}")
    print(f"\n{HEAD}")
    for row in rows:
        print(line_of(row))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--families", default=",".join(FAMILIES), help="by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each, once compiled")
    parser.add_argument("--disturb", type=int, default=0, help="processes that keep the GPU busy")
    parser.add_argument("--together", action="store_true", help="all families at once")
    parser.add_argument("--hang-s", type=float, default=10.0, help="most that a batch may take")
    parser.add_argument("--one-by-one", action="store_true", help="wait for each launch")
    parser.add_argument("--any-shape", action="store_true", help="all that a plan may choose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, default=0, help="the first, of a seed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    arguments.families = arguments.families.split(",")
    if unknown := set(arguments.families) - set(FAMILIES):
        parser.error(f"--families {', '.join(unknown)}: there are {', '.join(FAMILIES)}")
    return arguments


def main() -> None:
    arguments = parsed()
    arguments.out.mkdir(parents=True, exist_ok=True)
    shared = ("seconds", "hang_s", "one_by_one", "any_shape", "seed", "round", "device")
    given = {name: getattr(arguments, name) for name in shared}
    soaked = [Soaked(given | {"family": name}, arguments.out) for name in arguments.families]
    noise = [
        started("disturb", given | {"seed": number}, arguments.out / f"noise_{number}.errors")
        for number in range(arguments.disturb)
    ]
    try:
        print(HEAD, flush=True)
        soak([soaked] if arguments.together else [[one] for one in soaked])
    finally:
        for number, process in enumerate(noise):
            if process.poll() is not None:
                print(f"disturbance {number} ended early with {process.returncode}")
            ended(process)
        for one in soaked:
            if one.process:
                one.end()
    rows = [one.row() for one in soaked]
    (arguments.out / "gpu_soak.json").write_text(json.dumps(rows))
    print_table(rows)
    raise SystemExit(not all(one.is_right for one in soaked))


if __name__ == "__main__":
    main()
