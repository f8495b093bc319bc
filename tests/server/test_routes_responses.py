"""The Responses route with OpenAI's own client, over real sockets and a scripted engine."""

import asyncio
import json

import openai
import pytest

from tests.server.fake_engine import Script, usual_scripts
from tests.server.running_app import running_app

ASKED = {"model": "tiny", "input": "Hi"}


@pytest.fixture(scope="module")
def app(tiny_folder):
    with running_app(tiny_folder, usual_scripts()) as app:
        yield app


@pytest.fixture(scope="module")
def client(app):
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(app, **fields):
    """Return a stream's events, whose names are their types."""
    answer = app.client.post("/v1/responses", json=ASKED | {"stream": True} | fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    pairs = [block.split("\n") for block in blocks]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [e["type"] for e in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_whole_answer(client):
    response = client.responses.create(**ASKED, metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == "Hello, wörld"
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert response.id.startswith("resp_")
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert usage.output_tokens == len("Hello, wörld".encode()) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 3
    assert (response.metadata, response.temperature) == ({"a": "b"}, 0.5)
    assert (response.error, response.incomplete_details) == (None, None)
    assert response.completed_at >= response.created_at


def test_the_order_of_a_streams_events(app):
    events = events_of(app)
    kinds = [event["type"] for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * kinds.count("response.output_text.delta"),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == events[-4]["text"] == events[-3]["part"]["text"] == "Hello, wörld"
    added, done = events[2]["item"], events[-2]["item"]
    assert (added["status"], added["content"]) == ("in_progress", [])
    assert (done["status"], done["content"]) == ("completed", [events[-3]["part"]])
    assert {e["item_id"] for e in events if "item_id" in e} == {added["id"]} == {done["id"]}
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["output"], last["id"]) == ("completed", [done], first["id"])


def test_the_clients_stream_adds_up_to_the_whole_answer(client):
    whole = client.responses.create(**ASKED)
    with client.responses.stream(**ASKED) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage == whole.usage


def test_async_streams_keep_their_texts_apart(app):
    async def one(client, i):
        stream = await client.responses.create(model="tiny", input=f"prompt {i}", stream=True)
        events = [event async for event in stream]
        return events[-1].response.output_text

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none") as client:
            whole = await client.responses.create(model="tiny", input="prompt 1")
            assert whole.output_text == "answer 1 " * 5
            return await asyncio.gather(*[one(client, i) for i in range(8)])

    assert asyncio.run(main()) == [f"answer {i} " * 5 for i in range(8)]


def test_instructions_and_unfinished_answers_reach_the_template(client):
    assert client.responses.create(**ASKED, instructions="Be brief.").output_text == "Hey"
    items = [
        {"role": "user", "content": "Hi"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "incomplete",
            "content": [{"type": "output_text", "text": "I am", "annotations": []}],
        },
    ]
    assert client.responses.create(model="tiny", input=items).output_text == " well"


def test_an_answer_can_be_sent_back_as_input(client, app):
    first = client.responses.create(**ASKED)
    items = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "!"}]
    client.responses.create(model="tiny", input=items)
    sent = bytes(i for i in app.engine.requests[-1].token_ids if i < 256).decode()
    assert sent == "user\nHi\nassistant\nHello, wörld\nuser\n!\nassistant\n"


def test_an_answer_that_is_cut_is_incomplete(client, app):
    response = client.responses.create(**ASKED, max_output_tokens=5)
    assert (response.output_text, response.status) == ("Hello", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    last = events_of(app, max_output_tokens=5)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"


def test_more_tokens_than_the_context_holds_are_an_upper_bound(app, tiny_folder):
    with running_app(tiny_folder, {"": Script("x" * 600)}, context_length=64) as small:
        answer = small.client.post("/v1/responses", json=ASKED | {"max_output_tokens": 9999})
        assert answer.json()["status"] == "incomplete"
        assert answer.json()["usage"]["total_tokens"] == 64
        refused = small.client.post("/v1/responses", json=ASKED | {"input": "x" * 100})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input"
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_scores_come_where_they_are_included(client, app):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(**ASKED, **fields, max_output_tokens=3)
    scores = response.output[0].content[0].logprobs
    assert [score.token for score in scores] == ["H", "e", "l"]
    assert [len(score.top_logprobs) for score in scores] == [2, 2, 2]
    events = events_of(app, **fields, max_output_tokens=3)
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [score["token"] for delta in deltas for score in delta] == ["H", "e", "l"]
    assert len(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == 3
    assert client.responses.create(**ASKED, top_logprobs=2).output[0].content[0].logprobs == []


def test_an_answer_of_no_text_is_an_empty_message(client, app):
    assert client.responses.create(model="tiny", input="silence").output_text == ""
    kinds = [event["type"] for event in events_of(app, input="silence")]
    assert "response.output_text.delta" not in kinds
    assert kinds[-1] == "response.completed"


def test_an_input_is_counted_as_it_would_be_served(client, app):
    for fields in (
        {},
        {"instructions": "Be brief."},
        {"input": [{"role": "user", "content": "x"}]},
    ):
        counted = client.responses.input_tokens.count(**ASKED | fields)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == client.responses.create(**ASKED | fields).usage.input_tokens
    assert client.responses.input_tokens.count(input="long " * 1000).input_tokens > 4000
    before = app.engine.requests.copy()
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model="tiny", input=[])
    assert caught.value.param == "input"
    assert app.engine.requests == before


def test_a_response_is_never_stored(client):
    assert client.responses.create(**ASKED, store=True).model_extra["store"] is False
    with pytest.raises(openai.BadRequestError, match="stores nothing") as caught:
        client.responses.create(**ASKED, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("kind", "param", "fields"),
    [
        (openai.NotFoundError, "model", {"model": "gpt-4"}),
        (openai.BadRequestError, "temperature", {"temperature": 9}),
        (openai.BadRequestError, "max_output_tokens", {"max_output_tokens": 0}),
        (openai.BadRequestError, "top_logprobs", {"top_logprobs": 21}),
        (openai.BadRequestError, "top_k", {"extra_body": {"top_k": "many"}}),
        (openai.BadRequestError, "metadata", {"extra_body": {"metadata": {"a": 1}}}),
        (openai.BadRequestError, "background", {"background": True}),
    ],
)
def test_refusals_become_the_clients_own_exceptions(client, kind, param, fields):
    with pytest.raises(kind) as caught:
        client.responses.create(**ASKED | fields)
    assert caught.value.param == param


@pytest.mark.parametrize("missing", ["model", "input"])
def test_what_is_missing_is_named(app, missing):
    body = {name: value for name, value in ASKED.items() if name != missing}
    answer = app.client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, missing)


def test_an_engine_error_is_a_500_and_midway_a_failed_response(client, app):
    with pytest.raises(openai.InternalServerError, match="the step failed"):
        client.responses.create(model="tiny", input="broken")
    with pytest.raises(openai.InternalServerError, match="the step failed"):
        client.responses.create(model="tiny", input="broken at once", stream=True)
    events = list(client.responses.create(model="tiny", input="broken", stream=True))
    failed = events[-1]
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert "the step failed" in failed.response.error.message


def test_a_client_that_leaves_a_stream_frees_its_place(tiny_folder):
    with running_app(tiny_folder, {"": Script("Hello", pause_after=2)}) as app:
        url = f"{app.url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="none") as client,
            client.responses.create(**ASKED, stream=True) as stream,
        ):
            assert next(iter(stream)).type == "response.created"
        app.wait(app.engine.was_aborted.wait())
        app.settle()
        assert app.engine.open_requests == 0
        assert app.services.admission.sequences == 0
