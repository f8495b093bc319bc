"""Prefill's attention on a Hopper GPU: the Gluon kernel beside Triton's and FlashAttention 3.

    python benchmarks/gpu_prefill.py [--out DIR] [--only-check] [--head-dim 64]
                                     [--kv-cache-dtype fp8]

First every candidate is compared with attention in float64, each in a process of its own under a
timeout, for a barrier that nobody reaches would otherwise hang the GPU: odd chunks over prefixes,
units of 8, 16 and 256 tokens dealt at random, both halves, NaN in every slot without a token and in
the results, rows beside them that must stay as they are, tiles without rows as captured steps have;
an error of more than twice Triton's (over float8, and than the half's own) is wrong, and so are
other bits the second time. What is wrong is named and not timed. Then, in the shape of Qwen2.5-7B
(28 query heads, 4 KV heads, 128 dimensions, bfloat16, units of 8), the calls that the engine makes:
whole prompts, chunks over prefixes, several at once in a captured frame with its tiles without
rows; medians of CUDA events, a cold L2. Last, for each class of lengths that a plan knows, the
shape that is fastest, Triton's candidates among them, by its mean time over the class's cases, each
beside Triton's usual shape.
FlashAttention 3 is what gpu_hook.py finds; it reads keys and values in one piece, not by units.
With a float8 cache the truth is of the values that it holds, Triton's kernel reads it as it is, and
Hopper's what is widened of it, which is timed with it, and once more alone.
Pairs of query and key make 4 x 128 operations a head; a causal prompt of n has n (n + 1) / 2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpu_attention import time_ms

from tailrace.engine.frames import Frame, mixed_frames
from tailrace.kernels.attention_shapes import (
    BOUNDS,
    HOPPER,
    key_words,
    prefill_candidates,
    prefill_shape,
)
from tailrace.kernels.kv_scales import UNSCALED, KVScales, quantised
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention.device_batch import cut_tiles
from tailrace.kernels.paged_attention.prefill_kernels import is_hopper, name_of, prefill
from tailrace.kernels.paged_attention.triton_hopper_prefill import CANDIDATES
from tailrace.kernels.paged_attention.triton_widened_kv import (
    WidenedKv,
    scratch_units,
    units_of,
    widen,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape

CAPABILITY = divmod(HOPPER, 10)
HEADS = {64: (32, 8), 128: (28, 4)}
"""Query and KV heads that a head dimension comes with."""
CASES = {
    "1 x 512": [(512, 512)],
    "4 x 512": [(512, 512)] * 4,
    "1 x 2048": [(2048, 2048)],
    "4 x 2048": [(2048, 2048)] * 4,
    "1 x 6144": [(6144, 6144)],
    "4 x 6144": [(6144, 6144)] * 4,
    "1024 over 3072": [(1024, 4096)],
    "frame: 8 x 60": [(60, 60)] * 8,
    "frame: 256 over 512, 200 over 500": [(256, 768), (200, 700)],
    "frame: 3 x 320 over 500, 1200, 1900": [(320, 820), (320, 1520), (320, 2220)],
    "frame: 900 over 3072, 60": [(900, 3972), (60, 60)],
}
"""Chunks of (rows, keys); in a frame as the engine captures it for decodes beside them."""
DECODES, BUDGET = 64, 1024
"""Of the steps whose frames those are."""
SCALES = KVScales(0.02, 0.011)
"""Of a float8 cache: twice the largest of such keys over 448, and a little less for values."""
SEQUENCES = 145
"""Of a step of a server with 128 places: what the widening kernel is compiled for."""
ODD = [
    (5, 5), (64, 64), (1, 300), (129, 400), (257, 257), (300, 1333), (128, 128), (127, 1024),
    (2, 9), (200, 457), (65, 513),
]  # fmt: skip
CHECKS = ((8, "bfloat16"), (8, "float16"), (16, "bfloat16"), (256, "bfloat16"))
"""Tokens of a unit and the half precision of the comparison."""
CHECK_S = 45.0
"""Most a check may take, compiling included."""


@dataclass
class Problem:
    """Chunks over a cache, token-major, its units dealt at random."""

    chunks: list[tuple[int, int]]
    unit: int
    head_dim: int
    dtype: torch.dtype
    is_float8: bool = False
    """Whether the cache is; queries are of `dtype` in any case."""
    is_framed: bool = False
    """Whether the table has as many tiles as the captured step that would serve it."""
    spare_tiles: int = 0
    """Tiles without rows beside that."""

    def __post_init__(self) -> None:
        heads, kv_heads = HEADS[self.head_dim]
        # The last sequence is without rows and keys: tiles without work are its own.
        lens = [*(keys for _, keys in self.chunks), 0]
        widths = [-(-keys // self.unit) for keys in lens]
        order = torch.randperm(sum(widths) + 1, device="cuda", dtype=torch.int32)
        # Entries beyond a sequence's are no units: whoever reads them reads out of bounds.
        self.tables = torch.full((len(lens), max(widths)), 1 << 30, device="cuda").int()
        for row, (width, stop) in enumerate(zip(widths, itertools.accumulate(widths), strict=True)):
            self.tables[row, :width] = order[stop - width : stop]
        shape = (len(order), self.unit, kv_heads, self.head_dim)
        self.keys, self.values = (self._random(*shape) for _ in range(2))
        self.scales, self.wide = UNSCALED, None
        if self.is_float8:
            self.scales = SCALES
            self.keys = quantised(self.keys, SCALES.k, FLOAT8)
            self.values = quantised(self.values, SCALES.v, FLOAT8)
            self.wide = self._room(kv_heads)
        self.rows = sum(rows for rows, _ in self.chunks)
        self.whole_q = self._random(self.rows + 200, heads, self.head_dim)
        self.whole_q[self.rows :] = torch.nan
        self.whole_out = torch.full_like(self.whole_q, torch.nan)
        starts = [0, *itertools.accumulate(rows for rows, _ in self.chunks), self.rows]
        self.starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        self.kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device="cuda")

    def _room(self, kv_heads: int) -> WidenedKv:
        """A server's scratch, or a larger one where chunks need it; NaN in it."""
        lens = np.array([keys for _, keys in self.chunks])
        units = max(scratch_units(SEQUENCES, int(lens.max())), units_of(lens))
        wide = WidenedKv.allocate(
            units, kv_heads, self.head_dim, self.dtype, torch.device("cuda"),
            sequences=SEQUENCES,
        )  # fmt: skip
        for part in (wide.keys, wide.values):
            part.fill_(torch.nan)
        return wide

    def poison(self) -> None:
        """NaN wherever no token has been written."""
        is_hole = torch.ones(self.keys.shape[:2], dtype=torch.bool, device="cuda")
        for row, (_, keys) in enumerate(self.chunks):
            at = torch.arange(keys, device="cuda")
            is_hole[self.tables[row, at // self.unit].long(), at % self.unit] = False
        for cache in (self.keys, self.values):
            poison = torch.tensor(torch.nan, device="cuda").to(cache.dtype)
            # By bytes: not everything works on float8.
            width = torch.uint8 if self.is_float8 else cache.dtype
            cache.view(width)[is_hole] = poison.view(width)

    def tiles(self, block_m: int) -> Tensor:
        rows, lens = self.starts.diff().cpu().numpy(), self.kv_lens.cpu().numpy()
        cut = cut_tiles(rows, lens, first_sequence=0, block_m=block_m)
        count = len(cut) + self.spare_tiles
        if self.is_framed:
            count = self._frame(block_m).tiles
        whole = np.zeros((count, 2), dtype=np.int32)
        whole[:, 0] = len(self.chunks)
        whole[: len(cut)] = cut
        return torch.from_numpy(whole).cuda()

    def _frame(self, block_m: int) -> Frame:
        frames = mixed_frames(128, BUDGET, block_m, paced=True)
        return next(f for f in frames if f.decodes == DECODES and f.tokens >= self.rows)

    @property
    def usual(self) -> PrefillShape:
        """Of Triton's kernel, as served."""
        return prefill_shape(self.head_dim, int(self.kv_lens.max()), CAPABILITY)

    def call(self, shape: PrefillShape) -> Callable[[], Tensor]:
        """Return a call of the kernel that the shape is one of, as the engine makes it."""
        known = {
            "tiles": self.tiles(shape.block_m), "query_starts": self.starts,
            "kv_lens": self.kv_lens, "block_tables": self.tables, "scale": self.head_dim**-0.5,
            "shape": shape, "kv_scales": self.scales, "wide": self.wide,
        }  # fmt: skip
        q, out = self.whole_q[: self.rows], self.whole_out[: self.rows]
        k_cache, v_cache = self.keys.permute(0, 2, 3, 1), self.values.permute(0, 2, 1, 3)

        def work() -> Tensor:
            prefill(q, k_cache, v_cache, out, **known)
            return out

        return work

    def widening(self) -> Tensor:
        """Widen alone, as a call of Hopper's kernel does first."""
        return widen(
            self.keys.permute(0, 2, 3, 1), self.values.permute(0, 2, 1, 3), self.wide,
            kv_lens=self.kv_lens, block_tables=self.tables, first=0,
        )  # fmt: skip

    def truth(self) -> Tensor:
        """Attention in float64 [rows, heads, dimensions]."""
        heads, kv_heads = HEADS[self.head_dim]
        found = []
        for row, (rows, keys) in enumerate(self.chunks):
            units = self.tables[row, : -(-keys // self.unit)].long()
            k, v = (
                (cache.float()[units].flatten(0, 1)[:keys].double() * scale).repeat_interleave(
                    heads // kv_heads, 1
                )
                for cache, scale in ((self.keys, self.scales.k), (self.values, self.scales.v))
            )
            q = self.whole_q[int(self.starts[row]) : int(self.starts[row + 1])].double()
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
            hidden = torch.ones(rows, keys, dtype=torch.bool, device="cuda").triu(keys - rows + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(found)


def wrong(
    shape: PrefillShape, head_dim: int, unit: int, dtype: torch.dtype, *, is_float8: bool
) -> str | None:
    """Return what is wrong with a candidate, if anything."""
    torch.manual_seed(0)
    problem = Problem(ODD, unit, head_dim, dtype, is_float8, spare_tiles=3)
    problem.poison()
    truth = problem.truth()
    errors = []
    for kernel in (problem.usual, shape):
        problem.whole_out.fill_(torch.nan)
        found = problem.call(kernel)()
        errors.append(float((found.double() - truth).norm() / truth.norm()))
    # Over float8 Triton's kernel may multiply in more digits than the activations' dtype has.
    own = torch.finfo(dtype).eps / 2 if is_float8 else 0.0
    if not errors[1] < max(2 * errors[0], own):
        rows = (found.double() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        worst = rows.nan_to_num(9.0).topk(5).indices.tolist()
        return f"error {errors[1]:.2e}, Triton's {errors[0]:.2e}; the worst rows are {worst}"
    if not bool(problem.whole_out[problem.rows :].isnan().all()):
        return "wrote beyond the rows"
    first = found.clone()
    if not all(torch.equal(first, problem.call(shape)()) for _ in range(3)):
        return "other bits when it ran again"
    return None


def check(head_dim: int, index: int, unit: int, half: str, *, is_float8: bool) -> str | None:
    """Run `wrong` in a process of its own."""
    command = [sys.executable, __file__, "--check", str(head_dim), str(index), str(unit), half]
    command += ["--kv-cache-dtype", "fp8"] if is_float8 else []
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=CHECK_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done in {CHECK_S:.0f} s"
    if run.returncode == 0:
        return None
    return (run.stdout + run.stderr)[-600:].strip() or f"ended with {run.returncode}"


def check_all(*, is_float8: bool) -> set[tuple[int, int]]:
    """Return the candidates (head dimension, index) that are right; print the others."""
    jobs = [
        (head_dim, index, unit, half)
        for head_dim, shapes in CANDIDATES.items()
        for index in range(len(shapes))
        for unit, half in (CHECKS if index == 0 else CHECKS[:1])
    ]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda job: check(*job, is_float8=is_float8), jobs))
    for job, answer in zip(jobs, answers, strict=True):
        head_dim, index, *rest = job
        print(head_dim, CANDIDATES[head_dim][index].words, *rest, answer or "right", flush=True)
    failed = {job[:2] for job, answer in zip(jobs, answers, strict=True) if answer}
    return {job[:2] for job in jobs} - failed


def flash_call(problem: Problem, batch: int, flash: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """Return a call of FlashAttention on whole prompts of the same shape."""
    heads, kv_heads = HEADS[problem.head_dim]
    sizes = (batch, problem.rows // batch)
    q = torch.randn(*sizes, heads, problem.head_dim, dtype=problem.dtype, device="cuda")
    k, v = (
        torch.randn(*sizes, kv_heads, problem.head_dim, dtype=problem.dtype, device="cuda")
        for _ in range(2)
    )
    return lambda: flash(q, k, v, causal=True)


def time_all(right: set[tuple[int, int]], head_dim: int, *, is_float8: bool) -> list[dict]:
    """Return a row of milliseconds for each case; print them as operations a second."""
    try:
        from gpu_hook import flash_attention

        flash = flash_attention()
    except ImportError as problem:
        print(f"no FlashAttention beside it: {problem}")
        flash = None
    heads = HEADS[head_dim][0]
    shapes = [
        *prefill_candidates(head_dim, CAPABILITY),
        *(s for index, s in enumerate(CANDIDATES[head_dim]) if (head_dim, index) in right),
    ]
    table = []
    for name, chunks in CASES.items():
        is_framed = name.startswith("frame")
        problem = Problem(chunks, 8, head_dim, torch.bfloat16, is_float8, is_framed=is_framed)
        times = {told(shape): time_ms(problem.call(shape)) for shape in shapes}
        if flash and not is_framed and all(rows == keys for rows, keys in chunks):
            times[flash[0]] = time_ms(flash_call(problem, len(chunks), flash[1]))
        pairs = sum(rows * (keys - rows) + rows * (rows + 1) / 2 for rows, keys in chunks)
        print(f"\n{name}")
        for label, ms in times.items():
            rate = 4 * head_dim * heads * pairs / ms / 1e9
            print(f"  {label:<44} {ms:8.3f} ms {rate:5.0f} TFLOP/s", flush=True)
        if is_float8:
            times["widening alone"] = time_ms(problem.widening)
            print(f"  {'widening alone':<44} {times['widening alone']:8.3f} ms", flush=True)
        longest = max(keys for _, keys in chunks)
        bound = next(bound for bound in BOUNDS if longest < bound)
        usual = told(problem.usual)
        row = {"case": name, "class": key_words(bound), "usual": usual, "pairs": pairs}
        table.append(row | {"ms": times})
    show_winners(table, [told(shape) for shape in shapes])
    return table


def told(shape: PrefillShape) -> str:
    return name_of(shape) if is_hopper(shape) else f"Triton {shape.words}"


def show_winners(table: list[dict], names: list[str]) -> None:
    """Print for each class the shapes by the geometric mean of their times over the usual one's."""
    for words in map(key_words, BOUNDS):
        rows = [row for row in table if row["class"] == words]
        ratios = {
            name: statistics.geometric_mean(
                row["ms"][name] / row["ms"][row["usual"]] for row in rows
            )
            for name in names
        }
        print(f"\n{words}: {min(ratios, key=ratios.__getitem__)}")
        for name, ratio in sorted(ratios.items(), key=lambda item: item[1]):
            print(f"  {name:<44} {ratio:5.2f} x the usual shape's time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-check", action="store_true")
    parser.add_argument("--head-dim", type=int, choices=tuple(HEADS), default=128, help="timed")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--check", nargs=4, help="one candidate, in this process")
    arguments = parser.parse_args()
    is_float8 = arguments.kv_cache_dtype == "fp8"
    if arguments.check:
        head_dim, index, unit = map(int, arguments.check[:3])
        shape = CANDIDATES[head_dim][index]
        half = getattr(torch, arguments.check[3])
        raise SystemExit(wrong(shape, head_dim, unit, half, is_float8=is_float8))
    right = check_all(is_float8=is_float8)
    found: dict[str, object] = {"right": sorted(right), "kv_cache_dtype": arguments.kv_cache_dtype}
    if not arguments.only_check:
        times = time_all(right, arguments.head_dim, is_float8=is_float8)
        found |= {"head_dim": arguments.head_dim, "times": times}
    if arguments.out:
        (arguments.out / "gpu_prefill.json").write_text(json.dumps(found))
    if len(right) < sum(map(len, CANDIDATES.values())):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
