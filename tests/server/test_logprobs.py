"""Log-probabilities on the wire."""

import pytest

from tailrace.server.logprobs import CompletionScores, chat_logprobs, prompt_logprobs, token_label
from tailrace.text.tokenizer import Tokenizer
from tailrace.types import TokenLogprobs
from tests.server.fake_engine import EOS_ID, scored


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return Tokenizer.load(tiny_folder)


def test_a_token_that_is_no_text_on_its_own_is_labelled_by_its_bytes(tokenizer):
    assert token_label(tokenizer, 97) == "a"
    assert token_label(tokenizer, 0xC3) == "bytes:\\xc3"
    assert token_label(tokenizer, EOS_ID) == "<|im_end|>"


def test_offsets_run_on_over_pieces_and_point_at_whole_characters(tokenizer):
    scores = CompletionScores(tokenizer)
    first = scores.take([scored(i, 0) for i in "aé".encode()[:2]])
    second = scores.take([scored(i, 0) for i in "aéb".encode()[2:]])
    assert first.text_offset == [0, 1]
    assert second.text_offset == [1, 2]


def test_the_token_itself_is_always_among_the_alternatives(tokenizer):
    score = TokenLogprobs(97, -5.0, 9, [98], [-0.1])
    assert CompletionScores(tokenizer).take([score]).top_logprobs == [{"b": -0.1, "a": -5.0}]


def test_infinity_is_written_as_a_number_that_json_has(tokenizer):
    score = TokenLogprobs(97, float("-inf"), 9, [98], [float("-inf")])
    [entry] = chat_logprobs(tokenizer, [score]).content
    assert entry.logprob == entry.top_logprobs[0].logprob == -9999.0


def test_prompt_logprobs_are_keyed_by_id_with_ranks(tokenizer):
    score = TokenLogprobs(97, -5.0, 9, [98, 99], [-0.1, -3.0])
    first, second = prompt_logprobs(tokenizer, [None, score])
    assert first is None
    assert {key: value.rank for key, value in second.items()} == {"97": 9, "98": 1, "99": 2}
