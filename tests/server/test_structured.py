from __future__ import annotations

import asyncio
import json
import threading

import pytest
from llguidance import LLMatcher

from tailrace.errors import RequestError
from tailrace.server import structured
from tailrace.server.protocol import ChatBody, CompletionBody
from tailrace.server.routes_generate import ROUTES as GENERATE
from tailrace.server.routes_openai import ROUTES as OPENAI
from tailrace.server.structured import (
    Constraint,
    compiled,
    grammar_of,
    read_constraint,
    read_schema,
)
from tailrace.text.grammar import GrammarCompiler
from tests.server.hand_made import HandMadeRequest, make_services
from tests.support.tiny import EOS_ID, VOCAB_SIZE

CHAT, COMPLETIONS, PLAIN = "/v1/chat/completions", "/v1/completions", "/generate"
ROUTES = {**OPENAI, **GENERATE}
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def send(tiny_folder):
    """Send one body; return the grammars that the engine got, one for each sequence."""

    def send(path, **body):
        async def main():
            services = make_services(tiny_folder)
            await ROUTES["POST", path](services, HandMadeRequest(body))
            assert services.admission.sequences == 0
            return [request.sampling.grammar for request in services.engine.requests]

        return asyncio.run(main())

    return send


@pytest.fixture
def refused(send):
    def refused(path, **body):
        with pytest.raises(RequestError) as caught:
            send(path, **body)
        return caught.value

    return refused


@pytest.fixture(scope="module")
def compiler(tiny_folder):
    return GrammarCompiler(tiny_folder, VOCAB_SIZE, [EOS_ID])


def accepts(compiler, grammar, text) -> bool:
    """Whether a text, and its end, match."""
    state = compiler.compile(grammar).start()
    for byte in text.encode():
        if not state.mask()[byte // 32] >> (byte % 32) & 1:
            return False
        state.take(byte)
    return state.is_complete or bool(state.mask()[EOS_ID // 32] >> (EOS_ID % 32) & 1)


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


ASKED = [
    pytest.param({"response_format": {"type": "json_object"}}, '{"b": []}', "[]", id="object"),
    pytest.param({"response_format": response_format(SCHEMA)}, '{"a": 4}', '{"b": 4}', id="schema"),
    pytest.param({"guided_json": SCHEMA}, '{\n  "a": 4\n}', "{}", id="guided json"),
    pytest.param({"guided_json": json.dumps(SCHEMA)}, '{"a":4}', "{}", id="guided json text"),
    pytest.param(
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "~?"},
        '{"a":~4}',
        '{"a": 4}',
        id="guided white space",
    ),
    pytest.param({"guided_regex": "[a-c]{2}/"}, "ab/", "ad/", id="guided regex"),
    pytest.param({"regex": "[a-c]{2}/"}, "ab/", "ad/", id="SGLang's regex"),
    pytest.param({"ebnf": 'root ::= "a" | "bb"'}, "bb", "ab", id="SGLang's ebnf"),
    pytest.param({"json_schema": '{"type": "integer"}'}, "7", "a", id="SGLang's JSON schema"),
    pytest.param({"guided_choice": ["yes", 'n"o\n']}, 'n"o\n', "no", id="guided choice"),
    pytest.param({"guided_grammar": 'root ::= "x" | "y" [0-9]+'}, "y42", "x4", id="gbnf"),
    pytest.param({"guided_grammar": 'start: "x" | "y" /[0-9]+/'}, "y42", "x4", id="lark"),
    pytest.param({"structured_outputs": {"json": SCHEMA}}, '{"a": 4}', "{}", id="json"),
    pytest.param({"structured_outputs": {"json_object": True}}, "{}", "3", id="json object"),
    pytest.param({"structured_outputs": {"regex": "a+"}}, "aa", "b", id="regex"),
    pytest.param({"structured_outputs": {"choice": ["a"]}}, "a", "aa", id="choice"),
    pytest.param({"structured_outputs": {"grammar": 'start: "a"'}}, "a", "aa", id="grammar"),
    pytest.param(
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        '{"a":4}',
        '{"a": 4}',
        id="dense",
    ),
    pytest.param(
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "~?"}},
        '{"a":~4}',
        '{"a": 4}',
        id="white space",
    ),
]


@pytest.mark.parametrize(("fields", "good", "bad"), ASKED)
def test_what_is_asked_for_reaches_the_engine_as_a_grammar(send, compiler, fields, good, bad):
    [grammar] = send(CHAT, messages=HI, **fields)
    assert accepts(compiler, grammar, good)
    assert not accepts(compiler, grammar, bad)
    assert send(COMPLETIONS, prompt=["a", "b"], n=2, **fields) == [grammar] * 4


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, '{"a": 4}', "{}"),
        ({"json_schema": SCHEMA}, '{"a": 4}', "{}"),
        ({"regex": "a|b"}, "b", "c"),
        ({"ebnf": 'root ::= "a" "b"?'}, "ab", "b"),
    ],
)
def test_sglangs_names_mean_the_same(send, compiler, fields, good, bad):
    [grammar] = send(PLAIN, text="Hi", sampling_params={"max_new_tokens": 5, **fields})
    assert accepts(compiler, grammar, good)
    assert not accepts(compiler, grammar, bad)


def test_the_old_vllm_body_takes_the_guided_fields_too(send, compiler):
    [grammar] = send(PLAIN, prompt="Hi", max_tokens=5, guided_choice=["a", "b"])
    assert accepts(compiler, grammar, "b")


def test_without_a_constraint_there_is_no_grammar(send):
    assert send(CHAT, messages=HI, response_format={"type": "text"}) == [""]
    assert send(PLAIN, prompt="Hi") == [""]


def test_white_space_cannot_go_on_for_ever(send, compiler):
    [grammar] = send(CHAT, messages=HI, guided_json=SCHEMA)
    assert accepts(compiler, grammar, '{\n    "a": 1\n}')
    assert not accepts(compiler, grammar, '{  "a": 1}')
    assert not accepts(compiler, grammar, '{\n\n"a": 1}')
    assert not accepts(compiler, grammar, '{"a":\n' + " " * 33 + "1}")


def deep(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED = [
    ("response_format", {"response_format": {"type": "structural_tag"}}, "are served"),
    ("response_format", {"response_format": {"type": "json_schema"}}, "missing"),
    ("response_format", {"response_format": response_format({"type": "objct"})}, "objct"),
    ("guided_json", {"guided_json": {"not": {}}}, "not"),
    ("guided_json", {"guided_json": {"$ref": "http://127.0.0.1/x"}}, "does not fetch"),
    ("guided_json", {"guided_json": "{"}, "no JSON"),
    ("guided_json", {"guided_json": "[" * 100_000}, "limit"),
    ("guided_json", {"guided_json": "[" * 20_000}, "no JSON"),
    ("guided_json", {"guided_json": [1]}, "list"),
    ("guided_json", {"guided_json": deep(65)}, "nested"),
    ("guided_json", {"guided_json": {"enum": ["x" * 70_000]}}, "limit"),
    ("guided_json", {"guided_json": {"enum": list(range(70_000))}}, "limit"),
    ("guided_json", {"guided_json": {"multipleOf": 1_000_003}}, "multipleOf"),
    ("guided_json", {"guided_json": {"multipleOf": 0.00012345}}, "multipleOf"),
    (
        "guided_json",
        {"guided_json": {"allOf": [{"multipleOf": n} for n in (97, 89, 83)]}},
        "multipleOf",
    ),
    ("guided_json", {"guided_json": {"type": "integer", "multipleOf": 10**400}}, "multipleOf"),
    ("guided_json", {"guided_json": {"type": "integer", "multipleOf": True}}, "multipleOf"),
    ("guided_json", {"guided_json": {"type": "integer", "multipleOf": -(10**4 + 1)}}, "multipleOf"),
    ("guided_regex", {"guided_regex": "(a"}, "regex"),
    ("guided_regex", {"guided_regex": "(?=a)"}, "look"),
    ("guided_regex", {"guided_regex": "((a{9000}){9000}){90}"}, "too many"),
    ("guided_regex", {"guided_regex": "x" * 70_000}, "limit"),
    ("guided_regex", {"guided_regex": ""}, "empty"),
    ("guided_regex", {"guided_regex": 3}, "int"),
    ("guided_choice", {"guided_choice": []}, "list"),
    ("guided_choice", {"guided_choice": ["a", ""]}, "empty"),
    ("guided_choice", {"guided_choice": "a"}, "list"),
    ("guided_grammar", {"guided_grammar": "start: other"}, "other"),
    ("guided_grammar", {"guided_grammar": "root ::= ("}, "neither"),
    ("guided_grammar", {"guided_grammar": "start: %json {}"}, "%json"),
    ("guided_grammar", {"guided_grammar": "(" * 9000}, "limit"),
    ("guided_grammar", {"guided_grammar": "root ::= " + "(" * 8000}, "neither"),
    ("structured_outputs", {"structured_outputs": {}}, "exactly one"),
    ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}, "json and regex"),
    ("structured_outputs", {"structured_outputs": 3}, "int"),
    (
        "structured_outputs.structural_tag",
        {"structured_outputs": {"structural_tag": "{}"}},
        "not served",
    ),
    ("guided_regex", {"guided_regex": "a", "guided_json": {}}, "one of them"),
    ("min_tokens", {"guided_regex": "a", "min_tokens": 2}, "cannot go on"),
    ("ignore_eos", {"guided_regex": "a", "ignore_eos": True}, "cannot go on"),
]


@pytest.mark.parametrize(
    ("param", "fields", "reason"), REFUSED, ids=[str(number) for number in range(len(REFUSED))]
)
def test_what_cannot_be_enforced_is_400_with_the_reason(refused, param, fields, reason):
    error = refused(COMPLETIONS, prompt="Hi", **fields)
    assert (error.status, error.param) == (400, param)
    assert reason in error.message


def test_sglangs_field_is_named_as_it_was_sent(refused):
    error = refused(PLAIN, text="Hi", sampling_params={"regex": "(a"})
    assert error.param == "sampling_params.regex"
    error = refused(PLAIN, text="Hi", sampling_params={"structural_tag": "x"})
    assert error.param == "sampling_params.structural_tag"


def test_a_clients_options_for_the_library_are_overridden():
    sneaky = {"x-guidance": {"lenient": True}, "type": "object"}
    grammar = grammar_of(Constraint("json", sneaky, "guided_json"))
    assert "lenient" not in grammar


def test_multiples_within_bounds_are_served(compiler):
    schema = {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 5}
    assert read_schema(schema, "x") == schema
    assert accepts(compiler, grammar_of(Constraint("json", schema, "x")), "1.25")


def regex(pattern):
    return LLMatcher.grammar_from_regex(pattern)


@pytest.fixture
def held(tiny_folder, monkeypatch):
    """A compiler that has compiled "a", and stops at "slow" until the event is set."""
    compiler = GrammarCompiler(tiny_folder, VOCAB_SIZE, [EOS_ID])
    compiler.compile(regex("a"))
    begun, go_on = threading.Event(), threading.Event()
    really = compiler._matcher

    def matcher(text):
        if text == regex("slow"):
            begun.set()
            go_on.wait(60)
        return really(text)

    monkeypatch.setattr(compiler, "_matcher", matcher)
    compiler.begun, compiler.go_on = begun, go_on
    yield compiler
    go_on.set()
    compiler.close()


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch, held):
    monkeypatch.setattr(structured, "COMPILE_TIMEOUT_S", 0.5)
    with pytest.raises(RequestError, match=r"takes more than 0.5 s") as caught:
        asyncio.run(compiled(regex("slow"), held, "guided_regex"))
    assert caught.value.status == 400


def test_a_grammar_behind_others_is_not_blamed_for_them(monkeypatch, held):
    monkeypatch.setattr(structured, "COMPILE_TIMEOUT_S", 0.05)
    held.compile_soon(regex("slow"))
    assert held.begun.wait(120)
    with pytest.raises(RequestError, match="others took the compiler") as caught:
        asyncio.run(compiled(regex("b"), held, "guided_regex"))
    error = caught.value
    assert (error.status, error.code, error.retry_after_s) == (503, "service_unavailable", 0.05)
    assert held.waiting == 1  # it does not wait any more


def test_a_grammar_that_is_compiled_already_waits_for_no_other(monkeypatch, held):
    held.compile_soon(regex("slow"))
    assert held.begun.wait(120)
    assert held.compile_soon(regex("a")).done()
    monkeypatch.setattr(structured, "MAX_COMPILING", 1)
    assert asyncio.run(compiled(regex("a"), held, "guided_regex")) == regex("a")


def test_a_grammar_whose_client_has_gone_does_not_wait(held):
    async def main():
        held.compile_soon(regex("slow"))
        asked = asyncio.create_task(compiled(regex("b"), held, "guided_regex"))
        await asyncio.sleep(0.01)
        assert held.waiting == 2
        asked.cancel()
        await asyncio.wait([asked])
        await asyncio.sleep(0.01)
        assert held.waiting == 1

    asyncio.run(main())


def test_a_busy_compiler_takes_no_more():
    class Busy:
        waiting = structured.MAX_COMPILING

        def kept(self, text):
            return None

    with pytest.raises(RequestError, match="wait to be compiled") as caught:
        asyncio.run(compiled("start:", Busy(), "guided_regex"))
    assert caught.value.status == 503


def test_a_server_without_a_compiler_says_so():
    with pytest.raises(RequestError, match="no grammar compiler"):
        asyncio.run(compiled("start:", None, "guided_regex"))


def test_only_given_fields_count():
    assert read_constraint(CompletionBody(prompt="a")) is None
    assert read_constraint(ChatBody(messages=HI, response_format={})) is None
    found = read_constraint(CompletionBody(prompt="a", guided_json=False))
    assert (found.kind, found.value) == ("json", False)


def test_the_compiler_forgets_who_gave_up(tiny_folder):
    compiler = GrammarCompiler(tiny_folder, VOCAB_SIZE, [EOS_ID])
    try:
        for number in range(5):
            compiler.compile_soon(LLMatcher.grammar_from_regex(f"a{number}")).result()
        assert compiler.waiting == 0
    finally:
        compiler.close()
