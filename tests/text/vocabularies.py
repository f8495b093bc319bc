"""Small tokenizers of every kind that the served families use, trained or built here."""

from __future__ import annotations

import json
from functools import cache
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from tailrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>")
SPELLINGS = (*SPECIALS, *MARKUP)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = ("smollm", "qwen", "llama3")
PIECES = ("llama2", "gemma", "metaspace", "metaspace-first")
KINDS = BYTE_LEVEL + PIECES

snippets = st.sampled_from(
    [
        *SPELLINGS,
        *("<|im_", "end|>", "<|", "|>", "<", ">", "\n", " ", "  ", "\t", "user", "assistant", "'s"),
        *(
            "hello",
            " world",
            "你好、世界",
            "👩‍👩‍👧‍👦",
            "👍🏽",
            "e\u0301",
            "é",
            "ǹ̃",
            "🇩🇪",
            "\u2581",
            "\u00a0",
        ),
        *("Ġ", "Ċ", "<0xE4>", "\ufffd", "\x00", "123456"),
    ]
)
texts = st.lists(snippets | st.text(max_size=6), max_size=12).map("".join)
harmless_texts = texts.filter(lambda text: not any(s in text for s in SPELLINGS))


@cache
def spec(kind: str) -> dict[str, Any]:
    """Return the tokenizer.json of a kind, parsed."""
    build = _byte_level if kind in BYTE_LEVEL else _pieces
    value: dict[str, Any] = json.loads(build(kind).to_str())
    if kind == "llama3":
        value["model"]["ignore_merges"] = True
    return value


@cache
def make(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind, with ChatML's bos and eos."""
    return Tokenizer(spec(kind), {"bos_token": SPECIALS[0], "eos_token": SPECIALS[2]})


@cache
def peer(kind: str) -> tokenizers.Tokenizer:
    """Return the library's own tokenizer of a kind."""
    return tokenizers.Tokenizer.from_str(json.dumps(spec(kind)))


def write(folder: Path, kind: str, **settings: Any) -> Path:
    """Write a model folder's text files."""
    (folder / "tokenizer.json").write_text(json.dumps(spec(kind)), encoding="utf-8")
    config = {"bos_token": SPECIALS[0], "eos_token": {"content": SPECIALS[2]}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _byte_level(kind: str) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "smollm":
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        built.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), words]
        )
    else:
        split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
        built.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    if kind == "qwen":
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        # SmolLM2 holds its special tokens at the start of the model's own vocabulary.
        special_tokens=list(SPECIALS) if kind == "smollm" else [],
    )
    corpus = [topics["assert"], topics["class"], "你好世界。你好。", "👍🏽👩‍👩‍👧‍👦"] * 3
    built.train_from_iterator(corpus, trainer)
    return _with_added(built)


def _pieces(kind: str) -> tokenizers.Tokenizer:
    """Return a SentencePiece-like BPE with bytes as fallback, or with an unknown token."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"\u2581abcdehlorwtuskni<>/|_", "\u2581h", "el", "lo", "he", "hel", "hello"]
    # Conversions from SentencePiece do carry merges that spell a control token.
    pieces += ["</", "th", "in", "thin", "k>", "think>", "</think>"]
    merges = [("\u2581", "h"), ("e", "l"), ("l", "o"), ("h", "e"), ("he", "l"), ("hel", "lo")]
    merges += [("<", "/"), ("t", "h"), ("i", "n"), ("th", "in"), ("k", ">"), ("thin", "k>")]
    merges += [("</", "think>")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    unknown = pieces[0]
    model = models.BPE(vocab, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    built = tokenizers.Tokenizer(model)
    if kind.startswith("metaspace"):
        scheme = "first" if kind == "metaspace-first" else "always"
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
        built.decoder = decoders.Metaspace(prepend_scheme=scheme)
        return _with_added(built)
    to_space = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    marks = [normalizers.Replace(" ", "\u2581")]
    if kind == "llama2":
        marks = [normalizers.Prepend("\u2581"), *marks]
        to_space.append(decoders.Strip(" ", 1, 0))
    built.normalizer = normalizers.Sequence(marks)
    built.decoder = decoders.Sequence(to_space)
    return _with_added(built)


def _with_added(built: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    built.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    built.add_tokens([AddedToken(s, special=False, normalized=False) for s in MARKUP])
    return built
