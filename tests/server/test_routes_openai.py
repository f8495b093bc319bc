"""The OpenAI routes over the scripted engine: hand-made requests, then real clients."""

import asyncio

import pytest

from tailrace.config import Config, EngineConfig, ServerConfig
from tailrace.errors import RequestError
from tailrace.server import answering
from tailrace.server.engine_client import EngineState
from tailrace.server.routes_openai import ROUTES
from tests.server.fake_engine import BOS_ID, EOS_ID, IM_START_ID, Script
from tests.server.hand_made import HandMadeRequest, make_services

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


@pytest.fixture
def call(tiny_folder):
    """Send one body; return the request with what was sent, and the services."""

    def call(path, *, scripts=None, config=None, **body):
        async def main():
            services = make_services(tiny_folder, scripts, config)
            request = HandMadeRequest(body)
            await ROUTES["POST", path](services, request)
            assert services.admission.sequences == 0
            return request, services

        return run(main())

    return call


@pytest.fixture
def refused(call):
    """Send one body; return the RequestError."""

    def refused(path, **body):
        with pytest.raises(RequestError) as caught:
            call(path, **body)
        return caught.value

    return refused


def script(text, **options):
    return {"": Script(text, **options)}


# Chat


def test_a_chat_is_rendered_by_the_template_and_answered(call):
    request, services = call(CHAT, messages=HI, scripts=script("yes"))
    assert request.status == 200
    answer = request.json
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": [],
    }
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    [sent] = services.engine.requests
    assert sent.token_ids[0] == IM_START_ID
    assert sent.sampling.max_tokens == 512 - len(sent.token_ids)
    assert answer["usage"]["prompt_tokens"] == len(sent.token_ids)
    assert answer["usage"]["completion_tokens"] == 4


def test_a_chat_stream_is_role_then_text_then_one_finish_then_usage_then_done(call):
    request, _ = call(
        CHAT,
        messages=HI,
        stream=True,
        n=2,
        stream_options={"include_usage": True},
        scripts=script("abc"),
    )
    *chunks, done = request.events
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == "abc"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"


def test_without_include_usage_no_chunk_speaks_of_usage(call):
    request, _ = call(CHAT, messages=HI, stream=True)
    *chunks, done = request.events
    assert done == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_so_far_comes_with_each_chunk_where_asked_for(call, path):
    prompts = {"messages": HI} if path == CHAT else {"prompt": ["Hi", "there"], "echo": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    request, _ = call(
        path, **prompts, n=2, stream=True, stream_options=options, scripts=script("aé")
    )
    *chunks, last, done = request.events
    assert done == "[DONE]"
    for index in {chunk["choices"][0]["index"] for chunk in chunks}:
        told = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in told] == [0, 1, 2, 3, 4]
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in told)
    prompt_tokens = {c["choices"][0]["index"]: c["usage"]["prompt_tokens"] for c in chunks}
    assert (
        sum(prompt_tokens[index] for index in range(0, len(prompt_tokens), 2))
        == (last["usage"]["prompt_tokens"])
    )
    assert last["usage"]["completion_tokens"] == 4 * len(prompt_tokens)


def test_usage_so_far_needs_include_usage(call):
    options = {"continuous_usage_stats": True}
    request, _ = call(CHAT, messages=HI, stream=True, stream_options=options)
    assert all("usage" not in chunk for chunk in request.events[:-1])


def test_chat_logprobs_carry_bytes_also_of_half_characters(call):
    request, _ = call(
        CHAT, messages=HI, logprobs=True, top_logprobs=2, max_tokens=2, scripts=script("é")
    )
    [choice] = request.json["choices"]
    assert choice["message"]["content"] == "é"
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["token"] == "bytes:\\xc3"
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]


def test_a_half_character_is_an_event_without_text_but_with_its_logprob(call):
    request, _ = call(
        CHAT, messages=HI, stream=True, logprobs=True, max_tokens=3, scripts=script("éa")
    )
    chunks = [c["choices"][0] for c in request.events[1:-1]]
    assert [c["delta"].get("content") for c in chunks] == ["", "é", "a"]
    assert [len(c["logprobs"]["content"]) for c in chunks] == [1, 1, 1]


def test_max_completion_tokens_goes_before_max_tokens(call):
    _, services = call(CHAT, messages=HI, max_tokens=9, max_completion_tokens=2)
    assert services.engine.requests[0].sampling.max_tokens == 2


def test_tools_are_refused_where_the_model_is_not_known_to_call_them(call, refused):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert refused(CHAT, messages=HI, tools=[tool]).param == "tools"
    request, _ = call(CHAT, messages=HI, tools=[tool], tool_choice="none")
    assert request.status == 200


def test_the_final_message_can_be_continued(call):
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    _, services = call(CHAT, messages=messages, continue_final_message=True)
    assert bytes(services.engine.requests[0].token_ids[-4:]) == b"I am"


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": False, "bad_words": [], "allowed_token_ids": None},
        {"function_call": "auto", "functions": [], "modalities": ["text"], "audio": None},
        {"truncation_side": "right"},
        {"truncate_prompt_tokens": 5, "truncation_side": "left"},
        {"chat_template": None, "add_special_tokens": False, "echo": False},
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_asks_for_nothing_special_is_served(call, fields):
    assert call(CHAT, messages=HI, **fields)[0].status == 200


def test_extras_reach_the_engine(call):
    _, services = call(
        CHAT,
        messages=HI,
        top_k=-1,
        min_p=0.5,
        repetition_penalty=2.0,
        ignore_eos=True,
        max_tokens=5,
        min_tokens=3,
        stop_token_ids=[10],
        logit_bias={"65": 5},
        priority=-3,
        cache_salt="mine",
        seed=-1,
    )
    [sent] = services.engine.requests
    assert (sent.priority, sent.cache_salt) == (-3, "mine")
    assert sent.sampling.top_k == 0
    assert sent.sampling.min_p == 0.5
    assert sent.sampling.repetition_penalty == 2.0
    assert sent.sampling.ignore_eos
    assert sent.sampling.min_tokens == 3
    assert sent.sampling.stop_token_ids == (10,)
    assert sent.sampling.logit_bias == {65: 5.0}
    assert sent.sampling.seed == -1


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("stream_options", {"messages": HI, "stream_options": {"include_usage": True}}),
        ("response_format", {"messages": HI, "response_format": {"type": "xml"}}),
        ("guided_json", {"messages": HI, "guided_json": 3}),
        ("top_logprobs", {"messages": HI, "top_logprobs": 2}),
        ("top_logprobs", {"messages": HI, "logprobs": True, "top_logprobs": 21}),
        ("prompt_logprobs", {"messages": HI, "prompt_logprobs": 1, "stream": True}),
        ("max_completion_tokens", {"messages": HI, "max_completion_tokens": 0}),
        ("n", {"messages": HI, "n": 17}),
        ("temperature", {"messages": HI, "temperature": 3}),
        ("truncate_prompt_tokens", {"messages": HI, "truncate_prompt_tokens": 0}),
        ("chat_template_kwargs.foo", {"messages": HI, "chat_template_kwargs": {"foo": 1}}),
        ("chat_template", {"messages": HI, "chat_template": "{{ x }}"}),
        ("add_special_tokens", {"messages": HI, "add_special_tokens": True}),
        ("bad_words", {"messages": HI, "bad_words": ["x"]}),
        ("functions", {"messages": HI, "functions": [{"name": "f"}], "function_call": "auto"}),
        (
            "truncation_side",
            {"messages": HI, "truncate_prompt_tokens": 5, "truncation_side": "right"},
        ),
        ("modalities", {"messages": HI, "modalities": ["text", "audio"]}),
        ("web_search_options", {"messages": HI, "web_search_options": {}}),
    ],
)
def test_a_chat_that_cannot_be_served_is_refused_by_name(refused, param, fields):
    error = refused(CHAT, **fields)
    assert (error.status, error.param) == (400, param)


def test_user_text_never_becomes_a_control_token(call):
    _, services = call(CHAT, messages=[{"role": "user", "content": "<|im_end|>"}])
    [sent] = services.engine.requests
    # The template's own: one that ends the user's message.
    assert sent.token_ids.count(EOS_ID) == 1


# Completions


def test_a_completion_answers_each_prompt_n_times(call):
    scripts = {"a": Script("one"), "b": Script("two")}
    request, services = call(COMPLETIONS, prompt=["a", "b"], n=2, best_of=2, scripts=scripts)
    answer = request.json
    assert answer["object"] == "text_completion"
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == ["one", "one", "two", "two"]
    assert answer["usage"]["prompt_tokens"] == 2
    assert services.engine.requests[0].sampling.max_tokens == 256


@pytest.mark.parametrize("prompt", [[72, 105], [[72, 105]]])
def test_a_prompt_may_be_ids(call, prompt):
    request, services = call(COMPLETIONS, prompt=prompt, echo=True, scripts=script("!"))
    assert services.engine.requests[0].token_ids == [72, 105]
    assert request.json["choices"][0]["text"] == "Hi!"


def test_echo_with_logprobs_scores_the_prompt_too(call):
    request, services = call(
        COMPLETIONS, prompt="é", echo=True, logprobs=1, max_tokens=1, scripts=script("a")
    )
    assert services.engine.requests[0].sampling.prompt_logprobs == 1
    [choice] = request.json["choices"]
    assert choice["text"] == "éa"
    assert choice["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "a"],
        "token_logprobs": [None, -0.25, -0.25],
        "top_logprobs": [None, {"bytes:\\xa9": -0.25}, {"a": -0.25}],
        "text_offset": [0, 0, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_echo_scores_the_prompt_alone(call, stream):
    request, services = call(
        COMPLETIONS, prompt="Hi", echo=True, logprobs=0, max_tokens=0, stream=stream
    )
    assert services.engine.requests[0].sampling.max_tokens == 1
    if stream:
        choices = [c["choices"][0] for c in request.events[:-1]]
        assert [c["text"] for c in choices] == ["Hi", ""]
        assert choices[-1]["finish_reason"] == "length"
    else:
        [choice] = request.json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
        assert choice["logprobs"]["tokens"] == ["H", "i"]
        assert request.json["usage"]["completion_tokens"] == 0


def test_a_completion_stream_echoes_first_and_finishes_each_index_once(call):
    request, _ = call(COMPLETIONS, prompt=["a", "b"], echo=True, stream=True, max_tokens=2)
    chunks = [c["choices"][0] for c in request.events[:-1]]
    for index, prompt in enumerate("ab"):
        mine = [c for c in chunks if c["index"] == index]
        assert "".join(c["text"] for c in mine) == prompt + "He"
        assert [c["finish_reason"] for c in mine] == [None, None, "length"]


@pytest.mark.parametrize("echo", [True, False])
def test_a_streams_scores_are_those_of_the_whole(call, echo):
    asked = {"prompt": ["Hié", "you"], "n": 2, "echo": echo, "logprobs": 1}
    whole, _ = call(COMPLETIONS, **asked)
    stream, _ = call(COMPLETIONS, **asked, stream=True)
    for choice in whole.json["choices"]:
        pieces = [c["choices"][0] for c in stream.events[:-1]]
        scores = [p["logprobs"] for p in pieces if p["index"] == choice["index"] and p["logprobs"]]
        for name, values in choice["logprobs"].items():
            assert [value for score in scores for value in score[name]] == values


def test_prompt_logprobs_and_token_ids_come_where_asked_for(call):
    request, _ = call(
        COMPLETIONS,
        prompt="Hi",
        prompt_logprobs=1,
        return_token_ids=True,
        scripts=script("a"),
    )
    [choice] = request.json["choices"]
    assert choice["prompt_token_ids"] == [72, 105]
    assert choice["token_ids"] == [97, EOS_ID]
    assert choice["prompt_logprobs"] == [
        None,
        {"105": {"logprob": -0.25, "rank": 1, "decoded_token": "i"}},
    ]


def test_a_prompt_is_cut_only_where_the_client_asks(call):
    _, services = call(COMPLETIONS, prompt="Hello", truncate_prompt_tokens=2)
    assert bytes(services.engine.requests[0].token_ids) == b"lo"


def test_a_completion_prompt_may_spell_control_tokens(call):
    _, services = call(COMPLETIONS, prompt="<|im_start|>user")
    assert services.engine.requests[0].token_ids[0] == IM_START_ID
    assert BOS_ID not in services.engine.requests[0].token_ids


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["a", [1]]}),
        ("prompt", {"prompt": ["a", 1]}),
        ("prompt", {"prompt": [259]}),
        ("prompt", {"prompt": ["a"] * 129}),
        ("n", {"prompt": ["a"] * 128, "n": 3}),
        ("suffix", {"prompt": "a", "suffix": "b"}),
        ("best_of", {"prompt": "a", "best_of": 2}),
        ("logprobs", {"prompt": "a", "logprobs": 21}),
        ("max_tokens", {"prompt": "a", "max_tokens": 0}),
        ("max_tokens", {"prompt": "a", "max_tokens": 512}),
        ("stop", {"prompt": "a", "stop": [""]}),
        ("use_beam_search", {"prompt": "a", "use_beam_search": True}),
        ("allowed_token_ids", {"prompt": "a", "allowed_token_ids": [5]}),
        ("prompt_embeds", {"prompt": "a", "prompt_embeds": "AAAA"}),
    ],
)
def test_a_completion_that_cannot_be_served_is_refused_by_name(refused, param, fields):
    error = refused(COMPLETIONS, **fields)
    assert (error.status, error.param) == (400, param)


def test_a_prompt_beyond_the_context_names_both_numbers(refused):
    error = refused(COMPLETIONS, prompt="x" * 600)
    assert error.code == "context_length_exceeded"
    assert "600" in error.message
    assert "512" in error.message


def test_another_model_is_not_found(refused, call):
    error = refused(CHAT, messages=HI, model="gpt-4")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    request, _ = call(CHAT, messages=HI, model="tiny")
    assert request.status == 200


# What goes wrong midway


def small(**server):
    return Config(engine=EngineConfig(max_batch_size=1), server=ServerConfig(**server))


def test_beyond_the_places_a_request_is_refused_with_429_and_places_come_back(tiny_folder):
    async def main():
        services = make_services(tiny_folder, {"a": Script(pause_after=0)}, small(max_waiting=1))
        handler = ROUTES["POST", COMPLETIONS]
        requests = [HandMadeRequest({"prompt": "a"}) for _ in range(2)]
        tasks = [asyncio.create_task(handler(services, request)) for request in requests]
        await services.engine.was_paused.wait()
        with pytest.raises(RequestError) as caught:
            await handler(services, HandMadeRequest({"prompt": "b"}))
        assert caught.value.status == 429
        assert caught.value.retry_after_s > 0
        services.engine.scripts["a"].go_on.set()
        await asyncio.gather(*tasks)
        await handler(services, HandMadeRequest({"prompt": "b"}))
        assert services.admission.sequences == 0

    run(main())


def test_more_choices_than_places_is_a_400(refused):
    error = refused(CHAT, messages=HI, n=3, config=small(max_waiting=1))
    assert (error.status, error.param) == (400, "n")


@pytest.mark.parametrize("change", ["draining", "restarting", "loading"])
def test_a_house_that_is_not_open_answers_503_with_retry_after(tiny_folder, change):
    async def main():
        services = make_services(tiny_folder)
        if change == "draining":
            services.draining = True
        elif change == "restarting":
            services.engine.state = EngineState.RESTARTING
        else:
            services.text = None
        with pytest.raises(RequestError) as caught:
            await ROUTES["POST", CHAT](services, HandMadeRequest({"messages": HI}))
        assert caught.value.status == 503
        assert caught.value.retry_after_s > 0

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_work_at_once(tiny_folder, stream):
    async def main():
        services = make_services(tiny_folder, script("abcdef", pause_after=2))
        request = HandMadeRequest({"messages": HI, "stream": stream, "n": 2})
        task = asyncio.create_task(ROUTES["POST", CHAT](services, request))
        await services.engine.was_paused.wait()
        request.gone.set()
        await task
        assert services.engine.open_requests == 0
        assert len(services.engine.aborted) == 2
        assert services.admission.sequences == 0
        assert not request.is_finished

    run(main())


def test_a_client_that_leaves_while_its_send_is_blocked_is_noticed(tiny_folder):
    async def main():
        services = make_services(tiny_folder, script("abcdef", pause_after=4))
        request = HandMadeRequest({"messages": HI, "stream": True}, is_open=False)
        task = asyncio.create_task(ROUTES["POST", CHAT](services, request))
        await services.engine.was_paused.wait()
        request.gone.set()
        await task
        assert services.engine.open_requests == 0

    run(main())


def test_a_slow_reader_is_dropped_and_another_stream_goes_on(tiny_folder):
    async def main():
        config = Config(server=ServerConfig(stream_buffer_bytes=300))
        scripts = {"slow": Script("x" * 400), "fast": Script("y" * 50)}
        services = make_services(tiny_folder, scripts, config)
        handler = ROUTES["POST", COMPLETIONS]
        slow = HandMadeRequest({"prompt": "slow", "stream": True, "max_tokens": 400}, is_open=False)
        fast = HandMadeRequest({"prompt": "fast", "stream": True})
        await asyncio.gather(handler(services, slow), handler(services, fast))
        assert slow.was_dropped
        assert not slow.is_finished
        assert len(services.engine.aborted) == 1
        assert fast.events[-1] == "[DONE]"
        assert not fast.was_dropped
        assert services.admission.sequences == 0

    run(main())


def test_a_reader_that_never_takes_the_end_gives_its_place_back(tiny_folder, monkeypatch):
    monkeypatch.setattr(answering, "DELIVERY_TIMEOUT_S", 0.01)

    async def main():
        services = make_services(tiny_folder)
        request = HandMadeRequest({"messages": HI, "stream": True}, is_open=False)
        await ROUTES["POST", CHAT](services, request)
        assert request.was_dropped
        assert services.admission.sequences == 0
        request.end()
        assert services.metrics.records[0].finish_reason == "slow_reader"

    run(main())


def test_a_slow_reader_within_the_bound_gets_everything_in_fewer_events(tiny_folder):
    async def main():
        services = make_services(tiny_folder, script("abcdefgh", pause_after=8))
        body = {
            "prompt": "a",
            "stream": True,
            "logprobs": 0,
            "stream_options": {"include_usage": True},
        }
        request = HandMadeRequest(body, is_open=False)
        task = asyncio.create_task(ROUTES["POST", COMPLETIONS](services, request))
        await services.engine.was_paused.wait()
        services.engine.scripts[""].go_on.set()
        request.reads.set()
        await task
        *chunks, usage, _ = request.events
        assert "".join(c["choices"][0]["text"] for c in chunks) == "abcdefgh"
        scored = sum(len(c["choices"][0]["logprobs"]["tokens"]) for c in chunks)
        assert scored == usage["usage"]["completion_tokens"] == 9

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_before_the_first_token_is_a_plain_500(refused, stream):
    error = refused(CHAT, messages=HI, stream=stream, scripts=script("abc", error_after=0))
    assert error.status == 500
    assert "the step failed" in error.message


def test_an_engine_error_midway_ends_the_stream_with_an_error_event(call):
    request, _ = call(CHAT, messages=HI, stream=True, scripts=script("abc", error_after=2))
    *chunks, last = request.events
    assert chunks
    assert "the step failed" in last["error"]["message"]
    assert request.is_finished


def test_an_engine_that_dies_midway_ends_the_stream_and_refuses_the_rest(tiny_folder):
    async def main():
        services = make_services(tiny_folder, script("abc", pause_after=2))
        handler = ROUTES["POST", CHAT]
        streamed = HandMadeRequest({"messages": HI, "stream": True})
        whole = HandMadeRequest({"messages": HI})
        tasks = [asyncio.create_task(handler(services, r)) for r in (streamed, whole)]
        while services.engine.open_requests < 2 or not streamed.sent:
            services.engine.progress.clear()
            await services.engine.progress.wait()
        services.engine.die()
        await tasks[0]
        with pytest.raises(RequestError) as caught:
            await tasks[1]
        assert caught.value.status == 503
        assert "died" in streamed.events[-1]["error"]["message"]

    run(main())
