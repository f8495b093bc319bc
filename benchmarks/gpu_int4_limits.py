"""What bounds the kernel that takes 4-bit weights in bands, on a Hopper GPU: its parts alone.

    PYTHONPATH=src:. python benchmarks/gpu_int4_limits.py [--out DIR]

For the layers of Qwen2.5-7B, by rows and by the tile's outputs, microseconds of

    bytes       the ring is filled as ever, and each unit is handed back at once
    products    no byte is loaded: units of whatever lies in shared memory are unpacked, multiplied,
                and their sums met and stored
    both        the kernel

from CUDA graphs that go through more copies of a weight than the L2 cache keeps. Where both take
about as long as the longer of the two, that one is to be made faster; where they take longer, they
wait for each other. `gpu_int4.py` says first whether the kernel is right; nothing here is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

sys.path.insert(0, str(Path(__file__).parent))

from gpu_int4 import LAYERS, ROWS, copies_of, graph_s, scratch_of

from tailrace.kernels.linear.triton_hopper_int4_bands import (
    CANDIDATES,
    STEP,
    BandShape,
    consume,
    int4_bands,
)
from tailrace.kernels.linear.triton_hopper_ring import (
    descriptors,
    new_ring,
    produce,
    run_arguments,
)
from tailrace.kernels.multiprocessors import multiprocessors

if TYPE_CHECKING:
    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.workspace import SplitScratch

PARTS = ("bytes", "products", "both")


@gluon.jit
def _hand_back(bars, low, high):
    """Take each unit as it comes, and hand its slot back."""
    full, free = bars
    STAGES: gl.constexpr = full.shape[0]
    for unit in range(low, high):
        at = unit - low
        mbarrier.wait(full.index(at % STAGES), at // STAGES % 2)
        gl.thread_barrier()
        mbarrier.arrive(free.index(at % STAGES), count=1)


@gluon.jit
def _pretend(bars, low, high):
    """Say of each unit that it has come as soon as its slot is free."""
    full, free = bars
    STAGES: gl.constexpr = full.shape[0]
    for unit in range(low, high):
        at = unit - low
        mbarrier.wait(free.index(at % STAGES), at // STAGES % 2 ^ 1)
        mbarrier.arrive(full.index(at % STAGES), count=1)


@gluon.jit(do_not_specialize=["num_rows", "chunks", "units", "span"])
def part_kernel(
    codes_desc,
    x_desc,
    meta_desc,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals,
    num_rows,
    N,
    padded_n,
    chunks,
    units,
    span,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    PART: gl.constexpr,
):
    """The kernel without its products, or without its bytes."""
    BOXES: gl.constexpr = TILE // codes_desc.block_type.shape[0]
    STEPS: gl.constexpr = codes_desc.block_type.shape[1] * 4 // STEP
    descs = (codes_desc, x_desc, meta_desc)
    rings, bars = new_ring(descs, STAGES, BOXES, STEPS, 1)
    low = gl.program_id(0) * span
    high = gl.minimum(low + span, units)
    sizes = (N, padded_n, num_rows, chunks, units, span)
    if PART == "bytes":
        producer = (descs, rings, bars, low, high, sizes, 1, False)
        gl.warp_specialize([(_hand_back, (bars, low, high)), (produce, producer)], [1], [24])
    else:
        pointers = (bias_ptr, out_ptr, part_ptr, arrivals)
        common = (rings, bars, pointers, sizes, low, high)
        gl.warp_specialize(
            [(consume, (common, TILE, False)), (_pretend, (bars, low, high))], [1], [24]
        )


def launch(
    part: str,
    x: torch.Tensor,
    weight: PackedInt4,
    scratch: SplitScratch,
    shape: BandShape,
    out: torch.Tensor,
) -> None:
    """Launch a part as `int4_bands` launches the whole, or that; groups are of 128."""
    if part == "both":
        int4_bands(x, weight, None, scratch=scratch, shape=shape, out_TO=out)
        return
    cut = shape.cut(weight.outputs, weight.codes.shape[0], multiprocessors(x.device))
    block_m = next(size for size in CANDIDATES if x.shape[0] <= size)
    part_kernel[(cut.programs,)](
        *descriptors(x, weight, shape.box, block_m, STEP.value),
        *run_arguments(x, weight, None, scratch, cut, out),
        TILE=shape.tile, STAGES=shape.stages(block_m, weight.chunk), PART=part,
        num_warps=shape.warps, maxnreg=shape.registers,
    )  # fmt: skip


def time_layer(name: str) -> list[dict]:
    outputs, inputs = LAYERS[name]
    weights = copies_of(outputs, inputs)
    scratch = scratch_of(weights[0])
    found = []
    for rows in ROWS:
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        out = torch.empty(rows, outputs, dtype=x.dtype, device="cuda")
        for shape in (shape for shape in CANDIDATES[rows] if shape.least_span == 4):
            entry: dict = {"layer": name, "rows": rows, "shape": shape.words}
            for part in PARTS:

                def work(
                    part: str = part,
                    x: torch.Tensor = x,
                    out: torch.Tensor = out,
                    shape: BandShape = shape,
                ) -> None:
                    for weight in weights:
                        launch(part, x, weight, scratch, shape, out)

                entry[part] = 1e6 * graph_s(work) / len(weights)
            line = " ".join(f"{entry[part]:7.1f}" for part in PARTS)
            print(f"  {name:<8} {rows:>4} {shape.words:<20} {line}", flush=True)
            found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    arguments = parser.parse_args()
    print("microseconds:", ", ".join(PARTS))
    found = []
    for name in LAYERS:
        found += time_layer(name)
        torch.cuda.empty_cache()
    (arguments.out / "gpu_int4_limits.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
