"""Who may come in: default-deny on the parsed path, keys compared in constant time."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from tailrace.errors import RequestError

if TYPE_CHECKING:
    from tailrace.server.http import Request

PUBLIC_PATHS = frozenset({"/health", "/ready", "/live"})
"""Probes, which carry no key. Every other path needs one, known or not."""


def check_key(request: Request, api_key: str) -> None:
    """Let a request pass, or not.

    Args:
        request: Its key comes as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.
        api_key: The server's; empty lets everyone in.

    Raises:
        RequestError: 401.
    """
    if not api_key or request.path in PUBLIC_PATHS:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    # Headers were read as Latin-1: this gives the bytes that were sent. A bare strip() would take
    # the last byte of a key that ends in "à" for a no-break space.
    if not hmac.compare_digest(given.strip(" \t").encode("latin-1"), api_key.encode()):
        raise RequestError(
            "a valid API key is needed: send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
            status=401,
            code="invalid_api_key",
        )
