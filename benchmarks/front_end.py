"""The request path without a device: what scheduling, the process border and SSE cost per token.

    python benchmarks/front_end.py --streams 8 --streams 50 --streams 128 --step-ms 5

The real front end, engine process, scheduler and index packing serve the embedded model's
tokenizer; only the device is replaced: a step ends `step-ms` after the one before, and every token
is the same one. The harness's client drives closed loops. Printed: tokens/s reached beside what
the steps allow, the gap between tokens, and CPU time per token of both processes (from /proc).
With --step-ms 0 the path itself is the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

TOKENS = 128
PROMPT_TOKENS = 64
SECONDS = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, action="append", default=[])
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        raise SystemExit(work())
    if arguments.serve:
        raise SystemExit(serve(arguments.step_ms))
    asyncio.run(measure(arguments))


def serve(step_ms: float) -> int:
    """Be `tailrace serve`, with an engine process that has no device."""
    from functools import partial

    from tailrace import config
    from tailrace.server import entrance
    from tailrace.server.supervisor import Launcher

    os.environ["FRONT_END_STEP_MS"] = str(step_ms)
    entrance.Launcher = partial(Launcher, command=(sys.executable, __file__, "--worker"))
    loaded = config.load({"port": int(os.environ["FRONT_END_PORT"]), "max_batch_size": 256})
    return entrance.run(loaded)


def work() -> int:
    """Be the engine process: everything but the model."""
    import torch

    from tailrace.engine import cuda_runner, setup, worker
    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.runner import StepResult
    from tailrace.kernels.triton_kernels import TritonKernels

    step_s = float(os.environ["FRONT_END_STEP_MS"]) / 1e3

    class Pending:
        """A step that is done at a moment."""

        def __init__(self, count: int, done_s: float) -> None:
            self.count, self.done_s = count, done_s

        def wait(self) -> StepResult:
            time.sleep(max(0.0, self.done_s - time.monotonic()))
            return StepResult([500] * self.count, [None] * self.count, device_s=max(step_s, 1e-6))

    class Runner(cuda_runner.CudaRunner):
        """Packs the index arrays as on a GPU; runs nothing."""

        def __init__(self, model: object, slots: int) -> None:
            super().__init__(
                model, None, TritonKernels(torch.device("cpu"), "float32"), num_blocks=1,
                block_size=8, num_slots=slots, context_length=8192, token_budget=8192,
                kv_dtype=torch.float32,
            )  # fmt: skip
            self.step_graphs.graphs, self.sizes.mixed = {1: None}, []  # decodes alone are captured
            self._free_s = 0.0

        def execute(self, prepared: cuda_runner.PreparedDeviceStep) -> Pending:
            self._free_s = max(self._free_s, time.monotonic()) + step_s
            return Pending(len(prepared.sample_slots), self._free_s)

    def load(config, folder, **_):  # noqa: ANN001, ANN003, ANN202
        from tailrace.models.config import load_config

        class Model:
            layer_linears = ()

        model = Model()
        model.config = load_config(folder)
        return setup.Loaded(
            model=model,
            runner=Runner(model, config.max_batch_size),
            blocks=BlockManager(80_000, 8, prefix_cache=False),
            context_length=8192,
            device="none",
            grammars=None,
        )

    stamps = os.environ.get("FRONT_END_STAMPS")
    if stamps:
        stamp_messages(worker.Mailbox, Path(stamps))
    setup.load = load
    setup.pin_threads = lambda _: None
    setup.token_budget = lambda _: 8192
    return worker.main()


def stamp_messages(mailbox: type, path: Path) -> None:
    """Keep when each step's message was sent, monotonic seconds: see bursts.py."""
    from tailrace.types import EngineOutputs

    file = path.open("w", buffering=1)
    send = mailbox._send  # noqa: SLF001 -- where a message leaves

    def stamped(self: object, identity: bytes, message: object) -> None:
        if isinstance(message, EngineOutputs) and message.outputs:
            file.write(f"{time.monotonic():.6f}\n")
        send(self, identity, message)

    mailbox._send = stamped  # noqa: SLF001


async def measure(arguments: argparse.Namespace) -> None:
    from tailrace.bench.codec import ServerCodec
    from tailrace.bench.launch import free_port
    from tailrace.bench.prompts import PromptMaker, corpus_text
    from tailrace.bench.target import inspect
    from tailrace.bench.traffic.workload import Workload, build
    from tailrace.bench.trial import Server, TrialOptions, Work, run_trial
    from tailrace.bench.wire import resolve

    port = free_port()
    command = [sys.executable, __file__, "--serve", "--step-ms", str(arguments.step_ms)]
    environment = os.environ | {"FRONT_END_PORT": str(port)}
    process = subprocess.Popen(  # noqa: ASYNC220 -- nothing else runs on the loop yet
        command, env=environment, stderr=subprocess.DEVNULL
    )
    try:
        endpoint = await ready(f"http://127.0.0.1:{port}", resolve)
        target = await inspect(endpoint, None)
        maker = await PromptMaker.create(
            ServerCodec(endpoint, target.model), corpus_text(None)[0], seed=1
        )
        print(
            f"{'streams':>8}{'tokens/s':>10}{'steps allow':>13}{'gap p50 ms':>12}{'p99':>7}"
            f"{'front end us/token':>20}{'engine us/token':>17}"
        )
        for streams in arguments.streams or [8, 50, 128]:
            workload = Workload(
                source="chat70",
                users=streams,
                think_s="0",
                input_tokens=str(PROMPT_TOKENS),
                output_tokens=str(TOKENS),
            )
            most = streams * 12
            schedule = build(
                workload, rate_rps=None, duration_s=SECONDS, max_requests=most, seed=streams
            )
            work = Work(schedule, await maker.make_all(schedule), users=streams)
            before = cpu_seconds(process.pid)
            run = await run_trial(
                Server(endpoint, target),
                work,
                Path("/tmp/front-end"),  # noqa: S108
                TrialOptions(temperature=0.0),
                stop=asyncio.Event(),
            )
            after = cpu_seconds(process.pid)
            tokens = run.stats.output_tokens
            front, engine = ((b - a) / tokens * 1e6 for a, b in zip(before, after, strict=True))
            allowed = streams / arguments.step_ms * 1e3 if arguments.step_ms else float("inf")
            p50_ms, p99_ms = (1e3 * (run.stats.gap.at(percent) or 0) for percent in (50, 99))
            print(
                f"{streams:>8}{tokens / run.stats.span_s:>10.0f}{allowed:>13.0f}"
                f"{p50_ms:>12.2f}{p99_ms:>7.1f}"
                f"{front:>20.0f}{engine:>17.0f}",
                flush=True,
            )
    finally:
        process.terminate()
        process.wait()


async def ready(url: str, resolve):  # noqa: ANN001, ANN201
    from tailrace.bench.wire import fetch
    from tailrace.errors import ConfigError

    for _ in range(300):
        try:
            endpoint = await resolve(url)
            if (await fetch(endpoint, "GET", "/ready")).status == 200:
                return endpoint
        except (ConfigError, OSError):
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the server did not become ready")


def cpu_seconds(pid: int) -> tuple[float, float]:
    """CPU time of the front end and of its engine process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return _cpu(pid), sum(_cpu(int(child)) for child in children)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
