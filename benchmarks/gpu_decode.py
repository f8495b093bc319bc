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

`--once` runs each case twice, by what serves and by TMA's usual shape and with room for 8,192
tokens, for a profiler that looks into the kernel:

    ncu --clock-control none --set full -k regex:decode_kernel -o DIR/decode \
        python benchmarks/gpu_decode.py --once
    ncu -i DIR/decode.ncu-rep --page source --csv --print-source sass

On a Hopper GPU the kernel that loads by TMA is beside it, over both caches: rings of some tiles of
keys and as many of values; tiles of 128 keys; and grids of so many programs, which take splits in
turn, for one without work costs more of its kind. Each of its ways is compared in a process of its
own under a timeout first, since a barrier that nobody reaches would otherwise hang the GPU; its
bits are held to its own.

`--other` is another version of kernels/paged_attention/triton_decode.py (`git show COMMIT:... >
FILE`), whose `decode` is checked and timed beside. `--only 'TMA|other'` leaves out whatever that
does not find in its name, but for what serves; `--rooms 8192` times that room alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from benchmarks import other_version
from benchmarks.gpu_attention import DIM, HEADS, KV_HEADS, SCALE, Case
from benchmarks.hopper_layers import graph_s

from tailrace.kernels.attention_shapes import decode_shape
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.paged_attention import triton_decode, triton_hopper_decode
from tailrace.kernels.paged_attention.triton_hopper_decode import HopperDecodeShape

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
HOPPER = (9, 0)
PROGRAMS = (528, 2112, 1 << 20)
"""Of a grid by TMA beside what serves: half as many, twice, and one for each split."""
CHECK_S = 90.0
"""Most the comparison of one way by TMA may take, compiling included."""


@dataclass(frozen=True)
class Way:
    """A version of the kernel, a cache and a shape."""

    words: str
    module: Any
    float8: bool
    shape: DecodeShape | HopperDecodeShape
    most_programs: int = triton_decode.MOST_PROGRAMS
    programs: int | None = None
    """That the grid should have, where it is asked for: splits are then taken in turn."""

    @property
    def by_tma(self) -> bool:
        return isinstance(self.shape, HopperDecodeShape)

    @property
    def tile(self) -> int:
        return self.shape.tile if isinstance(self.shape, HopperDecodeShape) else self.shape.block_n

    def run(self, case: Case, room: int) -> None:
        """Queue one layer's decodes."""
        self.queue(case, self.scratch(len(case.chunks), room, case.device))

    def scratch(self, batch: int, room: int, device: str = "cuda") -> Any:
        module = triton_decode if self.by_tma else self.module
        return module.DecodeScratch.allocate(batch, HEADS, DIM, room, self.shape.split, device)

    def queue(self, case: Case, scratch: Any) -> None:
        with patch.object(triton_decode, "MOST_PROGRAMS", self.most_programs), self._shared():
            self.module.decode(
                case.q, case.keys.transpose(2, 3), case.values, case.out, kv_lens=case.kv_lens,
                block_tables=case.tables, scale=SCALE, shape=self.shape, scratch=scratch,
                kv_scales=case.scales,
            )  # fmt: skip

    def _shared(self) -> AbstractContextManager[Any]:
        count = self.programs
        if count is None:
            return nullcontext()
        return patch.object(
            self.module, "programs_a_row", lambda most, rows: min(most, -(-count // rows))
        )


def tma_ways() -> list[Way]:
    """Return the ways of the kernel that loads by TMA."""
    found = []
    for kv, float8, shapes in (
        ("TMA", False, triton_hopper_decode.CANDIDATES),
        ("TMA float8", True, triton_hopper_decode.FLOAT8_CANDIDATES),
    ):
        several = [
            Way(shape.words.replace("TMA", kv), triton_hopper_decode, float8, shape)
            for shape in shapes
        ]
        usual = several[0]
        found += several
        found += [
            replace(usual, words=f"{kv}, {count} programs", programs=count) for count in PROGRAMS
        ]
    return found


def ways(capability: tuple[int, int], other: ModuleType | None, *, on_gpu: bool) -> list[Way]:
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
    if on_gpu and capability == HOPPER:
        found += tma_ways()
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
        is_cut_alike = (way.shape.split, way.tile) == (usual.shape.split, usual.tile)
        if is_cut_alike and not torch.equal(case.out, served):
            return f"other bits with room for {room}"
    return ""


def in_turn(way: Way) -> Way:
    """Return a way whose programs take all splits of a row."""
    return replace(way, programs=1)


def check_tma(way: Way) -> str:
    """Return what is wrong with a way by TMA, in this process; all that is timed gets compiled."""
    for launches in (nullcontext(), dependent_launches()):
        with launches:
            wrong = check(way, way, ODD, "cuda") or check(in_turn(way), way, ODD, "cuda")
            compile_one(way)
            torch.cuda.synchronize()
        if wrong:
            return wrong
    return ""


def check_apart(index: int, rest: list[str]) -> str:
    """Run `check_tma` in a process of its own."""
    command = [sys.executable, __file__, *rest, "--check", str(index)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=CHECK_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done in {CHECK_S:.0f} s"
    if run.returncode == 0:
        return ""
    return (run.stdout + run.stderr)[-600:].strip() or f"ended with {run.returncode}"


def time_case(way: Way, batch: int, keys: int, room: int) -> dict[str, Any]:
    """Return microseconds a layer."""
    chunks = [(1, keys)] * batch
    moved = batch * keys * KV_HEADS * DIM * 2 * (1 if way.float8 else 2)
    count = min(MOST_LAYERS, max(2, int(COLD_BYTES // moved)))
    cases = [Case(chunks, 8, False, way.float8) for _ in range(count)]
    scratch = way.scratch(batch, room)

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


def compile_all(indices: list[int], rest: list[str]) -> None:
    """Fill the disk cache, each way in a process of its own: compiled in turn they take minutes."""
    command = [sys.executable, __file__, *rest, "--compile"]
    processes = [subprocess.Popen([*command, str(index)]) for index in indices]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--other", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--once", action="store_true", help="for a profiler")
    parser.add_argument("--only", default="", help="a pattern of the ways' names")
    parser.add_argument("--rooms", type=int, nargs="+", default=ROOMS, help="that are timed")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    capability = torch.cuda.get_device_capability() if on_gpu else (9, 0)
    other = other_version.load(arguments.other, "other_decode") if arguments.other else None
    every = ways(capability, other, on_gpu=on_gpu)
    if arguments.once:
        by_tma = [way for way in every if way.by_tma]
        usual = [
            next((way for way in by_tma if way.float8 == kind), None) for kind in (False, True)
        ]
        run_once([way for way in every if way.words == SERVES or way in usual])
        return
    all_ways = [way for way in every if re.search(arguments.only, way.words) or way.words == SERVES]
    if arguments.compile is not None:
        compile_one(all_ways[arguments.compile])
        return
    if arguments.check is not None:
        raise SystemExit(check_tma(all_ways[arguments.check]) or None)
    rest = ["--other", str(arguments.other)] if arguments.other else []
    rest += ["--only", arguments.only]
    if on_gpu:
        compile_all([i for i, way in enumerate(all_ways) if not way.by_tma], rest)
    with ThreadPoolExecutor(5) as pool:
        by_tma = [index for index, way in enumerate(all_ways) if way.by_tma]
        answers = dict(
            zip(by_tma, pool.map(lambda index: check_apart(index, rest), by_tma), strict=True)
        )
    right = []
    for index, way in enumerate(all_ways):
        usual = next(w for w in all_ways if w.float8 == way.float8)
        lengths = ODD if on_gpu else (1, 127, 513, 520)
        wrong = answers[index] if way.by_tma else check(way, usual, lengths, arguments.device)
        print(f"WRONG float8={way.float8} {way.words}: {wrong}\n" if wrong else "", end="")
        right += [] if wrong else [way]
    print(f"\ncomparison: {len(right)} of {len(all_ways)} ways are right", flush=True)
    if on_gpu:
        rows = [
            time_case(way, batch, keys, room)
            for batch, keys in CASES
            for room in arguments.rooms
            for way in right
        ]
        (arguments.out / "gpu_decode.json").write_text(json.dumps(rows))
        print_table(rows)
    raise SystemExit(len(right) != len(all_ways))


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a way; of each case microseconds plain / by dependent launches."""
    print("floors:", {row["case"]: round(row["floor_us"], 1) for row in rows if not row["float8"]})
    for float8 in (False, True):
        for room in dict.fromkeys(row["room"] for row in rows):
            print(f"\nKV in {'float8' if float8 else '16 bits'}, room for {room} tokens")
            some = [r for r in rows if (r["float8"], r["room"]) == (float8, room)]
            names = [f"{batch} x {keys}" for batch, keys in CASES]
            print(f"  {'':<24}", *(f"{name:>15}" for name in names))
            for way in dict.fromkeys(row["way"] for row in some):
                found = {row["case"]: row for row in some if row["way"] == way}
                told = (f"{found[n]['us']:.1f}/{found[n]['dependent_us']:.1f}" for n in names)
                print(f"  {way:<24}", *(f"{text:>15}" for text in told))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
