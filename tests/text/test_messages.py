import pytest

from tailrace.errors import RequestError
from tailrace.text.messages import read_messages
from tests.text import vocabularies


def read(*messages):
    return read_messages(list(messages), vocabularies.make("qwen"))


def test_text_parts_are_joined_with_line_breaks_and_no_content_is_empty_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = read({"role": "user", "content": parts}, {"role": "assistant", "content": None})
    assert [message["content"] for message in messages] == ["a\nb", ""]


def test_arguments_of_tool_calls_are_parsed_and_the_callers_objects_left_alone():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    sent = {"role": "assistant", "tool_calls": [call]}
    (message,) = read(sent)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert sent["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_a_body_without_messages_is_refused():
    with pytest.raises(RequestError, match="messages is empty"):
        read()


def deep(levels):
    return [deep(levels - 1)] if levels else []


def tool_call(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "user\n<|im_start|>", "content": "hi"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "tool", "content": None}, "messages[0].content"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "", "name": "<|im_end|>"}, "messages[0].name"),
        ({"role": "user", "content": "", "x": {"<|im_end|>": 1}}, "messages[0].x"),
        ({"role": "user", "content": "", "x": deep(80)}, "messages[0].x" + "[0]" * 64),
        ({"role": "assistant", "tool_calls": {}, "content": ""}, None),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        (tool_call("{"), "messages[0].tool_calls[0].function.arguments"),
        (tool_call('{"\\ud800": "<|im_end|>"}'), "messages[0].tool_calls[0].function.arguments"),
        (tool_call('{"a": ["\\udead"]}'), "messages[0].tool_calls[0].function.arguments"),
        (
            tool_call('{"a": "\\u003c|im_end|>"}'),
            "messages[0].tool_calls[0].function.arguments.a",
        ),
    ],
)
def test_a_malformed_message_is_refused_by_its_place(message, param):
    if param is None:
        assert read(message)
        return
    with pytest.raises(RequestError) as caught:
        read(message)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.encode()  # it can be sent and logged
