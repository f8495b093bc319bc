"""What bodies of the Responses API mean as chats."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import RequestError
from tailrace.server.responses_chat import chat_of
from tailrace.server.responses_protocol import ResponsesBody, TextConfig

HI = {"role": "user", "content": "Hi"}


def messages(**fields):
    return chat_of(ResponsesBody(**fields)).messages


def test_a_text_is_a_users_message():
    assert messages(input="Hi") == [HI]


def test_instructions_come_first():
    assert messages(input="Hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        HI,
    ]


def test_items_are_messages_and_a_developer_is_the_system():
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "final_answer",
            "content": [
                {"type": "output_text", "text": "Yes", "annotations": []},
                {"type": "refusal", "refusal": "but no"},
            ],
        },
        {"type": None, **HI},
    ]
    assert messages(input=items) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Yes"}, {"type": "text", "text": "but no"}],
        },
        HI,
    ]


def test_calls_and_their_outputs_are_the_assistants_and_the_tools_messages():
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
    items = [
        HI,
        {"role": "assistant", "content": "Let me see."},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "two"}],
        },
        call | {"call_id": "c3"},
    ]
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2, 3)]
    assert messages(input=items)[1:] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
    ]


@pytest.mark.parametrize(
    ("status", "goes_on"),
    [(None, False), ("completed", False), ("in_progress", True), ("incomplete", True)],
)
def test_only_an_unfinished_answer_is_gone_on_with(status, goes_on):
    said = {"role": "assistant", "content": "I am", "status": status}
    assert chat_of(ResponsesBody(input=[HI, said])).continue_final_message is goes_on


def test_sampling_goes_over():
    chat = chat_of(
        ResponsesBody(input="Hi", temperature=0.5, top_p=0.25, seed=3, stop="x", stream=True)
    )
    assert (chat.temperature, chat.top_p, chat.seed, chat.stop) == (0.5, 0.25, 3, "x")
    assert chat.stream


def test_what_asks_for_what_is_always_so_is_accepted():
    assert messages(
        input="Hi",
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        truncation="auto",
        metadata={"a": "b"},
        n=1,
        text=TextConfig({"type": "text"}),
        background=False,
    )


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {}),
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": [{"type": "reasoning", "summary": []}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[1].role", {"input": [HI, {"content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        (
            "input[0].content[0].type",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        ),
        (
            "input[0].content[0].text",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        ),
        ("input[0].name", {"input": [{"type": "function_call", "call_id": "c"}]}),
        (
            "input[0].arguments",
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"},
                ]
            },
        ),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input[0].type", {"input": [{"type": "web_search_call"}]}),
        ("input[0].type", {"input": [{"type": ["message"]}]}),
        ("previous_response_id", {"input": "Hi", "previous_response_id": "resp_1"}),
        ("conversation", {"input": "Hi", "conversation": "conv_1"}),
        ("prompt", {"input": "Hi", "prompt": {"id": "p"}}),
        ("background", {"input": "Hi", "background": True}),
        ("include", {"input": "Hi", "include": ["everything"]}),
        ("truncation", {"input": "Hi", "truncation": "perhaps"}),
        ("metadata", {"input": "Hi", "metadata": {str(i): "" for i in range(17)}}),
        ("metadata", {"input": "Hi", "metadata": {"k": "v" * 513}}),
        ("n", {"input": "Hi", "n": 2}),
        ("max_tokens", {"input": "Hi", "max_tokens": 3}),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(param, fields):
    with pytest.raises(RequestError) as caught:
        chat_of(ResponsesBody(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split("[", 1)[0] in caught.value.message


NAMES = ("role", "content", "type", "text", "call_id", "name", "arguments", "output", "status")
WORDS = (
    "user",
    "assistant",
    "message",
    "input_text",
    "function_call",
    "function_call_output",
    "{}",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(sent=st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), max_size=3))
@settings(max_examples=200, deadline=None)
def test_whatever_is_sent_is_a_chat_or_refused(sent):
    with contextlib.suppress(RequestError):
        chat = chat_of(ResponsesBody(input=sent))
        assert all(isinstance(message["role"], str) for message in chat.messages)
