"""One choice: text, stop strings and reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.server.choice import Choice, Piece
from tailrace.server.sampling import TextRules
from tailrace.text.tokenizer import Tokenizer
from tailrace.types import TokenOutput
from tests.server.fake_engine import EOS_ID


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return Tokenizer.load(tiny_folder)


def output(ids, reason=None, stop=None):
    return TokenOutput("r", list(ids), finish_reason=reason, stop_token_id=stop)


def test_the_last_output_releases_half_a_character_as_a_replacement(tokenizer):
    choice = Choice(0, tokenizer, TextRules(), ())
    assert choice.take(output(b"a\xc3")).text == "a"
    piece = choice.take(output([], "length"))
    assert (piece.text, piece.finish_reason) == ("\ufffd", "length")
    assert choice.is_finished


def test_a_held_back_stop_that_never_came_is_text(tokenizer):
    choice = Choice(0, tokenizer, TextRules(stops=("abc",)), ())
    assert choice.take(output(b"xab")).text == "x"
    piece = choice.take(output(b"a", "length"))
    assert (piece.text, piece.finish_reason) == ("aba", "length")


def test_a_stop_string_completed_by_the_end_counts_as_stop(tokenizer):
    choice = Choice(0, tokenizer, TextRules(stops=("ab", "abc")), ())
    assert choice.take(output(b"xab")).text == "x"
    piece = choice.take(output([EOS_ID], "length"))
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("", "stop", "ab")


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (2, 4), (6,), (3, 3)], ids=str)
def test_no_stop_string_ends_a_choice_before_min_tokens(tokenizer, sizes):
    raw = list(b"abxabc")
    choice = Choice(0, tokenizer, TextRules(stops=("ab",)), (), min_tokens=3)
    whole = Piece(0)
    for size in sizes:
        if not choice.is_finished:
            whole.absorb(choice.take(output(raw[:size])))
        raw = raw[size:]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("abx", "stop", "ab")


def test_a_stop_string_that_begins_within_min_tokens_and_ends_later_counts(tokenizer):
    choice = Choice(0, tokenizer, TextRules(stops=("bc",)), (), min_tokens=2)
    assert choice.take(output(b"ab")).text == "a"
    piece = choice.take(output(b"c"))
    assert (piece.text, piece.stop_reason) == ("", "bc")


def test_min_tokens_without_a_stop_after_them_lose_no_text(tokenizer):
    choice = Choice(0, tokenizer, TextRules(stops=("bc", "ca")), (), min_tokens=4)
    pieces = [choice.take(output(b"abc")), choice.take(output([*b"a", EOS_ID], "stop", EOS_ID))]
    assert "".join(piece.text for piece in pieces) == "abca"
    assert pieces[-1].stop_reason is None


def test_special_tokens_are_text_only_where_asked_for(tokenizer):
    shown = Choice(0, tokenizer, TextRules(skip_special_tokens=False), ())
    hidden = Choice(0, tokenizer, TextRules(), ())
    assert shown.take(output([EOS_ID, 97])).text == "<|im_end|>a"
    assert hidden.take(output([EOS_ID, 97])).text == "a"


@given(st.text(max_size=20), st.lists(st.integers(1, 4), min_size=1))
def test_any_split_into_outputs_gives_the_same_text(tokenizer, text, sizes):
    raw = text.encode()
    choice = Choice(0, tokenizer, TextRules(), ())
    whole = Piece(0)
    start = 0
    for size in sizes * (len(raw) + 1):
        if start < len(raw):
            whole.absorb(choice.take(output(raw[start : start + size])))
            start += size
    whole.absorb(choice.take(output([EOS_ID], "stop", EOS_ID)))
    assert whole.text == text
    assert whole.token_ids == [*raw, EOS_ID]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", None)
