from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.bench.prompts import Prompt, PromptMaker, corpus_text, python_text
from tailrace.errors import ConfigError
from tests.bench.mock_server import WordCodec

TEXT = " ".join(f"word{i % 911} is-{i % 37}," for i in range(4000))


class PairCodec:
    """Harder than words: pairs of equal letters merge, so that cut ids re-encode to others."""

    name = "pairs"

    def __init__(self, opening: int = 0) -> None:
        self.opening = opening

    async def encode(self, text: str) -> list[int]:
        ids = [0] * self.opening
        place = 0
        while place < len(text):
            twice = text[place : place + 2] == 2 * text[place]
            ids.append(2 * ord(text[place]) + twice)
            place += 1 + twice
        return ids

    async def decode(self, ids: list[int]) -> str:
        return "".join(chr(i // 2) * (1 + i % 2) for i in ids)


def make(codec, text, lengths, seed=0) -> list[Prompt]:
    async def go():
        maker = await PromptMaker.create(codec, text, seed=seed)
        return await maker.make_all(lengths)

    return asyncio.run(go())


@given(lengths=st.lists(st.integers(1, 12_000), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_prompts_have_the_exact_length(lengths, seed):
    codec = WordCodec()
    prompts = make(codec, TEXT, lengths, seed)
    assert [len(codec.encode_now(prompt.text)) for prompt in prompts] == lengths
    assert not any(prompt.is_miss for prompt in prompts)


@given(
    lengths=st.lists(st.integers(3, 400), min_size=1, max_size=6),
    opening=st.integers(0, 2),
    text=st.text("aabbb ", min_size=30, max_size=300),
)
@settings(max_examples=40, deadline=None)
def test_what_is_said_of_a_length_is_true_even_where_cuts_merge(lengths, opening, text):
    codec = PairCodec(opening)
    for prompt in make(codec, text, lengths):
        assert len(asyncio.run(codec.encode(prompt.text))) == prompt.tokens
        assert prompt.is_miss == (prompt.tokens != prompt.wanted_tokens)
        assert abs(prompt.tokens - prompt.wanted_tokens) <= 2 + opening


def test_no_two_prompts_begin_alike():
    prompts = make(WordCodec(), TEXT, [200] * 40)
    for one, other in itertools.combinations(prompts, 2):
        assert one.text[:8] != other.text[:8]


def test_the_seed_decides():
    lengths = [50, 60]
    first, again, other = (make(WordCodec(), TEXT, lengths, seed) for seed in (1, 1, 2))
    assert first == again
    assert {prompt.text for prompt in first}.isdisjoint(prompt.text for prompt in other)


def test_a_tokenizer_that_never_fits_gives_misses_and_not_a_loop():
    class Doubling(WordCodec):
        async def encode(self, text):
            return [token for token in self.encode_now(text) for _ in range(2)]

    prompts = make(Doubling(), TEXT, [51, 52])
    assert prompts[0].is_miss
    assert abs(prompts[0].tokens - 51) == 1


def test_a_corpus_without_tokens_is_an_error():
    class Mute(WordCodec):
        async def encode(self, text):
            return []

    with pytest.raises(ConfigError, match="no tokens"):
        make(Mute(), TEXT, [5])


def test_python_carries_enough_text():
    assert len(python_text()) > 300_000
    text, name = corpus_text(None)
    assert "pydoc" in name
    assert text.isprintable()


def test_a_text_file_is_read_or_refused(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("语言模型 " * 500, encoding="utf-8")
    assert corpus_text(file)[1] == "text.txt"
    file.write_text("short")
    with pytest.raises(ConfigError, match="at least 1000"):
        corpus_text(file)
    file.write_bytes(b"\xff" * 2000)
    with pytest.raises(ConfigError, match="not UTF-8"):
        corpus_text(file)
    with pytest.raises(ConfigError, match="No such file"):
        corpus_text(tmp_path / "none")
