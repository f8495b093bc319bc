"""Pieces to OpenAI's answers: whole ones, and the events of a stream.

A stream is: (chat) a role chunk for each choice, text chunks and pieces of tool calls (see
call_format), one finish_reason for each choice,
with `include_usage`, or asked for metrics, a chunk without choices, `[DONE]`. The first chunk of a
completion with `echo` is its prompt.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from tailrace.server.call_format import ChoiceCalls
from tailrace.server.error_bodies import openai_error
from tailrace.server.logprobs import CompletionScores, chat_logprobs, joined, prompt_logprobs
from tailrace.server.protocol import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
)
from tailrace.server.text_frame import TextFrame

if TYPE_CHECKING:
    from msgspec import UnsetType

    from tailrace.errors import RequestError
    from tailrace.server.choice import Piece
    from tailrace.server.generation import Generation, Job
    from tailrace.server.tool_choice import ToolRules
    from tailrace.text.tokenizer import Tokenizer

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Return a server-sent event that holds `value` as JSON."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """Return a server-sent event that holds an error."""
    return b"data: " + openai_error(error) + b"\n\n"


def json_bytes(value: Any) -> bytes:
    """Return `value` as JSON; fields that are UNSET are left out."""
    return _ENCODER.encode(value)


@dataclass(kw_only=True)
class OpenAIFormat:
    """What both forms share."""

    job: Job
    tokenizer: Tokenizer
    model: str
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    wants_prompt_logprobs: bool = False
    includes_usage: bool = False
    counts_usage: bool = False
    """Whether each chunk tells the usage of its choice so far."""
    every_token = True
    """Half a character, or a special token, is an event with empty text, as from other engines."""
    # Unix time: a date for people, so the clock that may jump is the right one.
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    _made: dict[int, int] = field(default_factory=dict)
    """Tokens of each choice so far, where its chunks tell."""
    _frames: dict[int, TextFrame] = field(default_factory=dict)
    """Of each choice that has begun, where chunks say their text and no more."""

    def __post_init__(self) -> None:
        self._tells_more = self.wants_logprobs or self.wants_token_ids or self.counts_usage

    def envelope(self, kind: str, choices: list[Any]) -> Answer:
        """Return an answer or a chunk around `choices`."""
        return Answer(
            id=self.job.request_id,
            object=kind,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=None if self.includes_usage else UNSET,
        )

    def chunk(
        self, kind: str, choice: CompletionChoice | ChatChunkChoice, new_tokens: int = 0
    ) -> Answer:
        """Return a stream's chunk around one choice that `new_tokens` more were made of."""
        chunk = self.envelope(kind, [choice])
        if self.counts_usage:
            prompt = len(self.job.prompts[choice.index // self.job.n].token_ids)
            made = self._count(choice.index, new_tokens)
            chunk.usage = Usage(
                prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made
            )
        return chunk

    def _count(self, index: int, new_tokens: int) -> int:
        """Return the tokens of a choice so far, those of a piece that is no chunk among them."""
        self._made[index] = self._made.get(index, 0) + new_tokens
        return self._made[index]

    def tail(self, kind: str, generation: Generation) -> bytes:
        """Return the end of a stream."""
        metrics = generation.metrics()
        if not self.includes_usage and metrics is UNSET:
            return DONE
        chunk = self.envelope(kind, [])
        if self.includes_usage:
            chunk.usage = generation.usage()
        chunk.metrics = metrics
        return event(chunk) + DONE

    def failure(self, error: RequestError) -> bytes:
        """Return a failed stream's end."""
        return error_event(error)

    @staticmethod
    def complete(answer: Answer, generation: Generation) -> None:
        """Tell in a whole answer what it cost."""
        answer.usage = generation.usage()
        answer.metrics = generation.metrics()

    def begins(self, index: int) -> bool:
        """Say whether this is the choice's first piece; True once."""
        if index in self._begun:
            return False
        self._begun.add(index)
        return True

    def token_ids(self, piece: Piece) -> list[int] | UnsetType:
        """Return the piece's ids where they were asked for."""
        return piece.token_ids if self.wants_token_ids else UNSET

    def prompt_ids(self, index: int) -> list[int] | UnsetType:
        """Return the ids of a choice's prompt where they were asked for."""
        if not self.wants_token_ids:
            return UNSET
        return self.job.prompts[index // self.job.n].token_ids

    def prompt_scores(self, piece: Piece) -> PromptLogprobs | UnsetType:
        """Return the prompt's log-probabilities where they were asked for."""
        if not self.wants_prompt_logprobs or piece.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(self.tokenizer, piece.prompt_logprobs)


@dataclass(kw_only=True)
class CompletionFormat(OpenAIFormat):
    """Of /v1/completions."""

    echo: bool = False
    kind = "text_completion"
    _scores: dict[int, CompletionScores] = field(default_factory=dict)

    def opening(self) -> bytes:
        """Return what precedes every piece."""
        return b""

    def event(self, piece: Piece) -> bytes:
        """Return a piece as one event, or two where the prompt is echoed first."""
        frame = self._frames.get(piece.index)
        if frame is not None and piece.finish_reason is None:
            return frame.around(piece.text)
        if not self._tells_more:
            self._frames[piece.index] = self._text_frame(piece.index)
        is_first = self.begins(piece.index)
        choices = [self._echo(piece)] if is_first and self.echo else []
        # After the prompt, where the text that their offsets count begins.
        choices.append(self._choice(piece, piece.text, self._logprobs(piece)))
        if is_first:
            choices[0].prompt_token_ids = self.prompt_ids(piece.index)
        chunks = [self.chunk(self.kind, choice) for choice in choices[:-1]]
        chunks.append(self.chunk(self.kind, choices[-1], len(piece.token_ids)))
        return b"".join(map(event, chunks))

    def _text_frame(self, index: int) -> TextFrame:
        return TextFrame(
            lambda text: event(self.chunk(self.kind, CompletionChoice(index=index, text=text)))
        )

    def closing(self, generation: Generation) -> bytes:
        """Return what follows every piece."""
        return self.tail(self.kind, generation)

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        """Return the answer that does not stream."""
        answer = self.envelope(self.kind, [self._whole_choice(piece) for piece in pieces])
        self.complete(answer, generation)
        return json_bytes(answer)

    def _whole_choice(self, piece: Piece) -> CompletionChoice:
        text, logprobs = piece.text, None
        if self.echo:
            echo = self._echo(piece)
            text, logprobs = echo.text + text, echo.logprobs
        own = self._logprobs(piece)
        if logprobs is not None and own is not None:
            own = joined(logprobs, own)
        choice = self._choice(piece, text, own)
        choice.prompt_token_ids = self.prompt_ids(piece.index)
        choice.prompt_logprobs = self.prompt_scores(piece)
        return choice

    def _choice(
        self, piece: Piece, text: str, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=piece.index,
            text=text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=UNSET if piece.finish_reason is None else piece.stop_reason,
            token_ids=self.token_ids(piece),
        )

    def _echo(self, piece: Piece) -> CompletionChoice:
        """Return the prompt as if it had been generated."""
        prompt = self.job.prompts[piece.index // self.job.n]
        text = prompt.text
        if text is None:
            skip = self.job.terms.text_rules.skip_special_tokens
            text = self.tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)
        logprobs = None
        if self.wants_logprobs and piece.prompt_logprobs is not None:
            scores = self._scores_of(piece.index)
            logprobs = scores.take_prompt(prompt.token_ids, piece.prompt_logprobs)
        return CompletionChoice(index=piece.index, text=text, logprobs=logprobs)

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if not self.wants_logprobs:
            return None
        return self._scores_of(piece.index).take(piece.logprobs)

    def _scores_of(self, index: int) -> CompletionScores:
        if index not in self._scores:
            self._scores[index] = CompletionScores(self.tokenizer)
        return self._scores[index]


@dataclass(kw_only=True)
class ChatFormat(OpenAIFormat):
    """Of /v1/chat/completions."""

    role: str = "assistant"
    _calls: dict[int, ChoiceCalls] = field(default_factory=dict)
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> bytes:
        """Return a role chunk for each choice."""
        return b"".join([event(self._role_chunk(index)) for index in range(self.job.n)])

    def event(self, piece: Piece) -> bytes:
        """Return a piece as an event."""
        is_token = piece.finish_reason is None  # without text too, as from other engines
        frame = self._frames.get(piece.index)
        if frame is not None and is_token:
            return frame.around(piece.text)
        if self.job.tools is None and not self._tells_more:
            self._frames[piece.index] = self._text_frame(piece.index)
        delta = ChatDelta(content=piece.text) if piece.text or is_token else ChatDelta()
        calls = None
        if self.job.tools is not None:
            calls = self._calls_of(piece.index, self.job.tools)
            delta = calls.delta(piece)
            says_nothing = delta == ChatDelta() and piece.finish_reason is None
            if says_nothing and not (self.wants_logprobs or self.wants_token_ids):
                self._count(piece.index, len(piece.token_ids))
                return b""
        choice = ChatChunkChoice(
            index=piece.index,
            delta=delta,
            logprobs=self._logprobs(piece),
            finish_reason=calls.finish_reason(piece) if calls else piece.finish_reason,
            stop_reason=UNSET if piece.finish_reason is None else piece.stop_reason,
            token_ids=self.token_ids(piece),
        )
        return event(self.chunk(self.chunk_kind, choice, len(piece.token_ids)))

    def _text_frame(self, index: int) -> TextFrame:
        def said(text: str) -> bytes:
            choice = ChatChunkChoice(index=index, delta=ChatDelta(content=text))
            return event(self.chunk(self.chunk_kind, choice))

        return TextFrame(said)

    def closing(self, generation: Generation) -> bytes:
        """Return what follows every piece."""
        return self.tail(self.chunk_kind, generation)

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        """Return the answer that does not stream."""
        answer = self.envelope("chat.completion", [self._whole_choice(piece) for piece in pieces])
        self.complete(answer, generation)
        answer.prompt_token_ids = self.prompt_ids(0)
        answer.prompt_logprobs = self.prompt_scores(pieces[0])
        return json_bytes(answer)

    def _whole_choice(self, piece: Piece) -> ChatChoice:
        message = ChatMessage(role=self.role, content=piece.text)
        finish_reason = piece.finish_reason
        if self.job.tools is not None:
            calls = ChoiceCalls(self.job.tools, streams=False)
            message = calls.message(piece, self.role)
            finish_reason = calls.finish_reason(piece)
        return ChatChoice(
            index=piece.index,
            message=message,
            logprobs=self._logprobs(piece),
            finish_reason=finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=self.token_ids(piece),
        )

    def _calls_of(self, index: int, rules: ToolRules) -> ChoiceCalls:
        if index not in self._calls:
            self._calls[index] = ChoiceCalls(rules, streams=True)
        return self._calls[index]

    def _role_chunk(self, index: int) -> Answer:
        choice = ChatChunkChoice(index=index, delta=ChatDelta(role=self.role, content=""))
        chunk = self.chunk(self.chunk_kind, choice)
        if index == 0:
            chunk.prompt_token_ids = self.prompt_ids(0)
        return chunk

    def _logprobs(self, piece: Piece) -> Any:
        return chat_logprobs(self.tokenizer, piece.logprobs) if self.wants_logprobs else None
