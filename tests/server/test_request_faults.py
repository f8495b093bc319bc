"""Slow, endless, huge and broken prompts over real sockets, while they are encoded early."""

import json
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tailrace.config import Config, ServerConfig
from tailrace.server import early_encoding
from tests.server.fake_engine import FakeEngine
from tests.server.running_app import read_to_end, running_app

CONTEXT = 100_000
WORDS = "once upon a time there was a river, and a mill. "
CHUNKED = b"host: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def app(tiny_folder):
    with running_app(tiny_folder, context_length=CONTEXT) as app:
        yield app


@pytest.fixture
def encoded(app, monkeypatch):
    """The texts encoded early, as they come."""
    tokenizer, texts = app.services.text.tokenizer, []
    for name in ("_encode_full", "_encode_checked"):
        encode = getattr(tokenizer, name)
        monkeypatch.setattr(
            tokenizer, name, lambda text, encode=encode: texts.append(text) or encode(text)
        )
    return texts


def head(path, length):
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def status_and_value(answer):
    start, _, body = answer.partition(b"\r\n\r\n")
    return int(start.split(b" ", 2)[1]), json.loads(body)


def wait_until(holds):
    end_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def assert_idle(app):
    app.settle()
    assert app.services.admission.sequences == 0
    assert app.engine.open_requests == 0
    assert app.engine.reserved == {}


def completion(prompt, **fields):
    return json.dumps({"prompt": prompt, "max_tokens": 2, **fields}).encode()


def chat(prompt):
    messages = [{"role": "system", "content": WORDS * 60}, {"role": "user", "content": prompt}]
    return json.dumps({"messages": messages, "max_tokens": 2}).encode()


def response(prompt):
    fields = {"model": "tiny", "instructions": WORDS * 60, "input": prompt}
    return json.dumps({**fields, "max_output_tokens": 2}).encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion(WORDS * 300)),
        ("/generate", completion(WORDS * 300)),
        ("/v1/chat/completions", chat(WORDS * 300)),
        ("/v1/responses", response(WORDS * 300)),
    ],
)
def test_a_prompt_that_trickles_in_is_encoded_before_its_last_byte(app, encoded, path, body):
    whole = app.raw(head(path, len(body)) + body)
    assert whole.startswith(b"HTTP/1.1 200")
    encoded.clear()
    with app.connect() as connection:
        connection.sendall(head(path, len(body)))
        for start in range(0, len(body) - 100, 3000):
            connection.sendall(body[start : min(start + 3000, len(body) - 100)])
        # All but the last 100 bytes came; what is less than a piece may wait for the end.
        wait_until(lambda: sum(map(len, encoded)) > len(body) - 100 - 2 * early_encoding.MIN_CHARS)
        assert app.get("/live").status_code == 200
        wait_until(lambda: app.engine.reserved)
        ((leased_id, leased_tokens),) = app.engine.reserved.items()
        assert 512 <= leased_tokens < len(body)
        connection.sendall(body[-100:])
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")
    first, second = app.engine.requests[-2:]
    assert first.token_ids == second.token_ids
    assert second.request_id == leased_id
    assert_idle(app)


def test_a_client_that_stalls_within_its_prompt_is_408_and_others_are_served(
    tiny_folder, monkeypatch
):
    config = Config(server=ServerConfig(body_timeout_s=5.0))
    body = completion(WORDS * 300)
    reserve, leased = FakeEngine.reserve, []
    monkeypatch.setattr(
        FakeEngine, "reserve", lambda *args: leased.append(args[1]) or reserve(*args)
    )
    with running_app(tiny_folder, config=config, context_length=CONTEXT) as app:
        with app.connect() as connection:
            connection.sendall(head("/v1/completions", len(body)) + body[:8000])
            wait_until(lambda: leased)  # whether or not the stall's deadline has come since
            for _ in range(5):
                answer = app.post("/generate", {"prompt": "Hi", "max_tokens": 1})
                assert answer.status_code == 200
            status, value = status_and_value(read_to_end(connection))
        assert (status, value["error"]["code"]) == (408, "request_timeout")
        assert_idle(app)


def test_a_client_that_leaves_within_its_prompt_leaves_nothing_behind(app, encoded):
    body = completion(WORDS * 300)
    with app.connect() as connection:
        connection.sendall(head("/v1/completions", len(body)) + body[:8000])
        wait_until(lambda: encoded and app.engine.reserved)
        connection.shutdown(socket.SHUT_RDWR)
    assert_idle(app)


BROKEN = {
    "cut": b'"',
    "not a number": b'", "temperature": NaN}',
    "deep nesting": b'", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a lone surrogate": b'\\ud800"}',
    "half a character": b'\xf0\x9f"}',
    "a control character": b'\n"}',
    "a wrong type, late": b'", "max_tokens": "two"}',
    "another prompt, of a wrong type": b'", "prompt": {}}',
    "a strange model, late": b'", "model": "no such"}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_after_the_prompt_is_answered_as_if_it_had_come_whole(app, encoded, kind):
    body = b'{"prompt": "' + (WORDS * 200).encode() + BROKEN[kind]
    whole = status_and_value(app.raw(head("/v1/completions", len(body)) + body))
    assert whole[0] in (400, 404)
    encoded.clear()
    with app.connect() as connection:
        connection.sendall(head("/v1/completions", len(body)) + body[:9000])
        wait_until(lambda: encoded)
        connection.sendall(body[9000:])
        assert status_and_value(read_to_end(connection)) == whole
    assert_idle(app)


def test_of_two_prompts_the_parsers_choice_is_served(app, encoded):
    body = b'{"prompt": "' + (WORDS * 100).encode() + b'", "prompt": "Hi", "max_tokens": 2}'
    with app.connect() as connection:
        connection.sendall(head("/v1/completions", len(body)) + body[:4500])
        wait_until(lambda: encoded)
        connection.sendall(body[4500:])
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")
    assert bytes(app.engine.requests[-1].token_ids) == b"Hi"


def test_a_10_mb_prompt_is_refused_without_being_encoded(app, encoded):
    body = completion("x" * 10_000_000)
    status, value = status_and_value(app.raw(head("/v1/completions", len(body)) + body))
    assert (status, value["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least" in value["error"]["message"]
    longest = app.services.text.tokenizer._token_length.longest_chars
    assert sum(map(len, encoded)) <= CONTEXT * longest + early_encoding.MAX_CHARS
    assert_idle(app)


@pytest.mark.slow
def test_a_prompt_in_chunks_of_a_byte_costs_no_memory_and_holds_nobody_up(app):
    prompt = WORDS * 60_000
    body = completion(prompt, truncate_prompt_tokens=10)
    # A thread that has encoded it keeps some 200 MB for a next time: there shall be but one.
    app.call(app.loop.set_default_executor, ThreadPoolExecutor(1))
    for _ in range(3):
        app.post("/v1/completions", content=iter([body[:500_000], body[500_000:]]))
    peak_before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with app.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED)
        for start in range(0, len(body), 10_000):
            piece = body[start : start + 10_000]
            connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in piece))
            if start % 200_000 == 0:
                assert app.post("/generate", {"prompt": "Hi", "max_tokens": 1}).status_code == 200
        connection.sendall(b"0\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")
    assert bytes(app.engine.requests[-1].token_ids) == prompt.encode()[-10:]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before_kib < 60_000
    assert_idle(app)
