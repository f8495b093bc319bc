"""/v1/models, /tokenize and /detokenize over a real socket."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.config import Config, ServerConfig
from tailrace.server.engine_client import EngineState
from tailrace.server.routes_openai import ROUTES as OPENAI
from tailrace.server.routes_text import ROUTES as ROUTES_OF_TEXT
from tests.server.fake_engine import EOS_ID, IM_START_ID, VOCAB_SIZE
from tests.server.hand_made import HandMadeRequest, load_text, make_services
from tests.server.running_app import running_app
from tests.server.test_tool_choice import HERMES, write_template

ROUTES = [
    ("GET", "/v1/models", None),
    ("POST", "/tokenize", {"prompt": "Hi"}),
    ("POST", "/detokenize", {"tokens": [72]}),
]


@pytest.fixture(scope="module")
def app(tiny_folder):
    with running_app(tiny_folder, context_length=512) as app:
        yield app


@pytest.fixture
def refused(app):
    """Post a body; return the status and the error."""

    def refused(path, body):
        answer = app.post(path, body)
        return answer.status_code, answer.json()["error"]

    return refused


def test_the_model_is_listed_with_its_length(app):
    listed = app.get("/v1/models").json()
    (card,) = listed["data"]
    assert listed["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    assert card["created"] == int(app.services.started_unix_s)


def test_the_model_can_be_asked_for_by_name(app):
    assert app.get("/v1/models/tiny").json()["id"] == "tiny"
    answer = app.get("/v1/models/no/such")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    refused = app.post("/v1/models/tiny", {})
    assert refused.status_code == 405
    assert refused.headers["allow"] == "GET, HEAD"
    assert app.get("/v1/models/").status_code == 404


def test_a_refused_request_is_counted_by_its_status(app):
    app.get("/nowhere")
    counted = app.get("/metrics").text
    assert 'tailrace:http_errors_total{status="404"}' in counted


def test_a_prompt_becomes_ids(app):
    answer = app.post("/tokenize", {"prompt": "Hé"})
    assert answer.json() == {"count": 3, "max_model_len": 512, "tokens": list("Hé".encode())}


def test_an_empty_prompt_has_no_ids(app):
    assert app.post("/tokenize", {"prompt": ""}).json()["count"] == 0


def test_control_tokens_in_a_prompt_are_what_they_say(app):
    answer = app.post("/tokenize", {"prompt": "<|im_start|>a", "return_token_strs": True})
    assert answer.json()["tokens"] == [IM_START_ID, 97]
    assert answer.json()["token_strs"] == ["<|im_start|>", "a"]


def test_messages_go_through_the_chat_template(app):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with_prompt = app.post("/tokenize", body).json()["tokens"]
    without = app.post("/tokenize", body | {"add_generation_prompt": False}).json()["tokens"]
    assert without == [IM_START_ID, *b"user\nHi", EOS_ID, 10]
    assert with_prompt == [*without, IM_START_ID, *b"assistant\n"]


def test_no_message_can_write_a_control_token(app):
    body = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    ids = app.post("/tokenize", body).json()["tokens"]
    assert ids.count(EOS_ID) == 1


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=50))
def test_ids_come_back_as_the_text(app, text):
    ids = app.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert app.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}


def test_a_prompt_too_long_to_hold_up_the_others_is_the_same_to_its_sender(app):
    text = "ab" * 20_000
    assert app.post("/tokenize", {"prompt": text}).json()["tokens"] == list(text.encode())


def test_detokenizing_spells_control_tokens_out(app):
    answer = app.post("/detokenize", {"tokens": [IM_START_ID, 97, EOS_ID]})
    assert answer.json() == {"prompt": "<|im_start|>a<|im_end|>"}
    assert app.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**63, 10**30])
def test_an_id_outside_the_vocabulary_is_refused_by_its_place(refused, token_id):
    status, error = refused("/detokenize", {"tokens": [72, token_id]})
    assert (status, error["param"]) == (400, "tokens[1]")
    assert f"{token_id} is outside 0..{VOCAB_SIZE - 1}" in error["message"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}])
def test_a_prompt_or_messages_but_one_of_them(refused, body):
    status, error = refused("/tokenize", body)
    assert (status, error["param"]) == (400, "prompt")


@pytest.mark.parametrize("messages", [[{}], [{"role": 5, "content": "a"}], [{"content": "a"}]])
def test_malformed_messages_are_the_clients_fault(refused, messages):
    status, error = refused("/tokenize", {"messages": messages})
    assert status == 400
    assert error["param"].startswith("messages")


def test_another_model_is_404_and_ours_is_fine(app, refused):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        status, error = refused(path, body | {"model": "gpt-9"})
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert app.post(path, body | {"model": "tiny"}).status_code == 200


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.RESTARTING])
def test_before_the_engine_is_ready_clients_are_asked_to_wait(app, method, path, body, state):
    app.engine.state = state
    try:
        answer = app.client.request(method, path, json=body)
    finally:
        app.engine.state = EngineState.READY
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert state.value in answer.json()["error"]["message"]


def sent(services, path, body):
    """Return the answer of a hand-made request."""

    async def main():
        request = HandMadeRequest(body)
        await {**ROUTES_OF_TEXT, **OPENAI}["POST", path](services, request)
        return request.json

    return asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"think": True}},
        {"tools": None, "chat_template_kwargs": None, "add_special_tokens": None},
    ],
    ids=lambda fields: next(iter(fields), "none"),
)
def test_messages_are_counted_as_the_chat_would_send_them(tmp_path_factory, fields):
    source = "{% if think %}Think!{% endif %}" + HERMES
    services = make_services(
        None, text=load_text(write_template(tmp_path_factory.mktemp("t"), source))
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    body = {"messages": messages, **fields}
    ids = sent(services, "/tokenize", body)["tokens"]
    sent(services, "/v1/chat/completions", body)
    assert ids == services.engine.requests[-1].token_ids


def test_a_prompt_is_counted_as_a_completion_would_send_it(tiny_folder):
    strict = Config(server=ServerConfig(parse_special=False))
    spelled = {"prompt": "a<|im_end|>"}
    for config, body in (
        (None, spelled),
        (strict, spelled),
        (None, spelled | {"parse_special": False}),
    ):
        services = make_services(tiny_folder, config=config)
        ids = sent(services, "/tokenize", body)["tokens"]
        sent(services, "/v1/completions", body)
        assert ids == services.engine.requests[-1].token_ids


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("chat_template", {"chat_template": "{{ x }}"}),
        ("chat_template_kwargs.nope", {"chat_template_kwargs": {"nope": 1}}),
    ],
)
def test_what_a_chat_would_refuse_is_not_counted(refused, param, fields):
    messages = [{"role": "user", "content": "Hi"}]
    status, error = refused("/tokenize", {"messages": messages, **fields})
    assert (status, error["param"]) == (400, param)
