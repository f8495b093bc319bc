"""Sampling fields to `SamplingParams`: every range is checked here, before anything fans out.

Messages name the field as OpenAI does, the value, the limit and what to send instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tailrace.access import MAX_PRIORITY
from tailrace.errors import RequestError
from tailrace.server.unserved import check_unserved
from tailrace.types import SamplingParams

if TYPE_CHECKING:
    from tailrace.config import ServerConfig
    from tailrace.server.protocol import SamplingFields

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_MAX_REPETITION_PENALTY = 100.0
_MAX_BIAS = 100.0


@dataclass(frozen=True)
class Limits:
    """What a request may ask of this server and this model."""

    server: ServerConfig
    vocab_size: int
    context_length: int
    """Most tokens of prompt and output together."""


@dataclass(frozen=True)
class TextRules:
    """How tokens become the text of an answer."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Terms:
    """What a request asks for besides its prompt and its sampling."""

    n: int = 1
    text_rules: TextRules = TextRules()
    priority: int | None = None
    """As the body asks; None: it does not."""
    cache_salt: str = ""
    is_streaming: bool = False
    returns_metrics: bool = False
    """Whether the answer tells where its time went."""


def read_terms(body: SamplingFields, limits: Limits) -> Terms:
    """Return the checked terms.

    Raises:
        RequestError: A value is out of range; it names the field.
    """
    return Terms(
        n=read_n(body, limits),
        text_rules=_text_rules(body, limits),
        priority=None
        if body.priority is None
        else _integer("priority", body.priority, -MAX_PRIORITY, MAX_PRIORITY, 0),
        cache_salt=_cache_salt(body.cache_salt or ""),
        is_streaming=bool(body.stream),
        returns_metrics=bool(body.return_metrics),
    )


def read_sampling(
    body: SamplingFields,
    limits: Limits,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the checked parameters; `max_tokens` is 1 until `fit` sets it per prompt.

    Args:
        body: The body as sent.
        limits: Of the server and the model.
        logprobs: Checked already; routes differ in how it is asked for.
        prompt_logprobs: Likewise.

    Raises:
        RequestError: A value is out of range, or a field is not served; it names the field.
    """
    check_unserved(body)
    top_k = _integer("top_k", body.top_k, -1, INT64_MAX, 0)
    return SamplingParams(
        max_tokens=1,
        temperature=_number("temperature", body.temperature, 0.0, 2.0, 1.0),
        top_p=_top_p(body.top_p),
        top_k=min(max(top_k, 0), limits.vocab_size),
        min_p=_number("min_p", body.min_p, 0.0, 1.0, 0.0),
        seed=None if body.seed is None else _integer("seed", body.seed, INT64_MIN, INT64_MAX, 0),
        presence_penalty=_number("presence_penalty", body.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=_number("frequency_penalty", body.frequency_penalty, -2.0, 2.0, 0.0),
        repetition_penalty=_repetition_penalty(body.repetition_penalty),
        logit_bias=_logit_bias(body.logit_bias or {}, limits.vocab_size),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], limits.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=_integer("min_tokens", body.min_tokens, 0, limits.context_length, 0),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def read_n(body: SamplingFields, limits: Limits) -> int:
    """Return the number of choices.

    Raises:
        RequestError: It is out of range.
    """
    return _integer("n", body.n, 1, limits.server.max_n, 1)


def read_logprobs(name: str, value: int | None, limits: Limits) -> int | None:
    """Return how many alternatives are wanted; None: no log-probabilities at all.

    Raises:
        RequestError: It is out of range.
    """
    if value is None:
        return None
    return _integer(name, value, 0, min(limits.server.max_logprobs, limits.vocab_size), 0)


def read_max_tokens(name: str, value: int | None, *, lowest: int = 1) -> int | None:
    """Return the asked-for output length; `fit` checks it against the prompt.

    Raises:
        RequestError: It is below `lowest`.
    """
    return None if value is None else _integer(name, value, lowest, INT64_MAX, 0)


def fit(
    sampling: SamplingParams,
    prompt_tokens: int,
    max_tokens: int | None,
    limits: Limits,
    *,
    default: int | None,
    prompt_name: str,
    max_tokens_name: str = "max_tokens",
) -> SamplingParams:
    """Set `max_tokens` for one prompt; nothing is ever cut to fit.

    Args:
        sampling: As `read_sampling` returned it.
        prompt_tokens: Of this prompt.
        max_tokens: As asked for.
        limits: Of the server and the model.
        default: Taken where none was asked for, capped to what fits; None: all that fits.
        prompt_name: The body's field that held the prompt.
        max_tokens_name: The body's field that held `max_tokens`.

    Raises:
        RequestError: Prompt and output exceed the context, or `min_tokens` exceeds the output.
    """
    room = limits.context_length - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens; the context holds {limits.context_length}, "
            "one of them at least for the answer: shorten the prompt",
            param=prompt_name,
            code="context_length_exceeded",
        )
    if max_tokens is None:
        max_tokens = room if default is None else min(default, room)
    if max_tokens > room:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and {max_tokens_name} is {max_tokens}, "
            f"together {prompt_tokens + max_tokens}; the context holds {limits.context_length}: "
            f"shorten the prompt, or lower {max_tokens_name} to {room}",
            param=max_tokens_name,
            code="context_length_exceeded",
        )
    if sampling.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, but at most {max_tokens} tokens are generated "
            f"({max_tokens_name}): lower the former or raise the latter",
            param="min_tokens",
        )
    return msgspec.structs.replace(sampling, max_tokens=max_tokens)


def for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of one of n choices: each draws from a seed of its own.

    Choice 0 keeps the seed, so that `n` does not change what a seed means.
    """
    if sampling.seed is None or choice == 0:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}/{choice}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(sampling, seed=int.from_bytes(digest, "big", signed=True))


def check_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Refuse ids that the model does not have.

    Raises:
        RequestError: One is outside the vocabulary.
    """
    # `min` and `max` scan in C; which id it was matters only once one is wrong.
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"{param} holds the token id {wrong}; the vocabulary has ids 0 to {vocab_size - 1}",
            param=param,
        )


def _number(name: str, value: float | None, low: float, high: float, default: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}: send {low:g} to {high:g}", param=name)
    return float(value)


def _integer(name: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if value < low:
        raise RequestError(f"{name} is {value}: must be at least {low}", param=name)
    if value > high:
        raise RequestError(f"{name} is {value}: must be at most {high}", param=name)
    return value


def _top_p(value: float | None) -> float:
    checked = _number("top_p", value, 0.0, 1.0, 1.0)
    if checked == 0.0:
        raise RequestError(
            "top_p is 0: send more than 0 (for greedy output set temperature to 0)", param="top_p"
        )
    return checked


def _repetition_penalty(value: float | None) -> float:
    checked = _number("repetition_penalty", value, 0.0, _MAX_REPETITION_PENALTY, 1.0)
    if checked == 0.0:
        raise RequestError(
            "repetition_penalty is 0: send more than 0 (1 changes nothing)",
            param="repetition_penalty",
        )
    return checked


def _logit_bias(sent: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(sent) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(sent)} entries; the limit is {MAX_LOGIT_BIAS}",
            param="logit_bias",
        )
    return {
        _bias_id(key, vocab_size): _number("logit_bias", value, -_MAX_BIAS, _MAX_BIAS, 0.0)
        for key, value in sent.items()
    }


def _bias_id(key: str, vocab_size: int) -> int:
    # `isdecimal` alone would let other scripts' digits pass, and int() takes "1_0" and " 1".
    token_id = int(key) if key.isascii() and key.isdecimal() and len(key) <= 20 else -1
    if not 0 <= token_id < vocab_size:
        raise RequestError(
            f"logit_bias has the key {key[:40]!r}; keys are token ids, 0 to {vocab_size - 1}",
            param="logit_bias",
        )
    return token_id


def _stop_token_ids(sent: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(sent) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(sent)} entries; the limit is {MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    check_ids(sent, vocab_size, "stop_token_ids")
    return tuple(sent)


def _text_rules(body: SamplingFields, limits: Limits) -> TextRules:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > limits.server.max_stop_strings:
        raise RequestError(
            f"{len(stops)} stop strings were sent; the limit is {limits.server.max_stop_strings}",
            param="stop",
        )
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop string {index} has {len(stop)} characters: send 1 to {MAX_STOP_CHARS}",
                param="stop",
            )
    return TextRules(
        stops=tuple(stops),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _cache_salt(salt: str) -> str:
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise RequestError(
            f"cache_salt has {len(salt)} characters; the limit is {MAX_CACHE_SALT_CHARS}",
            param="cache_salt",
        )
    return salt
