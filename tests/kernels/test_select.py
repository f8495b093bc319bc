from __future__ import annotations

import os

import pytest
import torch

from tailrace.errors import ConfigError
from tailrace.kernels.select import select


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)


def test_torch_is_taken_where_asked():
    assert select("torch", 1).name == "torch"


@pytest.mark.parametrize("preference", ["auto", "native"])
def test_native_is_taken_where_it_compiles(native_library, preference):
    assert select(preference, 1).name == f"native ({native_library.isa}, 1 thread)"


def test_auto_without_a_compiler_says_why_in_its_name(no_compiler):
    assert select("auto", 1).name == "torch (native kernels unavailable: no C compiler found)"


def test_native_without_a_compiler_is_an_error(no_compiler):
    with pytest.raises(
        ConfigError, match=r"--cpu-kernels native: no C compiler found; .*--cpu-kernels torch"
    ):
        select("native", 1)


def test_auto_with_a_failing_compiler_says_why_in_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    name = select("auto", 1).name
    assert name == (
        "torch (native kernels unavailable: compiling the native kernels failed: false exited 1)"
    )


def test_an_unknown_preference_names_the_nearest():
    with pytest.raises(ConfigError, match=r"nativ: must be one of .* \(did you mean 'native'\?\)"):
        select("nativ", 1)


def test_torch_gets_the_same_threads():
    select("torch", 1)
    assert torch.get_num_threads() == 1
    select("torch", 0)
    assert torch.get_num_threads() == len(os.sched_getaffinity(0))
