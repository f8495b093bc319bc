from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.text.tool_calls import (
    CallArguments,
    CallBegins,
    Text,
    ToolCallParser,
    ToolStyle,
    style_of,
    whole_members,
)

HERMES, LLAMA = ToolStyle.HERMES, ToolStyle.LLAMA3_JSON


def parse(style, parts, *, streams, is_cut=False):
    """The text outside calls, and the calls as [name, arguments]."""
    parser = ToolCallParser(style, streams=streams)
    found = [one for part in parts for one in parser.push(part)] + parser.finish(is_cut=is_cut)
    text, calls = "", []
    for one in found:
        match one:
            case Text(piece):
                text += piece
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, piece):
                assert index == len(calls) - 1
                calls[-1][1] += piece
    assert parser.calls == len(calls)
    return text, calls


def call(name="f", arguments='{"a": 1}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES = [
    pytest.param(HERMES, "no call, 1 < 2.\n", ("no call, 1 < 2.\n", []), id="plain"),
    pytest.param(HERMES, call(), ("", [["f", '{"a": 1}']]), id="one"),
    pytest.param(HERMES, f"Look.\n\n{call()}\n", ("Look.", [["f", '{"a": 1}']]), id="text before"),
    pytest.param(
        HERMES,
        f"{call()}\n{call('g', '{}')}",
        ("", [["f", '{"a": 1}'], ["g", "{}"]]),
        id="parallel",
    ),
    pytest.param(HERMES, f"{call()} and so", ("and so", [["f", '{"a": 1}']]), id="text after"),
    pytest.param(
        HERMES, call()[: -len("\n</tool_call>")], ("", [["f", '{"a": 1}']]), id="no closing tag"
    ),
    pytest.param(
        HERMES,
        call("f", '{"x": "</tool_call> }\\" \\\\", "y": [{}]}'),
        ("", [["f", '{"x": "</tool_call> }\\" \\\\", "y": [{}]}']]),
        id="markup within a string",
    ),
    pytest.param(
        HERMES, "<tool_call>hello</tool_call>", ("<tool_call>hello</tool_call>", []), id="no object"
    ),
    pytest.param(HERMES, "<tool_c", ("<tool_c", []), id="half a tag"),
    pytest.param(HERMES, "a <tool_call> ", ("a <tool_call> ", []), id="tag alone"),
    pytest.param(LLAMA, '{"name": "f", "parameters": {}}', ("", [["f", "{}"]]), id="llama"),
    pytest.param(
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {"q": "é"}}\n',
        ("", [["f", '{"q": "é"}']]),
        id="python tag",
    ),
    pytest.param(
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": [1]}}',
        ("", [["f", "{}"], ["g", '{"a": [1]}']]),
        id="llama parallel",
    ),
    pytest.param(LLAMA, 'Say {"name": "f"}', ('Say {"name": "f"}', []), id="llama text"),
    pytest.param(LLAMA, '{"answer": 42}', ('{"answer": 42}', []), id="llama json answer"),
    pytest.param(LLAMA, " ", (" ", []), id="llama space"),
    pytest.param(
        LLAMA, '{"name": "f", "parameters": {}}; so', ("; so", [["f", "{}"]]), id="llama semicolon"
    ),
]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("style", "text", "expected"), CASES)
def test_text_and_calls_are_told_apart(style, text, expected, streams):
    assert parse(style, [text], streams=streams) == expected
    assert parse(style, list(text), streams=streams) == expected


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": }}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {}]',
        "{" * 5000 + "}" * 5000,
    ],
)
def test_a_malformed_call_is_text_where_the_output_is_judged_whole(body):
    text = f"<tool_call>{body}</tool_call>"
    assert parse(HERMES, [text], streams=False) == (text, [])


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("style", [HERMES, LLAMA])
def test_a_name_that_is_no_text_is_no_functions(style, streams):
    body = r'{"name": "f\ud800", "arguments": {"a": 1}}'
    text = f"<tool_call>{body}</tool_call>" if style is HERMES else body
    assert parse(style, [text], streams=streams) == (text, [])
    assert parse(style, list(text), streams=streams) == (text, [])


def test_arguments_are_streamed_as_they_come():
    parser = ToolCallParser(HERMES, streams=True)
    assert parser.push('<tool_call>\n{"name": "f", "argum') == []
    assert parser.push('ents": {"a') == [CallBegins(0, "f"), CallArguments(0, '{"a')]
    assert parser.push('": "x}') == [CallArguments(0, '": "x}')]
    assert parser.push('"}') == [CallArguments(0, '"}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


def test_a_stream_that_is_cut_keeps_what_came_of_the_arguments():
    assert parse(HERMES, [call()[:-15]], streams=True) == ("", [["f", '{"a": 1']])


@pytest.mark.parametrize(
    ("style", "output"),
    [
        (HERMES, f"See.\n{call()}\n" + call("g", '{"x": ["</tool_call> }\\" \\\\"], "y": {}}')),
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": [1, "é}"]}}'),
    ],
    ids=["hermes", "llama"],
)
def test_what_is_cut_is_the_same_whole_and_streamed(style, output):
    """Wherever the limit on tokens falls."""
    open_calls = 0
    for end in range(len(output)):
        cut = output[:end]
        whole = parse(style, [cut], streams=False, is_cut=True)
        assert parse(style, list(cut), streams=True, is_cut=True) == whole
        open_calls += whole != parse(style, [cut], streams=False)
    assert open_calls > 10


def test_what_is_no_object_any_more_is_no_call_that_was_cut():
    text = '<tool_call>{"name": "f", "arguments": {"a": 1]'
    assert parse(HERMES, [text], streams=False, is_cut=True) == (text, [])


def test_arguments_that_break_off_have_the_members_that_are_whole():
    arguments = '{"a": [1, {"b": "}"}] , "ü\\"": 12, "d": {}}'
    for end in range(1, len(arguments) + 1):
        found = json.loads(whole_members(arguments[:end]))
        assert found.items() <= json.loads(arguments).items()
    assert whole_members(arguments) == arguments
    assert whole_members(arguments[:-3]) == '{"a": [1, {"b": "}"}] , "ü\\"": 12}'
    assert whole_members('{"n": 12') == "{}"  # or 125


@pytest.mark.parametrize(
    "arguments",
    ["{", "{ }", "{]", "{1: 2}", '{"a" 1}', '{"a": NaN}', '{"a": 1 2}', '{"a": ' + "[" * 99_999],
    ids=["open", "none", "bracket", "key", "colon", "constant", "two", "deep"],
)
def test_arguments_that_are_no_json_have_no_members(arguments):
    assert whole_members(arguments) == "{}"


def test_arguments_that_come_before_the_name_are_found_when_the_object_is_whole():
    text = '<tool_call>{"arguments": {"a": [1, "}"]}, "name": "f"}</tool_call>'
    for streams in (True, False):
        assert parse(HERMES, list(text), streams=streams) == ("", [["f", '{"a": [1, "}"]}']])


def test_text_is_not_held_back_but_for_what_may_begin_a_call():
    parser = ToolCallParser(HERMES, streams=True)
    assert parser.push("Hello wor") == [Text("Hello wor")]
    assert parser.push("ld <b") == [Text("ld <b")]
    assert parser.push(" <tool_") == []
    assert parser.push("box>") == [Text(" <tool_box>")]


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        '{"name": "f", "arguments": ',
        '{"name":"g","parameters":{"k":',
        '{"arguments": {}, "name": "h"}',
        "{}",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        '\\"',
        ";",
        " ",
        "\n",
        "text",
        "<|python_tag|>",
        "é",
        call(),
        call("g", '{"s": "}\\\\"}'),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=12),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    style=st.sampled_from(ToolStyle),
    streams=st.booleans(),
)
@example(["<tool_call>", '{"name": "f", "arguments": ', "{", "]", " text"], [3], HERMES, True)
@example(["<tool_call>"] * 3 + ["{"] * 3, [12], HERMES, False)
def test_no_cut_changes_what_is_found(pieces, cuts, style, streams):
    text = "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = parse(style, [text], streams=streams)
    assert parse(style, parts, streams=streams) == whole
    assert parse(style, list(text), streams=streams) == whole
    if not streams:
        for _, arguments in whole[1]:
            assert isinstance(json.loads(arguments), dict)


def test_many_false_calls_take_linear_time():
    text = "<tool_call>{" * 20_000
    assert parse(HERMES, [text], streams=False) == (text, [])


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("{% if tools %}<tool_call>{{ tools }}", HERMES),
        ("<|python_tag|>", LLAMA),
        ('Respond {"name": function name, "parameters": dictionary}', LLAMA),
        ("<tool_call><function=", None),
        ("<|im_start|>", None),
    ],
)
def test_the_style_is_known_by_the_template(source, style):
    assert style_of({"default": source}) is style
