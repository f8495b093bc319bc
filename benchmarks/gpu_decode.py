"""Decodes' attention as captured steps run it: contexts that have room to grow.

    PYTHONPATH=src:. python benchmarks/gpu_decode.py --out DIR [--other FILE]
    TRITON_INTERPRET=1 PYTHONPATH=src:. python benchmarks/gpu_decode.py --device cpu

One layer of Qwen2.5-7B (28 query heads, 4 KV heads, 128 dimensions), units of 8 tokens, KV in 16
bits and in float8. A captured step's grid is cut for the longest sequence that the server takes,
its *room*; here 8,192 tokens and 131,072, where programs take splits in turn. Each way is compared
with float64 first, over unused memory that is NaN, and its bits with those of the way that serves:
neither the room nor the tile's way into memory may change any. Then several layers' caches, more
bytes than the L2 cache keeps, are gone through in one graph; microseconds a layer, with dependent
launches and without.

`--once` runs each case twice, by what serves and with room for 8,192 tokens, for a profiler that
looks into the kernel:

    ncu --clock-control none --set full -k regex:decode_kernel -o DIR/decode \
        python benchmarks/gpu_decode.py --once
    ncu -i DIR/decode.ncu-rep --page source --csv --print-source sass

`--other` is another version of kernels/paged_attention/triton_decode.py (`git show COMMIT:... >
FILE`), whose `decode` is checked and timed beside.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from benchmarks.gpu_attention import DIM, HEADS, KV_HEADS, SCALE, Case
from benchmarks.hopper_layers import graph_s

from tailrace.kernels.attention_shapes import decode_shape
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.paged_attention import triton_decode

if TYPE_CHECKING:
    from types import ModuleType

    from tailrace.kernels.paged_attention.triton_decode import DecodeShape

SERVES = "what serves"
ROOMS = (8192, 131_072)
GRIDS = {"each its own": 1 << 30, "in turn": 0}
"""Splits that may have a program each, in the arms beside what serves."""
CASES = ((1, 500), (1, 4500), (8, 4500), (50, 500), (128, 500), (106, 4500))
ODD = (1, 7, 127, 128, 129, 511, 512, 513, 1030, 2047)
COLD_BYTES = 200e6
"""Of caches that one graph goes through, if not more than ..."""
MOST_LAYERS = 64
COPY_RATE = 4.19e12
"""Bytes a second, of an H200."""


@dataclass(frozen=True)
class Way:
    """A version of the kernel, a cache and a shape."""

    words: str
    module: Any
    float8: bool
    shape: DecodeShape
    most_programs: int = triton_decode.MOST_PROGRAMS

    def run(self, case: Case, room: int) -> None:
        """Queue one layer's decodes."""
        scratch = self.module.DecodeScratch.allocate(
            len(case.chunks), HEADS, DIM, room, self.shape.split, case.device
        )
        self.queue(case, scratch)

    def queue(self, case: Case, scratch: Any) -> None:
        with patch.object(triton_decode, "MOST_PROGRAMS", self.most_programs):
            self.module.decode(
                case.q, case.keys.transpose(2, 3), case.values, case.out, kv_lens=case.kv_lens,
                block_tables=case.tables, scale=SCALE, shape=self.shape, scratch=scratch,
                kv_scales=case.scales,
            )  # fmt: skip


def ways(capability: tuple[int, int], other: ModuleType | None) -> list[Way]:
    """Return what is measured, for each cache what serves first."""
    found = []
    for float8 in (False, True):
        usual = decode_shape(DIM, capability, is_float8=float8)
        # Two stages more are a tile more in flight: the table's loads have stages of their own.
        deeper = replace(usual, num_stages=usual.num_stages + 2)
        shapes = {
            "a tile more": deeper,
            "tiles of 64": replace(usual, block_n=64),
            "64, 5 stages": replace(usual, block_n=64, num_stages=5),
            "split 256": replace(usual, split=256),
            "split 1024": replace(usual, split=1024),
        }
        found.append(Way(SERVES, triton_decode, float8, usual))
        if other is not None:
            found.append(Way("the other", other, float8, usual))
        found += [
            Way(words, triton_decode, float8, usual, most_programs=most)
            for words, most in GRIDS.items()
        ]
        found += [Way(words, triton_decode, float8, shape) for words, shape in shapes.items()]
    return found


def check(way: Way, usual: Way, lengths: tuple[int, ...], device: str) -> str:
    """Return what is wrong with a way, if anything is."""
    torch.manual_seed(0)
    case = Case([(1, length) for length in lengths], 8, False, way.float8, device)
    case.poison()
    usual.run(case, max(lengths))
    served = case.out.clone()
    for room in (max(lengths), *ROOMS):
        case.out.fill_(float("nan"))
        way.run(case, room)
        error = case.error()
        if not error < 1e-2:
            return f"wrong by {error} with room for {room}"
        # Where sums are cut decides the last bits.
        is_cut_alike = (way.shape.split, way.shape.block_n) == (
            usual.shape.split,
            usual.shape.block_n,
        )
        if is_cut_alike and not torch.equal(case.out, served):
            return f"other bits with room for {room}"
    return ""


def time_case(way: Way, batch: int, keys: int, room: int) -> dict[str, Any]:
    """Return microseconds a layer."""
    chunks = [(1, keys)] * batch
    moved = batch * keys * KV_HEADS * DIM * 2 * (1 if way.float8 else 2)
    count = min(MOST_LAYERS, max(2, int(COLD_BYTES // moved)))
    cases = [Case(chunks, 8, False, way.float8) for _ in range(count)]
    scratch = way.module.DecodeScratch.allocate(batch, HEADS, DIM, room, way.shape.split, "cuda")

    def layers() -> None:
        for case in cases:
            way.queue(case, scratch)

    entry: dict[str, Any] = {"case": f"{batch} x {keys}", "room": room, "float8": way.float8,
                             "way": way.words, "floor_us": moved / COPY_RATE * 1e6}  # fmt: skip
    for name, launches in (("us", nullcontext()), ("dependent_us", dependent_launches())):
        with launches:
            entry[name] = graph_s(layers) * 1e6 / count
    return entry


def run_once(usual: list[Way]) -> None:
    """Run each case twice, of another cache each time: the first compiles; say in which order."""
    for way, (batch, keys) in itertools.product(usual, CASES):
        cases = [Case([(1, keys)] * batch, 8, False, way.float8) for _ in range(2)]
        for case in cases:
            way.run(case, ROOMS[0])
        torch.cuda.synchronize()
        print(f"{'float8' if way.float8 else '16 bits'}: {batch} x {keys}, twice")


def compile_all(count: int, other: list[str]) -> None:
    """Fill the disk cache, each way in a process of its own: compiled in turn they take minutes."""
    command = [sys.executable, __file__, *other, "--compile"]
    processes = [subprocess.Popen([*command, str(index)]) for index in range(count)]
    for process in processes:
        process.wait()


def compile_one(way: Way) -> None:
    case = Case([(1, 600)] * 2, 8, False, way.float8)
    way.run(case, ROOMS[0])
    with dependent_launches():
        way.run(case, ROOMS[0])
    wide = Case([(1, 600)] * 64, 8, False, way.float8)
    way.run(wide, ROOMS[1])
    with dependent_launches():
        way.run(wide, ROOMS[1])


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("other_decode", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--other", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--once", action="store_true", help="for a profiler")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    capability = torch.cuda.get_device_capability() if on_gpu else (9, 0)
    if arguments.once:
        run_once([w for w in ways(capability, None) if w.words == SERVES])
        return
    all_ways = ways(capability, load(arguments.other) if arguments.other else None)
    if arguments.compile is not None:
        compile_one(all_ways[arguments.compile])
        return
    if on_gpu:
        other_file = ["--other", str(arguments.other)] if arguments.other else []
        compile_all(len(all_ways), other_file)
    right = []
    for way in all_ways:
        usual = next(w for w in all_ways if w.float8 == way.float8)
        lengths = ODD if on_gpu else (1, 127, 513, 520)
        wrong = check(way, usual, lengths, arguments.device)
        print(f"WRONG float8={way.float8} {way.words}: {wrong}" if wrong else "", end="")
        right += [] if wrong else [way]
    print(f"\ncomparison: {len(right)} of {len(all_ways)} ways are right", flush=True)
    if on_gpu:
        rows = [
            time_case(way, batch, keys, room)
            for batch, keys in CASES
            for room in ROOMS
            for way in right
        ]
        (arguments.out / "gpu_decode.json").write_text(json.dumps(rows))
        print_table(rows)
    raise SystemExit(len(right) != len(all_ways))


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a way; of each case microseconds plain / by dependent launches."""
    print("floors:", {row["case"]: round(row["floor_us"], 1) for row in rows if not row["float8"]})
    for float8 in (False, True):
        for room in ROOMS:
            print(f"\nKV in {'float8' if float8 else '16 bits'}, room for {room} tokens")
            some = [r for r in rows if (r["float8"], r["room"]) == (float8, room)]
            names = [f"{batch} x {keys}" for batch, keys in CASES]
            print(f"  {'':<16}", *(f"{name:>15}" for name in names))
            for way in dict.fromkeys(row["way"] for row in some):
                found = {row["case"]: row for row in some if row["way"] == way}
                told = (f"{found[n]['us']:.1f}/{found[n]['dependent_us']:.1f}" for n in names)
                print(f"  {way:<16}", *(f"{text:>15}" for text in told))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
