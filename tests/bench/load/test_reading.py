"""An answer's bytes become a record, however the server words and cuts them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.bench.load.reading import BAD_BYTES, Reading
from tailrace.bench.records import Record


def record(output_tokens=3) -> Record:
    return Record(
        index=0, scheduled_s=0.0, planned_input_tokens=2, planned_output_tokens=output_tokens
    )


def event(content) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def choice(**fields) -> bytes:
    return event({"choices": [{"index": 0, **fields}]})


USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
END = event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a"},
        {"delta": {"content": "a"}},
        {"delta": {"reasoning_content": "a", "content": None}},
        {"delta": {"reasoning": "a"}},
    ],
)
def test_any_generated_text_is_a_chunk(fields):
    found = record()
    assert Reading(found).feed(1.5, choice(**fields)) == 1
    assert found.first_token_s == 1.5
    assert found.chunk_s == [1.5]


@pytest.mark.parametrize(
    "fields",
    [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"role": "assistant"}},
        {"delta": {"reasoning_content": ""}},
        {"delta": None},
        {"text": ""},
        {},
    ],
)
def test_a_chunk_without_text_is_no_first_token(fields):
    found = record()
    reading = Reading(found)
    assert reading.feed(1.5, choice(**fields)) == 0
    assert found.first_token_s is None
    assert reading.feed(2.5, choice(text="a")) == 1
    assert found.first_token_s == 2.5


def test_a_chunk_of_several_tokens_is_one_gap_and_the_usage_counts_the_tokens():
    """Under speculation a chunk carries several tokens: nothing is counted from the text."""
    found = record(output_tokens=8)
    reading = Reading(found)
    reading.feed(1.0, choice(text="one two three four"))
    reading.feed(2.0, choice(text=" five six seven eight", finish_reason="length"))
    usage = {"prompt_tokens": 2, "completion_tokens": 8}
    reading.feed(2.1, event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
    reading.conclude(200)
    assert found.status == "ok"
    assert found.chunk_s == [1.0, 2.0]
    assert found.output_tokens == 8


@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_cut_of_the_bytes_gives_the_same_record(cuts):
    data = choice(text="a") + choice(text="ü") + choice(text="", finish_reason="length") + END
    found = record()
    reading = Reading(found)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        reading.feed(1.0, data[start:end])
    reading.conclude(200)
    assert reading.has_ended
    assert (found.status, len(found.chunk_s), found.finish_reason) == ("ok", 2, "length")
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (2, 3, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"data: {nonsense\n\n",
        b"data: \xff\xfe\n\n",
        event({"error": {"message": "out of memory"}}),
        b'event: error\ndata: {"message": "x"}\n\n',
        b"data: " + b"x" * (2 << 20),
    ],
)
def test_what_is_no_answer_is_told_by_one_of_these_errors(data):
    with pytest.raises(BAD_BYTES):
        Reading(record()).feed(1.0, data)


REFUSAL = {"message": "too long", "type": "BadRequestError", "code": 400}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (event({"error": REFUSAL}), 400),
        (event({"error": REFUSAL | {"code": "429"}}), 429),
        (b"event: error\n" + event(REFUSAL), 400),
        (event({"error": REFUSAL | {"code": 500}}), None),
        (event({"error": REFUSAL | {"code": "context_length_exceeded"}}), None),
        (event({"error": REFUSAL | {"code": 4.5}}), None),
        (event({"error": REFUSAL | {"code": None}}), None),
        (event({"error": REFUSAL | {"code": 10**40}}), None),
        (event({"error": "400"}), None),
    ],
)
def test_a_refusal_within_a_stream_keeps_its_status(data, status):
    found = record()
    with pytest.raises(BAD_BYTES):
        Reading(found).feed(1.0, data)
    assert found.http_status == status


def test_an_error_after_text_is_no_refusal():
    found = record()
    with pytest.raises(BAD_BYTES):
        Reading(found).feed(1.0, choice(text="a") + event({"error": REFUSAL}))
    assert found.http_status is None


def test_a_refusals_text_is_kept_to_a_bound():
    found = record()
    reading = Reading(found)
    for _ in range(10):
        reading.refuse(b"no " * 1000)
    reading.conclude(429)
    assert found.status == "http"
    assert found.error.startswith("HTTP 429: no no")
    assert len(found.error) < 2100


@pytest.mark.parametrize("empty", [{"text": ""}, {"delta": {"content": ""}}])
def test_a_token_without_text_is_a_chunk_once_there_was_text(empty):
    found = record()
    reading = Reading(found)
    for at_s, fields in ((0.5, empty), (1.0, {"text": "a"}), (1.5, empty), (2.0, {"text": "b"})):
        reading.feed(at_s, choice(**fields))
    reading.feed(2.5, choice(finish_reason="length", **empty))
    assert found.first_token_s == 1.0
    assert found.chunk_s == [1.0, 1.5, 2.0]
