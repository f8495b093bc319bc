from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tailrace.errors import ConfigError
from tailrace.kernels.native import library

# Answers as the real compiler would, counts what it compiles, and fails where it is told to.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" != --version ]; then
  echo compiled >> "{log}"
  if [ -e "{broken}" ]; then echo "kernels.c:1: fatal error: no luck" >&2; exit 3; fi
fi
exec {real} "$@"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compiler(tmp_path, monkeypatch, native_library):
    real = library.find_compiler()[0]
    script = tmp_path / "fakecc"
    log, broken = tmp_path / "log", tmp_path / "broken"
    script.write_text(FAKE_COMPILER.format(log=log, broken=broken, real=real))
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    log.touch()
    # How fast the code is does not matter here, but how long compiling takes does.
    monkeypatch.setattr(library, "FLAGS", tuple(f for f in library.FLAGS if f != "-O3"))
    return log, broken


def test_the_second_load_does_not_compile(cache, compiler):
    log, broken = compiler
    first = library.load(2)
    broken.touch()  # compiling would fail now
    second = library.load(1)
    assert first.path == second.path
    assert first.path.is_relative_to(cache)
    assert log.read_text() == "compiled\n"
    assert second.isa in ("avx512", "avx2", "neon", "sse")


def test_a_failed_compile_says_why_and_leaves_nothing(cache, compiler):
    _, broken = compiler
    broken.touch()
    with pytest.raises(ConfigError, match=r"(?s)exited 3; install gcc.*no luck"):
        library.load(2)
    assert [p for p in cache.rglob("*") if p.is_file()] == []
    broken.unlink()
    library.load(2)


def test_the_library_and_its_folder_are_private(cache, compiler):
    path = library.load(2).path
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_library_that_others_may_write_is_not_loaded(cache, compiler):
    path = library.load(2).path
    path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"written by other users.*mode 777"):
        library.load(2)


def test_a_file_that_is_no_library_is_an_error(cache, compiler):
    path = library.load(2).path
    path.with_name("other.so").write_text("not code")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        library.Library(path.with_name("other.so"), 2)


def test_processes_that_start_together_each_find_a_whole_library(cache, compiler):
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(library.load(2).path)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert sorted(p.name for p in paths[0].parent.iterdir()) == ["libtailrace.so"]


def test_another_source_flag_or_compiler_is_another_library(tmp_path, monkeypatch):
    def key(*compiler):
        return library.library_key(list(compiler))

    cc = library.find_compiler()
    first = key(*cc)
    assert key(*cc) == first
    assert key(*cc, "-g") != first
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    assert key(*cc) != first
    monkeypatch.undo()
    (tmp_path / "kernels.c").write_text("int x;")
    monkeypatch.setattr(library, "SOURCE_FOLDER", tmp_path)
    assert key(*cc) != first


def test_no_compiler_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match=r"no C compiler found; install gcc"):
        library.find_compiler()


def test_a_named_compiler_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("CC", "nosuchcc -m64")
    with pytest.raises(ConfigError, match=r"\$CC is 'nosuchcc', which is not found"):
        library.find_compiler()


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, native_library):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"\$TAILRACE_CACHE_DIR"):
        library.load(2)


def test_one_openmp_library_serves_torch_and_the_kernels(native):
    native.rms_norm(torch.randn(4000, 600), torch.ones(600), 1e-5)
    mapped = Path("/proc/self/maps").read_text().split()
    assert len({path for path in mapped if "omp" in Path(path).name and ".so" in path}) == 1


def test_the_threads_are_torchs_own(native):
    """A call from a process that used torch adds no threads to it."""
    x = torch.randn(4000, 600)
    torch.mm(x, x.t()).sum()
    before = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(3):
        native.rms_norm(x, torch.ones(600), 1e-5)
        (x + 1).sum()
    assert len(list(Path("/proc/self/task").iterdir())) == before
