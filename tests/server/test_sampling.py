"""Sampling fields: every limit, refused by name."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config import ServerConfig
from tailrace.errors import RequestError
from tailrace.server.protocol import CompletionBody
from tailrace.server.sampling import (
    INT64_MAX,
    INT64_MIN,
    Limits,
    check_ids,
    fit,
    for_choice,
    read_logprobs,
    read_max_tokens,
    read_n,
    read_sampling,
    read_terms,
)
from tailrace.types import SamplingParams

LIMITS = Limits(ServerConfig(), vocab_size=259, context_length=512)


def body(**fields):
    return CompletionBody(**fields)


def test_an_empty_body_means_openais_defaults():
    assert read_sampling(body(), LIMITS) == SamplingParams(max_tokens=1)


def test_every_field_arrives():
    sent = body(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"65": 100, "66": -100},
        stop_token_ids=[10],
        ignore_eos=True,
        min_tokens=3,
    )
    assert read_sampling(sent, LIMITS, logprobs=2, prompt_logprobs=0) == SamplingParams(
        max_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={65: 100.0, 66: -100.0},
        stop_token_ids=(10,),
        ignore_eos=True,
        min_tokens=3,
        logprobs=2,
        prompt_logprobs=0,
    )


@pytest.mark.parametrize(("sent", "used"), [(-1, 0), (0, 0), (5, 5), (10**6, 259)])
def test_top_k_minus_one_is_off_and_the_vocabulary_is_enough(sent, used):
    assert read_sampling(body(top_k=sent), LIMITS).top_k == used


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**64),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", INT64_MAX + 1),
        ("seed", INT64_MIN - 1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("min_tokens", -1),
        ("min_tokens", 513),
        ("logit_bias", {"259": 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"1_0": 1.0}),
        ("logit_bias", {"٣": 1.0}),
        ("logit_bias", {"1": 101.0}),
        ("logit_bias", {str(i): 0.0 for i in range(1025)}),
        ("stop_token_ids", [259]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 1025),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        read_sampling(body(**{name: value}), LIMITS)
    assert (caught.value.param, caught.value.status) == (name, 400)
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.0), ("temperature", 2.0), ("top_p", 1.0), ("min_p", 1.0)]
)
def test_the_ends_of_a_range_belong_to_it(name, value):
    assert getattr(read_sampling(body(**{name: value}), LIMITS), name) == value


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_exactly_the_floats_in_range_get_past_the_temperature(value):
    if 0 <= value <= 2:
        assert read_sampling(body(temperature=value), LIMITS).temperature == value
    else:
        with pytest.raises(RequestError, match="temperature"):
            read_sampling(body(temperature=value), LIMITS)


def test_stop_strings_come_as_one_or_many():
    assert read_terms(body(stop="a"), LIMITS).text_rules.stops == ("a",)
    assert read_terms(body(stop=["a", "b"]), LIMITS).text_rules.stops == ("a", "b")
    sent = body(include_stop_str_in_output=True, skip_special_tokens=False)
    rules = read_terms(sent, LIMITS).text_rules
    assert (rules.stops, rules.include_stop, rules.skip_special_tokens) == ((), True, False)


@pytest.mark.parametrize("stop", ["", ["a", ""], "x" * 257, ["a"] * 17])
def test_bad_stop_strings_are_refused(stop):
    with pytest.raises(RequestError) as caught:
        read_terms(body(stop=stop), LIMITS)
    assert caught.value.param == "stop"


def test_counts_are_capped_before_any_fan_out():
    assert read_n(body(n=16), LIMITS) == 16
    for wrong in (0, 17):
        with pytest.raises(RequestError, match=f"n is {wrong}"):
            read_n(body(n=wrong), LIMITS)
    with pytest.raises(RequestError, match="logprobs is 21: must be at most 20"):
        read_logprobs("logprobs", 21, LIMITS)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        read_max_tokens("max_tokens", 0)
    assert read_max_tokens("max_tokens", 0, lowest=0) == 0
    with pytest.raises(RequestError, match="priority"):
        read_terms(body(priority=2**40), LIMITS)
    with pytest.raises(RequestError, match="cache_salt has 257"):
        read_terms(body(cache_salt="x" * 257), LIMITS)


def fitted(prompt_tokens, max_tokens, default, *, min_tokens=0):
    sampling = SamplingParams(max_tokens=1, min_tokens=min_tokens)
    return fit(
        sampling, prompt_tokens, max_tokens, LIMITS, default=default, prompt_name="prompt"
    ).max_tokens


def test_an_omitted_max_tokens_is_what_fits_or_the_default_if_that_is_less():
    assert fitted(500, None, None) == 12
    assert fitted(500, None, 256) == 12
    assert fitted(12, None, 256) == 256
    assert fitted(511, 1, 256) == 1


@pytest.mark.parametrize(
    ("prompt", "maximum", "param", "numbers"),
    [(512, None, "prompt", ("512",)), (500, 13, "max_tokens", ("500", "13", "513", "512", "12"))],
)
def test_what_exceeds_the_context_is_refused_with_the_numbers(prompt, maximum, param, numbers):
    with pytest.raises(RequestError) as caught:
        fitted(prompt, maximum, 256)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    assert all(number in caught.value.message for number in numbers)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError) as caught:
        fitted(10, 4, None, min_tokens=5)
    assert caught.value.param == "min_tokens"


def test_each_choice_draws_from_a_seed_of_its_own_and_the_first_keeps_it():
    sampling = SamplingParams(max_tokens=1, seed=42)
    seeds = [for_choice(sampling, choice).seed for choice in range(16)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 16
    assert all(INT64_MIN <= seed <= INT64_MAX for seed in seeds)
    assert seeds == [for_choice(sampling, choice).seed for choice in range(16)]
    unseeded = msgspec.structs.replace(sampling, seed=None)
    assert for_choice(unseeded, 3).seed is None


def test_ids_outside_the_vocabulary_are_refused_by_value():
    check_ids([0, 258], 259, "prompt")
    with pytest.raises(RequestError, match="token id 259; the vocabulary has ids 0 to 258"):
        check_ids([1, 259, -5], 259, "prompt")
