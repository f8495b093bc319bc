"""Which kernel multiplies few FP8 rows on Hopper: by the table, by a plan, and what a layer gives.

Gluon's kernel runs here in our interpreter, Triton's in Triton's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tailrace.errors import ConfigError

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.linear import float8_linear, triton_float8_few, triton_hopper_float8
from tailrace.kernels.linear import hopper_float8_ways as table
from tailrace.kernels.linear.float8 import quantize_blocks, quantize_channels
from tailrace.kernels.linear.ways import MANY, class_words, words_of
from tailrace.kernels.linear.workspace import Workspace
from tailrace.kernels.plan import Key, Plan, choose
from tailrace.kernels.plan_answers import measure
from tailrace.kernels.plan_questions import Heads, questions
from tailrace.kernels.plan_winners import apply
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.gluon_interpreter import Interpreter
from tests.kernels.test_triton_hopper_float8 import WRITTEN_BEFORE

CPU = torch.device("cpu")
CLASSES = (16, 32, 64, 128)
LAYERS = {"qkv": (4608, 3584), "gate_up": (37888, 3584), "down": (3584, 18944), "small": (48, 128)}
RUNS, SLICES = "FP8 Hopper 128/4/2/4 last", "FP8 Hopper 64 outputs, 4 slices"
TRITON = triton_float8_few.HOPPER[0][1].words
KEY = Key(gpu="g", model="m", dtype="float16", tailrace="1", torch="2", triton="3")


def ways_of(monkeypatch, name, count=132):
    monkeypatch.setattr(table, "multiprocessors", lambda device: count)
    return table.ways(*LAYERS[name], CPU)


@pytest.fixture
def on_hopper(monkeypatch):
    """Let layers on the CPU be served as on a Hopper GPU of three multiprocessors."""
    monkeypatch.setattr(float8_linear, "_is_hopper", lambda device: True)
    for module in (table, triton_hopper_float8):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    kernel = Interpreter(triton_hopper_float8.float8_hopper_kernel, seed=1, late=WRITTEN_BEFORE)
    monkeypatch.setattr(triton_hopper_float8, "float8_hopper_kernel", kernel)


# The table and what a plan may choose


TWO, PAIRED = "FP8 Hopper 64 outputs, 2 slices", "FP8 Hopper 128/8/1/4 pairs"
AS_MEASURED = {
    "gate_up": ("Triton", "Triton", PAIRED, PAIRED),
    "down": (TWO, TWO, TWO, PAIRED),
    "qkv": (TWO,) * 4,
    "small": (TWO,) * 4,
}


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_plan_each_layer_is_served_as_measured_on_an_h200(monkeypatch, name):
    ways = ways_of(monkeypatch, name)
    assert ways.classes == list(CLASSES)
    usual = {rows: shape.words for rows, shape in triton_float8_few.HOPPER}
    for rows, expected in zip(CLASSES, AS_MEASURED[name], strict=True):
        assert ways.serving(rows) == (usual[rows] if expected == "Triton" else expected)


@pytest.mark.parametrize("name", LAYERS)
def test_both_kernels_are_candidates_and_slices_only_where_they_fit(monkeypatch, name):
    ways = ways_of(monkeypatch, name)
    assert ways.compiles_long
    for rows in CLASSES:
        options = ways.options(rows)
        assert len(options) == len(set(options))
        assert set(triton_float8_few.few_options((9, 0))[rows]) < set(options)
        assert any(words.startswith("FP8 Hopper 256/8") for words in options)
        assert any("slices" in words for words in options) == (name != "gate_up")
        for words in options:
            ways.serve(rows, words)
            assert ways.of(rows).words == words


def test_a_line_of_the_table_lets_another_kernel_serve_where_it_fits(monkeypatch):
    lines = ((10_000, 0, (RUNS, SLICES, "Triton", "Triton")), (0, 0, (SLICES, RUNS, "?", "Triton")))
    monkeypatch.setattr(table, "SERVED", lines)
    wide, narrow = ways_of(monkeypatch, "gate_up"), ways_of(monkeypatch, "qkv")
    assert (wide.serving(16), narrow.serving(16)) == (RUNS, SLICES)
    assert narrow.serving(32) == RUNS
    usual = {rows: shape.words for rows, shape in triton_float8_few.HOPPER}
    assert wide.serving(32) == usual[32], "it has more tiles than there are multiprocessors"
    assert narrow.serving(64) == usual[64], "there is no such name"


def test_every_name_of_the_table_is_one_of_its_class():
    for *_, names in table.SERVED:
        for rows, name in zip(CLASSES, names, strict=True):
            known = {shape.words for shape in triton_hopper_float8.CANDIDATES[rows]}
            tiles = set(triton_float8_few.few_options((9, 0))[rows])
            assert name in known | tiles | {table.TRITON}


def test_elsewhere_a_layer_goes_by_tritons_kernel_alone(interpreter):
    held = quantize_channels(torch.randn(48, 128))
    layer = float8_linear.Float8Linear(held, None, Workspace(CPU, torch.float16), rounds_all=True)
    options = [name for most in CLASSES for name in layer.planned[0].options(most)]
    assert options
    assert not [name for name in options if "Hopper" in name]


# Layers


def layer_of(dtype=torch.bfloat16, *, by_blocks=False, outputs=160, inputs=400):
    torch.manual_seed(1)
    matrix = torch.randn(outputs, inputs) * inputs**-0.5
    held = (quantize_blocks if by_blocks else quantize_channels)(matrix)
    bias = torch.randn(outputs)
    layer = float8_linear.Float8Linear(held, bias, Workspace(CPU, dtype), rounds_all=True)
    return held, bias, layer


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("name", [RUNS, SLICES])
def test_a_layer_gives_the_product_by_each_way(interpreter, on_hopper, name, by_blocks):
    held, bias, layer = layer_of(torch.float16, by_blocks=by_blocks)
    for most, rows in ((16, 11), (64, 40)):
        layer.planned[0].serve(most, name)
        x = torch.randn(rows, layer.sizes[1]).half()
        y = layer(x)
        given = layer.given(x)
        truth = given.dequantize().double() @ held.dequantize().double().t() + bias.half().double()
        assert float((y.double() - truth).norm() / truth.norm()) < 0.0004
        assert torch.equal(layer(given), y)
        with dependent_launches():
            assert torch.equal(layer(given), y)
        fewer = most // 2 + 1
        assert torch.equal(layer(x[:fewer]), y[:fewer]), "a row depends on its neighbours"
        assert not layer._workspace.mend()


def test_each_class_of_rows_goes_by_its_own_kernel(interpreter, on_hopper, monkeypatch):
    taken = []

    def record(name):
        return lambda x, *_, shape, **__: taken.append((name, len(x.values), shape.words))

    for name in ("float8_few", "float8_hopper"):
        monkeypatch.setattr(table, name, record(name.removeprefix("float8_")))
    *_, layer = layer_of(torch.float16)
    layer.planned[0].serve(16, TRITON)
    layer.planned[0].serve(32, RUNS)
    for rows in (0, 16, 17, 32, 33):
        layer(torch.randn(rows, 400).half())
    assert taken == [
        ("few", 16, TRITON), ("hopper", 17, RUNS), ("hopper", 32, RUNS), ("hopper", 33, TWO),
    ]  # fmt: skip


def test_a_layer_that_rounds_no_few_rows_has_none_of_it(interpreter, on_hopper):
    held = quantize_channels(torch.randn(48, 128))
    layer = float8_linear.Float8Linear(held, None, Workspace(CPU, torch.float16))
    options = [
        name for ways in layer.planned for most in ways.classes for name in ways.options(most)
    ]
    assert not [name for name in options if "Hopper" in name]


@pytest.mark.parametrize("name", LAYERS)
def test_a_workspace_has_room_for_whatever_may_serve(monkeypatch, name):
    outputs, inputs = LAYERS[name]
    ways = ways_of(monkeypatch, name)
    room = table.room(outputs, inputs, CPU)
    for rows in CLASSES:
        for words in ways.options(rows):
            shape = ways._options[rows][words]
            if hasattr(shape, "cut"):
                chunks = inputs // 128
                assert shape.parts(outputs, chunks, rows, 132) <= room["parts"]
                assert shape.cut(outputs, chunks, 132).programs <= room["arrivals"]


# Plans


def kernels_of():
    kernels = TritonKernels(CPU, "float16", rounds_all=True)
    held = quantize_channels(torch.randn(112, 144) / 12)
    return kernels, held, kernels.pack_linear(held, None, "float16")


def test_a_plans_winner_serves_and_a_stranger_is_refused(interpreter, on_hopper):
    kernels, held, layer = kernels_of()

    def plan_of(name):
        choice = choose(words_of(layer), class_words(16), name, {name: 1.0}, {})
        return Plan(KEY, (choice,))

    def serve(name):
        apply(plan_of(name), kernels, 16, Path("plan.json"), kv_dtype=torch.float16, unit=8)

    serve(RUNS)
    assert layer.planned[0].serving(16) == RUNS
    with pytest.raises(ConfigError, match="'FP8 Hopper 9/9' is none of"):
        serve("FP8 Hopper 9/9")
    assert layer.planned[0].serving(16) == RUNS
    x = torch.randn(9, 144).half()
    truth = layer.given(x).dequantize().double() @ held.dequantize().double().t()
    assert float((layer(x).double() - truth).norm() / truth.norm()) < 0.0004


def test_measuring_lets_the_fastest_win(interpreter, on_hopper):
    """Each candidate is computed and held to the truth; that time is made up."""
    kernels, _, layer = kernels_of()
    asked = list(
        questions(kernels, Heads(2, 1, 16), longest=40, kv_dtypes=(torch.float16,), unit=8)
    )
    assert class_words(MANY) in [q.sizes for q in asked]
    (question,) = [
        q for q in asked if q.operation == words_of(layer) and q.sizes == class_words(16)
    ]

    def timer(work):
        work()
        return 1.0 if work.args[0] == SLICES else 2.0

    (found,) = measure([question], timer, lambda: 0.0, 1.0)
    assert found.refused == {}
    assert set(found.seconds) == set(layer.planned[0].options(16))
    assert (found.winner, found.default) == (SLICES, TWO)
