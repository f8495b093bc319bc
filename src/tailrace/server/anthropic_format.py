"""Pieces to Anthropic's messages: a whole one, and the events of a stream.

    message_start
    (content_block_start  ping, after the first  content_block_delta...  content_block_stop)...
    message_delta (why it ended, what it cost)  message_stop

A run of text is a block, and so is each tool call. An answer of neither has one empty text block,
so that clients find the block they read.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from tailrace.server.anthropic_protocol import Message, MessageUsage, TextBlock, ToolUseBlock
from tailrace.server.call_format import PieceReader
from tailrace.server.error_bodies import anthropic_error
from tailrace.server.openai_format import json_bytes
from tailrace.text.tool_calls import CallArguments, CallBegins, Text, whole_members

if TYPE_CHECKING:
    from tailrace.errors import RequestError
    from tailrace.server.choice import Piece
    from tailrace.server.generation import Generation, Job
    from tailrace.text.tool_calls import Found


@dataclass(kw_only=True)
class MessageFormat:
    """Of /v1/messages.

    Attributes:
        job: What is generated.
        model: As answers name it.
        http_request_id: As errors name the request.
        asked_tokens: The client's `max_tokens`; the context may hold fewer.
    """

    job: Job
    model: str
    http_request_id: str
    asked_tokens: int
    every_token = False
    _reader: PieceReader = field(init=False)
    _last: Piece | None = None
    _blocks: int = 0
    """Begun so far; in a stream the last one is open."""
    _is_in_text: bool = False

    def __post_init__(self) -> None:
        self._reader = PieceReader(self.job.tools, streams=self.job.terms.is_streaming)

    def opening(self) -> bytes:
        """Return the start of a stream: a message that is still empty."""
        usage = MessageUsage(input_tokens=self.job.prompt_tokens, output_tokens=0)
        return _event("message_start", message=self._message([], usage))

    def event(self, piece: Piece) -> bytes:
        """Return a piece as deltas; where another block begins, the one before it ends."""
        self._last = piece
        return b"".join([self._deltas(found) for found in self._reader.read(piece)])

    def closing(self, generation: Generation) -> bytes:
        """Return the end of a stream: why it ended, and what it cost."""
        begin = b"" if self._blocks else self._begin(TextBlock(text=""))
        stop_reason, stop_sequence = self._stop(self._last)
        metrics = generation.metrics()
        delta = {
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "stop_details": None,
            "container": None,
        }
        return (
            begin
            + self._end()
            + _event(
                "message_delta",
                delta=delta,
                usage=_usage(generation),
                **({} if metrics is UNSET else {"metrics": metrics}),
            )
            + _event("message_stop")
        )

    def failure(self, error: RequestError) -> bytes:
        """Return a failed stream's end."""
        return b"event: error\ndata: " + anthropic_error(error, self.http_request_id) + b"\n\n"

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        """Return the answer that does not stream."""
        piece = pieces[0]
        blocks = _blocks_of(self._reader.read(piece))
        message = self._message(blocks or [TextBlock(text="")], _usage(generation))
        message.stop_reason, message.stop_sequence = self._stop(piece)
        message.metrics = generation.metrics()
        return json_bytes(message)

    def _deltas(self, found: Found) -> bytes:
        match found:
            case Text(text):
                begin = b"" if self._is_in_text else self._begin(TextBlock(text=""))
                self._is_in_text = True
                return begin + self._delta({"type": "text_delta", "text": text})
            case CallBegins(_, name):
                self._is_in_text = False
                return self._begin(ToolUseBlock(id=_call_id(), name=name, input={}))
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def _begin(self, block: TextBlock | ToolUseBlock) -> bytes:
        before = self._end() if self._blocks else b""
        after = b"" if self._blocks else _event("ping")
        self._blocks += 1
        start = _event("content_block_start", index=self._blocks - 1, content_block=block)
        return before + start + after

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _end(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)

    def _message(self, content: list[Any], usage: MessageUsage) -> Message:
        return Message(id=self.job.request_id, model=self.model, content=content, usage=usage)

    def _stop(self, piece: Piece | None) -> tuple[str, str | None]:
        """Return `stop_reason` and `stop_sequence`."""
        if piece is None or piece.finish_reason == "stop":
            if self._reader.calls:
                return "tool_use", None
            if piece is not None and isinstance(piece.stop_reason, str):
                return "stop_sequence", piece.stop_reason
            return "end_turn", None
        if self.job.sampling[0].max_tokens < self.asked_tokens:
            return "model_context_window_exceeded", None
        return "max_tokens", None


def _blocks_of(found: list[Found]) -> list[TextBlock | ToolUseBlock]:
    """Return what a whole output says, in its order."""
    blocks: list[TextBlock | ToolUseBlock] = []
    arguments: list[str] = []
    for one in found:
        last = blocks[-1] if blocks else None
        match one:
            case Text(text) if isinstance(last, TextBlock):
                last.text += text
            case Text(text):
                blocks.append(TextBlock(text=text))
            case CallBegins(_, name):
                blocks.append(ToolUseBlock(id=_call_id(), name=name, input={}))
                arguments.append("")
            case CallArguments(index, text):
                arguments[index] += text
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    for call, text in zip(calls, arguments, strict=True):
        # As the model wrote it: a string in JSON may say what no string of ours can be sent as,
        # such as half a character. `input` must be an object even where the token limit cut it.
        call.input = msgspec.Raw(whole_members(text).encode())
    return blocks


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _usage(generation: Generation) -> MessageUsage:
    cached = generation.cached_tokens
    return MessageUsage(
        input_tokens=generation.job.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=generation.completion_tokens,
    )


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + json_bytes({"type": kind} | fields) + b"\n\n"
