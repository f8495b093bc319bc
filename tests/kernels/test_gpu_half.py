"""The benchmark of Hopper's kernel of few rows in half precision: its comparison on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from benchmarks import gpu_half, hopper_layers

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

from tailrace.kernels.linear import hopper_half_ways, triton_hopper_half, triton_skinny
from tests.kernels.gluon_interpreter import Interpreter
from tests.kernels.on_gluon import WRITTEN_BEFORE
from tests.support.pairs import dealt

SMALL = (
    gpu_half.Case(144, 70, "bfloat16", is_dependent=True),
    gpu_half.Case(136, 131, "float16"),
)
KINDS = gpu_half.all_kinds()
CUBLAS = triton_skinny.CUBLAS


@pytest.fixture
def small(monkeypatch):
    """Let the kernel run on the CPU, over layers that are small enough for that."""
    for module in (triton_hopper_half, hopper_half_ways):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(gpu_half, "CASES", SMALL)
    kernel = Interpreter(triton_hopper_half.half_hopper_kernel, late=WRITTEN_BEFORE)
    monkeypatch.setattr(triton_hopper_half, "half_hopper_kernel", kernel)


def test_every_candidate_that_a_layer_here_is_offered_is_of_a_kind():
    assert len(KINDS) == len(set(KINDS))
    for rows, tile in gpu_half.CLASSES.items():
        for sizes in gpu_half.LAYERS.values():
            options = hopper_half_ways.options(sizes[0], tile, CUBLAS, gpu_half.H200)
            shapes = [shape for shape in options.values() if hasattr(shape, "cut")]
            assert {gpu_half.kind_of(tile, shape) for shape in shapes} <= set(KINDS), rows


@pytest.mark.parametrize(("rows", "words", "case"), dealt(KINDS, SMALL), ids=str)
def test_the_comparison_reaches_each_kind(small, monkeypatch, rows, words, case):
    """Over one of the small layers, so that each tile of rows and each shape meets both."""
    monkeypatch.setattr(gpu_half, "CASES", (case,))
    # One seed is one order of all that happens: here a product cannot differ a third time.
    monkeypatch.setattr(hopper_layers, "TIMES", 2)
    monkeypatch.setattr(hopper_layers, "CHAINED", 1)
    assert gpu_half.check(rows, words, device="cpu") == []


def test_layers_are_compared_in_both_halves_with_cut_tiles_and_a_bias():
    cases = gpu_half.CASES
    assert {case.dtype for case in cases} == {"bfloat16", "float16"}
    assert any(case.is_dependent for case in cases)
    assert any(case.outputs % 16 for case in cases), "none has a bias"
    assert {case.inputs % 128 == 0 for case in cases} == {True, False}
    assert {case.outputs % 256 == 0 for case in cases} == {True, False}


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
    multiply = gpu_half.multiply
    monkeypatch.setattr(gpu_half, "CASES", SMALL[:1])
    calls_a_case = 9

    def faulty(*given, **options):
        calls.append(None)
        y = multiply(*given, **options)
        return fault(y.float(), (len(calls) - 1) % calls_a_case).to(y.dtype)

    monkeypatch.setattr(gpu_half, "multiply", faulty)
    wrong = gpu_half.check(*KINDS[0], device="cpu")
    assert len(calls) == calls_a_case * len(wrong) > 0
    assert all(words in line for line in wrong)


def test_shapes_that_cut_a_layer_alike_or_are_not_right_are_not_timed():
    found = gpu_half.shapes_of(16, 3584, 18944, 132, KINDS)
    assert next(iter(found)) == CUBLAS
    assert {"Triton", "Triton, inputs split"} < set(found)
    # Both spans of down's runs are longer than the least: they are one and the same.
    assert [words for words in found if "128x64" in words] == [
        "Hopper 128x64/4/1/8 pairs", "Hopper 128x64/4/1/8 last",
    ]  # fmt: skip
    assert {"Hopper 32x128, 2 slices", "Hopper 64x128, 2 slices"} < set(found)
    wide = gpu_half.shapes_of(50, 37888, 3584, 132, KINDS)
    assert "Hopper 288x64/4 whole" in wide
    assert not [words for words in wide if "slices" in words or "Triton" in words]
    assert list(gpu_half.shapes_of(64, 4608, 3584, 132, [])) == [CUBLAS]


def test_every_layer_is_timed_at_each_number_of_rows(monkeypatch):
    """Each way over all copies of a weight, plainly and by dependent launches; no GPU is asked."""
    taken = []
    gpu = SimpleNamespace(multi_processor_count=4)
    randn = torch.randn
    monkeypatch.setattr(
        torch, "randn", lambda *sizes, device, **more: randn(*sizes, device="cpu", **more)
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(hopper_half_ways, "multiprocessors", lambda device: 4)
    workspace = gpu_half.workspace_of
    cpu = torch.device("cpu")
    monkeypatch.setattr(gpu_half, "workspace_of", lambda _, *sizes: workspace(cpu, *sizes))
    monkeypatch.setattr(gpu_half, "LAYERS", {"o": (256, 384), "head": (640, 64)})
    monkeypatch.setattr(gpu_half, "COLD_BYTES", 500_000)
    monkeypatch.setattr(gpu_half, "graph_s", lambda work: work() or 6e-6)
    monkeypatch.setattr(
        gpu_half, "multiply", lambda x, weight, *_, shape, **__: taken.append((len(x), shape))
    )
    found = list(gpu_half.time_all(KINDS))
    wanted = [(name, rows) for rows in gpu_half.ROWS for name in ("o", "head")]
    assert [(some[0]["layer"], some[0]["rows"]) for some in found] == wanted
    ours = 0
    for (name, rows), some in zip(wanted, found, strict=True):
        copies = 3 if name == "o" else 7
        shapes = gpu_half.shapes_of(rows, *gpu_half.LAYERS[name], 4, KINDS)
        assert [e["way"] for e in some] == [*shapes]
        assert {(e["us"], e["dependent_us"]) for e in some} == {(6.0 / copies, 6.0 / copies)}
        ours += 2 * copies * (len(shapes) - 1)
    assert len(taken) == ours


def entries(layer, rows, **ways):
    """Return times as `time_all` gives them."""
    entry = {"layer": layer, "rows": rows, "floor_us": 1.0}
    times = {CUBLAS: 2.0, **ways}
    return [
        {**entry, "way": way, "us": us, "dependent_us": us - 0.5 * (way != CUBLAS),
         "is_new": "Hopper" in way}
        for way, us in times.items()
    ]  # fmt: skip


def test_the_table_names_the_fastest_and_what_is_missing(monkeypatch, capsys):
    nothing = ((0, 0, (hopper_half_ways.ELSEWHERE,) * 4),)
    monkeypatch.setattr(hopper_half_ways, "SERVED", nothing)
    runs, whole = "Hopper 128x64/4/1/8 last", "Hopper 288x64/4 whole"
    found = []
    for layer in gpu_half.LAYERS:
        found += entries(layer, 50, **{runs: 1.5, whole: 1.7})
    found += entries("qkv", 16, **{runs: 3.0, "Triton": 1.9})
    gpu_half.print_ways(found)
    gpu_half.print_served(found)
    gpu_half.print_table(found)
    said = capsys.readouterr().out
    assert f"qkv 50: {runs} 1.5/1.0; {whole} 1.7/1.2; cuBLAS 2.0/2.0" in said
    assert f'qkv      ["Triton", "cuBLAS", "{runs}", "cuBLAS"]' in said
    assert f"  qkv        16     1.0     2.0     1.9     3.0     2.5   {runs} / {runs}" in said
    assert "a step     16   not timed: o, gate_up, down, head" in said
    # 28 times four layers, and the head.
    assert "a step     50    0.11    0.23            0.17    0.11   ms" in said
