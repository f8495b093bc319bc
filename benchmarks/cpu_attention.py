"""Time the CPU attention kernels; refuse to where they are wrong.

    python benchmarks/cpu_attention.py [--threads N] [--repeats N]

Shapes are SmolLM2-135M's (9 heads over 3, head_dim 64, blocks of 16). Every case is first checked
against the reference. A decode is bound by memory: GB/s of keys and values read. A prefill is
bound by arithmetic: GFLOP/s of the two causal products (softmax not counted). Decodes run over
as many layers' caches as a model has, so that the caches of the CPU do not hide the reads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tailrace.kernels.attention_batch import AttentionBatch
from tailrace.kernels.select import select

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.kernels.kernels import Kernels

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
SCALE = HEAD_DIM**-0.5
DECODES = [(batch, context) for context in (512, 2048) for batch in (1, 8, 16)]
PREFILLS = [(512, 512), (2048, 2048), (512, 2048)]  # rows, context
WORST_ALLOWED = 2e-5


class Case:
    """A batch of equal sequences over freshly dealt blocks, for some layers."""

    def __init__(self, sequences: int, rows: int, context: int, layers: int) -> None:
        blocks_each = -(-context // BLOCK_SIZE)
        num_blocks = sequences * blocks_each
        tables = torch.randperm(num_blocks, dtype=torch.int32).view(sequences, blocks_each)
        positions = torch.arange(context - rows, context).repeat(sequences)
        starts = torch.arange(sequences + 1, dtype=torch.int32) * rows
        blocks = tables[:, positions[:rows] // BLOCK_SIZE].flatten().long()
        self.batch = AttentionBatch(
            query_starts=starts,
            kv_lens=torch.full((sequences,), context, dtype=torch.int32),
            block_tables=tables,
            positions=positions,
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            max_query_len=rows,
            max_kv_len=context,
        )
        self.sequences, self.rows, self.context = sequences, rows, context
        self.q = torch.randn(sequences * rows, NUM_HEADS, HEAD_DIM)
        shape = (num_blocks, NUM_KV_HEADS)
        self.caches = [
            (
                torch.randn(*shape, HEAD_DIM, BLOCK_SIZE),
                torch.randn(*shape, BLOCK_SIZE, HEAD_DIM),
            )
            for _ in range(layers)
        ]

    def run(self, kernels: Kernels) -> torch.Tensor:
        for k_cache, v_cache in self.caches:
            out = kernels.paged_attention(self.q, k_cache, v_cache, self.batch, SCALE)
        return out

    @property
    def gigabytes(self) -> float:
        return self.sequences * self.context * NUM_KV_HEADS * HEAD_DIM * 2 * 4 / 1e9

    @property
    def gigaflop(self) -> float:
        seen = self.rows * (self.context - self.rows) + self.rows * (self.rows + 1) / 2
        return self.sequences * seen * NUM_HEADS * HEAD_DIM * 4 / 1e9


def median_s(repeats: int, run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def check(case: Case, native: Kernels, reference: Kernels) -> float:
    worst = (case.run(native) - case.run(reference)).abs().max().item()
    if not worst <= WORST_ALLOWED:
        raise SystemExit(f"wrong: differs from the reference by {worst:g}, so it is not timed")
    return worst


def time_sdpa(case: Case, repeats: int) -> float | None:
    """Time torch's SDPA on keys and values that lie in one piece; whole prompts only."""
    q = torch.randn(1, NUM_HEADS, case.rows, HEAD_DIM)
    k, v = (torch.randn(1, NUM_KV_HEADS, case.context, HEAD_DIM) for _ in "kv")
    if case.rows != case.context:
        return None
    return median_s(
        repeats,
        lambda: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=SCALE, enable_gqa=True
        ),
    )


def report_decodes(native: Kernels, reference: Kernels, repeats: int, layers: int) -> None:
    print(f"decode, {layers} layers  native ms   GB/s   reference ms   worst difference")
    for sequences, context in DECODES:
        case = Case(sequences, 1, context, layers)
        worst = check(case, native, reference)
        ours = median_s(repeats, partial(case.run, native))
        theirs = median_s(1, partial(case.run, reference))
        rate = case.gigabytes * layers / ours
        print(
            f"{sequences:4d} x {context:5d}         {ours * 1e3:8.2f}  {rate:5.1f}   "
            f"{theirs * 1e3:12.2f}   {worst:.1e}"
        )


def report_prefills(native: Kernels, reference: Kernels, repeats: int) -> None:
    print("prefill, 1 layer     native ms  GFLOP/s   reference ms   SDPA ms   worst difference")
    for rows, context in PREFILLS:
        case = Case(1, rows, context, 1)
        worst = check(case, native, reference)
        ours = median_s(repeats, partial(case.run, native))
        theirs = median_s(repeats, partial(case.run, reference))
        sdpa = time_sdpa(case, repeats)
        shown = "-" if sdpa is None else f"{sdpa * 1e3:.2f}"
        print(
            f"{rows:4d} of {context:5d}        {ours * 1e3:8.2f}  {case.gigaflop / ours:7.1f}   "
            f"{theirs * 1e3:12.2f}  {shown:>8}   {worst:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0: the cores at hand")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=30, help="caches of a decode")
    arguments = parser.parse_args()
    native = select("native", arguments.threads)
    reference = select("torch", arguments.threads)
    print(native.name)
    torch.manual_seed(0)
    report_prefills(native, reference, arguments.repeats)
    report_decodes(native, reference, arguments.repeats, arguments.layers)


if __name__ == "__main__":
    main()
