"""Stop strings in a text that comes in pieces.

Rules
1. The stop string that starts earliest wins; of several that start there, the longest.
2. What may still become part of a stop string is held back: the longest suffix of the text that
   is a proper prefix of one. Everything before it goes out at once.
3. A match is final only when no better one can still come. One that starts earlier, or is longer,
   shows as a held suffix that starts at or before the match:

       stops "ab", "abc"      push("xab") -> ("x", None): "abc" would be longer
                              then push("d") hits "ab", push("c") hits "abc", finish() hits "ab"

   So the stop "ab" is acted on one character late there, and only there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING

from tailrace.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STOPS = 64
MAX_STOP_CHARS = 1024


class StopStrings:
    """Watches one output for stop strings.

    Args:
        stops: The stop strings; none is fine, and then nothing is held back.
        include_stop: Whether the stop string that was hit is part of the text.

    Raises:
        RequestError: A stop string is empty or too long, or there are too many.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        _check(stops)
        self._stops = sorted(set(stops))
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._max_chars = max(map(len, self._stops), default=0)
        longest_first = sorted(self._stops, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._include_stop = include_stop
        self._held = ""
        self._held_free_chars = 0
        """Of the beginning of what is held, that are free of stops."""
        self.hit: str | None = None
        """The stop string that ended the text; further text is dropped."""

    def push(self, text: str, *, is_free: bool = False) -> tuple[str, str | None]:
        """Take new text; return what can go out, and the stop string that was hit.

        Args:
            text: What follows on the text so far.
            is_free: No stop string ends in it; not to be said after text in which one may.
        """
        if not self._stops:
            return text, None
        if self.hit is not None:
            return "", self.hit
        text = self._held + text
        free_chars = len(text) if is_free else self._held_free_chars
        held_start = self._held_start(text)
        match = self._search(text, free_chars)
        if match and match.start() < held_start:
            return self._end(match), self.hit
        self._held = text[held_start:]
        self._held_free_chars = max(0, free_chars - held_start)
        return text[:held_start], None

    def finish(self) -> str:
        """Return what was held back; a match that waited for a better one sets `hit` now."""
        match = None
        if self._stops and self.hit is None:
            match = self._search(self._held, self._held_free_chars)
        if match:
            return self._end(match)
        held, self._held = self._held, ""
        return held

    def _search(self, text: str, free_chars: int) -> re.Match[str] | None:
        """Return the best match that ends beyond the first `free_chars`."""
        start = max(0, free_chars - self._max_chars + 1)  # from before, none reaches beyond
        match = self._pattern.search(text, start)
        while match and match.end() <= free_chars:
            match = self._pattern.search(text, match.start() + 1)
        return match

    def _end(self, match: re.Match[str]) -> str:
        self.hit = match[0]
        self._held = ""
        return match.string[: match.end() if self._include_stop else match.start()]

    def _held_start(self, text: str) -> int:
        """Return where the longest suffix starts that is a proper prefix of a stop string."""
        for start in range(max(0, len(text) - self._max_chars + 1), len(text)):
            if text[start] in self._first_chars and self._is_proper_prefix(text[start:]):
                return start
        return len(text)

    def _is_proper_prefix(self, text: str) -> bool:
        # Whatever has `text` as a proper prefix sorts right after it.
        index = bisect_right(self._stops, text)
        return index < len(self._stops) and self._stops[index].startswith(text)


def _check(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"{len(stops)} stop strings were sent; the limit is {MAX_STOPS}", param="stop"
        )
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop string {index} has {len(stop)} characters: send 1 to {MAX_STOP_CHARS}",
                param="stop",
            )
