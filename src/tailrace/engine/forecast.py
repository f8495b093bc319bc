"""How long answers will be, by those that came before.

A guess, never trusted: a wrong one costs a preemption, not an answer.
"""

from __future__ import annotations

import bisect
from collections import deque

FIRST_GUESS_TOKENS = 256
"""Of an answer, before enough were seen."""
_ENOUGH = 16
_WINDOW = 512


class AnswerLengths:
    """Lengths of the latest answers, as a guess for those that run."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, tokens: int) -> None:
        """Note how long an answer became."""
        if len(self._latest) == _WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(tokens)
        bisect.insort(self._sorted, tokens)

    def expect(self, so_far: int, limit: int) -> int:
        """Return the length, in tokens, to expect of an answer that has `so_far` already.

        The mean of the answers that were longer; twice `so_far` where there are too few of those.
        At least one token more than `so_far`, at most `limit`.
        """
        longer = self._sorted[bisect.bisect_right(self._sorted, so_far) :]
        if len(longer) >= _ENOUGH:
            guess = sum(longer) // len(longer)
        else:
            guess = max(2 * so_far, FIRST_GUESS_TOKENS)
        return min(max(guess, so_far + 1), max(limit, so_far + 1))
