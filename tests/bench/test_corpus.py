from __future__ import annotations

import pytest

from tailrace.bench.corpus import CORPUS_CHARACTERS, corpus_text, python_text
from tailrace.errors import ConfigError


def test_python_carries_enough_text():
    assert len(python_text()) > 300_000
    text, name = corpus_text(None)
    assert "pydoc" in name
    assert text.isprintable()


def test_a_text_file_is_read_or_refused(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("语言模型 " * 500, encoding="utf-8")
    assert corpus_text(file)[1] == "text.txt"
    file.write_text("short")
    with pytest.raises(ConfigError, match="at least 1000"):
        corpus_text(file)
    file.write_bytes(b"\xff" * 2000)
    with pytest.raises(ConfigError, match="not UTF-8"):
        corpus_text(file)
    with pytest.raises(ConfigError, match="No such file"):
        corpus_text(tmp_path / "none")


def test_the_texts_of_a_folder_are_mixed(tmp_path):
    (tmp_path / "zh.txt").write_text("语言模型 " * 200, encoding="utf-8")
    (tmp_path / "en.txt").write_text("language model " * CORPUS_CHARACTERS)
    (tmp_path / "README.md").write_text("not this")
    text, name = corpus_text(tmp_path)
    assert name == "en.txt, zh.txt"
    assert text.startswith("language")
    assert text.rstrip().endswith("语言模型")
    assert len(text) == CORPUS_CHARACTERS + 1 + 1000
    assert "not this" not in text


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="txt files"):
        corpus_text(tmp_path)
