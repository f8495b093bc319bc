"""Which way serves which number of rows."""

from __future__ import annotations

import pytest

from tailrace.kernels.linear.ways import MANY, Ways, class_words


def of_two() -> Ways[int]:
    return Ways({16: {"a": 1, "b": 2}, MANY: {"c": 3, "b": 4}}, many_rows=99)


@pytest.mark.parametrize(("rows", "way"), [(0, 1), (1, 1), (16, 1), (17, 3), (1 << 20, 3)])
def test_the_first_way_of_each_class_serves_its_rows(rows, way):
    assert of_two().of(rows) == way


def test_another_way_serves_one_class_of_one_layer():
    ways, others = of_two(), of_two()
    ways.serve(MANY, "b")
    assert [ways.of(16), ways.of(17)] == [1, 4]
    assert [ways.serving(16), ways.serving(MANY)] == ["a", "b"]
    assert others.of(17) == 3


def test_what_is_no_way_of_a_class_is_refused():
    ways = of_two()
    with pytest.raises(KeyError):
        ways.serve(16, "c")
    assert ways.serving(16) == "a"


def test_classes_their_words_and_the_rows_that_they_are_timed_with():
    ways = of_two()
    assert ways.classes == [16, MANY]
    assert ways.options(MANY) == ["c", "b"]
    assert [class_words(most) for most in ways.classes] == ["up to 16 rows", "more rows"]
    assert [ways.timed_rows(most) for most in ways.classes] == [16, 99]
