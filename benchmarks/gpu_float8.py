"""The FP8 layers of few rounded rows on a Hopper GPU: the Gluon kernel beside the Triton one.

    PYTHONPATH=src:. python benchmarks/gpu_float8.py [--out DIR] [--only-check]

First every kind of candidate is compared with the product in float64, each in a process of its
own under a timeout, for a barrier that nobody reaches would otherwise hang the GPU: odd sizes,
weights by channels and by blocks of 128 x 128, both half precisions, NaN around the rows, their
scales and in the results; the same bits thrice, by dependent launches too, and the same bits for a
row with fewer rows beside it. What differs is named and not timed. Then the four layers of
Qwen2.5-7B are timed at 16, 32, 64 and 128 rows that come rounded, a scale an output, in CUDA graphs
that go through enough copies of a weight that none comes from the L2 cache: plainly, and by
dependent launches, as captured steps of decodes are. At 64 rows weights by blocks are timed, too.
Candidates that cut a layer alike are timed once. Each is named as plans and
`hopper_float8_ways.SERVED` name it.

    FP8 Hopper tile/warps/programs/span     runs of units, parts that meet in memory
    FP8 Hopper 64 outputs, n slices         inputs split in a program, no parts: layers with a
                                            multiprocessor for each 64 outputs
    FP8 n outputs, warps, stages            Triton's, the usual one and what plans may choose

The tables come last, and of them what `SERVED` would have by these times, "Triton" for the usual
shape of Triton's kernel. The floor is the bytes of weights, scales, rows and results at 4.19 TB/s,
the copy rate of an H200.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING

from benchmarks.hopper_layers import (
    COLD_BYTES,
    COPY_RATE,
    DEPENDENT,
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
    from collections.abc import Iterator

    import torch

    from tailrace.kernels.linear.float8 import Float8Weight
    from tailrace.kernels.linear.float8_rows import Float8Rows
    from tailrace.kernels.linear.hopper_float8_ways import Shape
    from tailrace.kernels.linear.triton_hopper_float8 import HopperFloat8Shape

TIME_S = 300
"""Of all times."""
BLOCKS_ROWS = 64
"""At which weights by blocks are timed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A weight that a kernel is compared over; where its outputs are odd, with a bias."""

    by_blocks: bool
    inputs: int
    outputs: int
    dtype: str
    is_dependent: bool = False
    """Whether dependent launches are compared, too: each is a kernel more to compile."""

    @property
    def words(self) -> str:
        scheme = "blocks" if self.by_blocks else "channels"
        return f"{self.outputs} x {self.inputs} by {scheme}, {self.dtype}"


CASES = (
    Case(False, 3584, 512, "bfloat16", is_dependent=True),  # whole tiles; what is timed, compiled
    Case(False, 1168, 4611, "float16"),  # outputs that nothing divides, a cut chunk
    Case(True, 3584, 512, "bfloat16", is_dependent=True),  # likewise by blocks
    Case(True, 272, 1000, "float16"),  # cut tiles and blocks; fewer chunks than slices
    Case(True, 640, 200, "bfloat16"),  # less than a tile of some; all of its rows
)
FULL = CASES[-1]


def candidates(rows: int) -> tuple[HopperFloat8Shape, ...]:
    from tailrace.kernels.linear.triton_hopper_float8 import CANDIDATES

    return CANDIDATES[rows]


def all_kinds() -> list[Kind]:
    return list(dict.fromkeys(kind_of(rows, shape) for rows in ROWS for shape in candidates(rows)))


def multiply(*given: object, **options: object) -> torch.Tensor:
    """See `hopper_float8_ways.multiply`."""
    from tailrace.kernels.linear import hopper_float8_ways

    return hopper_float8_ways.multiply(*given, **options)


def scratch_of(weight: Float8Weight):  # noqa: ANN201
    import torch

    from tailrace.kernels.linear.hopper_float8_ways import room
    from tailrace.kernels.linear.triton_float8_few import few_splits
    from tailrace.kernels.linear.workspace import Workspace

    device = weight.values.device
    workspace = Workspace(device, torch.bfloat16)
    splits, _ = few_splits(*weight.shape)
    workspace.reserve(
        outputs=weight.shape[0], splits=splits, rows=max(ROWS), **room(*weight.shape, device)
    )
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


def rows_amid_nan(rows: int, inputs: int, group: int, device: torch.device) -> Float8Rows:
    """Return random rows in float8, with NaN behind them and behind their scales."""
    import torch

    from tailrace.kernels.linear.float8_rows import Float8Rows, empty_rows, quantize_rows

    given = quantize_rows(torch.randn(rows, inputs, device=device), group)
    around = empty_rows(rows + 140, inputs, group, device)
    around.values.view(torch.uint8).fill_(0x7F)
    around.values[:rows].view(torch.uint8).copy_(given.values.view(torch.uint8))
    around.scales.fill_(float("nan"))
    around.scales[:rows].copy_(given.scales)
    return Float8Rows(around.values[:rows], around.scales[:rows], given.group)


def _differences(
    tile: int, case: Case, shape: HopperFloat8Shape, device: torch.device
) -> list[str]:
    import torch

    from tailrace.kernels.linear.float8 import quantize_blocks, quantize_channels

    dtype = getattr(torch, case.dtype)
    inputs, outputs = case.inputs, case.outputs
    rows = tile if case == FULL else tile - tile // 4 - 1
    matrix = torch.randn(outputs, inputs, device=device) * inputs**-0.5
    weight = (quantize_blocks if case.by_blocks else quantize_channels)(matrix)
    scratch = scratch_of(weight)
    bias = torch.randn(outputs, device=device).to(dtype) if outputs % 16 else None
    x = rows_amid_nan(rows, inputs, 128 if case.by_blocks else 0, device)
    truth = x.dequantize().double() @ weight.dequantize().double().t()
    if bias is not None:
        truth += bias.double()

    def product(count: int) -> torch.Tensor:
        some = dataclasses.replace(x, values=x.values[:count], scales=x.scales[:count])
        return multiply(some, weight, bias, dtype, scratch=scratch, shape=shape)

    where = f"{shape.words} {tile} rows, {case.words}"
    return differences(
        where, product, truth, scratch, fewer=tile // 2 + 1, is_dependent=case.is_dependent
    )


# Times


def copies_of(outputs: int, inputs: int, *, by_blocks: bool = False) -> list[Float8Weight]:
    """Return one random weight as many times as the L2 cannot keep."""
    import torch

    from tailrace.kernels.linear.float8 import Float8Weight, quantize_blocks, quantize_channels

    matrix = torch.randn(outputs, inputs, device="cuda") * inputs**-0.5
    first = (quantize_blocks if by_blocks else quantize_channels)(matrix)
    count = max(2, int(COLD_BYTES // first.nbytes) + 1)
    return [
        Float8Weight(first.values.clone(), first.scales.clone(), first.scheme) for _ in range(count)
    ]


def shapes_of(
    rows: int, outputs: int, inputs: int, count: int, kinds: list[Kind]
) -> dict[str, Shape]:
    """Return what can serve a class of a layer, Triton's usual shape first; no two cut it alike."""
    from tailrace.kernels.linear.hopper_float8_ways import TRITON, options
    from tailrace.kernels.linear.triton_float8_few import few_options

    kept: dict[str, Shape] = {}
    known = set()
    for words, shape in options(outputs, rows, TRITON, few_options((9, 0))[rows], count).items():
        if hasattr(shape, "cut"):
            kind = kind_of(rows, shape)
            cut = kind, shape.cut(outputs, -(-inputs // 128), count)
            if kind not in kinds or cut in known:
                continue
            known.add(cut)
        kept[words] = shape
    return kept


def time_layer(name: str, kinds: list[Kind]) -> Iterator[list[dict]]:
    """Time a layer by rows: Triton's shapes, and every candidate of the kinds given."""
    import torch

    count = torch.cuda.get_device_properties("cuda").multi_processor_count
    for by_blocks, classes in ((False, ROWS), (True, (BLOCKS_ROWS,))):
        weights = copies_of(*LAYERS[name], by_blocks=by_blocks)
        scratch = scratch_of(weights[0])
        for rows in classes:
            shapes = shapes_of(rows, *LAYERS[name], count, kinds)
            entry = {"layer": name, "rows": rows, "by_blocks": by_blocks}
            yield [
                {**entry, **timed} for timed in _times(rows, weights, scratch, shapes, by_blocks)
            ]
        del weights, scratch


def _times(
    rows: int, weights: list[Float8Weight], scratch: object, shapes: dict[str, Shape],
    by_blocks: bool,
) -> Iterator[dict]:  # fmt: skip
    import torch

    from tailrace.kernels.dependent_launch import dependent_launches
    from tailrace.kernels.linear.triton_float8_rows import quantize_rows

    outputs, inputs = weights[0].shape
    x = quantize_rows(torch.randn(rows, inputs, device="cuda").bfloat16(), 128 if by_blocks else 0)
    moved = weights[0].nbytes + x.values.nbytes + x.scales.nbytes + 2 * rows * outputs
    for words, shape in shapes.items():

        def all_copies(shape: Shape = shape) -> None:
            for weight in weights:
                multiply(x, weight, None, torch.bfloat16, scratch=scratch, shape=shape)

        us = 1e6 * graph_s(all_copies) / len(weights)
        with dependent_launches():
            dependent_us = 1e6 * graph_s(all_copies) / len(weights)
        yield {
            "way": words, "is_new": hasattr(shape, "cut"), "floor_us": 1e6 * moved / COPY_RATE,
            "us": us, "dependent_us": dependent_us,
        }  # fmt: skip


def print_tables(found: list[dict]) -> None:
    for by_blocks in (False, True):
        some = [e for e in found if e["by_blocks"] == by_blocks]
        rows = [rows for rows in ROWS if any(e["rows"] == rows for e in some)]
        for kind, key in (("plain launches", "us"), (DEPENDENT, "dependent_us")):
            if rows:
                scheme = "blocks of 128 x 128" if by_blocks else "channels"
                print(f"\nby {scheme}, {kind}, microseconds:")
                print("  layer    rows   floor  Triton  its best   Gluon   the best of Gluon's")
                _print_table(some, rows, key)


def _print_table(found: list[dict], classes: list[int], key: str) -> None:
    """Print each layer's times, and the sums over a model's layers."""
    sums: dict[int, list[float]] = {rows: [0.0] * 5 for rows in classes}
    missing: dict[int, list[str]] = {}
    for name in LAYERS:
        for rows in classes:
            here = [e for e in found if (e["layer"], e["rows"]) == (name, rows)]
            new = sorted((e for e in here if e["is_new"]), key=lambda e: e[key])
            old = [e[key] for e in here if not e["is_new"]]
            if not new or not old:
                missing.setdefault(rows, []).append(name)
                continue
            seen = [here[0]["floor_us"], old[0], min(old), new[0][key]]
            best = ", ".join(f"{e[key]:.1f} by {e['way']}" for e in new[:3])
            head = " ".join(f"{us:7.1f}" for us in seen)
            print(f"  {name:<8} {rows:>4} {head}   {best}")
            seen.append(min(*old, new[0][key]))
            sums[rows] = [total + us for total, us in zip(sums[rows], seen, strict=True)]
    print(f"  all layers ({DEPTH} x {', '.join(LAYERS)}), milliseconds, and the best of all:")
    for rows, values in sums.items():
        if rows in missing:
            print(f"           {rows:>4}   not timed: {', '.join(missing[rows])}")
        else:
            line = " ".join(f"{DEPTH * us / 1e3:7.2f}" for us in values)
            print(f"           {rows:>4} {line}")


def print_served(found: list[dict]) -> None:
    """Print what would serve each layer by these times, and what does now."""
    from tailrace.kernels.linear.hopper_float8_ways import TRITON, served
    from tailrace.kernels.linear.triton_float8_few import few_options
    from tailrace.kernels.plan import MARGIN

    usual = {rows: next(iter(shapes)) for rows, shapes in few_options((9, 0)).items()}
    for kind, key in (("plain launches", "us"), (DEPENDENT, "dependent_us")):
        print(
            f"\nfor hopper_float8_ways.SERVED, what wins by {MARGIN:.0%}, {kind}; what serves now:"
        )
        for name, sizes in LAYERS.items():
            now, best = served(*sizes), []
            for rows, serving in zip(ROWS, now, strict=True):
                here = [e for e in found if (e["layer"], e["rows"]) == (name, rows)]
                us = {e["way"]: e[key] for e in here if not e["by_blocks"]}
                us = {TRITON if way == usual[rows] else way: us[way] for way in us}
                best.append(fastest_of(us, serving, MARGIN))
            print(f"  {name:<8} {json.dumps(best)}\n  {'now':>8} {json.dumps(now)}")


def time_layers(kinds: list[Kind]) -> Iterator[list[dict]]:
    """Time all layers, one after the other."""
    import torch

    for name in LAYERS:
        yield from time_layer(name, kinds)
        torch.cuda.empty_cache()


def main() -> None:
    arguments = command_line(__doc__.splitlines()[0]).parse_args()
    if has_answered(arguments, check, time_layers):
        return
    begun = time.monotonic()
    kinds = all_kinds()
    right = check_all(__file__, kinds)
    if arguments.only_check:
        raise SystemExit(len(right) != len(kinds))
    lines, reason = run_apart(__file__, ["--time", json.dumps(right)], TIME_S)
    timed = [entry for line in lines for entry in line]
    (arguments.out / "gpu_float8.json").write_text(json.dumps(timed))
    print(f"times: {len(lines)} of {len(LAYERS) * (len(ROWS) + 1)} {reason}".rstrip())
    print(f"{time.monotonic() - begun:.0f} s in all")
    print_tables(timed)
    print_served(timed)
    raise SystemExit(len(right) != len(kinds))


if __name__ == "__main__":
    main()
