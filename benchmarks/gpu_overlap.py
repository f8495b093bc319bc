"""Decode attention beside prefill attention on one GPU: one after the other, or on two streams.

    python benchmarks/gpu_overlap.py [--rounds 5]

A mixed step's attention is bound by memory (decodes) and by compute (a prompt's chunk). On two
streams they share the multiprocessors where registers and shared memory leave room for one program
of each. For one layer of Qwen2.5-7B (28 query heads, 4 KV heads, 128 dimensions, bfloat16, units of
8 tokens): 128 decodes over 4500 tokens and a chunk of 900 rows over 3072. Both kernels' results are
compared with attention in float64 first; every candidate pair of shapes is then captured as a graph
of eight layers, and the graphs are timed in turn, so that no one has the cooler GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass

import torch
from benchmarks.gpu_attention import Case

from tailrace.kernels.paged_attention.triton_decode import DecodeShape
from tailrace.kernels.paged_attention.triton_prefill import Shape

LAYERS, UNIT = 8, 8
PREFILLS = (Shape(64, 64, 4, 3), Shape(64, 64, 4, 4), Shape(64, 64, 4, 2), Shape(128, 64, 8, 3))
DECODES = (
    DecodeShape(512, 128, 4, 3),
    DecodeShape(512, 128, 4, 2),
    DecodeShape(512, 128, 4, 4),
    DecodeShape(512, 64, 4, 3),
    DecodeShape(512, 64, 4, 4),
    DecodeShape(512, 64, 4, 5),
)
WHO_FIRST = ("one after the other", "equal", "decode first", "prefill first")
"""Which of two streams has the higher priority."""


@dataclass(frozen=True)
class Variant:
    """One way to run a layer's attention."""

    decode: DecodeShape
    prefill: Shape
    order: str

    def __str__(self) -> str:
        d, p = self.decode, self.prefill
        return (
            f"decode {d.block_n}x{d.num_stages}w{d.num_warps}, "
            f"prefill {p.block_m}x{p.block_n}x{p.num_stages}w{p.num_warps}, {self.order}"
        )


class Work:
    """Both kernels' inputs."""

    def __init__(self) -> None:
        self.decodes = Case([(1, 4500 + 7 * row % 512) for row in range(128)], UNIT, False)
        self.chunk = Case([(900, 3972)], UNIT, False)
        self.tiles = {shape: self.chunk.tiles(shape) for shape in PREFILLS}
        self.scratch = self.decodes.scratch(DECODES[0])
        low, high = torch.cuda.Stream.priority_range()
        self.streams = {
            "low": torch.cuda.Stream(priority=low),
            "high": torch.cuda.Stream(priority=high),
        }

    def check(self) -> None:
        """Stop where a kernel differs from attention in float64."""
        for case in (self.decodes, self.chunk):
            case.poison()
        for decode in DECODES:
            self.decodes.decode(decode, self.scratch)
            require(self.decodes.error(), decode)
        for prefill in PREFILLS:
            self.chunk.prefill(prefill, self.tiles[prefill])
            require(self.chunk.error(), prefill)

    def layer(self, variant: Variant) -> None:
        """Queue one layer's attention."""
        main = torch.cuda.current_stream()
        if variant.order == WHO_FIRST[0]:
            self.decodes.decode(variant.decode, self.scratch)
            self.chunk.prefill(variant.prefill, self.tiles[variant.prefill])
            return
        decode_level = "high" if variant.order == "decode first" else "low"
        prefill_level = "high" if variant.order == "prefill first" else "low"
        decoding = self.streams[decode_level]
        filling = self.streams[prefill_level] if prefill_level != decode_level else main
        for stream in (decoding, filling):
            if stream is not main:
                stream.wait_stream(main)
        with torch.cuda.stream(decoding):
            self.decodes.decode(variant.decode, self.scratch)
        with torch.cuda.stream(filling):
            self.chunk.prefill(variant.prefill, self.tiles[variant.prefill])
        for stream in (decoding, filling):
            if stream is not main:
                main.wait_stream(stream)

    def capture(self, variant: Variant) -> torch.cuda.CUDAGraph:
        """Return a graph of `LAYERS` layers."""
        self.layer(variant)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAYERS):
                self.layer(variant)
        return graph


def require(error: float, what: object) -> None:
    if not error < 0.01:
        raise SystemExit(f"{what}: differs from attention in float64 by {error:.4f}")


def time_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return microseconds a layer."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    work = Work()
    work.check()
    variants = [Variant(*parts) for parts in itertools.product(DECODES, PREFILLS, WHO_FIRST)]
    graphs = {variant: work.capture(variant) for variant in variants}
    times: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for _ in range(arguments.rounds):
        for variant, graph in graphs.items():
            times[variant].append(time_us(graph))
    medians = {variant: statistics.median(found) for variant, found in times.items()}
    base = min(us for variant, us in medians.items() if variant.order == WHO_FIRST[0])
    print(f"best one after the other: {base:.1f} us a layer")
    for variant, us in sorted(medians.items(), key=lambda item: item[1])[:24]:
        print(f"{us:8.1f} us  {us / base:.3f} x  {variant}")


if __name__ == "__main__":
    main()
