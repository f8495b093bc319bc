"""`tailrace bench replay`: traffic, prompts, load, verdict, report, in that order."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tailrace.bench import machine
from tailrace.bench.codec import Codec, FileCodec, ServerCodec
from tailrace.bench.engines.adapter import LOOPBACK, option
from tailrace.bench.load import event_loop
from tailrace.bench.masking import masked
from tailrace.bench.metrics_source import source_at
from tailrace.bench.monitor import Monitor
from tailrace.bench.progress import Progress
from tailrace.bench.prompts import PromptMaker, corpus_text
from tailrace.bench.report import require_report, write_report
from tailrace.bench.stats import Limits
from tailrace.bench.table import print_run
from tailrace.bench.target import Target, check_streaming, inspect
from tailrace.bench.traffic.schedule import Shape
from tailrace.bench.traffic.source import schedule_for
from tailrace.bench.trial import Server, TrialOptions, Work, run_trial
from tailrace.bench.wire import resolve
from tailrace.clock import monotonic
from tailrace.errors import ConfigError
from tailrace.telemetry.gpu import Gpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailrace.bench.limits import Limit
    from tailrace.bench.load import LoadState
    from tailrace.bench.prompts import Prompt
    from tailrace.bench.run import Run
    from tailrace.bench.traffic.schedule import Schedule
    from tailrace.bench.wire import Endpoint

EXIT_OK = 0
EXIT_FAILED = 1
"""At least one request failed."""
EXIT_INVALID = 3
"""The run cannot be believed; its reasons are printed first."""
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What `tailrace bench replay` takes; one field an option, `_` for `-`, units in the name."""

    trace: str
    """A trace file's path, or a profile's name (`azure-conv`)."""
    url: str = "http://127.0.0.1:8001"
    out_dir: Path = field(default_factory=lambda: Path("replay"))
    """Gets records.jsonl, summary.json and report.html; made where it is missing."""
    model: str | None = None
    """None takes the first that /v1/models lists."""
    api_key: str = ""
    rate_scale: float = 1.0
    """Multiplies the trace's arrival rate."""
    duration_s: float | None = None
    """Seconds of arrivals; answers are then waited for."""
    max_requests: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    seed: int = 0
    """Of the profile's draw, the prompts' text and the sampling."""
    temperature: float = 0.7
    timeout_s: float = 600.0
    """A request not complete so long after its scheduled time has failed."""
    text_file: Path | None = None
    """Text that prompts are cut from; None takes Python's own language reference."""
    tokenizer: Path | None = None
    """A folder with tokenizer.json; None asks the server's /tokenize and /detokenize."""
    max_lag_s: float = 0.1
    """The client's p99 lag beyond which the run is invalid."""
    limits: Limits = field(default_factory=Limits)
    """Bounds on each request, for goodput."""
    limit: tuple[Limit, ...] = ()
    """Bounds on percentiles, such as `p95_ttft=2.0`; the report says whether each holds."""
    processes: int = 0
    """Client processes; 0 takes as many as the offered load needs."""
    title: str = ""
    """Of the report; empty names the trace."""
    command: str = ""
    """For the report; empty takes this process's command line."""

    def __post_init__(self) -> None:
        """Check every value that no part of the run checks itself.

        Raises:
            ConfigError: A value is out of range.
        """
        _ = self.trial

    @property
    def trial(self) -> TrialOptions:
        """How it is measured."""
        return TrialOptions(
            temperature=self.temperature,
            timeout_s=self.timeout_s,
            max_lag_s=self.max_lag_s,
            limits=self.limit,
            processes=self.processes,
            goodput=self.limits,
        )

    @property
    def shape(self) -> Shape:
        """How the trace becomes the run."""
        return Shape(
            rate_scale=self.rate_scale,
            duration_s=self.duration_s,
            max_requests=self.max_requests,
            max_input_tokens=self.max_input_tokens,
            max_output_tokens=self.max_output_tokens,
        )


@dataclass(frozen=True)
class ReplayOutcome:
    """What a replay came to."""

    exit_code: int
    run: Run
    report_file: Path
    records_file: Path
    summary_file: Path


def replay(options: ReplayOptions, *, console: Console | None = None) -> ReplayOutcome:
    """Replay traffic against a server and write the report.

    Raises:
        ConfigError: An option, the trace, the tokenizer or the server is not usable; raised
            before the first measured request.
    """
    require_report()
    return event_loop.run(_replay(options, console or Console()))


async def _replay(options: ReplayOptions, console: Console) -> ReplayOutcome:
    schedule = schedule_for(options.trace, options.shape, seed=options.seed)
    _make_folder(options.out_dir)
    endpoint = await resolve(options.url, api_key=options.api_key)
    target = await inspect(endpoint, options.model)
    _check_context(schedule, target)
    codec: Codec = ServerCodec(endpoint, target.model)
    if options.tokenizer is not None:
        codec = FileCodec(options.tokenizer)
    prompts, text_name = await _make_prompts(options, schedule, codec, console)
    await check_streaming(endpoint, target, timeout_s=options.timeout_s)
    conditions = _conditions(options, schedule, target)
    conditions |= _prompt_conditions(prompts, text_name, codec)
    stop = asyncio.Event()
    server = Server(endpoint, target, monitor=await _monitor(endpoint))
    work = Work(schedule, prompts, seed=options.seed)
    measured = await _measure(options, server, work, console, stop)
    run = replace(
        measured,
        title=options.title or f"Replay of {options.trace}",
        conditions=conditions | measured.conditions,
    )
    return _finish(options, run, console, is_interrupted=stop.is_set())


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}; give a folder to write to") from error


async def _monitor(endpoint: Endpoint) -> Monitor:
    """Return what reads the server's metrics, and this machine's GPUs where it runs here."""
    gpus = Gpus.find() if endpoint.host in LOOPBACK else Gpus()
    return Monitor(await source_at("", endpoint), gpus=gpus)


def _check_context(schedule: Schedule, target: Target) -> None:
    if target.context_tokens is None:
        return
    longest = max(schedule.arrivals, key=lambda a: a.input_tokens + a.output_tokens)
    needed = longest.input_tokens + longest.output_tokens
    if needed > target.context_tokens:
        raise ConfigError(
            f"a request of {longest.input_tokens} + {longest.output_tokens} tokens does not fit "
            f"the context of {target.model}, {target.context_tokens}; clip with "
            "--max-input-tokens and --max-output-tokens"
        )


async def _make_prompts(
    options: ReplayOptions, schedule: Schedule, codec: Codec, console: Console
) -> tuple[list[Prompt], str]:
    text, name = corpus_text(options.text_file)
    count = len(schedule.arrivals)
    console.print(f"making {count} prompts, counted by {codec.name}", highlight=False)
    with console.status("tokenising"):
        maker = await PromptMaker.create(codec, text, seed=options.seed)
        prompts = await maker.make_all(schedule)
    return prompts, name


async def _measure(
    options: ReplayOptions, server: Server, work: Work, console: Console, stop: asyncio.Event
) -> Run:
    watched: list[LoadState] = []
    duration_s = work.schedule.duration_s
    with (
        _interrupts(stop),
        Progress(lambda: watched[0] if watched else None, duration_s, monotonic, console),
    ):
        return await run_trial(
            server, work, options.out_dir, options.trial, stop=stop, on_state=watched.append
        )


@contextmanager
def _interrupts(stop: asyncio.Event) -> Iterator[None]:
    """Let the first Ctrl-C end the run in order, and the second end the program."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (RuntimeError, ValueError):  # not the main thread: its owner handles signals
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _finish(
    options: ReplayOptions, run: Run, console: Console, *, is_interrupted: bool
) -> ReplayOutcome:
    summary_file = options.out_dir / "summary.json"
    summary_file.write_text(run.summary_json(), encoding="utf-8")
    report_file = options.out_dir / "report.html"
    write_report(run, report_file)
    print_run(run, console)
    console.print(f"report: {report_file}", highlight=False, soft_wrap=True)
    return ReplayOutcome(
        _exit_code(run, is_interrupted=is_interrupted),
        run,
        report_file,
        options.out_dir / "records.jsonl",
        summary_file,
    )


def _exit_code(run: Run, *, is_interrupted: bool) -> int:
    if is_interrupted:
        return EXIT_INTERRUPTED
    if not run.verdict.is_valid:
        return EXIT_INVALID
    return EXIT_FAILED if run.stats.failed else EXIT_OK


def _conditions(options: ReplayOptions, schedule: Schedule, target: Target) -> dict[str, str]:
    version = f" (server version {target.version})" if target.version else ""
    clipped = f"{schedule.clipped_inputs} prompts, {schedule.clipped_outputs} outputs"
    bounds = (options.max_input_tokens or "none", options.max_output_tokens or "none")
    found: dict[str, Any] = {
        "Server": f"{options.url}{version}",
        "Model": target.model,
        "Traffic": schedule.source,
        "Offered load": (
            f"{len(schedule.arrivals)} requests in {schedule.duration_s:.1f} s "
            f"({schedule.rate_rps:.3f}/s, rate scale {options.rate_scale:g})"
        ),
        "Clipped": f"{clipped} (limits {bounds[0]} / {bounds[1]} tokens)",
        "Sampling": f"temperature {options.temperature:g}, end-of-sequence ignored",
        "Seed": options.seed,
        "Time limit": f"{options.timeout_s:g} s a request, from its scheduled time",
        "Client lag bound": f"{options.max_lag_s * 1e3:g} ms at p99",
        "Started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "Command": options.command or command_line(sys.argv),
    }
    return {label: str(value) for label, value in found.items()} | machine.describe()


def command_line(arguments: Sequence[str]) -> str:
    """Return the command for the report, keys left out of it, of `--start`'s command too."""
    key_env = option(arguments, ("--api-key-env",))
    return shlex.join(masked(arguments, [os.environ.get(key_env, "")]))


def _prompt_conditions(prompts: Sequence[Prompt], text_name: str, codec: Codec) -> dict[str, str]:
    misses = sum(prompt.is_miss for prompt in prompts)
    return {
        "Prompt text": f"{text_name}, each prompt opened by a unique salt",
        "Prompt lengths": f"counted by {codec.name}; {misses} of {len(prompts)} not exact",
    }
