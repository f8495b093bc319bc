"""What is preempted: computed again, or swapped to host memory and back (`--cpu-offload-gib`).

    python benchmarks/swap.py --gpus 0 --model qwen-7b --kv-cache-tokens 16384 --rounds 2
    python benchmarks/swap.py --gpus 0 --model FOLDER --load-format dummy
    python benchmarks/swap.py --model smollm2 --kv-cache-tokens 1024 --prompt 200 --output 60

One backlog of requests is run in turns, A B C, A B C: in a pool that holds them all (nobody is
preempted), in a small one with recomputation, and in the same one where everybody who is preempted
is swapped, whether it pays or not. The engine takes answers to be short, so that it lends and
preempts as much as it can. Printed: seconds, preemptions, blocks copied, and how many of the
answers differ from those of the large pool: none may on a CPU in float32; in 16 bits, recomputing
rounds otherwise than decoding did, swapping does not.

`--model qwen-7b` is Qwen2.5-7B's shape with dummy weights, in bfloat16; `--load-format dummy` draws
weights for a folder that holds a config.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_engine import QWEN_7B

if TYPE_CHECKING:
    from tailrace.config import EngineConfig
    from tailrace.engine.engine import Engine

SHORT_ANSWERS = 20
"""Observed before the first request, of one token each."""


@dataclass
class Outcome:
    seconds: float
    preemptions: int
    blocks_out: int
    blocks_in: int
    answers: list[list[int]]


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as runner:
        model = arguments.model
        if model == "qwen-7b":
            (Path(folder) / "config.json").write_text(json.dumps(QWEN_7B))
            model = folder
        rounds: dict[str, list[Outcome]] = {}
        for index in range(arguments.rounds):
            for name, config in configs(arguments, model).items():
                outcome = measure(arguments, config, runner)
                runner.submit(give_back_memory).result()
                rounds.setdefault(name, []).append(outcome)
                print(f"round {index + 1}, {name}: {outcome.seconds:.2f} s", flush=True)
    print_table(rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, action="append", default=[])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-tokens", type=int, default=1024)
    parser.add_argument("--cpu-offload-gib", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--output", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def configs(arguments: argparse.Namespace, model: str) -> dict[str, EngineConfig]:
    from tailrace.config import EngineConfig

    longest = arguments.prompt + arguments.output + 8
    common = {
        "model_path": model,
        "load_format": "dummy" if arguments.model == "qwen-7b" else arguments.load_format,
        "dtype": arguments.dtype,
        "gpus": tuple(arguments.gpus),
        "context_length": longest,
        "max_batch_size": arguments.requests,
        # Else most of what is preempted is found there, and neither way has anything to do.
        "prefix_cache": False,
    }
    small = {**common, "kv_cache_tokens": arguments.kv_cache_tokens}
    return {
        "large pool": EngineConfig(**common, kv_cache_tokens=(longest + 40) * arguments.requests),
        "computed again": EngineConfig(**small),
        "swapped": EngineConfig(**small, cpu_offload_gib=arguments.cpu_offload_gib),
    }


def measure(
    arguments: argparse.Namespace, config: EngineConfig, runner: ThreadPoolExecutor
) -> Outcome:
    from tailrace.engine import setup

    setup.pin_threads(config.threads)
    folder = runner.submit(setup.resolve, config).result()
    loaded = runner.submit(setup.load, config, folder).result()
    setup.warm_up(config, loaded, runner.submit)
    engine = setup.make_engine(config, loaded, runner.submit)
    scheduler = engine.scheduler
    for _ in range(SHORT_ANSWERS):
        scheduler.answers.observe(1)
    if loaded.host is not None:
        scheduler.swap_pays = lambda tokens, units: tokens > 0 and units > 0
    begun = time.perf_counter()
    answers = run(engine, arguments)
    blocks = scheduler.blocks
    return Outcome(
        time.perf_counter() - begun,
        scheduler.preemptions_total,
        blocks.swapped_out_total,
        blocks.swapped_in_total,
        answers,
    )


def give_back_memory() -> None:
    """Let the next engine have what the last one held."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(engine: Engine, arguments: argparse.Namespace) -> list[list[int]]:
    from tailrace.types import EngineRequest, SamplingParams

    draw = random.Random(5)
    sampling = SamplingParams(max_tokens=arguments.output, temperature=0.0, ignore_eos=True)
    answers: list[list[int]] = [[] for _ in range(arguments.requests)]
    for index in range(arguments.requests):
        ids = [draw.randrange(100, engine.vocab_size) for _ in range(arguments.prompt)]
        engine.add(
            EngineRequest(
                request_id=str(index), token_ids=ids, sampling=sampling, arrival_s=float(index)
            )
        )
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            answers[int(output.request_id)] += output.token_ids
    return answers


def print_table(rounds: dict[str, list[Outcome]]) -> None:
    print(f"\n{'':<16}{'seconds':>9}{'preempted':>11}{'out':>8}{'in':>8}{'differ':>8}")
    whole = rounds["large pool"]
    for name, outcomes in rounds.items():
        first = outcomes[0]
        differ = sum(
            a != b
            for outcome, reference in zip(outcomes, whole, strict=True)
            for a, b in zip(outcome.answers, reference.answers, strict=True)
        )
        seconds = statistics.median(outcome.seconds for outcome in outcomes)
        print(
            f"{name:<16}{seconds:>9.2f}{first.preemptions:>11}{first.blocks_out:>8}"
            f"{first.blocks_in:>8}{differ:>8}"
        )


if __name__ == "__main__":
    main()
