"""From a GGUF file's vocabulary to tokenizer.json and tokenizer_config.json.

Only byte-level BPE (llama.cpp's model "gpt2") is converted. Which text reaches the merges in
which pieces is the pre-tokeniser's affair; GGUF names it, and the name must be known, since a
wrong one gives wrong ids without a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tailrace.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from tailrace.models.gguf_file import GgufFile

# llama.cpp's token types that matter: the others (normal, unused, byte) are plain vocabulary.
_CONTROL, _USER_DEFINED = 3, 4


def _gpt2_pieces() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_pieces() -> PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2_pieces()])


def _pattern_pieces(digits: str) -> PreTokenizer:
    """Split as GPT-4 does, with `digits` as the pattern of a number's pieces."""
    alternatives = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # English endings
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with one mark or space before it
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # marks, with the line ends after them
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
    split = pre_tokenizers.Split(Regex("|".join(alternatives)), behavior="isolated", invert=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


@dataclass(frozen=True)
class _Kind:
    """How one family of vocabularies treats text."""

    pieces: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken whole."""
    adds_bos: bool = False
    """Where the file does not say."""


_GPT2 = _Kind(_gpt2_pieces)
_KINDS = {
    "gpt-2": _GPT2,
    "default": _GPT2,  # what older converters wrote, or left out, for GPT-2-like vocabularies
    "smollm": _Kind(_smollm_pieces),
    "qwen2": _Kind(lambda: _pattern_pieces(r"\p{N}"), normalizer=normalizers.NFC),
    "llama-bpe": _Kind(lambda: _pattern_pieces(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True),
}


@dataclass(frozen=True)
class _Vocabulary:
    """A file's tokenizer metadata, type-checked."""

    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    kind: _Kind
    special: dict[str, str]
    """"bos_token" -> its text, and so on, for those the file names."""
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None


def build_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and the contents of tokenizer_config.json.

    Raises:
        ModelError: The vocabulary is malformed, or of a kind that is not supported; named.
    """
    vocabulary = _read_vocabulary(file)
    return _tokenizer(file, vocabulary), _settings(vocabulary)


def _tokenizer(file: GgufFile, vocabulary: _Vocabulary) -> Tokenizer:
    kind = vocabulary.kind
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    try:
        model = models.BPE(ids, vocabulary.merges, ignore_merges=kind.ignore_merges)
    except Exception as error:  # tokenizers raises a bare Exception for a bad merge
        raise ModelError(f"{file.path}: tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    # The properties' type stubs know only their getters.
    tokenizer.pre_tokenizer = kind.pieces()
    if kind.normalizer is not None:
        tokenizer.normalizer = kind.normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    by_type = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    tokenizer.add_special_tokens([_added(token, True) for token, t in by_type if t == _CONTROL])
    tokenizer.add_tokens([_added(token, False) for token, t in by_type if t == _USER_DEFINED])
    if vocabulary.adds_bos or vocabulary.adds_eos:
        try:
            tokenizer.post_processor = _frame(vocabulary, ids)
        except ValueError as error:  # such as a colon, which means something in a template
            raise ModelError(f"{file.path}: begin or end token: {error}") from error
    return tokenizer


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _frame(vocabulary: _Vocabulary, ids: dict[str, int]) -> processors.TemplateProcessing:
    """Return what puts the begin and end tokens around each text."""
    before = [vocabulary.special["bos_token"]] if vocabulary.adds_bos else []
    after = [vocabulary.special["eos_token"]] if vocabulary.adds_eos else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *before, "$B:1", *after],
        special_tokens=[(token, ids[token]) for token in {*before, *after}],
    )


def _settings(vocabulary: _Vocabulary) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
        "clean_up_tokenization_spaces": False,
    }
    if vocabulary.chat_template is not None:
        settings["chat_template"] = vocabulary.chat_template
    return settings | vocabulary.special


def _read_vocabulary(file: GgufFile) -> _Vocabulary:
    model = file.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"{file.path}: tokenizer model {model!r} is not supported, only byte-level BPE "
            "('gpt2') is; serve the model's Hugging Face folder instead"
        )
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _KINDS:
        raise ModelError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported; supported are "
            f"{', '.join(_KINDS)}; serve the model's Hugging Face folder instead"
        )
    tokens = _list(file, "tokenizer.ggml.tokens", str)
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
    types = _list(file, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path}: {len(types)} token types for {len(tokens)} tokens")
    special = _special_tokens(file, tokens)
    kind = _KINDS[pre]
    return _Vocabulary(
        tokens=tokens,
        types=types,
        merges=[_pair(file, merge) for merge in _list(file, "tokenizer.ggml.merges", str)],
        kind=kind,
        special=special,
        adds_bos=_adds(file, "bos", kind.adds_bos, special),
        adds_eos=_adds(file, "eos", False, special),
        chat_template=_chat_template(file),
    )


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    values = file.metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelError(f"{file.path}: {key} must be a list of {kind.__name__}")
    return values


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}, not 'left right'")
    return left, right


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    found = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token_id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        is_number = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_number or not 0 <= token_id < len(tokens):
            raise ModelError(
                f"{file.path}: tokenizer.ggml.{name}_token_id {token_id!r} is not one of the "
                f"{len(tokens)} tokens"
            )
        if name in {"eot", "eom"}:  # ends of a turn have no name in tokenizer_config.json
            continue
        short = {"unknown": "unk", "padding": "pad"}.get(name, name)
        found[f"{short}_token"] = tokens[token_id]
    return found


def _adds(file: GgufFile, name: str, default: bool, special: dict[str, str]) -> bool:
    adds = file.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
    if not isinstance(adds, bool):
        raise ModelError(f"{file.path}: tokenizer.ggml.add_{name}_token must be true or false")
    if adds and f"{name}_token" not in special:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.add_{name}_token is true, but "
            f"tokenizer.ggml.{name}_token_id is missing"
        )
    return adds


def _chat_template(file: GgufFile) -> str | None:
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{file.path}: tokenizer.chat_template must be a string")
    return template
