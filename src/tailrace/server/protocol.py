"""The wire: request bodies as clients send them, and the answers, as msgspec Structs.

A null means "not given", as OpenAI's clients mean it; unknown fields are ignored; a wrong type is
refused when the body is decoded. Ranges are the business of sampling.py; known fields that are not
served are that of unserved.py, and of any type here.
In answers `UNSET` leaves a field out, while None is written as null.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tailrace.telemetry.phases import Phases

PromptInput = str | list[str | int | list[int]]
"""A text, token ids, or a list of either."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's and SGLang's: with `include_usage`, each chunk tells the usage so far."""


class UnservedFields(msgspec.Struct, kw_only=True):
    """vLLM's and SGLang's fields that no route serves: see unserved.py."""

    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    stop_regex: Any = None
    no_stop_trim: Any = None
    truncation_side: Any = None
    logprob_token_ids: Any = None
    token_ids_logprob: Any = None
    return_logprob: Any = None
    return_tokens_as_token_ids: Any = None
    return_hidden_states: Any = None
    lora_path: Any = None
    prompt_embeds: Any = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None


class SamplingFields(UnservedFields, kw_only=True):
    """What every route that generates takes."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structured_outputs: Any = None
    return_metrics: bool | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    """What both OpenAI routes take besides."""

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


class CompletionBody(OpenAIFields, kw_only=True):
    """POST /v1/completions."""

    prompt: PromptInput | None = None
    parse_special: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


class ChatBody(OpenAIFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Not served: see unserved.py.
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    functions: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class SglangSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` of SGLang's /generate; -1 as `top_k` and -1 token counts as there."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    stop_regex: Any = None
    no_stop_trim: Any = None


class GenerateBody(SamplingFields, kw_only=True):
    """POST /generate: `prompt` with fields beside it, or SGLang's `text` and `sampling_params`."""

    prompt: str | list[int] | None = None
    parse_special: bool | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SglangSampling | None = None


# Answers


class PromptTokensDetails(msgspec.Struct):
    """Part of `Usage`."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens that a request cost; the token that ended a choice counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    """Left out of what a stream tells on its way."""


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """OpenAI's older form; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TopLogprob(msgspec.Struct, kw_only=True):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, kw_only=True):
    """A token of a chat's answer, with its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """OpenAI's form for chats."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One entry of `prompt_logprobs`, keyed by token id."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of /v1/completions, whole or as a stream's piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunction(msgspec.Struct, kw_only=True):
    """Part of `ToolCall`."""

    name: str | UnsetType = UNSET
    arguments: str
    """JSON, or a stream's piece of it."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call, whole or as a stream's piece: then only the first one has id, type and name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer's message."""

    role: str
    content: str | None
    """None where there are calls and no text."""
    refusal: None = None
    annotations: list[Any] = []
    """Always empty; clients expect it."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """A piece of the answer's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A choice of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of a choice of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class AnswerMetrics(msgspec.Struct, kw_only=True):
    """Where a request's time went, up to the moment at which this was written."""

    e2e_s: float
    """From the request's first byte."""
    ttft_s: float | None
    """From there to the first token: of a stream, to its first event; null: none was made."""
    predicted_ttft_s: float | UnsetType = UNSET
    """As admission expected it, where it did."""
    phases: Phases
    """Seconds; they add up to `e2e_s`."""
    ttft_phases: Phases | None
    """Seconds; they add up to `ttft_s`."""


class Answer(msgspec.Struct, kw_only=True):
    """The envelope of OpenAI's answers and of each event of a stream."""

    id: str
    object: str
    created: int
    """Unix time in seconds: a date for people, never subtracted."""
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET


class GenerateMetrics(msgspec.Struct, kw_only=True):
    """Where a /generate request's time went; null where it cannot be known."""

    request_latency_ms: float
    ttft_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    e2e_s: float | UnsetType = UNSET
    """This and the rest as in `AnswerMetrics`, where it was asked for."""
    ttft_s: float | UnsetType | None = UNSET
    predicted_ttft_s: float | UnsetType = UNSET
    phases: Phases | UnsetType = UNSET
    ttft_phases: Phases | UnsetType | None = UNSET


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """Of /generate, where it does not stream."""

    text: str
    finish_reason: str
    tokens: int
    """Generated ones, as `usage.completion_tokens`."""
    usage: Usage
    metrics: GenerateMetrics
