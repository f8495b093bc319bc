"""What a Locust run is to send, prepared before it by a process of its own.

Locust patches the process it runs in: threads and sockets there are greenlets. Traffic is drawn,
prompts are tokenised and bodies encoded in an ordinary process instead, which leaves a file:

    {"url": ..., "address": ..., "model": ..., "traffic": ..., ...}      the head: a `Plan`
    {"shot": {"index": 0, "scheduled_s": 0.4, ...}, "body": {...}}       one line a request

`python -m tailrace.bench.locust_plan FILE` reads a `Wanted` as JSON from standard input and writes
that file; the locustfile calls it so. The API key travels in the environment, never in a file.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.bench.codec import Codec, FileCodec, ServerCodec
from tailrace.bench.load.shot import Shot
from tailrace.bench.prompts import Prompt, PromptMaker, corpus_text
from tailrace.bench.target import check_streaming, inspect
from tailrace.bench.traffic.presets import PRESETS
from tailrace.bench.traffic.workload import Workload, build
from tailrace.bench.trial import Server, TrialOptions, Work, make_shots
from tailrace.bench.wire import Endpoint, resolve
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tailrace.bench.traffic.schedule import Schedule

API_KEY_VARIABLE = "TAILRACE_API_KEY"
LOOPS = ("closed", "open")
CLOSED_REQUESTS = 1000
"""Prepared for a closed loop unless asked otherwise."""
FOREVER_S = 1e9
"""A closed loop's length is Locust's to say: only the number of requests bounds the plan."""


class Wanted(msgspec.Struct, kw_only=True, frozen=True):
    """What to prepare: the locustfile's own arguments, as in `traffic.workload.Workload`."""

    url: str
    source: str
    loop: str = "closed"
    """One of LOOPS; a closed loop takes the source's lengths and not its arrivals."""
    arrivals: str = ""
    burstiness: float = 1.0
    rates: str = ""
    rate_rps: float | None = None
    duration_s: float | None = None
    """Of arrivals, in an open loop."""
    max_requests: int | None = None
    """None in a closed loop: `CLOSED_REQUESTS`."""
    users: int = 1
    """Closed loop; Locust may start and stop users during the run."""
    think_s: str = ""
    turns: int = 1
    priorities: str = ""
    input_tokens: str = ""
    output_tokens: str = ""
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    model: str | None = None
    tokenizer: str = ""
    """A folder with tokenizer.json; empty asks the server."""
    text_file: str = ""
    temperature: float = 0.7
    timeout_s: float = 600.0
    seed: int = 0
    extra_body: dict[str, Any] = {}
    """Fields added to every request; None takes one out."""

    @property
    def workload(self) -> Workload:
        """The traffic that is asked for.

        Raises:
            ConfigError: A value is unknown, out of range, or contradicts another.
        """
        return Workload(
            source=self.source,
            arrivals=self.arrivals,
            burstiness=self.burstiness,
            rates=self.rates,
            rate_rps=self.rate_rps,
            users=self.users if self.loop == "closed" else 0,
            think_s=self.think_s,
            turns=self.turns,
            priorities=self.priorities,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            max_input_tokens=self.max_input_tokens,
            max_output_tokens=self.max_output_tokens,
            text_file=Path(self.text_file) if self.text_file else None,
            seed=self.seed,
        )


class Plan(msgspec.Struct, kw_only=True):
    """A prepared run, but for its requests."""

    url: str
    host: str
    address: str
    port: int
    is_tls: bool
    model: str
    version: str
    loop: str
    traffic: str
    """Where the requests come from."""
    prompts: str
    """How their text was made."""
    requests: int
    duration_s: float
    """The span in which requests arrive; 0 in a closed loop."""
    think_s: str = ""
    """A user's pause, as "0.1-0.5"."""
    shared_tokens: dict[int, int] = {}
    """By a request's index: leading tokens that other requests share by plan; 0 is left out."""

    def endpoint(self, api_key: str) -> Endpoint:
        """Return where to send; the caller brings its own TLS."""
        return Endpoint(self.url, self.host, self.address, self.port, None, api_key)


class _Line(msgspec.Struct):
    shot: dict[str, Any]
    body: msgspec.Raw


def write_plan(file: Path, plan: Plan, shots: Sequence[Shot]) -> None:
    """Write a plan, whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as stream:
        stream.write(msgspec.json.encode(plan) + b"\n")
        for shot in shots:
            fields = asdict(shot)
            line = _Line(fields, msgspec.Raw(fields.pop("body")))
            stream.write(msgspec.json.encode(line) + b"\n")
    part.replace(file)


def read_plan(file: Path) -> tuple[Plan, list[Shot]]:
    """Read what `write_plan` wrote.

    Raises:
        ConfigError: The file cannot be read or is no plan.
    """
    try:
        head, *lines = file.read_bytes().splitlines()
        plan = msgspec.json.decode(head, type=Plan)
        found = [msgspec.json.decode(line, type=_Line) for line in lines]
        shots = [Shot(**line.shot, body=bytes(line.body)) for line in found]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a file of prepared requests") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: not a file of prepared requests ({error})") from error
    if len(shots) != plan.requests:
        raise ConfigError(f"{file}: {len(shots)} of {plan.requests} requests; it was cut off")
    return plan, shots


async def prepare(wanted: Wanted, *, api_key: str = "") -> tuple[Plan, list[Shot]]:
    """Draw the traffic, make the prompts and ask the server whether it streams.

    Raises:
        ConfigError: A value, the traffic, the tokenizer or the server is not usable.
    """
    workload = wanted.workload
    schedule = _schedule(wanted, workload)
    endpoint = await resolve(wanted.url, api_key=api_key)
    target = await inspect(endpoint, wanted.model)
    codec: Codec = ServerCodec(endpoint, target.model)
    if wanted.tokenizer:
        codec = FileCodec(Path(wanted.tokenizer))
    prompts, text_name = await _prompts(workload, schedule, codec)
    options = TrialOptions(temperature=wanted.temperature, timeout_s=wanted.timeout_s)
    server = Server(endpoint, target, dict(wanted.extra_body))
    await check_streaming(
        endpoint, target, timeout_s=wanted.timeout_s, extra_body=wanted.extra_body
    )
    shots = make_shots(server, Work(schedule, prompts, seed=wanted.seed), options)
    misses = sum(prompt.is_miss for prompt in prompts)
    plan = Plan(
        url=endpoint.url,
        host=endpoint.host,
        address=endpoint.address,
        port=endpoint.port,
        is_tls=endpoint.tls is not None,
        model=target.model,
        version=target.version,
        loop=wanted.loop,
        traffic=schedule.source,
        prompts=f"{text_name}, counted by {codec.name}; {misses} of {len(prompts)} not exact",
        requests=len(shots),
        duration_s=schedule.duration_s if wanted.loop == "open" else 0.0,
        think_s=wanted.think_s or _own_think(wanted),
        shared_tokens={i: p.shared_tokens for i, p in enumerate(prompts) if p.shared_tokens},
    )
    return plan, shots


def _schedule(wanted: Wanted, workload: Workload) -> Schedule:
    is_closed = wanted.loop == "closed"
    if is_closed and (wanted.rate_rps or wanted.duration_s):
        raise ConfigError(
            "--rate and --duration: of an open loop; a closed one takes -u and -t, or --loop open"
        )
    schedule = build(
        workload,
        rate_rps=None,
        duration_s=FOREVER_S if is_closed else wanted.duration_s,
        max_requests=wanted.max_requests or (CLOSED_REQUESTS if is_closed else None),
        seed=wanted.seed,
    )
    # Whichever of Locust's users is free takes the next request; only sessions stay together.
    free = tuple(replace(arrival, user=None) for arrival in schedule.arrivals)
    return replace(schedule, arrivals=free)


def _own_think(wanted: Wanted) -> str:
    preset = PRESETS.get(wanted.source)
    return preset.think_s if preset is not None and wanted.loop == "closed" else ""


async def _prompts(
    workload: Workload, schedule: Schedule, codec: Codec
) -> tuple[list[Prompt], str]:
    text, name = corpus_text(workload.text_file)
    maker = await PromptMaker.create(codec, text, seed=workload.seed)
    return await maker.make_all(schedule), name


@dataclass(frozen=True)
class Stage:
    """A part of a load shape: users go from `first` to `last` in a straight line."""

    first: int
    last: int
    seconds: float


def read_stages(text: str) -> tuple[Stage, ...]:
    """Return the stages written `0-64@30,64@120,16@60`: a ramp, a hold, a step down.

    Raises:
        ConfigError: It is written otherwise.
    """
    return tuple(_stage(part.strip()) for part in text.split(","))


def _stage(text: str) -> Stage:
    users, _, seconds = text.partition("@")
    first, dash, last = users.partition("-")
    try:
        stage = Stage(int(first), int(last if dash else first), float(seconds))
    except ValueError as error:
        raise ConfigError(
            f"--shape {text}: write USERS@SECONDS to hold, FIRST-LAST@SECONDS to ramp"
        ) from error
    if min(stage.first, stage.last) < 0 or not 0 < stage.seconds < float("inf"):
        raise ConfigError(f"--shape {text}: users must not be negative, seconds above 0")
    return stage


def users_at(stages: Sequence[Stage], at_s: float) -> int | None:
    """Return how many users are due `at_s` after the start; None after the last stage."""
    for stage in stages:
        if at_s < stage.seconds:
            return stage.first + round((stage.last - stage.first) * at_s / stage.seconds)
        at_s -= stage.seconds
    return None


@dataclass(frozen=True)
class Think:
    """A user's pause between an answer and the next request, uniform in seconds."""

    low_s: float
    high_s: float

    def draw(self, rng: random.Random) -> float:
        """Return one pause."""
        return rng.uniform(self.low_s, self.high_s)


def read_think(text: str) -> Think:
    """Return the pause written `0.1-0.5` or `0.3`, in seconds.

    Raises:
        ConfigError: It is written otherwise.
    """
    low, dash, high = text.partition("-")
    try:
        think = Think(float(low), float(high if dash else low))
    except ValueError as error:
        raise ConfigError(f"--think-s {text}: write it as 0.1-0.5 or 0.3, in seconds") from error
    if not 0 <= think.low_s <= think.high_s < float("inf"):
        raise ConfigError(f"--think-s {text}: the first must not be above the second")
    return think


def locustfile_path() -> Path:
    """Return what to give to `locust -f`, without importing it: that would patch this process."""
    found = importlib.util.find_spec("tailrace.bench.locustfile")
    if found is None or found.origin is None:
        raise ConfigError("tailrace.bench.locustfile is not installed; reinstall tailrace")
    return Path(found.origin)


def main() -> int:
    """Prepare what standard input asks for; one readable line and status 2 where that fails."""
    file = Path(sys.argv[1])
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Wanted)
    try:
        plan, shots = asyncio.run(prepare(wanted, api_key=os.environ.get(API_KEY_VARIABLE, "")))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_plan(file, plan, shots)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps({"requests": plan.requests, "traffic": plan.traffic}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
