"""Tool calls of one choice as OpenAI writes them: in a message, or as a stream's deltas."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from msgspec import UNSET

from tailrace.server.protocol import CalledFunction, ChatDelta, ChatMessage, ToolCall
from tailrace.text.tool_calls import CallArguments, CallBegins, Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailrace.server.choice import Piece
    from tailrace.server.tool_choice import ToolRules
    from tailrace.text.tool_calls import Found, ToolCallParser


def call_id() -> str:
    """Return a new id for a call."""
    return f"call_{secrets.token_hex(12)}"


class PieceReader:
    """Reads one choice's pieces as text and calls; without tools all of it is text.

    Args:
        rules: Of the chat; None: no calls.
        streams: Whether the pieces are a stream's.
    """

    def __init__(self, rules: ToolRules | None, *, streams: bool) -> None:
        self._parser = rules.parser(streams=streams) if rules else None

    @property
    def calls(self) -> int:
        """Calls begun so far."""
        return self._parser.calls if self._parser else 0

    def read(self, piece: Piece) -> list[Found]:
        """Return what a piece brings; the last one brings what was held back, too."""
        if self._parser is None:
            return [Text(piece.text)] if piece.text else []
        return _read(self._parser, piece)


class ChoiceCalls:
    """Finds the calls in one choice's pieces.

    Args:
        rules: Of the chat.
        streams: Whether the pieces are a stream's.
    """

    def __init__(self, rules: ToolRules, *, streams: bool) -> None:
        self._parser = rules.parser(streams=streams)

    def read(self, piece: Piece) -> list[Found]:
        """Return what a piece brings; the last one brings what was held back, too."""
        return _read(self._parser, piece)

    def delta(self, piece: Piece) -> ChatDelta:
        """Return a piece of a stream."""
        found = self.read(piece)
        calls = _gathered(found)
        for index, call in calls.items():
            call.index = index
        return ChatDelta(
            content=_text(found) or UNSET, tool_calls=list(calls.values()) if calls else UNSET
        )

    def message(self, piece: Piece, role: str) -> ChatMessage:
        """Return the whole answer."""
        found = self.read(piece)
        calls = list(_gathered(found).values())
        return ChatMessage(
            role=role,
            content=_text(found) or (None if calls else ""),
            tool_calls=calls or UNSET,
        )

    def finish_reason(self, piece: Piece) -> str | None:
        """Return why the choice ended, once it was read: calls are told from a plain end."""
        is_call = piece.finish_reason == "stop" and self._parser.calls > 0
        return "tool_calls" if is_call else piece.finish_reason


def _read(parser: ToolCallParser, piece: Piece) -> list[Found]:
    found = parser.push(piece.text)
    if piece.finish_reason is None:
        return found
    return found + parser.finish(is_cut=piece.finish_reason == "length")


def _gathered(found: Iterable[Found]) -> dict[int, ToolCall]:
    """Return what belongs to each call, by its index."""
    calls: dict[int, ToolCall] = {}
    for one in found:
        match one:
            case CallBegins(index, name):
                calls[index] = ToolCall(
                    id=call_id(),
                    type="function",
                    function=CalledFunction(name=name, arguments=""),
                )
            case CallArguments(index, text):
                if index not in calls:
                    calls[index] = ToolCall(function=CalledFunction(arguments=""))
                calls[index].function.arguments += text
            case _:
                pass
    return calls


def _text(found: Iterable[Found]) -> str:
    return "".join(one.text for one in found if isinstance(one, Text))
