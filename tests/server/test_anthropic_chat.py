"""What Anthropic's bodies mean as chats."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import RequestError
from tailrace.server.anthropic_chat import BILLING_HEADER, chat_of, sampled_chat_of
from tailrace.server.anthropic_protocol import CountTokensBody, MessagesBody

HI = {"role": "user", "content": "Hi"}


def text(*texts):
    return [{"type": "text", "text": each} for each in texts]


def turns(**fields):
    return chat_of(CountTokensBody(**fields)).messages


def refusal(**fields):
    with pytest.raises(RequestError) as caught:
        chat_of(CountTokensBody(**fields))
    assert caught.value.status == 400
    assert caught.value.message.startswith(caught.value.param.split(".type")[0].split("[")[0])
    return caught.value.param


def test_the_system_text_comes_first():
    assert turns(messages=[HI], system="Be brief.") == [
        {"role": "system", "content": text("Be brief.")},
        {"role": "user", "content": text("Hi")},
    ]
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, *text("b")]
    assert turns(messages=[HI], system=blocks)[0]["content"] == text("a", "b")


@pytest.mark.parametrize("system", [None, "", [], f"{BILLING_HEADER}: cch=1"])
def test_without_a_system_text_there_is_no_such_message(system):
    assert [turn["role"] for turn in turns(messages=[HI], system=system)] == ["user"]


def test_an_accounting_block_is_not_for_the_model():
    system = text(f"{BILLING_HEADER}: cch=12ab", "Be brief.")
    assert turns(messages=[HI], system=system)[0]["content"] == text("Be brief.")


def test_turns_of_one_role_are_one_turn():
    messages = [
        HI,
        {"role": "user", "content": text("there", "you")},
        {"role": "assistant", "content": "Yes?"},
        HI,
    ]
    assert turns(messages=messages) == [
        {"role": "user", "content": text("Hi", "there", "you")},
        {"role": "assistant", "content": text("Yes?")},
        {"role": "user", "content": text("Hi")},
    ]


def test_a_last_turn_of_the_assistant_is_gone_on_with():
    prefill = {"role": "assistant", "content": "I am"}
    assert chat_of(CountTokensBody(messages=[HI, prefill])).continue_final_message
    assert not chat_of(CountTokensBody(messages=[HI])).continue_final_message


def test_thinking_of_earlier_turns_is_left_out():
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    said = {"role": "assistant", "content": [thought, *text("Yes")]}
    silent = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    assert turns(messages=[HI, said, silent, HI])[1] == {
        "role": "assistant",
        "content": text("Yes"),
    }


def test_tool_use_and_tool_result_are_calls_and_the_tools_turns():
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    again = use | {"id": "t2", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "t2", "content": text("two"), "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    messages = [
        HI,
        {"role": "assistant", "content": [*text("Let me see."), use, again]},
        {"role": "user", "content": [*results, *text("And?")]},
    ]
    assert turns(messages=messages)[1:] == [
        {
            "role": "assistant",
            "content": text("Let me see."),
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": 1}},
                },
                {"id": "t2", "type": "function", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": text("two")},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": text("And?")},
    ]
    assert refusal(messages=messages[:2]) == "messages"


def test_sampling_goes_over_under_openais_names():
    body = MessagesBody(
        messages=[HI],
        max_tokens=7,
        stop_sequences=["a", "b"],
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        seed=4,
        priority=-1,
        cache_salt="mine",
        stream=True,
    )
    chat = sampled_chat_of(body)
    assert (chat.max_tokens, chat.stop, chat.stream) == (7, ["a", "b"], True)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.seed) == (0.5, 0.25, 3, 4)
    assert (chat.priority, chat.cache_salt) == (-1, "mine")


def test_max_tokens_is_wanted():
    with pytest.raises(RequestError, match="max_tokens is missing") as caught:
        sampled_chat_of(MessagesBody(messages=[HI]))
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[1].content", {"messages": [HI, {"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": ["x"]}]}),
        (
            "messages[0].content[1].type",
            {"messages": [{"role": "user", "content": [*text("x"), {"type": "image"}]}]},
        ),
        (
            "messages[0].content[0].text",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        ),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
        ),
        (
            "messages[0].content[0].tool_use_id",
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        ),
        (
            "messages[0].content[0].input",
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]},
        ),
        (
            "messages[0].content[0].content[0].type",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "image"}],
                            }
                        ],
                    }
                ]
            },
        ),
        ("system[0].type", {"messages": [HI], "system": [{"type": "image"}]}),
        ("thinking", {"messages": [HI], "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("mcp_servers", {"messages": [HI], "mcp_servers": [{"url": "https://a"}]}),
        ("container", {"messages": [HI], "container": "c"}),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(param, fields):
    assert refusal(**fields) == param


@pytest.mark.parametrize("kind", ["disabled", "adaptive"])
def test_thinking_that_need_not_be_is_accepted(kind):
    assert turns(messages=[HI], thinking={"type": kind})


NAMES = ("role", "content", "type", "text", "id", "name", "input", "tool_use_id")
WORDS = ("user", "assistant", "text", "tool_use", "tool_result", "thinking", "{}")
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
        chat = chat_of(CountTokensBody(messages=sent))
        assert all(isinstance(message["role"], str) for message in chat.messages)
