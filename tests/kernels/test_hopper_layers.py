"""How benchmarks of few rows are asked, and answer as the processes that they start."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import gpu_float8, gpu_half, gpu_int4

LAYERS = ["qkv", "o", "gate_up", "down"]


@pytest.fixture
def as_before(monkeypatch):
    """Put back what such a process sets for good."""
    monkeypatch.setenv(
        "CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    )
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("benchmark", [gpu_half, gpu_float8, gpu_int4])
def test_a_process_says_what_is_wrong_with_its_kind(monkeypatch, capsys, as_before, benchmark):
    monkeypatch.setattr(benchmark, "check", lambda rows, words: [f"{words} at {rows}"])
    monkeypatch.setattr(sys, "argv", ["benchmark", "--check", json.dumps([16, "tiles"])])
    benchmark.main()
    assert json.loads(capsys.readouterr().out) == ["tiles at 16"]


@pytest.mark.parametrize(
    ("benchmark", "timed", "layers"),
    [
        (gpu_half, "time_all", [None]),
        (gpu_float8, "time_layer", LAYERS),
        (gpu_int4, "time_layer", LAYERS),
    ],
)
def test_a_process_says_times_as_it_comes_to_them(
    monkeypatch, capsys, as_before, benchmark, timed, layers
):
    def times(*given):
        *layer, kinds = given
        yield [{"layer": layer[0] if layer else None, "kinds": kinds}]

    monkeypatch.setattr(benchmark, timed, times)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--time", json.dumps([[16, "tiles"]])])
    benchmark.main()
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said == [[{"layer": layer, "kinds": [[16, "tiles"]]}] for layer in layers]
