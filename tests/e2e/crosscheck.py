"""One Mooncake export, replayed by our client and by another tool against the same server.

The server is a scripted queue that logs what came (`crosscheck_server`), so there are three
accounts of every request, joined by X-Request-Id: what the client says, what the server saw, and
what the trace and the script make of it (`queue_model`, in virtual time). Prompts are each tool's
own text; that they agree means equal lengths, times, answers and shared beginnings.

Latencies of other tools start where the request is sent, ours where it was due. Both are compared:
`Replayed.ttft_s` is from the send for everybody, `Replayed.due_ttft_s` is what our report shows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.bench.codec import FileCodec
from tailrace.bench.load import event_loop
from tailrace.bench.prompts import PromptMaker, corpus_text
from tailrace.bench.stats import percentile
from tailrace.bench.target import Target
from tailrace.bench.traffic.export import write_mooncake
from tailrace.bench.traffic.schedule import Shape
from tailrace.bench.traffic.source import schedule_for
from tailrace.bench.traffic.workload import Workload, build
from tailrace.bench.trial import Server, TrialOptions, Work, run_trial
from tailrace.bench.wire import fetch, resolve
from tests.bench.queue_model import latencies_s
from tests.bench.scripted_queue import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCRIPT = Script(slots=3, prefill_s=0.05, token_s=0.01)
"""Three slots are busy two thirds of the time at RATE_RPS: nearly half of the requests wait."""
RATE_RPS = 6.0
MODEL = "mock"
SEED = 3
CACHE_BLOCK = 16
"""Tokens in a block of a server's prefix cache, as most have it."""
TOOL_TIMEOUT_S = 300.0
PERCENTS = (50, 95)


@dataclass(frozen=True)
class Replayed:
    """What one client's replay came to, in order of the trace's rows; times in seconds."""

    client: str
    failed: int
    prompts: list[list[int]]
    """Token ids, as the server read them."""
    asked_tokens: list[int]
    arrived_s: list[float]
    """At the server, on its clock."""
    ttft_s: list[float]
    """From the send, as the client says. All three are of complete requests."""
    e2e_s: list[float]
    tpot_s: list[float]
    """Of requests of two tokens or more."""
    gap_s: list[float]
    """Between chunks, of all requests together; empty where the tool does not tell."""
    due_ttft_s: tuple[float, ...] = ()
    """From the schedule: ours alone."""
    due_e2e_s: tuple[float, ...] = ()
    printed: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """The percentiles of PERCENTS in the tool's own summary, by its own rule of percentiles."""
    reasons: tuple[str, ...] = ()
    """Why the client calls its own run invalid."""

    @property
    def lengths(self) -> list[int]:
        """Prompt tokens, as the server counted them."""
        return list(map(len, self.prompts))

    @property
    def figures(self) -> dict[str, list[float]]:
        """What the client reports, from the send."""
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "gap": self.gap_s, "e2e": self.e2e_s}


def export(file: Path, *, duration_s: float) -> list[dict[str, Any]]:
    """Write a trace with shared prefixes by the project's own exporter; return its rows."""
    workload = Workload(source="mooncake-synthetic", max_input_tokens=3000, max_output_tokens=40)
    schedule = build(workload, rate_rps=RATE_RPS, duration_s=duration_s, seed=SEED)
    write_mooncake(schedule, None, file)
    return [json.loads(line) for line in file.read_text().splitlines()]


PROGRAMS = {"aiperf": "TAILRACE_AIPERF", "guidellm": "TAILRACE_GUIDELLM"}
"""The other tools, and the variables that name their programs (else they are sought on PATH)."""


def program_of(tool: str) -> Path | None:
    """Return the tool's program, if it is installed."""
    named = os.environ.get(PROGRAMS[tool]) or shutil.which(tool)
    return Path(named) if named and Path(named).is_file() else None


# --- the script, in virtual time ------------------------------------------------------------------


def scripted(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return what every latency is, if each request comes exactly when its row says."""
    times_s = np.array([row["timestamp"] / 1e3 for row in rows])
    tokens = [row["output_length"] for row in rows]
    services_s = np.array([SCRIPT.service_s(count) for count in tokens])
    e2e_s = latencies_s(times_s, services_s, servers=SCRIPT.slots)
    return {
        "ttft": sorted(e2e_s - services_s + SCRIPT.first_s()),
        "tpot": [SCRIPT.token_s for count in tokens if count > 1],
        "gap": [SCRIPT.token_s] * (sum(tokens) - len(tokens)),
        "e2e": sorted(e2e_s),
    }


def planned_reuse(rows: Sequence[dict[str, Any]]) -> int:
    """Return the prompt tokens in leading whole blocks that an earlier row has, too."""
    cut = [list(row["hash_ids"][: row["input_length"] // 512]) for row in rows]
    return 512 * reused_blocks(cut)


def reuse(prompts: Sequence[Sequence[int]]) -> int:
    """Return the prompt tokens that a prefix cache without limits would have known."""
    blocks = [
        [tuple(ids[at : at + CACHE_BLOCK]) for at in range(0, len(ids), CACHE_BLOCK)]
        for ids in prompts
    ]
    whole = [[block for block in chain if len(block) == CACHE_BLOCK] for chain in blocks]
    return CACHE_BLOCK * reused_blocks(whole)


def reused_blocks(chains: Sequence[Sequence[Any]]) -> int:
    """Return how many leading blocks of a chain came before with all that precede them."""
    seen: set[int] = set()
    found = 0
    for chain in chains:
        link, is_known = 0, True
        for block in chain:
            link = hash((link, block))
            is_known = is_known and link in seen
            found += is_known
            seen.add(link)
    return found


def arrival_errors_s(rows: Sequence[dict[str, Any]], replayed: Replayed) -> list[float]:
    """Return, sorted, how late each request came, counted from the one that was least late."""
    late_s = [
        at_s - row["timestamp"] / 1e3 for row, at_s in zip(rows, replayed.arrived_s, strict=True)
    ]
    return sorted(value - min(late_s) for value in late_s)


# --- our client -----------------------------------------------------------------------------------


def replay_ours(trace: Path, url: str, tokenizer: Path, folder: Path) -> Replayed:
    """Replay with the project's own client, prompts and all."""
    return event_loop.run(_replay_ours(trace, url, tokenizer, folder))


async def _replay_ours(trace: Path, url: str, tokenizer: Path, folder: Path) -> Replayed:
    schedule = schedule_for(str(trace), Shape(), seed=SEED)
    text, _ = corpus_text(None)
    maker = await PromptMaker.create(FileCodec(tokenizer), text, seed=SEED)
    work = Work(schedule, await maker.make_all(schedule), seed=SEED)
    endpoint = await resolve(url)
    server = Server(endpoint, Target(MODEL, None, ""))
    options = TrialOptions(timeout_s=60.0, processes=1)
    run = await run_trial(server, work, folder, options, stop=asyncio.Event())
    log = by_id(await _log(url))
    records = sorted(run.records, key=lambda record: record.index)
    good = [r for r in records if r.is_ok]
    entries = [log[record.request_id] for record in records]
    return Replayed(
        client="tailrace",
        failed=run.stats.failed,
        ttft_s=[r.first_token_s - r.dispatched_s for r in good],
        e2e_s=[r.finished_s - r.dispatched_s for r in good],
        tpot_s=list(run.stats.tpot.ordered),
        gap_s=list(run.stats.gap.ordered),
        due_ttft_s=run.stats.ttft.ordered,
        due_e2e_s=run.stats.e2e.ordered,
        reasons=tuple(run.verdict.reasons),
        **_seen(entries),
    )


# --- AIPerf ---------------------------------------------------------------------------------------


def aiperf_command(program: Path, trace: Path, url: str, folder: Path) -> list[str]:
    """Return the command that replays the trace at its own times."""
    options = (
        f"profile --model {MODEL} --url {url} --endpoint-type completions --streaming "
        f"--input-file {trace} --custom-dataset-type mooncake-trace --fixed-schedule "
        f"--fixed-schedule-auto-offset --tokenizer {HUB_NAME} --use-server-token-count "
        "--connection-reuse-strategy never --no-gpu-telemetry --no-server-metrics --ui none "
        f"--random-seed {SEED} --output-artifact-dir {folder}"
    )
    return [str(program), *options.split()]


HUB_NAME = "local/tokenizer"
AIPERF_METRICS = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "gap": "inter_chunk_latency",
    "e2e": "request_latency",
}


def hub_of(tokenizer: Path, folder: Path) -> dict[str, str]:
    """Lay a tokenizer out as a Hugging Face cache; return the environment that reads only it.

    AIPerf's decoding processes take no folder as a tokenizer, only a repository of that cache.
    """
    revision = "0" * 40
    repository = folder / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(tokenizer / name, snapshot / name)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    # Its own caches, too, belong to this run alone.
    return offline | {"HF_HOME": str(folder), "HOME": str(folder)}


def replay_aiperf(trace: Path, url: str, tokenizer: Path, folder: Path) -> Replayed:
    """Replay with AIPerf, and read its per-request export."""
    program = program_of("aiperf")
    assert program is not None
    environment = os.environ | hub_of(tokenizer, folder / "hf")
    done = subprocess.run(
        aiperf_command(program, trace, url, folder / "artifacts"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = (folder / "artifacts" / "profile_export.jsonl").read_text().splitlines()
    # Conversations are numbered as the rows of the trace.
    records = sorted(map(json.loads, lines), key=lambda r: r["metadata"]["conversation_id"])
    log = by_id(asyncio.run(_log(url)))
    good = [record["metrics"] for record in records if not record.get("error")]
    return Replayed(
        client="aiperf",
        failed=len(records) - len(good),
        **{f"{name}_s": _aiperf_s(good, theirs) for name, theirs in AIPERF_METRICS.items()},
        printed={
            name: _printed_s(folder / "artifacts" / "profile_export_aiperf.json", theirs)
            for name, theirs in AIPERF_METRICS.items()
        },
        **_seen([log[record["metadata"]["x_request_id"]] for record in records]),
    )


def _printed_s(file: Path, name: str) -> tuple[float, ...]:
    found = json.loads(file.read_text())[name]
    assert found["unit"] == "ms"
    return tuple(found[f"p{percent}"] / 1e3 for percent in PERCENTS)


def _aiperf_s(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    found = [record[name] for record in records if name in record]
    assert all(value["unit"] == "ms" for value in found)
    values = [value["value"] for value in found]
    lists = [value if isinstance(value, list) else [value] for value in values]
    return [value_ms / 1e3 for value_ms in itertools.chain(*lists)]


# --- GuideLLM -------------------------------------------------------------------------------------


def guidellm_command(
    program: Path, trace: Path, url: str, tokenizer: Path, file: Path
) -> list[str]:
    """Return the command that replays the trace at its own times: it counts them in seconds."""
    options = (
        "run --disable-console-interactive "
        f"--backend kind=openai_http,target={url},model={MODEL},request_format=/v1/completions,"
        "http2=false --profile kind=replay,schedule_turn=timestamp,time_scale=0.001 "
        f"--tokenizer kind=hf_auto,model={tokenizer} "
        f"--data kind=mooncake,source.kind=json_file,source.path={trace} "
        f"--output kind=json,path={file}"
    )
    return [str(program), *options.split()]


def replay_guidellm(trace: Path, url: str, tokenizer: Path, folder: Path) -> Replayed:
    """Replay with GuideLLM, and read the requests of its report."""
    program = program_of("guidellm")
    assert program is not None
    folder.mkdir()
    done = subprocess.run(
        guidellm_command(program, trace, url, tokenizer, folder / "report.json"),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    requests, metrics = benchmark["requests"], benchmark["metrics"]
    good = requests["successful"]
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    # Its "time per output token" counts the first one, too; ours is its inter-token latency, whose
    # percentiles it takes over tokens (each request's mean as often as it has tokens).
    return Replayed(
        client="guidellm",
        failed=len(requests["errored"]) + len(requests["incomplete"]),
        ttft_s=[request["time_to_first_token_ms"] / 1e3 for request in good],
        e2e_s=[request["request_latency"] for request in good],
        tpot_s=[r["inter_token_latency_ms"] / 1e3 for r in good if r["output_tokens"] > 1],
        gap_s=[],
        printed={
            "ttft": _summary(metrics["time_to_first_token_ms"], 1e-3),
            "e2e": _summary(metrics["request_latency"], 1.0),
        },
        **_seen(by_lengths(asyncio.run(_log(url)), rows)),
    )


def _summary(metric: dict[str, Any], unit_s: float) -> tuple[float, ...]:
    percentiles = metric["successful"]["percentiles"]
    return tuple(percentiles[f"p{percent}"] * unit_s for percent in PERCENTS)


# --- what the server saw --------------------------------------------------------------------------


async def _log(url: str) -> list[dict[str, Any]]:
    """Return the server's entries in order of arrival."""
    answer = await fetch(await resolve(url), "GET", "/log", timeout_s=30)
    return sorted(json.loads(answer.body), key=lambda entry: entry["arrived_s"])


def by_id(log: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the entries by X-Request-Id."""
    return {entry["request_id"]: entry for entry in log}


def by_lengths(
    log: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the entry of each row, for a tool that sends no id.

    Of the entries whose answer is as long as the row's, it is the first to come of those whose
    prompt is nearest in length.

    Raises:
        AssertionError: The server saw other numbers of answers than the trace has.
    """
    asked = Counter(entry["max_tokens"] for entry in log)
    wanted = Counter(row["output_length"] for row in rows)
    assert asked == wanted, f"answer lengths {asked}, not the trace's {wanted}"
    left = list(log)
    found: dict[int, dict[str, Any]] = {}
    # Exact lengths first, so that a prompt that came out wrong takes nobody's place.
    for slack in (0, 10**9):
        for place, row in enumerate(rows):
            near = [
                (abs(len(entry["ids"]) - row["input_length"]), order)
                for order, entry in enumerate(left)
                if entry["max_tokens"] == row["output_length"]
            ]
            if place not in found and near and min(near)[0] <= slack:
                found[place] = left.pop(min(near)[1])
    return [found[place] for place in range(len(rows))]


def _seen(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "prompts": [entry["ids"] for entry in entries],
        "asked_tokens": [entry["max_tokens"] for entry in entries],
        "arrived_s": [entry["arrived_s"] for entry in entries],
    }


REPLAYS: dict[str, Callable[[Path, str, Path, Path], Replayed]] = {
    "tailrace": replay_ours,
    "aiperf": replay_aiperf,
    "guidellm": replay_guidellm,
}


def at(values: Sequence[float], percent: float) -> float:
    """Return a percentile of values in any order, in seconds."""
    return float(percentile(sorted(values), percent))


PERCENTILE_RULES: dict[str, Callable[[Sequence[float], float], float]] = {
    "aiperf": lambda values, percent: float(np.percentile(values, percent)),
    "guidellm": lambda values, percent: sorted(values)[int(percent * len(values) / 100)],
}
"""How a tool's summary takes percentiles: AIPerf's lie between two requests; GuideLLM's are a
request's own, as ours, but of two that share a rank (the median of an even number) the later."""
