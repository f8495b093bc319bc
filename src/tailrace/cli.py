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
        return
    from tailrace.server.serve import run  # noqa: PLC0415 -- --help must not wait for it

    raise typer.Exit(run(loaded))


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every setting; None where the user did not name it."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_option_type(entry.type), _option(entry, cls)],
        )
        for cls in (EngineConfig, ServerConfig)
        for entry in fields(cls)
    ]

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


@bench_app.command("replay")
def _replay(
    trace: Annotated[str, typer.Argument(help="A trace file, or a built-in profile: azure-conv.")],
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
        text_file=text_file,
        tokenizer=tokenizer,
        title=title,
    )
    raise typer.Exit(replay(options).exit_code)


@app.command("demo")
def _demo(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-results"),
    duration: Annotated[float, typer.Option(help="Seconds of arrivals.")] = 60.0,
) -> None:
    """Start the embedded model, replay real traffic's figures against it, write the report."""
    from tailrace.bench.demo import run_demo  # noqa: PLC0415

    raise typer.Exit(run_demo(out, duration_s=duration))
