"""The engine alone on the CPU, beside llama.cpp: prefill and decode tokens/s at 1, 8, 16 requests.

    python benchmarks/cpu_engine.py --rounds 5 \
        --llama-batched-bench build/bin/llama-batched-bench --gguf f16.gguf --gguf q4_1.gguf

    python benchmarks/cpu_engine.py --rounds 7 --block-size 8 --also-block-size 16 --no-long-steps

compares block sizes in the same way. Each round runs every engine once, one after the other (A B C,
A B C, ...), each in a process of its own; the table shows medians over the rounds and, for the
peers, the median of the ratios taken round by round, so that a machine whose speed drifts does not
decide.

Two phases are timed, as llama-batched-bench does (`S_PP`, `S_TG`). Prefill: n requests of 512
random prompt tokens arrive at once and ask for one token. Decode: the same prompts come again, are
found in the prefix cache, and generate 32 tokens each; the clock runs from the moment when all n
have their first. (One phase would not do: under continuous batching the first requests would have
ended before the last was prefilled.)
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.engine.engine import Engine

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 32
REQUESTS = (1, 8, 16)


@dataclass
class Rates:
    """Tokens a second at one number of requests."""

    requests: int
    prefill: float
    decode: float


def main() -> None:
    arguments = parse()
    if arguments.measure:
        print(json.dumps([asdict(rates) for rates in measure_tailrace(arguments)]))
        return
    engines = {
        "tailrace": lambda: run_tailrace(arguments, 0),
    }
    if not arguments.no_long_steps:
        engines["tailrace, 512-token steps"] = lambda: run_tailrace(arguments, 512)
    for dtype in arguments.also_dtype:
        engines[f"tailrace {dtype}"] = lambda dtype=dtype: run_tailrace(arguments, 0, dtype)
    for size in arguments.also_block_size:
        engines[f"tailrace, blocks of {size}"] = lambda size=size: run_tailrace(
            arguments, 0, block_size=size
        )
    for gguf in arguments.gguf:
        engines[f"llama.cpp {Path(gguf).stem}"] = lambda gguf=gguf: run_llama(arguments, gguf)
    rounds: dict[str, list[list[Rates]]] = {name: [] for name in engines}
    for index in range(arguments.rounds):
        for name, run in engines.items():
            rounds[name].append(run())
            shown = " ".join(
                f"{r.requests}:{r.prefill:.0f}/{r.decode:.0f}" for r in rounds[name][-1]
            )
            print(f"round {index + 1} {name}: {shown}", flush=True)
    print_table(rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--also-dtype", action="append", default=[], help="A further row.")
    parser.add_argument("--block-size", default="auto")
    parser.add_argument("--also-block-size", action="append", default=[], help="A further row.")
    parser.add_argument("--no-long-steps", action="store_true", help="No row of 512-token steps.")
    parser.add_argument("--llama-batched-bench", default="")
    parser.add_argument("--gguf", action="append", default=[])
    parser.add_argument("--max-num-batched-tokens", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_tailrace(
    arguments: argparse.Namespace, budget: int, dtype: str = "", block_size: str = ""
) -> list[Rates]:
    command = [sys.executable, __file__, "--measure", "--model", arguments.model]
    command += ["--dtype", dtype or arguments.dtype, "--threads", str(arguments.threads)]
    command += ["--max-num-batched-tokens", str(budget)]
    command += ["--block-size", block_size or arguments.block_size]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [Rates(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def run_llama(arguments: argparse.Namespace, gguf: str) -> list[Rates]:
    context = max(REQUESTS) * (PROMPT_TOKENS + OUTPUT_TOKENS) + 64
    command = [arguments.llama_batched_bench, "-m", gguf, "-c", str(context)]
    command += ["-b", "2048", "-ub", "512", "-npp", str(PROMPT_TOKENS), "-ntg", str(OUTPUT_TOKENS)]
    command += ["-npl", ",".join(map(str, REQUESTS)), "-t", str(arguments.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = re.findall(r"^\|\s*\d[^\n]*", done.stdout + done.stderr, re.MULTILINE)
    cells = [[float(cell) for cell in row.strip("| ").split("|")] for row in rows]
    # PP, TG, B, N_KV, T_PP s, S_PP t/s, T_TG s, S_TG t/s, T s, S t/s
    return [Rates(int(row[2]), row[5], row[7]) for row in cells]


def measure_tailrace(arguments: argparse.Namespace) -> list[Rates]:
    from tailrace.config import EngineConfig
    from tailrace.engine import setup

    config = EngineConfig(
        model_path=arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_batch_size=max(REQUESTS),
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        block_size=arguments.block_size,
    )
    setup.pin_threads(config.threads)
    with ThreadPoolExecutor(1) as executor:
        folder = executor.submit(setup.resolve, config).result()
        loaded = executor.submit(setup.load, config, folder).result()
        setup.warm_up(config, loaded, executor.submit)
        engine = setup.make_engine(config, loaded, executor.submit)
        return [measure(engine, count) for count in REQUESTS]


def measure(engine: Engine, count: int) -> Rates:
    draw = random.Random(count)
    prompts = [
        [draw.randrange(100, engine.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)
    ]
    started = time.perf_counter()
    run(engine, prompts, 1)
    prefill_s = time.perf_counter() - started
    tokens, decode_s = run(engine, prompts, OUTPUT_TOKENS + 1)
    return Rates(count, count * PROMPT_TOKENS / prefill_s, tokens / decode_s)


def run(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[int, float]:
    """Run requests to their end; return tokens and seconds after all had their first token."""
    from tailrace.types import EngineRequest, SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(
            EngineRequest(
                request_id=str(index), token_ids=prompt, sampling=sampling, arrival_s=float(index)
            )
        )
    begun: set[str] = set()
    tokens = 0
    since = 0.0
    while engine.has_work:
        for output in engine.step():
            tokens += len(output.token_ids)
            begun.add(output.request_id)
        if len(begun) == len(prompts) and not since:
            since, tokens = time.perf_counter(), 0
    return tokens, time.perf_counter() - since


def print_table(rounds: dict[str, list[list[Rates]]]) -> None:
    print(f"\n{'engine':<28}{'requests':>9}{'prefill tok/s':>15}{'decode tok/s':>14}   ours / it")
    for name, runs in rounds.items():
        for column, requests in enumerate(REQUESTS):
            mine = [run[column] for run in rounds["tailrace"]]
            rows = [run[column] for run in runs]
            prefill = statistics.median(row.prefill for row in rows)
            decode = statistics.median(row.decode for row in rows)
            pairs = list(zip(mine, rows, strict=True))
            ratio_p = statistics.median(a.prefill / b.prefill for a, b in pairs)
            ratio_d = statistics.median(a.decode / b.decode for a, b in pairs)
            ratios = f"   {ratio_p:.2f} prefill, {ratio_d:.2f} decode" if name != "tailrace" else ""
            print(f"{name:<28}{requests:>9}{prefill:>15.0f}{decode:>14.0f}{ratios}")


if __name__ == "__main__":
    main()
