"""An event of a stream that differs from the last by its text alone: the rest is encoded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

_ENCODER = msgspec.json.Encoder()
_MARK = "the text"


class TextFrame:
    """What stands around the text.

    Args:
        event: Returns the event that says a text. Nothing behind that text may be the client's or
            the model's to choose: it is found by looking from the end.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, event: Callable[[str], bytes]) -> None:
        self._before, _, self._after = event(_MARK).rpartition(_ENCODER.encode(_MARK))

    def around(self, text: str) -> bytes:
        """Return the event that says `text`."""
        return self._before + _ENCODER.encode(text) + self._after
