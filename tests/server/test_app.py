"""The application over real sockets: routes, statuses, bodies as bytes, faults."""

import asyncio
import itertools
import json
import resource
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.config import Config, ServerConfig
from tailrace.errors import RequestError
from tailrace.server.app import ROUTES, create_app
from tailrace.server.connection import LINGER_BYTES
from tailrace.server.http import LEFT_EXTENSION
from tests.server.fake_engine import Script
from tests.server.hand_made import make_services
from tests.server.running_app import read_to_end, running_app

LIMIT_BYTES = 4_000_000
CHUNKED = b"host: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def app(tiny_folder):
    config = Config(server=ServerConfig(max_body_bytes=LIMIT_BYTES, body_timeout_s=10.0))
    with running_app(tiny_folder, config=config) as app:
        yield app


@pytest.fixture
def failing(app, monkeypatch):
    """Make /version raise an exception."""

    def failing(error, after=None):
        async def handler(services, request):
            if after is not None:
                await request.start_stream()
                await request.write(after)
            raise error

        monkeypatch.setitem(ROUTES, ("GET", "/version"), handler)

    return failing


def post(path, body, *, length=None):
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}"
    return head.encode() + b"\r\n\r\n" + body


def chunked(*parts):
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def parse(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def error_of(answer):
    status, _, body = parse(answer)
    return status, json.loads(body)["error"]


# Routes


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/chat/completion", "'/v1/chat/completions'"),
        ("/v1/completions/", "'/v1/completions'"),
        ("/helth", "'/health'"),
        ("/v1/../metrics", "/v1/../metrics"),
        ("/nothing/like/it/at/all", "/nothing/like/it/at/all"),
    ],
)
def test_an_unknown_path_is_404_with_the_nearest_name(app, path, hint):
    answer = app.raw(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    status, error = error_of(answer)
    assert (status, error["type"], error["code"]) == (404, "not_found_error", "not_found")
    assert hint in error["message"]


def test_a_long_unknown_path_is_not_repeated_in_full(app):
    answer = app.get("/" + "x" * 30_000)
    assert answer.status_code == 404
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/generate", "POST"),
        ("HEAD", "/generate", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
    ],
)
def test_another_method_is_405_with_those_allowed(app, method, path, allow):
    answer = app.client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow
    if method != "HEAD":
        assert answer.json()["error"]["code"] == "method_not_allowed"


# /debug/kv is behind a flag of its own.
@pytest.mark.parametrize(
    "path", sorted({path for method, path in ROUTES if method == "GET"} - {"/debug/kv"})
)
def test_head_is_get_without_the_body(app, path):
    head = app.client.head(path)
    assert head.status_code == 200
    assert head.content == b""
    assert int(head.headers["content-length"]) > 0
    assert head.headers["content-type"] == app.get(path).headers["content-type"]


def test_a_query_is_no_part_of_the_path(app):
    assert app.get("/live?verbose=1").status_code == 200


def test_only_http_is_spoken():
    app = create_app(None)
    with pytest.raises(RuntimeError, match="websocket"):
        app({"type": "websocket"}, None, None).send(None)


# Request ids


def test_the_clients_request_id_comes_back_on_errors_too(app):
    for path in ("/live", "/nowhere"):
        answer = app.get(path, headers={"x-request-id": "abc 1/2"})
        assert answer.headers["x-request-id"] == "abc 1/2"


@pytest.mark.parametrize("raw", [b"a\tb", b"\xc3\xa9", b"a\x80", b"x" * 129, b""])
def test_a_strange_request_id_is_replaced(app, raw):
    sent = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: " + raw
    status, headers, _ = parse(app.raw(sent + b"\r\n\r\n"))
    assert status == 200
    assert len(headers["x-request-id"]) == 32


@pytest.mark.parametrize("ending", [b"\r\n", b"\n", b"\r"])
def test_a_line_break_in_a_request_id_cannot_add_a_header_to_the_answer(app, ending):
    sent = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: a" + ending
    status, headers, _ = parse(app.raw(sent + b"set-cookie: evil=1\r\n\r\n"))
    assert status in (200, 400)
    assert "set-cookie" not in headers


# Bodies


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(
        [
            b'{"prompt":"\xf0\x9f\x98\x80"}',
            b'{"prompt":"\xf0\x9f\x98"}',
            b'{"prompt":"\\ud83d\\ude00"}',
            b'{"prompt":"\\ud83d"}',
            b'{"prompt":NaN}',
            b'{"prompt":1}',
            b'{"prompt":"a"',
            b'{"prompt":"a"}}',
        ]
    ),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_the_answer_does_not_depend_on_how_the_bytes_come(app, body, cuts):
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    parts = [body[a:b] for a, b in itertools.pairwise(places) if a < b]
    whole = parse(app.raw(post("/tokenize", body)))
    by_packets = parse(app.raw(post("/tokenize", b"", length=len(body)), *parts))
    by_chunks = parse(
        app.raw(b"POST /tokenize HTTP/1.1\r\n" + CHUNKED + chunked(*parts) + b"0\r\n\r\n")
    )
    assert whole[::2] == by_packets[::2] == by_chunks[::2]
    assert whole[0] == (200 if body.endswith((b'\x80"}', b'\\ude00"}')) else 400)


@pytest.mark.parametrize("path", sorted(path for method, path in ROUTES if method == "POST"))
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt":"\xff"}',
        b'{"x":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":NaN}',
        b'{"temperature":NaN}',
        b"[" * 200_000,
        b'{"messages":' + b"[" * 200_000,
        b'{"x":' + b'{"a":' * 200_000,
    ],
)
def test_every_route_refuses_malformed_bodies_in_shape(app, path, body):
    answer = app.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert app.get("/live").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {}, "tokens"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": [], "stream": 1}, "stream"),
        ("/generate", {"prompt": "a", "top_p": []}, "top_p"),
        ("/generate", {"prompt": "a", "stream": "yes"}, "stream"),
    ],
)
def test_a_wrong_type_names_the_field(app, path, body, param):
    answer = app.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_length_above_the_limit_is_413_before_the_body_comes(app):
    answer = app.raw(post("/generate", b"", length=LIMIT_BYTES + 1))
    status, error = error_of(answer)
    assert status == 413
    assert str(LIMIT_BYTES) in error["message"]
    assert parse(answer)[1]["connection"] == "close"


def test_no_100_continue_invites_a_body_that_is_too_large(app):
    head = post("/generate", b"", length=LIMIT_BYTES + 1)[:-2]
    assert parse(app.raw(head + b"expect: 100-continue\r\n\r\n"))[0] == 413
    with app.connect() as connection:
        connection.sendall(post("/tokenize", b"", length=14)[:-2] + b"expect: 100-continue\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(b'{"prompt":"a"}')
        assert parse(read_to_end(connection))[0] == 200


def test_a_client_that_sends_all_of_a_body_too_large_can_read_why(app):
    answer = app.post("/generate", content=b" " * (LIMIT_BYTES * 3))
    assert answer.status_code == 413


def test_a_chunked_body_is_413_at_the_byte_too_many(app):
    most = LIMIT_BYTES + LINGER_BYTES + 64 * 1024 * 1024  # the kernels buffer some, too
    with app.connect() as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\n" + CHUNKED)
        part = chunked(b" " * 65536)
        sent = 0
        try:
            while sent < most:
                connection.sendall(part)
                sent += 65536
        except ConnectionError:
            pass
        assert sent < most
        assert parse(read_to_end(connection))[0] == 413


def test_three_megabytes_in_chunks_of_a_byte_are_served_and_cost_no_memory(app):
    body = json.dumps({"prompt": ""}).encode()
    body = body[:-1] + b" " * 3_000_000 + b"}"
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with app.connect() as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\n" + CHUNKED)
        for start in range(0, len(body), 10_000):
            piece = body[start : start + 10_000]
            connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in piece))
        connection.sendall(b"0\r\n\r\n")
        status, _, answer = parse(read_to_end(connection))
    assert (status, json.loads(answer)["count"]) == (200, 0)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
    assert grown_kib < 60_000


def test_a_slow_body_is_408_and_the_end(tiny_folder):
    with running_app(tiny_folder, config=Config(server=ServerConfig(body_timeout_s=0.05))) as app:
        for sent in (
            post("/generate", b'{"prompt":', length=100),
            post("/v1/chat/completions", b"", length=5),
            b"POST /tokenize HTTP/1.1\r\n" + CHUNKED + chunked(b"{"),
        ):
            answer = app.raw(sent)
            status, error = error_of(answer)
            assert (status, error["code"]) == (408, "request_timeout")
            assert parse(answer)[1]["connection"] == "close"
        app.settle()
        assert app.services.admission.sequences == 0


def test_a_client_that_leaves_within_its_body_leaves_nothing_behind(app):
    with app.connect() as connection:
        connection.sendall(post("/generate", b'{"prompt":', length=100))
        connection.shutdown(socket.SHUT_WR)
    assert app.post("/generate", {"prompt": "Hi", "max_tokens": 1}).status_code == 200
    app.settle()
    assert app.services.admission.sequences == 0
    assert app.engine.open_requests == 0


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("zstd", 415), ("Identity", 200)])
def test_a_compressed_body_is_refused_by_the_name_of_its_coding(app, coding, status):
    answer = app.post("/tokenize", {"prompt": "a"}, headers={"content-encoding": coding})
    assert answer.status_code == status
    assert (coding in answer.text) is (status == 415)


def test_unread_bytes_of_a_body_are_not_taken_for_the_next_request(app):
    smuggled = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    head = f"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: {len(smuggled)}\r\n\r\n".encode()
    answer = app.raw(head + smuggled)
    assert answer.count(b"HTTP/1.1") == 1
    assert parse(answer)[0] == 404


# Failures


@pytest.mark.parametrize("is_by_client", [True, False], ids=["client", "server"])
def test_only_the_clients_end_is_taken_for_one(tiny_folder, monkeypatch, is_by_client):
    """Where the server ends, its requests end as cancelled."""

    async def handler(_services, request):
        await request.body()
        await asyncio.sleep(60)

    monkeypatch.setitem(ROUTES, ("POST", "/version"), handler)
    left = []

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    async def send(message):
        raise AssertionError(message)

    async def main():
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/version",
            "headers": [],
            "extensions": {LEFT_EXTENSION: {"call": left.append}},
        }
        app = create_app(make_services(tiny_folder))
        task = asyncio.create_task(app(scope, receive, send))
        for _ in range(100):  # turns, of which it takes a few: nothing is waited for
            await asyncio.sleep(0)
        if is_by_client:
            left[0]()
        else:
            task.cancel()
        await task

    if is_by_client:
        asyncio.run(main())
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(asyncio.wait_for(main(), 60))


def test_an_exception_is_500_in_shape_without_its_text(app, failing, capsys):
    failing(KeyError("secret detail"))
    answer = app.get("/version", headers={"x-request-id": "find-me"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "find-me"
    logged = capsys.readouterr()
    assert "find-me" in logged.out + logged.err
    assert app.get("/live").status_code == 200


def test_an_error_after_the_answer_began_drops_the_connection(app, failing):
    failing(RequestError("too late"), after=b"data: 1\n\n")
    answer = app.raw(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"\r\n0\r\n" not in answer  # no orderly end, which a client would take for success


def test_retry_after_goes_with_a_refusal_that_is_worth_a_retry(app):
    app.services.draining = True
    try:
        answer = app.post("/generate", {"prompt": "a", "max_tokens": 1})
    finally:
        app.services.draining = False
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_a_full_house_is_429_with_retry_after(tiny_folder):
    config = Config(server=ServerConfig(max_waiting=0))
    scripts = {"": Script(pause_after=0)}
    with running_app(tiny_folder, scripts, config) as app:
        app.services.admission.sequences = app.services.places
        answer = app.post("/generate", {"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        app.services.admission.sequences = 0
