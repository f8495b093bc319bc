"""Which trials the pictures show: the same load, and the same pair, for every contender."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.monitor import read_readings
from tailrace.bench.records import read_records
from tailrace.bench.report.time_figures import Timeline

if TYPE_CHECKING:
    from tailrace.bench.report.findings import Load, PlatformFindings, TrialRow


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the pictures of one platform are drawn from."""

    load: Load | None
    """None where no steady load was measured for every contender."""
    pair: int
    rows: dict[str, TrialRow]
    """By contender: its trial in that pair."""
    lines: tuple[Timeline, ...]


def choose(platform: PlatformFindings) -> Shown:
    """Return the load in focus, and the first pair in which every contender has a valid trial.

    Raises:
        ConfigError: A trial's records cannot be read.
    """
    load = platform.focus
    if load is None:
        return Shown(load=None, pair=0, rows={}, lines=())
    pairs: dict[int, dict[str, TrialRow]] = {}
    for (contender, at), samples in platform.samples.items():
        for row in samples.rows if at == load else ():
            pairs.setdefault(row.trial.pair, {})[contender] = row
    pair, rows = min(pairs.items(), key=lambda item: (-len(item[1]), item[0]))
    order = [c.name for c in platform.comparison.contenders if c.name in rows]
    return Shown(
        load=load,
        pair=pair,
        rows={name: rows[name] for name in order},
        lines=tuple(_line(platform, rows[name]) for name in order),
    )


def _line(platform: PlatformFindings, row: TrialRow) -> Timeline:
    folder = platform.folder / row.trial.folder
    return Timeline(
        contender=row.trial.contender,
        records=read_records(folder / "records.jsonl"),
        scrapes=read_readings(folder / "monitor.jsonl"),
        duration_s=row.trial.duration_s,
    )
