"""The benchmark of Hopper's kernel of few FP8 rows: its comparison in our interpreter of Gluon."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from benchmarks import gpu_float8, gpu_gemm, hopper_layers

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

from tailrace.kernels.linear import (
    float8_linear,
    float8_rows,
    hopper_float8_ways,
    triton_float8_few,
    triton_float8_rows,
    triton_hopper_float8,
)
from tests.kernels.gluon_interpreter import Interpreter
from tests.kernels.test_triton_hopper_float8 import WRITTEN_BEFORE
from tests.support.pairs import dealt

SMALL = tuple(
    gpu_float8.Case(by_blocks, 144, 70, "bfloat16", is_dependent=True)
    for by_blocks in (False, True)
)
KINDS = gpu_float8.all_kinds()
NOTHING = ((0, 0, ("Triton",) * 4),)
"""A table by which no layer takes Gluon's kernel."""


@pytest.fixture
def small(monkeypatch):
    """Let the kernel run on the CPU, over layers that are small enough for that."""
    for module in (triton_hopper_float8, hopper_float8_ways):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(gpu_float8, "CASES", SMALL)
    kernel = Interpreter(triton_hopper_float8.float8_hopper_kernel, late=WRITTEN_BEFORE)
    monkeypatch.setattr(triton_hopper_float8, "float8_hopper_kernel", kernel)


def test_every_candidate_is_of_a_kind():
    assert len(KINDS) == len(set(KINDS))
    for rows in gpu_float8.ROWS:
        for shape in gpu_float8.candidates(rows):
            assert gpu_float8.kind_of(rows, shape) in KINDS


@pytest.mark.parametrize(("rows", "words", "case"), dealt(KINDS, SMALL), ids=str)
def test_the_comparison_reaches_each_kind(small, monkeypatch, rows, words, case):
    """Over one of the small layers, so that each tile of rows and each shape meets both."""
    monkeypatch.setattr(gpu_float8, "CASES", (case,))
    # One seed is one order of all that happens: here a product cannot differ a third time.
    monkeypatch.setattr(hopper_layers, "TIMES", 2)
    monkeypatch.setattr(hopper_layers, "CHAINED", 1)
    assert gpu_float8.check(rows, words, device="cpu") == []


def test_layers_are_compared_by_both_schemes_in_both_halves_and_with_cut_tiles():
    cases = gpu_float8.CASES
    assert {(case.by_blocks, case.dtype) for case in cases} == {
        (by_blocks, dtype) for by_blocks in (False, True) for dtype in ("bfloat16", "float16")
    }
    assert {case.by_blocks for case in cases if case.is_dependent} == {False, True}
    for by_blocks in (False, True):
        some = [case for case in cases if case.by_blocks == by_blocks]
        assert {case.outputs % 512 == 0 for case in some} == {True, False}
        assert {case.inputs % 128 == 0 for case in some} == {True, False}
    assert any(case.outputs % 16 for case in cases), "none has a bias"


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
    calls = []
    multiply = gpu_float8.multiply
    calls_a_case = 9

    def faulty(*given, **options):
        calls.append(None)
        y = multiply(*given, **options)
        return fault(y.float(), (len(calls) - 1) % calls_a_case).to(y.dtype)

    monkeypatch.setattr(gpu_float8, "multiply", faulty)
    wrong = gpu_float8.check(*KINDS[0], device="cpu")
    assert len(calls) % calls_a_case == 0
    assert len(wrong) == len(calls) // calls_a_case == 4  # two shapes, two schemes
    assert all(words in line for line in wrong)


def test_shapes_that_cut_a_layer_alike_or_are_not_right_are_not_timed():
    usual = triton_float8_few.HOPPER[0][1].words
    few = len(triton_float8_few.few_options((9, 0))[16])
    found = gpu_float8.shapes_of(16, 3584, 18944, 132, KINDS)
    assert next(iter(found)) == usual
    # All spans of down's runs are longer than the least: they are one and the same.
    assert [words for words in found if "128/8" in words] == [
        "FP8 Hopper 128/8/1/4 pairs", "FP8 Hopper 128/8/1/4 last",
    ]  # fmt: skip
    assert sum("slices" in words for words in found) == 2
    assert not [w for w in gpu_float8.shapes_of(16, 37888, 3584, 132, KINDS) if "slices" in w]
    assert len(gpu_float8.shapes_of(16, 4608, 3584, 132, [])) == few
    short = gpu_float8.shapes_of(16, 3584, 3584, 132, KINDS)
    assert sum("128/8" in words for words in short) == 3 + 2, "spans of 6, 7 and 14"


def test_a_layer_is_timed_by_class_and_by_blocks_once(monkeypatch):
    """Each way over all copies of a weight, plainly and by dependent launches; no GPU is asked."""
    taken = []
    gpu = SimpleNamespace(multi_processor_count=4)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, device: randn(*sizes, device="cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(triton_float8_rows, "quantize_rows", float8_rows.quantize_rows)
    monkeypatch.setattr(hopper_float8_ways, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(gpu_float8, "LAYERS", {"o": (256, 384)})
    monkeypatch.setattr(gpu_float8, "COLD_BYTES", 250_000)
    monkeypatch.setattr(gpu_float8, "graph_s", lambda work: work() or 3e-6)
    monkeypatch.setattr(
        gpu_float8, "multiply", lambda x, weight, *_, shape, **__: taken.append((weight, shape))
    )
    found = list(gpu_float8.time_layer("o", KINDS))
    classes = [(rows, False) for rows in gpu_float8.ROWS] + [(gpu_float8.BLOCKS_ROWS, True)]
    assert [(some[0]["rows"], some[0]["by_blocks"]) for some in found] == classes
    for (rows, _), some in zip(classes, found, strict=True):
        assert [e["way"] for e in some] == [*gpu_float8.shapes_of(rows, 256, 384, 4, KINDS)]
        assert {(e["us"], e["dependent_us"]) for e in some} == {(1.0, 1.0)}, "3 copies of 98 KB"
    assert len(taken) == 3 * 2 * sum(map(len, found))


def entries(layer, rows, by_blocks=False, **ways):
    """Return times as `time_layer` gives them."""
    usual = next(iter(triton_float8_few.few_options((9, 0))[rows]))
    entry = {"layer": layer, "rows": rows, "by_blocks": by_blocks, "floor_us": 1.0}
    times = {usual: 2.0, **ways}
    return [
        {**entry, "way": way, "us": us, "dependent_us": us - 0.5, "is_new": way != usual}
        for way, us in times.items()
    ]


def test_the_tables_name_the_fastest_and_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(hopper_float8_ways, "SERVED", NOTHING)
    slices, runs = "FP8 Hopper 64 outputs, 4 slices", "FP8 Hopper 128/8/1/4 last"
    found = []
    for layer in gpu_float8.LAYERS:
        found += entries(layer, 16, **{slices: 1.5, runs: 1.7})
    found += entries("qkv", 64, **{runs: 3.0})
    found += entries("qkv", 64, by_blocks=True, **{runs: 1.0})
    gpu_float8.print_tables(found)
    gpu_float8.print_served(found)
    said = capsys.readouterr().out
    assert f"1.5 by {slices}, 1.7 by {runs}" in said
    assert f"1.0 by {slices}, 1.2 by {runs}" in said
    assert "64   not timed: o, gate_up, down" in said
    assert "by blocks of 128 x 128" in said
    assert f'qkv      ["{slices}", "Triton", "Triton", "Triton"]' in said


def test_what_serves_is_left_where_it_was_not_timed_or_is_hardly_slower():
    assert hopper_layers.fastest_of({"new": 1.0}, "old", 0.05) == "old"
    assert hopper_layers.fastest_of({"new": 0.97, "old": 1.0}, "old", 0.05) == "old"
    assert hopper_layers.fastest_of({"new": 0.9, "old": 1.0}, "old", 0.05) == "new"
    assert hopper_layers.fastest_of({}, "old", 0.05) == "old"


@pytest.mark.parametrize(
    ("code", "lines", "reason"),
    [("print('[1]', flush=True)", [[1]], ""),
     ("print('[]', flush=True); raise ValueError('why')", [[]], "ValueError: why"),
     ("import time; time.sleep(60)", [], "no answer in 3 s")],
    ids=["answers", "fails", "hangs"],
)  # fmt: skip
def test_a_process_apart_answers_or_is_ended(tmp_path, code, lines, reason):
    file = tmp_path / "work.py"
    file.write_text(code)
    assert hopper_layers.run_apart(str(file), [], 3) == (lines, reason)


@pytest.mark.parametrize("way", gpu_gemm.BY_HOPPER)
@pytest.mark.parametrize("fault", [0.02, float("nan")], ids=str)
def test_beside_other_formats_every_shape_is_compared(interpreter, small, monkeypatch, way, fault):
    """gpu_gemm.py's way by the fastest: one shape that is wrong is enough."""
    monkeypatch.setattr(hopper_float8_ways, "SERVED", NOTHING)
    monkeypatch.setattr(float8_linear, "_is_hopper", lambda device: True)
    setting = gpu_gemm.Setting("cpu", torch.float16, {}, (7,))
    taken, last = [], hopper_float8_ways.CANDIDATES[16][-1].words
    product = hopper_float8_ways.float8_hopper

    def faulty(*given, shape, **options):
        taken.append(shape.words)
        y = product(*given, shape=shape, **options)
        if wrong and shape.words == last:
            y.mul_(1 + 4 * fault)

    monkeypatch.setattr(hopper_float8_ways, "float8_hopper", faulty)
    for wrong in (False, True):
        error = gpu_gemm._difference(way, setting, (7, 256, 112), has_bias=True)
        assert (error < gpu_gemm.BOUNDS[way]) != wrong
    shapes = [shape for shape in hopper_float8_ways.CANDIDATES[16] if shape.fits(112, 2)]
    assert taken == [shape.words for shape in shapes] * 2


def test_the_fastest_shapes_are_told_by_layer_and_rows(capsys):
    entry = {"way": "fp8 hopper mm", "floor_us": 1.0}
    gpu_gemm.print_shapes(
        [
            {**entry, "layer": "o", "rows": 16, "us": 5.0, "shape": "FP8 Hopper x"},
            {**entry, "layer": "o", "rows": 64, "us": 7.25, "shape": "FP8 Hopper y"},
        ]
    )
    told = capsys.readouterr().out
    assert (
        told == "o fp8 hopper mm: 16 rows 5.0 us by FP8 Hopper x; 64 rows 7.2 us by FP8 Hopper y\n"
    )
