from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.forecast import FIRST_GUESS_TOKENS, AnswerLengths


def seen(*lengths: int) -> AnswerLengths:
    answers = AnswerLengths()
    for length in lengths:
        answers.observe(length)
    return answers


def test_without_experience_the_guess_is_fixed_and_doubles_with_the_answer():
    assert seen().expect(0, 1000) == FIRST_GUESS_TOKENS
    assert seen().expect(200, 1000) == 400
    assert seen().expect(0, 40) == 40


def test_the_guess_is_the_mean_of_the_answers_that_were_longer():
    answers = seen(*[10] * 20, *[100] * 20)
    assert answers.expect(0, 1000) == 55
    assert answers.expect(10, 1000) == 100
    assert answers.expect(100, 1000) == FIRST_GUESS_TOKENS
    assert answers.expect(0, 30) == 30


def test_old_answers_are_forgotten():
    answers = seen(*[1000] * 512, *[10] * 512)
    assert answers.expect(0, 5000) == 10
    assert len(answers._sorted) == 512


@given(
    lengths=st.lists(st.integers(0, 300), max_size=40),
    so_far=st.integers(0, 300),
    limit=st.integers(1, 300),
)
def test_a_guess_is_more_than_there_is_and_within_the_limit(lengths, so_far, limit):
    guess = seen(*lengths).expect(so_far, limit)
    assert so_far < guess <= max(limit, so_far + 1)
