"""The wire of OpenAI's Responses API: bodies and answers, as msgspec Structs.

As in protocol.py a null means "not given" and unknown fields are ignored. In answers None is
written as null, because the API's schema wants its fields there.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tailrace.server.protocol import AnswerMetrics, ChatTokenLogprob, SamplingFields


class TextConfig(msgspec.Struct):
    """The form of an answer's text."""

    format: dict[str, Any] | None = None


class ReasoningConfig(msgspec.Struct):
    """How much the model thinks, and what is told of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    """An older name of `summary`."""


class ResponsesBody(SamplingFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: ReasoningConfig | None = None
    # What would need a store, or work without a client waiting for it.
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    # Only said again in the answer.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


# Answers


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of an answer's message."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = msgspec.field(default_factory=list)


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message as one item of an answer."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call as one item of an answer."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class InputTokensDetails(msgspec.Struct):
    """Part of `ResponseUsage`."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Part of `ResponseUsage`."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens that a request cost."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """An answer, or what a stream says of it while it is made."""

    id: str
    object: str = "response"
    created_at: int
    """Unix time in seconds: a date for people, never subtracted."""
    completed_at: int | None = None
    status: str
    model: str
    output: list[Any]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    text: Any
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    truncation: str
    metadata: dict[str, str]
    instructions: str | None = None
    max_output_tokens: int | None = None
    user: str | UnsetType = UNSET
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    metrics: AnswerMetrics | UnsetType = UNSET
    reasoning: dict[str, str | None]
    # What this server does not do, said in every answer.
    store: bool = False
    background: bool = False
    previous_response_id: None = None
    max_tool_calls: None = None
    service_tier: str = "default"
