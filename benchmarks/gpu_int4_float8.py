"""4-bit layers of few rows in FP8 on a Hopper GPU, beside those of rows that are not rounded.

    PYTHONPATH=src:. python benchmarks/gpu_int4_float8.py [--out DIR] [--only-check]

First every kind of candidate of `triton_hopper_int4_float8` is compared with the product in
float64 of the codes and the rounded rows, each in a process of its own under a timeout, for a
barrier that nobody reaches would otherwise hang the GPU: odd sizes, both half precisions, groups of
128 and 256, NaN around the rows, their scales and in the results; the same bits thrice, by
dependent launches too, and the same bits for a row with fewer rows beside it. What differs is named
and not timed. Then the four layers of Qwen2.5-7B are timed at 16, 32, 64 and 128 rows, in CUDA
graphs that go through enough copies of a weight that none comes from the L2 cache: plainly, and by
dependent launches, as captured steps of decodes are. Beside them what serves the same rows without
rounding (`hopper_int4_ways.SERVED`) and what serves FP8 weights (`hopper_float8_ways.SERVED`), as
they stand, without the rounding of rows. The floor is the bytes of codes, scales, rows and results
at 4.19 TB/s, the copy rate of an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import gpu_float8, gpu_int4
from benchmarks.hopper_layers import (
    COPY_RATE,
    DEPENDENT,
    DEPTH,
    LAYERS,
    ROWS,
    Kind,
    check_all,
    differences,
    graph_s,
    kind_of,
    run_apart,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.triton_hopper_int4_float8 import Int4Float8Shape
    from tailrace.kernels.linear.workspace import SplitScratch

TIME_S = 200
"""Of all times."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A weight that a kernel is compared over; where its outputs are odd, with a bias."""

    group: int
    inputs: int
    outputs: int
    dtype: str
    is_dependent: bool = False
    """Whether dependent launches are compared, too: each is a kernel more to compile."""

    @property
    def words(self) -> str:
        return f"{self.outputs} x {self.inputs} by {self.group}, {self.dtype}"


CASES = (
    Case(128, 3584, 512, "bfloat16", is_dependent=True),  # whole tiles; what is timed, compiled
    Case(128, 1152, 4611, "float16"),  # outputs that nothing divides
    Case(256, 512, 1000, "bfloat16"),  # a cut tile, fewer chunks than slices, groups of two chunks
    Case(128, 640, 200, "bfloat16"),  # less than a tile of some; all of its rows
)
FULL = CASES[-1]


def candidates(rows: int) -> tuple[Int4Float8Shape, ...]:
    from tailrace.kernels.linear.triton_hopper_int4_float8 import CANDIDATES

    return CANDIDATES[rows]


def all_kinds() -> list[Kind]:
    return list(dict.fromkeys(kind_of(rows, shape) for rows in ROWS for shape in candidates(rows)))


def scratch_of(weight: PackedInt4) -> SplitScratch:
    import torch

    from tailrace.kernels.linear.triton_hopper_int4_float8 import reserved
    from tailrace.kernels.linear.workspace import Workspace
    from tailrace.kernels.multiprocessors import multiprocessors

    device = weight.codes.device
    workspace = Workspace(device, torch.bfloat16)
    parts, arrivals = reserved(weight.outputs, weight.codes.shape[0], multiprocessors(device))
    workspace.reserve(outputs=weight.outputs, splits=1, rows=128, parts=parts, arrivals=arrivals)
    workspace.scratch.parts.fill_(float("nan"))
    return workspace.scratch


# Comparison


def check(rows: int, words: str, device: str = "cuda") -> list[str]:
    """Return what is wrong with one kind of candidate, for tiles of so many rows."""
    import torch

    torch.manual_seed(rows)
    kind = [shape for shape in candidates(rows) if kind_of(rows, shape) == (rows, words)]
    wrong: list[str] = []
    for case in CASES:
        for shape in dict.fromkeys((kind[0], kind[-1])):
            wrong += _differences(rows, case, shape, torch.device(device))
    return wrong


def _differences(tile: int, case: Case, shape: Int4Float8Shape, device: torch.device) -> list[str]:
    import torch

    from tailrace.kernels.linear.int4 import quantize_groups
    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.triton_hopper_int4_float8 import int4_float8

    dtype = getattr(torch, case.dtype)
    inputs, outputs = case.inputs, case.outputs
    rows = tile if case == FULL else tile - tile // 4 - 1
    held = quantize_groups(torch.randn(outputs, inputs, device=device) * inputs**-0.5, case.group)
    weight = PackedInt4.of(held, device)
    scratch = scratch_of(weight)
    bias = torch.randn(outputs, device=device).to(dtype) if outputs % 16 else None
    x = gpu_float8.rows_amid_nan(rows, inputs, 0, device)
    truth = x.dequantize().double() @ held.dequantize().double().t()
    if bias is not None:
        truth += bias.double()

    def product(count: int) -> torch.Tensor:
        some = dataclasses.replace(x, values=x.values[:count], scales=x.scales[:count])
        return int4_float8(some, weight, bias, dtype, scratch=scratch, shape=shape)

    where = f"{shape.words} {tile} rows, {case.words}"
    return differences(
        where, product, truth, scratch, fewer=tile // 2 + 1, is_dependent=case.is_dependent
    )


# Times


def time_layer(name: str, kinds: list[Kind]) -> Iterator[list[dict]]:
    """Time a layer by rows: what serves beside, and every candidate of the kinds given."""
    import torch

    from tailrace.kernels.linear import hopper_float8_ways, hopper_int4_ways
    from tailrace.kernels.linear.triton_float8_rows import quantize_rows
    from tailrace.kernels.linear.triton_hopper_int4_float8 import int4_float8

    weights = gpu_int4.copies_of(*LAYERS[name])
    float8 = gpu_float8.copies_of(*LAYERS[name])
    scratch = scratch_of(weights[0])
    beside = gpu_int4.scratch_of(weights[0]), gpu_float8.scratch_of(float8[0])
    device = torch.device("cuda")
    by_codes = hopper_int4_ways.ways(weights[0], device)
    by_float8 = hopper_float8_ways.ways(*LAYERS[name], device)
    for rows in ROWS:
        whole = torch.randn(rows, LAYERS[name][1], device=device).bfloat16()
        x = quantize_rows(whole, 0)
        moved = weights[0].nbytes + x.values.nbytes + 2 * rows * LAYERS[name][0]
        entry = {"layer": name, "rows": rows, "floor_us": 1e6 * moved / COPY_RATE}
        int4_way = partial(
            hopper_int4_ways.multiply, whole, bias_O=None, scratch=beside[0],
            shape=by_codes.of(rows),
        )  # fmt: skip
        float8_way = partial(
            hopper_float8_ways.multiply, x, bias_O=None, dtype=torch.bfloat16, scratch=beside[1],
            shape=by_float8.of(rows),
        )  # fmt: skip
        found = [
            {**entry, "way": "4 bits", **_times(lambda w, by=int4_way: by(weight=w), weights)},
            {**entry, "way": "FP8", **_times(lambda w, by=float8_way: by(weight=w), float8)},
        ]
        for shape in shapes_of(rows, name, kinds):
            product = partial(
                int4_float8, x, bias_O=None, dtype=torch.bfloat16, scratch=scratch, shape=shape
            )
            times = _times(lambda w, by=product: by(weight=w), weights)
            found.append({**entry, "way": shape.words, "is_new": True, **times})
        yield found


def shapes_of(rows: int, name: str, kinds: list[Kind]) -> Iterator[Int4Float8Shape]:
    """Yield the candidates for a layer; no two cut it alike."""
    import torch

    from tailrace.kernels.multiprocessors import multiprocessors

    outputs, inputs = LAYERS[name]
    count = multiprocessors(torch.device("cuda"))
    known = set()
    for shape in candidates(rows):
        cut = kind_of(rows, shape), shape.cut(outputs, inputs // 128, count)
        if cut[0] in kinds and cut not in known and shape.fits(outputs, count):
            known.add(cut)
            yield shape


def _times(product: Callable[..., object], weights: Sequence[object]) -> dict[str, float]:
    from tailrace.kernels.dependent_launch import dependent_launches

    def all_copies() -> None:
        for weight in weights:
            product(weight)

    us = 1e6 * graph_s(all_copies) / len(weights)
    with dependent_launches():
        return {"us": us, "dependent_us": 1e6 * graph_s(all_copies) / len(weights)}


def print_tables(found: list[dict]) -> None:
    for kind, key in (("plain launches", "us"), (DEPENDENT, "dependent_us")):
        print(f"\n{kind}, microseconds: the floor, 4 bits and FP8 as they serve, the new kernel")
        sums: dict[int, list[float]] = {rows: [0.0] * 4 for rows in ROWS}
        for name in LAYERS:
            for rows in ROWS:
                here = [e for e in found if (e["layer"], e["rows"]) == (name, rows)]
                new = sorted((e for e in here if "is_new" in e), key=lambda e: e[key])
                if not new:
                    print(f"  {name:<8} {rows:>4}: not timed")
                    continue
                seen = [here[0]["floor_us"], here[0][key], here[1][key], new[0][key]]
                best = ", ".join(f"{e[key]:.1f} by {e['way'][22:]}" for e in new[:4])
                head = " ".join(f"{us:6.1f}" for us in seen)
                print(f"  {name:<8} {rows:>4}: {head}   {best}")
                sums[rows] = [total + us for total, us in zip(sums[rows], seen, strict=True)]
        print(f"  all layers ({DEPTH} x {', '.join(LAYERS)}), milliseconds:")
        for rows, values in sums.items():
            line = " ".join(f"{DEPTH * value / 1e3:6.2f}" for value in values)
            print(f"           {rows:>4}: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only-check", action="store_true")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--time", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check or arguments.time:
        import torch

        with torch.inference_mode():
            if arguments.check:
                torch.use_deterministic_algorithms(True)  # fresh memory is NaN while this is on
                print(json.dumps(check(*json.loads(arguments.check))))
                return
            name, kinds = json.loads(arguments.time)
            for found in time_layer(name, [tuple(kind) for kind in kinds]):
                print(json.dumps(found), flush=True)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of the processes
    begun = time.monotonic()
    kinds = all_kinds()
    right = check_all(__file__, kinds)
    if arguments.only_check:
        raise SystemExit(len(right) != len(kinds))
    timed: list[dict] = []
    for name in LAYERS:
        lines, reason = run_apart(__file__, ["--time", json.dumps([name, right])], TIME_S)
        timed += [entry for line in lines for entry in line]
        print(f"{name}: {len(lines)} of {len(ROWS)} classes timed {reason}".rstrip(), flush=True)
    (arguments.out / "gpu_int4_float8.json").write_text(json.dumps(timed))
    print(f"{time.monotonic() - begun:.0f} s in all")
    print_tables(timed)
    raise SystemExit(len(right) != len(kinds))


if __name__ == "__main__":
    main()
