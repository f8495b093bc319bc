"""Growing strings: the same text for every split, and nothing but silence where JSON ends."""

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.server.growing_json import MAX_STEPS, GrowingJson


def wants(place):
    return place == ("prompt",) or (len(place) == 3 and place[0] == "messages")


def read(parts):
    """Return the strings as they were at the end, by place, and the reader."""
    reader, found = GrowingJson(wants), {}
    for part in parts:
        for piece in reader.feed(part):
            if piece.is_first:
                found[piece.place] = ""
            found[piece.place] += piece.text
    return found, reader


def split(body, cuts):
    places = sorted({min(cut, len(body)) for cut in cuts})
    return [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]


def escape_all(text):
    units = text.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["prompt", "messages", "a", '"', "\\", "é"]), inner)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=30) | values}
    ),
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {"prompt": st.text(max_size=40) | values, "messages": messages, "x": values, 'q"\\': values}
)
cut_lists = st.lists(st.integers(0, 400), max_size=40)


def expected(body):
    """The wanted strings of a value."""
    found = {}
    if isinstance(body["prompt"], str):
        found["prompt",] = body["prompt"]
    for index, message in enumerate(body["messages"]):
        for key, value in message.items():
            if isinstance(value, str):
                found["messages", index, key] = value
    return found


@given(bodies, cut_lists, st.booleans(), st.sampled_from([None, 1]))
def test_every_split_of_valid_json_gives_pythons_strings(body, cuts, ascii_only, indent):
    data = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
    whole, reader = read([data])
    assert reader.keys == body.keys()
    wanted = expected(body)
    assert {place: whole.get(place) for place in wanted} == wanted
    assert read(split(data, cuts))[0] == whole
    assert read([data[i : i + 1] for i in range(len(data))])[0] == whole


@given(st.text(), cut_lists)
@example("a😀b", list(range(60)))
@example('\\"\\\\"', list(range(60)))
def test_every_escape_is_unescaped_at_every_cut(text, cuts):
    for raw in (
        escape_all(text),
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
    ):
        data = b'{"prompt":"' + raw.encode() + b'"}'
        assert read(split(data, cuts))[0] == {("prompt",): text}


@given(st.binary(max_size=80), cut_lists)
@example(b'{"prompt":"\xf0\x9f\x98', [12, 13, 14])
@example(b'{"prompt":"\\ud83d', list(range(20)))
@example(b'{"prompt":"\\ud83dx"}', list(range(20)))
@example(b'{"prompt":"\\ude00"}', list(range(20)))
@example(b'{"prompt":"a\nb"}', list(range(20)))
@example(b'{"prompt":"a\\qb"}', list(range(20)))
@example(b'{"prompt":"\xff"}', list(range(20)))
def test_of_any_bytes_the_text_is_a_beginning_of_what_a_parser_reads(body, cuts):
    for data in (body, b'{"prompt":"' + body, b'{"prompt":"' + body + b'"}'):
        found, _ = read(split(data, cuts))
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("prompt"), str):
            assert value["prompt"].startswith(found.get(("prompt",), ""))


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        (b'{"prompt":"a', b"\n"),
        (b'{"prompt":"a', b"\\q"),
        (b'{"prompt":"a', b"\xff\xff"),
        (b'{"prompt":"a', b"\\ud800x"),
        (b'{"prompt":"a', b"\\ud800\\u0041"),
        (b'{"prompt":"a', b"\\udc00"),
        (b'{"prompt":"a"', b"]"),
        (b'{"prompt":"a"', b"}"),
        (b"[", b""),
        (b'"', b""),
        (b'{"x":' + b"[" * 100, b""),
        (b'{"x":{{', b""),
        (b'{"' + b"k" * 300, b""),
        (b'{"x":[' + b"[]," * MAX_STEPS, b""),
    ],
)
def test_it_gives_up_for_good(start, rest):
    _, reader = read([start, rest])
    assert reader.is_over
    assert reader.feed(b'{"prompt":"more"}') == []
    assert reader._rest == b"" or len(reader._rest) < 400


def test_what_is_held_between_feeds_stays_small():
    reader = GrowingJson(wants)
    for part in [
        b'{"x":"',
        *[b"\\\\\\"] * 1000,
        b'","prompt":"',
        *[b"ab\\"] * 1,
        *[b"\\u00e9"] * 999,
    ]:
        reader.feed(part)
        assert len(reader._rest) <= 12


def test_a_second_string_at_the_same_place_begins_anew():
    pieces = GrowingJson(wants).feed(b'{"prompt":"a","prompt":"b')
    assert [(p.text, p.is_first, p.is_last) for p in pieces] == [
        ("a", True, True),
        ("b", True, False),
    ]
