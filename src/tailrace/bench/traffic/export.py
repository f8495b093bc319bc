"""A schedule as Mooncake JSONL, so that other tools replay the same run.

    {"timestamp": 1250, "input_length": 1300, "output_length": 256, "hash_ids": [0, 7, 8]}

`timestamp` is in whole milliseconds, as in the published traces. `hash_ids` has one id for each
begun block of 512 tokens: a shared block keeps its id, every other one gets an id that nothing
else has. Other tools make their own text from it; lengths, times and shared prefixes are ours.

The format has no users, no turns that wait for an answer, and no priorities: schedules that need
one of them are refused rather than written as something else.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING

from tailrace.bench.traffic.trace import MOONCAKE_BLOCK_TOKENS
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tailrace.bench.prompts import Prompt
    from tailrace.bench.traffic.schedule import Arrival, Schedule


def write_mooncake(schedule: Schedule, prompts: Sequence[Prompt] | None, file: Path) -> None:
    """Write the schedule.

    Args:
        schedule: An open loop.
        prompts: If given, what was really sent: `input_length` is then the prompt's own count.
        file: Replaced where it exists.

    Raises:
        ConfigError: The format cannot say what the schedule says, or the file cannot be written.
    """
    _check(schedule)
    lengths = [arrival.input_tokens for arrival in schedule.arrivals]
    if prompts is not None:
        lengths = [prompt.tokens for prompt in prompts]
    rows = _rows(schedule, lengths)
    try:
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a file to write to") from error


def _check(schedule: Schedule) -> None:
    if schedule.users:
        raise ConfigError(
            "export: a closed loop has no times of its own; export an open loop (leave out users)"
        )
    if any(arrival.turn for arrival in schedule.arrivals):
        raise ConfigError(
            "export: later turns wait for an answer, and Mooncake rows have fixed times; export "
            "single requests (turns 1)"
        )
    if any(arrival.priority for arrival in schedule.arrivals):
        raise ConfigError("export: Mooncake rows have no priority; leave out priorities")
    if schedule.block_tokens and MOONCAKE_BLOCK_TOKENS % schedule.block_tokens:
        raise ConfigError(
            f"export: blocks of {schedule.block_tokens} tokens do not fill Mooncake's of "
            f"{MOONCAKE_BLOCK_TOKENS}"
        )


def _rows(schedule: Schedule, lengths: Sequence[int]) -> Iterator[dict[str, object]]:
    blocks = [_blocks(arrival, schedule.block_tokens) for arrival in schedule.arrivals]
    # Published ids are small whole numbers; ours are kept where they are, others go above them.
    known = _Ids(schedule)
    for arrival, length, chain in zip(schedule.arrivals, lengths, blocks, strict=True):
        begun = math.ceil(length / MOONCAKE_BLOCK_TOKENS)
        shared = [known.of(block) for block in chain[:begun]]
        yield {
            "timestamp": round(arrival.arrival_s * 1000),
            "input_length": length,
            "output_length": arrival.output_tokens,
            "hash_ids": shared + known.fresh(begun - len(shared)),
        }


def _blocks(arrival: Arrival, block_tokens: int) -> list[tuple[int, ...]]:
    """Return the prompt's whole shared blocks of Mooncake's size, each as the ids it is made of."""
    if not block_tokens:
        return []
    each = MOONCAKE_BLOCK_TOKENS // block_tokens
    whole = len(arrival.prefix_ids) // each
    return [arrival.prefix_ids[place * each : (place + 1) * each] for place in range(whole)]


class _Ids:
    """Hands out the ids of the file."""

    def __init__(self, schedule: Schedule) -> None:
        used = itertools.chain.from_iterable(a.prefix_ids for a in schedule.arrivals)
        self._next = max(used, default=-1) + 1
        self._of: dict[tuple[int, ...], int] = {}

    def of(self, block: tuple[int, ...]) -> int:
        """Return a shared block's id: its own, or for several smaller ones a new one."""
        if len(block) == 1:
            return block[0]
        if block not in self._of:
            self._of[block] = self.fresh(1)[0]
        return self._of[block]

    def fresh(self, count: int) -> list[int]:
        """Return ids that nothing else has."""
        self._next += count
        return list(range(self._next - count, self._next))
