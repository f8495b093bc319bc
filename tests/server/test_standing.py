"""Which priority and share a request has, by its key, its body and its header."""

import pytest

from tailrace.access import MAX_PRIORITY, KeyClass, KeyHolder
from tailrace.errors import RequestError
from tailrace.server.standing import Standing, standing_of

HOLDER = KeyHolder(
    name="bob",
    key="secret",
    key_class=KeyClass(name="batch", priority=5, share=2.0, max_sequences=3),
)


@pytest.mark.parametrize(
    ("in_body", "in_header", "priority"),
    [(None, None, 0), (-7, None, -7), (None, "-7", -7), (None, " 12 ", 12), (3, "9", 3)],
)
def test_without_a_named_key_the_request_says_its_priority(in_body, in_header, priority):
    found = standing_of(None, in_body=in_body, in_header=in_header)
    assert found == Standing(priority=priority)


@pytest.mark.parametrize(
    ("in_body", "in_header", "priority"), [(None, None, 5), (5, None, 5), (None, "8", 8)]
)
def test_a_key_has_its_classes_standing_and_may_ask_for_less(in_body, in_header, priority):
    found = standing_of(HOLDER, in_body=in_body, in_header=in_header)
    assert found == Standing(priority=priority, key="bob", share=2.0, max_sequences=3)


@pytest.mark.parametrize(("in_body", "in_header"), [(4, None), (None, "0"), (-1, "9")])
def test_more_than_its_class_is_refused(in_body, in_header):
    with pytest.raises(RequestError, match="'batch'") as caught:
        standing_of(HOLDER, in_body=in_body, in_header=in_header)
    assert caught.value.status == 400
    assert caught.value.param == "priority"


@pytest.mark.parametrize(
    "value", ["", "high", "1.5", "--1", "1e3", "²", str(MAX_PRIORITY + 1), "9" * 5000]
)
def test_a_header_that_is_no_priority_is_400(value):
    with pytest.raises(RequestError, match="X-Tailrace-Priority") as caught:
        standing_of(None, in_body=None, in_header=value)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300
