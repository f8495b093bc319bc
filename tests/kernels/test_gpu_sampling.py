"""The benchmark of the sampling kernels: what it compares, and which kernels it times."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("it is the GPU's own", allow_module_level=True)


@pytest.fixture
def benchmark(interpreter):
    return import_module("benchmarks.gpu_sampling")


def run(benchmark, monkeypatch, *arguments):
    """Return the exit status of a run on the CPU."""
    small = ("--device", "cpu", "--vocab", "1100", "--rows", "2", "--programs", "2")
    monkeypatch.setattr(sys, "argv", ["gpu_sampling.py", *small, *arguments])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    return ended.value.code


def test_what_serves_draws_what_the_reference_and_all_its_ways_draw(benchmark, monkeypatch, capsys):
    other = benchmark.serving.__file__
    assert not run(benchmark, monkeypatch, "--other", other)
    told = capsys.readouterr().out
    assert told.count("0 of 8 tokens differ") == len(benchmark.USUAL)
    assert told.count("alike") == len(benchmark.USUAL)


def test_a_version_that_draws_other_tokens_is_named_and_not_timed(benchmark, monkeypatch, capsys):
    def shifted(*given):
        drawn = benchmark.serving.sample(*given)
        return type(drawn)(drawn.token_ids + 1, drawn.logprobs, drawn.ranks)

    scratch = benchmark.serving.SamplingScratch
    wrong = SimpleNamespace(sample=shifted, SamplingScratch=scratch)
    monkeypatch.setattr(benchmark.other_version, "load", lambda path, name: wrong)
    assert run(benchmark, monkeypatch, "--other", "another.py")
    assert "DIFFERS, not timed: the other: 2 tokens, 0 ranks" in capsys.readouterr().out


def test_what_a_kernel_costs_is_the_difference_of_draws_up_to_it(benchmark, monkeypatch):
    launched = []

    class Noted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.append(self.name)
            return self.kernel[grid]

    for name in benchmark.KERNELS:
        kernel = getattr(benchmark.serving, f"{name}_kernel")
        monkeypatch.setattr(benchmark.serving, f"{name}_kernel", Noted(name, kernel))
    counts = []

    def counted(work):
        launched.clear()
        work()
        counts.append(len(launched))
        assert tuple(launched) == benchmark.KERNELS[: len(launched)]
        return len(launched)

    monkeypatch.setattr(benchmark, "captured", counted)
    monkeypatch.setattr(
        benchmark, "medians_us", lambda graphs, _: {n: g**2 for n, g in graphs.items()}
    )
    case = benchmark.make_case(2, 1100, "rank", 3.0, "cpu")
    costs = benchmark.kernel_costs_us(case, benchmark.Way("", benchmark.serving), 1)
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8]
    assert costs == {name: 2 * place + 1 for place, name in enumerate(benchmark.KERNELS)}
