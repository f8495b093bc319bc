r"""The strings of a JSON text while its bytes still come, unescaped exactly.

    {"prompt": "caf\u00e9 \ud83d|\ude00 ...      the text before the bar: "café "

Only strings at wanted places are read; all else is passed over. This is a look ahead, not a
parser: what it says holds only if the whole text turns out to be valid JSON and the place to be
what it seemed, which its user must check in the end. It gives up, for good, at the first thing
that valid JSON has not, at deep nesting, and after so many brackets and commas that passing over
them would take the event loop's time. Each byte is looked at once, however the bytes are split:
what is held is at most a key, or an unfinished escape or character.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

Place = tuple[str | int, ...]
"""Keys and indices from the outermost value inwards; only objects, arrays and strings count."""

MAX_DEPTH = 16
MAX_STEPS = 20_000
"""Brackets, colons, commas and strings, each a few hundred nanoseconds."""
_MAX_KEY_BYTES = 256

_IN_OBJECT = re.compile(rb'["{}\[\]:,]')
_IN_ARRAY = re.compile(rb'["{}\[\]:]')
_ANY_STRING = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+', re.DOTALL)
_WHOLE_UNITS = re.compile(
    rb'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_PART_OF_UNIT = re.compile(
    rb"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?"
)


class Piece(NamedTuple):
    """More of the string at a place."""

    place: Place
    text: str
    is_first: bool
    is_last: bool


class _Broken(Exception):  # noqa: N818 -- not an error: the look ahead ends
    """This is no JSON, or too much of it."""


@dataclass
class _Container:
    is_object: bool
    step: str | int
    """The key under way, or the index of the next item."""
    awaits_key: bool


class GrowingJson:
    """Reads one JSON text.

    Args:
        wants: Says of a place whether the string there is to be read.
    """

    def __init__(self, wants: Callable[[Place], bool]) -> None:
        self._wants = wants
        self._open: list[_Container] = []
        self._rest = b""
        # Of the class: bound ones would make it garbage that only the collector finds.
        self._read: Callable[[GrowingJson, bytes, int], int | None] = GrowingJson._read_structure
        self._place: Place = ()
        self._is_first = False
        self._steps = 0
        self._pieces: list[Piece] = []
        self.is_over = False
        """It gave up, or the text has ended."""
        self.keys: set[str] = set()
        """Of the outermost object, so far."""
        self.repeated: set[str] = set()
        """Those of them that came more than once."""

    def feed(self, data: bytes) -> list[Piece]:
        """Take more bytes; return what they add to wanted strings."""
        if self.is_over:
            return []
        data = self._rest + data
        at: int | None = 0
        try:
            while at is not None and at < len(data):
                self._rest = b""
                at = self._read(self, data, at)
        except (_Broken, ValueError, msgspec.DecodeError):  # ValueError: no UTF-8
            self.is_over = True
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each reader takes what it can from `at` on and returns where the next one goes on; or None,
    # where more bytes are needed and `_rest` holds what is to be seen again with them.

    def _read_structure(self, data: bytes, at: int) -> int | None:
        top = self._open[-1] if self._open else None
        pattern = _IN_ARRAY if top is not None and not top.is_object else _IN_OBJECT
        found = pattern.search(data, at)
        if found is None:
            return None
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _Broken
        char = found[0]
        if top is None:
            self._begin(char)
        elif char in b"}]":
            self._end(top, char)
        elif char in b"{[":
            self._nest(top, char)
        elif char == b'"':
            self._begin_string(top)
        elif not top.is_object:
            raise _Broken
        else:
            top.awaits_key = char == b","
        return found.end()

    def _begin(self, char: bytes) -> None:
        if char != b"{":
            raise _Broken
        self._open.append(_Container(is_object=True, step="", awaits_key=True))

    def _nest(self, top: _Container, char: bytes) -> None:
        if top.awaits_key or len(self._open) >= MAX_DEPTH:
            raise _Broken
        is_object = char == b"{"
        self._open.append(
            _Container(is_object=is_object, step="" if is_object else 0, awaits_key=is_object)
        )

    def _end(self, top: _Container, char: bytes) -> None:
        if top.is_object != (char == b"}"):
            raise _Broken
        self._open.pop()
        if not self._open:
            raise _Broken  # the text is over
        self._next_item()

    def _next_item(self) -> None:
        top = self._open[-1]
        if isinstance(top.step, int):
            top.step += 1

    def _begin_string(self, top: _Container) -> None:
        if top.awaits_key:
            self._read = GrowingJson._read_key
            return
        self._place = tuple(container.step for container in self._open)
        self._is_first = True
        is_wanted = self._wants(self._place)
        self._read = GrowingJson._read_wanted if is_wanted else GrowingJson._read_unwanted

    def _read_key(self, data: bytes, at: int) -> int | None:
        end = self._string_end(data, at)
        if end is None:
            self._rest = data[at:]
            if len(self._rest) > _MAX_KEY_BYTES:
                raise _Broken
            return None
        self._open[-1].step = key = _unescaped(data[at:end])
        if len(self._open) == 1:
            (self.repeated if key in self.keys else self.keys).add(key)
        self._open[-1].awaits_key = False
        self._read = GrowingJson._read_structure
        return end + 1

    def _read_unwanted(self, data: bytes, at: int) -> int | None:
        end = self._string_end(data, at)
        if end is not None:
            self._end_string()
            return end + 1
        # A backslash that may hide a quote from us.
        self._rest = b"\\" if data.endswith(b"\\") and _backslashes(data, at) % 2 else b""
        return None

    def _read_wanted(self, data: bytes, at: int) -> int | None:
        found = _WHOLE_UNITS.match(data, at)
        end = at if found is None else found.end()
        is_last = data[end : end + 1] == b'"'
        stop = end
        if not is_last:
            if end < len(data) and not _PART_OF_UNIT.fullmatch(data, end):
                raise _Broken
            if end == len(data):
                stop = _last_whole_character(data, at)
            self._rest = data[stop:]
        text = _unescaped(data[at:stop])
        if text or is_last:
            self._pieces.append(Piece(self._place, text, self._is_first, is_last))
            self._is_first = False
        if is_last:
            self._end_string()
        return end + 1 if is_last else None

    def _string_end(self, data: bytes, at: int) -> int | None:
        """Return where the closing quote is, None where it has not come."""
        found = _ANY_STRING.match(data, at)
        end = at if found is None else found.end()
        if end == len(data) or (end == len(data) - 1 and data[end] == ord("\\")):
            return None
        if data[end] != ord('"'):
            raise _Broken
        return end

    def _end_string(self) -> None:
        self._next_item()
        self._read = GrowingJson._read_structure


def _unescaped(raw: bytes) -> str:
    if b"\\" not in raw:
        return raw.decode()
    return msgspec.json.decode(b'"' + raw + b'"', type=str)


def _backslashes(data: bytes, start: int) -> int:
    """Return how many backslashes end `data`, those before `start` left out."""
    return len(data) - max(start, len(data.rstrip(b"\\")))


def _last_whole_character(data: bytes, start: int) -> int:
    """Return where an unfinished UTF-8 sequence at the end of `data` begins, or its length."""
    for back in range(1, min(3, len(data) - start) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < needs else len(data)
        if byte < 0x80:
            break
    return len(data)
