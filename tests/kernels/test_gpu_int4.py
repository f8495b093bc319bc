"""The benchmark of Hopper's 4-bit kernels: its comparison, here in our interpreter of Gluon."""

from __future__ import annotations

import pytest
from benchmarks import gpu_int4, hopper_layers

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

from tailrace.kernels.linear import (
    triton_hopper_int4,
    triton_hopper_int4_bands,
    triton_hopper_int4_few,
    triton_hopper_ring,
)
from tests.kernels.gluon_interpreter import Interpreter
from tests.kernels.on_gluon import WRITTEN_BEFORE

GLUON = (triton_hopper_int4, triton_hopper_int4_bands, triton_hopper_int4_few)
SMALL = (gpu_int4.Case(64, 128, 70, "bfloat16", is_dependent=True),)


@pytest.fixture
def small(monkeypatch):
    """Let the kernels run on the CPU, over layers that are small enough for that."""
    for module in GLUON[:2]:
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(triton_hopper_ring, "MOST_STAGES", 3)
    monkeypatch.setattr(gpu_int4, "CASES", SMALL)
    for seed, module in enumerate(GLUON):
        name = next(name for name in vars(module) if name.endswith("_kernel"))
        kernel = Interpreter(getattr(module, name), seed=seed, late=WRITTEN_BEFORE)
        monkeypatch.setattr(module, name, kernel)


def test_every_candidate_is_of_a_kind_and_every_kernel_has_kinds():
    kinds = gpu_int4.all_kinds()
    assert len(kinds) == len(set(kinds))
    for rows in gpu_int4.ROWS:
        for shape in gpu_int4.candidates(rows):
            assert gpu_int4.kind_of(rows, shape) in kinds
    last_words = {words.split()[-1] for _, words in kinds}
    assert last_words == {"pair", "units", "turn", "whole", "slices"}


@pytest.mark.parametrize("kind", gpu_int4.all_kinds(), ids=str)
def test_the_comparison_reaches_each_kind(small, monkeypatch, kind):
    # One seed is one order of all that happens: here a product cannot differ a third time.
    monkeypatch.setattr(hopper_layers, "TIMES", 2)
    monkeypatch.setattr(hopper_layers, "CHAINED", 1)
    assert gpu_int4.check(*kind, device="cpu") == []


@pytest.mark.parametrize("kind", gpu_int4.all_kinds(), ids=str)
def test_each_kind_is_compared_over_groups_and_halves_and_tiles_that_are_cut(kind):
    shapes = [s for s in gpu_int4.candidates(kind[0]) if gpu_int4.kind_of(kind[0], s) == kind]
    cases = [case for case in gpu_int4.CASES if gpu_int4.can_multiply(shapes[0], case)]
    assert {(case.group, case.dtype) for case in cases} == {
        (group, dtype) for group in (64, 128) for dtype in ("bfloat16", "float16")
    }
    assert {case.group for case in cases if case.is_dependent} == {64, 128}
    assert {case.outputs % 512 == 0 for case in cases} == {True, False}
    assert {case.outputs % 16 == 0 for case in cases} == {True, False}
    assert max(case.chunks for case in cases) > triton_hopper_ring.MOST_STAGES


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda y, call: y * 1.02, ": 0.02"),
        (lambda y, call: y + (call == 1), "another time, other bits"),
        (lambda y, call: y + (call == 3), "a row depends on its neighbours"),
        (lambda y, call: y + (call == 6), "other bits by dependent launches"),
    ],
    ids=["wrong", "now and then", "beside fewer", "dependent"],
)
def test_what_differs_is_named(small, monkeypatch, fault, words):
    kind = gpu_int4.all_kinds()[0]
    multiply = gpu_int4.launcher

    def launcher(shape):
        calls = []

        def faulty(*arguments, **options):
            calls.append(None)
            y = multiply(shape)(*arguments, **options)
            return fault(y.float(), len(calls) - 1).to(y.dtype)

        return faulty

    monkeypatch.setattr(gpu_int4, "launcher", launcher)
    wrong = gpu_int4.check(*kind, device="cpu")
    assert len(wrong) == 2  # of two shapes
    assert all(words in line for line in wrong)


def entries(layer, rows, **ways):
    """Return times as `time_layer` gives them."""
    entry = {"layer": layer, "rows": rows, "floor_us": 1.0}
    new = [{**entry, "way": way, "us": us, "is_new": True} for way, us in ways.items()]
    return [{**entry, "way": "triton", "us": 2.0}, *new]


def test_the_tables_name_the_fastest_and_what_is_missing(capsys):
    found = []
    for layer in gpu_int4.LAYERS:
        found += entries(layer, 16, **{"4 slices": 1.5, "128/8/1/4 whole": 1.7})
    found += entries("qkv", 64, **{"128/8/1/4 whole": 3.0})
    gpu_int4.print_tables(found)
    gpu_int4.print_served(found)
    said = capsys.readouterr().out
    assert "1.5 by 4 slices, 1.7 by 128/8/1/4 whole" in said
    assert "64   not timed: o, gate_up, down" in said
    assert "32   not timed: qkv, o, gate_up, down" in said
    assert '["4 slices", ' in said
