"""Whose turn it is among the keys of one priority: by tokens served, in proportion to shares.

Start-time fair queueing. A level (one priority) has a clock that counts tokens, and every waiting
sequence a start on it:

    start = max(level's clock, where its key's last sequence ends)
    end   = start + tokens it is expected to cost / the key's share

Who starts first is served first; the clock stands at the latest start that was admitted. A key that
floods queues up behind itself, so a single request of another key, which starts at the clock, goes
before all but the flood's next. Starts never fall within a key, so a key is served in order, and
they never change once given, so the order is total and settled. What a sequence really cost
corrects where the next one of its key starts. A level with nobody in the house is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class _Flow:
    """One key at one level."""

    end: float
    """Where its next sequence starts, if the clock is not beyond."""
    last_start: float


@dataclass
class _Level:
    clock: float = 0.0
    members: int = 0
    flows: dict[str, _Flow] = field(default_factory=dict)


class Shares:
    """The clocks of all levels; knows only those who are in the house."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def enter(self, level: int, key: str, share: float, tokens: int) -> float:
        """Return the start of a key's new sequence.

        Args:
            level: Its priority.
            key: Whose it is.
            share: The key's weight; above 0.
            tokens: What it is expected to cost.
        """
        at = self._levels.setdefault(level, _Level())
        flow = at.flows.setdefault(key, _Flow(at.clock, at.clock))  # keys are few: configured
        start = max(at.clock, flow.end)
        flow.last_start, flow.end = start, start + tokens / share
        at.members += 1
        return start

    def begin(self, level: int, start: float) -> None:
        """Note that a sequence was admitted."""
        at = self._levels[level]
        at.clock = max(at.clock, start)

    def leave(self, level: int, key: str, share: float, surplus: int) -> None:
        """Note that a sequence has ended.

        Args:
            level: Its priority.
            key: Whose it was.
            share: As it entered.
            surplus: Tokens that it cost beyond what was expected; below 0 where it cost less.
        """
        at = self._levels[level]
        flow = at.flows[key]
        flow.end = max(flow.last_start, flow.end + surplus / share)
        at.members -= 1
        if not at.members:
            del self._levels[level]

    @property
    def members(self) -> int:
        """Sequences in the house."""
        return sum(level.members for level in self._levels.values())
