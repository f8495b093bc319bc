"""Log-probabilities in OpenAI's two forms, and prompt log-probabilities in vLLM's."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from tailrace.server.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.text.tokenizer import Tokenizer
    from tailrace.types import TokenLogprobs

# JSON has no infinity; a token that cannot come is as good as this unlikely.
_LOWEST = -9999.0


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return a token as text, or as "bytes:\xe4\xbd" where it is no whole UTF-8 on its own."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionScores:
    """The older form, one choice at a time: `text_offset` runs on from piece to piece.

    An offset is the place in the choice's text of the first character that the token adds to; the
    bytes of a character that takes several tokens all point to it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, scores: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Return the form for generated tokens."""
        return self._form([score.token_id for score in scores], scores)

    def take_prompt(
        self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Return the form for an echoed prompt, whose first token has no score."""
        return self._form(token_ids, scores)

    def _form(
        self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[token_label(self._tokenizer, token_id) for token_id in token_ids],
            token_logprobs=[None if s is None else _finite(s.logprob) for s in scores],
            top_logprobs=[None if s is None else self._top(s) for s in scores],
            text_offset=[self._advance(token_id) for token_id in token_ids],
        )

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """Return the alternatives by their text, with the token itself among them."""
        top = {
            token_label(self._tokenizer, token_id): _finite(logprob)
            for token_id, logprob in zip(score.top_ids, score.top_logprobs, strict=True)
        }
        top.setdefault(token_label(self._tokenizer, score.token_id), _finite(score.logprob))
        return top

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return an echoed prompt's scores followed by the output's."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=(first.top_logprobs or []) + (second.top_logprobs or []),
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return the form of chats."""
    return ChatLogprobs(content=[_chat_token(tokenizer, score) for score in scores])


def prompt_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """Return, for each prompt token but the first, the token and its alternatives by id."""
    return [None if score is None else _prompt_token(tokenizer, score) for score in scores]


def _chat_token(tokenizer: Tokenizer, score: TokenLogprobs) -> ChatTokenLogprob:
    alternatives = zip(score.top_ids, score.top_logprobs, strict=True)
    return ChatTokenLogprob(
        token=token_label(tokenizer, score.token_id),
        logprob=_finite(score.logprob),
        bytes=list(tokenizer.token_bytes(score.token_id)),
        top_logprobs=[
            TopLogprob(
                token=token_label(tokenizer, token_id),
                logprob=_finite(logprob),
                bytes=list(tokenizer.token_bytes(token_id)),
            )
            for token_id, logprob in alternatives
        ],
    )


def _prompt_token(tokenizer: Tokenizer, score: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranked = enumerate(zip(score.top_ids, score.top_logprobs, strict=True), start=1)
    found = {
        str(token_id): PromptLogprob(
            logprob=_finite(logprob), rank=rank, decoded_token=token_label(tokenizer, token_id)
        )
        for rank, (token_id, logprob) in ranked
    }
    own = PromptLogprob(
        logprob=_finite(score.logprob),
        rank=score.rank,
        decoded_token=token_label(tokenizer, score.token_id),
    )
    return {str(score.token_id): own} | found


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
