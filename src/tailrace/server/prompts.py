"""Prompts to token ids: what a body holds, checked and encoded, long texts off the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tailrace.errors import RequestError
from tailrace.server.sampling import check_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.server.early_encoding import EarlyEncoding
    from tailrace.server.protocol import PromptInput
    from tailrace.server.sampling import Limits
    from tailrace.text.tokenizer import Tokenizer

MAX_PROMPTS = 128
MAX_SEQUENCES = 256
"""Prompts times choices of one request."""
INLINE_CHARS = 8192
"""Encoding so many characters takes about a millisecond; more would stall the other streams."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    token_ids: list[int]
    text: str | None = None
    """As sent; None where ids were sent, or where only a part of it was kept."""


def split_prompts(sent: PromptInput | None, param: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a body, one or many.

    Raises:
        RequestError: There is none, or too many, or texts and ids are mixed.
    """
    if sent is None:
        raise RequestError(f"{param} is missing: send a text or token ids", param=param)
    if isinstance(sent, str):
        return [sent]
    if sent and all(isinstance(part, int) for part in sent):
        return [[part for part in sent if isinstance(part, int)]]
    prompts = [part for part in sent if not isinstance(part, int)]
    if not sent or len(prompts) != len(sent) or len({isinstance(p, str) for p in prompts}) > 1:
        raise RequestError(
            f"{param} is empty or mixes texts and ids: send a text, token ids, or a list of either",
            param=param,
        )
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"{param} holds {len(prompts)} prompts; the limit is {MAX_PROMPTS}: send several "
            "requests",
            param=param,
        )
    return prompts


def check_fan_out(prompts: int, choices: int) -> int:
    """Return the number of sequences that a request means.

    Raises:
        RequestError: It is above `MAX_SEQUENCES`.
    """
    if prompts * choices > MAX_SEQUENCES:
        raise RequestError(
            f"{prompts} prompts times n = {choices} are {prompts * choices} sequences; the limit "
            f"is {MAX_SEQUENCES}: send several requests",
            param="n",
        )
    return prompts * choices


async def off_loop_if(is_long: bool, work: Callable[[], _T]) -> _T:
    """Run `work`, on a thread where it is long."""
    return await asyncio.to_thread(work) if is_long else work()


async def encode_prompts(
    sent: list[str | list[int]],
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    add_special_tokens: bool,
    keep_last: int | None,
    parse_special: bool = True,
    param: str = "prompt",
    early: EarlyEncoding[str] | None = None,
) -> list[Prompt]:
    """Return the prompts' ids.

    A text counts as written by whoever renders templates, so control tokens spelled in it count,
    unless `parse_special` says otherwise.

    Args:
        sent: As `split_prompts` returned them.
        tokenizer: The model's.
        limits: Of the model.
        add_special_tokens: Whether texts get what the model wants around them, such as a BOS.
        keep_last: How many of each prompt's last tokens to keep; None keeps all.
        parse_special: Whether control tokens spelled in texts count as such.
        param: The body's field, for messages.
        early: What was encoded while the body came.

    Raises:
        RequestError: A prompt is empty, no valid Unicode, has ids outside the vocabulary, or is
            longer than any context, which is seen without encoding it.
    """

    def encode() -> list[list[int]]:
        return [
            tokenizer.encode(
                part, add_special_tokens=add_special_tokens, parse_special=parse_special
            )
            if isinstance(part, str)
            else part
            for part in sent
        ]

    texts = [part for part in sent if isinstance(part, str)]
    if keep_last is None:
        for text in texts:
            check_length(tokenizer.fewest_tokens(text), limits, param)
    encoded: list[list[int]] | None = None
    if early is not None and parse_special and len(sent) == len(texts) == 1:
        ids = await early.take(texts[0])
        if ids is not None:
            encoded = [tokenizer.framed(ids, add_special_tokens=add_special_tokens)]
    if encoded is None:
        encoded = await off_loop_if(sum(map(len, texts)) > INLINE_CHARS, encode)
    return [
        _prompt(part, ids, limits, keep_last, param)
        for part, ids in zip(sent, encoded, strict=True)
    ]


def check_length(fewest_tokens: int, limits: Limits, param: str) -> None:
    """Refuse a prompt that leaves no room for an answer, before it is encoded.

    Args:
        fewest_tokens: That the prompt has at least; see `Tokenizer.fewest_tokens`.
        limits: Of the model.
        param: The body's field, for messages.

    Raises:
        RequestError: As `fit` would, were the prompt encoded.
    """
    if fewest_tokens >= limits.context_length:
        raise RequestError(
            f"the prompt has at least {fewest_tokens} tokens; the context holds "
            f"{limits.context_length}, one of them at least for the answer: shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def keep_last_tokens(token_ids: list[int], keep_last: int | None) -> list[int]:
    """Return the end of a prompt, where the client asked for a cut (`truncate_prompt_tokens`).

    Raises:
        RequestError: `keep_last` is below 1.
    """
    if keep_last is None:
        return token_ids
    if keep_last < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {keep_last}: must be at least 1",
            param="truncate_prompt_tokens",
        )
    return token_ids[-keep_last:]


def _prompt(
    sent: str | list[int], ids: list[int], limits: Limits, keep_last: int | None, param: str
) -> Prompt:
    if not ids:
        raise RequestError(
            f"{param} has no tokens: send at least one character or token id", param=param
        )
    if not isinstance(sent, str):
        check_ids(ids, limits.vocab_size, param)
    kept = keep_last_tokens(ids, keep_last)
    is_whole = len(kept) == len(ids) and isinstance(sent, str)
    return Prompt(kept, sent if is_whole and isinstance(sent, str) else None)
