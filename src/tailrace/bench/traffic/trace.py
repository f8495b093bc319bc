"""Readers of public traces: CSV by column NAME, JSONL by key, a bad row named by file and line.

    format                      arrival                     prompt            output
    Tailrace CSV / JSONL        arrival_s (s)               input_tokens      output_tokens
    ServeGen CSV                arrival_s (s)               input_tokens      output_tokens
    Azure 2023 / 2024 CSV       TIMESTAMP (date and time)   ContextTokens     GeneratedTokens
    BurstGPT CSV                Timestamp (s)               Request tokens    Response tokens
    Mooncake JSONL              timestamp (ms)              input_length      output_length
    Qwen-Bailian JSONL          timestamp (s), chat_id      input_length      output_length

Other columns (`client`, `Model`, `Session ID`, `hash_ids`) are passed over. Rows with zero input
or output tokens are failed calls in these traces: they are left out and counted.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.bench.traffic.schedule import Arrival
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


T = TypeVar("T")


@dataclass(frozen=True)
class Trace:
    """What a file held."""

    arrivals: tuple[Arrival, ...]
    """Sorted by time, which starts at 0."""
    format: str
    left_out: int
    """Rows of zero tokens."""
    has_prefixes: bool
    """Whether rows say which prefix blocks they share (`hash_ids`); they are not replayed."""


@dataclass(frozen=True)
class _Layout:
    """Where one format keeps what is needed."""

    name: str
    time: str
    seconds: Callable[[Any], float]
    input_tokens: str
    output_tokens: str
    marker: str = ""
    """A key that tells this format from another with the same three names."""

    def fits(self, names: Iterable[str]) -> bool:
        needed = {self.time, self.input_tokens, self.output_tokens}
        return (needed | ({self.marker} if self.marker else set())) <= set(names)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(value)
    return seconds


def _date(value: Any) -> float:
    moment = datetime.fromisoformat(value)
    # Azure 2023 writes no zone and Azure 2024 writes UTC: only differences matter.
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


def _milliseconds(value: Any) -> float:
    return _number(value) / 1000


_LAYOUTS = (
    _Layout("tailrace", "arrival_s", _number, "input_tokens", "output_tokens"),
    _Layout("azure", "TIMESTAMP", _date, "ContextTokens", "GeneratedTokens"),
    _Layout("burstgpt", "Timestamp", _number, "Request tokens", "Response tokens"),
    _Layout("bailian", "timestamp", _number, "input_length", "output_length", marker="chat_id"),
    _Layout("mooncake", "timestamp", _milliseconds, "input_length", "output_length"),
)


def read_trace(file: Path) -> Trace:
    """Read a trace file, its format recognised from its names.

    Raises:
        ConfigError: The file cannot be read, its format is unknown, or a row is bad; the message
            names file and line.
    """
    rows = _json_rows if file.suffix in {".jsonl", ".json"} else _csv_rows
    arrivals: list[Arrival] = []
    layout: _Layout | None = None
    left_out = 0
    has_prefixes = False
    for line, row in rows(file):
        layout = layout or _layout_of(row, f"{file}:{line}")
        has_prefixes = has_prefixes or "hash_ids" in row
        arrival = _arrival(row, layout, f"{file}:{line}")
        if arrival.input_tokens and arrival.output_tokens:
            arrivals.append(arrival)
        else:
            left_out += 1
    if layout is None or not arrivals:
        raise ConfigError(f"{file}: no requests in it")
    return Trace(_from_zero(arrivals), layout.name, left_out, has_prefixes)


def _from_zero(arrivals: list[Arrival]) -> tuple[Arrival, ...]:
    ordered = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    first_s = ordered[0].arrival_s
    return tuple(Arrival(a.arrival_s - first_s, a.input_tokens, a.output_tokens) for a in ordered)


def _layout_of(row: dict[str, Any], where: str) -> _Layout:
    for layout in _LAYOUTS:
        if layout.fits(row):
            return layout
    wanted = "; ".join(f"{i.name}: {i.time}, {i.input_tokens}, {i.output_tokens}" for i in _LAYOUTS)
    raise ConfigError(f"{where}: columns {', '.join(map(str, row))} fit no known trace ({wanted})")


def _arrival(row: dict[str, Any], layout: _Layout, where: str) -> Arrival:
    return Arrival(
        _field(row, layout.time, layout.seconds, where),
        _field(row, layout.input_tokens, _tokens, where),
        _field(row, layout.output_tokens, _tokens, where),
    )


def _field(row: dict[str, Any], name: str, read: Callable[[Any], T], where: str) -> T:
    value = row.get(name)
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError) as error:
        shown = "missing" if value is None else repr(value)
        raise ConfigError(f"{where}: {name} is {shown}; correct or remove the row") from error


def _tokens(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError(value)
    count = int(value)
    if count < 0:
        raise ValueError(value)
    return count


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            yield from stream
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error.reason})") from error


def _csv_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(_lines(file))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ConfigError(f"{file}:{reader.line_num}: {error}") from error


def _json_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{file}:{number}: a request must be a JSON object")
        yield number, row
