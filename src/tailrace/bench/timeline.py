"""Records as curves over the run's time."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tailrace.bench.records import Record

MAX_BINS = 180
WIDTHS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def in_flight(records: Sequence[Record]) -> tuple[list[float], list[int]]:
    """Return times and, from each on, how many requests are due and not ended."""
    steps = [(record.scheduled_s, 1) for record in records]
    steps += [(record.finished_s, -1) for record in records if record.finished_s is not None]
    steps.sort()
    counts = itertools.accumulate(step for _, step in steps)
    return [at_s for at_s, _ in steps], list(counts)


def per_second(
    events: Iterable[tuple[float, float]], span_s: float
) -> tuple[list[float], list[float]]:
    """Return bin edges over `span_s` and the rate of (time, weight) events in each bin."""
    width_s = bin_width_s(span_s)
    count = max(math.ceil(span_s / width_s), 1)
    sums = [0.0] * count
    for at_s, weight in events:
        sums[min(max(int(at_s / width_s), 0), count - 1)] += weight
    return [index * width_s for index in range(count + 1)], [total / width_s for total in sums]


def bin_width_s(span_s: float) -> float:
    """Return a round width that cuts the span into at most MAX_BINS bins."""
    fitting = (width for width in WIDTHS_S if span_s <= width * MAX_BINS)
    return next(fitting, span_s / MAX_BINS)
