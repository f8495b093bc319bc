"""A plan: the TOML file that says who is compared, on what traffic, at which limits.

Everything is checked when the file is read, before any server starts: an unknown key is an error
that names the nearest known one, a path is relative to the plan's folder, and `{NAME}` in capitals
is an environment variable, so that no machine's paths stand in a plan. `{host}` and `{port}` in
lower case are left for the one who starts the server.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import msgspec

from tailrace.bench.engines.spec import EngineSpec
from tailrace.bench.limits import Limit, check_timeout, parse_limit
from tailrace.bench.search import DRAWS_PER_SEED, MAX_SEED
from tailrace.bench.team import Team, read_teams
from tailrace.bench.traffic.workload import Workload
from tailrace.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FEWEST_PAIRS = 6
"""Interleaved pairs below which a ratio has no interval."""
MOST_WARM_REQUESTS = 1000
MOST_LOADS = 50
"""Steady loads; each has seeds of its own."""
SERVER_TOKENIZER = "server"

_Built = TypeVar("_Built")
_VARIABLE = re.compile(r"\{([A-Z][A-Z0-9_]*)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class PlatformPlan:
    """`[platform]`: what the machine is called, and what an hour of it costs."""

    name: str = ""
    """Empty names the machine by its processor."""
    price_per_hour: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        """Check the price.

        Raises:
            ConfigError: It is not positive.
        """
        if self.price_per_hour is not None and not self.price_per_hour > 0:
            raise ConfigError(f"price_per_hour = {self.price_per_hour}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """`[search]`: how the highest rate that holds the limits is looked for."""

    low_rps: float = 0.05
    """A rate below it is never tried: what fails there has no answer."""
    high_rps: float = 200.0
    start_rps: float | None = None
    """The first rate; None begins at the geometric middle of low and high."""
    resolution: float = 0.05
    """The search ends when the failing rate is at most this share above the holding one."""
    trial_s: float | None = None
    """Seconds of arrivals in one trial; None takes what the strictest limit needs."""
    repeats: int = 3
    """Most trials at one rate while its answer is in doubt."""

    def __post_init__(self) -> None:
        """Check every value once.

        Raises:
            ConfigError: A value is out of range.
        """
        if not 0 < self.low_rps < self.high_rps < float("inf"):
            raise ConfigError(
                f"low_rps = {self.low_rps}, high_rps = {self.high_rps}: must be 0 < low < high"
            )
        if self.start_rps is not None and not self.low_rps <= self.start_rps <= self.high_rps:
            raise ConfigError(f"start_rps = {self.start_rps}: must lie within low_rps and high_rps")
        if not 0.005 <= self.resolution <= 1:
            raise ConfigError(f"resolution = {self.resolution}: must be 0.005 to 1")
        if self.trial_s is not None and not self.trial_s > 0:
            raise ConfigError(f"trial_s = {self.trial_s}: must be above 0")
        if self.repeats < 1:
            raise ConfigError(f"repeats = {self.repeats}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SteadyPlan:
    """`[steady]`: loads at which every engine is measured in every pair, for the curves."""

    rates: tuple[float, ...] = ()
    """Open loop, requests per second."""
    users: tuple[int, ...] = ()
    """Closed loop; the think time is the traffic's."""
    trial_s: float = 60.0
    """Seconds of arrivals in one trial."""

    def __post_init__(self) -> None:
        """Check every value once.

        Raises:
            ConfigError: A value is out of range.
        """
        for rate_rps in self.rates:
            if not 0 < rate_rps < float("inf"):
                raise ConfigError(f"rates: {rate_rps} requests/s; each must be above 0")
        for users in self.users:
            if users < 1:
                raise ConfigError(f"users: {users}; each must be at least 1")
        if not self.trial_s > 0:
            raise ConfigError(f"trial_s = {self.trial_s}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One comparison, checked."""

    title: str
    engines: tuple[EngineSpec, ...]
    """The first is the baseline of every ratio."""
    traffic: Workload
    limits: tuple[Limit, ...] = ()
    platform: PlatformPlan = field(default_factory=PlatformPlan)
    search: SearchPlan | None = None
    """None: no highest rate is asked for."""
    steady: SteadyPlan = field(default_factory=SteadyPlan)
    teams: tuple[Team, ...] = ()
    """`[[team]]`: who asks which configuration to run; the decision map answers each."""
    pairs: int = FEWEST_PAIRS
    """Interleaved rounds; each engine is started afresh in each."""
    seed: int = 1
    """Of pair 0; the pairs after it count on from there. Plans with far apart seeds share no
    traffic."""
    tokenizer: str = SERVER_TOKENIZER
    """A folder with tokenizer.json, or "server": the first engine's own, asked over HTTP."""
    temperature: float = 0.0
    timeout_s: float = 300.0
    """A request not complete so long after its scheduled time has failed."""
    max_lag_s: float = 0.1
    """The client's p99 lag beyond which a trial is invalid."""
    processes: int = 0
    """Client processes; 0 chooses by the rate."""
    warm_requests: int = 4
    """Requests of the run's lengths that a started server answers before its first trial."""
    canary: bool = True
    """Drive a mock at the planned peak first, to know what the client itself adds."""
    raw: dict[str, Any] = field(default_factory=dict)
    """As the file was read, before any variable was filled in: what the result keeps."""

    def __post_init__(self) -> None:
        """Check what concerns several parts at once.

        Raises:
            ConfigError: A value is out of range, or parts contradict each other.
        """
        self._check_numbers()
        self._check_engines()
        if self.search is None and not self.loads:
            raise ConfigError("nothing to measure: give [search], or rates or users in [steady]")
        if len(self.loads) > MOST_LOADS:
            raise ConfigError(f"[steady] {len(self.loads)} loads: at most {MOST_LOADS}")
        for _, users in self.loads:
            if users:
                replace(self.traffic, users=users)
        if self.search is not None and not self.limits:
            raise ConfigError("[search] needs limits: give [limits], such as p95_ttft = 2.0")
        if self.traffic.is_closed and (self.search is not None or self.steady.rates):
            raise ConfigError(
                "[traffic] is a closed loop, which has no rate of its own to search or to hold; "
                "leave users out there and give them as users = [...] in [steady]"
            )

    def _check_numbers(self) -> None:
        if self.pairs < 1:
            raise ConfigError(f"pairs = {self.pairs}: must be at least 1")
        if not 0 <= self.seed <= MAX_SEED - self.pairs:
            raise ConfigError(f"seed = {self.seed}: must be 0 to {MAX_SEED - self.pairs}")
        if not 1 <= self.warm_requests <= MOST_WARM_REQUESTS:
            raise ConfigError(
                f"warm_requests = {self.warm_requests}: must be 1 to {MOST_WARM_REQUESTS}"
            )
        if self.processes < 0:
            raise ConfigError(f"processes = {self.processes}: must be 0 (automatic) or more")
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"temperature = {self.temperature}: must be 0 to 2")
        for name in ("timeout_s", "max_lag_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0")
        check_timeout(self.limits, self.timeout_s)

    def _check_engines(self) -> None:
        if not self.engines:
            raise ConfigError("no [[engine]]: name at least one to measure")
        names = [spec.name for spec in self.engines]
        for spec in self.engines:
            if not _NAME.fullmatch(spec.name):
                raise ConfigError(
                    f"engine {spec.name!r}: a name has letters, digits, '.', '_' and '-' only, "
                    "since it names folders"
                )
            if names.count(spec.name) > 1:
                raise ConfigError(f"engine {spec.name}: the name stands twice; give each its own")

    @property
    def loads(self) -> tuple[tuple[float | None, int], ...]:
        """The steady loads as (requests/s, users): an open loop has no users, a closed no rate."""
        users = self.steady.users or ((self.traffic.users,) if self.traffic.users else ())
        return (*((rate_rps, 0) for rate_rps in self.steady.rates), *((None, n) for n in users))

    def seed_of(self, pair: int) -> int:
        """Return the seed of a pair's searches, the same for every contender."""
        return self.seed + pair

    def draw_of(self, pair: int) -> int:
        """Return the first of a pair's draws: the traffic of its steady loads."""
        return self.seed_of(pair) * DRAWS_PER_SEED


def read_plan(file: Path, *, environ: Mapping[str, str] | None = None) -> Plan:
    """Read and check a plan file.

    Args:
        file: The TOML file; its relative paths count from its folder.
        environ: Where `{NAME}` is looked up; `os.environ` where None.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, a value is out of range, or a
            variable is not set.
    """
    raw = _read_toml(file)
    try:
        return _Reader(file.parent, os.environ if environ is None else environ).plan(raw)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a plan file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error


_NOT_OF_TRAFFIC = {
    "rate_rps": "rates are what [search] finds and [steady] names",
    "seed": "stands at the top of the plan, and counts on from pair to pair",
}
"""What a workload takes from the command line, and a plan says elsewhere."""

TABLES = ("platform", "traffic", "limits", "search", "steady", "engine", "team")
_SIMPLE = (
    *("title", "pairs", "seed", "tokenizer", "temperature", "timeout_s", "max_lag_s"),
    *("processes", "warm_requests", "canary"),
)


class _Reader:
    """Turns the tables of one file into dataclasses."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = environ

    def plan(self, raw: dict[str, Any]) -> Plan:
        _check_names("", raw, (*_SIMPLE, *TABLES))
        filled: dict[str, Any] = self._expanded(raw, "")
        if "traffic" not in filled:
            raise ConfigError("no [traffic]: say where requests come from, such as source")
        simple = {name: filled[name] for name in _SIMPLE if name in filled}
        if simple.get("tokenizer", SERVER_TOKENIZER) != SERVER_TOKENIZER:
            simple["tokenizer"] = str(self._path(str(simple["tokenizer"])))
        simple.setdefault("title", "Comparison of serving engines")
        whole: dict[str, Any] = {
            **simple,
            "engines": tuple(self._engine(row) for row in _rows(filled, "engine")),
            "traffic": self._traffic(_table(filled, "traffic")),
            "limits": _limits(_table(filled, "limits")),
            "platform": self._build("platform", PlatformPlan, _table(filled, "platform")),
            "search": self._search(filled),
            "steady": self._build("steady", SteadyPlan, _table(filled, "steady")),
            "teams": read_teams({"team": rows}) if (rows := _rows(filled, "team")) else (),
        }
        types = {entry.name: entry.type for entry in fields(Plan)}
        for name in simple:
            _check_type(name, whole[name], str(types[name]))
        return Plan(**whole, raw=raw)

    def _engine(self, row: dict[str, Any]) -> EngineSpec:
        where = f"engine {row.get('name', '')}".strip()
        for name in ("name", "kind"):
            if not isinstance(row.get(name), str) or not row[name]:
                raise ConfigError(f"[[{where}]] has no {name}")
        command = row.get("command")
        if isinstance(command, str):
            row = row | {"command": shlex.split(command)}
        return self._build(where, EngineSpec, row)

    def _traffic(self, table: dict[str, Any]) -> Workload:
        source = table.get("source")
        if not isinstance(source, str) or not source:
            raise ConfigError("[traffic] has no source: name a preset, a profile or a trace file")
        for name, remedy in _NOT_OF_TRAFFIC.items():
            if name in table:
                raise ConfigError(f"[traffic] {name}: {remedy}")
        # A preset's name stays; what is a file is found from the plan's folder.
        beside = self._path(source)
        if beside.is_file():
            table = table | {"source": str(beside)}
        for name in ("input_tokens", "output_tokens"):
            value = table.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                table = table | {name: str(value)}
            elif isinstance(value, str) and value.startswith("file:"):
                table = table | {name: f"file:{self._path(value.removeprefix('file:'))}"}
        return self._build("traffic", Workload, table)

    def _search(self, filled: dict[str, Any]) -> SearchPlan | None:
        if "search" not in filled:
            return None
        return self._build("search", SearchPlan, _table(filled, "search"))

    def _build(self, where: str, cls: type[_Built], table: dict[str, Any]) -> _Built:
        assert is_dataclass(cls)  # noqa: S101  # for the type checker
        known = [entry.name for entry in fields(cls) if entry.init]
        _check_names(f"[{where}] ", table, known)
        hints = get_type_hints(cls)
        values = {
            name: self._value(f"[{where}] {name}", value, hints[name])
            for name, value in table.items()
        }
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"[{where}] {error}") from error

    def _value(self, where: str, value: Any, wanted: Any) -> Any:
        """Return a value as the type that a field wants; paths count from the plan's folder."""
        if Path in (wanted, *get_args(wanted)):
            wanted, value = Path, self._path(value) if isinstance(value, str) else value
            if not isinstance(value, Path):
                raise ConfigError(f"{where} = {value!r}: give a path")
            return value
        try:
            return msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where} = {value!r}: {error}") from error

    def _path(self, text: str) -> Path:
        path = Path(text).expanduser()
        return path if path.is_absolute() else self._folder / path

    def _expanded(self, value: Any, where: str) -> Any:
        """Fill in `{NAME}` in every text below `value`."""
        if isinstance(value, dict):
            return {key: self._expanded(item, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self._expanded(item, where) for item in value]
        if isinstance(value, str):
            return _VARIABLE.sub(lambda found: self._variable(found[1], where), value)
        return value

    def _variable(self, name: str, where: str) -> str:
        value = self._environ.get(name, "")
        if not value:
            raise ConfigError(
                f"{where.removeprefix('.')}: the environment variable {name} is not set; "
                f"export {name}=... first"
            )
        return value


def _check_names(where: str, table: dict[str, Any], known: Iterable[str]) -> None:
    names = list(known)
    for name in table:
        if name not in names:
            raise ConfigError(f"{where}unknown key {name!r}{nearest(name, names)}")


def _table(filled: dict[str, Any], name: str) -> dict[str, Any]:
    table = filled.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: write it as a table, [{name}]")
    return table


def _rows(filled: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = filled.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{name}: write each one as [[{name}]]")
    return rows


def _limits(table: dict[str, Any]) -> tuple[Limit, ...]:
    for name, bound_s in table.items():
        if isinstance(bound_s, bool) or not isinstance(bound_s, int | float):
            raise ConfigError(f"[limits] {name} = {bound_s!r}: give seconds, such as 2.0")
    return tuple(parse_limit(name, float(bound_s)) for name, bound_s in table.items())


_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
}


def _check_type(name: str, value: Any, wanted: str) -> None:
    is_right = isinstance(value, _TYPES[wanted]) and (wanted == "bool" or value is not True)
    if not is_right or (wanted != "bool" and isinstance(value, bool)):
        raise ConfigError(f"{name} = {value!r}: must be of type {wanted}")
