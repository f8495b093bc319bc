"""The attention kernels alone on a GPU: KV layouts and tile shapes beside the ceilings.

    python benchmarks/gpu_attention.py --out DIR [--kv-cache-dtype fp8|both]
    TRITON_INTERPRET=1 python benchmarks/gpu_attention.py --kv-cache-dtype both --device cpu
                                                     (in the interpreter: is each way right?)

First every combination is compared with attention in float64 on a small case with NaN in unused
slots; one that differs is not timed. Then, for one layer of Qwen2.5-7B (28 query heads, 4 KV heads,
128 dimensions, bfloat16): decode at batch 1, 50 and 128, and prefill of whole prompts and of a
chunk over a prefix, over tokens per unit (8 to 64), head-major ([unit, head, token]) against
token-major ([unit, token, head]) and the candidates of tile shape. Blocks are dealt at random, as
after hours of service. Times are medians of CUDA events, caches flushed between. With a cache in
float8 (e4m3, scales unlike 1) only the layout that is served is timed, in units of 8 and 16.

`both` is one table in the layout that is served, units of 8: caches of 16 bits beside float8, read
in each way that there is (products in q's dtype, as before commit "Attention over a float8 cache
multiplies in float16"; in float16; and by pairs), in the usual shape, then the way that serves in
other shapes. Of decodes it says what a token of KV costs a model of 28 layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.attention_shapes import (
    decode_candidates,
    decode_shape,
    prefill_candidates,
    prefill_shape,
)
from tailrace.kernels.kv_scales import UNSCALED, KVScales, quantised
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention.device_batch import cut_tiles
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch, DecodeShape, decode
from tailrace.kernels.paged_attention.triton_float8 import Reading
from tailrace.kernels.paged_attention.triton_prefill import Shape, prefill

if TYPE_CHECKING:
    from collections.abc import Callable

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
    device: str = "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of activations; the interpreter has no bfloat16."""
        return torch.bfloat16 if self.device == "cuda" else torch.float16

    def __post_init__(self) -> None:
        kv_lens = [keys for _, keys in self.chunks]
        widths = [-(-keys // self.unit) for keys in kv_lens]
        blocks = sum(widths) + 1
        order = torch.randperm(blocks, device=self.device, dtype=torch.int32)
        self.tables = torch.zeros(len(kv_lens), max(widths), dtype=torch.int32, device=self.device)
        used = 0
        for row, width in enumerate(widths):
            self.tables[row, :width] = order[used : used + width]
            used += width
        shape = (blocks, KV_HEADS, self.unit, DIM)
        axes = (0, 1, 2, 3)
        if not self.head_major:
            shape, axes = (blocks, self.unit, KV_HEADS, DIM), (0, 2, 1, 3)
        self.keys = torch.randn(shape, dtype=self.dtype, device=self.device).permute(axes)
        self.values = torch.randn(shape, dtype=self.dtype, device=self.device).permute(axes)
        self.scales = UNSCALED
        if self.float8:
            self.scales = KVScales(0.0123, 0.0321)
            self.keys = quantised(self.keys, self.scales.k, FLOAT8)
            self.values = quantised(self.values, self.scales.v, FLOAT8)
        rows = sum(rows for rows, _ in self.chunks)
        self.q = torch.randn(rows, HEADS, DIM, dtype=self.dtype, device=self.device)
        self.out = torch.empty_like(self.q)
        starts = [0, *itertools.accumulate(rows for rows, _ in self.chunks)]
        self.starts = torch.tensor(starts, dtype=torch.int32, device=self.device)
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32, device=self.device)

    def decode(self, shape: DecodeShape, scratch: DecodeScratch, by: Reading | None = None) -> None:
        decode(
            self.q, self.keys.transpose(2, 3), self.values, self.out, kv_lens=self.kv_lens,
            block_tables=self.tables, scale=SCALE, shape=shape, scratch=scratch,
            kv_scales=self.scales, by=by,
        )  # fmt: skip

    def scratch(self, shape: DecodeShape) -> DecodeScratch:
        longest = int(self.kv_lens.max())
        return DecodeScratch.allocate(
            len(self.chunks), HEADS, DIM, longest, shape.split, self.device
        )

    def prefill(self, shape: Shape, tiles: torch.Tensor, by: Reading | None = None) -> None:
        prefill(
            self.q, self.keys.transpose(2, 3), self.values, self.out, tiles=tiles,
            query_starts=self.starts, kv_lens=self.kv_lens, block_tables=self.tables, scale=SCALE,
            shape=shape, kv_scales=self.scales, by=by,
        )  # fmt: skip

    def tiles(self, shape: Shape) -> torch.Tensor:
        rows = self.starts.diff().cpu().numpy()
        lens = self.kv_lens.cpu().numpy()
        return torch.from_numpy(cut_tiles(rows, lens, first_sequence=0, block_m=shape.block_m)).to(
            self.device
        )

    def poison(self) -> None:
        """NaN wherever no token has been written."""
        is_written = torch.zeros(
            self.keys.shape[0], self.unit, dtype=torch.bool, device=self.device
        )
        for row, (_, keys) in enumerate(self.chunks):
            positions = torch.arange(keys, device=self.device)
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
            hidden = torch.ones(rows, keys, dtype=torch.bool, device=self.device).triu(
                keys - rows + 1
            )
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


LAYERS = 28
BOTH_DECODES = {**DECODE_CASES, "b106 x 4500": (106, 4500)}
BOTH_PREFILLS = {name: PREFILL_CASES[name] for name in ("4 x 1024", "1 x 4096", "1024 over 3072")}
ODD_DECODES = [(1, n) for n in (1, 7, 127, 128, 129, 511, 512, 513, 1030, 2047)]
ODD_PREFILLS = [(5, 5), (64, 64), (1, 300), (129, 400), (257, 257), (300, 1333)]
# Of no plan, for their sums are cut elsewhere.
OTHER_DECODES = (
    DecodeShape(512, 64, 4, 3),
    DecodeShape(512, 64, 4, 5),
    DecodeShape(1024, 128, 4, 3),
    DecodeShape(1024, 128, 4, 5),
)


@dataclass(frozen=True)
class Way:
    """A cache, how it is read, and the kernel's shape."""

    float8: bool
    by: Reading
    shape: DecodeShape | Shape

    @property
    def words(self) -> str:
        split = f", split {self.shape.split}" if isinstance(self.shape, DecodeShape) else ""
        cache = f"float8 {self.by.value}" if self.float8 else "16 bits"
        return f"{cache:<28} {self.shape.words}{split}"

    def run(self, case: Case) -> Callable[[], None]:
        """Return the work over a case, its scratch or tiles made."""
        if isinstance(self.shape, DecodeShape):
            scratch = case.scratch(self.shape)
            return lambda: case.decode(self.shape, scratch, self.by)
        tiles = case.tiles(self.shape)
        return lambda: case.prefill(self.shape, tiles, self.by)


def decode_ways(capability: tuple[int, int]) -> list[Way]:
    usual = decode_shape(DIM, capability)
    more = dict.fromkeys((*decode_candidates(DIM, capability, is_float8=True), *OTHER_DECODES))
    ways = [Way(False, Reading.AS_Q, usual), *(Way(True, by, usual) for by in Reading)]
    return ways + [Way(True, Reading.PAIRS, shape) for shape in more if shape != usual]


def prefill_ways(capability: tuple[int, int]) -> list[Way]:
    usual = prefill_shape(DIM, 4096, capability)
    more = prefill_candidates(DIM, capability)
    ways = [Way(False, Reading.AS_Q, usual), *(Way(True, by, usual) for by in Reading)]
    return ways + [Way(True, Reading.FLOAT16, shape) for shape in more if shape != usual]


def compare(device: str) -> list[dict]:
    """Check every way beside float64, then time it; on a CPU the former, on less."""
    on_gpu = device == "cuda"
    capability = torch.cuda.get_device_capability() if on_gpu else (9, 0)
    rows = []
    for ways, odd, cases in (
        (decode_ways(capability), ODD_DECODES, BOTH_DECODES),
        (prefill_ways(capability), ODD_PREFILLS, BOTH_PREFILLS),
    ):
        checked = odd if on_gpu else [chunk for chunk in odd if chunk[1] <= 300]
        errors = {way: check_way(way, checked, device) for way in ways}
        for name, given in cases.items() if on_gpu else ():
            chunks = given if isinstance(given, list) else [(1, given[1])] * given[0]
            print(f"\n{name}")
            rows += [time_way(name, way, chunks, errors[way]) for way in ways]
        if not on_gpu:
            print(*(f"error {error:.2e}  {way.words}" for way, error in errors.items()), sep="\n")
    return rows


def check_way(way: Way, chunks: list[tuple[int, int]], device: str) -> float:
    """Return the error over a poisoned cache, the same one for all such ways; or end the run."""
    torch.manual_seed(0)
    case = Case(chunks, 8, False, way.float8, device)
    case.poison()
    way.run(case)()
    error = case.error()
    if not error < 1e-2:
        raise SystemExit(f"wrong by {error}: {way.words}")
    return error


def time_way(name: str, way: Way, chunks: list[tuple[int, int]], error: float) -> dict:
    case = Case(chunks, 8, False, way.float8)
    ms = time_ms(way.run(case))
    if isinstance(way.shape, DecodeShape):
        tokens = sum(keys for _, keys in chunks)
        rate = tokens * KV_HEADS * DIM * 2 * case.keys.itemsize / ms / 1e9
        told = f"{rate:6.2f} TB/s {ms * LAYERS / tokens * 1e-3:.3e} s a token of KV"
    else:
        pairs = sum(r * k - r * (r - 1) / 2 for r, k in chunks)
        rate = 4 * DIM * HEADS * pairs / ms / 1e9
        told = f"{rate:6.0f} TFLOP/s"
    print(f"  {ms:8.4f} ms {told}  error {error:.2e}  {way.words}", flush=True)
    return {"case": name, "way": way.words, "ms": ms, "rate": rate, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "both"), default="auto")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.kv_cache_dtype == "both":
        compare_both(arguments.device, arguments.out)
        return
    if arguments.device == "cpu":
        parser.error("--device cpu goes with --kv-cache-dtype both")
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


def compare_both(device: str, out: Path) -> None:
    if device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise SystemExit("--device cpu: set TRITON_INTERPRET=1, by which the interpreter runs")
        import pytest

        from tests.support.interpreter import exact_float8, quietly

        with pytest.MonkeyPatch.context() as patch, quietly():
            exact_float8(patch)
            compare(device)
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    (out / "gpu_attention_both.json").write_text(json.dumps(compare(device)))


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
