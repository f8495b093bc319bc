"""Pieces to OpenAI's responses: a whole one, and the typed events of a stream.

    response.created  response.in_progress
    response.output_item.added  response.content_part.added
    response.output_text.delta...
    response.output_text.done  response.content_part.done  response.output_item.done
    response.completed | response.incomplete | response.failed

Every event has its number; there is no [DONE].
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.server.logprobs import chat_logprobs
from tailrace.server.openai_format import json_bytes
from tailrace.server.responses_protocol import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    Response,
    ResponseError,
    ResponseUsage,
)

if TYPE_CHECKING:
    from tailrace.errors import RequestError
    from tailrace.server.choice import Piece
    from tailrace.server.generation import Generation
    from tailrace.server.protocol import ChatTokenLogprob
    from tailrace.text.tokenizer import Tokenizer

_PLACE = {"output_index": 0, "content_index": 0}


@dataclass(kw_only=True)
class ResponseFormat:
    """Of /v1/responses.

    Attributes:
        response: What every answer to this request says; its output is still empty.
        message_id: Of the one message.
        tokenizer: The model's.
        wants_logprobs: Whether tokens are scored.
    """

    response: Response
    message_id: str
    tokenizer: Tokenizer
    wants_logprobs: bool = False
    every_token = False
    _number: int = 0
    _has_begun: bool = False
    _texts: list[str] = field(default_factory=list)
    _scores: list[ChatTokenLogprob] = field(default_factory=list)
    _finish_reason: str | None = None

    def opening(self) -> bytes:
        """Return the start of a stream."""
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def event(self, piece: Piece) -> bytes:
        """Return a piece as a delta; before the first one its message begins."""
        begin = b"" if self._has_begun else self._begin()
        self._finish_reason = piece.finish_reason
        scores = self._scored(piece)
        self._texts.append(piece.text)
        self._scores += scores
        if not piece.text:
            return begin
        return begin + self._event(
            "response.output_text.delta",
            item_id=self.message_id,
            **_PLACE,
            delta=piece.text,
            logprobs=scores,
        )

    def closing(self, generation: Generation) -> bytes:
        """Return the end of a stream: everything again, whole."""
        begin = b"" if self._has_begun else self._begin()
        text = OutputText(text="".join(self._texts), logprobs=self._scores)
        response = self._ended(text, self._finish_reason, generation)
        return b"".join(
            [
                begin,
                self._event(
                    "response.output_text.done",
                    item_id=self.message_id,
                    **_PLACE,
                    text=text.text,
                    logprobs=text.logprobs,
                ),
                self._event(
                    "response.content_part.done", item_id=self.message_id, **_PLACE, part=text
                ),
                self._event("response.output_item.done", output_index=0, item=response.output[0]),
                self._event(f"response.{response.status}", response=response),
            ]
        )

    def failure(self, error: RequestError) -> bytes:
        """Return a failed stream's end."""
        failed = msgspec.structs.replace(
            self.response, status="failed", error=ResponseError("server_error", error.message)
        )
        return self._event("response.failed", response=failed)

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        """Return the answer that does not stream."""
        piece = pieces[0]
        text = OutputText(text=piece.text, logprobs=self._scored(piece))
        return json_bytes(self._ended(text, piece.finish_reason, generation))

    def _begin(self) -> bytes:
        self._has_begun = True
        item = OutputMessage(id=self.message_id, status="in_progress", content=[])
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added",
            item_id=self.message_id,
            **_PLACE,
            part=OutputText(text=""),
        )

    def _ended(
        self, text: OutputText, finish_reason: str | None, generation: Generation
    ) -> Response:
        is_cut = finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=[OutputMessage(id=self.message_id, status=status, content=[text])],
            usage=_usage(generation),
            metrics=generation.metrics(),
        )

    def _scored(self, piece: Piece) -> list[ChatTokenLogprob]:
        if not self.wants_logprobs:
            return []
        return chat_logprobs(self.tokenizer, piece.logprobs).content

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
