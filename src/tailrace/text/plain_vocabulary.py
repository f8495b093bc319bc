"""A tokenizer.json in which no text can become a control token.

"Control token" here means every added token except plain white space: the special ones
(`<|im_end|>`) and the markup ones (`<tool_call>`). `tokenizers` can ignore the special ones when
it encodes, but not the others, and a model's own merges may spell either. So the plain form

1. renames control tokens, in `added_tokens` and in the model's vocabulary, to something nobody can
   spell. (To drop them would shift ids: the library numbers added tokens in order.) The unknown
   token keeps its name, because the model needs it, and is only no longer looked for;
2. drops the merges that would build a control token, so that BPE cannot arrive at one by itself.
"""

from __future__ import annotations

import copy
import secrets
from typing import Any


def is_control(added: dict[str, Any]) -> bool:
    """Return whether an entry of `added_tokens` is a control token."""
    return bool(added["special"]) or not str(added["content"]).isspace()


def plain_form(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parsed tokenizer.json that never yields a control token."""
    controls = {added["content"] for added in spec["added_tokens"] if is_control(added)}
    unknown = _unknown_token(spec["model"])
    names = {control: secrets.token_hex(16) for control in controls - {unknown}}
    return {
        **spec,
        "added_tokens": [
            {**added, "content": names.get(added["content"], added["content"])}
            for added in spec["added_tokens"]
            if added["content"] != unknown
        ],
        "model": _plain_model(spec["model"], names, controls),
    }


def inner_form(spec: dict[str, Any]) -> dict[str, Any] | None:
    """Return the form for text that follows other text, or None where it is the same.

    A Metaspace pre-tokeniser of scheme "first" puts its mark only before the start of the whole
    text, not after each control token.
    """
    pre_tokenizer = copy.deepcopy(spec.get("pre_tokenizer"))
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    first = [step for step in steps if step and step.get("prepend_scheme") == "first"]
    for step in first:
        step["prepend_scheme"] = "never"
    return {**spec, "pre_tokenizer": pre_tokenizer} if first else None


def _plain_model(
    model: dict[str, Any], names: dict[str, str], controls: set[str]
) -> dict[str, Any]:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score] by id
        return {**model, "vocab": [[names.get(piece, piece), score] for piece, score in vocab]}
    plain = {**model, "vocab": {names.get(token, token): index for token, index in vocab.items()}}
    if "merges" in model:
        plain["merges"] = [merge for merge in model["merges"] if not _spells(merge, controls)]
    return plain


def _unknown_token(model: dict[str, Any]) -> str | None:
    if isinstance(model["vocab"], list):
        unknown_id = model.get("unk_id")
        return None if unknown_id is None else str(model["vocab"][unknown_id][0])
    return model.get("unk_token")


def _spells(merge: str | list[str], controls: set[str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in controls or right in controls or left + right in controls
