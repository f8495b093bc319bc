import copy
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import ModelError, RequestError
from tailrace.text import tokenizer as tokenizer_module
from tailrace.text.tokenizer import Span, Tokenizer
from tests.support.tiny import write_tiny_tokenizer
from tests.text import vocabularies
from tests.text.vocabularies import KINDS, MARKUP, SPECIALS, SPELLINGS, harmless_texts, texts

TICKS = 20
"""A thread that starts to encode may lose the GIL a few times before it holds it for good."""


def control_ids(kind):
    return {vocabularies.peer(kind).token_to_id(spelling) for spelling in SPELLINGS}


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, add=st.booleans())
def test_parsed_text_gives_the_librarys_ids(kind, text, add):
    ids = vocabularies.make(kind).encode(text, add_special_tokens=add, parse_special=True)
    assert ids == vocabularies.peer(kind).encode(text, add_special_tokens=add).ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_plain_text_never_gives_a_control_token_and_reads_the_same(kind, text):
    tokenizer = vocabularies.make(kind)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not control_ids(kind).intersection(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        ids, skip_special_tokens=True
    )


@pytest.mark.parametrize("kind", KINDS)
@given(text=harmless_texts)
def test_plain_text_without_control_tokens_gives_the_librarys_ids(kind, text):
    ids = vocabularies.make(kind).encode(text, add_special_tokens=False, parse_special=False)
    assert ids == vocabularies.peer(kind).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.sampled_from(SPELLINGS) | texts, max_size=5))
def test_trusted_spans_give_the_librarys_ids_wherever_the_borders_are(kind, parts):
    spans = [Span(part, is_trusted=True) for part in parts]
    expected = vocabularies.peer(kind).encode("".join(parts), add_special_tokens=False).ids
    assert vocabularies.make(kind).encode_spans(spans) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(pairs=st.lists(st.tuples(st.sampled_from([*SPELLINGS, "\n", "x", ""]), harmless_texts)))
def test_the_borders_of_harmless_spans_leave_no_trace(kind, pairs):
    spans = [
        Span(text, is_trusted)
        for pair in pairs
        for text, is_trusted in zip(pair, (1, 0), strict=True)
    ]
    whole = "".join(span.text for span in spans)
    trusted = sum(span.text.count(s) for span in spans if span.is_trusted for s in SPELLINGS)
    expected = vocabularies.peer(kind).encode(whole, add_special_tokens=False).ids
    ids = vocabularies.make(kind).encode_spans(spans)
    assert len([i for i in ids if i in control_ids(kind)]) == trusted
    if sum(whole.count(s) for s in SPELLINGS) == trusted:  # none is spelled across a border
        assert ids == expected


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_untrusted_spans_never_give_a_control_token(kind, text):
    spans = [Span("<|im_start|>", True), Span(text, False), Span("<|im_end|>", True)]
    ids = vocabularies.make(kind).encode_spans(spans)
    found = [i for i in ids if i in control_ids(kind)]
    peer = vocabularies.peer(kind)
    assert found == [peer.token_to_id("<|im_start|>"), peer.token_to_id("<|im_end|>")]


def test_a_control_token_spelled_across_a_border_is_text():
    tokenizer = vocabularies.make("qwen")
    ids = tokenizer.encode_spans([Span("<|im_", True), Span("end|", False), Span(">", True)])
    assert ids == tokenizer.encode("<|im_end|>", add_special_tokens=False, parse_special=False)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@given(parts=st.lists(st.sampled_from([*SPECIALS, " ", "  ", "\n", "a", "_", "."]), max_size=8))
def test_control_tokens_with_flags_are_found_as_the_library_finds_them(flag, parts):
    spec = copy.deepcopy(vocabularies.spec("llama3"))
    for added in spec["added_tokens"]:
        added[flag] = True
    tokenizer, text = Tokenizer(spec), "".join(parts)
    expected = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert tokenizer.encode_spans([Span(text, True)]) == expected


def test_added_white_space_stays_a_token_of_plain_text():
    spec = copy.deepcopy(vocabularies.spec("llama3"))
    spec["added_tokens"].append({**spec["added_tokens"][-1], "content": "\t\t\t"})
    tokenizer = Tokenizer(spec)
    parsed = tokenizer.encode("a\t\t\tb", add_special_tokens=False, parse_special=True)
    assert len(parsed) == 3
    assert tokenizer.encode("a\t\t\tb", add_special_tokens=False, parse_special=False) == parsed


@pytest.mark.parametrize("kind", vocabularies.BYTE_LEVEL)
@given(text=texts)
def test_token_bytes_join_to_the_text(kind, text):
    tokenizer = vocabularies.make(kind)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined.decode() == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_token_of_half_a_character_has_a_replacement_as_text():
    tokenizer = vocabularies.make("llama3")
    half = vocabularies.peer("llama3").token_to_id("ð")
    assert (tokenizer.token_bytes(half), tokenizer.token_text(half)) == (b"\xf0", "\ufffd")


def test_a_piece_keeps_its_leading_space_as_text():
    tokenizer = vocabularies.make("llama2")
    assert tokenizer.token_text(vocabularies.peer("llama2").token_to_id("\u2581h")) == " h"


def test_an_id_beyond_the_vocabulary_stands_for_nothing():
    tokenizer = vocabularies.make("qwen")
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""
    assert not tokenizer.is_special(tokenizer.vocab_size + 5)


def test_markup_is_a_control_token_but_not_special():
    tokenizer, peer = vocabularies.make("qwen"), vocabularies.peer("qwen")
    assert tokenizer.is_special(peer.token_to_id(SPECIALS[0]))
    assert not tokenizer.is_special(peer.token_to_id(MARKUP[0]))
    assert tokenizer.find_control("a</think>") == "</think>"
    assert tokenizer.find_special("a</think>") is None


def test_named_tokens_come_from_the_config_then_from_the_generation_config(tmp_path):
    folder = vocabularies.write(tmp_path, "qwen")
    (folder / "generation_config.json").write_text('{"bos_token_id": 7, "eos_token_id": [8, 9]}')
    loaded, peer = Tokenizer.load(folder), vocabularies.peer("qwen")
    assert loaded.bos_token_id == peer.token_to_id(SPECIALS[0])
    assert loaded.eos_token_id == peer.token_to_id(SPECIALS[2])
    (folder / "tokenizer_config.json").unlink()
    loaded = Tokenizer.load(folder)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (7, 8)


def test_a_model_without_named_tokens_has_none(tmp_path):
    folder = vocabularies.write(tmp_path, "qwen")
    (folder / "tokenizer_config.json").unlink()
    loaded = Tokenizer.load(folder)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (None, None)
    assert loaded.vocab_size == vocabularies.peer("qwen").get_vocab_size()


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(tmp_path):
    spec = copy.deepcopy(vocabularies.spec("qwen"))
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    ids = Tokenizer.load(tmp_path).encode("x " * 50, add_special_tokens=True)
    assert len(ids) > 4


@pytest.mark.parametrize(
    "content",
    [None, "", "[]", "{", "{}", '{"added_tokens": [], "model": {"type": "BPE"}}', b"\xff"],
)
def test_a_missing_or_bad_file_is_an_error_that_names_it(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(tmp_path)
    assert str(file) in str(caught.value)


def test_a_text_beyond_the_limit_is_refused_before_work_is_done(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_CHARS", 10)
    tokenizer = vocabularies.make("qwen")
    assert tokenizer.encode("x" * 10, add_special_tokens=False)
    with pytest.raises(RequestError, match="11 characters; the limit is 10"):
        tokenizer.encode("x" * 11, add_special_tokens=False)
    with pytest.raises(RequestError, match="12 characters; the limit is 10"):
        tokenizer.encode_spans([Span("x" * 6, True), Span("x" * 6, False)])


def test_a_lone_surrogate_is_the_clients_fault():
    with pytest.raises(RequestError, match=r"lone surrogate '.ud83d' at character 2"):
        vocabularies.make("qwen").encode("ab\ud83d", add_special_tokens=False)


def test_threads_get_the_ids_that_one_caller_gets():
    tokenizer = vocabularies.make("qwen")
    jobs = [(f"word{i} <|im_end|> 你好" * 20, i % 2 == 0) for i in range(64)]

    def encode(job):
        return tokenizer.encode(job[0], add_special_tokens=False, parse_special=job[1])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(encode, jobs)) == [encode(job) for job in jobs]


def test_a_long_text_on_a_thread_lets_other_threads_run(tmp_path):
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = "The quick brown fox. " * 15_000
    done = threading.Event()

    def encode():
        tokenizer.encode(text, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    ticks = 0
    while not done.is_set() and ticks < TICKS:
        ticks += 1
        time.sleep(0.001)  # gives the GIL away; the count is what is asserted, not the time
    thread.join()
    assert ticks == TICKS
