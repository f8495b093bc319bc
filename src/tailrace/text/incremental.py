"""Text to ids while the text still comes, exactly: any split gives the ids of the whole.

    feed "Hello wor"   -> ids of "Hello"         held: " wor"
    feed "ld, this"    -> ids of " world,"       held: " this"
    finish             -> ids of " this"

What is fed waits until a safe cut is found in it (cuts.py); an encoder without safe cuts waits for
the end. The work is linear: a character is looked at for a cut once, joined once, encoded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping

    from tailrace.text.cuts import Cuts


class Span(NamedTuple):
    """A stretch of a text, and whether control tokens spelled in it count as such."""

    text: str
    is_trusted: bool


class IncrementalEncoder:
    """Encodes one text, without what a model wants around it, such as a BOS.

    Args:
        encode: Returns the ids of a text.
        cuts: Of that encoder; None: the text is never cut.
    """

    def __init__(self, encode: Callable[[str], list[int]], cuts: Cuts | None) -> None:
        self._encode = encode
        self._cuts = cuts
        self._held: list[str] = []
        # The end of what is held: what an added token that reaches into later text may begin in.
        self._window = ""

    def feed(self, text: str) -> list[int]:
        """Take more text; return the ids that are certain now.

        Raises:
            RequestError: It is no valid Unicode.
        """
        if not text:
            return []
        self._held.append(text)
        if self._cuts is None:
            return []
        seen = len(self._window)
        probe = self._window + text
        cut = self._cuts.last(probe, seen)
        if cut is None:
            self._window = probe[-max(self._cuts.longest_added, 1) :]
            return []
        self._held[-1] = text[: cut - seen]
        ready, rest = "".join(self._held), text[cut - seen :]
        self._held = [rest]
        self._window = rest[-max(self._cuts.longest_added, 1) :]
        return self._encode(ready)

    def finish(self) -> list[int]:
        """Return the ids of the rest; the encoder is then as new.

        Raises:
            RequestError: The text is no valid Unicode.
        """
        rest = "".join(self._held)
        self._held, self._window = [], ""
        return self._encode(rest) if rest else []


class IncrementalSpans:
    """Encodes spans, control tokens being found in trusted ones only: see `encode_spans`.

    Args:
        encode: Returns the ids of a text in which no control token counts.
        cuts: Of that encoder.
        control_pattern: Matches control tokens; none of which swallows what is around it.
        control_ids: Their ids.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        cuts: Cuts | None,
        control_pattern: re.Pattern[str],
        control_ids: Mapping[str, int],
    ) -> None:
        self._segment = IncrementalEncoder(encode, cuts)
        self._control_pattern = control_pattern
        self._control_ids = control_ids

    def feed(self, span: Span) -> list[int]:
        """Take the next span; return the ids that are certain now.

        A trusted one must be whole, up to an untrusted one that is not empty or the end; an
        untrusted one may be fed in parts.

        Raises:
            RequestError: It is no valid Unicode.
        """
        if not span.is_trusted:
            return self._segment.feed(span.text)
        ids: list[int] = []
        start = 0
        for match in self._control_pattern.finditer(span.text):
            ids += self._segment.feed(span.text[start : match.start()])
            ids += self._segment.finish()
            ids.append(self._control_ids[match[0]])
            start = match.end()
        return ids + self._segment.feed(span.text[start:])

    def finish(self) -> list[int]:
        """Return the ids of the rest."""
        return self._segment.finish()

    def last_control(self, text: str) -> int | None:
        """Return where a trusted text's last control token begins; None: it has none.

        What is encoded from there on does not depend on what is before.
        """
        starts = [match.start() for match in self._control_pattern.finditer(text)]
        return starts[-1] if starts else None


def joined(spans: list[Span]) -> list[Span]:
    """Return the spans with neighbours of equal trust joined, and none empty."""
    parts: list[tuple[list[str], bool]] = []
    for text, is_trusted in spans:
        if text and parts and parts[-1][1] == is_trusted:
            parts[-1][0].append(text)
        elif text:
            parts.append(([text], is_trusted))
    return [Span("".join(texts), is_trusted) for texts, is_trusted in parts]
