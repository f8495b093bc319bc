from __future__ import annotations

import asyncio
import json

import pytest

from tailrace.errors import RequestError
from tailrace.server.routes_openai import ROUTES
from tailrace.text.grammar import GrammarCompiler
from tests.server.fake_engine import Script
from tests.server.hand_made import HandMadeRequest, load_text, make_services
from tests.support.tiny import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
HERMES = "{% if tools %}Tools: {{ tools | tojson }}<tool_call>\n{% endif %}" + BODY
LLAMA = (
    '{% if tools %}{{ tools | tojson }} {"name": x, "parameters": y}{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def tool(name="get_weather", **function):
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"type": "string"}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def written(name="get_weather", arguments='{"city": "Linz"}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def write_template(folder, template):
    write_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return load_text(write_template(tmp_path_factory.mktemp("hermes"), HERMES))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load_text(write_template(tmp_path_factory.mktemp("llama"), LLAMA))


@pytest.fixture(scope="module")
def compiler(tiny_folder):
    return GrammarCompiler(tiny_folder, VOCAB_SIZE, [EOS_ID])


@pytest.fixture
def chat(hermes):
    """Send one chat; return the request with what was sent, and the engine's one request."""

    def chat(output="", *, text=None, **fields):
        async def main():
            services = make_services(
                None, {"": Script(output)}, text=text or hermes, context_length=8192
            )
            request = HandMadeRequest({"messages": HI, "tools": [tool(), tool("other")], **fields})
            await ROUTES["POST", CHAT](services, request)
            return request, services.engine.requests[0]

        return asyncio.run(main())

    return chat


@pytest.fixture
def refused(chat):
    def refused(**fields):
        with pytest.raises(RequestError) as caught:
            chat(**fields)
        assert caught.value.status == 400
        return caught.value

    return refused


def accepts(compiler, grammar, text) -> bool:
    state = compiler.compile(grammar).start()
    for byte in text.encode():
        if not state.mask()[byte // 32] >> (byte % 32) & 1:
            return False
        state.take(byte)
    return state.is_complete or bool(state.mask()[EOS_ID // 32] >> (EOS_ID % 32) & 1)


def assembled(events):
    """Put a stream's deltas together as clients do."""
    content, calls, reasons = "", {}, []
    for chunk in events[1:-1]:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", []):
            call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
            if "id" in piece:
                assert piece["type"] == "function"
                assert "id" not in call
                call["id"], call["name"] = piece["id"], piece["function"]["name"]
            call["arguments"] += piece["function"]["arguments"]
        reasons.append(choice["finish_reason"])
    assert [reason for reason in reasons if reason] == reasons[-1:]
    return content, list(calls.values()), reasons[-1]


def test_a_call_is_told_from_the_text(chat):
    request, _ = chat(f"Let me see.\n{written()}")
    [choice] = request.json["choices"]
    message = choice["message"]
    assert message["content"] == "Let me see."
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Linz"}'}
    assert "index" not in call
    assert choice["finish_reason"] == "tool_calls"


def test_a_call_alone_has_null_content(chat):
    request, _ = chat(written())
    assert request.json["choices"][0]["message"]["content"] is None


def test_text_without_a_call_is_as_ever(chat):
    request, _ = chat("Just text.")
    [choice] = request.json["choices"]
    assert choice["message"]["content"] == "Just text."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_usage_so_far_counts_tokens_that_are_held_back(chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    request, _ = chat(f"See.\n{written()}", stream=True, stream_options=options)
    *chunks, last, _done = request.events
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert told[-1] == last["usage"]["completion_tokens"] > len(chunks)


def test_a_malformed_call_is_content(chat):
    text = '<tool_call>{"name": "get_weather", "arguments": {]}</tool_call>'
    request, _ = chat(text)
    [choice] = request.json["choices"]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"


def test_a_stream_has_a_calls_name_first_and_its_arguments_in_pieces(chat):
    output = f"See.\n{written()}\n{written('other', '{}')}"
    request, _ = chat(output, stream=True)
    content, calls, reason = assembled(request.events)
    assert content == "See."
    assert [call["name"] for call in calls] == ["get_weather", "other"]
    assert [call["arguments"] for call in calls] == ['{"city": "Linz"}', "{}"]
    assert len({call["id"] for call in calls}) == 2
    assert reason == "tool_calls"
    pieces = [
        piece
        for chunk in request.events[1:-1]
        for piece in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len(pieces) > 5  # they came as they were written


def test_a_call_that_max_tokens_cuts_is_told_so_far_and_says_length(chat):
    request, _ = chat(written(), stream=True, max_tokens=60)
    _, [call], reason = assembled(request.events)
    assert reason == "length"
    assert '{"city": "Linz"}'.startswith(call["arguments"])
    request, _ = chat(written(), max_tokens=60)
    [choice] = request.json["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    [whole] = choice["message"]["tool_calls"]
    assert whole["function"] == {"name": call["name"], "arguments": call["arguments"]}


def test_a_single_call_where_calls_are_not_parallel(chat):
    output = f"{written()}\n{written('other', '{}')}"
    for fields in ({"parallel_tool_calls": False}, {"tool_choice": named("get_weather")}):
        request, _ = chat(output, **fields)
        calls = request.json["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["get_weather"]
        request, _ = chat(output, stream=True, **fields)
        assert [call["name"] for call in assembled(request.events)[1]] == ["get_weather"]


def test_every_choice_has_calls_of_its_own(chat):
    request, _ = chat(written(), n=2)
    first, second = request.json["choices"]
    assert first["message"]["tool_calls"][0]["id"] != second["message"]["tool_calls"][0]["id"]


def test_auto_leaves_the_output_free_and_tells_the_template(chat):
    _, sent = chat()
    assert sent.sampling.grammar == ""
    assert b"get_weather" in bytes(i for i in sent.token_ids if i < 256)


def test_none_hides_the_tools_and_leaves_text_alone(chat):
    request, sent = chat(written(), tool_choice="none")
    assert request.json["choices"][0]["message"]["content"] == written()
    assert b"get_weather" not in bytes(i for i in sent.token_ids if i < 256)


def test_required_allows_calls_and_nothing_else(chat, compiler):
    _, sent = chat(written(), tool_choice="required")
    grammar = sent.sampling.grammar
    assert accepts(compiler, grammar, written())
    assert accepts(compiler, grammar, f"{written()}\n{written('other')}")
    assert not accepts(compiler, grammar, "Hello")
    assert not accepts(compiler, grammar, written("third"))
    assert not accepts(compiler, grammar, written(arguments="{}"))


def test_required_with_one_call_ends_behind_it(chat, compiler):
    _, sent = chat(written(), tool_choice="required", parallel_tool_calls=False)
    assert accepts(compiler, sent.sampling.grammar, written())
    assert not accepts(compiler, sent.sampling.grammar, f"{written()}\n{written()}")


def test_a_named_function_is_the_only_one(chat, compiler):
    _, sent = chat(written(), tool_choice=named("other"))
    assert accepts(compiler, sent.sampling.grammar, written("other"))
    assert not accepts(compiler, sent.sampling.grammar, written())


def test_strict_functions_are_enforced_within_free_text(chat, compiler):
    _, sent = chat("", tools=[tool(strict=True)])
    grammar = sent.sampling.grammar
    assert accepts(compiler, grammar, "No call at all.")
    assert accepts(compiler, grammar, f"First\n{written()}\nthen {written()}")
    assert not accepts(compiler, grammar, f"First\n{written(arguments='{}')}")
    assert not accepts(compiler, grammar, f"First\n{written('other')}")


def test_json_or_calls(chat, compiler):
    _, sent = chat("{}", response_format={"type": "json_object"})
    assert accepts(compiler, sent.sampling.grammar, '{"a": 1}')
    assert accepts(compiler, sent.sampling.grammar, written())
    assert not accepts(compiler, sent.sampling.grammar, "text")


def test_llamas_way(chat, llama, compiler):
    output = '{"name": "get_weather", "parameters": {"city": "Linz"}}'
    request, sent = chat(output, text=llama, tool_choice="required")
    [call] = request.json["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Linz"}'
    assert accepts(compiler, sent.sampling.grammar, output)
    assert accepts(compiler, sent.sampling.grammar, f"{output}; {output}")
    assert not accepts(compiler, sent.sampling.grammar, "Hi")
    _, sent = chat(output, text=llama, tools=[tool(strict=True)])
    assert accepts(compiler, sent.sampling.grammar, output)
    assert accepts(compiler, sent.sampling.grammar, "Hi")
    assert not accepts(compiler, sent.sampling.grammar, '{"name": "other"}')


def test_calls_and_their_results_are_rendered_by_the_template(chat):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Linz"}'},
    }
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    _, sent = chat("It rains.", messages=messages)
    prompt = bytes(i for i in sent.token_ids if i < 256).decode()
    assert written() in prompt
    assert "tool\nrain" in prompt


def test_where_the_operator_wants_calls_as_text_they_are(chat, tmp_path):
    text = load_text(write_template(tmp_path, HERMES), calls_are_text=True)
    request, sent = chat(written(), text=text)
    assert request.json["choices"][0]["message"]["content"] == written()
    assert b"get_weather" in bytes(i for i in sent.token_ids if i < 256)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tools": None, "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "any"}),
        ("tool_choice", {"tool_choice": {"type": "function"}}),
        ("tool_choice", {"tool_choice": named("third")}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [tool("no spaces")]}),
        ("tools[0].function.parameters", {"tools": [tool(parameters=3)]}),
        ("tools", {"tools": [tool()] * 129}),
        ("tools", {"tools": [tool(parameters={"type": "objct"})], "tool_choice": "required"}),
        (
            "tools",
            {
                "tools": [
                    tool(f"f{n}", parameters={"properties": {"a": {"multipleOf": n}}})
                    for n in (997, 991)
                ],
                "tool_choice": "required",
            },
        ),
        (
            "response_format",
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
        ),
        ("guided_regex", {"guided_regex": "a"}),
        ("min_tokens", {"tool_choice": "required", "min_tokens": 1}),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(refused, param, fields):
    assert refused(**fields).param == param


def test_tool_choice_none_or_auto_without_tools_is_a_plain_chat(chat):
    for choice in ("none", "auto", None):
        request, _ = chat("Hi", tools=None, tool_choice=choice)
        assert request.json["choices"][0]["message"]["content"] == "Hi"


def test_logprobs_and_ids_come_with_pieces_that_say_nothing(chat):
    request, _ = chat(written(), stream=True, return_token_ids=True)
    ids = [i for chunk in request.events[1:-1] for i in chunk["choices"][0]["token_ids"]]
    assert bytes(i for i in ids if i < 256).decode() == written()


def test_special_tags_are_kept_in_sight_and_named_in_the_grammar(tmp_path, chat):
    write_template(tmp_path, HERMES)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["added_tokens"] += [
        {**spec["added_tokens"][0], "id": VOCAB_SIZE + index, "content": content}
        for index, content in enumerate(("<tool_call>", "</tool_call>"))
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    text = load_text(tmp_path)
    _, sent = chat("", text=text, tool_choice="required")
    special = GrammarCompiler(tmp_path, VOCAB_SIZE + 2, [EOS_ID])
    state = special.compile(sent.sampling.grammar).start()
    state.take(VOCAB_SIZE)
    for byte in b'\n{"name": "other", "arguments": {"city": ""}}\n':
        state.take(byte)
    state.take(VOCAB_SIZE + 1)
    assert not state.error
    assert state.mask()[EOS_ID // 32] >> (EOS_ID % 32) & 1
