"""The wire of Anthropic's Messages API: bodies and answers, as msgspec Structs.

As in protocol.py a null means "not given" and unknown fields are ignored. In answers None is
written as null: Anthropic's schema wants its fields there, whether or not they say anything.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tailrace.server.protocol import AnswerMetrics


class Metadata(msgspec.Struct):
    """About the request; the model sees nothing of it."""

    user_id: str | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: a prompt without its sampling."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages; the last four fields are not Anthropic's."""

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_metrics: bool | None = None


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A block of an answer's content."""

    text: str
    citations: None = None


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call in an answer's content."""

    id: str
    name: str
    input: Any
    caller: dict[str, str] = msgspec.field(default_factory=lambda: {"type": "direct"})


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens that a request cost; the three kinds of input add up to the prompt."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: str = "standard"


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer, or the empty beginning of a stream's."""

    id: str
    model: str
    content: list[Any]
    usage: MessageUsage
    role: str = "assistant"
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    metrics: AnswerMetrics | UnsetType = UNSET
