"""The report's figures as JSON and CSV.

JSON holds every figure of the page; seconds, infinite ones as "inf". CSV has one row a trial, all
columns in seconds and counts, valid or not: for a spreadsheet, a notebook, or another report.
"""

from __future__ import annotations

import csv
import io
import json
import math
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.report.findings import PlatformFindings, TrialRow
    from tailrace.bench.report.page import Content

JSON_VERSION = 1
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_json(content: Content) -> str:
    """Return every figure of the report."""
    whole = {
        "version": JSON_VERSION,
        "verdict": [_plain(statement) for statement in content.statements],
        "cautions": list(content.cautions),
        "platforms": [_platform(platform) for platform in content.platforms],
        "costs": [{"platform": name, **_plain(cost)} for name, cost in content.costs],
        "decisions": [_plain(each) for each in content.advice],
        "slow_tails": [_plain(tail) for tail in content.tails],
    }
    return json.dumps(whole, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _platform(platform: PlatformFindings) -> dict[str, Any]:
    comparison = platform.comparison
    return {
        "name": platform.name,
        "folder": str(platform.folder),
        "title": comparison.title,
        "command": comparison.command,
        "started_unix_s": comparison.started_unix_s,
        "finished_unix_s": comparison.finished_unix_s,
        "traffic": comparison.traffic,
        "limits": comparison.limits,
        "machine": _plain(comparison.platform),
        "rates": [_plain(row) for row in platform.rates],
        "steady": [_plain(row) for row in platform.steady],
        "trials": [_plain(row) for row in platform.trials],
        "plan": _plain(comparison.plan),
    }


def _plain(value: Any) -> Any:
    """Return what JSON can hold: structs as objects, infinite numbers as "inf", NaN as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | float | None):
        return value
    return _plain(msgspec.to_builtins(value))


def to_csv(platforms: Sequence[PlatformFindings]) -> str:
    """Return one row a trial."""
    rows = [_row(platform, row) for platform in platforms for row in platform.trials]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _row(platform: PlatformFindings, row: TrialRow) -> dict[str, Any]:
    trial, done = row.trial, row.work
    contender = next(c for c in platform.comparison.contenders if c.name == trial.contender)
    found: dict[str, Any] = {
        "platform": platform.name,
        "contender": trial.contender,
        "engine": contender.engine,
        "strategy": contender.strategy,
        "engine_version": contender.version,
        "phase": trial.phase,
        "pair": trial.pair + 1,
        "rate_rps": trial.rate_rps,
        "users": trial.users,
        "seed": trial.seed,
        "duration_s": trial.duration_s,
        "valid": not trial.reasons,
        "outcome": trial.outcome,
        "requests": done.requests,
        "completed": done.completed,
        "failed": done.failed,
        "cancelled": done.cancelled,
        "good": done.good,
        "requests_per_s": done.per_second(done.completed),
        "goodput_rps": None if done.good is None else done.per_second(done.good),
        "input_tokens": done.input_tokens,
        "output_tokens": done.output_tokens,
        "output_tokens_per_s": done.per_second(done.output_tokens),
    }
    for key, latency in done.latency_s.items():
        for point in ("p50", "p90", "p95", "p99"):
            found[f"{key}_{point}_s"] = getattr(latency, point)
    found |= done.readings
    found |= {"reasons": "; ".join(trial.reasons), "cautions": "; ".join(trial.cautions)}
    found["folder"] = str(platform.folder / trial.folder)
    return {name: _cell(value) for name, value in found.items()}


def _cell(value: Any) -> Any:
    """Return a cell; text that a spreadsheet would run as a formula gets a quote before it."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value
