"""/v1/completions and /v1/chat/completions: from a body to a Job and the form of its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.clock import monotonic
from tailrace.errors import RequestError
from tailrace.server.admission import check_model, check_open
from tailrace.server.answering import answer
from tailrace.server.chat_job import chat_job
from tailrace.server.early_encoding import early_chat, early_prompt
from tailrace.server.generation import Job
from tailrace.server.openai_format import ChatFormat, CompletionFormat
from tailrace.server.prompts import (
    INLINE_CHARS,
    Prompt,
    check_fan_out,
    encode_prompts,
    off_loop_if,
    split_prompts,
)
from tailrace.server.protocol import ChatBody, CompletionBody
from tailrace.server.sampling import (
    fit,
    read_logprobs,
    read_max_tokens,
    read_n,
    read_sampling,
    read_terms,
)
from tailrace.server.structured import constrained, read_constraint

if TYPE_CHECKING:
    from tailrace.server.early_encoding import EarlyEncoding
    from tailrace.server.http import Handler, Request
    from tailrace.server.protocol import OpenAIFields
    from tailrace.server.sampling import Limits
    from tailrace.server.services import Services, TextServices
    from tailrace.text.tokenizer import Span
    from tailrace.types import SamplingParams


async def completions(services: Services, request: Request) -> None:
    """POST /v1/completions."""
    received_s = request.timeline.received_s
    scope = services.cache_scope(request.holder)
    with early_prompt(services, "cmpl-", "prompt", cache_scope=scope) as early:
        body = await request.decode(CompletionBody, early.see)
        text, limits = check_open(services)
        check_model(body.model, text)
        _check_openai(body)
        is_long = isinstance(body.prompt, list) and len(body.prompt) > INLINE_CHARS
        parts = await off_loop_if(is_long, lambda: split_prompts(body.prompt))
        choices = _read_choices(body, limits)
        sequences = check_fan_out(len(parts), choices)
        request.timeline.enter("admission")
        with services.admission.admitted(sequences, services.places):
            request.timeline.enter("tokenise")
            job, form = await _completion_job(
                body, parts, text, limits, received_s=received_s, early=early
            )
            await answer(services, request, text, job, form)


async def chat_completions(services: Services, request: Request) -> None:
    """POST /v1/chat/completions."""
    received_s = request.timeline.received_s
    scope = services.cache_scope(request.holder)
    with early_chat(services, "chatcmpl-", cache_scope=scope) as early:
        body = await request.decode(ChatBody, early.see)
        text, limits = check_open(services)
        check_model(body.model, text)
        _check_openai(body)
        choices = read_n(body, limits)
        request.timeline.enter("admission")
        with services.admission.admitted(choices, services.places):
            request.timeline.enter("tokenise")
            job, form = await _chat_job(body, text, limits, received_s, early)
            await answer(services, request, text, job, form)


ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/chat/completions"): chat_completions,
}


async def _completion_job(
    body: CompletionBody,
    parts: list[str | list[int]],
    text: TextServices,
    limits: Limits,
    *,
    received_s: float,
    early: EarlyEncoding[str],
) -> tuple[Job, CompletionFormat]:
    """Check and tokenise a completion; `max_tokens` 0 with `echo` scores the prompt alone."""
    echo = bool(body.echo)
    max_tokens = read_max_tokens("max_tokens", body.max_tokens, lowest=0 if echo else 1)
    logprobs = read_logprobs("logprobs", body.logprobs, limits)
    asked_prompt = _read_prompt_logprobs(body, limits)
    # An echoed prompt is scored as the output is.
    scored = [count for count in (asked_prompt, logprobs if echo else None) if count is not None]
    sampling = read_sampling(
        body, limits, logprobs=logprobs, prompt_logprobs=max(scored, default=None)
    )
    sampling = await constrained(sampling, read_constraint(body), text.grammars)
    terms = read_terms(body, limits)
    prompts = await encode_prompts(
        parts,
        text.tokenizer,
        limits,
        add_special_tokens=body.add_special_tokens is not False,
        keep_last=body.truncate_prompt_tokens,
        parse_special=limits.server.parse_special and body.parse_special is not False,
        early=early,
    )
    job = Job(
        request_id=early.job_id,
        route="/v1/completions",
        prompts=prompts,
        sampling=[_fit_completion(sampling, prompt, max_tokens, limits) for prompt in prompts],
        terms=terms,
        drops_output=max_tokens == 0,
        received_s=received_s,
        prompt_ready_s=monotonic(),
    )
    form = CompletionFormat(
        job=job,
        tokenizer=text.tokenizer,
        model=text.model_name,
        wants_logprobs=logprobs is not None,
        wants_token_ids=bool(body.return_token_ids),
        wants_prompt_logprobs=asked_prompt is not None,
        includes_usage=_includes_usage(body),
        counts_usage=_counts_usage(body),
        echo=echo,
    )
    return job, form


def _fit_completion(
    sampling: SamplingParams, prompt: Prompt, max_tokens: int | None, limits: Limits
) -> SamplingParams:
    return fit(
        sampling,
        len(prompt.token_ids),
        # The engine makes at least one; a job that wants none drops it.
        1 if max_tokens == 0 else max_tokens,
        limits,
        default=limits.server.default_max_tokens,
        prompt_name="prompt",
    )


async def _chat_job(
    body: ChatBody,
    text: TextServices,
    limits: Limits,
    received_s: float,
    early: EarlyEncoding[list[Span]],
) -> tuple[Job, ChatFormat]:
    """Check, render and tokenise a chat."""
    max_tokens_name, max_tokens = _chat_max_tokens(body)
    logprobs = _chat_logprobs(body, limits)
    prompt_logprobs = _read_prompt_logprobs(body, limits)
    job = await chat_job(
        body,
        read_sampling(body, limits, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        text,
        limits,
        job_id=early.job_id,
        route="/v1/chat/completions",
        received_s=received_s,
        max_tokens=max_tokens,
        max_tokens_name=max_tokens_name,
        early=early,
    )
    form = ChatFormat(
        job=job,
        tokenizer=text.tokenizer,
        model=text.model_name,
        wants_logprobs=logprobs is not None,
        wants_token_ids=bool(body.return_token_ids),
        wants_prompt_logprobs=prompt_logprobs is not None,
        includes_usage=_includes_usage(body),
        counts_usage=_counts_usage(body),
    )
    return job, form


def _check_openai(body: OpenAIFields) -> None:
    """Refuse fields that do not go together.

    Raises:
        RequestError: The answer would not be what the field asks for.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options is only for streams: set stream to true or leave it out",
            param="stream_options",
        )


def _read_choices(body: CompletionBody, limits: Limits) -> int:
    """Check the fields that only /v1/completions has; return `n`."""
    if body.suffix:
        raise RequestError(
            "suffix is not served: the model only continues a prompt; leave it out",
            param="suffix",
        )
    choices = read_n(body, limits)
    if body.best_of is not None and body.best_of != choices:
        raise RequestError(
            f"best_of is {body.best_of} and n is {choices}: choosing among more than n is not "
            "served; send best_of equal to n, or leave it out",
            param="best_of",
        )
    return choices


def _read_prompt_logprobs(body: OpenAIFields, limits: Limits) -> int | None:
    asked = read_logprobs("prompt_logprobs", body.prompt_logprobs, limits)
    if asked is not None and body.stream:
        raise RequestError(
            "prompt_logprobs does not go with stream: set stream to false", param="prompt_logprobs"
        )
    return asked


def _chat_max_tokens(body: ChatBody) -> tuple[str, int | None]:
    """Return the field that decides the output's length, and its value."""
    both = (
        ("max_completion_tokens", body.max_completion_tokens),
        ("max_tokens", body.max_tokens),
    )
    for name, value in both:
        if value is not None:
            return name, read_max_tokens(name, value)
    return "max_tokens", None


def _chat_logprobs(body: ChatBody, limits: Limits) -> int | None:
    top = read_logprobs("top_logprobs", body.top_logprobs, limits)
    if top and not body.logprobs:
        raise RequestError(
            "top_logprobs is only for logprobs: set logprobs to true", param="top_logprobs"
        )
    return (top or 0) if body.logprobs else None


def _includes_usage(body: OpenAIFields) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _counts_usage(body: OpenAIFields) -> bool:
    options = body.stream_options
    return bool(options and options.include_usage and options.continuous_usage_stats)
