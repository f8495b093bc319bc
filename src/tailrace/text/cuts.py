r"""Where a text may be cut so that both sides, encoded apart, give the ids of the whole.

    ... a word|<space>another ...  |  letter|mark: "好|。"       mark: one of `_MARKS`
              (rule 1)                        (rule 2)

Encoding is: find added tokens, normalise, split into pretokens by patterns, merge within each. So a
cut at p is safe if, whatever follows the text,

1. no added token can lie across p, one of which only the beginning has come included;
2. the normaliser changes nothing across p: NFC composes a character with marks, or Hangul jamo, to
   its right, and neither a space nor one of `_MARKS` is any of these;
3. no pattern can match across p, so that p is a border in whatever text; and none looks back, so
   that what follows p is split as if it began there. The only look ahead is `\s+(?!\S)`, which
   ends in white space, while p has none to its left. That is why the character before p decides,
   and why holding back the last pretokens, or any fixed number, is not enough.

The third is proved alternative by alternative: a pattern is taken apart, and each of its
alternatives must be one of `_WORDS` and `_OTHERS`, all of which were checked by hand for the two
rules. One pattern with another alternative, or another kind of step, and nothing is ever cut.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

_MARKS = frozenset(',.;:!?()[]{}"、。，．；：！？（）「」『』【】《》…')  # noqa: RUF001
"""No apostrophe: some patterns join "'s" to the word before it."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
# What any letter is matched by, whatever stands around it.
_WORDS = frozenset(
    {
        r" ?\p{L}+",
        rf"{_LEAD}\p{{L}}+",
        rf"{_LEAD}[\p{{L}}\p{{M}}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        # These two together; where the first is missing, so is lower case.
        rf"{_LEAD}{_UPPER}*{_LOWER}+",
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_ENDINGS}?",
    }
)
_OTHERS = frozenset(
    {
        rf"{_LEAD}{_UPPER}+{_LOWER}*",
        rf"{_LEAD}{_UPPER}+{_LOWER}*{_ENDINGS}?",
        _ENDINGS,
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        *(r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r" ?\p{N}+"),
        r"[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
    }
)
_ANY_SPACE = r"\s+"
_VISIBLE = frozenset("LMNPS")
"""Unicode's general categories that no notion of white space or control overlaps."""


@dataclass(frozen=True)
class Cuts:
    """The cuts of one encoder; make them with `find_cuts`.

    Attributes:
        added: What it looks for before anything else, by first character.
        longest_added: Characters of the longest of them.
    """

    added: dict[str, tuple[str, ...]]
    longest_added: int

    def last(self, text: str, start: int = 0) -> int | None:
        """Return the last safe cut at or after `start`, None where there is none.

        Args:
            text: A text that may go on; the cut is inside, 0 < cut < len(text).
            start: Earlier characters are not considered.
        """
        for cut in range(len(text) - 1, max(start, 1) - 1, -1):
            if _is_border(text, cut) and not self._may_lie_across(text, cut):
                return cut
        return None

    def _may_lie_across(self, text: str, cut: int) -> bool:
        """Whether an added token reaches over `cut`, or would if the text went on in its way."""
        for begin in range(max(cut - self.longest_added + 1, 0), cut):
            for token in self.added.get(text[begin], ()):
                end = begin + len(token)
                if end > cut and token.startswith(text[begin:end]):
                    return True
        return False


def find_cuts(spec: dict[str, Any], added: list[dict[str, Any]]) -> Cuts | None:
    """Return the cuts of a tokenizer.json, None where none can be proved safe.

    Args:
        spec: Parsed.
        added: Those of its added tokens that a text can spell.
    """
    is_normalised = not _is_nothing(spec.get("normalizer"))
    is_known = (
        _is_plain_bpe(spec["model"])
        and (not is_normalised or _is_nfc(spec["normalizer"]))
        and _cuts_words(_steps(spec.get("pre_tokenizer"), "pretokenizers"))
        and not any(_reaches_out(token, is_normalised) for token in added)
    )
    if not is_known:
        return None
    by_first: dict[str, tuple[str, ...]] = {}
    for content in [str(token["content"]) for token in added if token["content"]]:
        by_first[content[0]] = (*by_first.get(content[0], ()), content)
    return Cuts(by_first, max((len(str(token["content"])) for token in added), default=0))


def _is_border(text: str, cut: int) -> bool:
    before, after = text[cut - 1], text[cut]
    if after == " ":
        return unicodedata.category(before)[0] in _VISIBLE
    # A letter that NFC would take apart might leave a mark, which joins other marks.
    return after in _MARKS and before.isalpha() and unicodedata.is_normalized("NFC", before)


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    return model.get("type", "BPE") == "BPE" and not model.get("dropout")


def _is_nothing(step: dict[str, Any] | None) -> bool:
    return not _steps(step, "normalizers")


def _is_nfc(normalizer: dict[str, Any]) -> bool:
    return all(step["type"] == "NFC" for step in _steps(normalizer, "normalizers"))


def _steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [leaf for part in step[inner] for leaf in _steps(part, inner)]


def _reaches_out(token: dict[str, Any], is_normalised: bool) -> bool:
    """Whether an added token swallows what is around it, or is found in text as normalised."""
    return bool(
        token["lstrip"]
        or token["rstrip"]
        or token["single_word"]
        or (token["normalized"] and is_normalised)
    )


def _cuts_words(steps: list[dict[str, Any]]) -> bool:
    """Whether both rules hold: every step respects them, and one has a border there always."""
    patterns = [_alternatives_of(step) for step in steps]
    known = _WORDS | _OTHERS
    return all(p is not None and p <= known for p in patterns) and any(
        p is not None and p & _WORDS and _ANY_SPACE in p for p in patterns
    )


def _alternatives_of(step: dict[str, Any]) -> frozenset[str] | None:
    """Return the alternatives of a step's pattern, None where it does anything else."""
    if step["type"] == "Digits":
        return frozenset({r"\p{N}"})
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space", True):
        words = {r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+", "'s"}
        return frozenset(words) if step.get("use_regex", True) else frozenset()
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
        pattern = step["pattern"].get("Regex")
        return None if pattern is None else frozenset(_alternatives(pattern))
    return None


def _alternatives(pattern: str) -> list[str]:
    """Split a pattern at the bars outside of its groups and classes."""
    found, depth, is_class, is_escaped = [""], 0, False, False
    for char in pattern:
        if char == "|" and not (depth or is_class or is_escaped):
            found.append("")
            continue
        found[-1] += char
        if is_escaped or char == "\\":
            is_escaped = not is_escaped
        elif is_class or char == "[":
            is_class = char != "]"
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
    return found
