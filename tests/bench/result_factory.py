"""A TEST FIXTURE: synthetic result folders, as `tailrace compare` would leave them.

Nothing here was measured. Each engine is a small queue: prompts are prefilled one after the
other, answers decode at a speed that falls with their number. Latencies, queues, KV use and the
highest rates therefore belong together, as in a real result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tailrace.bench.limits import Limit, read_limit
from tailrace.bench.records import Record, write_records
from tailrace.bench.result import (
    Comparison,
    Contender,
    Platform,
    Ratio,
    Search,
    Trial,
    write_result,
)
from tailrace.telemetry.request_log import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STARTED_UNIX_S = 1_796_000_000.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A queue that stands for an engine."""

    name: str
    engine: str
    strategy: str = "default"
    version: str = "1.2.3"
    prefill_tokens_per_s: float
    token_s: float
    """One output token alone; grows with the requests that decode."""
    crowding: float = 0.05
    kv_tokens: int = 24_000
    exports: tuple[str, ...] = ("running", "waiting", "kv_usage", "preemptions_total")
    restarts: int = 0
    out_of_memory: int = 0
    has_request_log: bool = False
    failing_share: float = 0.0
    commands: tuple[str, ...] = ("serve", "--port", "{port}")


TAILRACE = Engine(
    name="tailrace",
    engine="tailrace",
    strategy="chunked prefill 512",
    version="0.1.0",
    prefill_tokens_per_s=3700,
    token_s=0.011,
    exports=(
        "running",
        "waiting",
        "kv_usage",
        "kv_fragmentation",
        "preemptions_total",
        "draft_tokens_total",
        "accepted_tokens_total",
    ),
    has_request_log=True,
)
LLAMACPP = Engine(
    name="llamacpp",
    engine="llamacpp",
    version="b11434",
    prefill_tokens_per_s=2550,
    token_s=0.014,
    exports=("running", "waiting"),
    restarts=1,
    out_of_memory=1,
    failing_share=0.002,
)
VLLM = Engine(
    name="vllm-chunked-2048",
    engine="vllm",
    strategy="chunked prefill 2048",
    version="0.33.0",
    prefill_tokens_per_s=3500,
    token_s=0.0105,
    exports=("running", "waiting", "kv_usage", "preemptions_total"),
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the synthetic comparison consists of."""

    engines: tuple[Engine, ...] = (LLAMACPP, TAILRACE, VLLM)
    """The first is the baseline."""
    pairs: int = 6
    rates_rps: tuple[float, ...] = (2.0, 3.2)
    limits: tuple[str, ...] = ("p95_ttft=2", "p95_tpot=0.06")
    requests: int = 120
    platform: str = "1 x H200"
    gpus: tuple[str, ...] = ("NVIDIA H200",)
    price_per_hour: float | None = 3.2
    title: str = "Synthetic comparison"
    seed: int = 7
    team: tuple[dict[str, Any], ...] = ()
    is_interrupted: bool = False


@dataclass
class _Answered:
    records: list[Record]
    log: list[RequestRecord] = field(default_factory=list)


def make_result(folder: Path, setup: Setup | None = None) -> Comparison:
    """Write a synthetic result folder and return what stands in its `result.json`."""
    setup = setup or Setup()
    folder.mkdir(parents=True, exist_ok=True)
    limits = tuple(map(read_limit, setup.limits))
    comparison = Comparison(
        title=setup.title,
        command="tailrace compare plans/synthetic.toml --out out",
        started_unix_s=STARTED_UNIX_S,
        finished_unix_s=None if setup.is_interrupted else STARTED_UNIX_S + 7200,
        plan={
            "engine": [{"name": e.name} for e in setup.engines],
            "search": {},
            "team": list(setup.team),
        },
        traffic=(
            "Poisson arrivals; prompts of 32-128 tokens (70 %) or 512-2048 (30 %), "
            "answers of 48 tokens"
        ),
        limits=list(setup.limits),
        platform=Platform(
            name=setup.platform,
            machine={"Client machine": "Synthetic CPU, 16 of 16 CPUs usable", "Tailrace": "0.1.0"},
            gpus=list(setup.gpus),
            price_per_hour=setup.price_per_hour,
        ),
        contenders=[_contender(engine) for engine in setup.engines],
    )
    for pair in range(setup.pairs):
        for engine in setup.engines:
            _measure(folder, comparison, setup, engine, pair, limits)
    baseline = setup.engines[0].name
    comparison.ratios = [
        _ratio(comparison, engine.name, baseline, setup.pairs) for engine in setup.engines[1:]
    ]
    write_result(folder, comparison)
    return comparison


def _contender(engine: Engine) -> Contender:
    return Contender(
        name=engine.name,
        engine=engine.engine,
        strategy=engine.strategy,
        version=engine.version,
        model="SmolLM2-135M-Instruct",
        command=[engine.engine, *engine.commands],
        ready_s=[11.5, 10.9],
        restarts=engine.restarts,
        out_of_memory=engine.out_of_memory,
    )


def _measure(
    folder: Path,
    comparison: Comparison,
    setup: Setup,
    engine: Engine,
    pair: int,
    limits: Sequence[Limit],
) -> None:
    """One search by bisection, then the steady rates."""
    # The machine drifts from pair to pair, for every engine alike.
    drift = 1 + 0.05 * math.sin(2.1 * pair)
    speed = replace(engine, prefill_tokens_per_s=engine.prefill_tokens_per_s * drift)
    holds: list[float] = []
    fails: list[float] = []
    rate_rps = 3.0
    for step in range(6):
        seed = setup.seed + 100 * pair + step
        trial = _trial(folder, comparison, setup, speed, pair, "search", rate_rps, seed, limits)
        (holds if trial.outcome == "holds" else fails).append(rate_rps)
        low, high = max(holds, default=None), min(fails, default=None)
        if low is None:
            rate_rps /= 1.6
        elif high is None:
            rate_rps *= 1.6
        else:
            rate_rps = math.sqrt(low * high)
    low, high = max(holds, default=None), min(fails, default=None)
    is_resolved = low is not None and high is not None and low < high
    comparison.searches.append(
        Search(
            contender=engine.name,
            pair=pair,
            max_rps=math.sqrt(low * high) if is_resolved else None,
            holds_rps=low,
            fails_rps=high,
            reasons=[]
            if is_resolved
            else ["contradicting answers: it held above a rate it failed"],
        )
    )
    for number, rate in enumerate(setup.rates_rps):
        seed = setup.seed + 100 * pair + 50 + number
        _trial(folder, comparison, setup, speed, pair, "steady", rate, seed, limits)


def _trial(
    folder: Path,
    comparison: Comparison,
    setup: Setup,
    engine: Engine,
    pair: int,
    phase: str,
    rate_rps: float,
    seed: int,
    limits: Sequence[Limit],
) -> Trial:
    number = len(comparison.trials)
    where = f"trials/{number:04d}-{engine.name}-p{pair}-{rate_rps:.2f}rps"
    (folder / where).mkdir(parents=True)
    answered = _serve(engine, rate_rps, setup.requests, seed)
    write_records(folder / where / "records.jsonl", answered.records)
    readings = _readings(engine, answered.records, bool(setup.gpus))
    _write_lines(folder / where / "monitor.jsonl", readings)
    if answered.log:
        _write_lines(folder / where / "requests.jsonl", answered.log)
    counts = [limit.exceeded(answered.records) for limit in limits]
    holds = all(
        over <= limit.allowed_share * total
        for limit, (over, total) in zip(limits, counts, strict=True)
    )
    trial = Trial(
        contender=engine.name,
        phase=phase,
        pair=pair,
        rate_rps=rate_rps,
        seed=seed,
        duration_s=setup.requests / rate_rps,
        started_unix_s=STARTED_UNIX_S + 60 * number,
        folder=where,
        outcome="holds" if holds else "fails",
    )
    comparison.trials.append(trial)
    return trial


def _serve(engine: Engine, rate_rps: float, requests: int, seed: int) -> _Answered:
    """One prefill at a time, in order; decoding slows with the answers in flight."""
    random = np.random.default_rng(seed)
    due_s = np.cumsum(random.exponential(1 / rate_rps, requests))
    is_long = random.random(requests) < 0.3
    lengths = np.where(
        is_long, random.integers(512, 2049, requests), random.integers(32, 129, requests)
    )
    fails = random.random(requests) < engine.failing_share
    free_s, answered, ends = 0.0, _Answered([]), []
    for index in range(requests):
        at_s = float(due_s[index])
        sent_s = at_s + 0.0008
        started_s = max(free_s, sent_s + 0.002)
        free_s = started_s + float(lengths[index]) / engine.prefill_tokens_per_s
        crowd = sum(end > free_s for end in ends)
        token_s = engine.token_s * (1 + engine.crowding * crowd)
        gaps_s = token_s * random.gamma(9, 1 / 9, 47)
        chunk_s = [round(float(at), 6) for at in free_s + np.cumsum([0, *gaps_s])]
        record = Record(
            index=index,
            scheduled_s=round(at_s, 6),
            dispatched_s=round(at_s + 0.0003, 6),
            sent_s=round(sent_s, 6),
            planned_input_tokens=int(lengths[index]),
            planned_output_tokens=48,
            finished_s=chunk_s[-1],
        )
        if fails[index]:
            record.status, record.error = "stream", "the stream ended early"
            record.first_token_s, record.chunk_s = chunk_s[0], chunk_s[:5]
        else:
            record.status, record.first_token_s, record.chunk_s = "ok", chunk_s[0], chunk_s
            record.input_tokens, record.output_tokens = record.planned_input_tokens, 48
            record.finish_reason = "length"
        if engine.has_request_log:
            request_id = f"{engine.name}-{seed}-{index}"
            if "request_id" in Record.__struct_fields__:
                setattr(record, "request_id", request_id)  # noqa: B010  # not in every version
            answered.log.append(_logged(request_id, record, started_s))
        ends.append(chunk_s[-1])
        answered.records.append(record)
    return answered


def _logged(request_id: str, record: Record, started_s: float) -> RequestRecord:
    base_s = 5000.0  # the machine's monotonic clock at the trial's start
    sent_s = record.sent_s or record.scheduled_s
    return RequestRecord(
        request_id=request_id,
        route="/v1/completions",
        unix_s=STARTED_UNIX_S + record.scheduled_s,
        received_s=base_s + sent_s,
        prompt_ready_s=base_s + sent_s + 0.001,
        submitted_s=base_s + sent_s + 0.0015,
        scheduled_s=base_s + started_s,
        first_token_s=base_s + record.chunk_s[0] - 0.001,
        last_token_s=base_s + record.chunk_s[-1] - 0.001,
        finished_s=base_s + record.chunk_s[-1],
        prompt_tokens=record.planned_input_tokens,
        completion_tokens=48,
        is_streaming=True,
        finish_reason="length",
    )


def _readings(engine: Engine, records: Sequence[Record], has_gpu: bool) -> list[dict[str, Any]]:
    end_s = max(record.finished_s or 0.0 for record in records)
    found: list[dict[str, Any]] = []
    preempted, drafted = 0.0, 0.0
    for at_s in np.arange(0.0, end_s, 1.0):
        alive = [r for r in records if r.scheduled_s <= at_s < (r.finished_s or 0.0)]
        running = [r for r in alive if (r.first_token_s or 0.0) <= at_s]
        tokens = sum(r.planned_input_tokens + 24 for r in alive)
        usage = min(tokens / engine.kv_tokens, 1.0)
        preempted += usage > 0.95
        drafted += 40 * len(running)
        server = {
            "running": float(len(running)),
            "waiting": float(len(alive) - len(running)),
            "kv_usage": usage,
            "kv_fragmentation": 0.02 + 0.05 * usage,
            "preemptions_total": preempted,
            "draft_tokens_total": drafted,
            "accepted_tokens_total": 0.71 * drafted,
        }
        busy = min(0.25 + 0.12 * len(alive), 0.99) if alive else 0.0
        sources = {
            "server": {name: server[name] for name in engine.exports},
            "process": {
                "rss_bytes": 2.1e9 + 3e6 * float(at_s),
                "processes": 2.0,
                "cpu_cores": 1.4,
                "oom_kills_total": float(engine.out_of_memory),
            },
            "client": {"cpu_steal": 0.001, "cpu_busy": 0.1},
        }
        if has_gpu:
            sources["gpu"] = {
                "gpu0_utilisation": busy,
                "gpu0_memory_bytes": 61e9,
                "gpu0_power_w": 180 + 420 * busy,
                "gpu0_sm_clock_mhz": 1980 - 300 * busy,
            }
        found += [
            {"source": source, "at_s": float(at_s), "values": values}
            for source, values in sources.items()
        ]
    return found


def _write_lines(file: Path, values: Sequence[Any]) -> None:
    file.write_bytes(b"".join(msgspec.json.encode(value) + b"\n" for value in values))


def _ratio(comparison: Comparison, name: str, baseline: str, wanted: int) -> Ratio:
    best = {(s.contender, s.pair): s.max_rps for s in comparison.searches}
    pairs = [
        mine / theirs
        for pair in range(wanted)
        if (mine := best[name, pair]) is not None and (theirs := best[baseline, pair]) is not None
    ]
    if not pairs:
        return _no_ratio(name, baseline, pairs, None, ["no pair in which both searches resolved"])
    logs = np.log(pairs)
    estimate = float(np.exp(logs.mean()))
    if len(pairs) < 6:
        reasons = [f"{len(pairs)} pairs; an interval needs at least 6"]
        return _no_ratio(name, baseline, pairs, estimate, reasons)
    half = 2.571 * float(logs.std(ddof=1)) / math.sqrt(len(pairs))  # Student's t at 5 degrees
    low, high = estimate * math.exp(-half), estimate * math.exp(half)
    return Ratio(
        contender=name, baseline=baseline, pairs=pairs, estimate=estimate, low=low, high=high
    )


def _no_ratio(
    name: str, baseline: str, pairs: list[float], estimate: float | None, reasons: list[str]
) -> Ratio:
    return Ratio(
        contender=name,
        baseline=baseline,
        pairs=pairs,
        estimate=estimate,
        low=None,
        high=None,
        reasons=reasons,
    )
