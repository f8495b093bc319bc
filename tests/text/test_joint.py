"""Ids of a text within another: only where the very same spans follow a control token."""

import re

import pytest

from tailrace.text.incremental import IncrementalSpans, Span
from tailrace.text.joint import joint_of, rest_of

CONTROLS = {"<u>": 1, "<s>": 2, "!<": 3}
BEGUN = [Span("hi <u>user: ", is_trusted=True), Span("Grind", is_trusted=False)]


def encoder():
    return IncrementalSpans(lambda text: [*text.encode()], None, re.compile("<[us]>|!<"), CONTROLS)


def ids_of(spans):
    encoding = encoder()
    return [token for span in spans for token in encoding.feed(span)] + encoding.finish()


def system(text):
    return [
        Span("hi <s>", is_trusted=True),
        Span(text, is_trusted=False),
        Span("; <u>user: ", is_trusted=True),
    ]


@pytest.mark.parametrize(
    "whole",
    [
        [*system("Be brief."), Span("Grind it", is_trusted=False), Span("<u>", is_trusted=True)],
        [*system("<u>user: Grind"), Span("Grind", is_trusted=False)],
        [Span("another <u>user: ", is_trusted=True), Span("Grind", is_trusted=False)],
        [Span("<u>user: ", is_trusted=True), Span("Grind", is_trusted=False)],
    ],
)
def test_what_is_ahead_the_kept_ids_and_the_rest_are_the_whole(whole):
    joint = joint_of(whole, BEGUN, encoder())
    assert joint is not None
    unused = len(ids_of(joint.skipped))
    # Of the begun text some is still held by the encoder: here all of it, with what follows.
    encoding = encoder()
    kept = [token for span in BEGUN for token in encoding.feed(span)][unused:]
    kept += [token for span in joint.rest for token in encoding.feed(span)] + encoding.finish()
    assert ids_of(joint.ahead) + kept == ids_of(whole)


@pytest.mark.parametrize(
    "whole",
    [
        [*system("Grind"), Span("Mill it", is_trusted=False)],
        [*system("Grind"), Span("Grin", is_trusted=False)],
        [Span("<u>user:", is_trusted=True), Span("Grind", is_trusted=False)],
        [Span("!<u>user: ", is_trusted=True), Span("Grind", is_trusted=False)],
        [Span("<u>user: ", is_trusted=False), Span("Grind", is_trusted=False)],
        [Span("<u>user: Grind", is_trusted=True)],
        [Span("x", is_trusted=True), Span("y", is_trusted=False)] * 4
        + [Span("<u>user: ", is_trusted=True), Span("Grind", is_trusted=False)],
        [],
    ],
)
def test_where_the_spans_are_others_there_is_no_joint(whole):
    assert joint_of(whole, BEGUN, encoder()) is None


@pytest.mark.parametrize(
    "begun",
    [
        [],
        BEGUN[:1],
        BEGUN[1:],
        [Span("no control token: ", is_trusted=True), Span("Grind", is_trusted=False)],
    ],
)
def test_a_text_without_a_control_token_ahead_has_no_joint(begun):
    assert joint_of(system("Grind") + BEGUN, begun, encoder()) is None


def test_the_rest_is_what_follows_the_same_beginning():
    assert rest_of(BEGUN, []) == BEGUN
    assert rest_of(BEGUN, BEGUN[:1]) == [Span("", is_trusted=True), BEGUN[1]]
    assert rest_of(BEGUN, [Span("hi", is_trusted=True)])[0].text == " <u>user: "
    assert rest_of(BEGUN, [Span("hi", is_trusted=False)]) is None
