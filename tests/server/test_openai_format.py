"""A stream's chunks: what is encoded once for all of them changes none."""

from types import SimpleNamespace

import pytest

from tailrace.server.choice import Piece
from tailrace.server.openai_format import ChatFormat, CompletionFormat

TEXTS = ["", "plain", 'say "the text"', "é\n\u2028\x00", "👍🏽", "the text"]
MODELS = ["m", 'a "the text" model', "content"]


def made(kind, **options):
    prompts = [SimpleNamespace(token_ids=[1, 2], text="prompt")]
    job = SimpleNamespace(request_id="r-the text", tools=None, prompts=prompts, n=3)
    return kind(job=job, tokenizer=None, created=1, **options)


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"includes_usage": True}, {"wants_token_ids": True}, {"counts_usage": True}],
    ids=["plain", "usage", "ids", "counts"],
)
def test_a_chunk_is_the_same_whatever_came_before(kind, model, index, options):
    used = made(kind, model=model, **options)
    begun = used.event(Piece(index, "begin", []))
    for text in TEXTS:
        fresh = made(kind, model=model, **options)
        if "wants_token_ids" in options:
            fresh.begins(index)  # the prompt's ids are told once
        assert used.event(Piece(index, text, [])) == fresh.event(Piece(index, text, []))
    assert used.event(Piece(index, "begin", [])) == begun or "wants_token_ids" in options


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
def test_the_end_and_the_counts_are_told_after_any_number_of_chunks(kind):
    used, fresh = (made(kind, model="m", counts_usage=True) for _ in range(2))
    for _ in range(3):
        used.event(Piece(0, "t", [7]))
    fresh.event(Piece(0, "ttt", [7, 7, 7]))
    ending = Piece(0, "t", [7], finish_reason="stop", stop_reason="x")
    assert used.event(ending) == fresh.event(ending)
    assert b'"completion_tokens":4' in made(kind, model="m", counts_usage=True).event(
        Piece(0, "tttt", [7] * 4)
    )
    plain = made(kind, model="m")
    plain.event(Piece(0, "t", [7]))
    assert plain.event(ending) == made(kind, model="m").event(ending)


def test_a_prompt_is_echoed_once():
    echoing, plain = made(CompletionFormat, model="m", echo=True), made(CompletionFormat, model="m")
    said = plain.event(Piece(0, "t", [7]))
    assert echoing.event(Piece(0, "t", [7])) == plain.event(Piece(0, "prompt", [])) + said
    assert echoing.event(Piece(0, "t", [7])) == said
