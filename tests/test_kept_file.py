"""Small kept files: what was written is read, and nothing damaged, large or foreign."""

from pathlib import Path

import msgspec
import pytest

from tailrace.errors import ConfigError
from tailrace.kept_file import KeptFile, OtherFormatError


class Note(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    format: int = 3


FILES = KeptFile("note", Note, most_bytes=200, format=3, remedy="write another")


def test_what_is_written_is_read_and_nothing_else_is_left(tmp_path):
    file = tmp_path / "deep" / "note.json"
    FILES.write(Note("first"), file)
    FILES.write(Note("second"), file)
    assert FILES.read(file) == Note("second")
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" " * 201, "larger than 200 bytes; write another"),
        (b"{", "write another"),
        (b'{"text": 1}', "text.*; write another"),
        (b'{"text": "\xff"}', "write another"),
        (b'{"text": "a", "more": 1}', "more.*; write another"),
        (b"[" * 150, "write another"),
        (b'{"text": "a", "format": 2}', "format 2, and this version reads 3; write another"),
        # What another version wrote has other fields.
        (b'{"words": 1, "format": 4}', "format 4, and this version reads 3; write another"),
    ],
)
def test_what_cannot_be_read_names_the_file_and_the_remedy(tmp_path, content, message):
    file = tmp_path / "note.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"note .*note.json: .*{message}"):
        FILES.read(file)


def test_what_another_version_wrote_is_told_from_damage(tmp_path):
    file = tmp_path / "note.json"
    file.write_bytes(b'{"words": 1, "format": 4}')
    with pytest.raises(OtherFormatError):
        FILES.read(file)
    file.write_bytes(b'{"words": 1, "format": "4"}')
    with pytest.raises(ConfigError) as raised:
        FILES.read(file)
    assert not isinstance(raised.value, OtherFormatError)


class Told(msgspec.Struct):
    text: str = "nothing"


def test_a_glance_takes_single_fields_of_any_format_and_refuses_damage(tmp_path):
    file = tmp_path / "note.json"
    for content, text in ((b'{"text": "a", "format": 4}', "a"), (b'{"format": 9}', "nothing")):
        file.write_bytes(content)
        assert FILES.glance(file, Told).text == text
    file.write_bytes(b'{"text": 1, "format": 4}')
    with pytest.raises(ConfigError, match="write another"):
        FILES.glance(file, Told)


def test_a_file_that_is_missing_or_has_no_place_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="note .*: No such file"):
        FILES.read(tmp_path / "none.json")
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(ConfigError, match="note .*: "):
        FILES.write(Note("a"), Path(occupied / "note.json"))
