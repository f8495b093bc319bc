"""Pieces to OpenAI's responses: a whole one, and the typed events of a stream.

    response.created  response.in_progress
    for a run of text
        response.output_item.added  response.content_part.added
        response.output_text.delta...
        response.output_text.done  response.content_part.done  response.output_item.done
    for a tool call
        response.output_item.added
        response.function_call_arguments.delta...
        response.function_call_arguments.done  response.output_item.done
    response.completed | response.incomplete | response.failed

Every event has its number; there is no [DONE]. An answer of neither has one message without text.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.server.call_format import PieceReader, call_id
from tailrace.server.logprobs import chat_logprobs
from tailrace.server.openai_format import json_bytes
from tailrace.server.responses_protocol import (
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    Response,
    ResponseError,
    ResponseUsage,
)
from tailrace.text.tool_calls import CallArguments, CallBegins, Text

if TYPE_CHECKING:
    from tailrace.errors import RequestError
    from tailrace.server.choice import Piece
    from tailrace.server.generation import Generation, Job
    from tailrace.server.protocol import ChatTokenLogprob
    from tailrace.text.tokenizer import Tokenizer
    from tailrace.text.tool_calls import Found

Item = OutputMessage | FunctionCall


@dataclass(kw_only=True)
class ResponseFormat:
    """Of /v1/responses.

    Attributes:
        job: What is generated.
        response: What every answer to this request says; its output is still empty.
        tokenizer: The model's.
        wants_logprobs: Whether tokens are scored.
    """

    job: Job
    response: Response
    tokenizer: Tokenizer
    wants_logprobs: bool = False
    every_token = False
    _reader: PieceReader = field(init=False)
    _number: int = 0
    _items: list[Item] = field(default_factory=list)
    """Begun so far; the last one is open."""
    _parts: list[str] = field(default_factory=list)
    """Of the open item's text or arguments."""
    _scores: list[ChatTokenLogprob] = field(default_factory=list)
    """Of tokens whose text has not gone out."""
    _finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._reader = PieceReader(self.job.tools, streams=self.job.terms.is_streaming)

    def opening(self) -> bytes:
        """Return the start of a stream."""
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def event(self, piece: Piece) -> bytes:
        """Return a piece as deltas; where another item begins, the one before it ends."""
        return b"".join(self._take(piece))

    def closing(self, generation: Generation) -> bytes:
        """Return the end of a stream: everything again, whole."""
        status = self._status()
        events = [] if self._items else [self._begin(self._new_message())]
        events.append(self._end(status))
        response = self._ended(status, generation)
        return b"".join([*events, self._event(f"response.{status}", response=response)])

    def failure(self, error: RequestError) -> bytes:
        """Return a failed stream's end."""
        failed = msgspec.structs.replace(
            self.response, status="failed", error=ResponseError("server_error", error.message)
        )
        return self._event("response.failed", response=failed)

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        """Return the answer that does not stream: what a stream's last event holds."""
        self._take(pieces[0])
        status = self._status()
        if not self._items:
            self._begin(self._new_message())
        self._end(status)
        return json_bytes(self._ended(status, generation))

    def _take(self, piece: Piece) -> list[bytes]:
        self._finish_reason = piece.finish_reason
        if self.wants_logprobs:
            self._scores += chat_logprobs(self.tokenizer, piece.logprobs).content
        return [self._deltas(found) for found in self._reader.read(piece)]

    def _deltas(self, found: Found) -> bytes:
        match found:
            case Text(text):
                is_in_text = self._items and isinstance(self._items[-1], OutputMessage)
                begin = b"" if is_in_text else self._begin(self._new_message())
                return begin + self._say(text)
            case CallBegins(_, name):
                return self._begin(
                    FunctionCall(
                        id=f"fc_{secrets.token_hex(12)}",
                        call_id=call_id(),
                        name=name,
                        arguments="",
                        status="in_progress",
                    )
                )
            case CallArguments(_, text):
                self._parts.append(text)
                place = self._place()
                return self._event("response.function_call_arguments.delta", **place, delta=text)

    def _say(self, text: str) -> bytes:
        scores, self._scores = self._scores, []
        self._parts.append(text)
        message = self._items[-1]
        if isinstance(message, OutputMessage):
            message.content[0].logprobs += scores
        return self._event(
            "response.output_text.delta",
            **self._place(),
            content_index=0,
            delta=text,
            logprobs=scores,
        )

    def _new_message(self) -> OutputMessage:
        message_id = f"msg_{secrets.token_hex(12)}"
        return OutputMessage(id=message_id, status="in_progress", content=[])

    def _begin(self, item: Item) -> bytes:
        before = self._end("completed") if self._items else b""
        self._items.append(item)
        self._parts = []
        index = len(self._items) - 1
        added = self._event("response.output_item.added", output_index=index, item=item)
        if isinstance(item, FunctionCall):
            return before + added
        item.content.append(OutputText(text=""))
        part = self._event(
            "response.content_part.added", **self._place(), content_index=0, part=item.content[0]
        )
        return before + added + part

    def _end(self, status: str) -> bytes:
        """End the open item."""
        item, place, whole = self._items[-1], self._place(), "".join(self._parts)
        item.status = status
        if isinstance(item, FunctionCall):
            item.arguments = whole
            events = [
                self._event(
                    "response.function_call_arguments.done",
                    **place,
                    name=item.name,
                    arguments=whole,
                )
            ]
        else:
            text = item.content[0]
            text.text = whole
            # Those of an end that is no text.
            text.logprobs += self._scores
            self._scores = []
            place["content_index"] = 0
            events = [
                self._event(
                    "response.output_text.done", **place, text=whole, logprobs=text.logprobs
                ),
                self._event("response.content_part.done", **place, part=text),
            ]
        index = len(self._items) - 1
        done = self._event("response.output_item.done", output_index=index, item=item)
        return b"".join([*events, done])

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _ended(self, status: str, generation: Generation) -> Response:
        is_cut = status == "incomplete"
        return msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items,
            usage=_usage(generation),
            metrics=generation.metrics(),
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + json_bytes(data) + b"\n\n"


def _usage(generation: Generation) -> ResponseUsage:
    prompt, output = generation.job.prompt_tokens, generation.completion_tokens
    return ResponseUsage(
        input_tokens=prompt,
        output_tokens=output,
        total_tokens=prompt + output,
        input_tokens_details=InputTokensDetails(generation.cached_tokens),
    )
