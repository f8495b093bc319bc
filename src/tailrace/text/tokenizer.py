"""Text to token ids and back, over one tokenizer.json, safe for threads.

Two encoders are kept. The full one knows the control tokens; the plain one knows none (see
plain_vocabulary.py). Text of unknown origin goes through the plain one, so that it never yields
a control id; `encode_spans` mixes both, for a chat whose template is ours and whose messages are
the client's. Neither is changed after loading. Both encode through `encode_batch_fast`: alone among
the library's ways (0.23) it releases the GIL, so that a long text on a thread stalls nobody.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers

from tailrace.errors import ModelError, RequestError
from tailrace.text.cuts import find_cuts
from tailrace.text.decoding import read_decoder
from tailrace.text.incremental import IncrementalEncoder, IncrementalSpans, Span
from tailrace.text.plain_vocabulary import inner_form, is_control, plain_form
from tailrace.text.token_length import token_length

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tailrace.text.decoding import Decoding

__all__ = ["MAX_TEXT_CHARS", "Span", "Tokenizer", "read_json"]

MAX_TEXT_CHARS = 16 * 2**20
"""Longest text of one encode call: more than the largest context can hold."""


class _ControlMatch(NamedTuple):
    start: int
    end: int
    token_id: int


class Tokenizer:
    """The tokenizer of one model folder; make it with `Tokenizer.load`."""

    def __init__(self, spec: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
        """Build from a parsed tokenizer.json.

        Args:
            spec: The parsed tokenizer.json.
            settings: The parsed tokenizer_config.json, with `eos_token_id` and `bos_token_id` of
                generation_config.json where it has them.

        Raises:
            ModelError: The decoder is of an unsupported kind.
        """
        self.settings = settings or {}
        self.decoding: Decoding = read_decoder(spec.get("decoder"))
        plain = plain_form(spec)
        inner = inner_form(plain)
        self._full = _build(spec)
        self._plain = _build(plain)
        self._plain_inner = self._plain if inner is None else _build(inner)
        added: list[dict[str, Any]] = spec["added_tokens"]
        self._special_tokens = frozenset(str(a["content"]) for a in added if a["special"])
        self._controls = {str(a["content"]): a for a in added if is_control(a)}
        # The library numbers added tokens itself; the file's own "id" need not hold.
        ids = ((control, self._full.token_to_id(control)) for control in self._controls)
        self._control_ids = {control: i for control, i in ids if i is not None}
        self._control_pattern = _alternation(self._control_ids)
        self._special_pattern = _alternation(self._special_tokens)
        self._strings: dict[int, str] = {}
        self._token_bytes: dict[int, bytes] = {}
        self._cuts = find_cuts(spec, added)
        self._plain_cuts = find_cuts(spec, [a for a in added if not is_control(a)])
        self._frame = None if self._cuts is None else _read_frame(self._full)
        self._token_length = None if self._cuts is None else token_length(spec)
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos")
        self.eos_token_id = self._named_id("eos")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load tokenizer.json and what the configs beside it say about special tokens.

        Raises:
            ModelError: A file is missing, unreadable, or of an unsupported kind; it names the path.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{file} is missing: the folder needs a tokenizer.json (a slow tokenizer is "
                "converted by saving it once with transformers)"
            )
        generation = read_json(folder / "generation_config.json")
        settings = {
            **{key: generation.get(key) for key in ("bos_token_id", "eos_token_id")},
            **read_json(folder / "tokenizer_config.json"),
        }
        spec = read_json(file)
        try:
            return cls(spec, settings)
        except ModelError as error:
            raise ModelError(f"{file}: {error}") from error
        # `tokenizers` raises bare Exception for whatever it cannot read; KeyError and the like
        # come from entries that the format requires.
        except Exception as error:
            raise ModelError(
                f"{file} is no valid tokenizer.json: {type(error).__name__}: {error}"
            ) from error

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[int]:
        """Return the ids of `text`.

        Args:
            text: At most `MAX_TEXT_CHARS` characters, without lone surrogates.
            add_special_tokens: Add what the model wants around a text, such as a BOS.
            parse_special: Whether control tokens spelled in the text count as such.

        Raises:
            RequestError: The text is too long or no valid Unicode.
        """
        _check_text(text)
        encoder = self._full if parse_special else self._plain
        return _ids(encoder, text, add_special_tokens=add_special_tokens)

    def encode_spans(self, spans: Sequence[Span]) -> list[int]:
        """Return the ids of the joined spans, control tokens being found in trusted ones only.

        Equal to `encode(text, add_special_tokens=False)` of the joined text wherever no control
        token is spelled outside, or across the border, of a trusted span: only control tokens cut
        the text, the borders of spans do not.

        Raises:
            RequestError: The text is too long or no valid Unicode.
        """
        text = "".join(span.text for span in spans)
        _check_text(text)
        ids: list[int] = []
        start = 0
        for match in self._control_matches(text, spans):
            ids += self._encode_plain(text, start, match.start)
            ids.append(match.token_id)
            start = match.end
        return ids + self._encode_plain(text, start, len(text))

    def incremental(self) -> IncrementalEncoder | None:
        """Return an encoder for a text that comes in parts; None where it cannot be cut.

        What it returns, put through `framed`, is `encode(text, parse_special=True)`.
        """
        if self._cuts is None or self._frame is None:
            return None
        return IncrementalEncoder(self._encode_full, self._cuts)

    def incremental_spans(self) -> IncrementalSpans | None:
        """Return an encoder for spans that come in parts; None where they cannot be cut.

        What it returns is `encode_spans` of the spans.
        """
        # Cuts of all added tokens: none of the control tokens swallows what is around it.
        if self._cuts is None or self._plain_inner is not self._plain:
            return None
        return IncrementalSpans(
            self._encode_checked, self._plain_cuts, self._control_pattern, self._control_ids
        )

    def framed(self, ids: list[int], *, add_special_tokens: bool) -> list[int]:
        """Return what an incremental encoder returned as `encode` returns it."""
        if not add_special_tokens or self._frame is None:
            return ids
        before, after = self._frame
        return [*before, *ids, *after]

    @property
    def leading_ids(self) -> list[int]:
        """What `framed` puts before a text, such as a BOS."""
        return list(self._frame[0]) if self._frame is not None else []

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, without encoding it; 0: no bound is known."""
        return 0 if self._token_length is None else self._token_length.fewest_tokens(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; ids beyond the vocabulary stand for nothing."""
        text: str = self._full.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, ids: Iterable[int], *, skip_special_tokens: bool) -> list[str]:
        """Return the vocabulary's entries of `ids`, without unknown ids, as decoding sees them."""
        tokens = []
        for token_id in ids:
            token = self._strings.get(token_id)
            if token is None:
                token = self._string(token_id)
            if token is None or (skip_special_tokens and token in self._special_tokens):
                continue
            tokens.append(token)
        return tokens

    def _string(self, token_id: int) -> str | None:
        """Return an entry of the vocabulary, and keep it; None for an unknown id."""
        token: str | None = self._full.id_to_token(token_id)
        if token is not None:
            self._strings[token_id] = token
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds in the middle of a text; b"" for an unknown id."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self._full.id_to_token(token_id)
            if token is None:
                return b""
            found = self._token_bytes[token_id] = self.decoding.token_bytes(token)
        return found

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for what is no UTF-8 on its own."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` leaves the token out with `skip_special_tokens`."""
        return self._full.id_to_token(token_id) in self._special_tokens

    def find_control(self, text: str) -> str | None:
        """Return the first control token spelled in `text`."""
        match = self._control_pattern.search(text)
        return match[0] if match else None

    def find_special(self, text: str) -> str | None:
        """Return the first special token spelled in `text`; markup such as <think> is none."""
        match = self._special_pattern.search(text)
        return match[0] if match else None

    def specials_in(self, text: str) -> list[str]:
        """Return the special tokens spelled in `text`, in order."""
        return self._special_pattern.findall(text)

    def special_token(self, name: str) -> str | None:
        """Return a named token of tokenizer_config.json, such as "bos_token", as text."""
        value = self.settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def _encode_full(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _encode_checked(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False, parse_special=False)

    def _encode_plain(self, text: str, start: int, end: int) -> list[int]:
        if start == end:
            return []
        encoder = self._plain_inner if start else self._plain
        return _ids(encoder, text[start:end], add_special_tokens=False)

    def _control_matches(self, text: str, spans: Sequence[Span]) -> Iterator[_ControlMatch]:
        """Yield the control tokens of trusted runs, left to right, without overlap."""
        done = 0
        for run_start, run_end in _trusted_runs(spans):
            for found in self._control_pattern.finditer(text, run_start, run_end):
                added = self._controls[found[0]]
                if added["single_word"] and not _is_word(text, found.start(), found.end()):
                    continue
                start, end = _with_white_space(text, found.start(), found.end(), added)
                yield _ControlMatch(max(start, done), end, self._control_ids[found[0]])
                done = end

    def _named_id(self, name: str) -> int | None:
        token = self.special_token(f"{name}_token")
        token_id = None if token is None else self._full.token_to_id(token)
        if token_id is not None:
            return int(token_id)
        value = self.settings.get(f"{name}_token_id")
        if isinstance(value, list):
            value = value[0] if value else None
        return value if isinstance(value, int) else None


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} where there is no such file.

    Raises:
        ModelError: The file is unreadable, or holds something else; it names the path.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value


def _build(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer.from_str(json.dumps(spec))
    # A prompt is served whole or refused; some files carry training's truncation and padding.
    built.no_truncation()
    built.no_padding()
    return built


def _read_frame(encoder: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids that come before and after every text; None where they cannot be told."""
    text = _ids(encoder, "a", add_special_tokens=False)
    framed = _ids(encoder, "a", add_special_tokens=True)
    size = len(text)
    places = [i for i in range(len(framed) - size + 1) if framed[i : i + size] == text]
    if len(places) != 1:
        return None
    return framed[: places[0]], framed[places[0] + size :]


def _ids(encoder: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encode one text without holding the GIL, which `Tokenizer.encode` does throughout."""
    (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _alternation(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the leftmost, then longest, of `tokens`."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def _check_text(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(
            f"the text has {len(text)} characters; the limit is {MAX_TEXT_CHARS}: shorten it"
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is no valid Unicode: lone surrogate {text[error.start]!r} at character "
                f"{error.start}; send UTF-8, or escape the whole surrogate pair"
            ) from error


def _trusted_runs(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Yield start and end of the maximal trusted stretches of the joined text."""
    start = end = 0
    for span in spans:
        if not span.is_trusted and span.text:
            if start < end:
                yield start, end
            start = end + len(span.text)
        end += len(span.text)
    if start < end:
        yield start, end


def _is_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start] if start else "", text[end : end + 1]
    return not any(char.isalnum() or char == "_" for char in (before + after))


def _with_white_space(text: str, start: int, end: int, added: dict[str, Any]) -> tuple[int, int]:
    """Extend a match over the white space that the token's `lstrip` and `rstrip` swallow."""
    if added["lstrip"]:
        start = len(text[:start].rstrip())
    if added["rstrip"]:
        end = len(text) - len(text[end:].lstrip())
    return start, end
