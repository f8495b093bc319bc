r"""Tool calls within a model's output: found as the text comes, exact however it is cut.

    hermes       I'll look.\n<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>
    llama3_json  {"name": "f", "parameters": {...}}             the whole output, several by ";"

    TEXT --tag--> CALL --object ends--> AFTER --close, white space--> TEXT
                    '-- no object, no call: the tag and what follows it are text --'

Rules
1. The text outside calls and the calls depend on the whole text alone, never on how it was cut.
2. What begins like a call and is none is text; an output that is read whole is judged whole. In a
   stream a call is announced as soon as its object has a name and then arguments, and stays so:
   where it breaks off, what follows is text. An output that was cut (by the limit on its tokens)
   ends in the same call, whichever way it is read.
3. `arguments` are the very characters that the model wrote.
4. White space next to a call belongs to its markup and is no text.
5. The work is linear: a character is looked at once, but for those after a false call, and after
   `_MOST_FAILED` of these no more are looked for.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MOST_FAILED = 16
_MAX_HEAD_CHARS = 512
"""An object whose arguments do not begin by then is judged when it is whole."""
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class ToolStyle(enum.Enum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"


@dataclass(frozen=True)
class Marks:
    """What stands around and between the calls of a style."""

    opening: str
    closing: str
    separator: str
    arguments: str
    """The name of the member that holds them."""


MARKS = {
    ToolStyle.HERMES: Marks(_OPEN, _CLOSE, "\n", "arguments"),
    ToolStyle.LLAMA3_JSON: Marks("", "", "; ", "parameters"),
}


def style_of(templates: dict[str, str]) -> ToolStyle | None:
    """Return the style that chat templates write calls in, as far as it is one of ours.

    Args:
        templates: Sources by name.
    """
    source = "\n".join(templates.values())
    if "<function=" in source:
        return None  # XML within the tags, as Qwen3-Coder
    if _OPEN in source:
        return ToolStyle.HERMES
    if _PYTHON_TAG in source or ('"parameters": ' in source and '{"name": ' in source):
        return ToolStyle.LLAMA3_JSON
    return None


@dataclass(frozen=True)
class Text:
    """Text outside calls."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of a function; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments."""

    index: int
    text: str


Found = Text | CallBegins | CallArguments


class _State(enum.Enum):
    START = "start"
    TEXT = "text"
    CALL = "call"
    AFTER = "after"


class ToolCallParser:
    """Splits one output into text and calls.

    Args:
        style: How the model writes calls.
        streams: Whether arguments go out before their call is whole; see rule 2.
        most_calls: Further ones are left out; None: there is no limit.
    """

    def __init__(self, style: ToolStyle, *, streams: bool, most_calls: int | None = None) -> None:
        self.calls = 0
        """Calls found so far."""
        self._most_calls = most_calls
        self._is_hermes = style is ToolStyle.HERMES
        self._streams = streams
        self._failed = 0
        self._is_cut = False
        """Known at the end alone."""
        self._state = _State.TEXT if self._is_hermes else _State.START
        self._buffer = ""
        self._space = ""
        """The end of the text so far: said once more text follows, dropped before a call."""
        self._is_after_call = False
        self._object = _Object()
        self._tag = ""
        """What led to the object at hand."""

    def push(self, text: str) -> list[Found]:
        """Return what more of the output brings."""
        self._buffer += text
        return self._wanted(self._run(is_last=False))

    def finish(self, *, is_cut: bool = False) -> list[Found]:
        """Return what was held back, now that nothing follows.

        Args:
            is_cut: Whether the model would have gone on.
        """
        self._is_cut = is_cut
        found = self._wanted(self._run(is_last=True))
        return [*found, Text(self._space)] if self._space else found

    def _wanted(self, found: Iterator[Found]) -> list[Found]:
        most = self._most_calls
        return [one for one in found if most is None or isinstance(one, Text) or one.index < most]

    def _run(self, *, is_last: bool) -> Iterator[Found]:
        steps = {
            _State.START: self._start,
            _State.TEXT: self._read_text,
            _State.CALL: self._read_call,
            _State.AFTER: self._read_end,
        }
        before = None
        while (self._state, len(self._buffer)) != before:
            before = (self._state, len(self._buffer))
            yield from steps[self._state](is_last=is_last)

    def _start(self, *, is_last: bool) -> Iterator[Found]:
        """Llama's way: the output begins with a call, or has none."""
        rest = self._buffer.lstrip()
        object_ = rest.removeprefix(_PYTHON_TAG).lstrip()
        if not is_last and (_PYTHON_TAG.startswith(rest) or not object_):
            return
        if object_.startswith("{"):
            self._begin(len(self._buffer) - len(object_))
        else:
            self._state = _State.TEXT
        yield from ()

    def _read_text(self, *, is_last: bool) -> Iterator[Found]:
        looks = self._is_hermes and self._failed < _MOST_FAILED
        place = self._buffer.find(_OPEN) if looks else -1
        if place >= 0:
            yield from self._say(self._buffer[:place])
            self._buffer = self._buffer[place:]
            self._begin(len(_OPEN))
            return
        kept = _overlap(self._buffer, _OPEN) if looks and not is_last else 0
        end = len(self._buffer) - kept
        spoken, self._buffer = self._buffer[:end], self._buffer[end:]
        yield from self._say(spoken)

    def _begin(self, start: int) -> None:
        """Expect an object at `start` of what is buffered."""
        self._tag, self._buffer = self._buffer[:start], self._buffer[start:]
        self._object = _Object()
        self._state = _State.CALL

    def _read_call(self, *, is_last: bool) -> Iterator[Found]:
        call = self._object
        call.read(self._buffer)
        is_told_early = self._streams or (self._is_cut and call.is_open)
        if is_told_early and not call.name and call.find_head(self._buffer):
            yield from self._announce(call.name)
        if call.name:
            piece = call.next_arguments(self._buffer)
            if piece:
                yield CallArguments(self.calls - 1, piece)
        if call.end is None:
            if call.broken_at is not None or is_last:
                yield from self._give_up(call)
            return
        if not call.name:
            members = _members(self._buffer[: call.end])
            if members is None:
                yield from self._give_up(call)
                return
            yield from self._announce(members[0])
            yield CallArguments(self.calls - 1, members[1])
        self._buffer = self._buffer[call.end :]
        self._is_after_call = True
        self._state = _State.AFTER

    def _announce(self, name: str) -> Iterator[Found]:
        self._space = ""
        yield CallBegins(self.calls, name)
        self.calls += 1

    def _give_up(self, call: _Object) -> Iterator[Found]:
        """The object is none, or the output ends within it."""
        self._state = _State.TEXT
        if call.name:  # what was said stays said
            self._is_after_call = True
            cut = len(self._buffer) if call.broken_at is None else call.broken_at
            self._buffer = self._buffer[cut:]
            return
        self._failed += 1
        yield from self._say(self._tag)

    def _read_end(self, *, is_last: bool) -> Iterator[Found]:
        """Skip the closing tag, where there is one; Llama's calls may go on behind a semicolon."""
        rest = self._buffer.lstrip()
        mark = _CLOSE if self._is_hermes else ";"
        if mark.startswith(rest) and rest != mark and not is_last:
            return
        if rest.startswith(mark):
            behind = rest[len(mark) :]
            if self._is_hermes:
                self._buffer = behind
            elif not behind.lstrip() and not is_last:
                return
            elif behind.lstrip().startswith("{"):
                self._begin(len(self._buffer) - len(behind.lstrip()))
                return
        self._state = _State.TEXT
        yield from ()

    def _say(self, text: str) -> Iterator[Found]:
        """Yield text, without the white space that would stand next to a call."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        text = self._space + text
        spoken = text.rstrip()
        self._space = text[len(spoken) :]
        if spoken:
            yield Text(spoken)


class _Object:
    """An object in the making at the beginning of a buffer that grows."""

    def __init__(self) -> None:
        self.end: int | None = None
        """Where it has ended."""
        self.broken_at: int | None = None
        """Where it was seen to be none."""
        self.name = ""
        """Once its head is there."""
        self._at = 0
        self._open: list[str] = []
        self._in_string = False
        self._first_args = 0
        self._said = 0
        self._inner_ends: list[int] = []
        """Where a value directly within it ended that was an object or a list."""

    @property
    def is_open(self) -> bool:
        """Whether it may still end well."""
        return self.end is None and self.broken_at is None

    def read(self, buffer: str) -> None:
        """Follow strings and brackets through what is new."""
        if not self._open and self.end is None:
            self._at += len(buffer) - self._at - len(buffer[self._at :].lstrip())
            if self._at < len(buffer) and buffer[self._at] != "{":
                self.broken_at = self._at
        while self.is_open:
            match = _STRUCTURE.search(buffer, self._at)
            if match is None:
                self._at = len(buffer)
                return
            if match[0] == "\\" and self._in_string and match.end() == len(buffer):
                self._at = match.start()  # what it escapes has not come
                return
            self._at = match.end()
            self._take(match[0])

    def _take(self, mark: str) -> None:
        if self._in_string:
            if mark == "\\":
                self._at += 1
            elif mark == '"':
                self._in_string = False
        elif mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._open.append("}" if mark == "{" else "]")
        elif not self._open or self._open.pop() != mark:
            self.broken_at = self._at - 1
        elif not self._open:
            self.end = self._at
        elif len(self._open) == 1:
            self._inner_ends.append(self._at)

    def find_head(self, buffer: str) -> bool:
        """Set `name` where the object begins with it and with arguments; return whether it does."""
        head = _HEAD.match(buffer[:_MAX_HEAD_CHARS])
        if head is None:
            return False
        try:
            name = json.loads(head[1])
            name.encode()  # half a character, which an escape may spell, is in no function's name
        except ValueError:
            return False
        self.name = name
        self._first_args = self._said = head.end()
        return bool(self.name)

    def next_arguments(self, buffer: str) -> str:
        """Return what of the arguments was not returned yet."""
        ends = [end for end in self._inner_ends if end > self._first_args]
        limit = self._at if self.broken_at is None else self.broken_at
        end = max(self._said, ends[0] if ends else min(limit, len(buffer)))
        piece, self._said = buffer[self._said : end], end
        return piece


def _members(text: str) -> tuple[str, str] | None:
    """Return name and arguments of an object that is a call, the latter as written."""
    try:
        call = _DECODER.decode(text)
        name = call.get("name")
        str(name).encode()  # as in `find_head`
    except (ValueError, RecursionError):
        return None
    given = [key for key in ("arguments", "parameters") if isinstance(call.get(key), dict)]
    if not isinstance(name, str) or not name or not given:
        return None
    return name, _written(text, given[0])


def _written(text: str, wanted: str) -> str:
    """Return a member's value as it stands in an object that is known to be valid."""
    found = ""
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)  # behind the colon
        _, at = _DECODER.raw_decode(text, start)
        if key == wanted:
            found = text[start:at]  # the last one counts, as in the decoder
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def whole_members(arguments: str) -> str:
    """Return an object of the members that are whole in `arguments`, which may break off.

    They stay as the model wrote them; what is cut, or no JSON, is left out with all behind it.

    Args:
        arguments: What `CallArguments` brought of one call, together.
    """
    end = 1
    try:
        at = _skip(arguments, 1)
        while arguments[at] == '"':
            _, at = _DECODER.raw_decode(arguments, at)
            at = _skip(arguments, at)
            if arguments[at] != ":":
                break
            _, at = _DECODER.raw_decode(arguments, _skip(arguments, at + 1))
            at = _skip(arguments, at)  # a number is whole once something follows
            if arguments[at] not in ",}":
                break
            end = at
            at = _skip(arguments, at + 1)
    except (ValueError, IndexError, RecursionError):
        pass
    return arguments[:end] + "}"


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that `tag` begins with."""
    most = min(len(text), len(tag) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(tag[:size])), 0)
