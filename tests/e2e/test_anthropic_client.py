"""The `anthropic` package, and `openai`'s Responses, against the embedded model."""

from __future__ import annotations

import asyncio

import anthropic
import httpx
import pytest

from tests.e2e.observe import wait_idle

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "Name three colours of the rainbow."}]
GREEDY = {"extra_body": {"temperature": 0}}


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as connected:
        yield connected


def test_a_message_says_what_a_chat_says(claude, client, model):
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=24
    )
    message = claude.messages.create(model=model, messages=MESSAGES, max_tokens=24, **GREEDY)
    assert message.content[0].text == chat.choices[0].message.content
    usage = message.usage
    assert usage.output_tokens == chat.usage.completion_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    counted = claude.messages.count_tokens(model=model, messages=MESSAGES)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_streamed_message_says_the_same_as_a_whole_one(claude, model):
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 24, **GREEDY}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_prefill_is_gone_on_with(claude, client, model):
    begun = [*MESSAGES, {"role": "assistant", "content": "The three colours are red,"}]
    chat = client.chat.completions.create(
        model=model,
        messages=begun,
        temperature=0,
        max_tokens=8,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    message = claude.messages.create(model=model, messages=begun, max_tokens=8, **GREEDY)
    assert message.content[0].text == chat.choices[0].message.content


def test_a_response_says_what_a_chat_says_whole_and_streamed(client, model):
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=24
    )
    asked = {"model": model, "input": MESSAGES, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.total_tokens == chat.usage.total_tokens
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text == whole.output_text
    assert final.status == whole.status


def test_clients_that_leave_either_stream_give_their_kv_back(server, model):
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            bodies = {
                "/v1/messages": {"messages": MESSAGES, "max_tokens": 4000},
                "/v1/responses": {"input": MESSAGES},
            }
            for path, body in bodies.items():
                asked = {"model": model, "stream": True} | body
                async with http.stream("POST", path, json=asked) as answer:
                    assert answer.status_code == 200
                    await anext(answer.aiter_bytes())

    asyncio.run(leave())
    wait_idle(server.url)  # fails where a request or its KV stays
