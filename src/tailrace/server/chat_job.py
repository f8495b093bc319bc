"""A chat to a Job: rendered by the template, tokenised, fitted into the context.

What the routes that speak of messages share, whatever they call them on the wire.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tailrace.clock import monotonic
from tailrace.errors import RequestError
from tailrace.server.generation import Job
from tailrace.server.prompts import (
    INLINE_CHARS,
    Prompt,
    check_length,
    keep_last_tokens,
    off_loop_if,
)
from tailrace.server.reasoning import template_variables
from tailrace.server.sampling import fit, read_terms
from tailrace.server.structured import read_constraint
from tailrace.server.tool_choice import constrained_chat, has_special_marks, read_tools

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tailrace.server.early_encoding import EarlyEncoding
    from tailrace.server.protocol import ChatBody
    from tailrace.server.sampling import Limits
    from tailrace.server.services import TextServices
    from tailrace.text.tokenizer import Span
    from tailrace.types import SamplingParams


async def chat_job(
    body: ChatBody,
    sampling: SamplingParams,
    text: TextServices,
    limits: Limits,
    *,
    job_id: str,
    route: str,
    received_s: float,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    prompt_name: str = "messages",
    fits_context: bool = False,
    early: EarlyEncoding[list[Span]] | None = None,
) -> Job:
    """Check, render and tokenise a chat.

    Args:
        body: The chat.
        sampling: As `read_sampling` returned it.
        text: The model's text side.
        limits: Of the server and the model.
        job_id: The request's id, as its answer names it.
        route: For the log and the metrics.
        received_s: When the HTTP request's first byte had come.
        max_tokens: Most to generate; None: all that fits.
        max_tokens_name: The client's name for it.
        prompt_name: The client's name for the messages.
        fits_context: `max_tokens` is but an upper bound: where the context holds fewer beside the
            prompt, so many are generated. Otherwise such a request is refused.
        early: What was encoded while the body came.

    Raises:
        RequestError: As `encode_chat`, or prompt and answer exceed the context, or what the output
            has to match cannot be enforced.
    """
    terms = read_terms(body, limits)
    tools = read_tools(body, text)
    sampling = await constrained_chat(sampling, tools, read_constraint(body), text)
    if tools is not None and has_special_marks(tools, text):
        rules = replace(terms.text_rules, skip_special_tokens=False)
        terms = replace(terms, text_rules=rules)
    prompt = await encode_chat(body, text, limits, early=early, prompt_name=prompt_name)
    if fits_context and len(prompt.token_ids) + (max_tokens or 0) > limits.context_length:
        max_tokens = None
    fitted = fit(
        sampling,
        len(prompt.token_ids),
        max_tokens,
        limits,
        default=None,
        prompt_name=prompt_name,
        max_tokens_name=max_tokens_name,
    )
    return Job(
        request_id=job_id,
        route=route,
        prompts=[prompt],
        sampling=[fitted],
        terms=terms,
        tools=tools,
        received_s=received_s,
        prompt_ready_s=monotonic(),
    )


@contextmanager
def renamed(ours: str, theirs: str) -> Iterator[None]:
    """Name a refused field as the client did, where the block refuses it under our name."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and error.param.startswith(ours):
            error.param = theirs + error.param.removeprefix(ours)
            error.message = error.message.replace(ours, theirs, 1)
        raise


async def encode_chat(
    body: ChatBody,
    text: TextServices,
    limits: Limits | None,
    *,
    early: EarlyEncoding[list[Span]] | None = None,
    prompt_name: str = "messages",
) -> Prompt:
    """Render and tokenise a chat.

    Args:
        body: Its messages, tools and what the template takes.
        text: The model's text side.
        limits: Of the model; None: the prompt may be of any length.
        early: What was encoded while the body came.
        prompt_name: The client's name for the messages.

    Raises:
        RequestError: A message is malformed, the template refuses it, or it is longer than any
            context.
    """
    messages = body.messages
    if messages is None:
        raise RequestError("messages is missing: send at least one", param="messages")
    continues = bool(body.continue_final_message)
    adds_prompt = body.add_generation_prompt
    hides_tools = body.tool_choice == "none"
    variables = template_variables(body, text.chat_template)

    def render() -> list[Span]:
        return text.chat_template.spans(
            messages,
            # Continuing a message and opening the next exclude each other, so one decides.
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            tools=None if hides_tools else body.tools,
            continue_final_message=continues,
            template_kwargs=variables,
        )

    is_slow = is_long([messages, body.tools])
    spans = await off_loop_if(is_slow, render)
    if limits is not None and body.truncate_prompt_tokens is None:
        fewest = sum(text.tokenizer.fewest_tokens(span.text) for span in spans) - len(spans)
        check_length(fewest, limits, prompt_name)
    token_ids = await early.take(spans) if early else None
    if token_ids is None:
        token_ids = await off_loop_if(is_slow, lambda: text.tokenizer.encode_spans(spans))
    return Prompt(keep_last_tokens(token_ids, body.truncate_prompt_tokens))


def is_long(value: Any) -> bool:
    """Whether a JSON value holds more than `INLINE_CHARS` characters and values.

    Without recursion, and never looking further than that: clients choose depth and number.
    """
    size = 0
    todo = [value]
    while todo and size <= INLINE_CHARS:
        inner = todo.pop()
        size += 1
        if isinstance(inner, str):
            size += len(inner)
        elif isinstance(inner, dict):
            todo += [*inner.keys(), *inner.values()]
        elif isinstance(inner, list):
            todo += inner
    return size > INLINE_CHARS
