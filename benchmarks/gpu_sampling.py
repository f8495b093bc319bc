"""The sampling kernels alone on a GPU: what a step's draw costs, and each kernel's part of it.

    PYTHONPATH=src:. python benchmarks/gpu_sampling.py [--other FILE] [--programs 1056 4224]
    PYTHONPATH=src:. python benchmarks/gpu_sampling.py --all
    TRITON_INTERPRET=1 PYTHONPATH=src:. python benchmarks/gpu_sampling.py --device cpu --vocab 4500

Rows of bfloat16 logits, as peaked as a language model's; with `--all` almost flat ones too, every
kind of filter, and PyTorch's own way beside: a sort, a softmax and cumulative sums. Each filter's
first tokens are compared with the PyTorch reference's on the CPU, each way's tokens with those of
what serves; a case in which more differ than rounding explains (a flat row's token is 1/V of the
sum) is not timed, and the exit status is 1. Beside greedy rows stand the two kernels that choose
their ids where a step's rows are all greedy, and torch's maximum, which did.

*serves* launches what the rows ask for, as the runner's draws; *all kernels* whatever any row might
ask for; `--programs` are other sizes of a launch. `--other` is another version of
kernels/sampling/triton.py (`git show COMMIT:... > FILE`), all of its kernels. Draws are captured,
`DRAWS` in a CUDA graph; ways take turns, times are medians over replays. What a kernel costs is
what a draw up to it takes longer than one up to the kernel before, which counts its launch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from benchmarks import other_version

from tailrace.kernels.sampling import reference
from tailrace.kernels.sampling import triton as serving
from tailrace.kernels.sampling.rows import NOT_FINITE, Asked, SamplingRows
from tailrace.kernels.sampling.triton_likeliest import likeliest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

FILTERS = {
    "greedy": {"temperatures": 0.0},
    "plain": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "penalties, top_p 0.95": {"top_p": 0.95, "repetition": 1.1, "history_rows": 0},
    "rank": {"wants_rank": 1},
    "grammar, top_p 0.95": {"top_p": 0.95, "mask_rows": 0},
}
USUAL = ("greedy", "plain", "top_p 0.95")
ROWS = (1, 8, 32, 50, 128)
SPREADS = {"peaked": 3.0, "flat": 0.5}
"""Standard deviations of the logits."""
CHECKED = 8
DRAWS = 10
KERNELS = ("adjust", "weigh", "aim", "gather", "search", "sum_kept", "draw", "rank")


@dataclass(frozen=True)
class Way:
    """A version of the kernels, and how they are launched."""

    words: str
    module: ModuleType
    asks: bool = False
    """Whether it is told what the rows ask for."""
    programs: int | None = None

    def sample(self, logits: torch.Tensor, rows: SamplingRows, scratch: Any, asked: Asked) -> Any:
        """Queue a draw."""
        with ExitStack() as stack:
            if self.programs is not None:
                stack.enter_context(patch.object(self.module, "MOST_PROGRAMS", self.programs))
            if self.asks:
                return self.module.sample(logits, rows, scratch, asked)
            return self.module.sample(logits, rows, scratch)


@dataclass(frozen=True)
class Case:
    """Rows that all want the same."""

    count: int
    filter_name: str
    logits: torch.Tensor
    rows: SamplingRows

    @property
    def asked(self) -> Asked:
        """What the host knows of them."""
        settings = FILTERS[self.filter_name]
        return Asked.by(
            temperature=settings.get("temperatures", 1.0),
            top_k=int(settings.get("top_k", 0)),
            top_p=settings.get("top_p", 1.0),
            min_p=settings.get("min_p", 0.0),
            ranks="wants_rank" in settings,
        )

    def draw(self, way: Way, scratch: Any) -> Any:
        """Queue a draw of rows whose history is a copy: what is drawn is counted in it."""
        return way.sample(self.logits, moved(self.rows, self.logits.device), scratch, self.asked)


def make_case(count: int, vocab_size: int, name: str, spread: float, device: str) -> Case:
    # Triton's interpreter knows no bfloat16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    logits = (torch.randn(count, vocab_size, device=device) * spread).to(dtype)
    return Case(count, name, logits, make_rows(count, vocab_size, FILTERS[name], device))


def make_rows(count: int, vocab_size: int, settings: dict[str, float], device: str) -> SamplingRows:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), settings.get(name, default), dtype=dtype, device=device)

    has_history = "history_rows" in settings
    is_masked = "mask_rows" in settings
    words = (count if is_masked else 0, -(-vocab_size // 32))
    past = (count if has_history else 1, vocab_size)
    kept = torch.arange(count, dtype=torch.int32, device=device)
    return SamplingRows(
        temperatures=column("temperatures", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float64),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=torch.arange(count, device=device),
        positions=torch.arange(count, device=device) * 7,
        presence=column("presence", 0.0, torch.float32),
        frequency=column("frequency", 0.0, torch.float32),
        repetition=column("repetition", 1.0, torch.float32),
        history_rows=kept if has_history else torch.full_like(kept, -1),
        history=torch.randint(0, 2, past, dtype=torch.int32, device=device),
        edit_starts=torch.zeros(count + 1, dtype=torch.int32, device=device),
        edit_ids=torch.zeros(0, dtype=torch.int32, device=device),
        edit_values=torch.zeros(0, dtype=torch.float32, device=device),
        mask_rows=kept if is_masked else torch.full_like(kept, -1),
        masks=torch.randint(0, 2**31, words, dtype=torch.int32, device=device),
        wants_rank=column("wants_rank", 0, torch.int32),
    )


def moved(rows: SamplingRows, device: torch.device | str) -> SamplingRows:
    """Return a copy."""
    return SamplingRows(**{name: value.to(device, copy=True) for name, value in vars(rows).items()})


def differing(case: Case) -> int:
    """Return how many of a case's tokens are not the reference's."""
    expected = reference.sample(case.logits.cpu(), moved(case.rows, "cpu")).token_ids
    scratch = serving.SamplingScratch.allocate(*case.logits.shape, case.logits.device)
    found = case.draw(Way("", serving, asks=True), scratch).token_ids.cpu()
    return int((found != expected).sum())


def disagreements(case: Case, ways: list[Way]) -> list[str]:
    """Return the ways that do not draw what the first one draws, and what is other."""
    found = {}
    for way in ways:
        drawn = case.draw(way, poisoned(way.module, case))
        found[way.words] = [value.cpu() for value in vars(drawn).values()]
    (_, (ids, logprobs, ranks)), *others = found.items()
    wrong = []
    for words, (other_ids, other_logprobs, other_ranks) in others:
        tokens, orders = int((ids != other_ids).sum()), int((ranks != other_ranks).sum())
        # Versions may add up a block's shares in another order.
        apart = float((logprobs - other_logprobs).abs().max())
        if tokens or orders or not apart < 2e-4:
            wrong.append(f"{words}: {tokens} tokens, {orders} ranks, log-probabilities by {apart}")
    return wrong


def poisoned(module: ModuleType, case: Case) -> Any:
    """Return scratch whose floats are NaN and whose integers are large."""
    scratch = module.SamplingScratch.allocate(*case.logits.shape, case.logits.device)
    for value in vars(scratch).values():
        value.fill_(float("nan") if value.is_floating_point() else 0x7EADBEEF)
    return scratch


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of `DRAWS` times what `work` queues."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(DRAWS):
            work()
    return graph


def medians_us(graphs: dict[str, torch.cuda.CUDAGraph], replays: int) -> dict[str, float]:
    """Return microseconds a draw; the graphs take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(replays + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1e3 / DRAWS)
    return {name: statistics.median(found) for name, found in times.items()}


def draw_graph(case: Case, way: Way, scratch: Any) -> torch.cuda.CUDAGraph:
    """Return a graph, which does not keep the scratch."""
    return captured(lambda: way.sample(case.logits, case.rows, scratch, case.asked))


class Withheld:
    """Stands for a kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def kernel_costs_us(case: Case, way: Way, replays: int) -> dict[str, float]:
    """Return what each kernel adds to a draw."""
    graphs, scratch = {}, poisoned(way.module, case)
    for count in range(1, len(KERNELS) + 1):
        with ExitStack() as stack:
            for name in KERNELS[count:]:
                stack.enter_context(patch.object(way.module, f"{name}_kernel", Withheld()))
            graphs[KERNELS[count - 1]] = draw_graph(case, way, scratch)
    ends = medians_us(graphs, replays)
    before = [0.0, *ends.values()]
    return {name: ends[name] - before[place] for place, name in enumerate(KERNELS)}


def likeliest_of(case: Case) -> Callable[[], torch.Tensor]:
    """Return what queues the ids that every captured step ends with."""
    slots = torch.arange(case.count, dtype=torch.int32, device=case.logits.device)
    last_tokens = torch.zeros(case.count, dtype=torch.int64, device=case.logits.device)
    return lambda: likeliest(case.logits, slots, last_tokens)


def by_torch(logits: torch.Tensor) -> torch.Tensor:
    """Choose the same ids by PyTorch's own operations."""
    peaks, ids = logits.max(dim=-1)
    return torch.where(peaks.isfinite(), ids, NOT_FINITE)


def wrong_ids(case: Case) -> list[str]:
    """Return what is wrong with `likeliest`."""
    logits = case.logits
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_top = logits == logits.max(dim=-1, keepdim=True).values
    expected = columns.where(is_top, logits.shape[1]).min(dim=-1).values
    wrong = int((likeliest_of(case)() != expected).sum())
    return [f"likeliest: {wrong} ids"] if wrong else []


def by_sort(logits: torch.Tensor) -> torch.Tensor:
    """Draw at top_p 0.95 by PyTorch's own operations."""
    ranked, ids = logits.float().sort(dim=-1, descending=True)
    weights = ranked.softmax(-1)
    kept = weights * (weights.cumsum(-1) - weights < 0.95)
    aims = torch.rand(len(logits), 1, device=logits.device) * kept.sum(-1, keepdim=True)
    return ids.gather(1, (kept.cumsum(-1) <= aims).sum(-1, keepdim=True))


def ways_of(arguments: argparse.Namespace) -> list[Way]:
    """Return what is measured, what serves first."""
    found = [Way("serves", serving, asks=True), Way("all kernels", serving)]
    found += [
        Way(f"{count} programs", serving, programs=count) for count in arguments.programs or ()
    ]
    if arguments.other:
        found.append(Way("the other", other_version.load(arguments.other, "other_sampling")))
    return found


def compile_beside(arguments: argparse.Namespace) -> None:
    """Compile the other version in a process of its own while this one compiles what serves."""
    beside = None
    if arguments.other:
        command = [sys.executable, __file__, "--compile", "--other", str(arguments.other)]
        beside = subprocess.Popen([*command, "--vocab", str(arguments.vocab)])
    compile_all(serving, arguments.vocab)
    if beside is not None and beside.wait():
        raise SystemExit(f"{arguments.other} does not compile or run")


def compile_all(module: ModuleType, vocab_size: int) -> None:
    case = make_case(2, vocab_size, "rank", 3.0, "cuda")
    case.draw(Way("", module), module.SamplingScratch.allocate(2, vocab_size, "cuda"))
    torch.cuda.synchronize()


def check_filters(names: list[str], spreads: list[str], arguments: argparse.Namespace) -> bool:
    """Say how many tokens are not the reference's; return whether rounding explains them."""
    is_right = True
    for spread in spreads:
        for name in names:
            case = make_case(CHECKED, arguments.vocab, name, SPREADS[spread], arguments.device)
            wrong = differing(case)
            is_right &= wrong <= 1
            print(
                f"{spread:7s} {name:24s} {wrong} of {CHECKED} tokens differ from the reference's",
                flush=True,
            )
    return is_right


def report(case: Case, spread: str, ways: list[Way], arguments: argparse.Namespace) -> bool:
    """Print a line of what a draw costs, and one a version of its kernels; return if it's right."""
    title = f"{spread:7s} {case.count:4d} {case.filter_name:24s}"
    if wrong := disagreements(case, ways) + wrong_ids(case):
        print(f"{title} DIFFERS, not timed: {'; '.join(wrong)}", flush=True)
        return False
    if arguments.device != "cuda":
        print(f"{title} alike", flush=True)
        return True
    scratches = [poisoned(way.module, case) for way in ways]
    graphs: dict[str, torch.cuda.CUDAGraph] = {
        way.words: draw_graph(case, way, scratch)
        for way, scratch in zip(ways, scratches, strict=True)
    }
    if arguments.all and case.filter_name == "top_p 0.95":
        graphs["by a sort"] = captured(lambda: by_sort(case.logits))
    if case.filter_name == "greedy":
        choose = likeliest_of(case)  # has what the graph reads and writes
        graphs["likeliest"] = captured(choose)
        graphs["torch's maximum"] = captured(lambda: by_torch(case.logits))
    found = medians_us(graphs, arguments.replays)
    print(title, *(f"  {words} {us:.1f}" for words, us in found.items()), flush=True)
    if not arguments.all:
        for way in ways:
            if way.words in {"all kernels", "the other"}:
                costs = kernel_costs_us(case, way, arguments.replays)
                told = (f"{name} {us:.1f}" for name, us in costs.items())
                print(f"{'':13s}{way.words + ':':25s}", *told, flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--all", action="store_true", help="every filter, and flat logits")
    parser.add_argument("--other", type=Path)
    parser.add_argument("--programs", type=int, nargs="+", help="of a launch, beside what serves")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.compile:
        compile_all(other_version.load(arguments.other, "other_sampling"), arguments.vocab)
        return
    begun = time.monotonic()
    ways = ways_of(arguments)
    if arguments.device == "cuda":
        compile_beside(arguments)
        print(
            f"{torch.cuda.get_device_name()}, V {arguments.vocab}, us a draw; compiled in", end=""
        )
        print(f" {time.monotonic() - begun:.0f} s", flush=True)
    names, spreads = (list(FILTERS), list(SPREADS)) if arguments.all else (list(USUAL), ["peaked"])
    is_right = check_filters(names, spreads, arguments)
    for spread in spreads:
        for count in arguments.rows:
            for name in names:
                case = make_case(count, arguments.vocab, name, SPREADS[spread], arguments.device)
                is_right &= report(case, spread, ways, arguments)
    print(f"{time.monotonic() - begun:.0f} s; {'all right' if is_right else 'WRONG'}", flush=True)
    raise SystemExit(not is_right)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
