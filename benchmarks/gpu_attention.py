"""The attention kernels alone on a GPU: KV layouts and tile shapes beside the ceilings.

    python benchmarks/gpu_attention.py --out DIR [--kv-cache-dtype fp8]

First every combination is compared with attention in float64 on a small case with NaN in unused
slots; one that differs is not timed. Then, for one layer of Qwen2.5-7B (28 query heads, 4 KV heads,
128 dimensions, bfloat16): decode at batch 1, 50 and 128, and prefill of whole prompts and of a
chunk over a prefix, over tokens per unit (8 to 64), head-major ([unit, head, token]) against
token-major ([unit, token, head]) and the candidates of tile shape. Blocks are dealt at random, as
after hours of service. Times are medians of CUDA events, caches flushed between. With a cache in
float8 (e4m3, scales unlike 1) only the layout that is served is timed, in units of 8 and 16.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tailrace.kernels.kv_scales import UNSCALED, KVScales, quantised
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention.device_batch import cut_tiles
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch, DecodeShape, decode
from tailrace.kernels.paged_attention.triton_prefill import Shape, prefill

HEADS, KV_HEADS, DIM = 28, 4, 128
SCALE = DIM**-0.5
UNITS = (8, 16, 32, 64)
PREFILLS = (
    Shape(64, 64, 4, 3),
    Shape(64, 128, 4, 2),
    Shape(128, 64, 8, 3),
    Shape(128, 64, 8, 2),
    Shape(128, 128, 8, 2),
)
DECODES = tuple(
    DecodeShape(split, block, warps, stages)
    for split, block, warps, stages in (
        (256, 64, 4, 3),
        (512, 64, 4, 2),
        (512, 64, 4, 3),
        (512, 64, 4, 4),
        (512, 128, 8, 3),
        (512, 128, 4, 3),
        (512, 32, 2, 4),
        (512, 32, 4, 4),
        (1024, 64, 4, 3),
    )
)
DECODE_CASES = {"b1 x 4500": (1, 4500), "b50 x 500": (50, 500), "b128 x 4500": (128, 4500)}
# Chunks of (rows, keys).
PREFILL_CASES = {
    "8 x 512": [(512, 512)] * 8,
    "4 x 1024": [(1024, 1024)] * 4,
    "2 x 2048": [(2048, 2048)] * 2,
    "1 x 4096": [(4096, 4096)],
    "1024 over 3072": [(1024, 4096)],
    "256 over 4096": [(256, 4352)],
}


@dataclass
class Case:
    """Chunks over a cache in one layout."""

    chunks: list[tuple[int, int]]
    unit: int
    head_major: bool
    float8: bool = False

    def __post_init__(self) -> None:
        kv_lens = [keys for _, keys in self.chunks]
        widths = [-(-keys // self.unit) for keys in kv_lens]
        blocks = sum(widths) + 1
        order = torch.randperm(blocks, device="cuda", dtype=torch.int32)
        self.tables = torch.zeros(len(kv_lens), max(widths), dtype=torch.int32, device="cuda")
        used = 0
        for row, width in enumerate(widths):
            self.tables[row, :width] = order[used : used + width]
            used += width
        shape = (blocks, KV_HEADS, self.unit, DIM)
        axes = (0, 1, 2, 3)
        if not self.head_major:
            shape, axes = (blocks, self.unit, KV_HEADS, DIM), (0, 2, 1, 3)
        self.keys = torch.randn(shape, dtype=torch.bfloat16, device="cuda").permute(axes)
        self.values = torch.randn(shape, dtype=torch.bfloat16, device="cuda").permute(axes)
        self.scales = UNSCALED
        if self.float8:
            self.scales = KVScales(0.0123, 0.0321)
            self.keys = quantised(self.keys, self.scales.k, FLOAT8)
            self.values = quantised(self.values, self.scales.v, FLOAT8)
        rows = sum(rows for rows, _ in self.chunks)
        self.q = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        starts = [0, *itertools.accumulate(rows for rows, _ in self.chunks)]
        self.starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")

    def decode(self, shape: DecodeShape, scratch: DecodeScratch) -> None:
        decode(
            self.q, self.keys.transpose(2, 3), self.values, self.out, kv_lens=self.kv_lens,
            block_tables=self.tables, scale=SCALE, shape=shape, scratch=scratch,
            kv_scales=self.scales,
        )  # fmt: skip

    def scratch(self, shape: DecodeShape) -> DecodeScratch:
        longest = int(self.kv_lens.max())
        return DecodeScratch.allocate(len(self.chunks), HEADS, DIM, longest, shape.split, "cuda")

    def prefill(self, shape: Shape, tiles: torch.Tensor) -> None:
        prefill(
            self.q, self.keys.transpose(2, 3), self.values, self.out, tiles=tiles,
            query_starts=self.starts, kv_lens=self.kv_lens, block_tables=self.tables, scale=SCALE,
            shape=shape, kv_scales=self.scales,
        )  # fmt: skip

    def tiles(self, shape: Shape) -> torch.Tensor:
        rows = self.starts.diff().cpu().numpy()
        lens = self.kv_lens.cpu().numpy()
        return torch.from_numpy(
            cut_tiles(rows, lens, first_sequence=0, block_m=shape.block_m)
        ).cuda()

    def poison(self) -> None:
        """NaN wherever no token has been written."""
        is_written = torch.zeros(self.keys.shape[0], self.unit, dtype=torch.bool, device="cuda")
        for row, (_, keys) in enumerate(self.chunks):
            positions = torch.arange(keys, device="cuda")
            is_written[self.tables[row, positions // self.unit].long(), positions % self.unit] = 1
        hole = ~is_written[:, None, :, None]
        for cache in (self.keys, self.values):
            if self.float8:
                cache.view(torch.uint8).masked_fill_(hole, 0x7F)  # NaN
            else:
                cache.masked_fill_(hole, float("nan"))
        self.out.fill_(float("nan"))

    def error(self) -> float:
        """Return |out - truth| / |truth| in float64."""
        truth = torch.empty_like(self.out, dtype=torch.float64)
        for row, (rows, keys) in enumerate(self.chunks):
            units = self.tables[row, : -(-keys // self.unit)].long()
            k, v = (
                cache[units].transpose(1, 2).reshape(-1, KV_HEADS, DIM)[:keys].double() * scale
                for cache, scale in (
                    (self.keys.to(torch.float32), self.scales.k),
                    (self.values.to(torch.float32), self.scales.v),
                )
            )
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            part = slice(int(self.starts[row]), int(self.starts[row + 1]))
            scores = torch.einsum("qhd,khd->hqk", self.q[part].double(), k) * SCALE
            hidden = torch.ones(rows, keys, dtype=torch.bool, device="cuda").triu(keys - rows + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            truth[part] = torch.einsum("hqk,khd->qhd", weights, v)
        return float((self.out.double() - truth).norm() / truth.norm())


FLUSH: list[torch.Tensor] = []


CYCLES_A_MS = 2_000_000
"""Or more: an H200's clock is at most 1.98 GHz."""


def time_ms(work, repeats: int = 15, lead_ms: float = 1.0) -> float:  # noqa: ANN001
    """Return the median device time of one call with a cold L2.

    The device sleeps before it, `lead_ms` in which the host queues the whole call.
    """
    if not FLUSH:
        FLUSH.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        FLUSH[0].zero_()
        torch.cuda._sleep(int(lead_ms * CYCLES_A_MS))  # noqa: SLF001 - its only name
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def check(unit: int, head_major: bool, float8: bool) -> list[str]:
    """Return what differs from the truth."""
    wrong = []
    chunks = [(1, n) for n in (1, 7, 63, 64, 65, 511, 512, 513, 1030, 2047)]
    for shape in DECODES:
        case = Case(chunks, unit, head_major, float8)
        case.poison()
        case.decode(shape, case.scratch(shape))
        if not (error := case.error()) < 1e-2:
            wrong.append(f"decode {shape} unit {unit}: {error}")
    for shape in PREFILLS:
        odd = [(5, 5), (64, 64), (1, 300), (129, 400), (257, 257), (300, 1333)]
        case = Case(odd, unit, head_major, float8)
        case.poison()
        case.prefill(shape, case.tiles(shape))
        if not (error := case.error()) < 1e-2:
            wrong.append(f"prefill {shape} unit {unit}: {error}")
    return wrong


def decode_rows(unit: int, head_major: bool, float8: bool) -> list[dict]:
    rows = []
    for name, (batch, keys) in DECODE_CASES.items():
        case = Case([(1, keys)] * batch, unit, head_major, float8)
        bytes_read = batch * keys * KV_HEADS * DIM * 2 * case.keys.itemsize
        for shape in DECODES:
            scratch = case.scratch(shape)
            ms = time_ms(
                lambda case=case, shape=shape, scratch=scratch: case.decode(shape, scratch)
            )
            rows.append(row(name, unit, head_major, shape, ms, bytes_read / ms / 1e9, "TB/s"))
    return rows


def prefill_rows(unit: int, head_major: bool, float8: bool) -> list[dict]:
    rows = []
    for name, chunks in PREFILL_CASES.items():
        case = Case(chunks, unit, head_major, float8)
        pairs = sum(r * k - r * (r - 1) / 2 for r, k in chunks)
        for shape in PREFILLS:
            tiles = case.tiles(shape)
            ms = time_ms(lambda case=case, shape=shape, tiles=tiles: case.prefill(shape, tiles))
            rate = 4 * DIM * HEADS * pairs / ms / 1e9
            rows.append(row(name, unit, head_major, shape, ms, rate, "TFLOP/s"))
    return rows


def row(name, unit, head_major, shape, ms, rate, what) -> dict:  # noqa: ANN001, PLR0917
    layout = "head" if head_major else "token"
    return {
        "case": name,
        "unit": unit,
        "layout": layout,
        "shape": vars(shape),
        "ms": ms,
        what: rate,
    }


def sdpa_rows() -> list[dict]:
    """What torch's own attention reaches on contiguous memory: no paging, whole prompts."""
    rows = []
    for name, chunks in list(PREFILL_CASES.items())[:4]:
        batch, length = len(chunks), chunks[0][0]
        q = torch.randn(batch, HEADS, length, DIM, dtype=torch.bfloat16, device="cuda")
        k, v = (
            torch.randn(batch, KV_HEADS, length, DIM, dtype=torch.bfloat16, device="cuda")
            for _ in range(2)
        )

        def work(q=q, k=k, v=v) -> None:  # noqa: ANN001
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

        ms = time_ms(work)
        pairs = sum(r * k - r * (r - 1) / 2 for r, k in chunks)
        rows.append({"case": name, "ms": ms, "TFLOP/s": 4 * DIM * HEADS * pairs / ms / 1e9})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    float8 = arguments.kv_cache_dtype == "fp8"
    layouts = list(itertools.product(UNITS, (True, False)))
    if float8:
        layouts = [(8, False), (16, False)]
    wrong = [w for unit, major in layouts for w in check(unit, major, float8)]
    print(f"correctness: {len(wrong)} wrong", *wrong[:20], sep="\n", flush=True)
    if wrong:
        raise SystemExit(1)
    found: list[dict] = []
    for unit, head_major in layouts:
        found += decode_rows(unit, head_major, float8)
        if float8 or head_major or unit == UNITS[1]:
            found += prefill_rows(unit, head_major, float8)
    sdpa = sdpa_rows()
    name = "gpu_attention_fp8.json" if float8 else "gpu_attention.json"
    (arguments.out / name).write_text(json.dumps({"own": found, "sdpa": sdpa}))
    print(torch.cuda.get_device_name(), torch.__version__, f"KV {arguments.kv_cache_dtype}")
    for name in (*DECODE_CASES, *PREFILL_CASES):
        print_case(name, [r for r in found if r["case"] == name])
    for entry in sdpa:
        print(f"SDPA {entry['case']:<16} {entry['ms']:.3f} ms {entry['TFLOP/s']:.0f} TFLOP/s")


def print_case(name: str, rows: list[dict]) -> None:
    rate = "TB/s" if "TB/s" in rows[0] else "TFLOP/s"
    print(f"\n{name}: best shape for each layout")
    for (unit, layout), group in itertools.groupby(rows, lambda r: (r["unit"], r["layout"])):
        best = max(group, key=lambda r: r[rate])
        shape = "/".join(map(str, best["shape"].values()))
        print(
            f"  unit {unit:>2} {layout:<5}-major {best['ms']:.4f} ms {best[rate]:7.2f} {rate}"
            f"  {shape}"
        )


if __name__ == "__main__":
    main()
