"""More requests than the KV cache holds: recomputed, and no token differs."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.e2e.observe import metric, wait_idle

pytestmark = pytest.mark.e2e

REQUESTS = 5
PROMPTS = [f"{number} " + "abcdefgh" * (6 + number) for number in range(REQUESTS)]
OUTPUT_TOKENS = 160
SHORT_ANSWERS = 40
KV_TOKENS = 256
"""One request needs at most 82 + 160 tokens; five want more than four times what is there."""


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int = OUTPUT_TOKENS) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    return choice["token_ids"]


async def alone_and_together(url: str) -> tuple[list[list[int]], list[list[int]]]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        # Answers of one token: the engine then expects no more of the next, and lends too much.
        for _ in range(SHORT_ANSWERS):
            await ask(client, "x", max_tokens=1)
        assert metric(url, "tailrace:num_preemptions_total") == 0
        together = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
        alone = [await ask(client, prompt) for prompt in PROMPTS]
    return alone, together


def test_preempted_requests_complete_with_the_tokens_they_have_alone(tiny_server):
    kv_tokens = str(KV_TOKENS)
    with tiny_server("--kv-cache-tokens", kv_tokens, "--context-length", kv_tokens) as server:
        alone, together = asyncio.run(alone_and_together(server.url))
        assert [len(ids) for ids in together] == [OUTPUT_TOKENS] * REQUESTS
        assert together == alone
        assert metric(server.url, "tailrace:num_preemptions_total") > 0
        wait_idle(server.url)
