"""Contenders without processes or clocks: a trial's latencies follow from its rate by a formula.

`Field` replaces what starts servers and what runs trials; every other part of a campaign is the
real one. A contender of capacity C has a TTFT that grows with rate / C, so that its highest rate
under a limit is C times a constant, and the ratio of two contenders is that of their capacities.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailrace.bench import campaign, session
from tailrace.bench.records import Record, write_records
from tailrace.bench.run import Run
from tailrace.bench.stats import Limits, summarise
from tailrace.bench.target import Target
from tailrace.bench.validity import Verdict
from tailrace.bench.wire import Endpoint
from tests.bench.mock_server import WordCodec

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT_TOKENS = 100_000


@dataclass
class FakeServer:
    spec: Any
    field: Field
    log_file: Path
    ready_s: list[float] = field(default_factory=list)
    version: str = "1.0"
    out_of_memory: int = 0
    context_tokens: int | None = None
    neighbours: tuple[str, ...] = ()
    has_died: bool = False
    warmed: int = 0

    async def __aenter__(self):
        if self.spec.name in self.field.stillborn:
            self.out_of_memory = self.field.starved
            raise self.field.stillborn[self.spec.name]
        self.ready_s.append(1.5)
        self.field.log.append(f"start {self.spec.name}")
        self.field.running.append(self.spec.name)
        return self

    async def __aexit__(self, kind, error, trace):
        self.field.exits.append(kind)
        self.field.log.append(f"stop {self.spec.name}")
        self.field.running.remove(self.spec.name)

    @property
    def endpoint(self):
        return Endpoint("http://x", "x", "127.0.0.1", 1)

    @property
    def command(self):
        return ["serve", self.spec.name, *self.spec.arguments]

    @property
    def extra_body(self):
        return {}

    def is_alive(self):
        return not self.has_died

    def death(self):
        return "ended with status 9\nlog" if self.has_died else ""

    def codec(self, model):
        return self.field.codecs.get(self.spec.name, self.field.codec)

    def monitor(self):
        return None

    async def warm_up(self, bodies, *, timeout_s=300.0):
        self.warmed += len(bodies)
        self.field.warm_prompts += [json.loads(body)["prompt"] for body in bodies]


@dataclass
class FakeCarried:
    reasons: tuple[str, ...]

    def __str__(self):
        return "client check: fake"


@dataclass
class Field:
    """All contenders of a test, and what they were asked."""

    capacities: dict[str, float]
    log: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    trials: list[tuple[str, Any]] = field(default_factory=list)
    """Contender and work, in the order measured."""
    codec: Any = field(default_factory=WordCodec)
    codecs: dict[str, Any] = field(default_factory=dict)
    warm_prompts: list[str] = field(default_factory=list)
    deaths: dict[int, str] = field(default_factory=dict)
    """Number of a trial (from 1) in which the server dies, and how."""
    invalid: dict[int, str] = field(default_factory=dict)
    stop_at: int = 0
    """Number of the trial in which the user presses Ctrl-C; 0: none."""
    stillborn: dict[str, BaseException] = field(default_factory=dict)
    starved: int = 0
    """How often a stillborn server says that it ran out of memory."""
    exits: list[type[BaseException] | None] = field(default_factory=list)
    """What each server was left by."""
    version: str = "1.0"
    neighbours: tuple[str, ...] = ()
    on_trial: Any = None
    peaks: list[Any] = field(default_factory=list)
    client_reasons: list[tuple[str, ...]] = field(default_factory=list)
    servers: list[FakeServer] = field(default_factory=list)

    def install(self, monkeypatch) -> None:
        monkeypatch.setattr(session, "start", self._start)
        monkeypatch.setattr(session, "inspect", self._inspect)
        monkeypatch.setattr(session, "LOG_SETTLE_S", 0.0)
        monkeypatch.setattr(campaign, "run_trial", self._run_trial)
        monkeypatch.setattr(campaign, "carry", self._carry)

    def _start(self, spec, log_file, *, on_progress=lambda _: None):
        server = FakeServer(spec, self, log_file, version=self.version, neighbours=self.neighbours)
        self.servers.append(server)
        return server

    async def _carry(self, peak, *, processes=0):
        self.peaks.append(peak)
        reasons = self.client_reasons.pop(0) if self.client_reasons else ()
        return FakeCarried(reasons)

    async def _inspect(self, endpoint, model):
        return Target(model or "mock", CONTEXT_TOKENS, "")

    async def _run_trial(self, server, work, folder, options, *, stop, on_state=lambda _: None):
        name = self.running[-1]
        self.trials.append((name, work))
        self.log.append(f"trial {name}")
        number = len(self.trials)
        if self.on_trial is not None:
            self.on_trial(number, folder)
        if number == self.stop_at:
            stop.set()
        records = [self._record(name, work, i, number) for i in range(len(work.prompts))]
        folder.mkdir(parents=True, exist_ok=True)
        write_records(folder / "records.jsonl", records)
        reasons = (self.invalid[number],) if number in self.invalid else ()
        if stop.is_set():
            reasons = ("interrupted: 0 of 1 requests ended",)
        if number in self.deaths:
            self.servers[-1].has_died = True
        return Run(
            title="",
            conditions={},
            records=records,
            stats=summarise(records),
            verdict=Verdict(reasons, ()),
            limits=Limits(),
            duration_s=work.schedule.duration_s,
        )

    def _record(self, name, work, index, number) -> Record:
        arrival = work.schedule.arrivals[index]
        base = Record(
            index=index,
            scheduled_s=arrival.arrival_s,
            planned_input_tokens=arrival.input_tokens,
            planned_output_tokens=arrival.output_tokens,
        )
        if number in self.deaths and index >= len(work.prompts) // 2:
            base.status = "connect"
            return base
        # Exponential with a mean that grows with the load; the same draws for every contender.
        mean_s = work.schedule.rate_rps / self.capacities[name]
        ttft_s = random.Random(f"{work.seed}:{index}").expovariate(1 / mean_s)
        base.status = "ok"
        base.dispatched_s = base.sent_s = arrival.arrival_s
        base.first_token_s = arrival.arrival_s + ttft_s
        base.finished_s = base.first_token_s + 0.1
        base.chunk_s = [base.first_token_s]
        base.input_tokens = arrival.input_tokens
        base.output_tokens = arrival.output_tokens
        return base
