"""The block manager alone, without a model: what fits, what is lost, what it costs.

    python benchmarks/kv.py replay [--traces FOLDER] [--requests 600]
    python benchmarks/kv.py speed [--units 1000000] [--sequences 512]

`replay` runs backlogs of requests through the scheduler and the manager, a virtual step after the
other: all requests wait from the start (arrival times are left out), a step computes up to 2048
tokens, and an answer ends where the trace says, which only the driver knows. Compared at equal pools:

    tailrace   units of 8, blocks of 8/16/32, leases of the expected length, lending
    no-lend    the same, but a request starts only where its expected length can be leased
    lazy-16    blocks of 16 taken as tokens come; a prompt is admitted where it fits now; out of
               blocks, the youngest is preempted and recomputed
    reserve    blocks of 16, prompt + max_tokens reserved before a request starts

A client asks for `max_tokens`; without (chat) the whole context is reserved. `speed` times single
operations and a step of decodes on a large pool.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.bench.traffic.azure_conv import AZURE_CONV
from tailrace.bench.traffic.profile import draw
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
        """Token ids that are equal exactly where prefixes are: a number for each hash or request."""
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


def replay(policy: Policy, jobs: list[Job], pool_tokens: int, slots: int, max_tokens: int | None):
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
        started = time.perf_counter()
        step = scheduler.schedule()
        spent_s += time.perf_counter() - started
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
        started = time.perf_counter()
        for chunk in step.chunks:
            scheduler.commit(chunk)
        for sequence in done:
            needed += len(sequence.token_ids) - 1 - sequence.cached_tokens
            finished_hits += sequence.cached_tokens
            scheduler.finish(sequence)
        spent_s += time.perf_counter() - started
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


def azure(folder: Path | None, count: int) -> list[Job]:
    if folder is None:
        return [
            Job(arrival.input_tokens, arrival.output_tokens)
            for arrival in islice(draw(AZURE_CONV, seed=1), count)
        ]
    with (folder / "azure2023_conv.csv").open(encoding="utf-8") as lines:
        rows = islice(csv.DictReader(lines), count)
        return [Job(int(row["input_tokens"]), int(row["output_tokens"])) for row in rows]


def mooncake(folder: Path, count: int, longest: int = 32768) -> list[Job]:
    """Prompts that share blocks of 512 tokens; those beyond `longest` are left out, and counted."""
    jobs: list[Job] = []
    left_out = 0
    with (folder / "mooncake_conversation.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["input_tokens"] > longest:
                left_out += 1
                continue
            jobs.append(Job(row["input_tokens"], row["output_tokens"], tuple(row["hash_ids"])))
            if len(jobs) == count:
                break
    print(f"mooncake: {left_out} prompts beyond {longest} tokens left out")
    return jobs


def report(title: str, jobs: list[Job], pools: list[int], slots: int, max_tokens: int | None):
    asked = f"max_tokens {max_tokens}" if max_tokens else "no max_tokens"
    print(f"\n{title}: {len(jobs)} requests, {slots} slots, {asked}")
    print(
        f"{'pool':>8} {'policy':<9}{'running':>8}{'most':>6}{'used':>7}{'frag':>7}{'steps':>8}"
        f"{'preempt':>8}{'of lent':>8}{'recomp.':>9}{'hits':>7}{'lent':>7}{'32s':>6}{'us/step':>9}"
    )
    for pool in pools:
        for policy in POLICIES:
            o = replay(policy, jobs, pool, slots, max_tokens)
            print(
                f"{pool:>8} {policy.name:<9}{o.running:>8.2f}{o.most:>6}{o.used:>7.1%}"
                f"{o.fragmentation:>7.2%}{o.steps:>8}{o.preemptions:>8}{o.returned:>8}"
                f"{o.recomputed:>9}{o.hit_rate:>7.1%}{o.lent:>7.1f}{o.wide:>6.0%}{o.step_us:>9.1f}",
                flush=True,
            )


def run_replay(arguments: argparse.Namespace) -> None:
    count, folder = arguments.requests, arguments.traces
    jobs = longdoc(count)
    for slots in (1, 2, 4, 8):
        report(f"first text, batch {slots}", jobs[: count // 6], [32768], slots, 512)
    report("first text", jobs, [65536, 131072, 262144], 128, 512)
    report("first text", jobs, [131072, 262144], 128, None)
    report("azure2023_conv", azure(folder, 3 * count), [32768, 65536, 131072], 128, 1024)
    if folder is None:
        print("\nmooncake_conversation: no profile has its hash ids; name --traces")
        return
    report("mooncake_conversation", mooncake(folder, count), [262144, 524288, 1048576], 128, 2048)


# Speed


def timed(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def run_speed(arguments: argparse.Namespace) -> None:
    units, sequences = arguments.units, arguments.sequences
    print(f"{units} units of 8 tokens, {sequences} sequences")
    for name, prefix_cache in (("prefix cache", True), ("no prefix cache", False)):
        blocks = BlockManager(units, 8, prefix_cache=prefix_cache)
        rng = random.Random(0)
        tables = []
        opened = grown = committed = 0.0
        size = min(4096, units * 8 // (2 * sequences))
        for i in range(sequences):
            # Decodes cross a unit's border at different steps.
            length = size + i % 8
            tokens = list(range(i << 14, (i << 14) + length))
            started = time.thread_time()
            table = blocks.open(str(i), tokens, "", length + 512)
            opened += time.thread_time() - started
            grown += timed(lambda t=table, n=length: blocks.grow(t, n))
            committed += timed(lambda t=table, s=tokens, n=length: blocks.commit(t, s, n))
            tables.append((table, tokens))
        per = 1e6 / sequences
        print(
            f"{name}: a {size}-token prompt: open {opened * per:.1f} us, grow {grown * per:.1f} us,"
            f" commit {committed * per:.1f} us"
        )
        steps = list(decode_steps(blocks, tables, 256))
        print(
            f"{name}: a step of {sequences} decodes: median {statistics.median(steps):.1f} us, "
            f"p99 {sorted(steps)[len(steps) * 99 // 100]:.1f} us, worst {max(steps):.1f} us"
        )
        rng.shuffle(tables)
        closed = sum(timed(lambda t=table: blocks.close(t)) for table, _ in tables)
        print(f"{name}: close {closed * per:.1f} us")
        blocks.check_integrity()


def decode_steps(
    blocks: BlockManager, tables: list[tuple[Table, list[int]]], count: int
) -> Iterator[float]:
    """Time, in us, what the scheduler asks of the manager in a step of decodes."""
    lengths = [len(tokens) for _, tokens in tables]
    for _ in range(count):
        for i, (_, tokens) in enumerate(tables):
            tokens.append(7)
            lengths[i] += 1
        started = time.thread_time()
        blocks.advance([t for (t, _), n in zip(tables, lengths, strict=True) if n > t.capacity])
        for (table, _), end in zip(tables, lengths, strict=True):
            if end > table.capacity:
                blocks.grow(table, end)
        for (table, tokens), end in zip(tables, lengths, strict=True):
            if end >= table.commit_at:
                blocks.commit(table, tokens, end)
        yield (time.thread_time() - started) * 1e6


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
