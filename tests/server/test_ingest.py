"""Bodies: bounded, and the same answer for every split of their bytes."""

import asyncio
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.errors import RequestError
from tailrace.server.ingest import ClientGoneError, decode, read_body
from tailrace.server.routes_text import DetokenizeBody, TokenizeBody


class Inner(msgspec.Struct):
    name: str


class Body(msgspec.Struct):
    tokens: list[int]
    text: str = ""
    share: float = 0.0
    bias: dict[int, float] = {}
    inner: Inner | None = None
    anything: Any = None


def messages(parts):
    """ASGI's messages for a body in parts."""
    yield from ({"type": "http.request", "body": part, "more_body": True} for part in parts)
    yield {"type": "http.request"}  # both keys are optional


def read(parts, *, content_length=None, max_bytes=1000, timeout_s=20.0):
    incoming = messages(parts)

    async def receive():
        return next(incoming)

    return asyncio.run(read_body(receive, content_length, max_bytes=max_bytes, timeout_s=timeout_s))


def split(body, cuts):
    places = sorted({min(cut, len(body)) for cut in cuts})
    return [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]


def answer(parts):
    """What a client gets: a value, or the error's whole text."""
    try:
        return decode(read(parts), Body)
    except RequestError as error:
        return (error.status, error.param, error.message)


valid_bodies = st.builds(
    lambda tokens, text, inner: json.dumps(
        {"tokens": tokens, "text": text, "inner": {"name": inner}}, ensure_ascii=False
    ).encode(),
    st.lists(st.integers(-(2**63), 2**63)),
    st.text(),
    st.text(),
)


@given(valid_bodies | st.binary(max_size=60), st.lists(st.integers(0, 200), max_size=12))
@example(b'{"tokens":[],"text":"\xf0\x9f\x98\x80"}', list(range(40)))
@example(b'{"tokens":[],"text":"\xf0\x9f\x98"}', list(range(40)))
@example(b'{"tokens":[],"text":"\\ud83d\\ude00"}', list(range(40)))
@example(b'{"tokens":[],"text":"\\ud83d"}', list(range(40)))
def test_every_split_of_the_bytes_gives_the_same_answer(body, cuts):
    assert answer(split(body, cuts)) == answer([body])


@given(valid_bodies)
def test_valid_bodies_are_read_as_pythons_own_parser_reads_them(body):
    got = answer([body])
    expected = json.loads(body)
    assert isinstance(got, Body)
    assert (got.tokens, got.text, got.inner.name) == (
        expected["tokens"],
        expected["text"],
        expected["inner"]["name"],
    )


@given(st.binary(max_size=60))
def test_whatever_comes_is_a_value_or_a_400(body):
    got = answer([body])
    assert isinstance(got, Body) or got[0] == 400


@given(valid_bodies, st.data())
def test_one_bad_byte_anywhere_is_refused_as_not_utf8(body, data):
    at = data.draw(st.integers(0, len(body)))
    status, param, message = answer([body[:at] + b"\xff" + body[at:]])
    assert (status, param) == (400, None)
    assert "UTF-8" in message
    assert "(byte " in message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"nul",
        b"{",
        b'{"tokens":[]',
        b'{"tokens":[]} x',
        b'{"tokens":[],}',
        b"{'tokens':[]}",
        b'\xef\xbb\xbf{"tokens":[]}',
        b'{"tokens":[],"share":NaN}',
        b'{"tokens":[],"share":Infinity}',
        b'{"tokens":[],"share":-Infinity}',
        b'{"tokens":[],"unknown":NaN}',
        b'{"tokens":[],"anything":[NaN]}',
        b'{"tokens":[],"text":"a\nb"}',
        b'{"tokens":[],"text":"a\x00b"}',
        b'{"tokens":[01]}',
    ],
)
def test_what_is_not_json_is_refused(body):
    status, param, message = answer([body])
    assert (status, param) == (400, None)
    assert message.startswith("the body is not valid JSON: ")


@pytest.mark.parametrize(
    "text", ["\\ud800", "\\udc00", "\\ud800x", "\\ud800\\ud800", "\\uDBFF tail of six", "\\udfff"]
)
@pytest.mark.parametrize("field", ["text", "anything", "unknown"])
def test_lone_surrogates_are_refused_and_named(text, field):
    status, _, message = answer([b'{"tokens":[],"%s":"%s"}' % (field.encode(), text.encode())])
    assert status == 400
    assert "must have its pair" in message


@pytest.mark.parametrize("field", ["text", "anything", "unknown"])
@pytest.mark.parametrize(
    "raw", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"]
)
def test_bad_utf8_is_refused_even_in_fields_that_nobody_reads(raw, field):
    status, _, message = answer([b'{"tokens":[],"%s":"%s"}' % (field.encode(), raw)])
    assert status == 400
    assert "UTF-8" in message


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("field", [b"anything", b"unknown"])
def test_deep_nesting_is_refused_not_crashed_on(opening, field):
    deep = b'{"tokens":[],"%s":' % field + opening * 100_000
    with pytest.raises(RequestError, match="nested too deeply") as caught:
        decode(deep, Body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": ["a"]}, "tokens[0]"),
        ({"tokens": [1, True]}, "tokens[1]"),
        ({"tokens": [1.5]}, "tokens[0]"),
        ({"tokens": None}, "tokens"),
        ({"tokens": {}}, "tokens"),
        ({"tokens": [], "text": 1}, "text"),
        ({"tokens": [], "text": None}, "text"),
        ({"tokens": [], "share": "1"}, "share"),
        ({"tokens": [], "bias": {"a": 1}}, "bias"),
        ({"tokens": [], "bias": {"1": "x"}}, "bias"),
        ({"tokens": [], "inner": {}}, "inner.name"),
        ({"tokens": [], "inner": {"name": 3}}, "inner.name"),
        ([], None),
        ("text", None),
        (None, None),
    ],
)
def test_a_wrong_type_names_the_field(body, param):
    status, named, message = answer([json.dumps(body).encode()])
    assert (status, named) == (400, param)
    assert message.startswith(f"{param or 'body'}: ")
    assert "`$" not in message


def test_a_number_too_large_for_its_type_names_the_field():
    assert answer([b'{"tokens":[],"share":1e999}'])[:2] == (400, "share")


@pytest.mark.parametrize("kind", [TokenizeBody, DetokenizeBody])
def test_every_route_of_text_refuses_a_list(kind):
    with pytest.raises(RequestError, match="Expected `object`, got `array`"):
        decode(b"[]", kind)


# Sizes and times


def test_a_body_of_exactly_the_limit_is_taken():
    assert read([b"x" * 600, b"x" * 400]) == b"x" * 1000


def test_a_length_above_the_limit_is_refused_before_anything_is_read():
    async def receive():
        raise AssertionError("nothing may be read")

    with pytest.raises(RequestError, match="1001 bytes; this server takes 1000") as caught:
        asyncio.run(read_body(receive, "1001", max_bytes=1000, timeout_s=20.0))
    assert caught.value.status == 413


def test_a_body_without_a_length_is_refused_at_the_byte_too_many():
    taken = []

    def parts():
        for _ in range(100):
            taken.append(1)
            yield b"x" * 100

    with pytest.raises(RequestError) as caught:
        read(parts())
    assert caught.value.status == 413
    assert len(taken) == 11


def test_a_length_that_lies_low_does_not_open_the_limit():
    with pytest.raises(RequestError) as caught:
        read([b"x" * 2000], content_length="5")
    assert caught.value.status == 413


def test_a_body_that_never_ends_is_408_and_says_what_came():
    first = [{"type": "http.request", "body": b"abc", "more_body": True}]

    async def receive():
        if first:
            return first.pop()
        return await asyncio.get_running_loop().create_future()

    with pytest.raises(RequestError, match=r"after 0.01 s \(3 bytes came\)") as caught:
        asyncio.run(read_body(receive, None, max_bytes=10, timeout_s=0.01))
    assert caught.value.status == 408


def test_a_client_that_leaves_midway_is_nobody_to_answer():
    incoming = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": b"a", "more_body": True},
    ]

    async def receive():
        return incoming.pop()

    with pytest.raises(ClientGoneError):
        asyncio.run(read_body(receive, None, max_bytes=10, timeout_s=20.0))


def test_a_body_byte_by_byte_holds_no_more_than_one_body():
    size = 300_000
    one = {"type": "http.request", "body": b"x", "more_body": True}
    left = size

    async def receive():
        nonlocal left
        left -= 1
        return one if left else {"type": "http.request", "body": b"x"}

    async def main():
        tracemalloc.start()
        body = await read_body(receive, None, max_bytes=size, timeout_s=200.0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return body, peak

    body, peak_bytes = asyncio.run(main())
    assert body == b"x" * size
    assert peak_bytes < 3 * size  # the buffer, as it last grew, and the bytes returned
