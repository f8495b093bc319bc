"""Whether a start will compile is known before Triton is imported, and as Triton has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.kernels import compile_process


@pytest.fixture
def begun(monkeypatch):
    """Return the commands of processes that are begun, none of which is."""
    commands = []
    monkeypatch.setattr(compile_process, "own_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(compile_process, "find_spec", lambda _: "found")
    monkeypatch.setattr(compile_process, "begin", lambda command, _: commands.append(command))
    return commands


def test_neither_torch_nor_triton_is_imported_to_begin_one():
    script = (
        "import sys, tailrace.kernels.compile_process\n"
        "sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TRITON_CACHE_DIR": "/somewhere/else"},
        {"TRITON_HOME": "/elsewhere"},
        {"TRITON_HOME": "/elsewhere", "TRITON_CACHE_DIR": "/somewhere"},
    ],
    ids=["home", "named", "home-named", "both"],
)
def test_the_cache_is_where_triton_has_it(environment, monkeypatch):
    knobs = pytest.importorskip("triton.knobs", reason="Triton is not installed")
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert compile_process.cache_folder() == Path(knobs.cache.dir)


def test_who_has_no_home_may_name_the_cache(monkeypatch):
    """As a user of no name in a container: Triton asks for a home where nothing else is named."""

    def nobody(_):
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    assert compile_process.cache_folder() == Path("/somewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", "/elsewhere")
    assert compile_process.cache_folder() == Path("/elsewhere/.triton/cache")
    monkeypatch.delenv("TRITON_HOME")
    assert compile_process.cache_folder() == Path("~/.triton/cache")  # below where it runs


def test_one_is_begun_where_the_cache_is_next_to_empty(begun, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none-yet"))
    compile_process.begin_if_cold()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compile_process.begin_if_cold()
    assert begun == [compile_process.COMMAND] * 2
    for number in range(40):
        (tmp_path / str(number)).touch()
    compile_process.begin_if_cold()
    assert len(begun) == 2


def test_a_cache_that_cannot_be_read_is_as_good_as_none(tmp_path, monkeypatch):
    """The start says what is wrong with it when it looks for kernels."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for number in range(40):
        (tmp_path / str(number)).touch()
    assert not compile_process.cache_is_cold()
    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", refuse)
        assert compile_process.cache_is_cold()


def test_folders_of_a_start_that_was_killed_while_it_compiled_count_for_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    folders = [tmp_path / str(number) for number in range(40)]
    for folder in folders:
        folder.mkdir()
    assert compile_process.cache_is_cold()
    for folder in folders[:32]:
        (folder / "kernel.cubin").touch()
    assert not compile_process.cache_is_cold()


def test_who_may_not_choose_cores_starts_without_one(monkeypatch):
    """As where a sandbox forbids it: the start compiles by itself."""

    def refuse(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr("os.sched_setaffinity", refuse)
    assert compile_process.begin((sys.executable, "-c", ""), [0]) is None


def test_what_cannot_be_started_leaves_the_threads_cores_as_they_were(tmp_path):
    own = os.sched_getaffinity(0)
    assert compile_process.begin((str(tmp_path / "nothing"),), [min(own)]) is None
    assert os.sched_getaffinity(0) == own


def test_none_is_begun_where_a_core_is_missing_for_it(begun, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_process, "own_cores", lambda: [0, 1])
    compile_process.begin_if_cold()
    assert not begun


def test_none_is_begun_where_triton_is_missing(begun, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_process, "find_spec", lambda _: None)
    compile_process.begin_if_cold()
    assert not begun
