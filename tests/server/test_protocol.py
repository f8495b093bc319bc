"""The wire Structs: what decodes, and what is a wrong type."""

import msgspec
import pytest
from msgspec import UNSET

from tailrace.server.protocol import (
    Answer,
    ChatBody,
    CompletionBody,
    CompletionChoice,
    GenerateBody,
)


def test_unknown_fields_are_ignored_and_null_means_not_given():
    body = msgspec.json.decode(
        b'{"prompt": "Hi", "user": "me", "temperature": null, "stop": null}', type=CompletionBody
    )
    assert body == CompletionBody(prompt="Hi")


@pytest.mark.parametrize(
    "sent", ['"Hi"', '["a", "b"]', "[1, 2]", "[[1, 2], [3]]"], ids=["text", "texts", "ids", "many"]
)
def test_a_prompt_comes_in_four_shapes(sent):
    body = msgspec.json.decode(f'{{"prompt": {sent}}}', type=CompletionBody)
    assert msgspec.json.encode(body.prompt) == sent.replace(" ", "").encode()


@pytest.mark.parametrize(
    ("kind", "sent", "path"),
    [
        (CompletionBody, '{"max_tokens": "5"}', "$.max_tokens"),
        (CompletionBody, '{"max_tokens": 1.5}', "$.max_tokens"),
        (CompletionBody, '{"max_tokens": true}', "$.max_tokens"),
        (CompletionBody, '{"prompt": [1, [2.5]]}', "$.prompt[1][0]"),
        (CompletionBody, '{"logit_bias": {"1": "x"}}', "$.logit_bias[...]"),
        (CompletionBody, '{"stream_options": {"include_usage": 1}}', "$.stream_options"),
        (ChatBody, '{"messages": "Hi"}', "$.messages"),
        (ChatBody, '{"logprobs": 3}', "$.logprobs"),
        (GenerateBody, '{"sampling_params": {"max_new_tokens": []}}', "$.sampling_params"),
    ],
)
def test_a_wrong_type_names_its_place(kind, sent, path):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(sent, type=kind)
    assert f"`{path}" in str(caught.value)


def test_answers_write_none_as_null_and_leave_unset_out():
    choice = CompletionChoice(index=0, text="a")
    answer = Answer(id="x", object="text_completion", created=1, model="m", choices=[choice])
    assert answer.usage is UNSET
    assert msgspec.json.decode(msgspec.json.encode(answer)) == {
        "id": "x",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
    }
