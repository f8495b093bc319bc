"""Prefill attention by length class on one GPU: our kernel's shapes, SDPA, FlashAttention 3.

    PYTHONPATH=VLLM_SITE:src python benchmarks/gpu_classes.py

One layer of Qwen2.5-7B (28 query heads, 4 KV heads, 128 dimensions, bfloat16). Ours and
FlashAttention 3 (vLLM's copy, where it can be imported) read the paged cache, units of 8 and pages
of 16 tokens; SDPA reads contiguous memory and does whole prompts only. Every candidate is compared
with attention in float64 before it is timed; the candidates of a case are timed in turn, with cold
caches, and the table shows TFLOP/s.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch
from gpu_attention import DIM, HEADS, KV_HEADS, PREFILLS, SCALE, Case, time_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

try:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
except ImportError as error:
    print(f"FlashAttention 3 is left out: {error}")
    flash_attn_varlen_func = None

UNIT, PAGE, ROUNDS = 8, 16, 5
CLASSES = {
    "<1K: 8 x 512": [(512, 512)] * 8,
    "<1K: 96 + 300 + 700 + 900": [(96, 96), (300, 300), (700, 700), (900, 900)],
    "1-3K: 2 x 2048": [(2048, 2048)] * 2,
    "1-3K: 1024 over 1024": [(1024, 2048)],
    ">3K: 1 x 4096": [(4096, 4096)],
    ">3K: 1024 over 3072": [(1024, 4096)],
    ">3K: 1024 over 5776": [(1024, 6800)],
}


def candidates(ours: Case, paged: Case) -> dict[str, Callable[[], Tensor | None]]:
    """Return what to time; each writes its case's `out`, or returns [B, H, T, D]."""
    found: dict[str, Callable[[], Tensor | None]] = {}
    for shape in PREFILLS:
        tiles = ours.tiles(shape)
        name = f"{shape.block_m}x{shape.block_n}x{shape.num_stages}"
        found[name] = lambda shape=shape, tiles=tiles: ours.prefill(shape, tiles)
    if all(rows == keys for rows, keys in ours.chunks) and len(set(ours.chunks)) == 1:
        found["SDPA"] = sdpa(ours)
    if flash_attn_varlen_func is not None:
        found["FA3 paged"] = lambda: flash3(paged)
    return found


def sdpa(case: Case) -> Callable[[], Tensor]:
    """Return SDPA over what whole prompts of one length have in the cache, gathered before."""
    batch, length = len(case.chunks), case.chunks[0][0]
    q = case.q.view(batch, length, HEADS, DIM).transpose(1, 2).contiguous()
    units = case.tables.long()
    k, v = (
        cache[units].transpose(2, 3).reshape(batch, -1, KV_HEADS, DIM)[:, :length]
        .transpose(1, 2).contiguous()
        for cache in (case.keys, case.values)
    )  # fmt: skip
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=True, enable_gqa=True)


def flash3(case: Case) -> None:
    flash_attn_varlen_func(
        case.q, case.keys.permute(0, 2, 1, 3), case.values.permute(0, 2, 1, 3),
        max_seqlen_q=max(rows for rows, _ in case.chunks), cu_seqlens_q=case.starts,
        max_seqlen_k=max(keys for _, keys in case.chunks), seqused_k=case.kv_lens,
        softmax_scale=SCALE, causal=True, block_table=case.tables, out=case.out, fa_version=3,
    )  # fmt: skip


def check(name: str, case: Case, work: Callable[[], Tensor | None]) -> bool:
    case.out.fill_(float("nan"))
    result = work()
    if result is not None:
        case.out.copy_(result.transpose(1, 2).reshape(case.out.shape))
    error = case.error()
    if not error < 0.01:
        print(f"{name}: differs from float64 by {error:.4f}; it is not timed")
    return error < 0.01


def main() -> None:
    torch.manual_seed(0)
    for title, chunks in CLASSES.items():
        ours, paged = Case(chunks, UNIT, False), Case(chunks, PAGE, False)
        works = {
            name: work
            for name, work in candidates(ours, paged).items()
            if check(name, paged if name == "FA3 paged" else ours, work)
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(ROUNDS):
            for name, work in works.items():
                times[name].append(time_ms(work, 5))
        pairs = sum(rows * keys - rows * (rows - 1) / 2 for rows, keys in chunks)
        rates = {
            name: 4 * DIM * HEADS * pairs / statistics.median(found) / 1e9
            for name, found in times.items()
        }
        best = max(rate for name, rate in rates.items() if name[0].isdigit())
        line = ", ".join(
            f"{name} {rate:.0f}{' (best of ours)' if rate == best else ''}"
            for name, rate in rates.items()
        )
        print(f"{title:<28} TFLOP/s: {line}", flush=True)


if __name__ == "__main__":
    main()
