"""A body from its first byte to a value: bounded in size and time, the same for every split.

What counts is parsed when the body is complete, so no split of its bytes can matter; bytes are
appended to one buffer, so that many small chunks cost no more than one large. Who wants to look
ahead (early_encoding.py) is shown the buffer whenever more has come and more is to come.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tailrace.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_T = TypeVar("_T")

# msgspec ends its messages with " - at `$.messages[0].role`", or "... `key` in `$.logit_bias`".
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")


class ClientGoneError(Exception):
    """The client left before its request was complete: there is nobody to answer."""


async def read_body(
    receive: Callable[[], Awaitable[dict[str, Any]]],
    content_length: str | None,
    *,
    max_bytes: int,
    timeout_s: float,
    see: Callable[[bytearray], None] | None = None,
) -> bytes:
    """Collect a request's body.

    Args:
        receive: ASGI's.
        content_length: The header, where there is one.
        max_bytes: Most that is read.
        timeout_s: Seconds in which the whole body must come.
        see: Is shown a body that comes in parts; it must return at once and change nothing.

    Raises:
        RequestError: 413 or 408.
        ClientGoneError: The client left.
    """
    if content_length is not None and content_length.isdecimal():
        _check_size(int(content_length), max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                _check_size(len(body), max_bytes)
                more = message.get("more_body", False)
                if more and see is not None:
                    see(body)
    except TimeoutError:
        raise RequestError(
            f"the body was not complete after {timeout_s:g} s ({len(body)} bytes came)", status=408
        ) from None
    return bytes(body)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Parse JSON as a type.

    Raises:
        RequestError: 400; `param` names the field where one is at fault.
    """
    try:
        # The whole of it: msgspec passes over the bytes of fields that the type lacks.
        text = body.decode()
        return msgspec.json.decode(text, type=kind)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: {error.reason} (byte {error.start})"
        ) from error
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error)) from error
    except msgspec.DecodeError as error:
        hint = "; a \\uD800 to \\uDFFF escape must have its pair" if "\\ud" in text.lower() else ""
        raise RequestError(f"the body is not valid JSON: {error}{hint}") from error
    except RecursionError as error:
        raise RequestError("the body is not valid JSON: nested too deeply") from error


def _wrong_value(text: str) -> RequestError:
    """Turn msgspec's message into ours, with the field as `param`."""
    place = _PLACE.search(text)
    path = place["path"].replace("[...]", "") if place else ""
    if missing := _MISSING.search(text):
        path = f"{path}.{missing['name']}" if path else missing["name"]
    what = text[: place.start()] if place else text
    return RequestError(f"{path or 'body'}: {what}", param=path or None)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise RequestError(
            f"the body has at least {size} bytes; this server takes {max_bytes} (--max-body-bytes)",
            status=413,
        )
