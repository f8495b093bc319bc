import pytest

from tailrace.errors import ModelError
from tailrace.models.gguf_file import GgufFile
from tailrace.models.gguf_tokenizer import build_tokenizer
from tests.models.gguf_maker import HE_ID, vocabulary_metadata, write_gguf
from tests.support.tiny import BOS_ID, EOS_ID, IM_START_ID, SPECIALS, byte_symbols


@pytest.fixture
def build(tmp_path):
    """Build the tiny vocabulary's tokenizer with changed metadata."""

    def built(**changes):
        keys = {f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}
        file = write_gguf(tmp_path / "v.gguf", vocabulary_metadata() | keys, {})
        return build_tokenizer(GgufFile(file))

    return built


def pieces(tokenizer, text):
    """The pre-tokeniser's pieces, decoded."""
    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in split]


def test_bytes_merges_and_control_tokens_get_the_files_ids(build):
    tokenizer, _ = build()
    assert tokenizer.encode("the é").ids == [ord("t"), HE_ID, ord(" "), 0xC3, 0xA9]
    assert tokenizer.encode("a<|im_start|>b").ids == [ord("a"), IM_START_ID, ord("b")]
    assert tokenizer.get_vocab_size() == 260


def test_any_text_comes_back(build):
    text = "Zahlen 123, 你好, 🙂👍🏽\r\n\t<|im_end|> \u0000 e\u0301"
    tokenizer, _ = build()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_user_defined_ones_are_not(build):
    types = [1] * 256 + [3, 4, 3, 1]
    tokenizer, _ = build(ggml__token_type=types)
    ids = tokenizer.encode("<|endoftext|><|im_start|>").ids
    assert ids == [BOS_ID, IM_START_ID]
    assert tokenizer.decode(ids) == "<|im_start|>"


SENTENCE = "I'LL pay 1234½ €, ok?\n\n  yes"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 1234½", " €,", " ok", "?", "\n\n ", " yes"]),
        ("default", ["I", "'", "LL", " pay", " 1234½", " €,", " ok", "?", "\n\n ", " yes"]),
        (
            "smollm",
            [
                "I",
                "'",
                "LL",
                " pay",
                " ",
                "1",
                "2",
                "3",
                "4",
                "½",
                " €,",
                " ok",
                "?",
                "\n\n ",
                " yes",
            ],
        ),
        (
            "qwen2",
            ["I", "'LL", " pay", " ", "1", "2", "3", "4", "½", " €,", " ok", "?\n\n", " ", " yes"],
        ),
        (
            "llama-bpe",
            ["I", "'LL", " pay", " ", "123", "4½", " €,", " ok", "?\n\n", " ", " yes"],
        ),
    ],
)
def test_each_pre_tokenizer_cuts_text_its_own_way(build, pre, expected):
    tokenizer, _ = build(ggml__pre=pre)
    assert pieces(tokenizer, SENTENCE) == expected


def test_qwen_normalises_and_others_do_not(build):
    qwen, _ = build(ggml__pre="qwen2")
    smollm, _ = build()
    assert qwen.encode("e\u0301").ids == [0xC3, 0xA9]
    assert smollm.encode("e\u0301").ids == [ord("e"), 0xCC, 0x81]


def test_llama_takes_a_piece_that_is_a_token_whole(build):
    """`ignore_merges`: "abc" is a token that no merge leads to."""
    tokens = [*byte_symbols(), *SPECIALS, "abc", "he"]
    changes = {"ggml__tokens": tokens, "ggml__token_type": [1] * 256 + [3] * 3 + [1, 1]}
    llama, _ = build(ggml__pre="llama-bpe", **changes)
    gpt2, _ = build(ggml__pre="gpt-2", **changes)
    assert llama.encode("abc", add_special_tokens=False).ids == [259]
    assert gpt2.encode("abc", add_special_tokens=False).ids == list(b"abc")


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [97]),
        ({"ggml__add_bos_token": True}, [BOS_ID, 97]),
        ({"ggml__add_bos_token": True, "ggml__add_eos_token": True}, [BOS_ID, 97, EOS_ID]),
        ({"ggml__pre": "llama-bpe", "ggml__add_bos_token": None}, [BOS_ID, 97]),
        ({"ggml__pre": "llama-bpe", "ggml__add_bos_token": False}, [97]),
        ({"ggml__pre": "gpt-2", "ggml__add_bos_token": None}, [97]),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_says(build, changes, ids):
    tokenizer, settings = build(**changes)
    assert tokenizer.encode("a").ids == ids
    assert tokenizer.encode("a", add_special_tokens=False).ids == [97]
    assert settings["add_bos_token"] == (ids[0] == BOS_ID)


def test_the_settings_name_the_special_tokens(build):
    _, settings = build(ggml__padding_token_id=EOS_ID, ggml__unknown_token_id=BOS_ID)
    names = ("bos_token", "unk_token", "eos_token", "pad_token")
    assert [settings[name] for name in names] == [*["<|endoftext|>"] * 2, *["<|im_end|>"] * 2]
    assert "add_generation_prompt" in settings["chat_template"]


def test_a_file_without_template_gives_none(build):
    _, settings = build(chat_template=None)
    assert "chat_template" not in settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__model": "llama"}, "tokenizer model 'llama' is not supported.*Hugging Face folder"),
        ({"ggml__model": None}, "tokenizer model None is not supported"),
        ({"ggml__pre": "tekken"}, "pre-tokenizer 'tekken' is not supported.*smollm"),
        ({"ggml__tokens": None}, r"tokenizer\.ggml\.tokens must be a list of str"),
        ({"ggml__tokens": ["a", "a"]}, "holds a token twice"),
        ({"ggml__token_type": [1, 1]}, "2 token types for 260 tokens"),
        ({"ggml__token_type": ["a"]}, "token_type must be a list of int"),
        ({"ggml__merges": None}, r"tokenizer\.ggml\.merges must be a list"),
        ({"ggml__merges": ["he"]}, "holds 'he', not 'left right'"),
        ({"ggml__merges": ["x y"]}, r"tokenizer\.ggml\.merges: .*Token `xy` out of vocabulary"),
        ({"ggml__bos_token_id": 260}, "bos_token_id 260 is not one of the 260 tokens"),
        ({"ggml__eos_token_id": "x"}, "eos_token_id 'x' is not one of"),
        ({"ggml__eot_token_id": 10**9}, "eot_token_id 1000000000 is not one of"),
        ({"ggml__add_bos_token": 1}, "add_bos_token must be true or false"),
        (
            {"ggml__add_bos_token": True, "ggml__bos_token_id": None},
            "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing",
        ),
        (
            {"ggml__add_bos_token": True, "ggml__bos_token_id": ord(":")},
            "begin or end token: Cannot build",
        ),
        ({"chat_template": 3}, "chat_template must be a string"),
    ],
)
def test_a_bad_vocabulary_is_refused_by_name(build, changes, message):
    with pytest.raises(ModelError, match=message):
        build(**changes)
