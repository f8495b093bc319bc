"""Small tokenizers of the common kinds, trained on the spot and written as tokenizer.json."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tailrace.bench.corpus import python_text

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("gpt2", "gpt2-bos", "llama3", "sentencepiece-bos")
CHINESE = "推理引擎把请求排进批次，缓存以块为单位分配。尾部延迟决定服务质量！"  # noqa: RUF001

# As Llama 3 and Qwen cut text: a line end may stick to the marks before it, never to letters.
LLAMA3_CUT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def mixed_text() -> str:
    """Return English with Chinese in it, and paragraphs."""
    english = python_text()[:120_000]
    parts = [english[start : start + 600] for start in range(0, len(english), 600)]
    return f"\n\n{CHINESE}\n".join(parts)


def write_tokenizer(kind: str, folder: Path) -> Path:
    """Train a tokenizer of `kind` and return its folder."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind.startswith("sentencepiece")))
    alphabet: list[str] = []
    special = ["<s>"]
    if kind.startswith("sentencepiece"):
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.startswith("gpt2"))
        tokenizer.pre_tokenizer = (
            cut
            if kind.startswith("gpt2")
            else pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(LLAMA3_CUT), behavior="isolated"), cut]
            )
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(mixed_text().splitlines(), trainer)
    if kind.endswith("bos"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    written = json.loads(tokenizer.to_str())
    # Bytes must be tokens like others: special ones are left out of decoded text.
    written["added_tokens"] = [t for t in written["added_tokens"] if t["content"] == "<s>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    return folder
