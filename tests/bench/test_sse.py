from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.bench.sse import MAX_EVENT_BYTES, Event, SseError, SseParser

PIECES = [
    *(b"data: one", b"data:two", b"data", b"data: ", b"event: error", b": comment", b"id: 3"),
    *(b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"data: \xff\xc3", b"data: a: b", b""),
]


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def _fed(parts) -> list[Event]:
    parser = SseParser()
    return [event for part in parts for event in parser.feed(part)]


@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.binary(max_size=6), max_size=25),
    cuts=st.lists(st.integers(0, 1000), max_size=12),
)
def test_any_split_of_the_bytes_gives_the_same_events(pieces, cuts):
    data = b"".join(pieces)
    whole = SseParser().feed(data)
    assert _fed(_cut(data, cuts)) == whole


@given(
    payloads=st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\r", b"").strip())),
    end=st.sampled_from([b"\n", b"\r", b"\r\n"]),
)
def test_what_is_sent_arrives(payloads, end):
    """Multi-line payloads travel as several data lines and join with LF."""
    sent = [payload for payload in payloads if payload]
    stream = b"".join(
        b"".join(b"data: " + line + end for line in payload.split(b"\n")) + end for payload in sent
    )
    assert [event.data for event in SseParser().feed(stream)] == sent


def test_names_comments_and_unknown_fields():
    parser = SseParser()
    stream = b": hi\nevent: error\ndata: x\nretry: 3\n\ndata: y\n\n: only a comment\n\ndata: cut"
    assert parser.feed(stream) == [Event(b"x", "error"), Event(b"y")]


def test_one_leading_space_is_dropped_and_no_more():
    assert SseParser().feed(b"data:  x \n\n") == [Event(b" x ")]


@pytest.mark.parametrize("part", [1000, MAX_EVENT_BYTES * 3])
@pytest.mark.parametrize("line", [b"data: ", b": "])
def test_an_endless_line_is_refused(part, line):
    data = line + b"x" * (MAX_EVENT_BYTES * 2)
    with pytest.raises(SseError, match="the limit is"):
        _fed(data[start : start + part] for start in range(0, len(data), part))


def test_an_endless_event_of_short_lines_is_refused():
    line = b"data: " + b"x" * 9000 + b"\n"
    with pytest.raises(SseError, match="the limit is"):
        _fed([line] * (MAX_EVENT_BYTES // 9000 + 1))
