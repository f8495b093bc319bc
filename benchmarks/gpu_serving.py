"""Tailrace beside one peer on one GPU: both resident, driven in turn by the harness's client.

    python benchmarks/gpu_serving.py --model DIR --peer vllm --peer-command "bash run_vllm.sh" \
        --cell longdoc:c128:100 --cell chat70:c50:25 --out DIR

Both servers are started with dummy weights and less than half of the memory each, prefix caches
off unless --prefix-cache, and stay up; every cell is then measured A B A: the first arm comes again
last, as a check for drift (where caches are on it would find its prompts in them). Requests are of
exact lengths, the same for both, and greedy unless --temperature says otherwise. The servers'
metrics and the GPU's (NVML) are read beside every trial; the whole of our /metrics after each arm
of ours lies in metrics.txt.
`--arguments "--prefill-attention hopper"` is how ours gets a setting; with `--peer tailrace`
another server of ours, without it, is the peer. `--then "--quant-type fp8"` stops ours after all
cells, starts it with these settings instead of those, and measures it in the cells of the
`--then-cell` that follow, beside the same peer; there may be several.

A cell is TRAFFIC:cUSERS:SECONDS[:ARMS] (closed loop, no thinking) or TRAFFIC:rRATE:SECONDS[:ARMS]
(Poisson); ARMS is a row of A (ours) and B (the peer). `again-longdoc` draws its requests with
replacement from 1000 prompts, `again150-longdoc` from 150. Counted is a window: from the moment
when as many requests have ended as there are users (in an open loop, from a fifth of the time) to
the last arrival; ramp and drain are left out, so an arm ends there. Requests count that end in it,
gaps between tokens that end in it. Users of an engine that stops for prompts move in waves, and a
window holds no whole number of them; so a closed loop tells a third rate beside whole requests and
tokens: users over the mean time of a request (Little's law), which has no edges.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import shlex
import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.bench.codec import FileCodec
from tailrace.bench.engines import start
from tailrace.bench.engines.spec import EngineSpec
from tailrace.bench.prompts import PromptMaker, corpus_text
from tailrace.bench.stats import e2e_s, percentile, tpot_s, ttft_s
from tailrace.bench.target import inspect
from tailrace.bench.traffic.workload import Workload, build
from tailrace.bench.trial import Server, TrialOptions, Work, run_trial
from tailrace.bench.wire import fetch
from tailrace.clock import monotonic

if TYPE_CHECKING:
    from tailrace.bench.load import LoadState
    from tailrace.bench.run import Run

SHARE, SEED = 0.45, 11
AGAIN = re.compile(r"again(\d*)-")
DISTINCT = 1000
"""Prompts to draw from, where a cell does not say how many."""


@dataclass(frozen=True)
class Cell:
    """One traffic at one load."""

    text: str

    @property
    def source(self) -> str:
        return AGAIN.sub("", self.text.split(":")[0])

    @property
    def distinct(self) -> int:
        """Prompts that requests are drawn from; 0: each has its own."""
        again = AGAIN.match(self.text)
        return int(again[1] or DISTINCT) if again else 0

    @property
    def users(self) -> int:
        load = self.text.split(":")[1]
        return int(load[1:]) if load[0] == "c" else 0

    @property
    def rate_rps(self) -> float | None:
        load = self.text.split(":")[1]
        return float(load[1:]) if load[0] == "r" else None

    @property
    def seconds(self) -> float:
        return float(self.text.split(":")[2])

    def arms(self, names: list[str]) -> list[str]:
        """Return who is measured, in order."""
        if len(names) == 1:
            return names
        letters = (*self.text.split(":"), "ABA")[3]
        return [names["AB".index(letter)] for letter in letters]


class Then(argparse.Action):
    """Settings of a start, and the cells that follow them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        starts: list[tuple[str, list[str]]] = [*namespace.then]
        if option_string == "--then":
            starts.append((values, []))
        elif starts:
            starts[-1][1].append(values)
        else:
            parser.error("--then-cell: give --then before it")
        namespace.then = starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    # Another Tailrace: an earlier commit, or other settings.
    peers = ("vllm", "sglang", "tailrace", "none")
    parser.add_argument("--peer", choices=peers, default="none")
    parser.add_argument("--peer-command", default="", help="With {port}; must use dummy weights.")
    parser.add_argument("--gpu", default="0", help="Empty: the CPU, to try the script itself.")
    parser.add_argument("--arguments", default="", help="Added to `tailrace serve`.")
    parser.add_argument("--cell", action="append", required=True)
    parser.add_argument(
        "--then", action=Then, default=[], help="Instead of --arguments, for the cells that follow."
    )
    parser.add_argument("--then-cell", action=Then, dest="then")
    parser.add_argument(
        "--prefix-cache", action="store_true", help="Ours on; the peer's is its command's affair."
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--most-requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("gpu-serving"))
    asyncio.run(measure(parser.parse_args()))


def specs(arguments: argparse.Namespace) -> list[EngineSpec]:
    """Return ours and the peer, if there is one."""
    found = [own_spec(arguments, "tailrace", arguments.arguments)]
    if arguments.peer != "none":
        found.append(
            EngineSpec(
                name="other" if arguments.peer == "tailrace" else arguments.peer,
                kind=arguments.peer,
                command=tuple(shlex.split(arguments.peer_command)),
                prefix_cache=bool(arguments.prefix_cache),
            )
        )
    return found


def own_spec(arguments: argparse.Namespace, name: str, settings: str) -> EngineSpec:
    own = [
        sys.executable, "-m", "tailrace", "serve", "--host", "{host}", "--port", "{port}",
        "--model-path", str(arguments.model), "--load-format", "dummy",
        "--max-batch-size", "128", "--context-length", "8192", "--served-model-name", "m",
        *shlex.split(settings),
    ]  # fmt: skip
    cache = bool(arguments.prefix_cache)
    if not cache:
        own.append("--no-prefix-cache")
    if arguments.gpu:
        own += ["--gpus", arguments.gpu, "--gpu-memory-utilization", str(SHARE)]
    return EngineSpec(name=name, kind="tailrace", command=tuple(own), prefix_cache=cache)


async def measure(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    codec = FileCodec(arguments.model)
    maker = await PromptMaker.create(codec, corpus_text(None)[0], seed=SEED)
    rows: list[dict[str, Any]] = []
    own, *peers = specs(arguments)
    turns = [(own, arguments.cell)]
    for index, (settings, cells) in enumerate(arguments.then):
        then = own_spec(arguments, f"then{index or ''}", settings)
        turns.append((then, cells or arguments.cell))
    async with AsyncExitStack() as stack:
        # First: what ours leaves on the GPU at its end is told from what lay there before it.
        others = {spec.name: await started(spec, stack, arguments.out) for spec in peers}
        await warm(others, maker, arguments)
        for ours, cells in turns:
            async with AsyncExitStack() as for_now:
                server = {ours.name: await started(ours, for_now, arguments.out)}
                await warm(server, maker, arguments)
                await measure_cells(cells, server | others, maker, arguments, rows)
    print_table(rows, [spec.name for spec in peers])


async def started(spec: EngineSpec, stack: AsyncExitStack, out: Path) -> Server:
    """Start a server that the stack stops."""
    server = start(spec, out / f"{spec.name}.log", on_progress=lambda _: None)
    await stack.enter_async_context(server)
    print(f"{spec.name}: ready after {server.ready_s[-1]:.1f} s", flush=True)
    target = await inspect(server.endpoint, None)
    return Server(server.endpoint, target, server.extra_body, server.monitor())


async def measure_cells(
    cells: list[str],
    servers: dict[str, Server],
    maker: PromptMaker,
    arguments: argparse.Namespace,
    rows: list[dict[str, Any]],
) -> None:
    """Measure servers in turn, ours the first of them, and add what was found to the rows."""
    names = list(servers)
    for text in cells:
        cell = Cell(text)
        # Its own prompts, or caches that are on would know those of the cell before.
        own = maker.reseeded(FileCodec(arguments.model), seed=SEED + 1 + len(rows))
        work = await make_work(cell, own, arguments.most_requests)
        for turn, name in enumerate(cell.arms(names)):
            folder = arguments.out / f"{text.replace(':', '-')}-{names[0]}-{turn}-{name}"
            run = await measured(servers[name], work, folder, arguments, cell.seconds)
            row = figures(cell, name, run)
            rows.append(row)
            if name == names[0]:
                told = await fetch(servers[name].endpoint, "GET", "/metrics", timeout_s=30.0)
                with (arguments.out / "metrics.txt").open("ab") as file:
                    file.write(f"# {name}, after {text}\n".encode() + told.body + b"\n")
            print(line(row), flush=True)
            # Of a call that is cut short, what was measured stays.
            (arguments.out / "gpu_serving.json").write_text(json.dumps(rows))


async def measured(
    server: Server, work: Work, folder: Path, arguments: argparse.Namespace, seconds: float
) -> Run:
    """Run one arm, and end it when its window does: nothing in the drain is counted."""
    stop = asyncio.Event()
    enders: list[asyncio.Task[None]] = []

    async def end(state: LoadState) -> None:
        await state.has_started.wait()
        await asyncio.sleep(state.started_s - monotonic() + seconds)
        stop.set()

    def begin(state: LoadState) -> None:
        enders.append(asyncio.create_task(end(state)))

    return await run_trial(server, work, folder, options(arguments), stop=stop, on_state=begin)


def options(arguments: argparse.Namespace) -> TrialOptions:
    return TrialOptions(temperature=arguments.temperature, timeout_s=180.0)


async def warm(
    servers: dict[str, Server], maker: PromptMaker, arguments: argparse.Namespace
) -> None:
    """Send both kinds of traffic for a moment: what compiles at its first use does it now."""
    for source in ("longdoc", "chat70"):
        workload = Workload(source=source, users=16, think_s="0", output_tokens="32")
        schedule = build(workload, rate_rps=None, duration_s=3.0, max_requests=32, seed=5)
        work = Work(schedule, await maker.make_all(schedule), users=16)
        for name, server in servers.items():
            await run_trial(
                server,
                work,
                arguments.out / f"warm-{name}",
                options(arguments),
                stop=asyncio.Event(),
            )


async def make_work(cell: Cell, maker: PromptMaker, most: int) -> Work:
    if cell.users:
        workload = Workload(source=cell.source, users=cell.users, think_s="0")
        rate = None
    else:
        workload, rate = Workload(source=cell.source), cell.rate_rps
    schedule = build(workload, rate_rps=rate, duration_s=cell.seconds, max_requests=most, seed=7)
    if not cell.distinct:
        return Work(schedule, await maker.make_all(schedule), users=cell.users)
    # The lengths of the first requests are those of the prompts to draw from.
    kinds = schedule.arrivals[: cell.distinct]
    prompts = await maker.make_all(replace(schedule, arrivals=kinds))
    draw = random.Random(3)
    drawn = [draw.randrange(len(kinds)) for _ in schedule.arrivals]
    arrivals = [
        replace(arrival, input_tokens=kinds[index].input_tokens)
        for arrival, index in zip(schedule.arrivals, drawn, strict=True)
    ]
    return Work(
        replace(schedule, arrivals=type(schedule.arrivals)(arrivals)),
        [prompts[index] for index in drawn],
        users=cell.users,
    )


def figures(cell: Cell, name: str, run: Run) -> dict[str, Any]:
    """Return what happened inside the window."""
    ended = sorted(r.finished_s for r in run.records if r.is_ok and r.finished_s is not None)
    begin = cell.seconds / 5
    if cell.users:
        begin = ended[min(cell.users, len(ended)) - 1] if ended else 0.0
    end = max(r.dispatched_s or 0.0 for r in run.records)
    counted = [r for r in run.records if r.is_ok and begin < (r.finished_s or 0.0) <= end]
    gaps = sorted(
        later - earlier
        for record in run.records
        for earlier, later in zip(record.chunk_s, record.chunk_s[1:], strict=False)
        if begin < later <= end
    )
    tokens = sum(begin < at <= end for record in run.records for at in record.chunk_s)
    whole_s = [seconds for r in counted if (seconds := e2e_s(r)) is not None]
    span = end - begin
    return {
        "cell": cell.text,
        "engine": name,
        "counted": len(counted),
        "failed": sum(r.is_failure for r in run.records),
        # That it was interrupted is how an arm ends.
        "invalid": [r for r in run.verdict.reasons if "interrupted" not in r],
        "rps": len(counted) / span if span > 0 else 0.0,
        "chunks_s": tokens / span if span > 0 else 0.0,
        "users_s": cell.users / statistics.fmean(whole_s) if whole_s else 0.0,
        "ttft": points([ttft_s(r) for r in counted]),
        "tpot": points([tpot_s(r) for r in counted]),
        "e2e": points(whole_s),
        "itl": points(gaps),
        "machine": machine(run),
    }


def machine(run: Run) -> dict[str, float]:
    """Return what server and GPU told of themselves over the trial."""
    server, gpu = run.scrapes.get("server"), run.scrapes.get("gpu")
    found: dict[str, float] = {}
    for scrape, name, fold in (
        (gpu, "gpu0_utilisation", statistics.fmean),
        (gpu, "gpu0_power_w", statistics.fmean),
        (gpu, "gpu0_sm_clock_mhz", statistics.median),
        (gpu, "gpu0_held_back", statistics.fmean),
        (gpu, "gpu0_memory_bytes", max),
        (server, "running", max),
        (server, "waiting", max),
        (server, "kv_usage", max),
        (server, "preemptions_total", max),
        (server, "prefix_hits_total", max),
        (server, "generation_tokens_total", max),
    ):
        values = [] if scrape is None else scrape.values.get(name, [])
        known = [value for value in values if not math.isnan(value)]
        if known:
            found[name] = fold(known)
    found["readings"] = sum(len(scrape.at_s) for scrape in run.scrapes.values())
    return found


def points(values: list[Any]) -> dict[str, float]:
    ordered = sorted(v for v in values if v is not None)
    if not ordered:
        return {}
    return {f"p{p}": percentile(ordered, p) for p in (50, 95, 99)} | {"max": ordered[-1]}


def line(row: dict[str, Any]) -> str:
    def ms(name: str, *which: str) -> str:
        return "/".join(f"{1e3 * row[name][p]:.1f}" for p in which) if row[name] else "-"

    def seconds(name: str) -> str:
        found = row[name]
        return "/".join(f"{found[p]:.2f}" for p in ("p50", "p95", "p99")) if found else "-"

    text = (
        f"{row['cell']:<18} {row['engine']:<9} n {row['counted']:>4} {row['rps']:6.2f} req/s "
        f"{row['users_s']:6.2f} users/s {row['chunks_s']:6.0f} chunks/s | "
        f"ttft p50/p95/p99 {seconds('ttft')} s | tpot p50/p95 {ms('tpot', 'p50', 'p95')} ms | "
        f"itl p50/p95/p99/max {ms('itl', 'p50', 'p95', 'p99', 'max')} ms | e2e {seconds('e2e')} s"
    )
    told = row["machine"]
    text += " |" + "".join(f" {name} {value:.4g}" for name, value in told.items())
    if row["failed"] or row["invalid"]:
        text += f" | failed {row['failed']}; {'; '.join(row['invalid'])}"
    return text


def print_table(rows: list[dict[str, Any]], peers: list[str]) -> None:
    """Print ours over the peer's, with the spread between our own arms beside it."""
    for name in dict.fromkeys(load_of(row) for row in rows):
        here = [row for row in rows if load_of(row) == name]
        print(f"\n{name}")
        for row in here:
            print("  " + line(row))
        for ours in dict.fromkeys(row["engine"] for row in here):
            for peer in peers if ours not in peers else ():
                print_ratios(here, ours, peer)


def load_of(row: dict[str, Any]) -> str:
    """Return a cell without its arms: what was measured again may have had other ones."""
    return ":".join(row["cell"].split(":")[:3])


def print_ratios(rows: list[dict[str, Any]], name: str, peer: str) -> None:
    for label, read in (
        ("req/s", lambda r: r["rps"]),
        ("chunks/s", lambda r: r["chunks_s"]),
        ("users/s", lambda r: r["users_s"]),
        ("ttft p95", lambda r: r["ttft"].get("p95")),
        ("itl p99", lambda r: r["itl"].get("p99")),
        ("itl max", lambda r: r["itl"].get("max")),
        ("tpot p95", lambda r: r["tpot"].get("p95")),
        ("e2e p95", lambda r: r["e2e"].get("p95")),
    ):
        a, b = ([read(r) for r in rows if r["engine"] == side and read(r)] for side in (name, peer))
        if a and b:
            spread = f"its arms differ by {max(a) / min(a) - 1:.1%}" if len(a) > 1 else "one arm"
            ratio = statistics.fmean(a) / statistics.fmean(b)
            print(f"  {label:<9} {name} / {peer} {ratio:.3f} ({spread})")


if __name__ == "__main__":
    main()
