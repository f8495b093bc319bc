"""Which kernel multiplies 4-bit codes on Hopper: by the table, by a plan, and what a layer gives.

Gluon's kernels run here in our interpreter, Triton's in Triton's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tailrace.errors import ConfigError

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.linear import hopper_int4_ways as table
from tailrace.kernels.linear import (
    int4_linear,
    triton_hopper_int4,
    triton_hopper_int4_bands,
    triton_hopper_int4_few,
    triton_hopper_ring,
    triton_int4,
)
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.packed_int4 import PackedInt4
from tailrace.kernels.linear.prefill_format import FORMATS
from tailrace.kernels.linear.ways import MANY, Ways, class_words, words_of
from tailrace.kernels.linear.workspace import Workspace
from tailrace.kernels.plan import Key, Plan, choose
from tailrace.kernels.plan_answers import measure
from tailrace.kernels.plan_questions import Heads, Question, questions
from tailrace.kernels.plan_winners import apply, strangers
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.gluon_interpreter import Interpreter
from tests.kernels.on_gluon import WRITTEN_BEFORE

CPU = torch.device("cpu")
GLUON = (triton_hopper_int4, triton_hopper_int4_bands, triton_hopper_int4_few)
CLASSES = (16, 32, 64, 128)
LAYERS = {
    "qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944),
    "wide": (20000, 3584), "odd chunks": (300, 384), "one chunk": (48, 128),
}  # fmt: skip
FOUR = {
    "hopper": "1/2/7 pair",
    "bands": "128/8/1/4 whole",
    "few": "4 slices",
    "triton": "64 outputs, 4 warps, 3 stages",
}
"""A shape of each kernel, for 16 rows."""
WORDS = {
    "hopper": "for Hopper", "bands": "for Hopper in bands", "few": "for Hopper in slices",
    "triton": "as tiles",
}  # fmt: skip
KEY = Key(gpu="g", model="m", dtype="float16", tailrace="1", torch="2", triton="3")
FILE = Path("some/plan.json")


class Packed:
    """A weight's sizes, without its memory."""

    def __init__(self, outputs, inputs):
        self.outputs, self.inputs = outputs, inputs
        self.codes = torch.empty(inputs // 128, 1, 1)


def ways_of(monkeypatch, name, count=132):
    monkeypatch.setattr(table, "multiprocessors", lambda device: count)
    return table.ways(Packed(*LAYERS[name]), CPU)


@pytest.fixture
def on_hopper(monkeypatch):
    """Let layers on the CPU be served as on a Hopper GPU of three multiprocessors, by Triton's."""
    monkeypatch.setattr(table, "SERVED", ((0, 0, ("Triton",) * 4),))
    monkeypatch.setattr(int4_linear, "_is_hopper", lambda device: True)
    for module in (table, triton_hopper_int4, triton_hopper_int4_bands):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(triton_hopper_ring, "MOST_STAGES", 3)
    for seed, module in enumerate(GLUON):
        name = next(name for name in vars(module) if name.endswith("_kernel"))
        kernel = Interpreter(getattr(module, name), seed=seed, late=WRITTEN_BEFORE)
        monkeypatch.setattr(module, name, kernel)


# The table


def test_without_a_plan_each_layer_is_served_as_measured_on_an_h200(monkeypatch):
    def served(name):
        ways = ways_of(monkeypatch, name)
        return [ways.of(rows) for rows in CLASSES]

    pair, band, few = (
        triton_hopper_int4.HopperShape(1, 2, 7),
        next(s for s in triton_hopper_int4_bands.CANDIDATES[128] if s.words == "128/8/1/4 whole"),
        triton_hopper_int4_few.FewShape(4),
    )
    for name in ("gate_up", "wide", "down"):
        assert served(name) == [pair, pair, pair, band]
    assert served("qkv") == [few, few, band, band]
    assert served("o")[:3] == [few, few, pair]
    assert served("o")[3].words == "128/8/1/7 whole"
    # What is narrow goes as o does, whatever its inputs.
    for name in ("odd chunks", "one chunk"):
        assert served(name) == served("o")
    # Slices would wait for a turn where multiprocessors are fewer than tiles.
    first = next(iter(triton_int4.tile_options(4608 * 3584)[16].values()))
    assert ways_of(monkeypatch, "qkv", count=64).of(16) == first


def test_every_name_of_the_table_is_one_of_its_class():
    for *_, names in table.SERVED:
        for rows, name in zip(CLASSES, names, strict=True):
            known = {shape.words for module in GLUON for shape in module.CANDIDATES.get(rows, ())}
            assert name in known | {table.TRITON}


@pytest.mark.parametrize("kernel", FOUR)
def test_one_line_of_the_table_lets_another_kernel_serve(monkeypatch, kernel):
    monkeypatch.setattr(table, "SERVED", ((0, 0, (FOUR[kernel], *["Triton"] * 3)),))
    for name in ("o", "odd chunks"):
        ways = ways_of(monkeypatch, name)
        assert ways.serving(16) == FOUR[kernel]
        assert table.kernel_words(ways.of(9)) == WORDS[kernel]
        assert table.kernel_words(ways.of(17)) == "as tiles"


@pytest.mark.parametrize("name", ["4 slices", "1/2/7 two units", "magic"])
def test_a_name_that_does_not_fit_a_layer_leaves_it_to_tritons(monkeypatch, name):
    """More tiles than multiprocessors; chunks that are no pairs."""
    monkeypatch.setattr(table, "SERVED", ((0, 0, (name, "Triton", name, "Triton")),))
    layer, rows = ("gate_up", 16) if name == "4 slices" else ("odd chunks", 64)
    assert table.kernel_words(ways_of(monkeypatch, layer).of(rows)) == "as tiles"


# What a plan may choose


@pytest.mark.parametrize("name", LAYERS)
def test_all_kernels_are_candidates_in_the_classes_that_they_take(monkeypatch, name):
    ways = ways_of(monkeypatch, name)
    for rows in CLASSES:
        kinds = {table.kernel_words(ways._options[rows][one]) for one in ways.options(rows)}
        fits = rows <= 32 and name not in ("gate_up", "wide")
        slices = {"for Hopper in slices"} if fits else set()
        assert kinds == {"as tiles", "for Hopper", "for Hopper in bands"} | slices
        for words in ways.options(rows):
            assert ways._options[rows][words].words == words
    assert ways.compiles_long


def test_an_order_that_was_nowhere_faster_is_asked_about_only_where_it_serves(monkeypatch):
    monkeypatch.setattr(table, "SERVED", ((0, 0, ("Triton",) * 4),))
    usual = ways_of(monkeypatch, "o").options(16)
    assert not [name for name in usual if name.endswith(("two units", "in turn"))]
    assert len(usual) == len(set(usual)) == 5 + 4 + 10 + 2
    monkeypatch.setattr(table, "SERVED", ((0, 0, ("2/1/7 two units", *["Triton"] * 3)),))
    assert ways_of(monkeypatch, "o").options(16) == ["2/1/7 two units", *usual]


@pytest.mark.parametrize("name", LAYERS)
def test_a_workspace_has_room_for_whatever_may_serve(monkeypatch, name):
    outputs, inputs = LAYERS[name]
    ways = ways_of(monkeypatch, name)
    for module in (triton_hopper_int4, triton_hopper_int4_bands):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    workspace = Workspace(CPU, torch.bfloat16)
    workspace.reserve(outputs=outputs, splits=1, rows=128, **table.room(Packed(*LAYERS[name]), CPU))
    parts, arrivals = workspace.scratch.parts.numel(), workspace.scratch.arrivals.numel()
    options = [(rows, shape) for rows in CLASSES for shape in ways._options[rows].values()]
    seen = set()
    for rows, shape in options:
        if not hasattr(shape, "cut"):
            continue
        seen.add(table.kernel_words(shape))
        cut = shape.cut(outputs, inputs // 128, 132)
        assert shape.parts(outputs, inputs // 128, rows, 132) <= parts
        counted = cut.tiles * shape.sides if hasattr(shape, "sides") else cut.programs
        assert counted <= arrivals
    assert seen == {"for Hopper", "for Hopper in bands"}


# Layers


def layer_of(dtype=torch.bfloat16, group=128, outputs=150, chunks=5):
    torch.manual_seed(1)
    inputs = chunks * (64 if group % 128 else 128)
    held = quantize_groups(torch.randn(outputs, inputs) * inputs**-0.5, group)
    bias = torch.randn(outputs)
    return held, bias, int4_linear.Int4Linear(held, bias, Workspace(CPU, dtype))


def error(layer, held, bias, x, y):
    truth = x.double() @ held.dequantize().double().t() + bias.to(x.dtype).double()
    return float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("group", "dtype"), [(64, torch.float16), (128, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("kernel", ["hopper", "bands", "few"])
def test_a_layer_gives_the_product_by_each_kernel_of_hopper(on_hopper, kernel, group, dtype):
    held, bias, layer = layer_of(dtype, group)
    layer.by_codes.serve(16, FOUR[kernel])
    assert layer.name.endswith(f", {WORDS[kernel]} above 0 rows, as tiles above 16 rows")
    whole = torch.full((40, layer.sizes[1]), float("nan")).to(dtype)
    whole[:11] = torch.randn(11, layer.sizes[1])
    y = layer(whole[:11])
    assert error(layer, held, bias, whole[:11], y) < (0.003 if dtype == torch.bfloat16 else 0.0004)
    out = torch.full((13, 150), float("nan"), dtype=dtype)
    layer.write(whole[:11], out[1:-1])
    assert torch.equal(out[1:-1], y)
    assert bool(out[[0, -1]].isnan().all())
    alone = layer(whole[:1])
    assert torch.equal(alone, y[:1]), "a row depends on its neighbours"
    assert not layer._workspace.mend()


@pytest.mark.parametrize("rows", [30, 60, 120])
def test_bands_serve_more_rows(on_hopper, rows):
    held, bias, layer = layer_of(outputs=70, chunks=3)
    most = next(most for most in CLASSES if rows <= most)
    layer.by_codes.serve(most, FOUR["bands"])
    x = torch.randn(rows, layer.sizes[1]).bfloat16()
    assert error(layer, held, bias, x, layer(x)) < 0.003


@pytest.mark.parametrize("kernel", FOUR)
def test_each_class_of_rows_goes_by_its_own_kernel(monkeypatch, kernel):
    taken = []

    def record(name):
        def kernel(x, *_, shape, **__):
            taken.append((name, x.shape[0], shape.words))

        return kernel

    monkeypatch.setattr(table, "SERVED", ((0, 0, ("Triton",) * 4),))
    monkeypatch.setattr(int4_linear, "_is_hopper", lambda device: True)
    for module in (table, triton_hopper_int4, triton_hopper_int4_bands):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    for name in ("int4_linear", "int4_hopper", "int4_bands", "int4_few"):
        monkeypatch.setattr(table, name, record(name.removeprefix("int4_")))
    *_, layer = layer_of()
    layer.by_codes.serve(16, FOUR[kernel])
    layer.by_codes.serve(128, FOUR["bands"])
    for rows in (1, 16, 17, 64, 65):
        layer(torch.randn(rows, 640).bfloat16())
    layer.write(torch.randn(300, 640).bfloat16(), torch.empty(300, 150).bfloat16())
    name = "linear" if kernel == "triton" else kernel
    usual = {rows: triton_int4.shape_for(rows, 1)[1].words for rows in (32, 64)}
    assert taken == [
        (name, 1, FOUR[kernel]), (name, 16, FOUR[kernel]), ("linear", 17, usual[32]),
        ("linear", 64, usual[64]), ("bands", 65, FOUR["bands"]), ("bands", 128, FOUR["bands"]),
        ("bands", 128, FOUR["bands"]), ("linear", 44, usual[64]),
    ]  # fmt: skip


def test_elsewhere_a_layer_goes_by_tritons_tiles_alone():
    *_, layer = layer_of()
    assert layer.name == "Triton 4 bits in groups of 128"
    assert isinstance(layer.by_codes, Ways)
    options = [layer.by_codes._options[most].values() for most in CLASSES]
    assert {type(shape) for shapes in options for shape in shapes} == {triton_int4.Int4Shape}


# Plans


def kernels_of(chunks=2):
    kernels = TritonKernels(CPU, "float16")
    held = quantize_groups(torch.randn(100, 64 * chunks) / 11, 64)
    return kernels, held, kernels.pack_linear(held, None, "float16")


def plan_of(layer, **names):
    """Return a plan: by rows16=..., the names of winners."""
    choices = [
        choose(words_of(layer), class_words(int(most.removeprefix("rows"))), name, {name: 1.0}, {})
        for most, name in names.items()
    ]
    return Plan(KEY, tuple(choices))


def serve(plan, kernels):
    apply(plan, kernels, 16, FILE, kv_dtype=torch.float16, unit=8)


@pytest.mark.parametrize("kernel", FOUR)
def test_a_plans_winner_serves(interpreter, on_hopper, kernel):
    kernels, held, layer = kernels_of()
    x = torch.randn(9, 128).half()
    serve(plan_of(layer, rows16=FOUR[kernel], rows64="128/4/2/4 whole"), kernels)
    assert layer.by_codes.serving(16) == FOUR[kernel]
    assert table.kernel_words(layer.by_codes.of(40)) == "for Hopper in bands"
    assert table.kernel_words(layer.by_codes.of(20)) == "as tiles"
    truth = x.double() @ held.dequantize().double().t()
    assert float((layer(x).double() - truth).norm() / truth.norm()) < 0.0005


@pytest.mark.parametrize(
    ("most", "name"),
    [("rows16", "magic"), ("rows64", "4 slices"), ("rows16", "256/8/1/5 whole"),
     ("rows128", "512/8/1/4 whole"),
     ("rows16", "2/1/4 two units")],
)  # fmt: skip
def test_a_winner_that_is_no_candidate_is_refused_and_changes_nothing(on_hopper, most, name):
    kernels, _, layer = kernels_of()
    serving = [layer.by_codes.serving(rows) for rows in CLASSES]
    with pytest.raises(ConfigError, match=f"'{name}' is none of .*outputs, . warps"):
        serve(plan_of(layer, rows32="4 slices", **{most: name}), kernels)
    assert [layer.by_codes.serving(rows) for rows in CLASSES] == serving


def test_a_kept_plan_with_a_winner_that_is_no_candidate_is_asked_again(on_hopper):
    kernels, _, layer = kernels_of()
    kept = plan_of(layer, rows16="4 slices", rows32="256/8/1/5 whole", rows64="64/1 magic")
    found = strangers(kept, kernels, 16, kv_dtype=torch.float16, unit=8)
    assert [choice.sizes for choice in found] == [class_words(32), class_words(64)]


def test_they_are_asked_about_last(on_hopper):
    kernels, _, layer = kernels_of()
    asked = list(
        questions(kernels, Heads(2, 1, 16), longest=40, kv_dtypes=(torch.float16,), unit=8)
    )
    by_codes = [q for q in asked if "whole" in " ".join(q.candidates)]
    assert [q.sizes for q in by_codes] == [class_words(most) for most in CLASSES]
    assert asked[-4:] == by_codes
    assert class_words(MANY) in [q.sizes for q in asked[:-4]]
    assert {q.operation for q in by_codes} == {words_of(layer)}
    for question in by_codes:
        assert question.default == layer.by_codes.serving(int(question.sizes.split()[2]))


def asked_for_16_rows(kernels):
    asked = questions(kernels, Heads(2, 1, 16), longest=40, kv_dtypes=(torch.float16,), unit=8)
    return [q for q in asked if q.sizes == class_words(16) and "4 slices" in q.candidates]


def test_measuring_lets_the_fastest_of_them_win(interpreter, on_hopper, monkeypatch):
    """Each candidate is computed and held to the truth; that time is made up."""
    monkeypatch.setattr(table, "SERVED", ((0, 0, ("Triton",) * 4),))
    kernels, _, layer = kernels_of()

    def timer(work):
        work()
        return {"4 slices": 1.0, "128/8/1/4 whole": 1.5}.get(work.args[0], 2.0)

    (found,) = measure(asked_for_16_rows(kernels), timer, lambda: 0.0, 1.0)
    assert found.refused == {}
    assert set(found.seconds) == set(layer.by_codes.options(16))
    assert found.winner == "4 slices"
    assert layer.by_codes.serving(16) == found.default != "4 slices"
    serve(Plan(KEY, (found,)), kernels)
    assert layer.by_codes.serving(16) == "4 slices"


def test_a_candidate_that_leaves_counts_behind_is_refused_and_they_are_cleared():
    truth = torch.tensor([3.0, 4.0])
    workspace = Workspace(CPU, torch.float32)
    workspace.reserve(outputs=64, splits=1, rows=1)
    assert not workspace.mend()

    def untidy():
        workspace.scratch.arrivals[1] += 1
        return truth

    def after():
        assert not workspace.scratch.arrivals.any()
        return truth

    works = {"usual": lambda: truth, "untidy": untidy, "after": after}
    asked = Question("op", "small", "usual", works, lambda: truth, mend=workspace.mend)
    (found,) = measure([asked], lambda work: float(bool(work() is truth)), lambda: 0.0, 1.0)
    assert list(found.refused) == ["untidy"]
    assert "leaves counts behind" in found.refused["untidy"]
    assert list(found.seconds) == ["usual", "after"]


def test_a_kernel_of_a_layer_that_leaves_counts_behind_is_refused(
    interpreter, on_hopper, monkeypatch
):
    kernels, *_ = kernels_of()

    def untidy(*given, **options):
        kernels._workspace.scratch.arrivals[0] += 1
        return triton_hopper_int4_few.int4_few(*given, **options)

    monkeypatch.setattr(table, "int4_few", untidy)
    (found,) = measure(asked_for_16_rows(kernels), lambda _: 1.0, lambda: 0.0, 1.0)
    assert list(found.refused) == ["4 slices", "2 slices"]
    assert not kernels.mend()


# Layers with a copy for prompts


@pytest.mark.parametrize("kernel", ["bands", "few"])
def test_beside_a_prompts_copy_decodes_go_by_the_plans_kernel(interpreter, on_hopper, kernel):
    kernels, _, layer = kernels_of()
    phased = kernels.with_copy(layer, FORMATS["bf16"])
    serve(plan_of(layer, rows16=FOUR[kernel]), kernels)
    x = torch.randn(14, 128).half()
    found = kernels.multiply(phased, x, decodes=5)
    assert torch.equal(found[:5], layer(x[:5]))
    assert torch.equal(found[5:], phased.many(x[5:]))
    assert torch.equal(kernels.multiply(phased, x[:5], decodes=5), found[:5])
    assert WORDS[kernel] in phased.name
    assert kernels.ways_in_use(layer) == (layer.by_codes,)


def test_launched_dependently_a_layer_gives_the_same(on_hopper):
    *_, layer = layer_of(torch.float16, 64)
    x = torch.randn(9, layer.sizes[1]).half()
    for kernel in ("bands", "few"):
        layer.by_codes.serve(16, FOUR[kernel])
        usual = layer(x)
        with dependent_launches():
            assert torch.equal(layer(x), usual)


def test_packed_weights_tell_the_sizes_that_ways_go_by():
    held = quantize_groups(torch.randn(48, 384), 128)
    packed = PackedInt4.of(held, CPU)
    assert (packed.outputs, packed.inputs, packed.codes.shape[0]) == (48, 384, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 16, 20, 33, 128])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(256, 40, 64), (3584, 520, 128)])
def test_on_a_gpu_each_option_gives_the_product(rows, inputs, outputs, group):
    """After gpu_int4.py --only-check, which has each under a timeout."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernels need a Hopper GPU")
    device = torch.device("cuda")
    held = quantize_groups(torch.randn(outputs, inputs) * inputs**-0.5, group)
    bias = torch.randn(outputs)
    layer = int4_linear.Int4Linear(held, bias, Workspace(device, torch.bfloat16))
    whole = torch.full((rows + 40, inputs), float("nan"), device=device).bfloat16()
    whole[:rows] = torch.randn(rows, inputs, device=device)
    x = whole[:rows]
    truth = x.double() @ held.dequantize().to(device).double().t()
    truth += bias.to(device).bfloat16().double()
    most = next(most for most in CLASSES if rows <= most)
    fewer = 1 if most == 16 else most // 2 + 1
    for name in layer.by_codes.options(most):
        layer.by_codes.serve(most, name)
        y = layer(x)
        assert float((y.double() - truth).norm() / truth.norm()) < 0.003, name
        assert torch.equal(layer(x), y), name
        assert rows < fewer or torch.equal(layer(x[:fewer]), y[:fewer]), name
        assert not layer._workspace.mend(), name
