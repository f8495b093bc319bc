"""Few rows by weights in half precision on a Hopper GPU: the Gluon kernel beside cuBLAS and Triton.

    PYTHONPATH=src:. python benchmarks/gpu_half.py [--out DIR] [--only-check]

First every kind of candidate is compared with the product in float64, each in a process of its
own under a timeout, for a barrier that nobody reaches would otherwise hang the GPU: odd sizes, both
half precisions, NaN around the rows and in the results; the same bits thrice, by dependent launches
too, and the same bits for a row with fewer rows beside it. What differs is named and not timed.
Then the four layers and the head of Qwen2.5-7B are timed in bfloat16 at 50, 64, 32, 16 and 128
rows, in CUDA graphs that go through enough copies of a weight that none comes from the L2 cache:
plainly, and by dependent launches, as captured steps of decodes are. cuBLAS knows only the first.
Candidates that cut a layer alike are timed once. Each is named as plans and
`hopper_half_ways.SERVED` name it.

    Hopper TILExINPUTS/warps/programs/span     runs of units, parts that meet in memory
    Hopper TILExINPUTS/warps whole             tiles without parts
    Hopper TILExINPUTS, 2 slices               likewise, inputs split in a program
    Triton ...                                 `triton_skinny`, up to 32 rows

The table comes last, and after it what `SERVED` would have by these times. The floor is the bytes
of weights, rows and results at 4.19 TB/s, the copy rate of an H200.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING

from benchmarks import hopper_layers
from benchmarks.hopper_layers import (
    COLD_BYTES,
    COPY_RATE,
    DEPTH,
    Kind,
    check_all,
    command_line,
    differences,
    fastest_of,
    graph_s,
    has_answered,
    kind_of,
    run_apart,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tailrace.kernels.linear.hopper_half_ways import Shape
    from tailrace.kernels.linear.triton_hopper_half import HopperHalfShape
    from tailrace.kernels.linear.workspace import Workspace

LAYERS = {**hopper_layers.LAYERS, "head": (152064, 3584)}
ROWS = (50, 64, 32, 16, 128)
"""What is asked most comes first."""
CLASSES = {50: 64, 64: 64, 32: 32, 16: 16, 128: 128}
"""The tile's rows."""
H200 = 132
"""Multiprocessors."""
MOST_S = 72.0
"""Of all: what was not timed by then is missing in the table."""
LEAST_TIME_S = 20.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A weight that a kernel is compared over; where its outputs are odd, with a bias."""

    inputs: int
    outputs: int
    dtype: str
    is_dependent: bool = False
    """Whether dependent launches are compared, too: each is a kernel more to compile."""

    @property
    def words(self) -> str:
        return f"{self.outputs} x {self.inputs}, {self.dtype}"


CASES = (
    Case(3584, 2304, "bfloat16", is_dependent=True),  # whole tiles; what is timed, compiled
    Case(1160, 4611, "float16"),  # outputs and inputs that nothing divides
    Case(264, 208, "bfloat16", is_dependent=True),  # less than a tile of some; all of its rows
)
FULL = CASES[-1]


def candidates(rows: int) -> list[HopperHalfShape]:
    """Return a class's candidates but whole tiles of sizes that no layer here is offered."""
    from tailrace.kernels.linear.triton_hopper_half import CANDIDATES

    sizes = [outputs for outputs, _ in LAYERS.values()]
    return [
        shape for shape in CANDIDATES[rows] if any(shape.fits(outputs, H200) for outputs in sizes)
    ]


def all_kinds() -> list[Kind]:
    classes = dict.fromkeys(CLASSES.values())
    return list(
        dict.fromkeys(kind_of(rows, shape) for rows in classes for shape in candidates(rows))
    )


def multiply(*given: object, **options: object) -> torch.Tensor:
    """See `hopper_half_ways.multiply`."""
    from tailrace.kernels.linear import hopper_half_ways

    return hopper_half_ways.multiply(*given, **options)


def workspace_of(device: torch.device, *sizes: tuple[int, int]) -> Workspace:
    """Return one with room for layers of outputs and inputs."""
    import torch

    from tailrace.kernels.linear.hopper_half_ways import room
    from tailrace.kernels.linear.workspace import Workspace

    workspace = Workspace(device, torch.bfloat16)
    for outputs, inputs in sizes:
        workspace.reserve(
            outputs=outputs, splits=1, rows=max(ROWS), **room(outputs, inputs, device)
        )
    workspace.scratch.parts.fill_(float("nan"))
    return workspace


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


def amid_nan(values: torch.Tensor, more: int) -> torch.Tensor:
    """Return values [T, I] with so many rows of NaN behind them."""
    around = values.new_full((len(values) + more, values.shape[1]), float("nan"))
    around[: len(values)] = values
    return around[: len(values)]


def _differences(tile: int, case: Case, shape: HopperHalfShape, device: torch.device) -> list[str]:
    import torch

    dtype = getattr(torch, case.dtype)
    inputs, outputs = case.inputs, case.outputs
    rows = tile if case == FULL else tile - tile // 4 - 1
    weight = amid_nan((torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype), 300)
    workspace = workspace_of(device, (outputs, inputs))
    bias = torch.randn(outputs, device=device).to(dtype) if outputs % 16 else None
    x = amid_nan(torch.randn(rows, inputs, device=device).to(dtype), 140)
    truth = x.double() @ weight.double().t()
    if bias is not None:
        truth += bias.double()

    def product(count: int) -> torch.Tensor:
        return multiply(x[:count], weight, bias, shape=shape, scratch=None, workspace=workspace)

    return differences(
        f"{shape.words} {tile} rows, {case.words}", product, truth, workspace.scratch,
        fewer=tile // 2 + 1, is_dependent=case.is_dependent,
    )  # fmt: skip


# Times


def copies_of(outputs: int, inputs: int) -> list[torch.Tensor]:
    """Return one random weight as many times as the L2 cannot keep."""
    import torch

    first = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    count = max(2, int(COLD_BYTES // first.nbytes) + 1)
    return [first, *(first.clone() for _ in range(count - 1))]


def shapes_of(
    rows: int, outputs: int, inputs: int, count: int, kinds: list[Kind]
) -> dict[str, Shape | None]:
    """Return what can serve so many rows of a layer, cuBLAS first; no two cut it alike."""
    from tailrace.kernels.linear.hopper_half_ways import options
    from tailrace.kernels.linear.triton_skinny import CUBLAS

    tile = CLASSES[rows]
    kept: dict[str, Shape | None] = {}
    known = set()
    for words, shape in options(outputs, tile, CUBLAS, count).items():
        if hasattr(shape, "cut"):
            kind = kind_of(tile, shape)
            cut = kind, shape.cut(outputs, inputs, count)
            if kind not in kinds or cut in known:
                continue
            known.add(cut)
        kept[words] = shape
    return kept


def time_all(kinds: list[Kind]) -> Iterator[list[dict]]:
    """Time each layer at each number of rows: cuBLAS, Triton's and the kinds given."""
    import torch

    device = torch.device("cuda")
    count = torch.cuda.get_device_properties(device).multi_processor_count
    weights = {name: copies_of(*sizes) for name, sizes in LAYERS.items()}
    workspace = workspace_of(device, *LAYERS.values())
    for rows in ROWS:
        for name, sizes in LAYERS.items():
            shapes = shapes_of(rows, *sizes, count, kinds)
            entry = {"layer": name, "rows": rows}
            yield [{**entry, **timed} for timed in _times(rows, weights[name], workspace, shapes)]


def _times(
    rows: int, weights: list[torch.Tensor], workspace: Workspace, shapes: dict[str, Shape | None]
) -> Iterator[dict]:
    import torch
    from torch.nn import functional

    from tailrace.kernels.dependent_launch import dependent_launches
    from tailrace.kernels.linear.triton_skinny import SkinnyScratch

    outputs, inputs = weights[0].shape
    device = weights[0].device
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    moved = weights[0].nbytes + x.nbytes + 2 * rows * outputs
    given = {"workspace": workspace, "scratch": SkinnyScratch.allocate(device)}
    for words, shape in shapes.items():

        def all_copies(shape: Shape | None = shape) -> None:
            for weight in weights:
                if shape is None:
                    functional.linear(x, weight)
                else:
                    multiply(x, weight, None, shape=shape, **given)

        us = dependent_us = 1e6 * graph_s(all_copies) / len(weights)
        if shape is not None:
            with dependent_launches():
                dependent_us = 1e6 * graph_s(all_copies) / len(weights)
        yield {
            "way": words, "is_new": hasattr(shape, "cut"), "floor_us": 1e6 * moved / COPY_RATE,
            "us": us, "dependent_us": dependent_us,
        }  # fmt: skip


def _of(found: list[dict], name: str, rows: int) -> list[dict]:
    return [entry for entry in found if (entry["layer"], entry["rows"]) == (name, rows)]


def print_ways(found: list[dict]) -> None:
    """Print every time."""
    for rows in ROWS:
        for name in LAYERS:
            some = sorted(_of(found, name, rows), key=lambda e: e["dependent_us"])
            line = "; ".join(f"{e['way']} {e['us']:.1f}/{e['dependent_us']:.1f}" for e in some)
            print(f"{name} {rows}: {line}")


def print_table(found: list[dict]) -> None:
    """Print each layer's times, and the sums over a model's layers and its head."""
    print("\nmicroseconds; ours plain and by dependent launches:")
    print("  layer    rows   floor  cuBLAS  Triton   plain   dep.   the best plain / dependent")
    for rows in sorted(ROWS):
        sums = [0.0] * 4
        missing = []
        for name in LAYERS:
            some = _of(found, name, rows)
            new = [e for e in some if e["is_new"]]
            old = [e["us"] for e in some if not e["is_new"]]
            if not new or not old:
                missing.append(name)
                continue
            triton = f"{min(old[1:]):7.1f}" if old[1:] else "      -"
            plain = min(new, key=lambda e: e["us"])
            dependent = min(new, key=lambda e: e["dependent_us"])
            seen = [some[0]["floor_us"], old[0], plain["us"], dependent["dependent_us"]]
            print(
                f"  {name:<8} {rows:>4} {seen[0]:7.1f} {seen[1]:7.1f} {triton} "
                f"{seen[2]:7.1f} {seen[3]:7.1f}   {plain['way']} / {dependent['way']}"
            )
            times = 1 if name == "head" else DEPTH
            sums = [total + times * us for total, us in zip(sums, seen, strict=True)]
        if missing:
            print(f"  a step   {rows:>4}   not timed: {', '.join(missing)}")
            continue
        floor, cublas, plain_us, dependent_us = (f"{us / 1e3:7.2f}" for us in sums)
        print(f"  a step   {rows:>4} {floor} {cublas}         {plain_us} {dependent_us}   ms")


def print_served(found: list[dict]) -> None:
    """Print what would serve each layer by these times, by dependent launches, and what does now.

    A class of 64 rows goes by the sum of its two.
    """
    from tailrace.kernels.linear.hopper_half_ways import ELSEWHERE, served
    from tailrace.kernels.linear.triton_skinny import CUBLAS
    from tailrace.kernels.plan import MARGIN

    print(f"\nfor hopper_half_ways.SERVED, what wins by {MARGIN:.0%}; what serves now:")
    for name, sizes in LAYERS.items():
        best = []
        now = served(*sizes)
        for tile, serving in zip((16, 32, 64, 128), now, strict=True):
            us: dict[str, float] = {}
            for rows, its_tile in CLASSES.items():
                for entry in _of(found, name, rows) if its_tile == tile else ():
                    us[entry["way"]] = us.get(entry["way"], 0.0) + entry["dependent_us"]
            usual = CUBLAS if serving == ELSEWHERE else serving
            best.append(fastest_of(us, usual, MARGIN))
        print(f"  {name:<8} {json.dumps(best)}\n  {'now':>8} {json.dumps(now)}")


def main() -> None:
    arguments = command_line(__doc__.splitlines()[0]).parse_args()
    if has_answered(arguments, check, time_all):
        return
    begun = time.monotonic()
    kinds = all_kinds()
    right = check_all(__file__, kinds)
    if arguments.only_check:
        raise SystemExit(len(right) != len(kinds))
    left_s = max(LEAST_TIME_S, MOST_S - (time.monotonic() - begun))
    lines, reason = run_apart(__file__, ["--time", json.dumps(right)], left_s)
    timed = [entry for line in lines for entry in line]
    (arguments.out / "gpu_half.json").write_text(json.dumps(timed))
    print_ways(timed)
    print(f"times: {len(lines)} of {len(LAYERS) * len(ROWS)} {reason}".rstrip())
    print(f"{time.monotonic() - begun:.0f} s in all")
    print_served(timed)
    print_table(timed)
    raise SystemExit(len(right) != len(kinds))


if __name__ == "__main__":
    main()
