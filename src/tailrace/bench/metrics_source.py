"""Where a server's metrics come from: its own /metrics, or a collector that reads them already.

`http://...` is an exposition, `prometheus+http://HOST:9090?job=vllm` a Prometheus server and
`telegraf+file:///var/lib/telegraf/metrics.json?url=...` telegraf's JSON lines. What follows the
question mark are labels that the server's samples must carry, needed where the collector reads
several servers; those of GPUs are written `gpu.NAME`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from tailrace.bench.scrape import (
    ALL_FAMILIES,
    DCGM_FAMILIES,
    FAMILIES,
    Sample,
    combine,
    combine_devices,
    combine_processes,
    known_family,
    read_exposition,
)
from tailrace.bench.wire import Endpoint, WireError, fetch, resolve
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TIMEOUT_S = 10.0
WINDOW_S = 60
"""How far back a collector is asked: further than it may lag, and than its interval is long."""
DEVICE_PREFIX = "gpu."
TAIL_BYTES = 2**18
"""How much of telegraf's file is looked at before the first trial."""


@dataclass(frozen=True)
class Figures:
    """What a source says of one moment, under our names."""

    age_s: float
    """How long ago that was."""
    server: Mapping[str, float] = field(default_factory=dict)
    gpu: Mapping[str, float] = field(default_factory=dict)
    process: Mapping[str, float] = field(default_factory=dict)


def _figures(age_s: float, samples: Sequence[Sample]) -> Figures:
    return Figures(age_s, combine(samples), combine_devices(samples), combine_processes(samples))


class MetricsSource(Protocol):
    """Anything that knows a server's metrics."""

    interval_s: float
    """How often it is worth asking."""

    async def read(self) -> list[Figures]:
        """Return what is new since the last call, oldest first; empty where it misses a beat."""
        ...


async def source_at(url: str, server: Endpoint) -> MetricsSource | None:
    """Return the source at `url`, or the server's own /metrics where it is empty.

    None: the server has no /metrics, which is no error as long as nobody asked for it.

    Raises:
        ConfigError: There is nothing to be read at `url`.
    """
    if not url:
        source = Exposition(server, "/metrics")
        return source if await source.status() == 200 else None
    scheme, _, rest = url.partition("+")
    if scheme == "prometheus" and rest:
        return await _prometheus_at(rest)
    if scheme == "telegraf" and rest:
        return _telegraf_at(rest)
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"}:
        raise ConfigError(
            f"metrics_url {url}: write http://HOST:PORT/metrics, prometheus+http://HOST:9090 or "
            "telegraf+file:///PATH"
        )
    base = urlunsplit((parts.scheme, parts.netloc, "", "", ""))
    path = urlunsplit(("", "", parts.path or "/metrics", parts.query, ""))
    exposition = Exposition(await resolve(base), path)
    status = await exposition.status()
    if status != 200:
        raise ConfigError(f"metrics_url {url}: HTTP {status or 'fails'}; is it the right path?")
    return exposition


@dataclass
class Exposition:
    """A /metrics page."""

    endpoint: Endpoint
    path: str
    interval_s: float = 1.0

    async def status(self) -> int:
        """Return the HTTP status of the page; 0 where nothing answers."""
        try:
            answer = await fetch(self.endpoint, "GET", self.path, timeout_s=TIMEOUT_S)
        except (OSError, WireError):
            return 0
        return answer.status

    async def read(self) -> list[Figures]:
        """Read the page once."""
        began_s = time.monotonic()
        try:
            answer = await fetch(self.endpoint, "GET", self.path, timeout_s=TIMEOUT_S)
        except (OSError, WireError):  # a busy server may miss a reading; the gap shows
            return []
        if answer.status != 200:
            return []
        # A server renders the page when it is asked; a slow answer is of the moment between.
        age_s = (time.monotonic() - began_s) / 2
        samples = list(read_exposition(answer.body.decode("utf-8", "replace")))
        return [_figures(age_s, samples)]


@dataclass(frozen=True)
class Selection:
    """Which of a collector's samples belong to the server, and which to its GPUs."""

    server: Mapping[str, str]
    gpu: Mapping[str, str]

    def has(self, sample: Sample) -> bool:
        """Return whether a sample carries the labels asked for."""
        wanted = self.gpu if sample.family in DCGM_FAMILIES else self.server
        return all(sample.labels.get(name) == value for name, value in wanted.items())


def _selection(query: str) -> Selection:
    pairs = parse_qsl(query, keep_blank_values=True)
    return Selection(
        server={name: value for name, value in pairs if not name.startswith(DEVICE_PREFIX)},
        gpu={
            name.removeprefix(DEVICE_PREFIX): value
            for name, value in pairs
            if name.startswith(DEVICE_PREFIX)
        },
    )


class _Timeline:
    """Samples with a Unix time, handed on once, all of one time together."""

    def __init__(self, start_unix_s: float) -> None:
        self._start_unix_s = start_unix_s
        self._last: dict[bool, float] = {}

    def new(self, samples: Iterable[tuple[float, Sample]]) -> list[Figures]:
        """Return what is later than all that was handed on before.

        Servers and GPUs are scraped at moments of their own, so each has its own last time.
        """
        groups: dict[tuple[float, bool], list[Sample]] = {}
        for unix_s, sample in samples:
            is_device = sample.family in DCGM_FAMILIES
            if unix_s > self._last.get(is_device, self._start_unix_s):
                groups.setdefault((unix_s, is_device), []).append(sample)
        found = []
        for (unix_s, is_device), group in sorted(groups.items(), key=lambda item: item[0]):
            self._last[is_device] = unix_s
            found.append(_figures(max(time.time() - unix_s, 0.0), group))
        return found


# Prometheus


async def _prometheus_at(url: str) -> Prometheus:
    parts = urlsplit(url)
    base = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    source = Prometheus(await resolve(base), _selection(parts.query))
    await source.check()
    return source


class Prometheus:
    """A Prometheus that scrapes the server: raw samples of the last minute, with their times."""

    interval_s = 5.0

    def __init__(self, endpoint: Endpoint, selection: Selection) -> None:
        self._endpoint = endpoint
        self._selection = selection
        self._timeline = _Timeline(time.time())
        names = "|".join(ALL_FAMILIES)
        query = f'{{__name__=~"{names}"}}[{WINDOW_S}s]'
        self._path = f"/api/v1/query?query={quote(query, safe='')}"

    async def check(self) -> None:
        """Ask once.

        Raises:
            ConfigError: It does not answer as a Prometheus, knows no sample of the server, or of
                several.
        """
        where = self._endpoint.url
        try:
            series = await self._ask()
        except (OSError, WireError, ValueError) as error:
            raise ConfigError(f"metrics_url {where}: {error or 'no answer'}") from error
        found = [s for _, s in _matrix(series) if s.family in FAMILIES and self._selection.has(s)]
        if not found:
            raise ConfigError(
                f"metrics_url {where}: no metric of an engine within the last {WINDOW_S} s; does "
                "it scrape this server, and do the labels after the question mark fit?"
            )
        _check_one_server(where, found, "instance")

    async def read(self) -> list[Figures]:
        """Ask for what was scraped since the last call."""
        try:
            series = await self._ask()
        except (OSError, WireError, ValueError):  # the next call brings what this one missed
            return []
        chosen = [(at, sample) for at, sample in _matrix(series) if self._selection.has(sample)]
        return self._timeline.new(chosen)

    async def _ask(self) -> list[Any]:
        answer = await fetch(self._endpoint, "GET", self._path, timeout_s=TIMEOUT_S)
        body = json.loads(answer.body) if answer.body else {}
        if answer.status != 200 or not isinstance(body, dict) or body.get("status") != "success":
            told = body.get("error", "") if isinstance(body, dict) else ""
            raise ValueError(f"HTTP {answer.status} {told}".rstrip())
        result = body.get("data", {}).get("result", [])
        return result if isinstance(result, list) else []


def _matrix(series: list[Any]) -> Iterator[tuple[float, Sample]]:
    for one in series:
        labels = dict(one["metric"])
        family = known_family(labels.pop("__name__", ""))
        for unix_s, text in one["values"]:
            value = float(text)
            if family is not None and value == value:  # noqa: PLR0124  # NaN is not itself
                yield float(unix_s), Sample(family, labels, value)


def _check_one_server(where: str, samples: Iterable[Sample], label: str) -> None:
    names = sorted({sample.labels.get(label, "") for sample in samples})
    if len(names) > 1:
        raise ConfigError(
            f"metrics_url {where}: it knows several servers ({', '.join(names)}); choose one by "
            f"?{label}={names[0]}"
        )


# telegraf


def _telegraf_at(url: str) -> Telegraf:
    parts = urlsplit(url)
    if parts.scheme != "file" or not parts.path:
        raise ConfigError(f"metrics_url telegraf+{url}: write telegraf+file:///PATH")
    file = Path(unquote(parts.path))
    if not file.is_file():
        raise ConfigError(
            f"metrics_url telegraf+{url}: no such file; does telegraf run with an [[outputs.file]] "
            "of data_format json that writes there?"
        )
    source = Telegraf(file, _selection(parts.query))
    source.check()
    return source


class Telegraf:
    """A file that telegraf appends JSON lines to, followed from its present end on."""

    interval_s = 1.0

    def __init__(self, file: Path, selection: Selection) -> None:
        self._file = file
        self._selection = selection
        self._offset = file.stat().st_size
        self._timeline = _Timeline(time.time())

    def check(self) -> None:
        """Look at the file's last lines.

        Raises:
            ConfigError: They are of several servers.
        """
        with self._file.open("rb") as stream:
            stream.seek(max(self._offset - TAIL_BYTES, 0))
            self._chosen(stream.read().splitlines())

    async def read(self) -> list[Figures]:
        """Read what was written since the last call.

        Raises:
            ConfigError: A second server has turned up.
        """
        return self._timeline.new(self._chosen(self._new_lines()))

    def _chosen(self, lines: Iterable[bytes]) -> list[tuple[float, Sample]]:
        samples = (one for line in lines for one in _telegraf_samples(line))
        chosen = [(at, sample) for at, sample in samples if self._selection.has(sample)]
        _check_one_server(str(self._file), (s for _, s in chosen if s.family in FAMILIES), "url")
        return chosen

    def _new_lines(self) -> list[bytes]:
        try:
            size = self._file.stat().st_size
            if size < self._offset:  # rotated: a new file under the name
                self._offset = 0
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except OSError:  # between two files of a rotation
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


def _telegraf_samples(line: bytes) -> list[tuple[float, Sample]]:
    try:
        row = json.loads(line)
    except ValueError:  # a line that is none of telegraf's says nothing
        return []
    rows = row.get("metrics", [row]) if isinstance(row, dict) else []
    return [sample for one in rows for sample in _telegraf_row(one)]


def _telegraf_row(row: Any) -> Iterator[tuple[float, Sample]]:
    """Yield the samples of one row, in either layout of telegraf's Prometheus input.

    Version 2 puts the family into the field's name, version 1 into the row's.
    """
    if not isinstance(row, dict):
        return
    tags, fields, name = row.get("tags", {}), row.get("fields", {}), str(row.get("name", ""))
    unix_s = _unix_s(float(row.get("timestamp", 0)))
    for key, value in fields.items():
        family = known_family(name if key in {"gauge", "counter", "value"} else key)
        if family is not None and isinstance(value, int | float):
            yield unix_s, Sample(family, tags, float(value))


def _unix_s(stamp: float) -> float:
    """Return seconds, whatever power of a thousandth telegraf was told to count in."""
    while stamp > 1e11:  # seconds reach that in the year 5138
        stamp /= 1000
    return stamp
