from __future__ import annotations

import asyncio

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tailrace.bench.codec import BatchCodec, FileCodec, ServerCodec, count_all, decode_all
from tailrace.bench.wire import resolve
from tailrace.errors import ConfigError
from tests.bench.mock_server import MockServer


def with_server(use, **fields):
    async def go():
        async with MockServer(**fields) as server:
            return await use(ServerCodec(await resolve(server.url), "mock"), server)

    return asyncio.run(go())


def test_the_server_counts_its_own_tokens():
    async def use(codec, server):
        ids = await codec.encode("one two  three")
        return ids, await codec.decode(ids), server.paths[-2:]

    ids, text, paths = with_server(use)
    assert len(ids) == 3
    assert text == "one two  three"
    assert paths == ["/tokenize", "/detokenize"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [("encode_now", "no list"), ("encode_now", ["x"]), ("decode_now", 3)],
)
def test_a_server_that_answers_something_else_is_an_error(monkeypatch, name, answer):
    async def use(codec, server):
        monkeypatch.setattr(type(server.codec), name, lambda *_: answer)
        await (codec.encode("x") if name == "encode_now" else codec.decode([0]))

    with pytest.raises(ConfigError, match="--tokenizer DIR"):
        with_server(use)


def test_a_server_without_the_route_is_an_error_with_a_remedy():
    async def use(codec, server):
        server.api_key = "needed"
        await codec.encode("x")

    with pytest.raises(ConfigError, match=r"HTTP 401.*--tokenizer DIR"):
        with_server(use)


def test_a_local_tokenizer_file_is_used(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        codec = FileCodec(given)
        assert asyncio.run(codec.encode("b a b")) == [1, 0, 1]
        assert asyncio.run(codec.decode([1, 0])) == "b a"


def test_a_bad_tokenizer_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        FileCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        FileCodec(tmp_path)


def test_many_texts_are_counted_at_once_or_one_by_one(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    class Plain:
        name = "plain"

        def __init__(self, codec):
            self.encode, self.decode = codec.encode, codec.decode

    for codec in (FileCodec(tmp_path), Plain(FileCodec(tmp_path))):
        assert isinstance(codec, BatchCodec) == isinstance(codec, FileCodec)
        assert asyncio.run(count_all(codec, ["a b", "", "b"])) == [2, 0, 1]
        assert asyncio.run(decode_all(codec, [[0, 1], [], [1]])) == ["a b", "", "b"]
        assert asyncio.run(count_all(codec, [])) == []
