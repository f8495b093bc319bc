"""What an effort becomes for a template, and that every route of chats takes it alike."""

import asyncio

import pytest

from tailrace.errors import RequestError
from tailrace.server.protocol import ChatBody
from tailrace.server.reasoning import EFFORTS, template_variables
from tailrace.server.routes_messages import ROUTES as MESSAGES
from tailrace.server.routes_openai import ROUTES as OPENAI
from tailrace.server.routes_responses import ROUTES as RESPONSES
from tailrace.server.routes_text import ROUTES as OF_TEXT
from tailrace.text.chat import ChatTemplate
from tests.server.hand_made import HandMadeRequest, load_text, make_services
from tests.server.test_tool_choice import BODY, HI, tool, write_template

LEVEL = "{% if reasoning_effort %}Effort: {{ reasoning_effort }}\n{% endif %}"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}No thoughts.\n{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return load_text(tiny_folder).tokenizer


def variables(tokenizer, source, effort, **fields):
    template = ChatTemplate({"default": source + BODY}, tokenizer)
    return template_variables(ChatBody(messages=HI, reasoning_effort=effort, **fields), template)


@pytest.mark.parametrize("effort", EFFORTS)
def test_an_effort_is_what_the_template_has_names_for(tokenizer, effort):
    thinks = effort != "none"
    assert variables(tokenizer, LEVEL, effort) == {"reasoning_effort": effort}
    assert variables(tokenizer, SWITCH, effort) == {"enable_thinking": thinks}
    assert variables(tokenizer, "{{ thinking }}", effort) == {"thinking": thinks}
    level = {"reasoning_effort": effort} if thinks else {}
    assert variables(tokenizer, LEVEL + SWITCH, effort) == {"enable_thinking": thinks} | level


def test_the_templates_own_variables_go_first(tokenizer):
    sent = {"enable_thinking": True, "date": "May"}
    found = variables(tokenizer, LEVEL + SWITCH + "{{ date }}", "none", chat_template_kwargs=sent)
    assert found == sent
    assert variables(tokenizer, SWITCH, None, chat_template_kwargs=sent) == sent


def test_an_effort_that_changes_nothing_is_refused_but_for_none(tokenizer):
    with pytest.raises(RequestError, match="no variable for it") as caught:
        variables(tokenizer, "", "low")
    assert caught.value.param == "reasoning_effort"
    assert not variables(tokenizer, "", "none")
    with pytest.raises(RequestError, match="send one of none, minimal"):
        variables(tokenizer, LEVEL, "utmost")


def test_the_template_of_tools_has_its_own_names(tokenizer):
    template = ChatTemplate({"default": BODY, "tool_use": LEVEL + BODY}, tokenizer)
    body = ChatBody(messages=HI, tools=[tool()], reasoning_effort="low")
    assert template_variables(body, template) == {"reasoning_effort": "low"}
    body.tool_choice = "none"
    with pytest.raises(RequestError):
        template_variables(body, template)


ROUTES = {**OPENAI, **MESSAGES, **RESPONSES, **OF_TEXT}
ASKING = [
    ("/v1/chat/completions", {"messages": HI}, {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/tokenize", {"messages": HI}, {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/v1/responses", {"input": "Hi"}, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (
        "/v1/responses/input_tokens",
        {"input": "Hi"},
        {"reasoning": {"effort": "low"}},
        "reasoning.effort",
    ),
]


def sent(services, path, body):
    async def main():
        request = HandMadeRequest(body | {"model": "tiny"})
        await ROUTES["POST", path](services, request)
        return request.json

    return asyncio.run(main())


@pytest.mark.parametrize(("path", "body", "effort", "param"), ASKING, ids=[a[0] for a in ASKING])
def test_every_route_of_chats_takes_an_effort(tmp_path, tiny_folder, path, body, effort, param):
    services = make_services(None, text=load_text(write_template(tmp_path, LEVEL + BODY)))
    plain, asked = sent(services, path, body), sent(services, path, body | effort)
    if "completions" in path or path == "/v1/responses":
        without, with_effort = (request.token_ids for request in services.engine.requests)
        assert with_effort == [*b"Effort: low\n", *without]
    else:
        count = "count" if "count" in plain else "input_tokens"
        assert asked[count] - plain[count] == len("Effort: low\n")
    if path == "/v1/responses":
        assert plain["reasoning"] == {"effort": None, "summary": None}
        assert asked["reasoning"] == {"effort": "low", "summary": None}
    with pytest.raises(RequestError) as caught:
        sent(make_services(tiny_folder), path, body | effort)
    assert caught.value.message.startswith(f"{param} is 'low'")
    assert (caught.value.status, caught.value.param) == (400, param)


def test_thinking_that_is_disabled_is_no_effort(tmp_path):
    services = make_services(None, text=load_text(write_template(tmp_path, SWITCH + BODY)))
    counts = {
        kind: sent(
            services,
            "/v1/messages/count_tokens",
            {"messages": HI, **({"thinking": {"type": kind}} if kind else {})},
        )["input_tokens"]
        for kind in (None, "adaptive", "disabled")
    }
    assert counts[None] == counts["adaptive"] == counts["disabled"] - len("No thoughts.\n")


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
def test_a_summary_of_thoughts_is_given_only_if_there_is_one(tiny_folder, name):
    services = make_services(tiny_folder)
    answer = sent(services, "/v1/responses", {"input": "Hi", "reasoning": {name: "auto"}})
    assert answer["reasoning"]["summary"] is None
    with pytest.raises(RequestError) as caught:
        sent(services, "/v1/responses", {"input": "Hi", "reasoning": {name: "detailed"}})
    assert (caught.value.status, caught.value.param) == (400, f"reasoning.{name}")
