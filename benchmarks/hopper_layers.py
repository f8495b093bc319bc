"""What the benchmarks of Hopper's kernels of few rows share: layers, candidates apart, times.

A kernel that waits for a barrier that nobody reaches would hang the GPU for all others. So each
kind of candidate is compared in a process of its own, which is ended when it does not answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from tailrace.kernels.linear.workspace import SplitScratch

LAYERS = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
"""Outputs and inputs, of Qwen2.5-7B."""
DEPTH = 28
ROWS = (16, 32, 64, 128)
COPY_RATE = 4.19e12
"""Bytes a second, of an H200."""
COLD_BYTES = 200e6
"""Copies of a weight take as much: more than thrice an H200's L2."""
LEAD_CYCLES = 1_000_000
"""About half a millisecond, in which the host queues what is timed."""
CHECK_S = 45
"""A kind's comparison."""

DEPENDENT = "by dependent launches"
"""In what is wrong with a kind that may serve by plain launches all the same."""
Kind = tuple[int, str]
"""Rows of the tile; a shape's words, but for its span."""


def kind_of(rows: int, shape: object) -> Kind:
    """Return a shape's kind: those that differ in where work is cut are the same code."""
    if getattr(shape, "least_span", 0):
        shape = dataclasses.replace(shape, least_span=0)
    return rows, shape.words


def command_line(words: str) -> argparse.ArgumentParser:
    """Return what such a benchmark is asked by; `--check` and `--time` are for its processes."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only-check", action="store_true")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--time", help=argparse.SUPPRESS)
    return parser


def has_answered(
    arguments: argparse.Namespace,
    check: Callable[[int, str], list[str]],
    times: Callable[[list[Kind]], Iterable[list[dict]]],
) -> bool:
    """Answer as one of the benchmark's processes, a line of JSON each, where that is asked.

    Args:
        arguments: Of `command_line`.
        check: Returns what is wrong with a kind.
        times: Times kinds.
    """
    if not (arguments.check or arguments.time):
        return False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    with torch.inference_mode():
        if arguments.check:
            torch.use_deterministic_algorithms(True)  # fresh memory is NaN while this is on
            print(json.dumps(check(*json.loads(arguments.check))))
            return True
        for found in times([tuple(kind) for kind in json.loads(arguments.time)]):
            print(json.dumps(found), flush=True)
    return True


def run_apart(file: str, arguments: list[str], seconds: float) -> tuple[list, str]:
    """Run a file with arguments; return the JSON of its lines, and why some are missing."""
    command = [sys.executable, file, *arguments]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=said, stderr=errors)
        reason = ""
        try:
            if process.wait(seconds):
                errors.seek(0)
                reason = (errors.read().strip().splitlines() or ["died"])[-1][:300]
        except subprocess.TimeoutExpired:
            reason = f"no answer in {seconds:.0f} s"
            process.kill()
            process.wait()
        said.seek(0)
        return [json.loads(line) for line in said if line.endswith("\n")], reason


def check_all(file: str, kinds: list[Kind]) -> list[Kind]:
    """Return the kinds that a file's `--check` finds right; print what is wrong with the others."""
    begun = time.monotonic()
    right = []
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(
            lambda kind: run_apart(file, ["--check", json.dumps(kind)], CHECK_S), kinds
        )
        for kind, (lines, reason) in zip(kinds, answers, strict=True):
            label = f"{kind[0]} rows, {kind[1]}"
            wrong = lines[0] if lines else []
            # By plain launches a kind may serve all the same.
            if lines and not [line for line in wrong if DEPENDENT not in line]:
                right.append(kind)
            if lines == [[]]:
                continue
            if not lines:
                print(f"FAILED {label}: {reason}", flush=True)
            else:
                print(f"WRONG {label}: {len(wrong)}", *wrong[:3], sep="\n  ", flush=True)
    spent = time.monotonic() - begun
    print(f"comparison: {len(right)} of {len(kinds)} kinds are right, {spent:.0f} s", flush=True)
    return right


TIMES = 3
"""A product is computed, as usual ..."""
CHAINED = 5
"""... and in a row of launches that start before the one ahead has ended."""
BOUND = 0.006
"""Of |y - truth| / |truth|: the result's own rounding in bfloat16 is 0.002."""


def differences(
    where: str,
    product: Callable[[int], torch.Tensor],
    truth: torch.Tensor,
    scratch: SplitScratch,
    *,
    fewer: int,
    is_dependent: bool,
) -> list[str]:
    """Return what is wrong with a product, each fault behind `where`.

    Args:
        where: Shape and case, in words.
        product: Takes how many of the rows to multiply.
        truth: float64 [T, O], of all rows.
        scratch: Of the product; what arrives there must be taken back.
        fewer: Rows of a product whose results must be those of all rows' first.
        is_dependent: Whether it is launched in a row as well.
    """
    import torch

    from tailrace.kernels.dependent_launch import dependent_launches

    rows = len(truth)
    results = [product(rows) for _ in range(TIMES)]
    error = float((results[0].double() - truth).norm() / truth.norm())
    wrong = [] if error < BOUND else [f"{where}: {error:.4f}"]
    if any(not torch.equal(results[0], other) for other in results[1:]):
        wrong.append(f"{where}: another time, other bits")
    if not torch.equal(product(fewer), results[0][:fewer]):
        wrong.append(f"{where}: a row depends on its neighbours")
    if is_dependent:
        with dependent_launches():
            chain = [product(rows) for _ in range(CHAINED)]
        if not all(torch.equal(results[0], other) for other in chain):
            wrong.append(f"{where}: other bits {DEPENDENT}")
    if bool(scratch.arrivals.any()):
        wrong.append(f"{where}: arrivals are left behind")
    return wrong


def event_s(work: Callable[[], object]) -> float:
    """Return the seconds of one call on the device."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LEAD_CYCLES)  # noqa: SLF001 - its only name; what the host does is hidden
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def graph_s(work: Callable[[], object], repeats: int = 9) -> float:
    """Return the median seconds of one replay of what `work` queues."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = [event_s(graph.replay) for _ in range(repeats + 2)]
    return statistics.median(times[2:])


def fastest_of(times: dict[str, float], usual: str, margin: float) -> str:
    """Return what serves by its times: the fastest, if it beats what serves now by a margin."""
    fastest = min(times, key=lambda name: times[name], default=usual)
    # What serves now may not have been timed: then nothing is said against it.
    return fastest if usual in times and times[fastest] < (1 - margin) * times[usual] else usual
