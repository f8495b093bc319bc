"""Steps of chosen shapes, run and timed at warm-up, for `step_time.fit`.

    submit a | submit b | wait a | submit c | wait b | wait c      one shape: the quicker of b and c

The first may compile and page in; the next step is always queued before one is waited for, so that
what overlaps while serving overlaps here. Probes end with their time: a large model on a CPU is
fitted to the few that it had time for.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from tailrace.engine.scheduler import Chunk, Step
from tailrace.engine.sequence import Sequence
from tailrace.errors import DeviceMemoryError
from tailrace.types import FEW_DECODES, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from tailrace.clock import Clock
    from tailrace.engine.block_manager import BlockManager, Table
    from tailrace.engine.step_runner import Executed, StepRunner
    from tailrace.engine.step_time import StepLoad

log = structlog.get_logger("tailrace.engine")

_FEW_TOKENS = 64
_SHORT_TOKENS = 128
"""Of the shortest prompt, most of whose arithmetic hides behind the reading of the weights."""
_MANY_TOKENS = 4096
_LEAST_PROBES = 2
_QUICK_S = 0.1
"""Steps quicker than this are timed twice: a stall of the machine would weigh too much."""


@dataclass(frozen=True)
class Probe:
    """One shape: decodes of equal context beside one prompt's chunk."""

    decodes: int = 0
    context: int = 0
    """Positions that each decode attends to."""
    tokens: int = 0
    """Of the chunk."""
    start: int = 0
    """Tokens of the prompt that were computed before."""


def choose(
    *,
    max_batch_size: int,
    token_budget: int,
    context_length: int,
    kv_tokens: int,
    prompts_apart: bool = False,
) -> list[Probe]:
    """Return the shapes to time, the most telling first, such that each term of the fit varies.

    Args:
        max_batch_size: Most decodes.
        token_budget: Most rows of a step.
        context_length: Most tokens of one sequence.
        kv_tokens: Of KV that a step may hold at once.
        prompts_apart: Whether prompts go by a copy of the weights of their own: then a step of both
            kinds costs what neither tells alone, and decodes' arithmetic shows beyond a few.
    """
    most = max_batch_size

    def long(decodes: int) -> int:
        return max(1, min(_MANY_TOKENS, context_length - 1, kv_tokens // (2 * decodes)))

    few = min(_FEW_TOKENS, -(-long(most) // 2))

    def deep(tokens: int) -> int:
        return max(0, min(_MANY_TOKENS, context_length - tokens, kv_tokens // 2 - tokens))

    whole = max(1, min(token_budget, context_length - 1, kv_tokens // 2))
    quarter = max(1, whole // 4)
    half = max(1, most // 2)
    probes = [
        # In this order the first few tell the most: each brings in one more term.
        Probe(decodes=1, context=few),
        Probe(tokens=quarter),
        Probe(decodes=half, context=few),
        Probe(decodes=half, context=long(half)),
        # Prompts from their first token on do not tell attention from tokens (step_time.fit).
        Probe(tokens=quarter, start=deep(quarter)),
        Probe(tokens=max(1, min(_SHORT_TOKENS, whole // 8))),
        Probe(tokens=whole),
        Probe(decodes=1, context=long(1)),
        Probe(decodes=most, context=few),
        Probe(decodes=most, context=long(most)),
        Probe(tokens=max(1, whole // 2)),
        Probe(tokens=whole, start=deep(token_budget)),
    ]
    others = most - 1  # the prompt takes a place too
    beside = min(whole, token_budget - most)
    if others and beside > 0:
        probes.append(Probe(decodes=others, context=long(most), tokens=beside))
    if prompts_apart:
        some = min(others, FEW_DECODES)
        if some and beside > 0:
            probes.insert(2, Probe(decodes=some, context=few, tokens=max(1, beside // 4)))
        if most > FEW_DECODES:
            probes.insert(4, Probe(decodes=FEW_DECODES, context=few))
    return list(dict.fromkeys(probes))


class ProbeRun:
    """Times probes on a runner that serves nobody yet.

    Args:
        runner: Whose steps are timed.
        blocks: An empty pool over the runner's KV; given back empty.
        submit: Starts `runner.execute` on the runner's thread.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        runner: StepRunner,
        blocks: BlockManager,
        *,
        submit: Callable[..., Future[Any]],
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._blocks = blocks
        self._submit = submit
        self._clock = clock
        self._released: list[int] = []

    def run(self, probes: list[Probe], most_s: float) -> list[tuple[StepLoad, float]]:
        """Return (load, seconds) of as many probes as fit into `most_s`, at least two.

        One that finds no memory on the device, or no units in the pool, is left out.
        """
        begun_s = self._clock()
        samples = []
        for count, probe in enumerate(probes):
            if count >= _LEAST_PROBES and self._clock() - begun_s > most_s:
                break
            if self._units_of(probe) > self._blocks.num_units:
                continue
            try:
                samples.append(self._time(probe))
            except DeviceMemoryError as error:
                log.warning("probe_without_memory", probe=str(probe), error=str(error))
        return samples

    def _units_of(self, probe: Probe) -> int:
        unit = self._blocks.unit_tokens
        return probe.decodes * -(-probe.context // unit) - (-(probe.start + probe.tokens) // unit)

    def _time(self, probe: Probe) -> tuple[StepLoad, float]:
        step = self._step(probe)
        tables = [_open_table(self._blocks, chunk) for chunk in step.chunks]
        units = [unit for table in tables for unit in table.units]
        try:
            self._submit(self._runner.touch_kv, units).result()
            return self._runner.computed(step), self._measure(step)
        finally:
            for table in tables:
                self._blocks.close(table)
            self._released = [chunk.slot for chunk in step.chunks]

    def _measure(self, step: Step) -> float:
        """Run a step two or three times; return its seconds, the quickest but the first."""
        again = Step()
        for chunk in step.chunks:
            again.add(chunk)
        in_flight = deque([self._issue(step), self._issue(again)])
        try:
            if self._wait(in_flight) < _QUICK_S:
                in_flight.append(self._issue(again))
            return min([self._wait(in_flight) for _ in range(len(in_flight))])
        finally:  # nothing may run when the tables are given back
            while in_flight:
                with suppress(DeviceMemoryError):
                    self._wait(in_flight)

    def _step(self, probe: Probe) -> Step:
        chunks = [_chunk(slot, probe.context - 1, probe.context) for slot in range(probe.decodes)]
        if probe.tokens:
            chunks.append(_chunk(probe.decodes, probe.start, probe.start + probe.tokens))
        step = Step(released=self._released, admitted=[chunk.sequence for chunk in chunks])
        for chunk in chunks:
            step.add(chunk)
        return step

    def _issue(self, step: Step) -> Future[Executed]:
        return self._submit(self._runner.execute, self._runner.prepare(step, self._blocks))

    @staticmethod
    def _wait(in_flight: deque[Future[Executed]]) -> float:
        return in_flight.popleft().result().wait().device_s


def _chunk(slot: int, start: int, end: int) -> Chunk:
    samples = end - start == 1
    sequence = Sequence(
        request_id=f"probe-{slot}",
        token_ids=[0] * end,
        # A decode is past its prompt: the runner may serve the two by different weights.
        num_prompt=start if samples else end,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        max_output=1,
        arrival_s=0.0,
        slot=slot,
        num_computed=start,
    )
    # A prompt's inner chunk samples nothing; a decode does.
    return Chunk(sequence, slot, start, end, samples=samples, from_device=False)


def _open_table(blocks: BlockManager, chunk: Chunk) -> Table:
    sequence = chunk.sequence
    table = blocks.open(sequence.request_id, sequence.token_ids, "", chunk.end)
    blocks.grow(table, chunk.end)
    return table
