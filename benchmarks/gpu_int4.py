"""The 4-bit layers of few rows on a Hopper GPU: the Gluon kernel beside the Triton one.

    python benchmarks/gpu_int4.py [--out DIR] [--only-check]

First every candidate is compared with the product in float64, each in a process of its own under a
timeout, for a barrier that nobody reaches would otherwise hang the GPU: odd sizes, groups of 64 and
128, both half precisions, NaN around the rows and in the results; the same bits thrice, and the
same bits for a row with fewer rows beside it. What differs is named and not timed. Then the four
layers of Qwen2.5-7B are timed at 16, 32, 64 and 128 rows, in CUDA graphs that go through enough
copies of a weight that none comes from the L2 cache. A candidate reads sides/programs/span order:
tiles of 128 or 256 outputs, programs a multiprocessor, the least chunks of a program, and the order
of products (`HopperShape.order`). Those that cut a layer alike are timed once.

The floor is the bytes of codes, scales, rows and results at 4.19 TB/s, the copy rate of an H200.
"""

from __future__ import annotations

import argparse
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
    from collections.abc import Callable

    import torch

    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.triton_hopper_int4 import HopperShape

LAYERS = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
"""Outputs and inputs."""
DEPTH = 28
ROWS = (16, 32, 64, 128)
COPY_RATE = 4.19e12
COLD_BYTES = 200e6
"""Copies of a weight take as much: more than thrice an H200's L2."""
GOALS_MS = {16: 1.4, 64: 1.9, 128: 2.8}
CUBLAS_MS = {16: 3.86, 32: 3.95, 64: 3.96, 128: 4.16}
"""bfloat16 by cuBLAS, of all layers, as seen on an H200 on 2026-11-29."""
ODD = ((128, 256, 48), (64, 640, 200), (128, 3584, 520), (128, 1024, 4611), (64, 448, 1000))
"""Group, inputs, outputs of the comparison: whole tiles, cut tiles, outputs nothing divides."""
BOUND = 0.006
"""Of |y - truth| / |truth|: the result's own rounding in bfloat16 is 0.002."""


DEPENDENT = "by dependent launches"
BEFORE_US = {
    "qkv": (9.0, 12.7, 14.8, 24.7), "o": (8.1, 9.7, 12.8, 22.2),
    "gate_up": (31.6, 34.3, 44.9, 81.5), "down": (21.0, 27.2, 40.1, 58.0),
}  # fmt: skip
"""By `ROWS`: Gluon's kernel at its best, on an H200 on 2026-11-30."""
Kind = tuple[int, int, int, str]
"""Rows of the tile; sides, programs and order of a shape."""


def kind_of(rows: int, shape: HopperShape) -> Kind:
    return rows, shape.sides, shape.programs, shape.order


def candidates(rows: int) -> tuple[HopperShape, ...]:
    from tailrace.kernels.linear.triton_hopper_int4 import CANDIDATES

    return CANDIDATES[rows]


def scratch_of(weight: PackedInt4):  # noqa: ANN201
    import torch

    from tailrace.kernels.linear.triton_hopper_int4 import reserved_parts
    from tailrace.kernels.linear.workspace import Workspace

    device = weight.codes.device
    workspace = Workspace(device, torch.bfloat16)
    parts = reserved_parts(weight.outputs, weight.codes.shape[0], device)
    workspace.reserve(outputs=weight.outputs, splits=8, rows=128, parts=parts)
    workspace.scratch.parts.fill_(float("nan"))
    return workspace.scratch


# Comparison


def check(rows: int, sides: int, programs: int, order: str) -> list[str]:
    """Return what is wrong with one kind of candidate, for tiles of so many rows."""
    import torch

    torch.manual_seed(rows)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN while this is on
    kind = [s for s in candidates(rows) if kind_of(rows, s) == (rows, sides, programs, order)]
    wrong: list[str] = []
    for size in ODD:
        for dtype in (torch.bfloat16, torch.float16)[: 2 if size == ODD[1] else 1]:
            for shape in (kind[0], kind[-1]):
                chunk = 64 if size[0] % 128 else 128
                if shape.fits(size[1] // chunk):
                    wrong += _differences(rows, size, dtype, shape)
    return wrong


def _differences(
    tile: int, size: tuple[int, int, int], dtype: torch.dtype, shape: HopperShape
) -> list[str]:
    import torch

    from tailrace.kernels.dependent_launch import dependent_launches
    from tailrace.kernels.linear.int4 import quantize_groups
    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.triton_hopper_int4 import int4_hopper

    group, inputs, outputs = size
    rows = tile - tile // 4 - 1 if inputs != 640 else tile
    held = quantize_groups(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5, group)
    weight = PackedInt4.of(held, "cuda")
    scratch = scratch_of(weight)
    bias = torch.randn(outputs, device="cuda").to(dtype) if outputs % 16 else None
    whole = torch.full((rows + 140, inputs), float("nan"), device="cuda")
    whole[:rows] = torch.randn(rows, inputs, device="cuda")
    x = whole.to(dtype)[:rows]
    truth = x.double() @ held.dequantize().double().t()
    if bias is not None:
        truth += bias.double()
    results = [int4_hopper(x, weight, bias, scratch=scratch, shape=shape) for _ in range(3)]
    error = float((results[0].double() - truth).norm() / truth.norm())
    where = f"{shape.words} {tile} rows, {outputs} x {inputs} by {group}, {dtype}"
    wrong = [] if error < BOUND else [f"{where}: {error:.4f}"]
    if any(not torch.equal(results[0], other) for other in results[1:]):
        wrong.append(f"{where}: another time, other bits")
    fewer = tile // 2 + 1
    part = int4_hopper(x[:fewer], weight, bias, scratch=scratch, shape=shape)
    if not torch.equal(part, results[0][:fewer]):
        wrong.append(f"{where}: a row depends on its neighbours")
    with dependent_launches():
        chain = [int4_hopper(x, weight, bias, scratch=scratch, shape=shape) for _ in range(5)]
    if not all(torch.equal(results[0], other) for other in chain):
        wrong.append(f"{where}: other bits {DEPENDENT}")
    if bool(scratch.arrivals.any()):
        wrong.append(f"{where}: arrivals are left behind")
    return wrong


def run_self(arguments: list[str], seconds: float) -> tuple[list, str]:
    """Run this file with arguments; return the JSON of its lines, and why some are missing."""
    command = [sys.executable, __file__, *arguments]
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


def check_all(kinds: list[Kind]) -> list[Kind]:
    """Return the kinds that are right, and print what is wrong with the others."""
    begun = time.monotonic()
    right = []
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda kind: run_self(["--check", json.dumps(kind)], 60), kinds)
        for kind, (lines, reason) in zip(kinds, answers, strict=True):
            rows, sides, programs, order = kind
            label = f"{rows} rows, {sides}/{programs} {order}"
            wrong = lines[0] if lines else []
            # By plain launches a kind may serve all the same.
            if lines and not [line for line in wrong if DEPENDENT not in line]:
                right.append(kind)
            if lines == [[]]:
                continue
            if not lines:
                print(f"FAILED {label}: {reason}", flush=True)
            else:
                print(f"WRONG {label}: {len(wrong)}", *wrong[:6], sep="\n  ", flush=True)
    spent = time.monotonic() - begun
    print(f"comparison: {len(right)} of {len(kinds)} kinds are right, {spent:.0f} s", flush=True)
    return right


# Times


def graph_s(work: Callable[[], object], repeats: int = 9) -> float:
    """Return the median seconds of one replay of what `work` queues."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def copies_of(outputs: int, inputs: int) -> list[PackedInt4]:
    """Return random weights of one size, as many as the L2 cannot keep."""
    import torch

    from tailrace.kernels.linear.packed_int4 import PADDING, PackedInt4, splits_for

    padded = -(-outputs // PADDING) * PADDING
    chunks = inputs // 128
    scale = torch.full((chunks, padded), 0.01, device="cuda").half().float().view(torch.int32)
    meta = scale | torch.randint(0, 16, (chunks, padded), dtype=torch.int32, device="cuda")
    splits = splits_for(padded, chunks)
    splits = -(-chunks // -(-chunks // splits))
    count = max(2, int(COLD_BYTES // (padded * inputs // 2)) + 1)
    return [
        PackedInt4(
            torch.randint(
                -32768, 32767, (chunks, padded, 32), dtype=torch.int16, device="cuda"
            ),
            meta.clone(), outputs, inputs, 128, 1, splits,
        )
        for _ in range(count)
    ]  # fmt: skip


def time_layer(name: str, kinds: list[Kind]) -> list[dict]:
    """Time one layer: the Triton kernel as served, and every candidate of the kinds given."""
    import torch

    from tailrace.kernels.dependent_launch import dependent_launches
    from tailrace.kernels.linear.triton_hopper_int4 import int4_hopper, shape_for
    from tailrace.kernels.linear.triton_int4 import int4_linear

    outputs, inputs = LAYERS[name]
    weights = copies_of(outputs, inputs)
    scratch = scratch_of(weights[0])
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    found: list[dict] = []
    for rows in ROWS:
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        moved = weights[0].nbytes + 2 * rows * (inputs + outputs)
        entry = {"layer": name, "rows": rows, "floor_us": 1e6 * moved / COPY_RATE}

        def old(x: torch.Tensor = x) -> None:
            for weight in weights:
                int4_linear(x, weight, None, scratch=scratch)

        found.append({**entry, "way": "triton", "us": 1e6 * graph_s(old) / len(weights)})
        with dependent_launches():
            us = 1e6 * graph_s(old) / len(weights)
        found.append({**entry, "way": "triton, dependent", "us": us})
        usual = shape_for(rows, outputs)[1]
        known = set()
        for shape in (usual, *candidates(rows)):
            cut = shape.cut(outputs, inputs // 128, multiprocessors)
            if kind_of(rows, shape) not in kinds or (shape.order, shape.programs, cut) in known:
                continue
            known.add((shape.order, shape.programs, cut))

            def new(x: torch.Tensor = x, shape: HopperShape = shape) -> None:
                for weight in weights:
                    int4_hopper(x, weight, None, scratch=scratch, shape=shape)

            us = 1e6 * graph_s(new) / len(weights)
            found.append({**entry, "way": shape.words, "us": us, "usual": shape == usual})
            if shape == usual:
                with dependent_launches():
                    us = 1e6 * graph_s(new) / len(weights)
                found.append({**entry, "way": "gluon, dependent", "us": us})
    return found


def print_tables(found: list[dict]) -> None:
    print("\nmicroseconds: floor, Triton, Gluon before, its usual shape now, both")
    print("by dependent launches (Triton, usual shape), the best candidates:")
    sums: dict[int, list[float]] = {rows: [0.0] * 6 for rows in ROWS}
    missing: set[int] = set()
    for name in LAYERS:
        for index, rows in enumerate(ROWS):
            here = [e for e in found if (e["layer"], e["rows"]) == (name, rows)]
            new = sorted((e for e in here if "usual" in e), key=lambda e: e["us"])
            if not new:
                missing.add(rows)
                continue
            old = next(e["us"] for e in here if e["way"] == "triton")
            usual = next((e["us"] for e in new if e["usual"]), float("nan"))
            launched = [e["us"] for e in here if e["way"].endswith(", dependent")]
            dependent = " / ".join(f"{us:.1f}" for us in launched)
            best = ", ".join(f"{e['us']:.1f} by {e['way']}" for e in new[:4])
            floor = here[0]["floor_us"]
            before, fastest = BEFORE_US[name][index], new[0]["us"]
            head = f"{floor:5.1f} {old:6.1f} {before:6.1f} {usual:6.1f}"
            print(f"  {name:<8} {rows:>4}: {head}   {dependent:<13}   {best}")
            seen = (floor, old, before, usual, fastest, min(old, fastest))
            sums[rows] = [total + value for total, value in zip(sums[rows], seen, strict=True)]
    print(f"\nall layers ({DEPTH} x {', '.join(LAYERS)}), milliseconds:")
    print("  rows   floor  Triton  before   Gluon    best  either  cuBLAS bf16   goal")
    for rows, values in sums.items():
        if rows in missing:
            print(f"  {rows:>4}   not all layers were timed")
            continue
        line = " ".join(f"{DEPTH * value / 1e3:7.2f}" for value in values)
        goal = f"{GOALS_MS[rows]:.1f}" if rows in GOALS_MS else "-"
        print(f"  {rows:>4} {line} {CUBLAS_MS[rows]:12.2f} {goal:>6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only-check", action="store_true")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--time", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check or arguments.time:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import torch

        with torch.inference_mode():
            if arguments.check:
                print(json.dumps(check(*json.loads(arguments.check))))
                return
            kinds = [tuple(kind) for kind in json.loads(arguments.time)]
            for name in LAYERS:
                print(json.dumps(time_layer(name, kinds)), flush=True)
                torch.cuda.empty_cache()
        return
    begun = time.monotonic()
    kinds = list(dict.fromkeys(kind_of(rows, s) for rows in ROWS for s in candidates(rows)))
    right = check_all(kinds)
    if arguments.only_check:
        raise SystemExit(len(right) != len(kinds))
    found: list[dict] = []
    lines, reason = run_self(["--time", json.dumps(right)], 60)
    for line in lines:
        found += line
    if reason:
        print(f"timed {len(lines)} of {len(LAYERS)} layers: {reason}", flush=True)
    (arguments.out / "gpu_int4.json").write_text(json.dumps(found))
    print_tables(found)
    print(f"{time.monotonic() - begun:.0f} s in all")
    raise SystemExit(len(right) != len(kinds))


if __name__ == "__main__":
    main()
