"""The command line: parses and delegates only.

Options of `serve` are the settings of config.py, one for one, so that a flag, an environment
variable and a line of the config file never differ. Nothing heavy is imported before a command
runs: `tailrace --help` must answer at once. Annotations are real objects here (no `annotations`
import from `__future__`), because typer reads them.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from tailrace import __version__
from tailrace.config import EngineConfig, ServerConfig, load
from tailrace.errors import TailraceError

app = typer.Typer(
    name="tailrace",
    no_args_is_help=True,
    add_completion=False,
    help="An LLM inference server judged by its tail latency, and the harness that proves it.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure a server that speaks OpenAI's API.")
app.add_typer(bench_app, name="bench")
plan_app = typer.Typer(no_args_is_help=True, help="Kernels chosen by measurement: serve --plan.")
app.add_typer(plan_app, name="plan")


def main() -> None:
    """Run the command line; an error of ours is one readable line and status 1."""
    try:
        app()
    except TailraceError as error:
        typer.echo(f"tailrace: {error}", err=True)
        sys.exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _serve(
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    print_config: Annotated[bool, typer.Option(help="Print the settings and exit.")] = False,
    **settings: Any,
) -> None:
    """Serve a model over HTTP: OpenAI's API, /generate, /health, /metrics."""
    loaded = load(settings, file=config)
    if print_config:
        for name, value in loaded.as_flat().items():
            typer.echo(f"{name} = {value!r}")
        for holder in loaded.access.holders:
            typer.echo(f"keys.{holder.name}.class = {holder.key_class.name!r}")
        return
    from tailrace.server.entrance import run  # noqa: PLC0415 -- --help must not wait for it

    raise typer.Exit(run(loaded))


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every setting; None where the user did not name it."""
    options = [
        _parameter(entry.name, _option_type(entry.type), _option(entry, cls))
        for cls in (EngineConfig, ServerConfig)
        for entry in fields(cls)
    ]
    return _with_options(command, options)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _with_options(
    command: Callable[..., None], options: list[inspect.Parameter]
) -> Callable[..., None]:
    """Give a command further options, which it takes as keywords."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]

    def wrapped(**values: Any) -> None:
        command(**values)

    wrapped.__doc__ = command.__doc__
    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined] # typer reads it
        own + options
    )
    wrapped.__annotations__ = {
        p.name: p.annotation for p in inspect.signature(wrapped).parameters.values()
    }
    return wrapped


def _option(entry: Any, cls: type) -> Any:
    shown = entry.default if entry.default not in ((), "") else "none"
    panel = "Engine" if cls is EngineConfig else "Server"
    names = [f"--{entry.name.replace('_', '-')}"]
    if entry.type == "bool":
        names = [f"{names[0]}/--no-{entry.name.replace('_', '-')}"]
    return typer.Option(
        *names,
        help=f"{entry.metadata['help']} [default: {shown}]".replace("[", "\\["),
        rich_help_panel=panel,
        show_default=False,
    )


def _option_type(annotation: Any) -> Any:
    """Return the option's type; tuples are given as text, by comma."""
    simple = {"int": int, "float": float, "bool": bool}
    return simple.get(annotation, str) | None


app.command("serve")(_with_settings(_serve))


# What is sent: one option for each field of bench.traffic.workload.Workload, which checks them.
# They stand here in words so that --help need not import the harness; a test compares the two.
_TRAFFIC: dict[str, tuple[Any, str]] = {
    "arrivals": (str, "poisson | gamma | constant | ramp | step | closed; default: the source's."),
    "burstiness": (float, "Shape of gamma arrivals: 1 is Poisson, below 1 is burstier."),
    "rates": (str, "Of ramp and step: second:rate points, such as 0:1,300:10."),
    "input_tokens": (str, "512, normal:4200:1280:300:6800, mix:0.7@32-128,0.3@512-2048, file:F."),
    "output_tokens": (str, "As --input-tokens; default: the source's own."),
    "max_input_tokens": (int, "Clip longer prompts."),
    "max_output_tokens": (int, "Clip longer answers."),
    "think_s": (str, "Seconds from an answer to the next request: 0.5 or 0.1-0.5."),
    "turns": (int, "Requests of a session, each continuing the conversation."),
    "priorities": (str, "priority:share pairs, such as 0:0.9,1:0.1; smaller is earlier."),
    "text_file": (Path, "A text, or a folder of .txt files, to cut prompts from."),
}
# How one server is measured: fields of bench.max_rate.Subject and Measuring.
_SUBJECT: dict[str, tuple[Any, str]] = {
    "url": (str, "The base URL of a running server."),
    "start": (str, "Or the command that starts it, with {host} and {port} in it."),
    "kind": (str, "tailrace | vllm | sglang | llamacpp | openai (default)."),
    "name": (str, "Of the server in the report; default: its kind."),
    "model": (str, "Default: the first it lists."),
    "api_key_env": (str, "The environment variable that holds its key."),
    "metrics_url": (str, "Default: /metrics of the server."),
}
_MEASURING: dict[str, tuple[Any, str]] = {
    "seed": (int, "Of arrivals, lengths, texts and the sampling. Default: 1."),
    "tokenizer": (str, "Folder with tokenizer.json; default: ask the server."),
    "temperature": (float, "Of the sampling. Default: 0."),
    "timeout_s": (float, "Seconds until a request has failed. Default: 300."),
    "max_lag_s": (float, "Client p99 lag that voids a trial. Default: 0.1."),
    "processes": (int, "Client processes; 0 (default): as the load needs."),
    "repetitions": (int, "Rounds, each with its own seeds. Default: 1."),
    "title": (str, "Of the report."),
}
_PLATFORM: dict[str, tuple[Any, str]] = {
    "platform": (str, "What the machine is called; default: its processor."),
    "price_per_hour": (float, "Of the whole machine, for the cost of a million tokens."),
}
_SEARCH: dict[str, tuple[Any, str]] = {
    "low_rps": (float, "A rate below it is never tried. Default: 0.05."),
    "high_rps": (float, "A rate above it is never tried. Default: 200."),
    "start_rps": (float, "The first rate."),
    "resolution": (float, "Width of the bracket at which the search ends. Default: 0.05."),
    "trial_s": (float, "Seconds of arrivals in a trial; default: what the limits need."),
    "repeats": (int, "Most trials at one rate while its answer is in doubt. Default: 3."),
}


def _panel(table: dict[str, tuple[Any, str]], title: str) -> list[inspect.Parameter]:
    """Return a table's entries as options of one panel of --help."""
    return [
        _parameter(
            name,
            kind | None,
            typer.Option(
                f"--{name.removesuffix('_s').replace('_', '-')}",
                help=text.replace("[", "\\["),
                rich_help_panel=title,
                show_default=False,
            ),
        )
        for name, (kind, text) in table.items()
    ]


_SUBJECT_OPTIONS = (
    _panel(_SUBJECT, "Server")
    + _panel(_TRAFFIC, "Traffic")
    + _panel(_MEASURING, "Measuring")
    + _panel(_PLATFORM, "Platform")
)


def _named(values: dict[str, Any], table: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return the options of a table that the user gave."""
    return {name: values[name] for name in table if values.get(name) is not None}


def _subject(source: str, limits: list[str], values: dict[str, Any]) -> tuple[Any, Any]:
    """Return the server and how it is measured, as bench.max_rate takes them."""
    from tailrace.bench.limits import read_limit  # noqa: PLC0415
    from tailrace.bench.max_rate import Measuring, Subject  # noqa: PLC0415
    from tailrace.bench.plan import PlatformPlan  # noqa: PLC0415
    from tailrace.bench.traffic.workload import Workload  # noqa: PLC0415

    measuring = Measuring(
        traffic=Workload(source=source, **_named(values, _TRAFFIC)),
        limits=tuple(map(read_limit, limits)),
        platform=PlatformPlan(
            name=values.get("platform") or "", price_per_hour=values.get("price_per_hour")
        ),
        **_named(values, _MEASURING),
    )
    return Subject(**_named(values, _SUBJECT)), measuring


def _command() -> str:
    from tailrace.bench.replay import command_line  # noqa: PLC0415

    return command_line(sys.argv)


_SOURCE = typer.Argument(help="A preset (chat70, longdoc), a profile (azure-conv), or a trace.")
_LIMIT = typer.Option(help="Such as p95_ttft=2.0, in seconds; may be repeated.")
_RESUME = typer.Option("--resume", help="Go on with what --out holds.")


@app.command("compare")
def _compare(
    plan: Annotated[Path, typer.Argument(help="A plan file; plans/ has some.")],
    *,
    out: Annotated[Path | None, typer.Option(help="The result folder; needed to measure.")] = None,
    resume: Annotated[bool, _RESUME] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Say what would be measured, and start nothing.")
    ] = False,
) -> None:
    """Measure engines against each other: the ratio of their highest rates at an equal P95."""
    from tailrace.bench.compare import compare  # noqa: PLC0415
    from tailrace.bench.plan import read_plan  # noqa: PLC0415

    if check:
        from tailrace.bench.preview import preview  # noqa: PLC0415

        for line in preview(read_plan(plan)):
            typer.echo(line)
        return
    if out is None:
        raise typer.BadParameter("give the result folder", param_hint="--out")
    outcome = compare(read_plan(plan), out, command=_command(), resume=resume)
    raise typer.Exit(outcome.exit_code)


def _max_rate(
    source: Annotated[str, _SOURCE],
    *,
    limit: Annotated[list[str], _LIMIT],
    out: Annotated[Path, typer.Option(help="The result folder.")] = Path("max-rate"),
    resume: Annotated[bool, _RESUME] = False,
    **values: Any,
) -> None:
    """Search the highest request rate at which a server keeps every limit."""
    from tailrace.bench.max_rate import max_rate  # noqa: PLC0415
    from tailrace.bench.plan import SearchPlan  # noqa: PLC0415

    subject, measuring = _subject(source, limit, values)
    search = SearchPlan(**_named(values, _SEARCH))
    outcome = max_rate(subject, measuring, search, out, command=_command(), resume=resume)
    raise typer.Exit(outcome.exit_code)


bench_app.command("max-rate")(
    _with_options(_max_rate, _SUBJECT_OPTIONS + _panel(_SEARCH, "Search"))
)


def _run(
    source: Annotated[str, _SOURCE],
    *,
    rate: Annotated[list[float] | None, typer.Option(help="Requests/s; may be repeated.")] = None,
    users: Annotated[list[int] | None, typer.Option(help="A closed loop of so many.")] = None,
    duration: Annotated[float, typer.Option(help="Seconds of arrivals.")] = 60.0,
    limit: Annotated[list[str] | None, _LIMIT] = None,
    out: Annotated[Path, typer.Option(help="The result folder.")] = Path("run"),
    resume: Annotated[bool, _RESUME] = False,
    **values: Any,
) -> None:
    """Measure a server at given loads: open loop by rate, or a closed loop of users."""
    from tailrace.bench.max_rate import run_once  # noqa: PLC0415
    from tailrace.bench.plan import SteadyPlan  # noqa: PLC0415

    subject, measuring = _subject(source, limit or [], values)
    steady = SteadyPlan(rates=tuple(rate or ()), users=tuple(users or ()), trial_s=duration)
    outcome = run_once(subject, measuring, steady, out, command=_command(), resume=resume)
    raise typer.Exit(outcome.exit_code)


bench_app.command("run")(_with_options(_run, _SUBJECT_OPTIONS))


def _export(
    source: Annotated[str, _SOURCE],
    *,
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")],
    rate: Annotated[float | None, typer.Option(help="Requests/s; default: the source's.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Stop after so many.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 1,
    **values: Any,
) -> None:
    """Write traffic as Mooncake JSONL, which other load generators replay."""
    from tailrace.bench.traffic.export import write_mooncake  # noqa: PLC0415
    from tailrace.bench.traffic.workload import Workload, build  # noqa: PLC0415

    workload = Workload(source=source, **_named(values, _TRAFFIC))
    schedule = build(
        workload, rate_rps=rate, duration_s=duration, max_requests=max_requests, seed=seed
    )
    write_mooncake(schedule, None, out)
    typer.echo(f"{out}: {len(schedule.arrivals)} requests in {schedule.duration_s:.1f} s")


bench_app.command("export")(_with_options(_export, _panel(_TRAFFIC, "Traffic")))


@bench_app.command("report")
def _report(
    folders: Annotated[list[Path], typer.Argument(help="Result folders, one for each platform.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Also write the pictures, for the Markdown.")
    ] = False,
) -> None:
    """Write one report from several result folders."""
    from tailrace.bench.report import write_reports  # noqa: PLC0415

    typer.echo(f"report: {write_reports(folders, out, with_pictures=pictures).html}")


@bench_app.command("locustfile")
def _locustfile() -> None:
    """Print the path of the Locust driver: locust -f $(tailrace bench locustfile) ..."""
    # Found, not imported: importing it would patch this process's sockets.
    typer.echo(Path(__file__).parent / "bench" / "locustfile.py")


@bench_app.command("replay")
def _replay(
    trace: Annotated[str, typer.Argument(help="A trace file, or a profile, such as azure-conv.")],
    *,
    url: Annotated[str, typer.Option(help="The server's base URL.")] = "http://127.0.0.1:8001",
    model: Annotated[str | None, typer.Option(help="Default: the first it lists.")] = None,
    api_key: Annotated[str, typer.Option(help="Sent as a bearer token.")] = "",
    rate_scale: Annotated[float, typer.Option(help="Multiplies the arrival rate.")] = 1.0,
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Stop after so many.")] = None,
    max_input_tokens: Annotated[int | None, typer.Option(help="Clip longer prompts.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Clip longer answers.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw, the texts and the sampling.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 0.7,
    timeout: Annotated[float, typer.Option(help="Seconds until a request has failed.")] = 600.0,
    max_lag: Annotated[float, typer.Option(help="Client p99 lag that voids the run, s.")] = 0.1,
    limit: Annotated[list[str] | None, _LIMIT] = None,
    processes: Annotated[int, typer.Option(help="Client processes; 0: as the load needs.")] = 0,
    text_file: Annotated[Path | None, typer.Option(help="Text to cut prompts from.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json; default: ask the server.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for records, summary, report.")] = Path(
        "replay"
    ),
    title: Annotated[str, typer.Option(help="Of the report.")] = "",
) -> None:
    """Replay a trace, open loop: exact percentiles, latency from the schedule, an HTML report."""
    from tailrace.bench.limits import read_limit  # noqa: PLC0415
    from tailrace.bench.replay import ReplayOptions, replay  # noqa: PLC0415

    options = ReplayOptions(
        trace=trace,
        url=url,
        out_dir=out,
        model=model,
        api_key=api_key,
        rate_scale=rate_scale,
        duration_s=duration,
        max_requests=max_requests,
        max_input_tokens=max_input_tokens,
        max_output_tokens=max_output_tokens,
        seed=seed,
        temperature=temperature,
        timeout_s=timeout,
        max_lag_s=max_lag,
        limit=tuple(map(read_limit, limit or [])),
        processes=processes,
        text_file=text_file,
        tokenizer=tokenizer,
        title=title,
    )
    raise typer.Exit(replay(options).exit_code)


@app.command("quantize")
def _quantize(
    model: Annotated[str, typer.Argument(help="As --model-path of `tailrace serve`.")],
    *,
    out: Annotated[Path, typer.Option(help="The checkpoint's folder; must not exist.")],
    scheme: Annotated[
        str, typer.Option(help="awq (4 bits) | fp8 (a scale an output) | fp8-block.")
    ] = "awq",
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="compressed-tensors | awq-gemm (AutoAWQ's layout; also of a model in 4 bits).",
        ),
    ] = "compressed-tensors",
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale, of awq.")] = 128,
    text: Annotated[
        Path | None,
        typer.Option(help="Calibration text, a file or folder; default: Python's own."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Pieces of the text that awq reads.")] = 128,
    sample_tokens: Annotated[int, typer.Option(help="Tokens of a piece.")] = 512,
) -> None:
    """Make an AWQ or FP8 checkpoint with llm-compressor (pip install 'tailrace[quantize]')."""
    from tailrace.bench.corpus import corpus_text  # noqa: PLC0415
    from tailrace.models.compressor import Recipe, quantize  # noqa: PLC0415

    recipe = Recipe(scheme, form, group_size, samples, sample_tokens)
    quantize(model, out, recipe, corpus_text(text)[0])
    typer.echo(f"{out}: {scheme}, {form}; try `tailrace check-accuracy {out} --against {model}`")


@app.command("check-accuracy")
def _check_accuracy(
    model: Annotated[str, typer.Argument(help="As --model-path of `tailrace serve`.")],
    *,
    against: Annotated[
        str, typer.Option(help="The reference; default: the same checkpoint, unpacked, exact.")
    ] = "",
    positions: Annotated[
        int, typer.Option(help="Positions of text to compare, in each reading.")
    ] = 20_000,
    text: Annotated[
        Path | None, typer.Option(help="A text, or a folder of .txt files; default: Python's own.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    quant_type: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="As of `tailrace serve`; default: the CPU. The text is read in steps of prompts "
            "and again of decodes, and both must keep the bound."
        ),
    ] = None,
    prefill_weights: Annotated[
        str,
        typer.Option(
            help="fp8 | int8 | bf16: prompts by that copy, as they are served, and recorded for "
            "`tailrace serve --prefill-weights auto`, where it serves with the same options."
        ),
    ] = "same",
    fp8_activations: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="As of `tailrace serve`; the reference keeps KV unrounded.")
    ] = None,
    prefill_attention: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    decode_kernels: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    threads: Annotated[int | None, typer.Option(help="As of `tailrace serve`.")] = None,
    min_agreement: Annotated[
        float, typer.Option(help="Least share of equal likeliest tokens.")
    ] = 0.99,
    max_divergence: Annotated[float, typer.Option(help="Most mean KL divergence, nats.")] = 0.005,
) -> None:
    """Compare a model as it is served with its reference, over real text; 1 where it strays.

    What is not given, but for --prefill-weights, is as `tailrace serve` has it, out of the
    environment too.
    """
    from tailrace.errors import ConfigError  # noqa: PLC0415

    if prefill_weights == "auto":
        raise ConfigError(
            "check-accuracy --prefill-weights auto: auto chooses by what is measured here; name "
            "the copy to measure"
        )
    settings = {"model_path": model, "dtype": dtype, "quant_type": quant_type, "gpus": gpus}
    settings |= {"prefill_weights": prefill_weights, "fp8_activations": fp8_activations}
    settings |= {"kv_cache_dtype": kv_cache_dtype, "prefill_attention": prefill_attention}
    settings |= {"decode_kernels": decode_kernels}
    config = load(settings | {"threads": threads}).engine
    from tailrace.bench.corpus import corpus_text  # noqa: PLC0415
    from tailrace.engine.setup import pin_threads  # noqa: PLC0415

    pin_threads(config.threads)  # before torch is imported, with what follows
    from tailrace.engine.accuracy import (  # noqa: PLC0415
        Bound,
        check_accuracy,
        readings_of,
        record,
    )

    words, _ = corpus_text(text)
    bound = Bound(min_agreement, max_divergence)
    length = positions * len(readings_of(config))
    with typer.progressbar(length=length, file=sys.stderr) as bar:
        found = check_accuracy(
            config, words, positions=positions, against=against, progress=bar.update
        )
    typer.echo(found.describe(bound))
    if prefill_weights != "same":
        typer.echo(record(config, found, against=against))
    raise typer.Exit(0 if found.keeps(bound) else 1)


@plan_app.command("show")
def _plan_show(
    file: Annotated[Path | None, typer.Argument(help="Default: all that were measured here.")] = (
        None
    ),
) -> None:
    """Print plans: where they hold, what was timed, what won."""
    from tailrace.errors import ConfigError  # noqa: PLC0415
    from tailrace.kernels.plan import folder, read  # noqa: PLC0415

    files = sorted(folder().glob("*.json")) if file is None else [file]
    if not files:
        raise ConfigError(f"plan show: {folder()} holds none; `tailrace plan measure` makes one")
    for found in files:
        typer.echo(f"{found}")
        try:
            lines = read(found).describe()
        except ConfigError as error:
            if file is not None:
                raise
            lines = [f"not read: {error}"]  # the others are shown all the same
        for line in lines:
            typer.echo(f"  {line}")


@plan_app.command("measure")
def _plan_measure(
    model: Annotated[str, typer.Argument(help="As --model-path of `tailrace serve`.")],
    *,
    gpus: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    quant_type: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    load_format: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    context_length: Annotated[int | None, typer.Option(help="As of `tailrace serve`.")] = None,
    prefill_weights: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    fp8_activations: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="As of `tailrace serve`: --prefill-weights auto goes by it. Attention is measured "
            "over each dtype that the GPU has."
        ),
    ] = None,
    prefill_attention: Annotated[
        str | None,
        typer.Option(help="triton: leave Hopper's kernel out; else as of `tailrace serve`."),
    ] = None,
    decode_kernels: Annotated[str | None, typer.Option(help="As of `tailrace serve`.")] = None,
    block_size: Annotated[
        str | None, typer.Option(help="As of `tailrace serve`: attention is measured over it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Default: where `serve --plan auto` looks.")
    ] = None,
) -> None:
    """Time every candidate on this GPU, however long it takes, and write the plan.

    What is not given is as `tailrace serve` has it, out of the environment too.
    """
    from tailrace.errors import ConfigError  # noqa: PLC0415

    settings: dict[str, Any] = {
        "model_path": model,
        "gpus": gpus,
        "dtype": dtype,
        "quant_type": quant_type,
        "prefill_weights": prefill_weights,
        "prefill_attention": prefill_attention,
        "decode_kernels": decode_kernels,
    }
    settings |= {"load_format": load_format, "context_length": context_length}
    settings |= {"fp8_activations": fp8_activations, "kv_cache_dtype": kv_cache_dtype}
    config = load(settings | {"block_size": block_size}).engine
    if not config.gpus:
        raise ConfigError(
            "plan measure: on a CPU there is nothing to choose, --dtype and --cpu-kernels decide "
            "(and change what is rounded); name a GPU with --gpus"
        )
    from tailrace.engine.setup import resolve  # noqa: PLC0415

    folder = resolve(config)
    from tailrace.engine.cuda_setup import measure_plan  # noqa: PLC0415

    plan, file = measure_plan(config, folder, out)
    typer.echo(f"{file}")
    for line in plan.describe():
        typer.echo(f"  {line}")


@plan_app.command("pin")
def _plan_pin(
    source: Annotated[Path, typer.Argument(help="A plan's file: see `tailrace plan show`.")],
    target: Annotated[Path, typer.Argument(help="The copy; must not exist.")],
) -> None:
    """Copy a plan and mark the copy: it is never measured again nor written to."""
    from tailrace.kernels.plan import pin  # noqa: PLC0415

    pin(source, target)
    typer.echo(f"{target}: pinned; tailrace serve --plan {target}")


@app.command("explain")
def _explain(
    logs: Annotated[list[Path], typer.Argument(help="Request logs; rotated files are read, too.")],
    *,
    html: Annotated[Path | None, typer.Option(help="Also write the report as a web page.")] = None,
) -> None:
    """Say why the slowest requests of a server were slow, from its request log."""
    from rich.console import Console  # noqa: PLC0415

    from tailrace.bench.explain import explain  # noqa: PLC0415
    from tailrace.bench.explain_table import print_explanation  # noqa: PLC0415

    found = explain(logs)
    print_explanation(found, Console())
    if html is not None:
        from tailrace.bench.report.explain_page import write_page  # noqa: PLC0415

        write_page(found, html)
        typer.echo(f"report: {html}")


@app.command("demo")
def _demo(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-results"),
    duration: Annotated[float, typer.Option(help="Seconds of arrivals.")] = 60.0,
) -> None:
    """Start the embedded model, replay real traffic's figures against it, write the report."""
    from tailrace.bench.demo import run_demo  # noqa: PLC0415

    raise typer.Exit(run_demo(out, duration_s=duration))
