"""What a plan asks, of candidates that equal their references, and what its winners change."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch

from tailrace.errors import ConfigError
from tests.kernels.compare import assert_close

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels.attention_shapes import (
    HOPPER,
    decode_candidates,
    decode_shape,
    key_words,
    prefill_candidates,
)
from tailrace.kernels.attention_shapes import PREFILL as TABLE
from tailrace.kernels.linear import int8_rows
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.float8 import FLOAT8, quantize_blocks, quantize_channels
from tailrace.kernels.linear.float8_rows import quantize_rows
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.int8_linear import Int8Linear
from tailrace.kernels.linear.prefill_format import FORMATS
from tailrace.kernels.linear.triton_skinny import SPLIT, WHOLE, SkinnyLinear, SkinnyScratch
from tailrace.kernels.linear.ways import MANY, class_words, words_of
from tailrace.kernels.paged_attention.prefill_kernels import hopper_shapes, name_of
from tailrace.kernels.plan import Choice, Key, Plan, choose
from tailrace.kernels.plan_questions import (
    ANY_LENGTH,
    DECODE,
    PREFILL,
    Heads,
    over,
    questions,
)
from tailrace.kernels.plan_winners import apply
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.hopper_stand_in import let_hopper_serve

KEY = Key(gpu="g", model="m", dtype="float32", tailrace="1", torch="2", triton="3")
FILE = Path("some/plan.json")


HELD = []
"""Layers: kernels know those that are in use, and do not hold them."""
HEADS = Heads(2, 1, 16)
FLOAT32 = (torch.float32,)


def loaded(*sizes):
    """Return kernels in the interpreter whose model has plain layers of these sizes."""
    kernels = TritonKernels(torch.device("cpu"), "float32")
    for outputs, inputs in sizes:
        generator = torch.Generator().manual_seed(outputs)
        weight = torch.randn(outputs, inputs, generator=generator)
        many = CublasLinear(weight, None, torch.float32, torch.device("cpu"))
        HELD.append(kernels.let_plan(SkinnyLinear(many, SkinnyScratch.allocate("cpu"))))
    return kernels


QUANTIZED = {
    "int4": lambda w: quantize_groups(w, 64),
    "channel": quantize_channels,
    "block128": quantize_blocks,
}


def quantized(kind):
    """Return kernels in the interpreter whose model has one layer over a weight of a kind."""
    kernels = TritonKernels(torch.device("cpu"), "float32")
    weight = torch.randn(144, 128, generator=torch.Generator().manual_seed(1)) / 11
    if kind == "int8":
        layer = Int8Linear(weight, torch.ones(144), torch.float32, torch.device("cpu"))
        HELD.append(kernels.let_plan(layer))
        return kernels
    HELD.append(kernels.pack_linear(QUANTIZED[kind](weight), torch.ones(144), "float32"))
    return kernels


def asked_of(kernels, longest=40, kv_dtypes=FLOAT32):
    return list(questions(kernels, HEADS, longest=longest, kv_dtypes=kv_dtypes, unit=8))


def test_what_is_asked_of_a_model(interpreter):
    """Each class of lengths that can occur, each size of layer once, split sums where they fit."""
    wide = 64 * 128
    asked = asked_of(loaded((96, 64), (96, 64), (wide, 64)), longest=2000)
    assert [(q.operation, q.sizes) for q in asked] == [
        (PREFILL, "below 1024 keys"),
        (PREFILL, "below 3072 keys"),
        (DECODE, ANY_LENGTH),
        ("linear 64 to 96", "up to 16 rows"),
        ("linear 64 to 96", "up to 32 rows"),
        (f"linear 64 to {wide}", "up to 16 rows"),
        (f"linear 64 to {wide}", "up to 32 rows"),
    ]
    assert [q.default for q in asked[3:]] == ["Triton, inputs split", "cuBLAS", "Triton", "Triton"]
    with_split = [q for q in asked if "Triton, inputs split" in q.candidates]
    assert [q.sizes for q in with_split] == ["up to 16 rows"]
    assert len(asked_of(loaded(), longest=4000)) == 4


def test_attention_is_asked_about_for_each_kind_of_cache(interpreter):
    asked = asked_of(loaded(), kv_dtypes=(torch.float32, FLOAT8))
    operations = [PREFILL, DECODE, "prefill attention over float8", "decode attention over float8"]
    assert [q.operation for q in asked] == operations


ROWS = {
    "int4": ["16", "32", "64", "128", "more rows"],
    "channel": ["16", "32", "64", "128", "256", "512", "more rows"],
    "block128": ["16", "32", "64", "128", "256", "512", "more rows"],
    "int8": ["64", "128", "256", "512", "more rows"],
}
KINDS = list(ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layers_are_asked_about_in_every_class_of_rows(interpreter, kind):
    asked = asked_of(quantized(kind))[2:]
    names = {
        "int4": "int4/64",
        "channel": "fp8/channel",
        "block128": "fp8/block128",
        "int8": "int8/channel",
    }
    assert {q.operation for q in asked} == {f"{names[kind]} linear 128 to 144"}
    assert [q.sizes.removeprefix("up to ").removesuffix(" rows") for q in asked] == [
        rows.removesuffix(" rows") for rows in ROWS[kind]
    ]
    exact = [q.sizes for q in asked if q.is_exact]
    assert len(exact) == {"int4": 1, "int8": 5}.get(kind, 0)
    by_torch = [q.sizes for q in asked if q.default == "torch"]
    assert len(by_torch) == (5 if kind == "channel" else 0)


def test_a_layer_that_serves_decodes_alone_is_not_asked_how_it_is_written_out(interpreter):
    kernels = quantized("int4")
    (few,) = kernels.planned_layers
    phased = kernels.with_copy(few, FORMATS["bf16"])
    asked = asked_of(kernels)[2:]
    assert [q.sizes for q in asked] == [f"up to {rows} rows" for rows in ROWS["int4"][:-1]]
    for question in asked:
        question.candidates[question.default]()
    assert kernels._workspace._wide is None
    del phased  # as where the copy finds no room
    assert [q.sizes for q in asked_of(kernels)[2:]][-1] == "more rows"


@pytest.mark.parametrize("kv_dtype", [torch.float32, FLOAT8], ids=["float32", "float8"])
def test_every_candidate_of_attention_equals_its_reference(interpreter, monkeypatch, kv_dtype):
    monkeypatch.setattr("tailrace.kernels.plan_questions._DECODES", 3)
    for asked in asked_of(loaded(), longest=71, kv_dtypes=(kv_dtype,)):
        truth = asked.reference()
        for name, work in asked.candidates.items():
            assert_close(f"{asked.operation} by {name}", work(), truth, rtol=1e-4, atol=1e-4)


def test_every_candidate_of_a_plain_layer_equals_its_reference(interpreter, monkeypatch):
    monkeypatch.setattr("tailrace.kernels.plan_questions._OUTPUTS", 40)
    for asked in asked_of(loaded((96, 64)))[2:]:
        truth = asked.reference()
        for name, work in asked.candidates.items():
            assert_close(f"{asked.operation} by {name}", work(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_of_a_quantised_layer_equals_its_reference(interpreter, monkeypatch, kind):
    """The product by torch is in bfloat16. Rows are rounded by the reference: it is quicker."""
    monkeypatch.setattr("tailrace.kernels.linear.float8_linear.quantize_rows", quantize_rows)
    monkeypatch.setattr(
        "tailrace.kernels.linear.int8_linear.quantize_rows", int8_rows.quantize_rows
    )
    monkeypatch.setattr("tailrace.kernels.plan_questions._OUTPUTS", 128)
    kernels = quantized(kind)
    for layer in kernels.planned_layers:
        for ways in layer.planned:
            ways._many_rows = min(ways._many_rows, 530)
    for asked in asked_of(kernels)[2:]:
        truth = asked.reference()
        for name, work in asked.candidates.items():
            rounding = 1e-2 if name == "torch" else 1e-4
            what = f"{asked.operation}, {asked.sizes}, by {name}"
            assert_close(what, work(), truth, rtol=rounding, atol=rounding)


def test_a_question_that_is_not_asked_makes_nothing(interpreter, monkeypatch):
    monkeypatch.setattr("tailrace.kernels.plan_questions._noise", None)
    kernels = quantized("channel")
    assert len(asked_of(kernels, longest=4000, kv_dtypes=(torch.float32, FLOAT8))) == 8 + 7


def test_attention_in_parts_is_attention(interpreter, monkeypatch):
    """The reference, a few rows at a time, does not depend on how many."""
    asked = asked_of(loaded(), longest=70)[0]
    whole = asked.reference()
    monkeypatch.setattr("tailrace.kernels.plan_questions._ROWS", 16)
    torch.testing.assert_close(asked.reference(), whole)


def plan_of(*choices):
    return Plan(KEY, tuple(choose(op, sizes, won, {won: 1.0}, {}) for op, sizes, won in choices))


def serve(plan, kernels, kv_dtype=torch.float32):
    apply(plan, kernels, 16, FILE, kv_dtype=kv_dtype, unit=8)


def test_winners_serve_and_the_rest_is_as_before(interpreter):
    kernels = loaded((96, 64))
    (layer,) = kernels.planned_layers
    (ways,) = layer.planned
    x = torch.randn(9, 64)
    before = layer(x)
    other = prefill_candidates(16, kernels.capability)[1]
    few = (words_of(layer), class_words(16))
    chosen = plan_of((PREFILL, key_words(1024), other.words), (*few, "cuBLAS"))
    usual = kernels.prefill_shape(16, 5000)
    serve(chosen, kernels)
    assert kernels.prefill_shape(16, 1023) == other != usual
    assert kernels.prefill_shape(16, 1024) == kernels.prefill_shape(16, 1 << 20) == usual
    assert kernels.decode_shape(16) == decode_shape(16, kernels.capability)
    assert [ways.serving(16), ways.serving(32)] == ["cuBLAS", "cuBLAS"]
    assert layer.name == "cuBLAS float32"
    assert torch.equal(layer(x), layer.plain(x))
    torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", [torch.float32, FLOAT8], ids=["float32", "float8"])
def test_attention_is_served_by_the_winners_for_its_own_kind_of_cache(kv_dtype):
    kernels = loaded()
    prefills = prefill_candidates(16, kernels.capability)
    decodes = decode_candidates(16, kernels.capability)
    chosen = plan_of(
        (PREFILL, "longer", prefills[0].words),
        (DECODE, ANY_LENGTH, decodes[1].words),
        (over(PREFILL, FLOAT8), "longer", prefills[1].words),
        (over(DECODE, FLOAT8), ANY_LENGTH, decodes[2].words),
    )
    serve(chosen, kernels, kv_dtype)
    is_float8 = kv_dtype == FLOAT8
    assert kernels.prefill_shape(16, 9000) == prefills[is_float8]
    assert kernels.decode_shape(16) == decodes[1 + is_float8]
    assert len({shape.split for shape in decodes}) == len({s.block_n for s in decodes}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layers_are_served_by_winners_without_another_result(interpreter, kind):
    kernels = quantized(kind)
    (layer,) = kernels.planned_layers
    x = {rows: torch.randn(rows, 128) for rows in (3, 20, 60, 100, 140)}
    before = {rows: layer(x[rows]) for rows in x}
    classes = [(ways, most) for ways in layer.planned for most in ways.classes]
    last = {most: ways.options(most)[-1] for ways, most in classes}
    named = [(words_of(layer), class_words(most), name) for most, name in last.items()]
    serve(plan_of(*named), kernels)
    assert {most: ways.serving(most) for ways, most in classes} == last
    for rows, expected in before.items():
        torch.testing.assert_close(layer(x[rows]), expected, rtol=1e-2, atol=1e-2)


def test_what_serves_a_weight_written_out_is_the_last_bit_the_same(interpreter):
    kernels = quantized("int4")
    (layer,) = kernels.planned_layers
    writing = layer.planned[1]
    x = torch.randn(140, 128)
    found = []
    for name in writing.options(MANY):
        writing.serve(MANY, name)
        found.append(layer(x))
    assert len(found) > 1
    assert all(torch.equal(y, found[0]) for y in found)


def test_a_layer_may_be_served_whole_for_more_rows(interpreter):
    kernels = loaded((96, 64))
    (layer,) = kernels.planned_layers
    serve(plan_of((words_of(layer), class_words(32), "Triton")), kernels)
    assert layer.name == "cuBLAS float32, Triton up to 32 rows"
    x = torch.randn(30, 64)
    torch.testing.assert_close(layer(x), layer.plain(x), rtol=1e-4, atol=1e-4)
    assert [layer._few.of(rows) for rows in (10, 30)] == [SPLIT, WHOLE]


@pytest.mark.parametrize("rows", [16, 32])
def test_a_winner_that_is_no_candidate_is_refused_and_changes_nothing(interpreter, rows):
    kernels = loaded((96, 64))
    (layer,) = kernels.planned_layers
    other = prefill_candidates(16, kernels.capability)[1]
    name = "magic" if rows == 16 else "Triton, inputs split"  # which has no room for 32 rows
    wrong = (words_of(layer), class_words(rows), name)
    with pytest.raises(ConfigError, match=f"{FILE}: linear 64 to 96, up to {rows} rows: '{name}'"):
        serve(plan_of((PREFILL, key_words(1024), other.words), wrong), kernels)
    assert kernels.prefill_rows == ()
    serving = "Triton, inputs split" if rows == 16 else "cuBLAS"
    assert layer.planned[0].serving(rows) == serving
    for operation, sizes in ((PREFILL, "longer"), (DECODE, ANY_LENGTH)):
        with pytest.raises(ConfigError, match=f"{FILE}: {operation}, {sizes}: '1x1'"):
            serve(plan_of((operation, sizes, "1x1")), kernels)
    assert kernels.decode_row is None


def test_without_a_plan_the_table_serves():
    kernels = loaded()
    for head_dim, longest in itertools.product((64, 128, 256), (1, 1023, 1024, 1 << 20)):
        expected = next(s for bound, s in TABLE[HOPPER][head_dim] if longest < bound)
        assert kernels.prefill_shape(head_dim, longest) == expected
        assert kernels.decode_shape(head_dim) == decode_shape(head_dim, kernels.capability)


def test_layers_start_as_measured_on_an_h200():
    kernels = loaded((96, 64), (64 * 128, 64))
    narrow, wide = kernels.planned_layers
    shapes = [[layer._few.of(rows) for rows in (16, 32)] for layer in (narrow, wide)]
    assert shapes == [[SPLIT, None], [WHOLE, WHOLE]]


def test_a_layer_that_is_gone_is_asked_about_no_more():
    kernels = loaded((96, 64), (160, 64))
    assert len(kernels.planned_layers) == 2
    gone = weakref.ref(HELD.pop())
    gc.collect()
    assert gone() is None
    assert [layer.sizes for layer in kernels.planned_layers] == [(96, 64)]


# Both kernels of prompts' attention

WIDE = Heads(2, 1, 64)
TRITONS = [shape.words for shape in prefill_candidates(64, (9, 0))]
HOPPERS = [name_of(shape) for shape in hopper_shapes(64)]


@pytest.fixture
def hopper(interpreter, monkeypatch):
    return let_hopper_serve(monkeypatch)


def kernels_by(asked, head_dim=64):
    kernels = loaded()
    kernels.serve_prompts_by(asked, head_dim=head_dim, kv_dtype=torch.float32, unit=8)
    return kernels


def names_of(shapes):
    return [name_of(shape) for shape in shapes]


def prompts_asked(kernels, longest=40, kv_dtype=torch.float32):
    found = questions(kernels, WIDE, longest=longest, kv_dtypes=(kv_dtype,), unit=8)
    return [question for question in found if question.operation.startswith(PREFILL)]


def test_hoppers_shapes_are_asked_about_in_each_class_unless_tritons_alone_may_serve(hopper):
    for asked, expected in (
        ("auto", [*TRITONS, *HOPPERS]),
        ("hopper", [*TRITONS, *HOPPERS]),
        ("triton", TRITONS),
    ):
        found = prompts_asked(kernels_by(asked), longest=4000)
        assert [list(question.candidates) for question in found] == [expected] * 3
        usual = HOPPERS[0] if asked == "hopper" else TRITONS[0]
        assert {question.default for question in found} == {usual}
    assert len(set(TRITONS + HOPPERS)) == len(TRITONS + HOPPERS) > 3


def test_what_takes_longest_to_compile_is_asked_last(hopper):
    kernels = kernels_by("auto")
    found = questions(kernels, WIDE, longest=4000, kv_dtypes=FLOAT32, unit=8)
    assert [question.operation for question in found] == [DECODE, *[PREFILL] * 3]


def test_hoppers_shapes_are_no_candidates_where_they_do_not_serve(interpreter):
    """Not in the interpreter, where nothing stands in for them."""
    (asked,) = prompts_asked(kernels_by("auto"))
    assert list(asked.candidates) == TRITONS


def test_hoppers_candidates_are_called_with_what_the_reference_is_of(hopper):
    (asked,) = prompts_asked(kernels_by("auto"), longest=300)
    truth = asked.reference()
    for name in HOPPERS:
        assert_close(name, asked.candidates[name](), truth, rtol=1e-4, atol=1e-4)
    assert {len(call.tiles) for call in hopper.calls} == {3}
    assert names_of(call.shape for call in hopper.calls) == HOPPERS


def test_over_float8_hoppers_candidates_widen_what_they_read(hopper):
    (asked,) = prompts_asked(kernels_by("auto"), longest=300, kv_dtype=FLOAT8)
    assert asked.operation == "prefill attention over float8"
    assert list(asked.candidates) == [*TRITONS, *HOPPERS]
    assert asked.default == TRITONS[0]
    truth = asked.reference()
    for name in HOPPERS:
        assert_close(name, asked.candidates[name](), truth, rtol=1e-4, atol=1e-4)
    assert [call.v_scale for call in hopper.calls] == [1.0] * len(HOPPERS)


def test_of_heads_of_128_hoppers_kernel_serves_either_cache_by_default(hopper):
    kernels = kernels_by("auto", head_dim=128)
    wide = Heads(2, 1, 128)
    found = questions(kernels, wide, longest=40, kv_dtypes=(torch.float32, FLOAT8), unit=8)
    defaults = {q.operation: q.default for q in found if q.operation.startswith(PREFILL)}
    assert defaults[PREFILL] == name_of(hopper_shapes(128)[0])
    assert defaults[over(PREFILL, FLOAT8)] == name_of(hopper_shapes(128)[0])


def timed(sizes, seconds, refused=()):
    """Return a choice as a measurement makes it."""
    return choose(PREFILL, sizes, TRITONS[0], dict(seconds), dict.fromkeys(refused, "wrong"))


def served_by(asked, *choices):
    """Return the shapes' names by class, once the plan is applied."""
    kernels = kernels_by(asked)
    apply(Plan(KEY, choices), kernels, 64, FILE, kv_dtype=torch.float32, unit=8)
    return names_of(kernels.prefill_shape(64, keys) for keys in (1023, 3071, 9000))


def test_each_class_is_served_by_its_winner_of_the_kernels_that_may_serve(hopper):
    first, second, *_ = HOPPERS
    usual, other, *_ = TRITONS
    choices = (
        timed(key_words(1024), {usual: 1.0, other: 0.8, first: 2.0, second: 1.5}),
        timed(key_words(3072), {usual: 1.0, other: 0.8, first: 0.5, second: 0.6}),
        timed("longer", {usual: 1.0, other: 0.99, second: 0.5}, refused=[first]),
    )
    assert served_by("auto", *choices) == [other, first, second]
    # Of Triton's by the plan's own rule: the default unless another beats it by the margin.
    assert served_by("triton", *choices) == [other, other, usual]
    assert served_by("hopper", *choices) == [second, first, second]


def test_what_was_not_asked_is_served_by_the_usual_shape_of_the_kernel(hopper):
    few = timed(key_words(1024), {TRITONS[0]: 1.0, TRITONS[1]: 0.5})
    assert served_by("auto", few) == [TRITONS[1], TRITONS[0], TRITONS[0]]
    assert served_by("hopper", few) == [HOPPERS[0]] * 3
    assert served_by("hopper") == [HOPPERS[0]] * 3
    assert served_by("auto") == served_by("triton") == [TRITONS[0]] * 3


def test_a_kernel_that_is_asked_for_and_wrong_in_every_shape_is_an_error(hopper):
    wrong = timed("longer", {TRITONS[0]: 1.0}, refused=HOPPERS)
    assert served_by("auto", wrong) == [TRITONS[0]] * 3
    kernels = kernels_by("hopper")
    with pytest.raises(
        ConfigError, match=r"longer: no shape of the kernel .* \(Hopper .*: wrong\)"
    ):
        apply(Plan(KEY, (wrong,)), kernels, 64, FILE, kv_dtype=torch.float32, unit=8)
    assert kernels.prefill_rows == ()


def test_a_plan_with_hoppers_winner_is_refused_where_it_cannot_serve(interpreter):
    won = Choice(PREFILL, "longer", TRITONS[0], HOPPERS[0], {TRITONS[0]: 1.0, HOPPERS[0]: 0.5})
    with pytest.raises(ConfigError, match=f"'{HOPPERS[0]}' is none of".replace("+", r"\+")):
        served_by("auto", won)


def test_over_float8_a_plans_winners_decide_what_room_there_must_be(hopper):
    kernels = kernels_by("auto")
    kernels.serve_prompts_by("auto", head_dim=64, kv_dtype=FLOAT8, unit=8)
    operation = over(PREFILL, FLOAT8)
    won = [
        choose(operation, key_words(1024), TRITONS[0], {TRITONS[0]: 1.0, TRITONS[1]: 0.5}, {}),
        choose(operation, "longer", TRITONS[0], {TRITONS[0]: 1.0, HOPPERS[1]: 0.5}, {}),
    ]
    apply(Plan(KEY, tuple(won)), kernels, 64, FILE, kv_dtype=FLOAT8, unit=8)
    served = [kernels.prefill_shape(64, longest) for longest in (1000, 2000, 5000)]
    assert names_of(served) == [TRITONS[1], TRITONS[0], HOPPERS[1]]
    without = [kernels.prefill_shape(64, longest, has_room=False) for longest in (1000, 5000)]
    assert names_of(without) == [TRITONS[1], TRITONS[0]]
    assert kernels.wide_units(64, sequences=2, longest=3000) == 0
    assert kernels.wide_units(64, sequences=2, longest=5000) == 80


def test_a_question_of_fewer_candidates_is_no_answer_to_one_of_more():
    known = Plan(KEY, (timed("longer", {"a": 1.0, TRITONS[0]: 1.0}, refused=["b"]),))
    assert known.answers(PREFILL, "longer", ["a", "b"])
    assert not known.answers(PREFILL, "longer", ["a", "c"])
    assert not known.answers(PREFILL, "below", ["a"])
