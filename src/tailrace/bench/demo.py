"""`make demo`: a server on this machine, a minute of real traffic's shape, a table, a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from tailrace.bench.launch import LocalServer
from tailrace.bench.replay import ReplayOptions, replay
from tailrace.bench.report import require_report
from tailrace.bench.stats import Limits
from tailrace.bench.traffic.azure_conv import AZURE_CONV

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RATE_RPS = 0.2
"""What two cores hold with the embedded model: a mean request is 1,155 tokens in and 211 out, so
0.2 a second asks for about 230 prefill and 42 decode tokens a second, a third of a common
two-core machine and two thirds of a slow one."""
SEED = 1
"""Draws 12 requests in 60 s, as many as the rate promises, some of them at once."""
MAX_INPUT_TOKENS = 4096
MAX_OUTPUT_TOKENS = 512
MAX_LAG_S = 0.25
"""Server and client share the cores here; first tokens take about a second."""


def run_demo(
    out_dir: Path,
    *,
    duration_s: float = 60.0,
    rate_rps: float = RATE_RPS,
    seed: int = SEED,
    server_arguments: Sequence[str] = (),
    console: Console | None = None,
) -> int:
    """Start a server, replay the profile, print the table and the report's path.

    Args:
        out_dir: Gets the report, the records, the summary and the server's log.
        duration_s: Seconds of arrivals; their answers are then waited for.
        rate_rps: Mean arrivals a second; burstiness and lengths stay the trace's.
        seed: Chooses the requests.
        server_arguments: Passed on to `tailrace serve`.
        console: Where to print.

    Returns:
        0, or what `replay` returns where a request failed or the run is invalid.

    Raises:
        ConfigError: Something is missing; said before the server is started where possible.
        EngineError: The server did not start, or did not end with status 0.
    """
    console = console or Console()
    require_report()
    server = LocalServer(server_arguments, log_file=out_dir / "server.log")
    console.print("starting the server: " + " ".join(server.command), highlight=False)
    with server:
        console.print(f"ready at {server.url}; replaying for {duration_s:g} s", highlight=False)
        options = ReplayOptions(
            trace=AZURE_CONV.name,
            url=server.url,
            out_dir=out_dir,
            rate_scale=rate_rps / AZURE_CONV.rate_rps,
            duration_s=duration_s,
            max_input_tokens=MAX_INPUT_TOKENS,
            max_output_tokens=MAX_OUTPUT_TOKENS,
            seed=seed,
            max_lag_s=MAX_LAG_S,
            limits=Limits(ttft_s=10.0, tpot_s=0.25),
            title="Tailrace demo: the shape of Azure's conversations on this machine",
        )
        outcome = replay(options, console=console)
    return outcome.exit_code
