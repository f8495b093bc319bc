"""`tailrace bench max-rate` and `tailrace bench run`: one server, measured as a comparison of one.

Both write the result folder that `compare` writes, with one contender in it, so that reports of
several servers, or of several machines, can be merged afterwards.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.bench.compare import Outcome, compare
from tailrace.bench.engines.spec import EngineSpec
from tailrace.bench.masking import masked_engine
from tailrace.bench.plan import SERVER_TOKENIZER, Plan, PlatformPlan, SearchPlan, SteadyPlan
from tailrace.bench.session import secrets_of
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.bench.limits import Limit
    from tailrace.bench.traffic.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The one server: where it runs, or how it is started."""

    url: str = ""
    start: str = ""
    """A command with {host} and {port}; empty: it runs at `url`."""
    kind: str = "openai"
    name: str = ""
    """In the report; empty takes the kind."""
    model: str | None = None
    api_key_env: str = ""
    metrics_url: str = ""

    def __post_init__(self) -> None:
        """Check that there is one server, and one only.

        Raises:
            ConfigError: Neither or both of `url` and `start` are given.
        """
        if bool(self.url) == bool(self.start):
            raise ConfigError("give either --url of a running server, or --start with its command")

    def spec(self) -> EngineSpec:
        """Return it as a plan's engine."""
        return EngineSpec(
            name=self.name or self.kind,
            kind=self.kind,
            url=self.url,
            command=tuple(shlex.split(self.start)),
            model=self.model,
            api_key_env=self.api_key_env,
            metrics_url=self.metrics_url,
        )


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How a single server is measured, whatever is asked of it."""

    traffic: Workload
    limits: tuple[Limit, ...] = ()
    repetitions: int = 1
    """Rounds, each with seeds of its own; a server that we start is started afresh in each."""
    seed: int = 1
    tokenizer: str = SERVER_TOKENIZER
    temperature: float = 0.0
    timeout_s: float = 300.0
    max_lag_s: float = 0.1
    processes: int = 0
    title: str = ""
    platform: PlatformPlan = field(default_factory=PlatformPlan)


def max_rate(
    subject: Subject,
    measuring: Measuring,
    search: SearchPlan,
    out: Path,
    *,
    command: str,
    resume: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Search the highest request rate at which all limits hold.

    Raises:
        ConfigError: As `compare`; or no limit is given.
        EngineError: The server did not start.
    """
    if not measuring.limits:
        raise ConfigError("no limit: give at least one --limit, such as p95_ttft=2.0")
    plan = _plan(subject, measuring, search=search)
    return compare(plan, out, command=command, resume=resume, console=console)


def run_once(
    subject: Subject,
    measuring: Measuring,
    steady: SteadyPlan,
    out: Path,
    *,
    command: str,
    resume: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Measure a server at given loads.

    Raises:
        ConfigError: As `compare`.
        EngineError: The server did not start.
    """
    plan = _plan(subject, measuring, steady=steady)
    return compare(plan, out, command=command, resume=resume, console=console)


def _plan(
    subject: Subject,
    measuring: Measuring,
    *,
    search: SearchPlan | None = None,
    steady: SteadyPlan | None = None,
) -> Plan:
    steady = steady or SteadyPlan()
    spec = subject.spec()
    return Plan(
        title=measuring.title or f"{spec.name} on {Path(measuring.traffic.source).name}",
        engines=(spec,),
        traffic=measuring.traffic,
        limits=measuring.limits,
        platform=measuring.platform,
        search=search,
        steady=steady,
        pairs=measuring.repetitions,
        seed=measuring.seed,
        tokenizer=measuring.tokenizer,
        temperature=measuring.temperature,
        timeout_s=measuring.timeout_s,
        max_lag_s=measuring.max_lag_s,
        processes=measuring.processes,
        raw=_raw(subject, measuring, search, steady),
    )


def _raw(
    subject: Subject, measuring: Measuring, search: SearchPlan | None, steady: SteadyPlan
) -> dict[str, Any]:
    """Return the options as the plan file that would say the same."""
    raw: dict[str, Any] = {
        "engine": [masked_engine(_given(subject), secrets_of(subject.spec()))],
        "traffic": _given(measuring.traffic),
        "limits": {limit.name: limit.bound_s for limit in measuring.limits},
        "pairs": measuring.repetitions,
        "title": measuring.title,
        "seed": measuring.seed,
        "tokenizer": measuring.tokenizer,
        "temperature": measuring.temperature,
        "timeout_s": measuring.timeout_s,
        "max_lag_s": measuring.max_lag_s,
        "processes": measuring.processes,
        "platform": _given(measuring.platform),
        "steady": _given(steady),
    }
    return raw if search is None else raw | {"search": _given(search)}


def _given(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, fit for JSON."""
    found = {
        entry.name: getattr(values, entry.name)
        for entry in fields(values)
        if entry.init and getattr(values, entry.name) != entry.default
    }
    return {
        name: list(value) if isinstance(value, tuple) else _plain(value)
        for name, value in found.items()
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
