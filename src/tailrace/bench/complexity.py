"""How much operating a configuration asks for: points by stated rules, from what was seen.

The points are a convention, not a measurement: they make the reasons comparable and visible, and a
reader who disagrees with a rule sees what it counted.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.result import Contender, Platform

SLOW_START_S = 60.0
VERY_SLOW_START_S = 300.0
MANY_PROCESSES = 4
MANY_OPTIONS = 8
PLAIN_OPTIONS = {"--host", "--port", "--model", "--model-path", "-m", "--served-model-name"}
"""Any server needs them."""
EXTRA_PARTS = (
    (
        1,
        "a drafter to keep in step with the model",
        re.compile(r"\b(specul|draft|eagle|medusa|mtp|ngram|lookahead)|-draft\b|^-md$"),
    ),
    (
        2,
        "prefill and decode on servers of their own",
        re.compile(r"\b(disaggreg|kv-transfer|pd\b)"),
    ),
    (1, "a KV store outside the engine", re.compile(r"\b(lmcache|mooncake|hicache)")),
)
"""Points, what it is, and what tells it in a name, a strategy or an option."""
_PARTS_RULE = "; ".join(f"{what}: {points}" for points, what, _ in EXTRA_PARTS)

RULES = (
    "GPUs: one point for each doubling beyond one",
    f"processes: one point above {MANY_PROCESSES}",
    (
        f"start: one point where it takes more than {SLOW_START_S:g} s, two above "
        f"{VERY_SLOW_START_S:g} s (median)"
    ),
    "deaths in the measurement: two points; out of memory: two points",
    f"extra parts, points for each: {_PARTS_RULE}",
    f"options: one point above {MANY_OPTIONS} of them, host, port and model not counted",
)
"""As they are applied, for the report."""


@dataclass(frozen=True)
class Complexity:
    """The score of one configuration."""

    points: int
    why: tuple[str, ...]
    """One sentence for each rule that gave points."""


def complexity_of(
    contender: Contender, platform: Platform, processes: float | None = None
) -> Complexity:
    """Return the score.

    Args:
        contender: What was seen of it.
        platform: The machine that it used.
        processes: The most processes that its server was seen to have; None: not known.
    """
    given = [
        _gpus(platform),
        _processes(processes),
        _start(contender.ready_s),
        _deaths(contender),
        *_parts(contender),
        _options(contender.command),
    ]
    scored = [(points, why) for points, why in given if points]
    return Complexity(
        sum(points for points, _ in scored), tuple(f"{why} (+{points})" for points, why in scored)
    )


def _gpus(platform: Platform) -> tuple[int, str]:
    count = len(platform.gpus)
    return (math.ceil(math.log2(count)) if count > 1 else 0), f"{count} GPUs"


def _processes(processes: float | None) -> tuple[int, str]:
    if processes is None:
        return 0, ""
    return int(processes > MANY_PROCESSES), f"{processes:.0f} processes"


def _start(ready_s: Sequence[float]) -> tuple[int, str]:
    if not ready_s:
        return 0, ""
    median_s = statistics.median(ready_s)
    points = int(median_s > SLOW_START_S) + int(median_s > VERY_SLOW_START_S)
    return points, f"{median_s:.0f} s to start"


def _deaths(contender: Contender) -> tuple[int, str]:
    seen = [
        f"{what}: {count}"
        for count, what in (
            (contender.restarts, "died and was restarted"),
            (contender.out_of_memory, "out of memory"),
        )
        if count
    ]
    return 2 * len(seen), ", ".join(seen)


def _parts(contender: Contender) -> list[tuple[int, str]]:
    """Return what a name, a strategy or an option tells; a model's path may be called anything."""
    words = [contender.name, contender.strategy, *_names(contender.command)]
    return [
        (points, what)
        for points, what, sign in EXTRA_PARTS
        if any(sign.search(word.lower()) for word in words)
    ]


def _options(command: Sequence[str]) -> tuple[int, str]:
    count = len(set(_names(command)) - PLAIN_OPTIONS)
    return int(count > MANY_OPTIONS), f"{count} options"


def _names(command: Sequence[str]) -> list[str]:
    return [part.partition("=")[0] for part in command if part.startswith("-")]
