"""A decode step's parts on one GPU: the linear layers of few rows, and attention of short splits.

    python benchmarks/gpu_skinny.py --out DIR

Layer shapes of Qwen2.5-7B in bfloat16. Every candidate of the Triton kernel is compared with the
product in float32 first, on odd numbers of rows and NaN beyond them; then it is timed beside cuBLAS
in CUDA graphs that run through several copies of the weight, so that none comes from the L2 cache.
The floor is the weight's bytes over 4.19 TB/s. Decode attention is timed over splits and tiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from benchmarks.gpu_attention import Case
from benchmarks.hopper_layers import graph_s
from torch.nn import functional

from tailrace.kernels.linear.triton_skinny import SkinnyScratch, SkinnyShape, skinny_linear
from tailrace.kernels.paged_attention.triton_decode import DecodeShape

if TYPE_CHECKING:
    from collections.abc import Callable

COPY = 4.19e12
LAYERS = {
    "qkv": (4608, 3584),
    "o": (3584, 3584),
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "head": (152064, 3584),
}
ROWS = (1, 8, 32, 50, 64)
TILES = (
    (32, 128, 4, 4),
    (32, 256, 4, 3),
    (64, 64, 4, 4),
    (64, 64, 4, 6),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 256, 4, 2),
    (128, 64, 4, 4),
    (128, 64, 8, 4),
    (128, 128, 8, 3),
)
SPLITS = (1, 2, 4, 8)
SHAPES = [
    SkinnyShape(n, k, splits, warps, stages)
    for (n, k, warps, stages), splits in itertools.product(TILES, SPLITS)
]
ATTENTION = [
    DecodeShape(split, block, 4, stages)
    for split, block, stages in (
        (512, 128, 3), (256, 128, 3), (256, 64, 3), (256, 64, 4), (256, 32, 4), (128, 64, 3),
        (128, 128, 2), (512, 64, 4), (512, 32, 4),
    )
]  # fmt: skip
ATTENTION_CASES = ((1, 500), (8, 500), (50, 500), (50, 1000), (8, 4500), (128, 4500))


def scratch() -> SkinnyScratch:
    return SkinnyScratch.allocate("cuda", 8 * 64 * 152064, 8192)


def compile_some(shapes: list[SkinnyShape]) -> None:
    """Fill the disk cache; in a process of its own."""
    room = scratch()
    for shape in shapes:
        for rows, has_bias in ((16, True), (32, False), (64, False), (16, False)):
            x = torch.zeros(rows, 512, dtype=torch.bfloat16, device="cuda")
            w = torch.zeros(512, 512, dtype=torch.bfloat16, device="cuda")
            skinny_linear(x, w, w[0] if has_bias else None, shape=shape, scratch=room)


def check(shape: SkinnyShape, room: SkinnyScratch) -> bool:
    """Say whether it equals the product, with NaN in what lies beyond the rows."""
    for rows, outputs, inputs in (
        (1, 4608, 3584),
        (7, 3600, 3584),
        (33, 512, 3600),
        (64, 784, 528),
    ):
        whole = torch.full((rows + 3, inputs), float("nan"), dtype=torch.bfloat16, device="cuda")
        x = whole[:rows]
        x.copy_(torch.randn(rows, inputs))
        w = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") / inputs**0.5
        bias = torch.randn(outputs, dtype=torch.bfloat16, device="cuda")
        found = skinny_linear(x, w, bias if rows < 8 else None, shape=shape, scratch=room).float()
        truth = x.double() @ w.double().T + (bias.double() if rows < 8 else 0.0)
        if not float((found - truth).norm() / truth.norm()) < 0.004:
            return False
    return True


def time_us(work: Callable[[int], object], copies: int, rounds: int = 5) -> float:
    """Return microseconds of one call, out of a graph of several."""
    calls = max(8, copies)

    def several() -> None:
        for index in range(calls):
            work(index % copies)

    return 1e6 * graph_s(several, rounds) / calls


def linear_rows(room: SkinnyScratch) -> list[dict[str, object]]:
    right = [shape for shape in SHAPES if check(shape, room)]
    print(f"{len(right)} of {len(SHAPES)} shapes are right", flush=True)
    found: list[dict[str, object]] = []
    for name, (outputs, inputs) in LAYERS.items():
        copies = max(2, min(12, int(4e8 / (2 * outputs * inputs))))
        weights = [
            torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") for _ in range(copies)
        ]
        floor = 1e6 * 2 * outputs * inputs / COPY
        for rows in ROWS:
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
            cublas = time_us(lambda i, x=x, w=weights: functional.linear(x, w[i]), copies)
            times = {}
            for shape in right:
                if shape.splits > 1 and outputs > 20000:
                    continue
                times[shape] = time_us(
                    lambda i, x=x, w=weights, s=shape: skinny_linear(
                        x, w[i], None, shape=s, scratch=room
                    ),
                    copies,
                )
            best = sorted(times.items(), key=lambda item: item[1])[:3]
            found.append(
                {"layer": name, "rows": rows, "floor": floor, "cublas": cublas,
                 "best": [(str(shape), us) for shape, us in best],
                 "all": {str(shape): us for shape, us in times.items()}}
            )  # fmt: skip
            print(
                f"{name:<8} {rows:>3} rows: floor {floor:6.1f} us, cuBLAS {cublas:6.1f}, "
                + "; ".join(
                    f"{us:.1f} {s.block_n}x{s.block_k}/{s.splits} w{s.num_warps}s{s.num_stages}"
                    for s, us in best
                ),
                flush=True,
            )
        del weights
    return found


def attention_rows() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for batch, context in ATTENTION_CASES:
        copies = max(2, min(8, int(4e8 / (batch * context * 2048))))
        cases = [Case([(1, context)] * batch, 8, False) for _ in range(copies)]
        times = {}
        for shape in ATTENTION:
            room = cases[0].scratch(shape)
            cases[0].poison()
            cases[0].decode(shape, room)
            if not cases[0].error() < 0.01:
                raise SystemExit(f"{shape}: wrong")
            times[shape] = time_us(lambda i, s=shape, r=room, c=cases: c[i].decode(s, r), copies)
        floor = 1e6 * batch * context * 2048 / COPY
        found.append(
            {"batch": batch, "context": context, "times": {str(k): v for k, v in times.items()}}
        )
        print(
            f"attention {batch} x {context}: floor {floor:.1f} us; "
            + ", ".join(
                f"{s.split}/{s.block_n}s{s.num_stages} {us:.1f}" for s, us in times.items()
            ),
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--processes", type=int, default=10)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool:
        list(
            pool.map(
                compile_some, [SHAPES[i :: arguments.processes] for i in range(arguments.processes)]
            )
        )
    room = scratch()
    linear = linear_rows(room)
    attention = attention_rows()
    (arguments.out / "gpu_skinny.json").write_text(
        json.dumps({"linear": linear, "attention": attention})
    )


if __name__ == "__main__":
    main()
