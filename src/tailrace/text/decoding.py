"""How token strings become text: the `decoder` of tokenizer.json, one token at a time.

Rules, as the `tokenizers` library has them for one-shot decoding; streams here follow them
exactly, and say a character only once no later token can change it.

1. ByteLevel. Each token is bytes: its characters are stand-ins for bytes, or, where one of them
   is no stand-in (an added token with a space in it), its own UTF-8. All bytes are joined and
   decoded as UTF-8; each maximal ill-formed part becomes U+FFFD. A part that is ill-formed now
   stays so, hence only an incomplete last character is held back.
2. Pieces (SentencePiece style). Each token is text, after replacements such as "▁" -> " ".
   Tokens like "<0xE4>" are bytes; a whole run of them is decoded together, and if any part of
   the run is ill-formed, every byte of the run becomes a U+FFFD:

       <0xE4> <0xBD> <0xA0> "a"  -> "你a"          <0xE4> <0xBD> <0xA0> <0xFF> "a" -> "����a"

   So a run is certain only when a token that is no byte follows, and is held back until then.
   Spaces are stripped from the start of the whole text, as many as `strip_left`.
3. Metaspace. As pieces, but the first token loses its "▁"s instead of having them replaced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from encodings.utf_8 import IncrementalDecoder
from typing import TYPE_CHECKING, Any, Protocol

from tailrace.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """One text in the making."""

    def push(self, tokens: Sequence[str]) -> str:
        """Take token strings; return the text that became certain."""
        ...

    def finish(self) -> str:
        """Return what was held back."""
        ...


class Decoding(Protocol):
    """The decoder of one vocabulary."""

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that the token stands for in the middle of a text."""
        ...

    def stream(self) -> TextStream:
        """Return a fresh stream."""
        ...


def _bytes_by_symbol() -> dict[str, int]:
    """Return byte-level BPE's stand-ins: printable Latin-1 is itself, others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


BYTE_SYMBOLS = _bytes_by_symbol()


class ByteLevel:
    """Rule 1."""

    def __init__(self) -> None:
        self._texts: dict[str, str | None] = {}

    def token_bytes(self, token: str) -> bytes:
        """Return the token's bytes."""
        try:
            return bytes([BYTE_SYMBOLS[symbol] for symbol in token])
        except KeyError:
            return token.encode()

    def token_text(self, token: str) -> str | None:
        """Return the token's text where it is whole characters, which most are; else None.

        Args:
            token: Of the vocabulary: what is found is kept.
        """
        try:
            return self._texts[token]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token] = text
        return text

    def stream(self) -> TextStream:
        """Return a fresh stream."""
        return _ByteLevelStream(self)


class _ByteLevelStream:
    def __init__(self, decoding: ByteLevel) -> None:
        self._token_bytes = decoding.token_bytes
        self._token_text = decoding.token_text
        self._utf8 = IncrementalDecoder("replace")

    def push(self, tokens: Sequence[str]) -> str:
        if len(tokens) == 1 and not self._utf8.buffer:
            text = self._token_text(tokens[0])
            if text is not None:  # the decoder would say the same, and hold nothing
                return text
        return self._utf8.decode(b"".join(map(self._token_bytes, tokens)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class Pieces:
    """Rules 2 and 3."""

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: int = 0
    dropped_in_first: str = ""
    """The Metaspace mark that the first token loses; "" for rule 2."""

    def token_bytes(self, token: str) -> bytes:
        """Return the token's bytes; a leading "▁" counts as a space."""
        text = self.text(token)
        byte = self.byte(text)
        return text.encode() if byte is None else bytes([byte])

    def text(self, token: str) -> str:
        """Return the token with its replacements made."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def byte(self, text: str) -> int | None:
        """Return the byte that a piece such as "<0xE4>" stands for."""
        match = _BYTE_PIECE.fullmatch(text) if self.byte_fallback else None
        return int(match[1], 16) if match else None

    def stream(self) -> TextStream:
        """Return a fresh stream."""
        return _PieceStream(self)


class _PieceStream:
    def __init__(self, rules: Pieces) -> None:
        self._rules = rules
        self._run = bytearray()
        self._is_first = True
        self._strip_left = rules.strip_left

    def push(self, tokens: Sequence[str]) -> str:
        return self._strip("".join([self._push_one(token) for token in tokens]))

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _push_one(self, token: str) -> str:
        if self._is_first and self._rules.dropped_in_first:
            token = token.replace(self._rules.dropped_in_first, "")
        self._is_first = False
        text = self._rules.text(token)
        byte = self._rules.byte(text)
        if byte is None:
            return self._end_run() + text
        self._run.append(byte)
        return ""

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        """Take spaces from the start of the whole text, across pushes."""
        while self._strip_left and text.startswith(" "):
            text = text[1:]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


def read_decoder(spec: dict[str, Any] | None) -> Decoding:
    """Return the decoding that a tokenizer.json's `decoder` entry describes.

    Raises:
        ModelError: The entry is of a kind that cannot be streamed exactly here.
    """
    steps = _steps(spec)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevel()
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    shape = ["Replace"] * kinds.count("Replace")
    tail = kinds[len(shape) :]
    known = (["ByteFallback"], ["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"])
    if kinds[: len(shape)] != shape or tail not in known:
        raise ModelError(
            f"the tokenizer's decoder {kinds} is not supported: known are ByteLevel, Metaspace, "
            "and the sequence Replace..., ByteFallback, Fuse, Strip"
        )
    return Pieces(
        replacements=tuple(_replacement(step) for step in steps[: len(shape)]),
        byte_fallback=True,
        strip_left=_strip_left(steps[-1]) if tail[-1] == "Strip" else 0,
    )


def _steps(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    if spec is None:
        return []
    if spec.get("type") != "Sequence":
        return [spec]
    return [inner for step in spec["decoders"] for inner in _steps(step)]


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"].get("String")
    if not pattern:
        raise ModelError(
            f"the tokenizer's decoder replaces {step['pattern']}: only a plain string is supported"
        )
    return pattern, step["content"]


def _strip_left(step: dict[str, Any]) -> int:
    if step["content"] != " " or step["stop"] != 0:
        raise ModelError(
            f"the tokenizer's decoder strips {step}: only spaces at the start are supported"
        )
    return int(step["start"])


def _metaspace(step: dict[str, Any]) -> Pieces:
    mark = step["replacement"]
    is_prepended = step.get("prepend_scheme", "always") != "never"
    return Pieces(
        replacements=((mark, " "),),
        dropped_in_first=mark if is_prepended else "",
    )
