"""Which templates may be begun early, and after whose messages."""

import pytest

from tailrace.text.chat import ChatTemplate
from tailrace.text.incremental import Span
from tailrace.text.steady_template import begins_with, steady_roles
from tailrace.text.tokenizer import Tokenizer
from tests.support.tiny import write_tiny_tokenizer

OPEN = "<|im_start|>{{ m.role }}\n"
EVERY = "{% for m in messages %}" + OPEN + "{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "plain": (EVERY, {"system", "user", "assistant"}),
    "counts": ("{{ messages | length }} messages\n" + EVERY, set()),
    "cuts thoughts of earlier turns": (
        "{% for m in messages %}" + OPEN + "{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}",
        {"system", "user"},
    ),
    "moves the system's text to the last user's": (
        "{% for m in messages if m.role != 'system' %}" + OPEN + "{% if loop.last and "
        "messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}{{ m.content }}"
        "<|im_end|>\n{% endfor %}",
        set(),
    ),
    "takes no system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + EVERY,
        {"user", "assistant"},
    ),
    "refuses everything": ("{{ raise_exception('no') }}", set()),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steady")
    write_tiny_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_steady_after_those_whose_text_later_messages_leave_alone(tokenizer, name):
    source, wanted = TEMPLATES[name]
    assert steady_roles(ChatTemplate({"default": source}, tokenizer)) == wanted


def test_spans_begin_with_their_beginnings_only():
    whole = [Span("<s>", True), Span("Hello", False), Span("<e>", True)]
    assert begins_with(whole, [Span("<s>", True), Span("Hel", False)])
    assert begins_with(whole, whole)
    for other in (
        [],
        [Span("<s>", True), Span("Hel", True)],
        [Span("<x>", True), Span("Hel", False)],
        [Span("<s>", True), Span("Help", False)],
        [*whole, Span("x", False)],
    ):
        assert not begins_with(whole, other)
