"""Errors as OpenAI's and Anthropic's clients read them."""

import json

import pytest

from tailrace.errors import RequestError
from tailrace.server.error_bodies import anthropic_error, openai_error, speaks_anthropic


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", "bad_request"),
        (401, "authentication_error", "unauthorized"),
        (404, "not_found_error", "not_found"),
        (408, "invalid_request_error", "request_timeout"),
        (429, "rate_limit_error", "too_many_requests"),
        (500, "server_error", "internal_server_error"),
        (503, "server_error", "service_unavailable"),
    ],
)
def test_errors_have_openais_shape(status, kind, code):
    described = json.loads(openai_error(RequestError("what", param="p", status=status)))
    assert described == {"error": {"message": "what", "type": kind, "param": "p", "code": code}}


def test_an_errors_own_code_wins():
    error = RequestError("what", code="context_length_exceeded")
    assert json.loads(openai_error(error))["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
    ],
)
def test_errors_have_anthropics_shape(status, kind):
    described = json.loads(anthropic_error(RequestError("what", param="p", status=status), "r1"))
    assert described == {
        "type": "error",
        "error": {"type": kind, "message": "what"},
        "request_id": "r1",
    }


def test_only_the_messages_routes_speak_as_anthropic():
    assert speaks_anthropic("/v1/messages")
    assert speaks_anthropic("/v1/messages/count_tokens")
    assert speaks_anthropic("/v1/messages/unknown")
    assert not speaks_anthropic("/v1/messagesque")
    assert not speaks_anthropic("/v1/responses")
