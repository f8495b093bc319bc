"""Token ids to text as they come: what is certain now, and nothing that may still change.

The concatenation of all pushes and of `finish` equals the tokenizer's one-shot `decode`, for any
ids and any split of them. The library's DecodeStream is not used: it holds text back for as long
as the text ends in ill-formed bytes, and has no way to say at the end what it still holds.
The rules are in decoding.py; a push costs the bytes of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.text.tokenizer import Tokenizer


class Detokenizer:
    """One output in the making; not for use by several threads at once."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = tokenizer.decoding.stream()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new ids; return the text that became certain, which may be ""."""
        tokens = self._tokenizer.token_strings(
            token_ids, skip_special_tokens=self._skip_special_tokens
        )
        return self._stream.push(tokens)

    def finish(self) -> str:
        """Return what was held back; an incomplete character becomes U+FFFD."""
        return self._stream.finish()
