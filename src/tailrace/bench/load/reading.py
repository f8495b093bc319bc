"""Turns one answer's bytes into its record, whichever transport brought them.

A first token is the first chunk with any generated text: a completion's `text`, a chat delta's
`content`, or its reasoning, which engines call `reasoning_content` or `reasoning`. A chat's opening
chunk, which carries a role and no text, is none. Tokens are never counted here, since one chunk may
carry several: the server's usage says how many there were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.bench.sse import Event, SseError, SseParser
from tailrace.bench.wire import MAX_ERROR_BYTES

if TYPE_CHECKING:
    from tailrace.bench.records import Record

BAD_BYTES = (SseError, msgspec.MsgspecError, UnicodeDecodeError)
"""What `feed` raises."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether it carries generated text."""
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning
        )

    @property
    def has_token(self) -> bool:
        """Whether it carries a token, be it without text: half a character, a special token."""
        if self.has_text:
            return True
        is_empty = self.text == "" or (self.delta is not None and self.delta.content == "")
        return is_empty and not self.finish_reason


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    """Of any shape: servers differ."""
    code: Any = None
    """Of an error event without `error`; of any shape too."""


_CHUNK = msgspec.json.Decoder(_Chunk)


def _refusal_code(chunk: _Chunk) -> int | None:
    """Return the HTTP status of 400 to 499 that an error event carries, else None.

    A server that has answered 200 before it looked at the request has no other place for it.
    """
    code = chunk.error.get("code") if isinstance(chunk.error, dict) else chunk.code
    if isinstance(code, str) and len(code) == len("400") and code.isdecimal():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 500 else None


class Reading:
    """Fills one record from one answer: `feed` or `refuse` the body's bytes, then `conclude`."""

    def __init__(self, record: Record) -> None:
        self.has_ended = False
        """Whether `data: [DONE]` was read: the answer is whole."""
        self._record = record
        self._parser = SseParser()
        self._refusal = bytearray()
        self._finish_s: float | None = None

    def refuse(self, data: bytes) -> None:
        """Take body bytes of an answer whose HTTP status is not 200."""
        self._refusal += data[: MAX_ERROR_BYTES - len(self._refusal)]

    def feed(self, at_s: float, data: bytes) -> int:
        """Take body bytes that were read at `at_s`, in seconds of the run.

        Returns:
            How many chunks with a token they completed.

        Raises:
            SseError, msgspec.MsgspecError, UnicodeDecodeError: They are no answer (`BAD_BYTES`).
        """
        before = len(self._record.chunk_s)
        for event in self._parser.feed(data):
            self._on_event(at_s, event)
        return len(self._record.chunk_s) - before

    def _on_event(self, at_s: float, event: Event) -> None:
        if event.data == b"[DONE]":
            self.has_ended = True
            self._record.finished_s = at_s
            return
        chunk = _CHUNK.decode(event.data)
        if chunk.error is not None or event.name == "error":
            if self._record.first_token_s is None:  # once there was text it is no refusal
                self._record.http_status = _refusal_code(chunk)
            raise SseError(bytes(event.data[:MAX_ERROR_BYTES]).decode("utf-8", "replace"))
        for choice in chunk.choices:
            self._on_choice(at_s, choice)
        if chunk.usage is not None:
            self._on_usage(chunk.usage)

    def _on_choice(self, at_s: float, choice: _Choice) -> None:
        record = self._record
        if choice.has_text and record.first_token_s is None:
            record.first_token_s = at_s
        # Before the first text an empty delta may be no token: a chat begins with its role.
        if choice.has_token and record.first_token_s is not None:
            record.chunk_s.append(at_s)
        if choice.finish_reason:
            record.finish_reason = choice.finish_reason
            self._finish_s = at_s

    def _on_usage(self, usage: _Usage) -> None:
        record = self._record
        record.input_tokens = usage.prompt_tokens
        record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def conclude(self, http_status: int | None) -> None:
        """Give the record its status, now that the answer's bytes are all in."""
        record = self._record
        if http_status != 200:
            text = self._refusal.decode("utf-8", "replace")
            fail(record, "http", f"HTTP {http_status}: {text}")
        elif not self.has_ended:
            fail(record, "stream", "the stream ended without data: [DONE]")
        elif (record.output_tokens or 0) < record.planned_output_tokens and self._is_short():
            asked = record.planned_output_tokens
            fail(record, "short", f"{record.output_tokens} of {asked} tokens")
        else:
            # Tokens without text (special ones) show only in the usage and the finish reason.
            record.first_token_s = record.first_token_s or self._finish_s
            record.status = "ok"

    def _is_short(self) -> bool:
        """Without usage, only an answer with no text at all is known to be short."""
        record = self._record
        return record.output_tokens is not None or record.first_token_s is None


def fail(record: Record, status: str, error: str) -> None:
    """Make the record a failure of this kind (one of records.STATUSES)."""
    record.status = status
    record.error = error
