from tailrace.text.plain_vocabulary import inner_form, plain_form
from tests.text import vocabularies


def test_merges_that_spell_a_control_token_are_gone_and_ids_stay():
    spec = vocabularies.spec("gemma")
    plain = plain_form(spec)
    assert ["</", "think>"] in spec["model"]["merges"]
    assert ["</", "think>"] not in plain["model"]["merges"]
    assert "</think>" not in plain["model"]["vocab"]
    assert sorted(plain["model"]["vocab"].values()) == sorted(spec["model"]["vocab"].values())


def test_the_unknown_token_keeps_its_name():
    spec = vocabularies.spec("llama2")
    unknown = {**spec["added_tokens"][0], "id": 0, "content": "<unk>"}
    plain = plain_form({**spec, "added_tokens": [unknown]})
    assert plain["model"]["vocab"]["<unk>"] == 0


def test_a_unigram_vocabulary_is_renamed_in_place():
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["<s>", 0.0], ["a", -1.0]]}
    added = [{"id": 1, "content": "<s>", "special": True}]
    plain = plain_form({"added_tokens": added, "model": model})
    pieces = [piece for piece, _ in plain["model"]["vocab"]]
    assert (pieces[0], pieces[2]) == ("<unk>", "a")
    assert "<s>" not in pieces


def test_only_a_mark_before_the_first_word_needs_an_inner_form():
    assert inner_form(vocabularies.spec("metaspace")) is None
    assert inner_form(vocabularies.spec("qwen")) is None
    inner = inner_form(vocabularies.spec("metaspace-first"))
    assert inner["pre_tokenizer"]["prepend_scheme"] == "never"
    spec = vocabularies.spec("metaspace-first")
    assert spec["pre_tokenizer"]["prepend_scheme"] == "first"
