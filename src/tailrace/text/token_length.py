"""How many tokens a text has at least: what refuses a far too long prompt unencoded.

In a byte-level vocabulary each character of an entry is one byte of text, hence at most one
character, and there is no unknown token: a byte that the vocabulary lacks leaves nothing behind.
SmolLM2's lacks some of the control characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tailrace.text.decoding import BYTE_SYMBOLS

_NFC_CHARS = 4
"""NFC joins a letter and three marks, at most, into one character."""
_CONTINUATION = range(0x80, 0xC0)
"""Of UTF-8's bytes, those that every character but ASCII's has."""


@dataclass(frozen=True)
class TokenLength:
    """What bounds the text of one token.

    Attributes:
        longest_chars: Most characters that one token can stand for.
        silent: Characters that yield no token.
    """

    longest_chars: int
    silent: str

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least."""
        heard = len(text) - sum(map(text.count, self.silent))
        return -(-heard // self.longest_chars)


def token_length(spec: dict[str, Any]) -> TokenLength | None:
    """Return the bound of a tokenizer.json, None where none is known.

    Args:
        spec: Parsed, of whose added tokens none swallows white space, with NFC or no normaliser:
            one that `find_cuts` has cuts for.
    """
    vocab = spec["model"]["vocab"]
    steps = [spec["pre_tokenizer"], *spec["pre_tokenizer"].get("pretokenizers", [])]
    missing = {byte for symbol, byte in BYTE_SYMBOLS.items() if symbol not in vocab}
    if not any(step["type"] == "ByteLevel" for step in steps) or missing & {*_CONTINUATION}:
        return None
    entries = [*vocab, *(str(token["content"]) for token in spec["added_tokens"])]
    longest = max(map(len, entries))
    silent = "".join(sorted(chr(byte) for byte in missing if byte < 0x80))
    return TokenLength(longest * (_NFC_CHARS if spec.get("normalizer") else 1), silent)
