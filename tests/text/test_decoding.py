import pytest

from tailrace.errors import ModelError
from tailrace.text.decoding import read_decoder


def steps(*kinds):
    bodies = {
        "Replace": {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        "Strip": {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    }
    return {"type": "Sequence", "decoders": [bodies.get(kind, {"type": kind}) for kind in kinds]}


def test_a_nested_sequence_of_one_is_that_one():
    spec = {"type": "Sequence", "decoders": [steps("ByteLevel")]}
    assert read_decoder(spec).token_bytes("Ġhi") == b" hi"


def test_a_byte_level_token_with_a_foreign_character_is_its_own_utf8():
    assert read_decoder({"type": "ByteLevel"}).token_bytes("<a b>") == b"<a b>"


def test_a_piece_that_names_a_byte_is_that_byte():
    decoding = read_decoder(steps("Replace", "ByteFallback", "Fuse", "Strip"))
    assert decoding.token_bytes("<0xE4>") == b"\xe4"
    assert decoding.token_bytes("\u2581a") == b" a"


def test_spaces_are_stripped_from_the_start_only_across_pushes():
    stream = read_decoder(steps("Replace", "ByteFallback", "Fuse", "Strip")).stream()
    said = [stream.push(["\u2581"]), stream.push(["\u2581a"]), stream.push(["\u2581b"])]
    assert said == ["", " a", " b"]


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {"type": "WordPiece"},
        steps("ByteFallback", "Replace"),
        steps("Replace", "Fuse"),
        steps("Replace", "ByteFallback", "Strip"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(spec):
    with pytest.raises(ModelError, match="is not supported"):
        read_decoder(spec)


def test_a_pattern_or_a_strip_of_another_kind_is_refused():
    spec = steps("Replace", "ByteFallback")
    spec["decoders"][0]["pattern"] = {"Regex": "x"}
    with pytest.raises(ModelError, match="plain string"):
        read_decoder(spec)
    spec = steps("ByteFallback", "Fuse", "Strip")
    spec["decoders"][2]["stop"] = 1
    with pytest.raises(ModelError, match="spaces at the start"):
        read_decoder(spec)
