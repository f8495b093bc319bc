"""The Locust driver's arguments: declared, read, and turned into what is to be prepared.

Nothing here imports Locust: its parser and its options come in as arguments.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.bench.limits import Limit, read_limit
from tailrace.bench.locust_plan import (
    API_KEY_VARIABLE,
    LOOPS,
    Plan,
    Wanted,
    read_plan,
    read_stages,
)
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tailrace.bench.load.shot import Shot

log = logging.getLogger("tailrace")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare our arguments; each has an environment variable, and a field in the web UI."""

    def add(name: str, default: object, text: str, **more: Any) -> None:
        variable = "TAILRACE_" + name.upper().replace("-", "_")
        more["env_var"] = variable
        if "choices" not in more:
            more["type"] = type(default)
        parser.add_argument(f"--{name}", default=default, help=text, **more)

    add("traffic", "chat70", "a preset, a profile or a trace file: lengths and arrivals")
    hidden: dict[str, Any] = {"include_in_web_ui": False}  # they decide which users there are
    loop = "closed: users who wait for answers; open: a schedule"
    add("loop", "closed", loop, choices=LOOPS, **hidden)
    plan = "a file of prepared requests, as an earlier run left it; replaces --traffic"
    add("plan", "", plan, **hidden)
    add("arrivals", "", "of an open loop: poisson, gamma, constant, ramp or step; empty: its own")
    add("burstiness", 1.0, "of gamma arrivals: 1 is Poisson, below 1 is burstier")
    add("rate", 0.0, "requests/s in an open loop; 0 keeps the traffic's own")
    add("rates", "", "of ramp and step: second:rate points, such as 0:1,300:10")
    add("duration", 0.0, "seconds of arrivals in an open loop; 0: all")
    add("max-requests", 0, "requests to prepare at most; 0: all that arrive, 1000 in a closed loop")
    add("input-tokens", "", "prompt lengths instead of the traffic's, such as 512")
    add("output-tokens", "", "output lengths instead of the traffic's, such as 256")
    add("max-input-tokens", 0, "cut longer prompts; 0: none")
    add("max-output-tokens", 0, "cut longer outputs; 0: none")
    add("think-s", "", "a user's pause between requests, such as 0.1-0.5; empty: the traffic's own")
    add("turns", 1, "requests of a session, each continuing the conversation")
    add("priorities", "", "priority:share pairs, such as 0:0.9,1:0.1")
    add("extra-body", "", "JSON fields added to every request; null takes one out")
    add("model", "", "empty: the first that the server lists")
    add("api-key", "", "sent as bearer token", **hidden)
    add("tokenizer", "", "a folder with tokenizer.json; empty asks the server")
    add("text-file", "", "text that prompts are cut from; empty: Python's language reference")
    add("temperature", 0.7, "of the sampling")
    add("request-timeout-s", 600.0, "a request not complete so long after it was due has failed")
    add("seed", 0, "of the traffic, the prompts and the sampling")
    add("out", "locust-run", "a folder for records.jsonl, summary.json and plan.jsonl")
    add("limits", "", "exit with 1 unless they hold, such as p95_ttft=2.0,p95_e2e=20")
    add("max-failures", 0.0, "exit with 1 where a larger share of the requests fails")
    add("max-lag-s", 0.1, "exit with 3 where the client's own p99 lag is above")
    shape = "users over time in stages, such as 0-64@30,64@120; replaces -u, -r and -t"
    add("shape", "", shape, **hidden)


def limits_of(options: Namespace) -> tuple[Limit, ...]:
    """Return the limits that the run is to keep.

    Raises:
        ConfigError: One is written otherwise than `p95_ttft=2.0`.
    """
    return tuple(read_limit(part) for part in options.limits.split(",") if part.strip())


def made_folder(name: str) -> Path:
    """Return the run's folder, made where it is missing.

    Raises:
        ConfigError: It cannot be made.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}; give a folder to write to") from error
    return folder


def given_plan(file: Path, host: str | None) -> tuple[Plan, list[Shot]]:
    """Return the plan that `--plan` names.

    Raises:
        ConfigError: It cannot be read, or is another server's.
    """
    plan, shots = read_plan(file)
    if host and host.rstrip("/").removesuffix("/v1").rstrip("/") != plan.url:
        raise ConfigError(
            f"--plan {file}: prepared for {plan.url}, whose tokenizer counted its prompts; leave "
            "--host out, or prepare anew for another server"
        )
    return plan, shots


def wanted_of(options: Namespace, url: str | None, seed: int) -> Wanted:
    """Return what is to be prepared.

    Raises:
        ConfigError: There is no URL, or `--extra-body` is no JSON object.
    """
    if not url:
        raise ConfigError("--host: missing; give the server's URL, such as http://127.0.0.1:8001")
    return Wanted(
        url=url,
        source=options.traffic,
        loop=options.loop,
        arrivals=options.arrivals,
        burstiness=options.burstiness,
        rates=options.rates,
        rate_rps=options.rate or None,
        duration_s=options.duration or None,
        max_requests=options.max_requests or None,
        users=_users(options),
        think_s=options.think_s,
        turns=options.turns,
        priorities=options.priorities,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        max_input_tokens=options.max_input_tokens or None,
        max_output_tokens=options.max_output_tokens or None,
        model=options.model or None,
        tokenizer=options.tokenizer,
        text_file=options.text_file,
        temperature=options.temperature,
        timeout_s=options.request_timeout_s,
        seed=seed,
        extra_body=_extra_body(options.extra_body),
    )


def _users(options: Namespace) -> int:
    """Return the most users there are to be; Locust takes one where none are given."""
    if options.shape:
        return max(max(stage.first, stage.last, 1) for stage in read_stages(options.shape))
    return options.num_users or 1


def _extra_body(text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text or "{}")
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra-body {text}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f'--extra-body {text}: give a JSON object, such as {{"top_p": 0.9}}')
    return found


def make_plan(wanted: Wanted, file: Path, api_key: str) -> None:
    """Have the plan made by an ordinary process: this one is patched, and must not tokenise.

    Raises:
        ConfigError: What that process has to say of the arguments, the traffic or the server.
    """
    log.info("preparing requests (%s)", wanted.source)
    done = subprocess.run(  # noqa: S603  # our own module
        [sys.executable, "-m", "tailrace.bench.locust_plan", str(file)],
        input=msgspec.json.encode(wanted),
        capture_output=True,
        check=False,
        env=os.environ | {API_KEY_VARIABLE: api_key},
    )
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(lines[-1] if lines else f"preparing ended with {done.returncode}")
    log.info("prepared: %s", done.stdout.decode("utf-8", "replace").strip())
