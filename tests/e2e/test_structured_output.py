"""Structured output and tool calls on the embedded model, through OpenAI's client and over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.bench.launch import LocalServer
from tests.e2e.conftest import connect
from tests.e2e.observe import wait_idle
from tests.support.schemas import SCHEMAS, fits

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a person as JSON."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def check_person(text):
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"}
    assert len(value["name"]) <= 20
    assert 0 <= value["age"] <= 130
    assert set(value["tags"]) <= {"a", "b"}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


def test_a_schema_is_kept_to_by_every_choice_at_any_temperature(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=ASK,
        response_format=schema_format(PERSON),
        n=4,
        temperature=1.5,
        max_tokens=200,
        logprobs=True,
        seed=1,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check_person(choice.message.content)
        scored = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert scored.decode() == choice.message.content


def test_a_stream_is_the_same_json(client, model):
    asked = {
        "model": model,
        "messages": ASK,
        "response_format": schema_format(PERSON),
        "temperature": 0,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    assert "".join(pieces) == whole
    check_person(whole)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_random_schemas_are_kept_to(server, schema, seed):
    body = {"prompt": "JSON: ", "max_tokens": 48, "seed": seed, "guided_json": schema}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    [choice] = answer["choices"]
    if choice["finish_reason"] == "stop":
        assert fits(json.loads(choice["text"]), schema)
    else:
        assert choice["finish_reason"] == "length"


def test_what_is_cut_says_length(client, model):
    answer = client.chat.completions.create(
        model=model, messages=ASK, response_format=schema_format(PERSON), max_tokens=3
    )
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")


def test_free_neighbours_say_what_they_say_alone(server, model):
    def ask(fields):
        body = {"model": model, "prompt": "The sea is", "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, **fields}, timeout=120)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    alone = ask({})
    bound = {"structured_outputs": {"regex": "( [a-z]{2,7}){6}"}, "temperature": 1.0}
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, [{}, bound, {}, bound, {}, bound]))
    assert texts[::2] == [alone] * 3
    assert all(len(text.split()) == 6 for text in texts[1::2])


def test_a_hostile_grammar_is_400_and_the_server_lives(server, model):
    def post(**fields):
        body = {"model": model, "prompt": "x", "max_tokens": 4, **fields}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    for fields in (
        {"guided_regex": "((a{9000}){9000}){90}"},
        {"guided_regex": "(a"},
        {"guided_json": {"type": "integer", "multipleOf": 1000003}},
        {"guided_json": {"$ref": "#/$defs/none"}},
        {"guided_grammar": "start: start start |"},
    ):
        answer = post(**fields)
        assert answer.status_code in (200, 400), answer.text
    assert post().status_code == 200
    wait_idle(server.url)


def test_a_generate_body_takes_sglangs_names(server):
    body = {
        "text": "Is water wet?",
        "sampling_params": {"max_new_tokens": 8, "regex": "(yes|no)", "temperature": 0},
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
    assert answer["text"] in ("yes", "no")
    assert answer["finish_reason"] == "stop"


def test_the_embedded_model_is_not_known_to_call_tools(client, model):
    with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
        client.chat.completions.create(model=model, messages=ASK, tools=[WEATHER])


@pytest.fixture(scope="module", params=["hermes", "llama3_json"])
def calling(request, has_smollm2, tmp_path_factory):
    """A client of a server that was told how its model calls."""
    log_file = tmp_path_factory.mktemp(request.param) / "server.log"
    settings = ("--tool-call-parser", request.param, "--no-warmup", "--threads", "1")
    with LocalServer(settings, log_file=log_file) as server, connect(server) as connected:
        yield connected


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_comes_whole_and_streamed(calling, model, choice):
    function = {**WEATHER["function"], "name": "f"}
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the weather in Linz?"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "temperature": 0,
    }
    [whole] = calling.chat.completions.create(**asked).choices
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls
    assert call.function.name == "f"
    assert set(json.loads(call.function.arguments)) == {"city"}
    with calling.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.name == "f"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    answered = [
        *asked["messages"],
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    more = calling.chat.completions.create(model=model, messages=answered, max_tokens=5)
    assert more.choices[0].finish_reason in ("stop", "length")
