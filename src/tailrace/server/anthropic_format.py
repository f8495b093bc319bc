"""Pieces to Anthropic's messages: a whole one, and the events of a stream.

    message_start  content_block_start  ping  content_block_delta...  content_block_stop
    message_delta (why it ended, what it cost)  message_stop

An answer without text has one empty text block, so that clients find the block they read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from tailrace.server.anthropic_protocol import Message, MessageUsage, TextBlock
from tailrace.server.error_bodies import anthropic_error
from tailrace.server.openai_format import json_bytes

if TYPE_CHECKING:
    from tailrace.errors import RequestError
    from tailrace.server.choice import Piece
    from tailrace.server.generation import Generation, Job


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
    _has_begun: bool = False
    _last: Piece | None = field(default=None)

    def opening(self) -> bytes:
        """Return the start of a stream: a message that is still empty."""
        usage = MessageUsage(input_tokens=self.job.prompt_tokens, output_tokens=0)
        return _event("message_start", message=self._message([], usage))

    def event(self, piece: Piece) -> bytes:
        """Return a piece as a delta; before the first one its block begins."""
        self._last = piece
        begin = b"" if self._has_begun else self._begin()
        delta = {"type": "text_delta", "text": piece.text}
        return begin + (_event("content_block_delta", index=0, delta=delta) if piece.text else b"")

    def closing(self, generation: Generation) -> bytes:
        """Return the end of a stream: why it ended, and what it cost."""
        stop_reason, stop_sequence = self._stop(self._last)
        delta = {
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "stop_details": None,
            "container": None,
        }
        return (
            (b"" if self._has_begun else self._begin())
            + _event("content_block_stop", index=0)
            + _event("message_delta", delta=delta, usage=_usage(generation), **_asked(generation))
            + _event("message_stop")
        )

    def failure(self, error: RequestError) -> bytes:
        """Return a failed stream's end."""
        return b"event: error\ndata: " + anthropic_error(error, self.http_request_id) + b"\n\n"

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        """Return the answer that does not stream."""
        piece = pieces[0]
        message = self._message([TextBlock(text=piece.text)], _usage(generation))
        message.stop_reason, message.stop_sequence = self._stop(piece)
        message.metrics = generation.metrics()
        return json_bytes(message)

    def _begin(self) -> bytes:
        self._has_begun = True
        block = TextBlock(text="")
        return _event("content_block_start", index=0, content_block=block) + _event("ping")

    def _message(self, content: list[Any], usage: MessageUsage) -> Message:
        return Message(id=self.job.request_id, model=self.model, content=content, usage=usage)

    def _stop(self, piece: Piece | None) -> tuple[str, str | None]:
        """Return `stop_reason` and `stop_sequence`."""
        if piece is None or piece.finish_reason == "stop":
            if piece is not None and isinstance(piece.stop_reason, str):
                return "stop_sequence", piece.stop_reason
            return "end_turn", None
        if self.job.sampling[0].max_tokens < self.asked_tokens:
            return "model_context_window_exceeded", None
        return "max_tokens", None


def _usage(generation: Generation) -> MessageUsage:
    cached = generation.cached_tokens
    return MessageUsage(
        input_tokens=generation.job.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=generation.completion_tokens,
    )


def _asked(generation: Generation) -> dict[str, Any]:
    metrics = generation.metrics()
    return {} if metrics is UNSET else {"metrics": metrics}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + json_bytes({"type": kind} | fields) + b"\n\n"
