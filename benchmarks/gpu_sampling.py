"""The sampling kernels alone on a GPU: what a step's draw costs, beside a step's floor.

    python benchmarks/gpu_sampling.py [--vocab 151936]

Rows of bfloat16 logits, as peaked as a language model's and, at the worst, almost flat; every kind
of filter, at 1, 32 and 128 rows. The kernels are captured in a CUDA graph, as the runner's are.
The first tokens of every case are compared with the PyTorch reference's on the CPU; a case in
which more differ than rounding explains (a flat row's token is 1/V of the sum) is not timed.
Beside them stands PyTorch's own way: a sort, a softmax and cumulative sums. Times are medians
over replays.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from tailrace.kernels.sampling import reference
from tailrace.kernels.sampling.rows import SamplingRows
from tailrace.kernels.sampling.triton import SamplingScratch, sample

FILTERS = {
    "greedy": {"temperatures": 0.0},
    "plain": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "penalties, top_p 0.95": {"top_p": 0.95, "repetition": 1.1, "history_rows": 0},
    "rank": {"wants_rank": 1},
    "grammar, top_p 0.95": {"top_p": 0.95, "mask_rows": 0},
}
CHECKED = 16
# Standard deviations of the logits.
SPREADS = {"peaked": 3.0, "flat": 0.5}


def make_rows(count: int, vocab_size: int, settings: dict[str, float]) -> SamplingRows:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), settings.get(name, default), dtype=dtype, device="cuda")

    has_history = "history_rows" in settings
    is_masked = "mask_rows" in settings
    words = (count if is_masked else 0, -(-vocab_size // 32))
    kept = torch.arange(count, dtype=torch.int32, device="cuda")
    return SamplingRows(
        temperatures=column("temperatures", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float64),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=torch.arange(count, device="cuda"),
        positions=torch.arange(count, device="cuda") * 7,
        presence=column("presence", 0.0, torch.float32),
        frequency=column("frequency", 0.0, torch.float32),
        repetition=column("repetition", 1.0, torch.float32),
        history_rows=kept if has_history else torch.full_like(kept, -1),
        history=torch.randint(0, 2, (count, vocab_size), dtype=torch.int32, device="cuda"),
        edit_starts=torch.zeros(count + 1, dtype=torch.int32, device="cuda"),
        edit_ids=torch.zeros(0, dtype=torch.int32, device="cuda"),
        edit_values=torch.zeros(0, dtype=torch.float32, device="cuda"),
        mask_rows=kept if is_masked else torch.full_like(kept, -1),
        masks=torch.randint(0, 2**31, words, dtype=torch.int32, device="cuda"),
        wants_rank=column("wants_rank", 0, torch.int32),
    )


def moved(rows: SamplingRows, device: str) -> SamplingRows:
    """Return a copy: what is drawn is counted in the history."""
    return SamplingRows(**{name: value.to(device, copy=True) for name, value in vars(rows).items()})


def differing(logits: torch.Tensor, settings: dict[str, float], scratch: SamplingScratch) -> int:
    """Return how many of the first `CHECKED` tokens are not the reference's."""
    logits = logits[:CHECKED]
    rows = make_rows(*logits.shape, settings)
    expected = reference.sample(logits.cpu(), moved(rows, "cpu")).token_ids
    found = sample(logits, moved(rows, "cuda"), scratch).token_ids.cpu()
    return int((found != expected).sum())


def median_us(replays: int, graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def captured(run) -> torch.cuda.CUDAGraph:  # noqa: ANN001
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def by_sort(logits: torch.Tensor) -> torch.Tensor:
    ranked, ids = logits.float().sort(dim=-1, descending=True)
    weights = ranked.softmax(-1)
    kept = weights * (weights.cumsum(-1) - weights < 0.95)
    aims = torch.rand(len(logits), 1, device=logits.device) * kept.sum(-1, keepdim=True)
    return ids.gather(1, (kept.cumsum(-1) <= aims).sum(-1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--replays", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, V {args.vocab}, microseconds a call")
    for spread_name, spread in SPREADS.items():
        for count in (1, 32, 128):
            logits = (torch.randn(count, args.vocab, device="cuda") * spread).bfloat16()
            scratch = SamplingScratch.allocate(count, args.vocab, "cuda")
            for name, settings in FILTERS.items():
                wrong = differing(logits, settings, scratch)
                if wrong > 1:
                    print(f"{spread_name:7s} {count:4d} {name:24s} {wrong} DIFFER: not timed")
                    continue
                rows = make_rows(count, args.vocab, settings)
                graph = captured(lambda r=rows, s=scratch, x=logits: sample(x, r, s))
                print(
                    f"{spread_name:7s} {count:4d} {name:24s} {median_us(args.replays, graph):8.1f}"
                    f"   ({wrong} tokens differ)"
                )
            graph = captured(lambda x=logits: by_sort(x))
            print(f"{spread_name:7s} {count:4d} by a sort, top_p 0.95    ", end="")
            print(f" {median_us(args.replays, graph):8.1f}")


if __name__ == "__main__":
    main()
