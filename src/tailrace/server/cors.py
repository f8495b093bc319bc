"""Cross-origin requests from browsers, for the origins that the settings name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.server.http import Request

ALLOWED_HEADERS = b"authorization, content-type, x-api-key, x-request-id, x-tailrace-priority"
"""Where a browser does not say which it means."""
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-, ]{1,2048}")
MAX_AGE_S = b"600"


def allow_origin(request: Request, origins: Sequence[str]) -> bool:
    """Add the headers that let a named origin read the answer; return whether it is named."""
    if origins:
        request.add_header(b"vary", b"origin")  # of refusals too: caches must not mix them up
    origin = request.headers.get("origin")
    if not origin or not ("*" in origins or origin in origins):
        return False
    request.add_header(b"access-control-allow-origin", origin.encode("latin-1"))
    request.add_header(b"access-control-expose-headers", b"x-request-id, request-id, retry-after")
    return True


def is_preflight(request: Request) -> bool:
    """Whether a browser asks what it may send."""
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


async def answer_preflight(request: Request, methods: Sequence[str]) -> None:
    """Say what may be sent; without the origin's own header the browser takes it as a no."""
    request.add_header(b"access-control-allow-methods", ", ".join(methods).encode())
    # OpenAI's and Anthropic's clients send a dozen of their own, which change with their versions;
    # whose pages may ask at all is decided by the origin.
    asked = request.headers.get("access-control-request-headers", "")
    allowed = asked.encode() if _HEADER_NAMES.fullmatch(asked) else ALLOWED_HEADERS
    request.add_header(b"access-control-allow-headers", allowed)
    request.add_header(b"access-control-max-age", MAX_AGE_S)
    await request.send_nothing()
