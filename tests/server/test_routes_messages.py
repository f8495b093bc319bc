"""The Messages routes with Anthropic's own client, over real sockets and a scripted engine."""

import asyncio
import json

import anthropic
import pytest

from tailrace.config import Config, EngineConfig, ServerConfig
from tests.server.fake_engine import Script, usual_scripts
from tests.server.running_app import running_app

HI = [{"role": "user", "content": "Hi"}]
ASKED = {"model": "tiny", "max_tokens": 64, "messages": HI}


def asked(text, **fields):
    return ASKED | {"messages": [{"role": "user", "content": text}]} | fields


@pytest.fixture(scope="module")
def app(tiny_folder):
    with running_app(tiny_folder, usual_scripts()) as app:
        yield app


@pytest.fixture(scope="module")
def client(app):
    with connect(app) as client:
        yield client


def connect(app, **options):
    return anthropic.Anthropic(base_url=app.url, max_retries=0, **{"api_key": "none"} | options)


def events_of(app, **fields):
    """Return a stream's events as (name, data)."""
    answer = app.client.post("/v1/messages", json=ASKED | {"stream": True} | fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    pairs = [block.split("\n") for block in blocks]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in pairs]


def test_a_whole_answer(client):
    message = client.messages.create(**ASKED)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.id.startswith("msg_")
    [block] = message.content
    assert (block.type, block.text) == ("text", "Hello, wörld")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.output_tokens == len("Hello, wörld".encode()) + 1
    assert usage.cache_read_input_tokens == 3
    counted = client.messages.count_tokens(model="tiny", messages=HI)
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert message._request_id


def test_the_order_of_a_streams_events(app):
    events = events_of(app)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert events[1][1]["content_block"] == {"type": "text", "text": "", "citations": None}
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == "Hello, wörld"
    ended = events[-2][1]
    assert ended["delta"]["stop_reason"] == "end_turn"
    assert ended["usage"]["output_tokens"] == len(text.encode()) + 1
    total = ended["usage"]["input_tokens"] + ended["usage"]["cache_read_input_tokens"]
    assert total == start["usage"]["input_tokens"]


def test_the_clients_stream_adds_up_to_the_whole_answer(client):
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == whole.content[0].text == message.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert message.usage.input_tokens == whole.usage.input_tokens


def test_async_streams_keep_their_texts_apart(app):
    async def one(client, i):
        async with client.messages.stream(**asked(f"prompt {i}")) as stream:
            return "".join([text async for text in stream.text_stream])

    async def main():
        async with anthropic.AsyncAnthropic(base_url=app.url, api_key="none") as client:
            whole = await client.messages.create(**asked("prompt 1"))
            assert whole.content[0].text == "answer 1 " * 5
            return await asyncio.gather(*[one(client, i) for i in range(8)])

    assert asyncio.run(main()) == [f"answer {i} " * 5 for i in range(8)]


def test_a_stop_sequence_is_named_and_not_in_the_text(client, app):
    message = client.messages.create(**ASKED, stop_sequences=["never", ", w"])
    assert message.content[0].text == "Hello"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", w")
    ended = events_of(app, stop_sequences=[", w"])[-2][1]["delta"]
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", ", w")


def test_max_tokens_ends_an_answer(client):
    message = client.messages.create(**ASKED | {"max_tokens": 5})
    assert (message.content[0].text, message.stop_reason) == ("Hello", "max_tokens")
    assert message.usage.output_tokens == 5


def test_more_tokens_than_the_context_holds_are_an_upper_bound(app, tiny_folder):
    script = {"": Script("x" * 600)}
    with running_app(tiny_folder, script, context_length=64) as small, connect(small) as client:
        message = client.messages.create(**ASKED | {"max_tokens": 10_000})
        counted = client.messages.count_tokens(model="tiny", messages=HI).input_tokens
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.output_tokens == 64 - counted
        message = client.messages.create(**ASKED | {"max_tokens": 64 - counted})
        assert message.stop_reason == "max_tokens"
        with pytest.raises(anthropic.BadRequestError, match="context holds 64"):
            client.messages.create(**asked("x" * 100))
        long = [{"role": "user", "content": "x" * 100}]
        assert client.messages.count_tokens(model="tiny", messages=long).input_tokens > 100


def test_an_answer_of_no_text_has_an_empty_block(client, app):
    [block] = client.messages.create(**asked("silence")).content
    assert block.text == ""
    names = [name for name, _ in events_of(app, **asked("silence"))]
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_system_text_and_a_prefill_reach_the_template(client):
    assert client.messages.create(**ASKED, system="Be brief.").content[0].text == "Hey"
    prefill = [*HI, {"role": "assistant", "content": "I am"}]
    assert client.messages.create(**ASKED | {"messages": prefill}).content[0].text == " well"


def test_sampling_reaches_the_engine(app, client):
    # The newest client has no such arguments; the wire has.
    client.messages.create(**ASKED, extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7})
    sampling = app.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)


@pytest.mark.parametrize(
    ("kind", "named", "fields"),
    [
        (anthropic.NotFoundError, "gpt-4", {"model": "gpt-4"}),
        (anthropic.BadRequestError, "temperature", {"extra_body": {"temperature": 9}}),
        (anthropic.BadRequestError, "max_tokens", {"max_tokens": 0}),
        (anthropic.BadRequestError, "top_k", {"extra_body": {"top_k": "many"}}),
        (anthropic.BadRequestError, "messages", {"messages": []}),
        (
            anthropic.BadRequestError,
            "'image'",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        ),
    ],
    ids=["model", "temperature", "max_tokens", "top_k", "messages", "image"],
)
def test_refusals_become_the_clients_own_exceptions(client, kind, named, fields):
    with pytest.raises(kind) as caught:
        client.messages.create(**ASKED | fields)
    body = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert named in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id


@pytest.mark.parametrize("missing", ["model", "max_tokens", "messages"])
def test_what_is_missing_is_named(app, missing):
    body = {name: value for name, value in ASKED.items() if name != missing}
    answer = app.client.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert missing in answer.json()["error"]["message"]


def test_errors_of_the_http_layer_have_anthropics_shape_too(app):
    cases = [
        (app.client.get("/v1/messages"), 405),
        (app.client.post("/v1/messages/batches", json={}), 404),
        (app.client.post("/v1/messages", content=b"{"), 400),
    ]
    for answer, status in cases:
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        assert answer.json()["request_id"] == answer.headers["request-id"]
    assert "type" not in app.client.post("/v1/chat/completions", content=b"{").json()


def test_an_engine_error_is_a_500_and_midway_an_error_event(client, app):
    with pytest.raises(anthropic.InternalServerError, match="the step failed"):
        client.messages.create(**asked("broken"))
    with pytest.raises(anthropic.InternalServerError, match="the step failed"):
        client.messages.create(**asked("broken at once"), stream=True)
    stream = client.messages.create(**asked("broken"), stream=True)
    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        list(stream)
    name, data = events_of(app, **asked("broken"))[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")


def test_a_key_comes_in_either_header(tiny_folder):
    config = Config(server=ServerConfig(api_key="secret"))
    with running_app(tiny_folder, {"": Script("yes")}, config) as app:
        for key in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with connect(app, **key) as client:
                assert client.messages.create(**ASKED).content[0].text == "yes"
        with connect(app, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**ASKED)
            assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_full_house_is_429_with_retry_after(tiny_folder):
    paused = Script("Hello", pause_after=1)
    config = Config(engine=EngineConfig(max_batch_size=1), server=ServerConfig(max_waiting=0))
    with running_app(tiny_folder, {"": paused}, config) as app, connect(app) as client:
        with client.messages.create(**ASKED, stream=True) as stream:
            assert next(iter(stream)).type == "message_start"
            with pytest.raises(anthropic.RateLimitError) as caught:
                client.messages.create(**ASKED)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.body["error"]["type"] == "rate_limit_error"
        app.wait(app.engine.was_aborted.wait())


def test_a_client_that_leaves_a_stream_frees_its_place(tiny_folder):
    with running_app(tiny_folder, {"": Script("Hello", pause_after=2)}) as app:
        with connect(app) as client, client.messages.create(**ASKED, stream=True) as stream:
            assert next(iter(stream)).type == "message_start"
        app.wait(app.engine.was_aborted.wait())
        app.settle()
        assert app.engine.open_requests == 0
        assert app.services.admission.sequences == 0
