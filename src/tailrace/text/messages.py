"""OpenAI's chat messages, checked and in the form that chat templates expect."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tailrace.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tailrace.text.tokenizer import Tokenizer

_ROLE = re.compile(r"[A-Za-z_]{1,32}")
_MAX_DEPTH = 64


def read_messages(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return copies whose "content" is text and whose tool-call arguments are objects.

    Raises:
        RequestError: There is no message, or one is malformed; it names the place.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    return [_read_message(message, index, tokenizer) for index, message in enumerate(messages)]


def refuse_control_tokens(value: Any, where: str, tokenizer: Tokenizer) -> None:
    """Refuse strings, at any depth and as keys too, that spell a control token.

    Raises:
        RequestError: One does, or the value is nested too deeply.
    """
    for path, text in _strings(value, where, 0):
        found = tokenizer.find_control(text)
        if found:
            raise RequestError(
                f"{path} spells the model's control token {found!r}, which only the text of a "
                "message may: remove it",
                param=path,
            )


def _read_message(message: Any, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(
            f"{where} is a {type(message).__name__}: send an object with role and content",
            param=where,
        )
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(
            f"{where}.role is {str(role)[:40]!r}: send a word such as system, user or assistant",
            param=f"{where}.role",
        )
    rest = {key: value for key, value in message.items() if key != "content"}
    if rest.get("tool_calls"):
        rest["tool_calls"] = _read_tool_calls(rest["tool_calls"], f"{where}.tool_calls")
    refuse_control_tokens(rest, where, tokenizer)
    content = message.get("content")
    if content is None and role != "assistant":  # whose answer may be tool calls alone
        raise RequestError(
            f"{where}.content is missing: send a text or a list of parts", param=f"{where}.content"
        )
    return {**rest, "content": _read_content(content, f"{where}.content")}


def _read_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is a {type(content).__name__}: send a string or a list of parts", param=where
        )
    return "\n".join(_read_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise RequestError(
            f"{where}.type is {str(kind)[:40]!r}: the model takes text only",
            param=f"{where}.type",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.text is a {type(text).__name__}: send a string", param=f"{where}.text"
        )
    return text


def _read_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls with parsed arguments: templates write them with `tojson`."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} is a {type(calls).__name__}: send a list", param=where)
    return [_read_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _read_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function is missing: send an object", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
            # An escape may have made half a character, which no prompt, answer or log can hold.
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{where}.function.arguments holds the lone surrogate "
                f"{error.object[error.start]!a}, which is half a character: send both halves",
                param=f"{where}.function.arguments",
            ) from error
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where}.function.arguments is no JSON: {error}",
                param=f"{where}.function.arguments",
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _strings(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield every string within `value`, with its path."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{path} is nested more than {_MAX_DEPTH} deep: flatten it", param=path)
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield path, key
            yield from _strings(inner, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _strings(inner, f"{path}[{index}]", depth + 1)
