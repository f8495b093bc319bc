"""The 4-bit layers of few rows on a Hopper GPU: the three Gluon kernels beside the Triton one.

    PYTHONPATH=src:. python benchmarks/gpu_int4.py [--out DIR] [--only-check] [--only-new]

First every kind of candidate is compared with the product in float64, each in a process of its
own under a timeout, for a barrier that nobody reaches would otherwise hang the GPU: odd sizes,
groups of 64 and 128, both half precisions, NaN around the rows and in the results; the same bits
thrice, and the same bits for a row with fewer rows beside it. What differs is named and not timed.
Then the four layers of Qwen2.5-7B are timed at 16, 32, 64 and 128 rows, in CUDA graphs that go
through enough copies of a weight that none comes from the L2 cache. Those that cut a layer alike
are timed once. Each is named as plans and `hopper_int4_ways.SERVED` name it. The tables come last,
and of them what `SERVED` would have by these times, "Triton" for the shape of Triton's own table.

    sides/programs/span order       sides multiply and scale by themselves (`HopperShape`)
    n slices                        up to 32 rows, inputs split in a program (`FewShape`): layers
                                    with a multiprocessor for each 64 outputs
    tile/warps/programs/span whole  a product always in flight (`BandShape`)

All multiply whole numbers, and scale sums afterwards.

The floor is the bytes of codes, scales, rows and results at 4.19 TB/s, the copy rate of an H200.
"""

from __future__ import annotations

import dataclasses
import json
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.hopper_layers import (
    COLD_BYTES,
    COPY_RATE,
    DEPTH,
    LAYERS,
    ROWS,
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
    from collections.abc import Callable, Iterator

    import torch

    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.triton_hopper_int4 import HopperShape
    from tailrace.kernels.linear.triton_hopper_int4_bands import BandShape
    from tailrace.kernels.linear.triton_hopper_int4_few import FewShape

    Shape = HopperShape | BandShape | FewShape

TIME_S = 90
"""Of all times."""
GOALS_MS = {16: 1.4, 64: 1.9, 128: 2.8}
CUBLAS_MS = {16: 3.86, 32: 3.95, 64: 3.96, 128: 4.16}
"""bfloat16 by cuBLAS, of all layers, as seen on an H200 on 2026-11-29."""

BEFORE_US = {
    "qkv": (9.0, 12.7, 14.8, 24.7), "o": (8.1, 9.7, 12.8, 22.2),
    "gate_up": (31.6, 34.3, 44.9, 81.5), "down": (21.0, 27.2, 40.1, 58.0),
}  # fmt: skip
"""By `ROWS`: Gluon's kernel at its best, on an H200 on 2026-11-30."""


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
    def chunks(self) -> int:
        return self.inputs // (64 if self.group % 128 else 128)

    @property
    def words(self) -> str:
        return f"{self.outputs} x {self.inputs} by {self.group}, {self.dtype}"


CASES = (
    Case(128, 3584, 512, "bfloat16", is_dependent=True),  # whole tiles; what is timed, compiled
    Case(128, 1152, 4611, "bfloat16"),  # outputs that nothing divides
    Case(128, 256, 1000, "float16"),  # fewer chunks than slices, and than a ring holds
    Case(64, 512, 1000, "bfloat16"),  # a cut tile
    Case(64, 640, 200, "float16", is_dependent=True),  # less than a tile of some; all of its rows
)
FULL = CASES[-1]


def candidates(rows: int) -> tuple[Shape, ...]:
    from tailrace.kernels.linear import (
        triton_hopper_int4,
        triton_hopper_int4_bands,
        triton_hopper_int4_few,
    )

    modules = (triton_hopper_int4, triton_hopper_int4_bands, triton_hopper_int4_few)
    return tuple(shape for module in modules for shape in module.CANDIDATES.get(rows, ()))


def all_kinds() -> list[Kind]:
    return list(dict.fromkeys(kind_of(rows, shape) for rows in ROWS for shape in candidates(rows)))


def launcher(shape: Shape) -> Callable[..., torch.Tensor]:
    """Return the kernel of a shape."""
    from tailrace.kernels.linear.triton_hopper_int4 import HopperShape, int4_hopper
    from tailrace.kernels.linear.triton_hopper_int4_bands import int4_bands
    from tailrace.kernels.linear.triton_hopper_int4_few import FewShape, int4_few

    if isinstance(shape, FewShape):
        return lambda x, weight, bias, scratch: int4_few(x, weight, bias, shape=shape)  # noqa: ARG005
    return partial(int4_hopper if isinstance(shape, HopperShape) else int4_bands, shape=shape)


def cut_of(shape: Shape, outputs: int, inputs: int, multiprocessors: int) -> object:
    """Return how a shape lays a layer over the GPU; none where it is not for such layers."""
    if hasattr(shape, "cut"):
        return shape.cut(outputs, inputs // 128, multiprocessors)
    tiles = -(-outputs // 64)
    return tiles if tiles <= multiprocessors else None


def usual_shapes(rows: int, outputs: int) -> tuple[Shape, ...]:
    from tailrace.kernels.linear import triton_hopper_int4, triton_hopper_int4_bands

    return (
        triton_hopper_int4.shape_for(rows, outputs)[1],
        triton_hopper_int4_bands.shape_for(rows, outputs)[1],
    )


def scratch_of(weight: PackedInt4):  # noqa: ANN201
    import torch

    from tailrace.kernels.linear.triton_hopper_int4 import reserved_parts
    from tailrace.kernels.linear.triton_hopper_int4_bands import reserved
    from tailrace.kernels.linear.workspace import Workspace

    device = weight.codes.device
    workspace = Workspace(device, torch.bfloat16)
    layer = weight.outputs, weight.codes.shape[0], device
    parts, arrivals = reserved(*layer)
    parts = max(parts, reserved_parts(*layer))
    workspace.reserve(outputs=weight.outputs, splits=8, rows=128, parts=parts, arrivals=arrivals)
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
            if can_multiply(shape, case):
                wrong += _differences(rows, case, shape, torch.device(device))
    return wrong


def can_multiply(shape: Shape, case: Case) -> bool:
    """Tell whether a shape takes a case; what fits slices is a matter of speed alone."""
    from tailrace.kernels.linear.triton_hopper_int4 import HopperShape

    return not isinstance(shape, HopperShape) or shape.fits(case.chunks)


def _differences(tile: int, case: Case, shape: Shape, device: torch.device) -> list[str]:
    import torch

    from tailrace.kernels.linear.int4 import quantize_groups
    from tailrace.kernels.linear.packed_int4 import PackedInt4

    multiply = launcher(shape)
    dtype = getattr(torch, case.dtype)
    inputs, outputs = case.inputs, case.outputs
    rows = tile if case == FULL else tile - tile // 4 - 1
    held = quantize_groups(torch.randn(outputs, inputs, device=device) * inputs**-0.5, case.group)
    weight = PackedInt4.of(held, device)
    scratch = scratch_of(weight)
    bias = torch.randn(outputs, device=device).to(dtype) if outputs % 16 else None
    whole = torch.full((rows + 140, inputs), float("nan"), device=device)
    whole[:rows] = torch.randn(rows, inputs, device=device)
    x = whole.to(dtype)[:rows]
    truth = x.double() @ held.dequantize().double().t()
    if bias is not None:
        truth += bias.double()

    def product(count: int) -> torch.Tensor:
        return multiply(x[:count], weight, bias, scratch=scratch)

    where = f"{shape.words} {tile} rows, {case.words}"
    return differences(
        where, product, truth, scratch, fewer=tile // 2 + 1, is_dependent=case.is_dependent
    )


# Times


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


def time_layer(name: str, kinds: list[Kind]) -> Iterator[list[dict]]:
    """Time a layer by rows: the Triton kernel as served, and every candidate of the kinds given."""
    import torch

    from tailrace.kernels.dependent_launch import dependent_launches
    from tailrace.kernels.linear.triton_int4 import int4_linear

    outputs, inputs = LAYERS[name]
    weights = copies_of(outputs, inputs)
    scratch = scratch_of(weights[0])
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    for rows in ROWS:
        found: list[dict] = []
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
        usual = usual_shapes(rows, outputs)
        known = set()
        for shape in (*usual, *candidates(rows)):
            kind = kind_of(rows, shape)
            cut = kind, cut_of(shape, outputs, inputs, multiprocessors)
            if kind not in kinds or cut in known or cut[1] is None:
                continue
            known.add(cut)
            kernel = launcher(shape)

            def new(x: torch.Tensor = x, kernel: Callable[..., object] = kernel) -> None:
                for weight in weights:
                    kernel(x, weight, None, scratch=scratch)

            us = 1e6 * graph_s(new) / len(weights)
            timed = {**entry, "way": shape.words, "us": us, "is_new": True}
            if shape in usual or (cut[1] is not None and not hasattr(shape, "cut")):
                with dependent_launches():
                    timed["dependent_us"] = 1e6 * graph_s(new) / len(weights)
            found.append(timed)
        yield found


def print_tables(found: list[dict]) -> None:
    print("\nmicroseconds: floor, Triton, Gluon before, the best of Gluon's; by dependent launches")
    print("(Triton, usual shapes, slices); the best candidates:")
    sums: dict[int, list[float]] = {rows: [0.0] * 5 for rows in ROWS}
    missing: dict[int, list[str]] = {}
    for name in LAYERS:
        for index, rows in enumerate(ROWS):
            here = [e for e in found if (e["layer"], e["rows"]) == (name, rows)]
            new = sorted((e for e in here if "is_new" in e), key=lambda e: e["us"])
            if not new:
                missing.setdefault(rows, []).append(name)
                continue
            old = next(e["us"] for e in here if e["way"] == "triton")
            launched = [e["us"] for e in here if e["way"].endswith(", dependent")]
            launched += [e["dependent_us"] for e in here if "dependent_us" in e]
            dependent = " / ".join(f"{us:.1f}" for us in launched)
            best = ", ".join(f"{e['us']:.1f} by {e['way']}" for e in new[:3])
            seen = (here[0]["floor_us"], old, BEFORE_US[name][index], new[0]["us"])
            head = " ".join(f"{us:6.1f}" for us in seen)
            print(f"  {name:<8} {rows:>4}: {head}   {dependent:<34}   {best}")
            seen += (min(old, new[0]["us"]),)
            sums[rows] = [total + value for total, value in zip(sums[rows], seen, strict=True)]
    print(f"\nall layers ({DEPTH} x {', '.join(LAYERS)}), milliseconds:")
    print("  rows   floor  Triton  before   Gluon    best  cuBLAS bf16   goal")
    for rows, values in sums.items():
        if rows in missing:
            print(f"  {rows:>4}   not timed: {', '.join(missing[rows])}")
            continue
        line = " ".join(f"{DEPTH * value / 1e3:7.2f}" for value in values)
        goal = f"{GOALS_MS[rows]:.1f}" if rows in GOALS_MS else "-"
        print(f"  {rows:>4} {line} {CUBLAS_MS[rows]:12.2f} {goal:>6}")


def print_served(found: list[dict]) -> None:
    """Print what would serve each layer by these times, and what does now."""
    from tailrace.kernels.linear.hopper_int4_ways import TRITON, served
    from tailrace.kernels.plan import MARGIN

    print(f"\nfor hopper_int4_ways.SERVED, what wins by {MARGIN:.0%}; what serves now:")
    for name, sizes in LAYERS.items():
        now, best = served(*sizes), []
        for rows, usual in zip(ROWS, now, strict=True):
            here = [e for e in found if (e["layer"], e["rows"]) == (name, rows)]
            us = {e["way"]: e["us"] for e in here if "is_new" in e}
            us.update((TRITON, e["us"]) for e in here if e["way"] == "triton")
            best.append(fastest_of(us, usual, MARGIN))
        print(f"  {name:<8} {json.dumps(best)}\n  {'now':>8} {json.dumps(now)}")


def time_layers(kinds: list[Kind]) -> Iterator[list[dict]]:
    """Time all layers, one after the other."""
    import torch

    for name in LAYERS:
        yield from time_layer(name, kinds)
        torch.cuda.empty_cache()


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--only-new", action="store_true", help="bands and slices alone")
    arguments = parser.parse_args()
    if has_answered(arguments, check, time_layers):
        return
    begun = time.monotonic()
    kinds = all_kinds()
    if arguments.only_new:
        kinds = [kind for kind in kinds if kind[1].endswith(("whole", "slices"))]
    right = check_all(__file__, kinds)
    if arguments.only_check:
        raise SystemExit(len(right) != len(kinds))
    lines, reason = run_apart(__file__, ["--time", json.dumps(right)], TIME_S)
    timed = [entry for line in lines for entry in line]
    (arguments.out / "gpu_int4.json").write_text(json.dumps(timed))
    print(f"times: {len(lines)} of {len(LAYERS) * len(ROWS)} {reason}".rstrip())
    print(f"{time.monotonic() - begun:.0f} s in all")
    print_tables(timed)
    print_served(timed)
    raise SystemExit(len(right) != len(kinds))


if __name__ == "__main__":
    main()
