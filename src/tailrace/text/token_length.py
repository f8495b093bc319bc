"""How much text one token can stand for at most: what refuses a far too long prompt unencoded."""

from __future__ import annotations

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_NFC_CHARS = 4
"""NFC joins a letter and three marks, at most, into one character."""


def longest_token_chars(spec: dict[str, Any]) -> int | None:
    """Return the most characters of a text that one token can stand for; None: no bound is known.

    A byte-level vocabulary of all 256 bytes leaves nothing out and has no unknown token, and each
    character of an entry is one byte of text, hence at most one character.

    Args:
        spec: A parsed tokenizer.json of whose added tokens none swallows white space, with NFC or
            no normaliser: one that `find_cuts` has cuts for.
    """
    vocab = spec["model"]["vocab"]
    steps = [spec["pre_tokenizer"], *spec["pre_tokenizer"].get("pretokenizers", [])]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if not is_byte_level or not set(ByteLevel.alphabet()) <= vocab.keys():
        return None
    added = (len(str(token["content"])) for token in spec["added_tokens"])
    longest = max(max(map(len, vocab)), *added, 1)
    return longest * (_NFC_CHARS if spec.get("normalizer") else 1)
