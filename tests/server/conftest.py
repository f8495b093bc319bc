import pytest

from tests.support.tiny import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with the tiny byte-level tokenizer and its chat template."""
    folder = tmp_path_factory.mktemp("tiny_text")
    write_tiny_tokenizer(folder)
    return folder
