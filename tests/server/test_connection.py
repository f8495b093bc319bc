"""Connections of bare bytes: slow, endless and malformed heads, and what they leave alone."""

import asyncio
import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.config import Config, ServerConfig
from tailrace.server import connection as connection_module
from tailrace.server import serve
from tailrace.server.connection import MAX_HEAD_BYTES, Connection, connection_class
from tailrace.server.prompts import INLINE_CHARS
from tailrace.text.tokenizer import Tokenizer
from tests.server.fake_engine import Script
from tests.server.running_app import read_to_end, running_app

GET = b"GET /live HTTP/1.1\r\nhost: x\r\n"
LAST = GET + b"connection: close\r\n\r\n"


@pytest.fixture(scope="module")
def app(tiny_folder):
    with running_app(tiny_folder) as app:
        yield app


@pytest.fixture(scope="module")
def hasty(tiny_folder):
    """A server that gives a head so long that what is sent at once comes within it."""
    config = Config(server=ServerConfig(header_timeout_s=1.5))
    paused = {"": Script("abcdef", pause_after=3)}
    with running_app(tiny_folder, paused, config) as app:
        yield app


def status(answer):
    return int(answer.split(b" ", 2)[1])


def read_until(connection, end):
    received = b""
    while end not in received:
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


def wait_until(holds):
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def generate(prompt):
    body = json.dumps({"prompt": prompt, "max_tokens": 6, "stream": True}).encode()
    return b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def test_a_head_that_never_completes_is_408_and_the_end(hasty):
    begun = {b"G", b"GET /live HTTP/1.1\r\n", GET, GET + b"x-slow: a", LAST[:-1]}
    with ThreadPoolExecutor(len(begun)) as pool:
        answers = dict(zip(begun, pool.map(hasty.raw, begun), strict=True))
    for head, answer in answers.items():
        assert status(answer) == 408, head
        assert b"connection: close" in answer, head


def test_a_connection_that_says_nothing_is_closed_without_an_answer(hasty):
    assert hasty.raw() == b""


def test_a_later_head_has_a_deadline_of_its_own(hasty):
    with hasty.connect() as connection:
        connection.sendall(GET + b"\r\n")
        assert status(read_until(connection, b"}")) == 200
        connection.sendall(GET)
        assert status(read_to_end(connection)) == 408


def test_a_request_that_came_in_time_may_take_its_time(hasty):
    with hasty.connect() as connection:
        connection.sendall(generate("slow"))
        read_until(connection, b'"c"')
        assert hasty.raw(b"G").startswith(b"HTTP/1.1 408")  # a whole deadline has passed
        script = hasty.engine.scripts[""]
        hasty.call(script.go_on.set)
        assert b"[DONE]" in read_until(connection, b"[DONE]")
        hasty.call(script.go_on.clear)


def test_a_stalled_second_head_does_not_write_into_the_first_answer(hasty):
    with hasty.connect() as connection:
        connection.sendall(generate("first") + b"GET /live HT")
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


# Size


def head_of(size):
    """A head whose parts count exactly `size` bytes, without its request line's frame."""
    fixed = len("/live") + len("hostx") + 4 + len("connectionclose") + 4 + len("x-fill") + 4
    return LAST[:-2] + b"x-fill: " + b"a" * (size - fixed) + b"\r\n\r\n"


def test_a_head_of_exactly_the_limit_is_served(app):
    assert status(app.raw(head_of(MAX_HEAD_BYTES))) == 200


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(head_of(MAX_HEAD_BYTES + 1), id="one field, whole"),
        pytest.param(head_of(200_000), id="one large field, whole"),
        pytest.param(head_of(200_000)[:-4], id="one large field, unfinished"),
        pytest.param(GET + b"a: b\r\n" * 20_000 + b"\r\n", id="many fields, whole"),
        pytest.param(GET + b"a: b\r\n" * 20_000, id="many fields, unfinished"),
        pytest.param(b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n", id="target"),
        pytest.param(b"GET /" + b"x" * 200_000, id="target, unfinished"),
        pytest.param(GET + b"y" * 200_000, id="field name, unfinished"),
    ],
)
def test_a_head_too_large_is_431_and_the_end(app, head):
    answer = app.raw(head)
    assert status(answer) == 431
    assert b"connection: close" in answer


@pytest.mark.parametrize("part", [1000, 65536])
def test_the_limit_does_not_depend_on_how_the_bytes_come(app, part):
    for size, expected in ((MAX_HEAD_BYTES, 200), (200_000, 431)):
        head = head_of(size)
        parts = [head[i : i + part] for i in range(0, len(head), part)]
        with app.connect() as connection:
            try:
                for piece in parts:
                    connection.sendall(piece)
            except ConnectionError:
                assert expected == 431  # refused while it was still being sent
            assert status(read_to_end(connection)) == expected


def test_each_request_of_a_connection_has_the_whole_limit(app):
    large = head_of(60_000).replace(b"connection: close\r\n", b"")
    answer = app.raw(*[large] * 5, head_of(60_000))
    assert answer.count(b"HTTP/1.1 200") == 6


def test_body_bytes_do_not_count_as_head(app):
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    assert status(app.raw(head % len(body) + body)) == 200


# Form


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /live HTTP/9.9\r\n\r\n",
        b"G\xff\xff /live HTTP/1.1\r\n\r\n",
        b"GET /l\xefve HTTP/1.1\r\nhost: x\r\n\r\n",
        GET + b"bad header: x\r\n\r\n",
        GET + b"x: a\r\x00\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"POST /generate HTTP/1.1\r\ncontent-length: " + b"9" * 100 + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_400_and_the_end(app, sent):
    assert status(app.raw(sent)) == 400
    assert app.get("/live").status_code == 200


def test_a_bad_chunk_ends_the_request_without_an_answer_in_an_answer(app):
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = app.raw(head + b"zz\r\n{}\r\n0\r\n\r\n")
    assert answer.count(b"HTTP/1.1") <= 1
    assert not answer.startswith(b"HTTP/1.1 2")
    assert app.get("/live").status_code == 200


@pytest.mark.parametrize(
    ("begun", "endless"),
    [
        (b"0\r\nx-t: ", b"a" * 1000),
        (b"0\r\n", b"a" * 1000),
        (b"0\r\n", b"a: b\r\n" * 200),
        (b"1;e=", b"a" * 1000),
        (b"", b"0" * 1000),
        (b"0\r\n\r\n", b"\r\n" * 500),
    ],
    ids=[
        "trailer field",
        "trailer name",
        "trailer fields",
        "extension",
        "size",
        "between requests",
    ],
)
def test_what_is_neither_head_nor_body_has_the_heads_limit(app, begun, endless):
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = 0
    with app.connect() as connection:
        connection.sendall(head + begun)
        with contextlib.suppress(ConnectionError):
            # More than the limit and all that sockets may hold for a server that does not read.
            while sent < 64 * MAX_HEAD_BYTES:
                connection.sendall(endless)
                sent += len(endless)
        read_to_end(connection)
    assert app.get("/live").status_code == 200
    assert sent < 64 * MAX_HEAD_BYTES


def test_chunks_of_a_byte_may_need_more_around_them_than_a_head_may_have(app):
    text = b"a" * 20_000
    chunks = b"".join(b"1;e=%s\r\n%c\r\n" % (b"x" * 20, b) for b in b'{"prompt":"%s"}' % text)
    assert len(chunks) > 8 * MAX_HEAD_BYTES
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    answer = app.raw(head + b"transfer-encoding: chunked\r\n\r\n", chunks, b"0\r\nx-t: 1\r\n\r\n")
    assert status(answer) == 200
    assert b'"count":20000' in answer


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
"""What Java's HttpClient and `curl --http2` send by default with every request over plain HTTP."""


def tokenize(prompt, *, in_chunks):
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + OFFER
    body = json.dumps({"prompt": prompt}).encode()
    if in_chunks:
        return head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    return head + b"content-length: %d\r\n\r\n%s" % (len(body), body)


OFFERS = (
    GET + OFFER + b"\r\n"
    + tokenize("abc", in_chunks=False)
    + tokenize("abcd", in_chunks=True)
    + GET + b"connection: close, upgrade\r\nupgrade: websocket\r\n\r\n"
)  # fmt: skip


@given(cuts=st.lists(st.integers(0, len(OFFERS)), max_size=4))
@example(cuts=[])
@settings(max_examples=30, deadline=None)
def test_an_upgrade_that_we_lack_is_served_as_plain_http_body_and_all(app, cuts):
    edges = [0, *sorted(cuts), len(OFFERS)]
    answer = app.raw(*(OFFERS[a:b] for a, b in pairwise(edges)))
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"HTTP/1.1") == 4
    assert answer.index(b'"count":3') < answer.index(b'"count":4')


def test_a_body_beside_an_upgrade_is_not_taken_for_the_next_request(app):
    hidden = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + OFFER
    answer = app.raw(head + b"content-length: %d\r\n\r\n%s" % (len(hidden), hidden) + LAST)
    assert answer.count(b"HTTP/1.1") == 2
    assert (status(answer), b'"version"' in answer) == (400, False)


def test_http_1_0_closes_after_an_upgrade_that_we_lack(app):
    head = b"POST /tokenize HTTP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    assert b'"count":1' in app.raw(head + b'content-length: 14\r\n\r\n{"prompt":"a"}')


def test_pipelined_requests_are_answered_in_order(app):
    ready = GET.replace(b"live", b"ready")
    answer = app.raw(GET + b"\r\n" + ready + b"\r\n" + LAST)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b'"ready"') < answer.index(b'"ok"') < answer.rindex(b'"ready"')


def completion(prompt, *, is_stream, version=b"1.1", is_last=False):
    fields = {"prompt": prompt, "max_tokens": 6, "stream": is_stream}
    body = json.dumps(fields).encode()
    head = b"POST /v1/completions HTTP/%s\r\nhost: x\r\ncontent-length: %d\r\n"
    end = b"connection: close\r\n\r\n" if is_last else b"\r\n"
    return head % (version, len(body)) + end + body


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("is_apart", [True, False], ids=["apart", "together"])
def test_a_client_that_leaves_with_a_request_behind_another_ends_both(
    tiny_folder, is_stream, is_apart
):
    paused = {"": Script("abcdef", pause_after=3)}
    with running_app(tiny_folder, paused) as app:
        with app.connect() as connection:
            first = completion("first", is_stream=is_stream)
            second = completion("second", is_stream=is_stream)
            if is_apart:
                connection.sendall(first)
                while not app.engine.requests:
                    time.sleep(0.001)
                connection.sendall(second + second)
            else:
                connection.sendall(first + second + second)
            while not app.engine.requests:
                time.sleep(0.001)
        app.wait(asyncio.wait_for(app.engine.was_aborted.wait(), 20))
        app.settle()
        assert len(app.engine.requests) == 1
        assert app.services.admission.sequences == 0


@pytest.mark.parametrize("waiting_bytes", [100_000, connection_module.MAX_READ_AHEAD_BYTES // 2])
def test_a_client_that_leaves_with_a_long_body_behind_another_ends_both(tiny_folder, waiting_bytes):
    paused = {"": Script("abcdef", pause_after=3)}
    with running_app(tiny_folder, paused) as app:
        with app.connect() as connection:
            connection.sendall(completion("first", is_stream=True))
            read_until(connection, b'"text":"c"')
            connection.sendall(completion("x" * waiting_bytes, is_stream=True))
        app.wait(asyncio.wait_for(app.engine.was_aborted.wait(), 60))
        app.settle()
        assert len(app.engine.requests) == 1
        assert app.services.admission.sequences == 0


@pytest.mark.parametrize("ends_by", ["fin", "reset"])
@pytest.mark.parametrize("behind", ["many requests", "a long body"])
def test_a_client_that_leaves_with_more_than_is_read_behind_another_ends_both(
    tiny_folder, monkeypatch, behind, ends_by
):
    monkeypatch.setattr(connection_module, "LOOK_S", 0.05)
    requests = connection_module.MAX_READ_AHEAD + 4
    size = connection_module.MAX_READ_AHEAD_BYTES + 300_000
    paused = {"": Script("abcdef", pause_after=3)}
    with running_app(tiny_folder, paused) as app:
        with app.connect() as connection:
            connection.sendall(completion("first", is_stream=True))
            read_until(connection, b'"text":"c"')
            if behind == "many requests":
                connection.sendall(completion("more", is_stream=True) * requests)
            else:
                connection.sendall(completion("x" * size, is_stream=True))
            (served,) = app.server.server_state.connections
            wait_until(lambda: served.flow.read_paused and served._look_timer is not None)
            time.sleep(0.2)  # it is looked at, and has not ended
            assert not app.engine.was_aborted.is_set()
            if ends_by == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        app.wait(asyncio.wait_for(app.engine.was_aborted.wait(), 60))
        app.settle()
        assert len(app.engine.requests) == 1
        assert app.services.admission.sequences == 0


@pytest.mark.parametrize("path", ["completions", "chat", "tokenize"])
def test_a_client_that_leaves_while_its_prompt_is_tokenised_ends_that(
    tiny_folder, monkeypatch, path
):
    """What waits for a thread never begins; what runs there is not waited for."""
    begun, goes_on = [], threading.Event()

    def encode(_self, text, **_):
        begun.append(text)
        assert goes_on.wait(60)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Tokenizer, "encode_spans", encode)
    text = "x" * (INLINE_CHARS + 1)
    bodies = {
        "completions": ("/v1/completions", {"prompt": text}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "tokenize": ("/tokenize", {"prompt": text}),
    }
    url, fields = bodies[path]
    body = json.dumps(fields).encode()
    sent = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (url.encode(), len(body))
    with ThreadPoolExecutor(1) as threads, running_app(tiny_folder, context_length=65536) as app:
        app.call(app.loop.set_default_executor, threads)
        try:
            with app.connect() as first, app.connect() as second:
                first.sendall(sent + body)
                wait_until(lambda: begun)
                second.sendall(sent + body)
                wait_until(lambda: not threads._work_queue.empty())
            app.settle()
            assert app.services.admission.sequences == 0
            assert not app.engine.requests
        finally:
            goes_on.set()
    assert len(begun) == 1


def test_a_client_that_sends_without_end_behind_another_is_read_so_far(tiny_folder):
    paused = {"": Script("abcdef", pause_after=3)}
    sent = 0
    with running_app(tiny_folder, paused) as app, app.connect() as connection:
        connection.sendall(completion("first", is_stream=True))
        read_until(connection, b'"text":"c"')
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n"
        )
        connection.settimeout(2)
        with contextlib.suppress(TimeoutError):
            while sent < 30_000_000:
                sent += connection.send(b" " * 65536)
        (served,) = app.server.server_state.connections
        ((waiting, _),) = served.pipeline
        assert 0 < len(waiting.body) - connection_module.MAX_READ_AHEAD_BYTES < 1_000_000
        assert sent < 30_000_000


def test_many_requests_behind_each_other_are_all_answered(app):
    answer = app.raw((GET + b"\r\n") * 100 + LAST)
    assert answer.count(b"HTTP/1.1 200") == 101


def test_a_stream_is_chunks_of_whole_events_and_the_last_is_empty(app):
    answer = app.raw(completion("Hi", is_stream=True, is_last=True))
    _, _, rest = answer.partition(b"\r\n\r\n")
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        assert rest[int(size, 16) :].startswith(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert chunks.pop() == b""
    assert len(chunks) > 3
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"}\n\n") for chunk in chunks[:-1])
    *events, done = (event.decode() for event in b"".join(chunks).split(b"\n\n")[:-1])
    assert done == "data: [DONE]"
    said = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(said) == "Hello,"


@pytest.mark.parametrize("state", ["begun", "not begun", "plain", "complete", "gone", "behind"])
def test_a_part_is_written_at_once_only_where_a_chunk_is_all_there_is_to_write(state):
    connection = Connection.__new__(Connection)
    written = []
    connection.transport = SimpleNamespace(write=written.append)
    connection.flow = SimpleNamespace(write_paused=state == "behind")
    connection._running = SimpleNamespace(
        chunked_encoding={"not begun": None, "plain": False}.get(state, True),
        response_complete=state == "complete",
        disconnected=state == "gone",
    )
    assert connection._write_part(b"x" * 26) is (state == "begun")
    assert written == ([b"1a\r\n" + b"x" * 26 + b"\r\n"] if state == "begun" else [])
    assert connection._write_part(b"") is False


def test_a_stream_to_http_1_0_ends_with_the_connection_and_has_no_chunks(app):
    answer = app.raw(completion("Hi", is_stream=True, version=b"1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
    assert len(events) > 5


def test_a_whole_answer_to_http_1_0_has_its_length(app):
    answer = app.raw(completion("Hi", is_stream=False, version=b"1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head
    assert json.loads(body)["choices"]


def test_a_client_that_resets_midway_leaves_the_others_alone(app):
    with app.connect() as connection:
        connection.sendall(GET)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    assert app.get("/live").status_code == 200


@pytest.mark.parametrize(
    ("field", "then"),
    [
        pytest.param(b"connection: close\r\n", b"", id="close"),
        pytest.param(b"", b"", id="keep-alive"),
        pytest.param(b"", GET + b"\r\n", id="another request behind it"),
    ],
)
def test_a_client_that_never_takes_a_whole_answer_is_dropped(tiny_folder, monkeypatch, field, then):
    monkeypatch.setattr(serve, "connection_class", lambda head_s: connection_class(head_s, 1.0))
    body = json.dumps(
        {"prompt": "Hi", "max_tokens": 100_000, "logprobs": 20, "ignore_eos": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(body)
    head += field + b"\r\n"
    script = {"": Script(token_ids=[65] * 40_000, burst=1000)}
    with (
        running_app(tiny_folder, script, context_length=200_000) as app,
        socket.socket() as reading,
        socket.socket() as slow,
    ):
        for connection in (reading, slow):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(120)
            connection.connect(("127.0.0.1", app.port))
            connection.sendall(head + body + then)
        length = int(read_until(reading, b"\r\n\r\n").split(b"content-length: ")[1].split()[0])
        assert length > 5_000_000  # more than the sockets' buffers
        received = 0
        while received < length - 100_000:  # one that reads slowly and steadily gets all of it
            part = reading.recv(200_000)
            assert part
            received += len(part)
        reading.close()
        deadline_s = time.monotonic() + 120
        while app.server.server_state.connections:
            assert time.monotonic() < deadline_s, "the connection is still there"
            time.sleep(0.01)
        assert app.get("/live").status_code == 200
        assert len(read_to_end(slow)) < length


@pytest.fixture(scope="module")
def locked(tiny_folder):
    """A server with a key, and bodies of a megabyte at most."""
    config = Config(server=ServerConfig(api_key="secret", max_body_bytes=1 << 20))
    with running_app(tiny_folder, config=config) as app:
        yield app


@pytest.mark.parametrize("is_chunked", [True, False], ids=["chunked", "length"])
@pytest.mark.parametrize(("key", "code"), [("wrong", 401), ("secret", 413)])
def test_a_client_that_reads_only_when_all_is_sent_gets_its_answer(
    locked, monkeypatch, key, code, is_chunked
):
    monkeypatch.setattr(connection_module, "LINGER_S", 60.0)  # sending may take long
    size = 8 << 20
    body = (b"x" * (1 << 16) for _ in range(size >> 16)) if is_chunked else b"x" * size
    connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=60)
    headers = {"authorization": f"Bearer {key}"}
    if is_chunked:
        headers["transfer-encoding"] = "chunked"
    connection.request(
        "POST", "/v1/completions", body=body, headers=headers, encode_chunked=is_chunked
    )
    answer = connection.getresponse()
    assert (answer.status, answer.headers["connection"]) == (code, "close")
    assert json.loads(answer.read())["error"]
    connection.close()


def test_a_body_that_nobody_reads_is_taken_for_so_long_and_no_longer(tiny_folder, monkeypatch):
    monkeypatch.setattr(connection_module, "LINGER_S", 0.2)
    monkeypatch.setattr(connection_module, "LINGER_BYTES", 100_000)
    head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n"
    with running_app(tiny_folder) as app:
        for rest in (b"", b"x" * 1000, b"x" * 10_000_000):
            with app.connect() as connection, contextlib.suppress(ConnectionError):
                connection.sendall(head + b"x")
                assert status(read_until(connection, b"}}")) == 404
                connection.sendall(rest)
                deadline_s = time.monotonic() + 60
                while app.server.server_state.connections:
                    assert time.monotonic() < deadline_s, "the connection is still there"
                    time.sleep(0.01)
