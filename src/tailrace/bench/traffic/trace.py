"""Readers of public traces: CSV by column NAME, JSONL by key, a bad row named by file and line.

    format                      arrival                     prompt            output
    Tailrace CSV / JSONL        arrival_s (s)               input_tokens      output_tokens
    ServeGen CSV                arrival_s (s)               input_tokens      output_tokens
    Azure 2023 / 2024 CSV       TIMESTAMP (date and time)   ContextTokens     GeneratedTokens
    BurstGPT CSV                Timestamp (s)               Request tokens    Response tokens
    Mooncake JSONL              timestamp (ms)              input_length      output_length
    Qwen-Bailian JSONL          timestamp (s), chat_id      input_length      output_length

Other columns (`client`, `Model`, `Session ID`) are passed over. Rows with zero input or output
tokens are failed calls in these traces: they are left out and counted.

`hash_ids` name a prompt's blocks (512 tokens each, Bailian's 16), equal ids where the text up to
the block's end is equal. Kept are the leading ids of whole blocks that at least one other row has
too: an id that nobody shares says nothing that a prompt of its own text does not.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.bench.traffic.schedule import Arrival
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path


T = TypeVar("T")

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Trace:
    """What a file held."""

    arrivals: tuple[Arrival, ...]
    """Sorted by time, which starts at 0."""
    format: str
    left_out: int
    """Rows of zero tokens."""
    block_tokens: int = 0
    """Tokens in each block of the requests' `prefix_ids`; 0: no row shares a prefix."""

    @property
    def rate_rps(self) -> float:
        """Requests per second between the first request and the last."""
        span_s = self.arrivals[-1].arrival_s
        return (len(self.arrivals) - 1) / span_s if span_s > 0 else math.inf


@dataclass(frozen=True)
class _Layout:
    """Where one format keeps what is needed."""

    name: str
    time: str
    seconds: Callable[[Any], float]
    input_tokens: str
    output_tokens: str
    block_tokens: int = 0
    """Tokens in each block of `hash_ids`, where the format has them."""
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
    _Layout(
        "tailrace", "arrival_s", _number, "input_tokens", "output_tokens", MOONCAKE_BLOCK_TOKENS
    ),
    _Layout("azure", "TIMESTAMP", _date, "ContextTokens", "GeneratedTokens"),
    _Layout("burstgpt", "Timestamp", _number, "Request tokens", "Response tokens"),
    _Layout(
        "bailian",
        "timestamp",
        _number,
        "input_length",
        "output_length",
        BAILIAN_BLOCK_TOKENS,
        marker="chat_id",
    ),
    _Layout(
        "mooncake",
        "timestamp",
        _milliseconds,
        "input_length",
        "output_length",
        MOONCAKE_BLOCK_TOKENS,
    ),
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
    for line, row in rows(file):
        layout = layout or _layout_of(row, f"{file}:{line}")
        arrival = _arrival(row, layout, f"{file}:{line}")
        if arrival.input_tokens and arrival.output_tokens:
            arrivals.append(arrival)
        else:
            left_out += 1
    if layout is None or not arrivals:
        raise ConfigError(f"{file}: no requests in it")
    shared = shared_prefixes(_from_zero(arrivals))
    has_prefixes = any(arrival.prefix_ids for arrival in shared)
    return Trace(shared, layout.name, left_out, layout.block_tokens if has_prefixes else 0)


def shared_prefixes(arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Return the requests with those leading ids only that another request has too."""
    holders = Counter(itertools.chain.from_iterable(a.prefix_ids for a in arrivals))
    return tuple(
        replace(
            arrival,
            prefix_ids=tuple(itertools.takewhile(lambda i: holders[i] > 1, arrival.prefix_ids)),
        )
        for arrival in arrivals
    )


def _from_zero(arrivals: list[Arrival]) -> tuple[Arrival, ...]:
    ordered = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    first_s = ordered[0].arrival_s
    return tuple(replace(a, arrival_s=a.arrival_s - first_s) for a in ordered)


def _layout_of(row: dict[str, Any], where: str) -> _Layout:
    for layout in _LAYOUTS:
        if layout.fits(row):
            return layout
    wanted = "; ".join(f"{i.name}: {i.time}, {i.input_tokens}, {i.output_tokens}" for i in _LAYOUTS)
    raise ConfigError(f"{where}: columns {', '.join(map(str, row))} fit no known trace ({wanted})")


def _arrival(row: dict[str, Any], layout: _Layout, where: str) -> Arrival:
    input_tokens = _field(row, layout.input_tokens, _tokens, where)
    ids: tuple[int, ...] = ()
    if layout.block_tokens and row.get("hash_ids") is not None:
        ids = _field(row, "hash_ids", _ids, where)
    return Arrival(
        _field(row, layout.time, layout.seconds, where),
        input_tokens,
        _field(row, layout.output_tokens, _tokens, where),
        ids[: input_tokens // layout.block_tokens] if ids else (),
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


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise TypeError(value)
    return tuple(value)


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
