"""Anthropic's messages to the chat that templates and the generation path know.

    system                      -> a first message of that role
    text blocks                 -> text parts
    tool_use blocks             -> tool calls of an assistant's turn
    tool_result blocks          -> turns of the tool, before what the user says after them
    turns of one role in a row  -> one turn, as Anthropic reads them
    a last turn of the assistant-> the text that the answer goes on with
    thinking of earlier turns   -> nothing: the model is not shown it again
    thinking that is disabled   -> no effort of reasoning, as templates know it

What the model cannot take (images, documents, Anthropic's own tools) is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.errors import RequestError
from tailrace.server.protocol import ChatBody

if TYPE_CHECKING:
    from tailrace.server.anthropic_protocol import CountTokensBody, MessagesBody

ROLES = ("user", "assistant", "system")
BILLING_HEADER = "x-anthropic-billing-header"
"""What a system block of Claude Code begins with that is meant for Anthropic's accounts alone; it
differs from request to request, so that no prompt would begin as another does."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_UNSEEN = frozenset({"thinking", "redacted_thinking"})


def chat_of(body: CountTokensBody) -> ChatBody:
    """Return the chat that a prompt means; sampling is not looked at.

    Raises:
        RequestError: It is malformed, or asks for what is not served.
    """
    _check_unserved(body)
    messages = _system(body.system) + _turns(body.messages)
    is_prefilled = messages[-1]["role"] == "assistant"
    if is_prefilled and messages[-1].get("tool_calls"):
        raise RequestError(
            "messages end with a tool_use: send the tool_result that the model waits for",
            param="messages",
        )
    tool_choice, is_parallel = _tool_choice(body.tool_choice)
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=tool_choice,
        parallel_tool_calls=is_parallel,
        response_format=_response_format(body.output_config or {}),
        continue_final_message=is_prefilled,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort="none" if (body.thinking or {}).get("type") == "disabled" else None,
    )


def sampled_chat_of(body: MessagesBody) -> ChatBody:
    """Return the chat that a body means, with its sampling.

    Raises:
        RequestError: As `chat_of`, or `max_tokens` is missing.
    """
    if body.max_tokens is None:
        raise RequestError(
            "max_tokens is missing: send the most tokens that the answer may have",
            param="max_tokens",
        )
    chat = chat_of(body)
    chat.max_tokens = body.max_tokens
    chat.stop = [*body.stop_sequences] if body.stop_sequences else None
    chat.stream = body.stream
    chat.temperature = body.temperature
    chat.top_p = body.top_p
    chat.top_k = body.top_k
    chat.seed = body.seed
    chat.priority = body.priority
    chat.cache_salt = body.cache_salt
    chat.return_metrics = body.return_metrics
    return chat


def _check_unserved(body: CountTokensBody) -> None:
    if (body.thinking or {}).get("type") == "enabled":
        raise RequestError(
            "thinking is not served: leave it out, or send the type 'disabled' or 'adaptive'",
            param="thinking",
        )
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            raise RequestError(
                f"{name} is not served: this server runs no tools; leave it out", param=name
            )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool as OpenAI writes it."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise RequestError(
            f"{where}.type is {str(kind)[:40]!r}: this server runs no tools of Anthropic's, it "
            "calls yours",
            param=f"{where}.type",
        )
    names = {
        "name": "name",
        "description": "description",
        "input_schema": "parameters",
        "strict": "strict",
    }
    function = {ours: tool[name] for name, ours in names.items() if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(sent: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return OpenAI's `tool_choice` and `parallel_tool_calls`."""
    if sent is None:
        return None, None
    kind = sent.get("type")
    choice: str | dict[str, Any]
    if kind == "tool":
        choice = {"type": "function", "function": {"name": sent.get("name")}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        choice = _TOOL_CHOICES[kind]
    else:
        raise RequestError(
            f"tool_choice.type is {str(kind)[:40]!r}: send 'auto', 'any', 'tool' or 'none'",
            param="tool_choice.type",
        )
    return choice, False if sent.get("disable_parallel_tool_use") is True else None


def _response_format(output_config: dict[str, Any]) -> dict[str, Any] | None:
    sent = output_config.get("format")
    if sent is None:
        return None
    if not isinstance(sent, dict) or sent.get("type") != "json_schema":
        raise RequestError(
            "output_config.format: send {'type': 'json_schema', 'schema': ...}, or leave it out",
            param="output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": sent.get("schema")}}


def _system(sent: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not sent:
        return []
    parts = [_text("system", sent)] if isinstance(sent, str) else _parts(sent, "system")
    kept = [part for part in parts if not part["text"].startswith(BILLING_HEADER)]
    return [{"role": "system", "content": kept}] if kept else []


def _turns(sent: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not sent:
        raise RequestError("messages is missing or empty: send at least one", param="messages")
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(sent):
        for turn in _read_message(message, f"messages[{index}]"):
            _append(turns, turn)
    if not turns:
        raise RequestError("messages hold nothing that the model reads", param="messages")
    return turns


def _append(turns: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Add a turn, or what it says to the last one where the same one speaks on."""
    if not turns or turns[-1]["role"] != turn["role"] or turn["role"] == "tool":
        turns.append(turn)
        return
    turns[-1]["content"] += turn["content"]
    if "tool_calls" in turn:
        turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])


def _read_message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {str(role)[:40]!r}: send one of {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": [_text(f"{where}.content", content)]}]
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"{where}.content is missing or empty: send a text or a list of blocks",
            param=f"{where}.content",
        )
    turns: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        turn = _read_block(block, role, f"{where}.content[{index}]")
        if turn is not None:
            _append(turns, turn)
    return turns


def _read_block(block: Any, role: str, where: str) -> dict[str, Any] | None:
    """Return what one block says as a turn; None: the model is not shown it."""
    kind = _block_type(block, where)
    if kind == "text":
        return {"role": role, "content": [_text(where, block.get("text"))]}
    if kind == "tool_use" and role == "assistant":
        return {"role": role, "content": [], "tool_calls": [_tool_call(block, where)]}
    if kind == "tool_result" and role == "user":
        return _tool_result(block, where)
    if kind in _UNSEEN:
        return None
    raise _unserved_block(kind, where)


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where}.input is a {type(arguments).__name__}: send an object", param=f"{where}.input"
        )
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise RequestError(
            f"{where}.content is a {type(content).__name__}: send a text or a list of blocks",
            param=f"{where}.content",
        )
    if isinstance(content, list):
        content = _parts(content, f"{where}.content")
    call_id = _string(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(
            f"{where}.{name} is a {type(value).__name__}: send a string", param=f"{where}.{name}"
        )
    return value


def _parts(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Return the text parts of a list of blocks."""
    parts = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = _block_type(block, place)
        if kind == "text":
            parts.append(_text(place, block.get("text")))
        elif kind not in _UNSEEN:
            raise _unserved_block(kind, place)
    return parts


def _block_type(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise RequestError(
            f"{where} has no type: send a block such as {{'type': 'text', 'text': ...}}",
            param=f"{where}.type",
        )
    return kind


def _unserved_block(kind: str, where: str) -> RequestError:
    return RequestError(
        f"{where} is a block of the type {kind[:40]!r}, which is not served in this place: the "
        "model takes text",
        param=f"{where}.type",
    )


def _text(where: str, text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.text is a {type(text).__name__}: send a string", param=f"{where}.text"
        )
    return {"type": "text", "text": text}
