"""What a step costs the host: schedule, prepare, queue and commit in CPU time, with no device.

    python benchmarks/step_cost.py [--context 8192] [--steps 400] [--profile]

The engine, the scheduler, the block manager and the GPU's runner are the real ones; the model is
none, and a captured graph's replay does nothing. So what is left is what Python and NumPy do for a
step, on the engine's thread (schedule, prepare, commit) and on the runner's (queue: the copy of the
arrays included, which a CPU makes at once and a GPU does not). CPU time, so that other processes
disturb it little; still, figures are to be compared within one run. Greedy rows, no prefix cache.

decodes   128 streams over 3000 tokens
prompts   56 streams, and always 8 prompts under way or waiting, of 700 tokens each
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tailrace.engine.cuda_runner import CudaRunner
    from tailrace.engine.engine import Engine

SLOTS, UNIT, BUDGET, VOCAB, DIM = 128, 8, 1024, 512, 16


class NoModel:
    """Shapes, and answers of zeros."""

    config = SimpleNamespace(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=DIM)
    layer_linears = ()

    def forward(self, ids: torch.Tensor, *_: object) -> torch.Tensor:
        import torch

        return torch.zeros(len(ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.zeros(len(hidden), VOCAB)


def make_kernels() -> SimpleNamespace:
    import torch

    from tailrace.kernels.paged_attention.triton_prefill import Shape

    return SimpleNamespace(
        device=torch.device("cpu"),
        capability=(9, 0),
        reserve=lambda **_: None,
        prefill_shape=lambda *_, **__: Shape(64, 64, 4, 2),
        wide_tokens=0,
    )


def make_runner(context: int, num_blocks: int) -> CudaRunner:
    """Make the GPU's runner with graphs that do nothing, whose rows all answer 0."""
    import torch

    from tailrace.engine.cuda_runner import CudaRunner
    from tailrace.engine.device_sampler import DeviceSampler
    from tailrace.engine.frames import Frame

    class Replaying(CudaRunner):
        """Has a graph for every frame, which does nothing."""

        def capture_nothing(self) -> None:
            graph = SimpleNamespace(replay=lambda: None)
            for frame in [*map(Frame, self.sizes.buckets), *self.sizes.mixed]:
                rows = frame.decodes + frame.prompts
                outputs = torch.zeros(rows, VOCAB), torch.zeros(rows, dtype=torch.int64)
                self.step_graphs.graphs[frame] = graph
                self.step_graphs.outputs[frame] = outputs

    kernels = make_kernels()
    runner = Replaying(
        NoModel(),
        DeviceSampler(SLOTS, VOCAB, [VOCAB - 1], 0, device=kernels.device),
        kernels,
        num_blocks=num_blocks,
        block_size=UNIT,
        num_slots=SLOTS,
        context_length=context,
        token_budget=BUDGET,
        kv_dtype=torch.float16,
        paced=True,
    )
    runner.capture_nothing()
    return runner


def make_engine(context: int) -> tuple[Engine, list[float]]:
    """Return an engine, and where its runner notes what queueing a step took."""
    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.engine import Engine
    from tailrace.engine.scheduler import Scheduler

    num_blocks = SLOTS * 4096 // UNIT
    runner, queued = make_runner(context, num_blocks), []

    def submit(function: Callable[..., Any], *arguments: object) -> Future[Any]:
        done: Future[Any] = Future()
        begun_s = time.thread_time()
        done.set_result(function(*arguments))
        queued.append(time.thread_time() - begun_s)
        return done

    scheduler = Scheduler(
        BlockManager(num_blocks, UNIT, prefix_cache=False),
        max_batch_size=SLOTS,
        token_budget=BUDGET,
        padded_decodes=runner.padded_decodes,
    )
    engine = Engine(
        scheduler,
        runner,
        submit=submit,
        clock=time.thread_time,
        context_length=context,
        vocab_size=VOCAB,
        eos_token_ids=[VOCAB - 1],
    )
    return engine, queued


def add(engine: Engine, name: str, length: int, tokens: int, draw: random.Random) -> None:
    from tailrace.types import EngineRequest, SamplingParams

    request = EngineRequest(
        request_id=name,
        token_ids=[draw.randrange(3, 500) for _ in range(length)],
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        arrival_s=time.thread_time(),
    )
    refused = engine.add(request)
    assert refused is None, refused


def start(engine: Engine, streams: int, length: int, tokens: int, draw: random.Random) -> None:
    for index in range(streams):
        add(engine, f"s{index}", length, tokens, draw)
    while any(s.uncomputed > 1 for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    for _ in range(20):
        engine.step()


def decodes(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def prompts(engine: Engine, steps: int) -> None:
    draw, came, under_way = random.Random(2), 0, 0
    for _ in range(steps):
        while under_way < 8:
            add(engine, f"p{came}", 700, 1, draw)
            came, under_way = came + 1, under_way + 1
        outputs = engine.step()
        under_way -= sum(output.request_id.startswith("p") for output in outputs)


def measure(name: str, context: int, steps: int, *, profile: bool) -> None:
    engine, queued = make_engine(context)
    streams, work = {"decodes": (SLOTS, decodes), "prompts": (56, prompts)}[name]
    start(engine, streams, 3000, steps + 400, random.Random(1))
    profiler = cProfile.Profile()
    before, first = engine.stats().timings, len(queued)
    if profile:
        profiler.enable()
    work(engine, steps)
    profiler.disable()
    after, done = engine.stats().timings, len(queued) - first
    queue_s = sum(queued[first:])
    parts = {
        part: getattr(after, f"{part}_s_total") - getattr(before, f"{part}_s_total")
        for part in ("schedule", "prepare", "commit")
    }
    parts["prepare"] -= queue_s  # it is run at once, within
    parts["queue"] = queue_s
    shown = ", ".join(f"{part} {1e6 * seconds / done:.0f}" for part, seconds in parts.items())
    total = 1e6 * (sum(parts.values()) - queue_s) / done
    print(f"{name}: {shown}; engine's thread {total:.0f} us a step ({done} steps)", flush=True)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", choices=("decodes", "prompts"))
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for name in (arguments.only,) if arguments.only else ("decodes", "prompts"):
        measure(name, arguments.context, arguments.steps, profile=arguments.profile)


if __name__ == "__main__":
    main()
