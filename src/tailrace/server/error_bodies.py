"""What an error looks like to a client: in OpenAI's shape, or in Anthropic's on its routes."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tailrace.errors import RequestError

ANTHROPIC_PATH = "/v1/messages"

_OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def speaks_anthropic(path: str) -> bool:
    """Whether a path's clients expect Anthropic's shapes."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def openai_error(error: RequestError) -> bytes:
    """Return OpenAI's JSON for an error."""
    described = {
        "message": error.message,
        "type": _type(_OPENAI_TYPES, error.status, "server_error"),
        "param": error.param,
        "code": error.code or HTTPStatus(error.status).phrase.lower().replace(" ", "_"),
    }
    return msgspec.json.encode({"error": described})


def anthropic_error(error: RequestError, request_id: str) -> bytes:
    """Return Anthropic's JSON for an error; every status of 500 and more is an `api_error`.

    Its `overloaded_error` would come with the status 529, which this server has no use for: a full
    house is 429, and one that opens or closes is 503.
    """
    described = {
        "type": _type(_ANTHROPIC_TYPES, error.status, "api_error"),
        "message": error.message,
    }
    return msgspec.json.encode({"type": "error", "error": described, "request_id": request_id})


def _type(named: dict[int, str], status: int, of_ours: str) -> str:
    return named.get(status, "invalid_request_error" if status < 500 else of_ours)
