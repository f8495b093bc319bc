"""Prompts: shapes, limits, and where the encoding runs."""

import asyncio
import threading

import pytest

from tailrace.config import ServerConfig
from tailrace.errors import RequestError
from tailrace.server.prompts import (
    INLINE_CHARS,
    Prompt,
    check_fan_out,
    encode_prompts,
    keep_last_tokens,
    split_prompts,
)
from tailrace.server.sampling import Limits
from tailrace.text.tokenizer import Tokenizer

LIMITS = Limits(ServerConfig(), vocab_size=259, context_length=512)


class Spy:
    """A tokenizer that remembers which thread encoded."""

    def __init__(self):
        self.threads = []

    def encode(self, text, *, add_special_tokens, parse_special):
        self.threads.append(threading.current_thread())
        return list(text.encode())

    def fewest_tokens(self, text):
        return 0


def encode(sent, tokenizer, *, keep_last=None):
    return asyncio.run(
        encode_prompts(sent, tokenizer, LIMITS, add_special_tokens=True, keep_last=keep_last)
    )


def test_one_or_many_texts_or_ids():
    assert split_prompts("a") == ["a"]
    assert split_prompts(["a", "b"]) == ["a", "b"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1], [2, 3]]) == [[1], [2, 3]]


def test_a_request_means_at_most_256_sequences():
    assert check_fan_out(16, 16) == 256
    with pytest.raises(RequestError, match="17 prompts times n = 16 are 272"):
        check_fan_out(17, 16)


def test_short_texts_are_encoded_in_place_and_long_ones_on_a_thread():
    here = threading.current_thread()
    spy = Spy()
    encode(["short"], spy)
    encode(["x" * (INLINE_CHARS + 1)], spy)
    encode(["x" * (INLINE_CHARS // 2 + 1)] * 2, spy)
    assert spy.threads[0] is here
    assert here not in spy.threads[1:]


def test_texts_and_ids_become_prompts(tiny_folder):
    tokenizer = Tokenizer.load(tiny_folder)
    assert encode(["Hi"], tokenizer) == [Prompt([72, 105], "Hi")]
    assert encode([[72, 105]], tokenizer) == [Prompt([72, 105], None)]
    assert encode(["Hello"], tokenizer, keep_last=2) == [Prompt([108, 111], None)]


@pytest.mark.parametrize("sent", [[""], [[]], [[259]], [[-1]]])
def test_empty_prompts_and_foreign_ids_are_refused(sent):
    with pytest.raises(RequestError) as caught:
        encode(sent, Spy())
    assert caught.value.param == "prompt"


def test_the_last_tokens_are_kept():
    assert keep_last_tokens([1, 2, 3], None) == [1, 2, 3]
    assert keep_last_tokens([1, 2, 3], 2) == [2, 3]
    assert keep_last_tokens([1, 2, 3], 10**30) == [1, 2, 3]
    with pytest.raises(RequestError):
        keep_last_tokens([1], -1)
