"""POST /generate over the scripted engine."""

import asyncio

import pytest

from tailrace.config import Config, ServerConfig
from tailrace.errors import RequestError
from tailrace.server.routes_generate import ROUTES
from tests.server.fake_engine import EOS_ID, Script
from tests.server.hand_made import HandMadeRequest, make_services

GENERATE = ROUTES["POST", "/generate"]


@pytest.fixture
def call(tiny_folder):
    """Send one body; return the request with what was sent, and the services."""

    def call(*, scripts=None, config=None, **body):
        async def main():
            services = make_services(tiny_folder, scripts, config)
            request = HandMadeRequest(body)
            await asyncio.wait_for(GENERATE(services, request), 120)
            return request, services

        return asyncio.run(main())

    return call


def test_the_load_scripts_body_is_answered_with_text_usage_and_times(call):
    request, services = call(prompt="Hi", max_tokens=12, temperature=0.7, top_p=0.95, stream=False)
    answer = request.json
    assert answer["text"] == "Hello, world"
    assert answer["finish_reason"] == "length"
    assert answer["tokens"] == answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == 14
    metrics = answer["metrics"]
    assert set(metrics) == {
        "request_latency_ms",
        "ttft_ms",
        "queue_ms",
        "prefill_ms",
        "decode_ms",
    }
    assert all(value >= 0 for value in metrics.values())
    assert metrics["ttft_ms"] <= metrics["request_latency_ms"]
    sampling = services.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.7, 0.95)


def test_a_stream_is_one_event_a_token_and_done(call):
    request, _ = call(prompt="Hi", stream=True, scripts={"": Script("aé")})
    assert request.events == [{"token": "a"}, {"token": ""}, {"token": "é"}, "[DONE]"]


def test_a_stream_without_a_token_is_done_at_once(call):
    request, _ = call(prompt="Hi", stream=True, scripts={"": Script("")})
    assert request.status == 200
    assert request.events == ["[DONE]"]


def test_an_end_by_stop_string_sends_what_was_certain(call):
    request, services = call(prompt="Hi", stream=True, stop=["lo"])
    assert [e["token"] for e in request.events[:-1]] == ["H", "e", "", "l"]
    assert services.engine.aborted


def test_sglangs_body_is_understood(call):
    params = {
        "max_new_tokens": 3,
        "min_new_tokens": 2,
        "temperature": 0,
        "top_k": -1,
        "sampling_seed": 9,
        "stop_token_ids": [10],
    }
    request, services = call(text="Hi", sampling_params=params)
    assert request.json["text"] == "Hel"
    sampling = services.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (3, 2, 9)
    assert (sampling.temperature, sampling.top_k, sampling.stop_token_ids) == (0.0, 0, (10,))


def test_ids_are_a_prompt_too(call):
    _, services = call(input_ids=[72, 105], sampling_params={})
    assert services.engine.requests[0].token_ids == [72, 105]


def test_an_omitted_max_tokens_is_the_servers_default(call):
    _, services = call(prompt="Hi", config=Config(server=ServerConfig(default_max_tokens=7)))
    assert services.engine.requests[0].sampling.max_tokens == 7


def test_eos_can_be_ignored(call):
    request, _ = call(
        prompt="Hi", ignore_eos=True, max_tokens=2, scripts={"": Script(token_ids=[EOS_ID, 97])}
    )
    assert request.json["text"] == "a"
    assert request.json["tokens"] == 2


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {}),
        ("prompt", {"prompt": "a", "text": "b"}),
        ("prompt", {"prompt": ""}),
        ("text", {"text": "x" * 512}),
        ("n", {"prompt": "a", "n": 2}),
        ("max_tokens", {"prompt": "a", "max_tokens": 0}),
        ("max_tokens", {"prompt": "a", "max_tokens": 512}),
        ("sampling_params.max_new_tokens", {"text": "a", "sampling_params": {"max_new_tokens": 0}}),
        ("sampling_params.top_p", {"text": "a", "sampling_params": {"top_p": 7}}),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(call, param, fields):
    with pytest.raises(RequestError) as caught:
        call(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("return_logprob", {"return_logprob": True}),
        ("lora_path", {"lora_path": "mine"}),
        ("image_data", {"image_data": "x.png"}),
        ("sampling_params.stop_regex", {"sampling_params": {"stop_regex": "a"}}),
        ("sampling_params.no_stop_trim", {"sampling_params": {"no_stop_trim": True}}),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused_by_name(call, param, fields):
    with pytest.raises(RequestError) as caught:
        call(text="Hi", **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    harmless = {name: None for name in fields if name != "sampling_params"}
    assert call(text="Hi", **harmless)[0].status == 200
