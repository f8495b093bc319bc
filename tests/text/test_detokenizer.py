from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.text.detokenizer import Detokenizer
from tests.text import vocabularies
from tests.text.vocabularies import KINDS, texts

# Beyond every vocabulary here too: models pad theirs.
token_ids = st.lists(st.integers(0, 1100), max_size=30)
byte_runs = st.binary(max_size=20)


def chunks(ids, cuts):
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def streamed(tokenizer, ids, cuts, skip):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pushes = [detokenizer.push(chunk) for chunk in chunks(ids, cuts)]
    return "".join(pushes) + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@given(ids=token_ids, cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
def test_any_ids_in_any_split_give_the_one_shot_text(kind, ids, cuts, skip):
    expected = vocabularies.peer(kind).decode(ids, skip_special_tokens=skip)
    assert streamed(vocabularies.make(kind), ids, cuts, skip) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, skip=st.booleans())
def test_encoded_text_token_by_token_gives_the_one_shot_text(kind, text, skip):
    tokenizer = vocabularies.make(kind)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    expected = vocabularies.peer(kind).decode(ids, skip_special_tokens=skip)
    assert streamed(tokenizer, ids, range(len(ids)), skip) == expected


@pytest.mark.parametrize("kind", ["qwen", "llama2"])
@given(runs=st.lists(byte_runs | st.sampled_from(["é", "你", "👍🏽"]).map(str.encode), max_size=5))
def test_runs_of_arbitrary_bytes_give_the_one_shot_text(kind, runs):
    peer = vocabularies.peer(kind)
    tokenizer = vocabularies.make(kind)
    by_bytes = {
        tokenizer.token_bytes(i): i
        for i in reversed(range(600))
        if len(tokenizer.token_bytes(i)) == 1
    }
    word = peer.token_to_id("l")
    ids = [i for run in runs for i in [*(by_bytes[bytes([b])] for b in run), word]]
    expected = peer.decode(ids, skip_special_tokens=True)
    assert streamed(tokenizer, ids, range(len(ids)), skip=True) == expected


@given(text=st.text(min_size=1, max_size=12))
def test_byte_level_text_comes_out_with_the_last_byte_of_each_character(text):
    tokenizer = vocabularies.make("llama3")
    detokenizer = Detokenizer(tokenizer)
    ids, said, sent = tokenizer.encode(text, add_special_tokens=False), "", b""
    for token_id in ids:
        said += detokenizer.push([token_id])
        sent += tokenizer.token_bytes(token_id)
        assert said == sent.decode("utf-8", "ignore")
    assert detokenizer.finish() == ""


def test_ill_formed_bytes_do_not_hold_back_what_follows():
    tokenizer = vocabularies.make("smollm")
    peer = vocabularies.peer("smollm")
    lone = peer.token_to_id("ÿ")  # the byte 0xFF
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([lone]) for _ in range(3)] == ["\ufffd"] * 3
    assert detokenizer.push([peer.token_to_id("a")]) == "a"


def test_an_incomplete_character_becomes_one_replacement_at_the_end():
    tokenizer = vocabularies.make("llama3")
    first = [i for i in range(700) if tokenizer.token_bytes(i) == "👍".encode()[:1]]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(first[:1]) == ""
    assert detokenizer.finish() == "\ufffd"
