"""What steps take on a GPU: the fit and its error by shape, pacing, late binding, lack of memory.

    python benchmarks/gpu_steps.py [--part fit] [--part pace] [--part late] [--part memory] [--tiny]
        [--weights awq] [--prefill-weights fp8]

fit     the shapes of the warm-up and others that it has not seen: measured, predicted, error
pace    64 streams over 4500 tokens while prompts of 4200 tokens come, with and without a target:
        steps' device time, prompt tokens a second, the host's time a step, the device's idle share
late    prompts of 700 tokens at random times beside 32 streams, with and without late binding:
        arrival to first token, the device's idle share
memory  KV that leaves graphs no room, so that some are given up at start, and then KV; a ballast
        that leaves a step of prompt log-probabilities no memory, and its release

Dummy weights of Qwen2.5-7B's shape, bfloat16 or by `--weights`; `--tiny` is a model of two layers,
for a CPU that only wants to know that this script runs.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from gpu_engine import QWEN_7B, WEIGHTS

if TYPE_CHECKING:
    from tailrace.config import EngineConfig
    from tailrace.engine.engine import Engine
    from tailrace.engine.setup import Loaded

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
PARTS = ("fit", "pace", "late", "memory")
LEFT_MIB = 300
"""Beside the KV pool, whose 56 tensors take up to 2 MiB more each; all graphs take more."""


@dataclass(frozen=True)
class Bench:
    """A loaded model; engines are made over it."""

    config: EngineConfig
    loaded: Loaded
    runner: ThreadPoolExecutor
    is_tiny: bool

    def engine(self, **changes: object) -> Engine:
        from tailrace.engine import setup

        return setup.make_engine(replace(self.config, **changes), self.loaded, self.runner.submit)

    def scaled(self, tokens: int) -> int:
        """Return so many tokens, or few for the tiny model."""
        return max(1, tokens // 20) if self.is_tiny else tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, default=None)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16")
    parser.add_argument("--prefill-weights", default="same")
    arguments = parser.parse_args()
    parts = arguments.part or PARTS
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as runner:
        shape = QWEN_7B | TINY if arguments.tiny else QWEN_7B
        if WEIGHTS[arguments.weights][2] is not None:
            shape |= {"quantization_config": WEIGHTS[arguments.weights][2]}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        if "memory" in parts and not arguments.tiny:
            lack_memory_at_capture(Path(folder), runner)
        bench = load(
            Path(folder), runner, is_tiny=arguments.tiny, prefill_weights=arguments.prefill_weights
        )
        if "fit" in parts:
            fit(bench)
        if "pace" in parts:
            for target_ms in (0, 30, 0, 30):
                pace(bench, target_ms)
        if "late" in parts:
            for late in (False, True, False, True):
                bind_late(bench, late=late)
        if "memory" in parts and not arguments.tiny:
            lack_memory_in_a_step(bench)


def load(
    folder: Path, runner: ThreadPoolExecutor, *, is_tiny: bool, prefill_weights: str = "same"
) -> Bench:
    from tailrace.config import EngineConfig
    from tailrace.engine import setup

    config = EngineConfig(
        model_path=str(folder), load_format="dummy", gpus=() if is_tiny else (0,),
        max_batch_size=128, context_length=8192, max_num_batched_tokens=1024, prefix_cache=False,
        itl_target_ms=30, gpu_memory_utilization=0.8, kv_cache_tokens=100_000 if is_tiny else 0,
        prefill_weights=prefill_weights,
    )  # fmt: skip
    begun_s = time.monotonic()
    loaded = runner.submit(setup.load, config, folder).result()
    load_s = time.monotonic() - begun_s
    warmup_s = setup.warm_up(config, loaded, runner.submit)
    print(f"load {load_s:.1f} s, warm-up {warmup_s:.1f} s; {loaded.device}", flush=True)
    return Bench(config, loaded, runner, is_tiny)


def fit(bench: Bench) -> None:
    from tailrace.clock import monotonic
    from tailrace.engine import setup
    from tailrace.engine.step_probes import Probe, ProbeRun

    begun_s = time.monotonic()
    samples = setup.fit_step_time(bench.config, bench.loaded, bench.runner.submit)
    print(f"\n{len(samples)} shapes timed in {time.monotonic() - begun_s:.2f} s", flush=True)
    print(bench.loaded.step_time.costs)
    s = bench.scaled
    unseen = [
        Probe(decodes=8, context=s(4500)),
        Probe(decodes=50, context=s(500)),
        Probe(decodes=100, context=s(3000)),
        Probe(tokens=s(700)),
        Probe(tokens=s(1024), start=s(2000)),
        Probe(decodes=50, context=s(500), tokens=s(80)),
        Probe(decodes=32, context=s(4500), tokens=s(512), start=s(1000)),
        Probe(decodes=64, context=s(4500), tokens=s(640), start=s(3000)),
        Probe(decodes=120, context=s(4000), tokens=s(768)),
    ]
    blocks = setup.make_blocks(bench.config, bench.loaded.blocks.num_units, prefix_cache=False)
    run = ProbeRun(bench.loaded.runner, blocks, submit=bench.runner.submit, clock=monotonic)
    errors = []
    for title, found in (("fitted", samples), ("unseen", run.run(unseen, 60.0))):
        for load, seconds in found:
            context = load.decode_context // max(1, load.decodes)
            predicted_s = load.seconds(bench.loaded.step_time.costs)
            errors.append(abs(predicted_s / seconds - 1))
            print(
                f"{title}: {load.decodes:>4} decodes x {context}, "
                f"{load.prefill_tokens:>5} prompt tokens, {load.prefill_context:>8} pairs: "
                f"{1e3 * seconds:7.2f} ms, predicted {1e3 * predicted_s:7.2f} "
                f"({100 * (predicted_s / seconds - 1):+.1f} %)",
                flush=True,
            )
        print(f"{title}: median error {100 * statistics.median(errors):.1f} %")
        errors = []


def request(index: int, length: int, tokens: int, draw: random.Random, **more: object) -> object:
    from tailrace.clock import monotonic
    from tailrace.types import EngineRequest, SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **more)
    ids = [draw.randrange(3, 500) for _ in range(length)]
    return EngineRequest(
        request_id=f"r{index}", token_ids=ids, sampling=sampling, arrival_s=monotonic()
    )


def start_streams(engine: Engine, count: int, context: int, draw: random.Random) -> None:
    """Begin streams that outlast the measurement, and go on until all of them decode."""
    for index in range(count):
        engine.add(request(10_000 + index, context, 3000, draw))
    first: set[str] = set()
    while len(first) < count:
        first |= {output.request_id for output in engine.step()}


def clear(engine: Engine) -> None:
    running = [*engine.scheduler.running, *engine.scheduler.waiting]
    engine.abort([sequence.request_id for sequence in running])
    while engine.has_work:
        engine.step()


def pace(bench: Bench, target_ms: float) -> None:
    engine, draw = bench.engine(itl_target_ms=target_ms), random.Random(1)
    start_streams(engine, 64, bench.scaled(4500), draw)
    prompts = 24
    for index in range(prompts):
        engine.add(request(index, bench.scaled(4200), 1, draw))
    before, begun_s = engine.stats(), time.perf_counter()
    walls, ended = [], 0
    while ended < prompts:
        step_s = time.perf_counter()
        ended += sum(output.finish_reason is not None for output in engine.step())
        walls.append(1e3 * (time.perf_counter() - step_s))
    wall_s, after = time.perf_counter() - begun_s, engine.stats()
    cuts = statistics.quantiles(walls, n=100, method="inclusive")
    tokens = after.prompt_tokens_total - before.prompt_tokens_total
    print(
        f"\ntarget {target_ms} ms, 64 streams, {prompts} prompts: steps p50 {cuts[49]:.1f} "
        f"p95 {cuts[94]:.1f} p99 {cuts[98]:.1f} most {max(walls):.1f} ms; "
        f"{tokens / wall_s:,.0f} prompt tokens/s; {shares(before, after, wall_s)}",
        flush=True,
    )
    clear(engine)


def shares(before: object, after: object, wall_s: float) -> str:
    old, new = before.timings, after.timings
    steps = max(1, after.steps_total - before.steps_total)
    host_s = new.host.total - old.host.total
    error = (new.error.total - old.error.total) / max(
        1, sum(new.error.counts) - sum(old.error.counts)
    )
    return (
        f"host {1e6 * host_s / steps:.0f} us a step, queueing "
        f"{1e6 * (new.queue_s_total - old.queue_s_total) / steps:.0f} us, device idle "
        f"{100 * (new.idle_s_total - old.idle_s_total) / wall_s:.2f} %, "
        f"mean prediction error {100 * error:.1f} %"
    )


def bind_late(bench: Bench, *, late: bool) -> None:
    """Arrivals from a list of times, taken as the worker takes its messages."""
    engine, draw = bench.engine(late_binding=late), random.Random(2)
    start_streams(engine, 32, bench.scaled(2000), draw)
    before, begun_s = engine.stats(), time.perf_counter()
    due = []
    for _ in range(60):
        due.append((due[-1] if due else begun_s) + draw.expovariate(8.0))
    waiting = [request(index, bench.scaled(700), 1, draw) for index in range(len(due))]
    firsts: dict[str, float] = {}
    came = {f"r{index}": at for index, at in enumerate(due)}

    def listen() -> None:
        while waiting and time.perf_counter() >= due[-len(waiting)]:
            engine.add(waiting.pop(0))

    while len(firsts) < len(due):
        listen()
        while (hold_s := engine.hold_s()) > 0.0:
            arrives = due[-len(waiting)] - time.perf_counter() if waiting else hold_s
            time.sleep(max(0.0, min(hold_s, arrives)))
            listen()
        for output in engine.step():
            if output.request_id in came and output.token_ids:
                firsts[output.request_id] = time.perf_counter() - came[output.request_id]
    wall_s = time.perf_counter() - begun_s
    waits = sorted(1e3 * wait for wait in firsts.values())
    print(
        f"\nlate binding {'on' if late else 'off'}: first token p50 {waits[len(waits) // 2]:.1f} "
        f"p95 {waits[int(0.95 * len(waits))]:.1f} ms; {shares(before, engine.stats(), wall_s)}",
        flush=True,
    )
    clear(engine)


def lack_memory_at_capture(folder: Path, runner: ThreadPoolExecutor) -> None:
    import torch

    from tailrace.config import EngineConfig
    from tailrace.engine import cuda_setup, setup

    config = EngineConfig(
        model_path=str(folder), load_format="dummy", gpus=(0,), max_batch_size=64,
        context_length=8192, gpu_memory_utilization=1.0,
    )  # fmt: skip
    plan_memory, capture = cuda_setup.plan_memory, cuda_setup.CudaRunner.capture
    details = []

    def greedy(*arguments: object, **more: object) -> object:
        plan = plan_memory(*arguments, **more)
        return replace(plan, kv=torch.cuda.mem_get_info()[0] - (LEFT_MIB << 20))

    def noted(self: object, detail: str) -> None:
        details.append(detail)
        capture(self, detail)

    with (
        mock.patch.object(cuda_setup, "plan_memory", greedy),
        mock.patch.object(cuda_setup.CudaRunner, "capture", noted),
    ):
        loaded = runner.submit(setup.load, config, folder).result()
    free, total = torch.cuda.mem_get_info()
    print(f"\nstarted with {free / 2**20:.0f} of {total / 2**20:.0f} MiB free; {loaded.device}")
    setup.warm_up(config, loaded, runner.submit)
    print(f"and its warm-up ran; graphs that were tried: {', '.join(details)}", flush=True)
    if details[-1] == "all":
        raise SystemExit(f"no graph was given up: leave less than {LEFT_MIB} MiB")
    del loaded
    gc.collect()
    runner.submit(torch.cuda.empty_cache).result()


def lack_memory_in_a_step(bench: Bench) -> None:
    """Prompt log-probabilities are never captured, so such a step allocates."""
    import torch

    draw = random.Random(3)
    prompts = [request(index, 2000, 8, draw, prompt_logprobs=0) for index in range(4)]
    truth = answers(bench.engine(), prompts)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(max(0, free - (24 << 20)), dtype=torch.uint8, device="cuda")
    engine = bench.engine()
    engine.add(request(90, 5, 40, draw))
    for prompt in prompts:
        engine.add(prompt)
    ends: dict[str, str] = {}
    while engine.has_work and len(ends) < 5:
        for output in engine.step():
            if output.finish_reason is not None:
                ends[output.request_id] = output.error or output.finish_reason
    print(f"\nwithout memory: {engine.stats().memory_failures_total} steps failed; ends {ends}")
    del ballast
    torch.cuda.empty_cache()
    found = answers(engine, prompts)
    same = sum(found[name] == truth[name] for name in truth)
    # Its steps are smaller for a while, and bfloat16's sums depend on their shapes.
    print(f"with memory again, the same engine: {len(found)} answers, {same} as before")


def answers(engine: Engine, prompts: list) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for prompt in prompts:
        engine.add(prompt)
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise SystemExit(f"{output.request_id}: {output.error}")
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


if __name__ == "__main__":
    main()
