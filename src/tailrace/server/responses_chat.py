"""The Responses API's input items to the chat that templates and the generation path know.

    instructions                -> a first message of the system
    role developer              -> system, the name that templates know
    a message's text parts      -> text parts
    function_call               -> a tool call of the assistant's message
    function_call_output        -> a message of the tool
    reasoning of earlier turns  -> nothing: the model is not shown it again

Nothing is stored, so what would refer to something stored is refused by name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tailrace.errors import RequestError
from tailrace.server.protocol import ChatBody, SamplingFields

if TYPE_CHECKING:
    from tailrace.server.responses_protocol import ResponsesBody

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        # Of tools and reasoning that are not here: there is never anything of theirs to include.
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
TRUNCATIONS = ("disabled", "auto")
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_UNFINISHED = ("in_progress", "incomplete")


def chat_of(body: ResponsesBody) -> ChatBody:
    """Return the chat that a body means, with its sampling.

    Raises:
        RequestError: It is malformed, or asks for what is not served.
    """
    _check_unserved(body)
    _check_fields(body)
    shared = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    messages = _instructions(body.instructions) + _messages(body.input)
    return ChatBody(
        **shared,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        continue_final_message=_is_unfinished(body.input),
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )


def _check_unserved(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise RequestError(
                f"{name}: this server stores nothing; send the whole conversation as input",
                param=name,
            )
    for name in ("summary", "generate_summary"):
        if getattr(body.reasoning, name, None) not in (None, "auto"):  # "auto": if there is one
            raise RequestError(
                f"reasoning.{name} is not served: what the model thinks is part of its text; "
                "leave it out",
                param=f"reasoning.{name}",
            )
    if body.background:
        raise RequestError(
            "background is true: this server stores nothing, so nobody could fetch the answer; "
            "leave it out",
            param="background",
        )
    if body.n not in (None, 1):
        raise RequestError(f"n is {body.n}: a response is one answer", param="n")
    if body.max_tokens is not None:
        raise RequestError(
            "max_tokens is called max_output_tokens on this route", param="max_tokens"
        )


def _check_fields(body: ResponsesBody) -> None:
    for name in body.include or []:
        if name not in INCLUDABLE:
            raise RequestError(
                f"include has {name[:60]!r}: send some of {', '.join(sorted(INCLUDABLE))}",
                param="include",
            )
    if body.truncation not in (None, *TRUNCATIONS):
        raise RequestError(
            f"truncation is {body.truncation[:40]!r}: send 'disabled' or 'auto'",
            param="truncation",
        )
    metadata = body.metadata or {}
    sizes_are_right = len(metadata) <= MAX_METADATA and all(
        len(key) <= MAX_METADATA_KEY_CHARS and len(value) <= MAX_METADATA_CHARS
        for key, value in metadata.items()
    )
    if not sizes_are_right:
        raise RequestError(
            f"metadata has {len(metadata)} entries: send at most {MAX_METADATA}, with keys of at "
            f"most {MAX_METADATA_KEY_CHARS} characters and values of {MAX_METADATA_CHARS}",
            param="metadata",
        )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool as chats have it: what is beside its type here is within `function` there."""
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(
            f"{where}.type is {str(kind)[:40]!r}: this server runs no tools, it calls your "
            "functions",
            param=f"{where}.type",
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(sent: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(sent, dict) and sent.get("type") == "function":
        return {"type": "function", "function": {"name": sent.get("name")}}
    return sent


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    """Return `text.format` as chats have it: within `json_schema`."""
    sent = body.text.format if body.text else None
    if sent is None or sent.get("type") != "json_schema":
        return sent
    return {"type": "json_schema", "json_schema": sent}


def _instructions(sent: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": sent}] if sent else []


def _messages(sent: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not sent:
        raise RequestError(
            "input is missing or empty: send a text or a list of items", param="input"
        )
    if isinstance(sent, str):
        return [{"role": "user", "content": sent}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(sent):
        _add_item(messages, item, f"input[{index}]")
    if not messages:
        raise RequestError("input holds nothing that the model reads", param="input")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        messages.append(_message(item, where))
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(_tool_call(item, where))
    elif kind == "function_call_output":
        messages.append(_tool_output(item, where))
    elif kind != "reasoning":
        hint = "this server stores nothing" if kind == "item_reference" else "it is not served here"
        raise RequestError(
            f"{where} is an item of the type {str(kind)[:40]!r}: {hint}", param=f"{where}.type"
        )


def _tool_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {
        "name": _string(item, "name", where),
        "arguments": _string(item, "arguments", where),
    }
    try:
        json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{where}.arguments is no JSON: {error}", param=f"{where}.arguments"
        ) from error
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _tool_output(item: dict[str, Any], where: str) -> dict[str, Any]:
    output = item.get("output")
    if not isinstance(output, str):
        output = _text_parts(output, f"{where}.output")
    return {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output}


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(
            f"{where}.{name} is a {type(value).__name__}: send a string", param=f"{where}.{name}"
        )
    return value


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(
            f"{where}.role is {str(role)[:40]!r}: send one of {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    content = item.get("content")
    if not isinstance(content, str):
        content = _text_parts(content, f"{where}.content")
    return {"role": ROLES[role], "content": content}


def _text_parts(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is a {type(content).__name__}: send a string or a list of parts", param=where
        )
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise RequestError(
            f"{where}.type is {str(kind)[:40]!r}: the model takes text only ('input_text')",
            param=f"{where}.type",
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.{field} is a {type(text).__name__}: send a string", param=f"{where}.{field}"
        )
    return {"type": "text", "text": text}


def _is_unfinished(sent: str | list[dict[str, Any]] | None) -> bool:
    """Whether the last item is an answer that the model is to go on with."""
    last = sent[-1] if isinstance(sent, list) and sent else {}
    return last.get("role") == "assistant" and last.get("status") in _UNFINISHED


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the answer's tokens are to be scored."""
    return LOGPROBS in (body.include or [])
