"""The embedded model's greedy answer over HTTP: sensible, and transformers' own."""

from __future__ import annotations

import httpx
import pytest
import torch

from tailrace.bench.launch import LocalServer
from tailrace.models.gguf import resolve
from tests.models.reference import reference_logits, reference_model

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France, and why is it famous?"}]
NEW_TOKENS = 24
NOISE = 0.03
"""Bound on what float16 weights change in the likeliest token's log-probability, in nats."""


@pytest.fixture(scope="module")
def reference(has_smollm2):
    return reference_model(resolve("smollm2"))


@pytest.fixture(scope="module")
def answer(smollm2) -> tuple[str, list[int], list[int]]:
    return ask(smollm2.url)


def ask(url: str) -> tuple[str, list[int], list[int]]:
    """Text, ids of the rendered prompt, ids of the answer."""
    body = {
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    answer.raise_for_status()
    whole = answer.json()
    choice = whole["choices"][0]
    return choice["message"]["content"], whole["prompt_token_ids"], choice["token_ids"]


def scores_along(reference, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """The reference's log-probabilities [answer token, vocabulary] at the place of each id."""
    assert len(ids) == NEW_TOKENS
    return reference_logits(reference, prompt + ids)[len(prompt) - 1 : -1].log_softmax(-1)


def test_the_prompt_is_the_one_that_transformers_renders(answer):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve("smollm2"))
    rendered = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert answer[1] == rendered["input_ids"]


def test_the_answer_names_paris_and_leaves_the_reference_only_at_near_ties(answer, reference):
    """float16 weights may swap two tokens whose lead is within their noise, and nothing else."""
    text, prompt, ids = answer
    assert "Paris" in text
    scores = scores_along(reference, prompt, ids)
    chosen = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (scores.max(-1).values - chosen).max() < 2 * NOISE


def test_in_float32_the_ids_are_the_references_greedy_ids(has_smollm2, reference, tmp_path):
    """Each is its best after all before it, so that greedy decoding there takes the same path."""
    settings = ("--dtype", "float32", "--no-warmup")
    with LocalServer(settings, log_file=tmp_path / "server.log") as server:
        text, prompt, ids = ask(server.url)
    assert "Paris" in text
    assert ids == scores_along(reference, prompt, ids).argmax(-1).tolist()
