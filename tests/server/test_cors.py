"""Browsers: the origins of the settings, and only those."""

import pytest

from tailrace.config import Config, ServerConfig
from tests.server.running_app import running_app

OURS = "https://app.example"


@pytest.fixture(scope="module")
def serve(tiny_folder):
    def serve(*origins, **settings):
        config = Config(server=ServerConfig(cors_origins=origins, **settings))
        return running_app(tiny_folder, config=config)

    return serve


@pytest.fixture(scope="module")
def app(serve):
    with serve(OURS, "http://localhost:3000", api_key="key") as app:
        yield app


def preflight(app, path, origin, method="POST", **more):
    headers = {"origin": origin, "access-control-request-method": method} | more
    return app.client.request("OPTIONS", path, headers=headers)


@pytest.mark.parametrize("origin", [OURS, "http://localhost:3000"])
def test_a_preflight_of_a_named_origin_is_answered_without_a_key(app, origin):
    answer = preflight(app, "/v1/chat/completions", origin)
    assert answer.status_code == 204
    assert answer.content == b""
    assert "content-length" not in answer.headers
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-methods"] == "POST, OPTIONS"
    allowed = answer.headers["access-control-allow-headers"].split(", ")
    assert {"authorization", "content-type"} <= set(allowed)
    assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", OURS + ".evil.example", "null", OURS.upper(), "*"]
)
def test_a_preflight_of_another_origin_permits_nothing(app, origin):
    answer = preflight(app, "/v1/chat/completions", origin)
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize(
    ("asked", "is_allowed"),
    [("content-type, x-api-key, anthropic-version", True), ("a" * 4000, False), ("a: b", False)],
)
def test_the_headers_of_a_client_are_allowed_as_it_names_them(app, asked, is_allowed):
    names = {"access-control-request-headers": asked}
    answer = preflight(app, "/v1/messages", OURS, **names)
    allowed = answer.headers["access-control-allow-headers"]
    assert (allowed == asked) is is_allowed
    assert "x-api-key" in allowed


def test_an_answer_may_be_read_by_a_named_origin_errors_too(app):
    refused = app.get("/v1/models", headers={"origin": OURS})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == OURS
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in refused.headers


def test_options_that_is_no_preflight_needs_the_key(app):
    assert app.client.request("OPTIONS", "/v1/models").status_code == 401


def test_without_settings_no_origin_is_named(serve):
    with serve() as app:
        answer = app.get("/health", headers={"origin": OURS})
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert "vary" not in answer.headers


def test_a_star_names_every_origin(serve):
    with serve("*") as app:
        answer = app.get("/health", headers={"origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "https://any.example"
