"""/v1/messages and its count_tokens: Anthropic's API over the same chats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import RequestError
from tailrace.server.admission import check_model, check_open
from tailrace.server.answering import answer
from tailrace.server.anthropic_chat import chat_of, sampled_chat_of
from tailrace.server.anthropic_format import MessageFormat
from tailrace.server.anthropic_protocol import CountTokensBody, MessagesBody
from tailrace.server.chat_job import chat_job, encode_chat, is_long, renamed
from tailrace.server.early_encoding import ChatPlaces, early_chat
from tailrace.server.error_bodies import ANTHROPIC_PATH
from tailrace.server.prompts import off_loop_if
from tailrace.server.sampling import read_max_tokens, read_sampling

if TYPE_CHECKING:
    from tailrace.server.http import Handler, Request
    from tailrace.server.services import Services, TextServices

_PLACES = ChatPlaces(system="system")


async def messages(services: Services, request: Request) -> None:
    """POST /v1/messages."""
    received_s = request.timeline.received_s
    scope = services.cache_scope(request.holder)
    with early_chat(services, "msg_", _PLACES, cache_scope=scope) as early:
        body = await request.decode(MessagesBody, early.see)
        text, limits = check_open(services)
        _check_model(body, text)
        chat = await off_loop_if(_is_long(body), lambda: sampled_chat_of(body))
        request.timeline.enter("admission")
        with (
            services.admission.admitted(1, services.places),
            renamed("response_format", "output_config.format"),
        ):
            request.timeline.enter("tokenise")
            asked_tokens = read_max_tokens("max_tokens", body.max_tokens) or 0
            job = await chat_job(
                chat,
                read_sampling(chat, limits),
                text,
                limits,
                job_id=early.job_id,
                early=early,
                route=ANTHROPIC_PATH,
                received_s=received_s,
                max_tokens=asked_tokens,
                fits_context=True,
            )
            form = MessageFormat(
                job=job,
                model=text.model_name,
                http_request_id=request.request_id,
                asked_tokens=asked_tokens,
            )
            await answer(services, request, text, job, form)


async def count_tokens(services: Services, request: Request) -> None:
    """POST /v1/messages/count_tokens; counts prompts too that no context holds."""
    body = await request.decode(CountTokensBody)
    text, _ = check_open(services)
    _check_model(body, text)
    chat = await off_loop_if(_is_long(body), lambda: chat_of(body))
    prompt = await encode_chat(chat, text, None)
    await request.send_json(200, {"input_tokens": len(prompt.token_ids)})


def _is_long(body: CountTokensBody) -> bool:
    return is_long([body.system, body.messages, body.tools])


def _check_model(body: CountTokensBody, text: TextServices) -> None:
    if not body.model:
        raise RequestError(
            f"model is missing: send {text.model_name!r}, which is served here", param="model"
        )
    check_model(body.model, text)


COUNT_ROUTE = ("POST", ANTHROPIC_PATH + "/count_tokens")
ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", ANTHROPIC_PATH): messages,
    COUNT_ROUTE: count_tokens,
}
