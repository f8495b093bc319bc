"""Tool calls and structured output on /v1/messages and /v1/responses, with the official clients."""

import json

import anthropic
import openai
import pytest

from tests.server.fake_engine import Script
from tests.server.running_app import running_app
from tests.server.test_tool_choice import HERMES, write_template, written

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CLAUDE_TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
OPENAI_TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
CALL = written("get_weather", '{"city": "Linz"}')
SPOKEN = "Let me see.\n" + CALL + "\n" + written("get_weather", '{"city": "Graz"}')
ARGUMENTS = ['{"city": "Linz"}', '{"city": "Graz"}']


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = write_template(tmp_path_factory.mktemp("hermes"), HERMES)
    with running_app(folder, {"": Script(SPOKEN)}, context_length=4096) as app:
        yield app


@pytest.fixture
def says(app):
    """Set what the engine says."""

    def says(text):
        app.services.engine.scripts[""] = Script(text)

    yield says
    says(SPOKEN)


@pytest.fixture(scope="module")
def claude(app):
    with anthropic.Anthropic(base_url=app.url, api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "max_tokens": 999, "messages": [{"role": "user", "content": "?"}]}
        client.asked = asked | {"tools": [CLAUDE_TOOL]}
        yield client


@pytest.fixture(scope="module")
def client(app):
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        client.asked = {"model": "tiny", "input": "?", "tools": [OPENAI_TOOL]}
        yield client


def prompt(app):
    return bytes(i for i in app.engine.requests[-1].token_ids if i < 256).decode()


def check_message(message):
    text, first, second = message.content
    assert (text.type, text.text) == ("text", "Let me see.")
    assert [call.type for call in (first, second)] == ["tool_use"] * 2
    assert [call.name for call in (first, second)] == ["get_weather"] * 2
    assert [call.input for call in (first, second)] == [{"city": "Linz"}, {"city": "Graz"}]
    assert first.id != second.id
    assert message.stop_reason == "tool_use"


def test_a_message_has_its_calls_as_blocks(app, claude):
    check_message(claude.messages.create(**claude.asked))
    assert '"name": "get_weather"' in prompt(app)


def test_a_streamed_message_adds_up_to_the_same_blocks(claude):
    with claude.messages.stream(**claude.asked) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    check_message(message)
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_a_messages_input_is_what_the_model_wrote(app, says):
    half = r'{"city": "\ud83d", "big": 12345678901234567890123, "far": 1e999}'
    says(written("get_weather", half))
    asked = {"model": "tiny", "max_tokens": 999, "messages": [{"role": "user", "content": "?"}]}
    answer = app.post("/v1/messages", asked | {"tools": [CLAUDE_TOOL]})
    assert answer.status_code == 200
    assert f'"input":{half}' in answer.text


def test_a_call_whose_name_is_no_text_is_no_call(app, says):
    says(written(r"\ud83d", "{}"))
    body = {"model": "tiny", "max_tokens": 999, "messages": [{"role": "user", "content": "?"}]}
    answer = app.post("/v1/messages", body | {"tools": [CLAUDE_TOOL]})
    assert answer.status_code == 200
    (block,) = answer.json()["content"]
    assert block["type"] == "text"


def test_the_calls_of_a_message_can_be_answered(app, claude, says):
    first = claude.messages.create(**claude.asked)
    says("Sunny.")
    _, *calls = first.content
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"sun in {call.input['city']}"}
        for call in calls
    ]
    turns = [
        *claude.asked["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    message = claude.messages.create(**claude.asked | {"messages": turns})
    assert (message.content[0].text, message.stop_reason) == ("Sunny.", "end_turn")
    rendered = prompt(app)
    assert rendered.index("Let me see.") < rendered.index('"city": "Linz"}}')
    assert rendered.index("sun in Linz") < rendered.index("sun in Graz")


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [
        (None, False),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_weather"}, True),
    ],
)
def test_a_messages_choice_of_tools_is_enforced(app, claude, choice, has_grammar):
    fields = {} if choice is None else {"tool_choice": choice}
    claude.messages.create(**claude.asked, **fields)
    assert bool(app.engine.requests[-1].sampling.grammar) is has_grammar
    assert ("Tools: " in prompt(app)) is (choice != {"type": "none"})


def test_one_call_at_a_time_where_a_message_asks_for_it(claude):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = claude.messages.create(**claude.asked, tool_choice=choice)
    assert sum(block.type == "tool_use" for block in message.content) == 1


def test_a_message_can_be_json_of_a_schema(app, claude, says):
    says(ARGUMENTS[0])
    asked = {key: value for key, value in claude.asked.items() if key != "tools"}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = claude.messages.create(**asked, extra_body={"output_config": form})
    assert json.loads(message.content[0].text) == {"city": "Linz"}
    assert '"city"' in app.engine.requests[-1].sampling.grammar


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tool_choice.type", {"extra_body": {"tool_choice": {"type": "perhaps"}}}),
        ("tool_choice", {"tool_choice": {"type": "tool", "name": "unknown"}}),
        ("output_config.format", {"extra_body": {"output_config": {"format": {"type": "xml"}}}}),
        (
            "output_config.format",
            {
                "tools": [],
                "extra_body": {
                    "output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}
                },
            },
        ),
    ],
)
def test_a_message_that_asks_for_what_is_not_there_is_refused(claude, named, fields):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**claude.asked | fields)
    assert named in caught.value.body["error"]["message"]


def check_response(response):
    message, first, second = response.output
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert [call.type for call in (first, second)] == ["function_call"] * 2
    assert [call.name for call in (first, second)] == ["get_weather"] * 2
    assert [call.arguments for call in (first, second)] == ARGUMENTS
    assert {item.status for item in response.output} == {"completed"}
    assert len({first.call_id, second.call_id, first.id, second.id}) == 4


def test_a_response_has_its_calls_as_items(client):
    response = client.responses.create(**client.asked)
    check_response(response)
    assert response.tools[0].name == "get_weather"


def test_a_streamed_response_adds_up_to_the_same_items(client):
    events = list(client.responses.create(**client.asked, stream=True))
    check_response(events[-1].response)
    for index, arguments in enumerate(ARGUMENTS, 1):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type for event in mine]
        deltas = kinds.count("response.function_call_arguments.delta")
        assert deltas > 0
        assert kinds == [
            "response.output_item.added",
            *["response.function_call_arguments.delta"] * deltas,
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        assert "".join(event.delta for event in mine[1:-2]) == mine[-2].arguments == arguments
        assert (mine[0].item.arguments, mine[0].item.status) == ("", "in_progress")
        assert mine[-1].item == events[-1].response.output[index]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_calls_of_a_response_can_be_answered(app, client, says):
    first = client.responses.create(**client.asked)
    says("Sunny.")
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"sun {index}"}
        for index, item in enumerate(first.output[1:])
    ]
    items = [{"role": "user", "content": "?"}, *first.output, *outputs]
    assert client.responses.create(**client.asked | {"input": items}).output_text == "Sunny."
    rendered = prompt(app)
    assert rendered.index('"city": "Graz"}}') < rendered.index("sun 0") < rendered.index("sun 1")


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [
        ("auto", False),
        ("none", False),
        ("required", True),
        ({"type": "function", "name": "get_weather"}, True),
    ],
)
def test_a_responses_choice_of_tools_is_enforced(app, client, choice, has_grammar):
    response = client.responses.create(**client.asked, tool_choice=choice)
    assert bool(app.engine.requests[-1].sampling.grammar) is has_grammar
    is_named = isinstance(choice, dict)
    assert (response.tool_choice.name if is_named else response.tool_choice) == (
        "get_weather" if is_named else choice
    )


@pytest.mark.parametrize(
    "form",
    [{"type": "json_object"}, {"type": "json_schema", "name": "place", "schema": SCHEMA}],
)
def test_a_response_can_be_json(app, client, says, form):
    says(ARGUMENTS[0])
    response = client.responses.create(model="tiny", input="?", text={"format": form})
    assert json.loads(response.output_text) == {"city": "Linz"}
    assert app.engine.requests[-1].sampling.grammar
    assert response.text.format.type == form["type"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tool_choice", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("text.format", {"text": {"format": {"type": "xml"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ],
)
def test_a_response_that_asks_for_what_is_not_there_is_refused(client, param, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**client.asked | fields)
    assert caught.value.param == param
    assert param in caught.value.body["message"]


def test_calls_that_are_cut_are_no_completed_ones(claude, client, says):
    says(CALL)
    message = claude.messages.create(**claude.asked | {"max_tokens": 30})
    assert message.stop_reason == "max_tokens"
    response = client.responses.create(**client.asked, max_output_tokens=60, stream=True)
    last = list(response)[-1].response
    assert (last.status, last.output[-1].status) == ("incomplete", "incomplete")
    whole = client.responses.create(**client.asked, max_output_tokens=60)
    assert (whole.status, whole.output[-1].status) == ("incomplete", "incomplete")
    assert whole.output[-1].arguments == last.output[-1].arguments
    assert '{"city": "Linz"}'.startswith(whole.output[-1].arguments)


def test_a_call_that_is_cut_has_the_input_that_is_whole(claude, says):
    says(written("get_weather", '{"city": "Linz", "days": [1, 2]}'))
    cut = claude.asked | {"max_tokens": 80}
    message = claude.messages.create(**cut)
    [block] = message.content
    assert (message.stop_reason, block.type, block.input) == (
        "max_tokens",
        "tool_use",
        {"city": "Linz"},
    )
    with claude.messages.stream(**cut) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.content[0].name) == ("max_tokens", block.name)
    assert streamed.content[0].input["city"] == "Linz"


def test_both_dialects_tell_where_the_time_went_when_asked(claude, client, app):
    message = claude.messages.create(**claude.asked, extra_body={"return_metrics": True})
    assert message.model_extra["metrics"]["e2e_s"] > 0
    response = client.responses.create(**client.asked, extra_body={"return_metrics": True})
    assert response.model_extra["metrics"]["phases"]
    for path, body in (("messages", claude.asked), ("responses", client.asked)):
        answer = app.client.post(
            f"/v1/{path}", json=body | {"stream": True}, headers={"x-tailrace-timing": "1"}
        )
        assert '"e2e_s"' in answer.text
