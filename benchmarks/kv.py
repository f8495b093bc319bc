"""The block manager alone, without a model: what fits, what is lost, what it costs.

    python benchmarks/kv.py replay [--traces FOLDER] [--requests 600]
    python benchmarks/kv.py speed [--units 1000000] [--sequences 512]

`replay` runs backlogs of requests through the scheduler and the manager, one virtual step after
another: all requests wait from the start (arrival times are left out), a step computes up to
2048 tokens, and an answer ends where the trace says, which only the driver knows. Compared at
equal pools:

    tailrace   units of 8, blocks of 8/16/32, leases of the expected length, lending
    no-lend    the same, but a request starts only where its expected length can be leased
    lazy-16    blocks of 16 taken as tokens come; a prompt is admitted where it fits now; out of
               blocks, the youngest is preempted and recomputed
    reserve    blocks of 16, prompt + max_tokens reserved before a request starts

A client asks for `max_tokens`; without (chat) the whole context is reserved. Beside each ratio of
requests that run at once stands the most that it could be: Tailrace's, were its pool full of
nothing but live tokens. `speed` times single operations and a step of decodes on a large pool.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.bench.traffic.schedule import Shape
from tailrace.bench.traffic.source import schedule_for
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.sequence import Sequence
from tailrace.types import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailrace.engine.block_manager import Table
    from tailrace.engine.scheduler import Step

CONTEXT = 8192
TOKEN_BUDGET = 2048
HASH_TOKENS = 512  # of a Mooncake block


@dataclass(frozen=True)
class Job:
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()

    def prompt(self, index: int) -> list[int]:
        """Token ids that are equal exactly where prefixes are: by hash, else by request."""
        own = (1 << 31) + index * (1 << 17)
        ids: list[int] = []
        for prefix_id in self.prefix_ids:
            ids += range(prefix_id * HASH_TOKENS, (prefix_id + 1) * HASH_TOKENS)
        ids += range(own, own + max(0, self.input_tokens - len(ids)))
        # The last hash of a prompt is of a block that is rarely full.
        return [token & 0xFFFFFFFF for token in ids[: self.input_tokens]]


# Policies


class NoLend(Scheduler):
    """Starts a request only on a full lease."""

    def _has_room(self, sequence: Sequence) -> bool:
        expected = self.blocks.units_for(sequence.num_prompt + sequence.expected_output)
        shared = self.blocks.units_for(sequence.length) - self.blocks.demand(
            sequence.token_ids, sequence.cache_salt, sequence.length
        )
        room = self.blocks.available_units if not self.running else self.blocks.unclaimed_units
        return expected - shared <= room or not self.running


class Lazy(Scheduler):
    """Takes blocks as tokens come; the youngest pays when there is none."""

    def _has_room(self, sequence: Sequence) -> bool:
        sequence.expected_output = 0
        tokens, salt = sequence.token_ids, sequence.cache_salt
        needed = self.blocks.demand(tokens, salt, sequence.length + 1)
        reserve = len(self.running)
        return needed + reserve <= self.blocks.available_units or not self.running

    def _grow(self, step: Step, sequence: Sequence, table: Table, end: int) -> int:
        while not self.blocks.can_grow(table, end):
            victim = self.running[-1]
            self._preempt(step, victim)
            if victim is sequence:
                return 0
        self.blocks.grow(table, end)
        return end


class Reserve(Scheduler):
    """Starts a request only where all that it may ever need is free, and keeps it for it."""

    def _has_room(self, sequence: Sequence) -> bool:
        sequence.expected_output = sequence.max_output
        whole = sequence.num_prompt + sequence.max_output
        tokens, salt = sequence.token_ids, sequence.cache_salt
        return self.blocks.demand(tokens, salt, whole) <= self.blocks.unclaimed_units


@dataclass(frozen=True)
class Policy:
    name: str
    scheduler: type[Scheduler]
    unit_tokens: int
    mixed: bool


POLICIES = (
    Policy("tailrace", Scheduler, 8, mixed=True),
    Policy("no-lend", NoLend, 8, mixed=True),
    Policy("lazy-16", Lazy, 16, mixed=False),
    Policy("reserve", Reserve, 16, mixed=False),
)


# Replay


@dataclass
class Outcome:
    steps: int = 0
    running: float = 0.0
    """Mean, while somebody waits."""
    most: int = 0
    fragmentation: float = 0.0
    """Mean: 1 - live tokens / (tokens held, or reserved where that keeps others out)."""
    used: float = 0.0
    """Mean share of the pool that holds live tokens, while somebody waits."""
    preemptions: int = 0
    returned: int = 0
    recomputed: int = 0
    hit_rate: float = 0.0
    lent: float = 0.0
    wide: float = 0.0
    step_us: float = 0.0

    @property
    def bound(self) -> float:
        """Requests of these live lengths that a pool of nothing but live tokens would hold."""
        return self.running / self.used if self.used else 0.0


def replay(
    policy: Policy, jobs: list[Job], pool_tokens: int, slots: int, max_tokens: int | None
) -> Outcome:
    blocks = BlockManager(
        pool_tokens // policy.unit_tokens, policy.unit_tokens, mixed_sizes=policy.mixed
    )
    scheduler = policy.scheduler(
        blocks, max_batch_size=slots, token_budget=max(TOKEN_BUDGET, slots)
    )
    context = max(CONTEXT, *(job.input_tokens + job.output_tokens + 1 for job in jobs))
    lengths = {}
    for index, job in enumerate(jobs):
        sequence = Sequence.from_request(
            EngineRequest(
                request_id=str(index),
                token_ids=job.prompt(index),
                sampling=SamplingParams(max_tokens=max_tokens or context),
                arrival_s=float(index),
            ),
            context,
        )
        lengths[sequence.request_id] = min(job.output_tokens, sequence.max_output)
        scheduler.add(sequence)
    return drive(scheduler, lengths, reserves=policy.scheduler is Reserve)


def drive(scheduler: Scheduler, lengths: dict[str, int], *, reserves: bool) -> Outcome:
    blocks = scheduler.blocks
    outcome = Outcome()
    saturated: list[tuple[int, float, int, float]] = []
    shares: list[float] = []
    computed = spent_s = 0
    needed = 0
    finished_hits = 0
    while scheduler.has_work:
        started = time.thread_time()
        step = scheduler.schedule()
        spent_s += time.thread_time() - started
        assert step.chunks, "nothing can go on"
        computed += step.num_tokens
        live = sum(s.num_computed for s in scheduler.running)
        live -= blocks.duplicate_units * blocks.unit_tokens
        held = blocks.held_units + (blocks.leased_units if reserves else 0)
        shares.append(1 - live / (held * blocks.unit_tokens))
        if scheduler.waiting:
            used = live / (blocks.num_units * blocks.unit_tokens)
            saturated.append((len(scheduler.running), used, blocks.lent_units, blocks.wide_share))
        outcome.most = max(outcome.most, len(scheduler.running))
        outcome.steps += 1
        done = []
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.token_ids.append(chunk.sequence.token_ids[-1] + 1 & 0xFFFFFFFF)
                if chunk.sequence.num_output >= lengths[chunk.sequence.request_id]:
                    done.append(chunk.sequence)
        started = time.thread_time()
        for chunk in step.chunks:
            scheduler.commit(chunk)
        for sequence in done:
            needed += len(sequence.token_ids) - 1 - sequence.cached_tokens
            finished_hits += sequence.cached_tokens
            scheduler.finish(sequence)
        spent_s += time.thread_time() - started
    columns = list(zip(*saturated, strict=True)) or [[0]] * 4
    outcome.running, outcome.used, outcome.lent, outcome.wide = map(statistics.fmean, columns)
    outcome.fragmentation = statistics.fmean(shares)
    outcome.preemptions = scheduler.preemptions_total
    outcome.returned = scheduler.returns_total
    outcome.recomputed = computed - needed
    outcome.hit_rate = finished_hits / max(1, needed + finished_hits)
    outcome.step_us = spent_s / outcome.steps * 1e6
    return outcome


# Work


def longdoc(count: int, max_output: int = 512) -> list[Job]:
    """Prompts of 300-6800 tokens (mean 4200, sd 1280), answers of any length up to 512."""
    rng = random.Random(1)
    jobs = []
    while len(jobs) < count:
        prompt = round(rng.gauss(4200, 1280))
        if 300 <= prompt <= 6800:
            jobs.append(Job(prompt, rng.randint(16, max_output)))
    return jobs


def traced(source: str, count: int, longest: int = 32768) -> list[Job]:
    """Requests of a trace file or a built-in profile; prompts beyond `longest` are left out."""
    schedule = schedule_for(source, Shape(max_requests=count), seed=1)
    assert schedule.block_tokens in (0, HASH_TOKENS)
    kept = [a for a in schedule.arrivals if a.input_tokens <= longest]
    print(
        f"\n{schedule.source}: {len(schedule.arrivals) - len(kept)} of {len(schedule.arrivals)} "
        f"requests left out, their prompts are beyond {longest} tokens"
    )
    return [Job(a.input_tokens, min(a.output_tokens, 8000), a.prefix_ids) for a in kept]


def report(
    title: str, jobs: list[Job], pools: list[int], slots: int, max_tokens: int | None
) -> None:
    asked = f"max_tokens {max_tokens}" if max_tokens else "no max_tokens"
    print(f"\n{title}: {len(jobs)} requests, {slots} slots, {asked}")
    print(
        f"{'pool':>8} {'policy':<9}{'running':>8}{'most':>6}{'used':>7}{'frag':>7}{'steps':>8}"
        f"{'preempt':>8}{'of lent':>8}{'recomp.':>9}{'hits':>7}{'lent':>7}{'32s':>6}{'us/step':>9}"
    )
    for pool in pools:
        outcomes = {}
        for policy in POLICIES:
            o = outcomes[policy.name] = replay(policy, jobs, pool, slots, max_tokens)
            print(
                f"{pool:>8} {policy.name:<9}{o.running:>8.2f}{o.most:>6}{o.used:>7.1%}"
                f"{o.fragmentation:>7.2%}{o.steps:>8}{o.preemptions:>8}{o.returned:>8}"
                f"{o.recomputed:>9}{o.hit_rate:>7.1%}{o.lent:>7.1f}{o.wide:>6.0%}{o.step_us:>9.1f}",
                flush=True,
            )
        ours, lazy, reserve = (outcomes[name] for name in ("tailrace", "lazy-16", "reserve"))
        if ours.used:
            print(
                f"{'':>8} running over reserve {ours.running / reserve.running:.3f}, at most "
                f"{ours.bound / reserve.running:.3f}; over lazy {ours.running / lazy.running:.4f}, "
                f"at most {ours.bound / lazy.running:.3f}; preempted {ours.preemptions} against "
                f"{lazy.preemptions}"
            )


def run_replay(arguments: argparse.Namespace) -> None:
    count, folder = arguments.requests, arguments.traces
    jobs = longdoc(count)
    for slots in (1, 2, 4, 8):
        report(f"first text, batch {slots}", jobs[: count // 6], [32768], slots, 512)
    report("first text", jobs, [65536, 131072, 262144], 128, 512)
    report("first text", jobs, [131072, 262144], 128, None)
    azure = str(folder / "azure2023_conv.csv") if folder else "azure-conv"
    report("azure conversation", traced(azure, 3 * count), [32768, 65536, 131072], 128, 1024)
    mooncake = str(folder / "mooncake_conversation.jsonl") if folder else "mooncake-conversation"
    report("mooncake conversation", traced(mooncake, count), [262144, 524288], 128, 2048)
    reasoning = "servegen-deepseek-r1"
    if folder:
        reasoning = str(folder / "servegen_deepseek_r1_reason.csv")
    report("reasoning", traced(reasoning, count, 16000), [65536, 131072], 128, 8192)


# Speed


def run_speed(arguments: argparse.Namespace) -> None:
    units, sequences = arguments.units, arguments.sequences
    print(f"{units} units of 8 tokens, {sequences} sequences; CPU time, us")
    for name, prefix_cache in (("prefix cache", True), ("no prefix cache", False)):
        blocks = BlockManager(units, 8, prefix_cache=prefix_cache)
        length = min(4096, units * 8 // (2 * sequences))
        running, costs = open_all(blocks, sequences, length)
        costs["close"] = 0.0
        steps = list(decode_steps(blocks, running, 256))
        for table, _ in random.Random(0).sample(running, len(running)):
            costs["close"] += seconds(blocks.close, table)
        blocks.check_integrity()
        per = ", ".join(f"{what} {cost / sequences * 1e6:.1f}" for what, cost in costs.items())
        print(f"{name}: a sequence of {length} tokens: {per}")
        looking, growing, committing = zip(*steps, strict=True)
        both = [a + b for a, b in zip(growing, committing, strict=True)]
        for what, times in (
            ("looking who needs something", looking),
            ("growing", growing),
            ("committing", committing),
            ("growing and committing", both),
        ):
            column = sorted(times)
            # The quickest is what the work takes; on a busy machine the others are its company.
            print(
                f"{name}: a step of decodes, {what}: quickest {column[0]:.1f}, mean "
                f"{statistics.fmean(column):.1f}, median {statistics.median(column):.1f}, "
                f"p99 {column[len(column) * 99 // 100]:.1f}"
            )


def seconds(work: Callable[..., object], *arguments: object) -> float:
    started = time.thread_time()
    work(*arguments)
    return time.thread_time() - started


def open_all(
    blocks: BlockManager, count: int, length: int
) -> tuple[list[tuple[Table, list[int]]], dict[str, float]]:
    """Open sequences whose decodes cross a unit's border at different steps."""
    running: list[tuple[Table, list[int]]] = []
    costs = dict.fromkeys(("open", "grow", "commit"), 0.0)
    for i in range(count):
        end = length + i % 8
        tokens = list(range(i << 14, (i << 14) + end))
        started = time.thread_time()
        table = blocks.open(str(i), tokens, "", end + 512)
        costs["open"] += time.thread_time() - started
        costs["grow"] += seconds(blocks.grow, table, end)
        costs["commit"] += seconds(blocks.commit, table, tokens, end)
        running.append((table, tokens))
    return running, costs


def decode_steps(
    blocks: BlockManager, running: list[tuple[Table, list[int]]], count: int
) -> Iterator[tuple[float, float, float]]:
    """Time, in us, a step of decodes: looking who needs something, growing, committing."""
    lengths = [len(tokens) for _, tokens in running]
    for _ in range(count):
        for i, (_, tokens) in enumerate(running):
            tokens.append(7)
            lengths[i] += 1
        times = [time.thread_time()]
        pairs = list(zip(running, lengths, strict=True))
        short = [(table, end) for (table, _), end in pairs if end > table.capacity]
        full = [(table, ids, end) for (table, ids), end in pairs if end >= table.commit_at]
        times.append(time.thread_time())
        blocks.advance(table for table, _ in short)
        for table, end in short:
            if end > table.capacity:  # its lease did not promise more
                blocks.grow(table, end)
        times.append(time.thread_time())
        for table, tokens, end in full:
            blocks.commit(table, tokens, end)
        times.append(time.thread_time())
        looking, growing, committing = (b - a for a, b in pairwise(times))
        yield looking * 1e6, growing * 1e6, committing * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("replay")
    command.add_argument("--traces", type=Path, help="folder with azure2023_conv.csv and others")
    command.add_argument("--requests", type=int, default=600)
    command.set_defaults(run=run_replay)
    command = commands.add_parser("speed")
    command.add_argument("--units", type=int, default=1_000_000)
    command.add_argument("--sequences", type=int, default=512)
    command.set_defaults(run=run_speed)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
