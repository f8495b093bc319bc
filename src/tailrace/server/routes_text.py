"""The model's text side: /v1/models, /tokenize, /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.errors import RequestError
from tailrace.server.admission import check_model, check_open
from tailrace.server.chat_job import encode_chat
from tailrace.server.prompts import INLINE_CHARS, off_loop_if
from tailrace.server.protocol import ChatBody
from tailrace.server.unserved import check_unserved

if TYPE_CHECKING:
    from tailrace.server.http import Handler, Request
    from tailrace.server.sampling import Limits
    from tailrace.server.services import Services, TextServices


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`; what else changes a prompt is as where it is served."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template: Any = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """Ids to text; control tokens are spelled out."""

    tokens: list[int]
    model: str | None = None


async def models(services: Services, request: Request) -> None:
    """GET /v1/models."""
    await request.send_json(200, {"object": "list", "data": [_card(services)]})


async def model(services: Services, request: Request) -> None:
    """GET /v1/models/NAME; a name may hold slashes."""
    card = _card(services)
    text, _ = check_open(services)
    check_model(request.path.removeprefix(MODEL_PATH), text)
    await request.send_json(200, card)


async def tokenize(services: Services, request: Request) -> None:
    """POST /tokenize."""
    body = await request.decode(TokenizeBody)
    text, limits = check_open(services)
    check_model(body.model, text)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        ids = await _encode_messages(text, body)
    else:
        ids = await _encode(text, limits, body)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": limits.context_length,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = await off_loop_if(
            len(ids) > INLINE_CHARS, lambda: [text.tokenizer.token_text(i) for i in ids]
        )
    await request.send_json(200, answer)


async def detokenize(services: Services, request: Request) -> None:
    """POST /detokenize."""
    body = await request.decode(DetokenizeBody)
    text, limits = check_open(services)
    check_model(body.model, text)
    _check_places(body.tokens, limits.vocab_size)
    prompt = await asyncio.to_thread(text.tokenizer.decode, body.tokens, skip_special_tokens=False)
    await request.send_json(200, {"prompt": prompt})


MODEL_PATH = "/v1/models/"
MODEL_ROUTES: dict[str, Handler] = {"GET": model}
ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/v1/models"): models,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
}


def _card(services: Services) -> dict[str, Any]:
    text, limits = check_open(services)
    return {
        "id": text.model_name,
        "object": "model",
        "created": int(services.started_unix_s),
        "owned_by": "tailrace",
        "max_model_len": limits.context_length,
    }


def _check_places(token_ids: list[int], vocab_size: int) -> None:
    # `min` and `max` scan in C; where it was matters only once one is wrong.
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return
    index = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
    raise RequestError(
        f"token id {token_ids[index]} is outside 0..{vocab_size - 1}", param=f"tokens[{index}]"
    )


async def _encode(text: TextServices, limits: Limits, body: TokenizeBody) -> list[int]:
    prompt = body.prompt or ""

    def encode() -> list[int]:
        return text.tokenizer.encode(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            parse_special=limits.server.parse_special and body.parse_special is not False,
        )

    return await off_loop_if(len(prompt) > INLINE_CHARS, encode)


async def _encode_messages(text: TextServices, body: TokenizeBody) -> list[int]:
    chat = ChatBody(
        messages=body.messages,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        chat_template=body.chat_template,
    )
    check_unserved(chat)
    return (await encode_chat(chat, text, None)).token_ids
