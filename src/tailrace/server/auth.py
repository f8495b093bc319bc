"""Who may come in: default-deny on the parsed path, keys compared by what nobody can foresee."""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

from tailrace.errors import RequestError

if TYPE_CHECKING:
    from tailrace.access import Access, KeyHolder
    from tailrace.server.http import Request

PUBLIC_PATHS = frozenset({"/health", "/ready", "/live"})
"""Probes, which carry no key. Every other path needs one, known or not."""


class KeyRing:
    """All keys of the server.

    Looked up by a digest under a secret of this process: how long that takes tells nothing of the
    keys, however many there are.

    Args:
        api_key: The one without a name; empty: there is none.
        access: Those that have one. Without any key at all everyone may come in.
    """

    def __init__(self, api_key: str, access: Access) -> None:
        self._secret = secrets.token_bytes(32)
        self._holders: dict[bytes, KeyHolder | None] = {}
        if api_key:
            self._holders[self._digest(api_key.encode())] = None
        for holder in access.holders:
            self._holders[self._digest(holder.key.encode())] = holder

    @property
    def is_open(self) -> bool:
        """Whether everyone may come in."""
        return not self._holders

    @property
    def are_several(self) -> bool:
        """Whether there is more than one key."""
        return len(self._holders) > 1

    def knows(self, key: bytes) -> bool:
        """Whether it is one of the server's."""
        return self._digest(key) in self._holders

    def holder(self, key: bytes) -> KeyHolder | None:
        """Return whose it is; None where it has no name."""
        return self._holders.get(self._digest(key))

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")


def check_key(request: Request, keys: KeyRing) -> KeyHolder | None:
    """Let a request pass, or not; return whose key it brought, if that one has a name.

    Args:
        request: Its key comes as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.
        keys: The server's.

    Raises:
        RequestError: 401.
    """
    if keys.is_open or request.path in PUBLIC_PATHS:
        return None
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    # Headers were read as Latin-1: this gives the bytes that were sent. A bare strip() would take
    # the last byte of a key that ends in "à" for a no-break space.
    key = given.strip(" \t").encode("latin-1")
    if not keys.knows(key):
        raise RequestError(
            "a valid API key is needed: send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
            status=401,
            code="invalid_api_key",
        )
    return keys.holder(key)
