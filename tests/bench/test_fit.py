from __future__ import annotations

import asyncio

import pytest

from tailrace.bench.codec import FileCodec
from tailrace.bench.corpus import python_text
from tailrace.bench.fit import OFFSETS, ROUND, Wanted, fit_all
from tests.bench.mock_server import WordCodec
from tests.bench.tokenizer_files import mixed_text, write_tokenizer


class CountingCodec(WordCodec):
    """Counts how often it is asked for many texts at once."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    async def count_all(self, texts):
        self.rounds += 1
        return [len(self.encode_now(text)) for text in texts]

    async def decode_all(self, many):
        return [self.decode_now(ids) for ids in many]


def fitted(codec, wanted, text=None):
    async def go():
        ids = await codec.encode(text or python_text()[:50_000])
        return await fit_all(codec, ids, wanted)

    return asyncio.run(go())


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return FileCodec(write_tokenizer("gpt2", tmp_path_factory.mktemp("gpt2")))


def test_all_pieces_of_a_round_are_asked_about_at_once():
    codec = CountingCodec()
    wanted = [Wanted(str(index), 50 + index % 7, f"{index:06}") for index in range(ROUND + 5)]
    pieces = fitted(codec, wanted)
    assert [piece.tokens for piece in pieces] == [piece.tokens for piece in wanted]
    # The word before; for each of two rounds its leads, its texts, and the few texts put right.
    assert codec.rounds <= 9


def test_equal_names_are_equal_text_and_others_are_not():
    one, again, other = fitted(
        WordCodec(), [Wanted("a", 40, "s: "), Wanted("a", 40, "s: "), Wanted("b", 40, "s: ")]
    )
    assert one == again
    assert one.text != other.text


def test_a_piece_with_no_room_for_its_salt_goes_without():
    (piece,) = fitted(WordCodec(), [Wanted("a", 2, "one two three: ")])
    assert piece.tokens == 2
    assert "one" not in piece.text


def test_pieces_put_together_are_as_many_tokens_as_each(byte_level):
    wanted = [
        Wanted("first", 41, "aaaa: ", is_first=True, is_followed=True),
        Wanted("second", 37, "bbbb: ", is_first=False, is_followed=True),
        Wanted("third", 3, "cccc: ", is_first=False),
    ]
    pieces = fitted(byte_level, wanted, mixed_text()[:60_000])
    assert [piece.tokens for piece in pieces] == [41, 37, 3]
    whole = asyncio.run(byte_level.encode("".join(piece.text for piece in pieces)))
    first = asyncio.run(byte_level.encode(pieces[0].text))
    assert len(whole) == 81
    assert whole[:41] == first


def test_words_fill_what_characters_of_several_tokens_jump_over(tmp_path):
    # Trained without this text: each character is three bytes, each byte a token.
    codec = FileCodec(write_tokenizer("gpt2", tmp_path))
    wanted = [Wanted(str(index), 60 + index, f"{index}: ") for index in range(9)]
    pieces = fitted(codec, wanted, "鹬蚌相争渔翁得利" * 300)
    assert [piece.tokens for piece in pieces] == [piece.tokens for piece in wanted]
    assert any(piece.text.endswith(" and") for piece in pieces)
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_what_never_fits_ends_after_a_bounded_number_of_rounds():
    class Doubling(CountingCodec):
        async def count_all(self, texts):
            return [2 * count for count in await super().count_all(texts)]

    codec = Doubling()
    (piece,) = fitted(codec, [Wanted("a", 51, "s: ")])
    assert abs(piece.tokens - 51) == 1
    assert codec.rounds <= 2 + 6 * OFFSETS
