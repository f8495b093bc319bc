"""Which kernel multiplies few rows in half precision on Hopper: by the table, by a plan.

Gluon's kernel runs here in our interpreter, Triton's in Triton's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tailrace.errors import ConfigError

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.linear import hopper_half_ways as table
from tailrace.kernels.linear import triton_hopper_half, triton_skinny
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.triton_skinny import CUBLAS, SkinnyLinear, SkinnyScratch
from tailrace.kernels.linear.ways import class_words, words_of
from tailrace.kernels.linear.workspace import Workspace
from tailrace.kernels.plan import Key, Plan, choose
from tailrace.kernels.plan_answers import measure
from tailrace.kernels.plan_questions import Heads, questions
from tailrace.kernels.plan_winners import apply
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.gluon_interpreter import Interpreter
from tests.kernels.on_gluon import WRITTEN_BEFORE

CPU = torch.device("cpu")
CLASSES = (16, 32, 64, 128)
LAYERS = {
    "qkv": (4608, 3584), "gate_up": (37888, 3584), "down": (3584, 18944), "head": (152064, 3584),
    "small": (48, 128),
}  # fmt: skip
RUNS, LAST = "Hopper 128x64/4/1/8 pairs", "Hopper 128x64/4/1/8 last"
WHOLE, SLICES = "Hopper 288x64/4 whole", "Hopper 64x128, 2 slices"
KEY = Key(gpu="g", model="m", dtype="float16", tailrace="1", torch="2", triton="3")


def ways_of(monkeypatch, name, count=132):
    monkeypatch.setattr(table, "multiprocessors", lambda device: count)
    return table.ways(*LAYERS[name], CPU)


@pytest.fixture
def on_hopper(monkeypatch):
    """Let layers on the CPU be served as on a Hopper GPU of three multiprocessors."""
    for module in (table, triton_hopper_half):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    kernel = Interpreter(triton_hopper_half.half_hopper_kernel, seed=1, late=WRITTEN_BEFORE)
    monkeypatch.setattr(triton_hopper_half, "half_hopper_kernel", kernel)


# The table and what a plan may choose


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_plan_each_layer_is_served_by_what_the_table_names(monkeypatch, name):
    ways = ways_of(monkeypatch, name)
    assert ways.classes == list(CLASSES)
    few = triton_skinny.few_options(LAYERS[name][0])
    for rows, served in zip(CLASSES, table.served(*LAYERS[name]), strict=True):
        elsewhere = next(iter(few.get(rows, {CUBLAS: None})))
        assert ways.serving(rows) == (elsewhere if served == table.ELSEWHERE else served)
    assert ways.serving(128) == CUBLAS, "it won everywhere"


@pytest.mark.parametrize("name", LAYERS)
def test_all_kernels_are_candidates_and_whole_tiles_only_where_they_fit(monkeypatch, name):
    ways = ways_of(monkeypatch, name)
    assert ways.compiles_long
    for rows in CLASSES:
        options = ways.options(rows)
        assert len(options) == len(set(options))
        assert CUBLAS in options
        assert ("Triton" in options) == (rows <= 32)
        assert "Hopper 256x64/8/1/8 pairs" in options
        assert any("288x64" in words for words in options) == (name in ("gate_up", "head"))
        has_slices = rows < 128 and LAYERS[name][0] <= 132 * 64
        assert (SLICES in options) == has_slices
        for words in options:
            ways.serve(rows, words)
            shape = ways.of(rows)
            assert getattr(shape, "words", words) == words


def test_a_line_of_the_table_lets_another_kernel_serve_where_it_fits(monkeypatch):
    lines = ((10_000, 0, (RUNS, SLICES, WHOLE, "?")), (0, 0, (SLICES, CUBLAS, WHOLE, LAST)))
    monkeypatch.setattr(table, "SERVED", lines)
    wide, narrow = ways_of(monkeypatch, "gate_up"), ways_of(monkeypatch, "qkv")
    assert [wide.serving(rows) for rows in (16, 64)] == [RUNS, WHOLE]
    assert [narrow.serving(rows) for rows in (16, 32, 128)] == [SLICES, CUBLAS, LAST]
    assert wide.serving(32) == "Triton", "it has more tiles than there are multiprocessors"
    assert wide.serving(128) == CUBLAS, "there is no such name"
    assert narrow.serving(64) == CUBLAS, "whole tiles would be uneven"


def test_every_name_of_the_table_is_one_of_its_class():
    for *_, names in table.SERVED:
        for rows, name in zip(CLASSES, names, strict=True):
            known = {shape.words for shape in triton_hopper_half.CANDIDATES[rows]}
            assert name in known | set(triton_skinny.NAMES) | {table.ELSEWHERE}


@pytest.mark.parametrize("name", LAYERS)
def test_a_workspace_has_room_for_whatever_may_serve(monkeypatch, name):
    outputs, inputs = LAYERS[name]
    ways = ways_of(monkeypatch, name)
    room = table.room(outputs, inputs, CPU)
    for rows in CLASSES:
        for words in ways.options(rows):
            shape = ways._options[rows][words]
            if hasattr(shape, "cut"):
                assert shape.parts(outputs, inputs, rows, 132) <= room["parts"]
                assert shape.cut(outputs, inputs, 132).programs <= room["arrivals"]
    assert 4 * room["parts"] < 40e6, "bytes"


# Layers


def layer_of(dtype=torch.float16, *, outputs=160, inputs=400):
    torch.manual_seed(1)
    weight, bias = torch.randn(outputs, inputs) * inputs**-0.5, torch.randn(outputs)
    many = CublasLinear(weight, bias, dtype, CPU)
    return many, SkinnyLinear(many, SkinnyScratch.allocate(CPU), Workspace(CPU, dtype))


@pytest.mark.parametrize("name", [RUNS, LAST, SLICES])
def test_a_layer_gives_the_product_by_each_way(interpreter, on_hopper, name):
    many, layer = layer_of()
    for most, rows in ((16, 11), (64, 40)):
        layer.planned[0].serve(most, name)
        x = torch.randn(rows, layer.sizes[1]).half()
        y = layer(x)
        truth = x.double() @ many.weight_OI.double().t() + many.bias_O.double()
        assert float((y.double() - truth).norm() / truth.norm()) < 0.0004
        out = torch.full_like(y, float("nan"))
        layer.write(x, out)
        assert torch.equal(out, y)
        with dependent_launches():
            assert torch.equal(layer(x), y)
        fewer = most // 2 + 1
        assert torch.equal(layer(x[:fewer]), y[:fewer]), "a row depends on its neighbours"
        assert not layer._multiply_few.keywords["workspace"].mend()


def test_each_class_of_rows_goes_by_its_own_kernel(interpreter, on_hopper, monkeypatch):
    taken = []

    def record(name):
        return lambda x, *_, **__: taken.append((name, len(x)))

    for name in ("skinny_linear", "half_hopper"):
        monkeypatch.setattr(table, name, record(name))
    _, layer = layer_of()
    monkeypatch.setattr(CublasLinear, "__call__", lambda self, x: taken.append(("cuBLAS", len(x))))
    layer.planned[0].serve(16, "Triton")
    layer.planned[0].serve(32, RUNS)
    layer.planned[0].serve(64, CUBLAS)
    layer.planned[0].serve(128, LAST)
    for rows in (0, 16, 17, 32, 33, 64, 65, 128, 129):
        layer(torch.randn(rows, 400).half())
    assert taken == [
        ("cuBLAS", 0), ("skinny_linear", 16), ("half_hopper", 17), ("half_hopper", 32),
        ("cuBLAS", 33), ("cuBLAS", 64), ("half_hopper", 65), ("half_hopper", 128), ("cuBLAS", 129),
    ]  # fmt: skip
    assert layer.name == "cuBLAS float16, Triton up to 16 rows, Hopper's up to 128 rows"


@pytest.mark.parametrize(("dtype", "inputs"), [(torch.float32, 400), (torch.float16, 404)])
def test_a_weight_that_tma_cannot_copy_is_served_as_elsewhere(on_hopper, dtype, inputs):
    _, layer = layer_of(dtype, inputs=inputs)
    assert layer.planned[0].classes == list(triton_skinny.ROW_CLASSES)


@pytest.mark.parametrize(("capability", "is_hopper"), [((8, 9), False), ((9, 0), True)])
def test_layers_are_packed_for_hopper_on_such_a_gpu_where_it_is_asked_for(
    monkeypatch, capability, is_hopper
):
    """Of which only the name is there: what is packed stays on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setattr(table, "multiprocessors", lambda device: 132)
    scratch = SkinnyScratch.allocate(CPU)
    monkeypatch.setattr(SkinnyScratch, "allocate", lambda device: scratch)
    for asked in (True, False):
        kernels = TritonKernels(torch.device("cuda"), "float16", hopper_decodes=asked)
        kernels.device = CPU
        layer = kernels.pack_linear(torch.randn(48, 128), None, "float16")
        assert layer.has_hopper == (is_hopper and asked)
        assert (layer.planned[0].classes == list(CLASSES)) == layer.has_hopper
        assert layer in kernels.planned_layers


# Plans


def kernels_of():
    kernels = TritonKernels(CPU, "float16")
    many, layer = layer_of(outputs=112, inputs=144)
    return kernels, many, kernels.let_plan(layer)


def test_a_plans_winner_serves_and_a_stranger_is_refused(interpreter, on_hopper):
    kernels, many, layer = kernels_of()

    def serve(name):
        choice = choose(words_of(layer), class_words(64), name, {name: 1.0}, {})
        plan = Plan(KEY, (choice,))
        apply(plan, kernels, 16, Path("plan.json"), kv_dtype=torch.float16, unit=8)

    serve(RUNS)
    assert layer.planned[0].serving(64) == RUNS
    with pytest.raises(ConfigError, match="'Hopper 9/9' is none of"):
        serve("Hopper 9/9")
    assert layer.planned[0].serving(64) == RUNS
    x = torch.randn(39, 144).half()
    truth = x.double() @ many.weight_OI.double().t() + many.bias_O.double()
    assert float((layer(x).double() - truth).norm() / truth.norm()) < 0.0004


def test_measuring_lets_the_fastest_win(interpreter, on_hopper):
    """Each candidate is computed and held to the truth; that time is made up."""
    kernels, _, layer = kernels_of()
    asked = list(
        questions(kernels, Heads(2, 1, 16), longest=40, kv_dtypes=(torch.float16,), unit=8)
    )
    of_layer = [q for q in asked if q.operation == words_of(layer)]
    assert [q.sizes for q in of_layer] == [class_words(rows) for rows in CLASSES]
    question = of_layer[2]

    def timer(work):
        work()
        return 1.0 if work.args[0] == RUNS else 2.0

    (found,) = measure([question], timer, lambda: 0.0, 1.0)
    assert found.refused == {}
    assert set(found.seconds) == set(layer.planned[0].options(64))
    assert (found.winner, found.default) == (RUNS, layer.planned[0].serving(64))
