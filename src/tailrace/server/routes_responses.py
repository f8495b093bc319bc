"""/v1/responses and its input_tokens: OpenAI's newer API over the same chats; nothing is stored."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from tailrace.errors import RequestError
from tailrace.server.admission import check_model, check_open
from tailrace.server.answering import answer
from tailrace.server.chat_job import chat_job, encode_chat, is_long, renamed
from tailrace.server.early_encoding import ChatPlaces, early_chat
from tailrace.server.prompts import off_loop_if
from tailrace.server.responses_chat import LOGPROBS, ROLES, chat_of, wants_logprobs
from tailrace.server.responses_format import ResponseFormat
from tailrace.server.responses_protocol import Response, ResponsesBody
from tailrace.server.sampling import read_logprobs, read_max_tokens, read_sampling

if TYPE_CHECKING:
    from tailrace.server.early_encoding import EarlyEncoding
    from tailrace.server.generation import Job
    from tailrace.server.http import Handler, Request
    from tailrace.server.protocol import ChatBody
    from tailrace.server.sampling import Limits
    from tailrace.server.services import Services, TextServices
    from tailrace.text.tokenizer import Span
    from tailrace.types import SamplingParams

PATH = "/v1/responses"
_PLACES = ChatPlaces(messages="input", may_be_text=True, system="instructions", roles=ROLES)


async def responses(services: Services, request: Request) -> None:
    """POST /v1/responses."""
    received_s = request.timeline.received_s
    scope = services.cache_scope(request.holder)
    with early_chat(services, "resp_", _PLACES, cache_scope=scope) as early:
        body = await request.decode(ResponsesBody, early.see)
        text, limits = check_open(services)
        if not body.model:
            raise RequestError(
                f"model is missing: send {text.model_name!r}, which is served here", param="model"
            )
        check_model(body.model, text)
        chat = await off_loop_if(_is_long(body), lambda: chat_of(body))
        request.timeline.enter("admission")
        with (
            services.admission.admitted(1, services.places),
            renamed("response_format", "text.format"),
            renamed("reasoning_effort", "reasoning.effort"),
        ):
            request.timeline.enter("tokenise")
            job, form = await _job(body, chat, text, limits, received_s=received_s, early=early)
            await answer(services, request, text, job, form)


async def input_tokens(services: Services, request: Request) -> None:
    """POST /v1/responses/input_tokens; counts prompts too that no context holds."""
    body = await request.decode(ResponsesBody)
    text, _ = check_open(services)
    check_model(body.model, text)
    chat = await off_loop_if(_is_long(body), lambda: chat_of(body))
    with renamed("reasoning_effort", "reasoning.effort"):
        prompt = await encode_chat(chat, text, None, prompt_name="input")
    answer = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
    await request.send_json(200, answer)


def _is_long(body: ResponsesBody) -> bool:
    return is_long([body.input, body.instructions, body.tools])


async def _job(
    body: ResponsesBody,
    chat: ChatBody,
    text: TextServices,
    limits: Limits,
    *,
    received_s: float,
    early: EarlyEncoding[list[Span]],
) -> tuple[Job, ResponseFormat]:
    """Check, render and tokenise a chat."""
    top_logprobs = read_logprobs("top_logprobs", body.top_logprobs, limits) or 0
    is_scored = wants_logprobs(body)
    sampling = read_sampling(chat, limits, logprobs=top_logprobs if is_scored else None)
    job = await chat_job(
        chat,
        sampling,
        text,
        limits,
        job_id=early.job_id,
        early=early,
        route=PATH,
        received_s=received_s,
        max_tokens=read_max_tokens("max_output_tokens", body.max_output_tokens),
        max_tokens_name="max_output_tokens",
        prompt_name="input",
        fits_context=True,
    )
    if is_scored and job.tools is not None:
        raise RequestError(
            f"include has {LOGPROBS!r} and tools are given: a call has no place for scores; "
            "leave one out, or set tool_choice to 'none'",
            param="include",
        )
    form = ResponseFormat(
        job=job,
        response=_response(body, sampling, job.request_id, text.model_name, top_logprobs),
        tokenizer=text.tokenizer,
        wants_logprobs=is_scored,
    )
    return job, form


def _response(
    body: ResponsesBody, sampling: SamplingParams, job_id: str, model: str, top_logprobs: int
) -> Response:
    """Return what can be said of the answer before there is one."""
    return Response(
        id=job_id,
        # Unix time: a date for people, so the clock that may jump is the right one.
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        output=[],
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        top_logprobs=top_logprobs,
        text={"format": (body.text and body.text.format) or {"type": "text"}},
        tools=[_told(tool) for tool in body.tools or []],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        user=UNSET if body.user is None else body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )


def _told(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as answers name it: with every field that it might have."""
    return {"description": None, "parameters": None, "strict": False} | tool


COUNT_ROUTE = ("POST", PATH + "/input_tokens")
ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", PATH): responses,
    COUNT_ROUTE: input_tokens,
}
