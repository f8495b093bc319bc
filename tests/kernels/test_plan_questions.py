"""What a plan asks, how candidates win, and what it changes: no time is measured here."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tailrace.errors import ConfigError
from tests.kernels.compare import assert_close

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels.attention_shapes import HOPPER, PREFILL, prefill_candidates
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.triton_skinny import SPLIT, WHOLE, SkinnyLinear, SkinnyScratch
from tailrace.kernels.plan import Key, Plan, choose
from tailrace.kernels.plan_questions import (
    ATTENTION,
    Question,
    apply,
    key_words,
    linear_words,
    measure,
    questions,
)
from tailrace.kernels.triton_kernels import TritonKernels

KEY = Key(gpu="g", model="m", dtype="float32", tailrace="1", torch="2", triton="3")
TRUTH = torch.tensor([3.0, 4.0])
FILE = Path("some/plan.json")


class Bench:
    """A timer and a clock: each candidate is a name, and takes the seconds that it is given."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now_s = 0.0
        self.timed = []

    def clock(self):
        return self.now_s

    def timer(self, work):
        self.timed.append(work.name)
        self.now_s += self.seconds[work.name]
        return self.seconds[work.name]


class Work:
    def __init__(self, name, result):
        self.name, self.result = name, result

    def __call__(self):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def question(sizes="small", **results):
    works = {name: Work(name, result) for name, result in results.items()}
    return Question("op", sizes, "usual", works, lambda: TRUTH)


def test_every_candidate_is_timed_and_the_fastest_wins():
    bench = Bench({"usual": 2.0, "a": 1.0, "b": 1.5})
    (found,) = measure([question(usual=TRUTH, a=TRUTH, b=TRUTH)], bench.timer, bench.clock, 100.0)
    assert found == choose("op", "small", "usual", bench.seconds, {})
    assert found.winner == "a"


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (TRUTH + 1.0, "its error is"),
        (TRUTH * float("nan"), "its error is inf"),
        (RuntimeError("out of shared memory"), "RuntimeError: out of shared memory"),
    ],
    ids=["strays", "nan", "raises"],
)
def test_a_wrong_candidate_is_never_timed_however_fast(result, why):
    bench = Bench({"usual": 2.0, "wrong": 1e-3})
    (found,) = measure([question(usual=TRUTH, wrong=result)], bench.timer, bench.clock, 100.0)
    assert found.winner == "usual"
    assert bench.timed == ["usual"]
    assert found.refused["wrong"].startswith(why)


def test_a_candidate_may_err_as_the_default_does():
    bench = Bench({"usual": 2.0, "other": 1.0})
    asked = question(usual=TRUTH + 0.1, other=TRUTH - 0.15)
    (found,) = measure([asked], bench.timer, bench.clock, 100.0)
    assert found.winner == "other"


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (RuntimeError("no"), r"op, small: the default kernel \(usual\) fails \(RuntimeError: no\)"),
        (TRUTH * float("nan"), r"default kernel \(usual\) gives numbers that are not finite"),
        (TRUTH * float("inf"), r"default kernel \(usual\) gives numbers that are not finite"),
    ],
    ids=["raises", "nan", "inf"],
)
def test_a_default_that_fails_is_an_error_and_nothing_wins_over_it(result, why):
    bench = Bench({"wrong": 1.0})
    asked = question(usual=result, wrong=TRUTH * float("nan"))
    with pytest.raises(ConfigError, match=why):
        measure([asked], bench.timer, bench.clock, 100.0)
    assert bench.timed == []


def test_a_layer_of_zeros_is_served_by_what_gives_zeros():
    bench = Bench({"usual": 2.0, "zeros": 1.0, "ones": 0.5})
    results = (torch.zeros(2), torch.zeros(2), torch.ones(2))
    works = {n: Work(n, result) for n, result in zip(bench.seconds, results, strict=True)}
    asked = Question("op", "small", "usual", works, lambda: torch.zeros(2))
    (found,) = measure([asked], bench.timer, bench.clock, 100.0)
    assert found.winner == "zeros"


def test_past_the_bound_no_candidate_is_begun_and_half_an_answer_is_none():
    bench = Bench({"usual": 1.0, "a": 1.0})
    asked = [question(sizes, usual=TRUTH, a=TRUTH) for sizes in ("one", "two", "three")]
    found = measure(asked, bench.timer, bench.clock, 2.5)
    assert [choice.sizes for choice in found] == ["one"]
    assert bench.timed == ["usual", "a", "usual"]
    assert measure(asked, bench.timer, bench.clock, 0.0) == []


def loaded(*sizes):
    """Return kernels in the interpreter whose model has plain layers of these sizes."""
    kernels = TritonKernels(torch.device("cpu"), "float32")
    for outputs, inputs in sizes:
        generator = torch.Generator().manual_seed(outputs)
        weight = torch.randn(outputs, inputs, generator=generator)
        many = CublasLinear(weight, None, torch.float32, torch.device("cpu"))
        kernels.skinny_layers.append(SkinnyLinear(many, SkinnyScratch.allocate("cpu")))
    return kernels


def asked_of(kernels, longest=40):
    return list(questions(kernels, num_heads=2, num_kv_heads=1, head_dim=16, longest=longest))


def test_what_is_asked_of_a_model(interpreter):
    """Each class of lengths that can occur, each size of layer once, split sums where they fit."""
    wide = 64 * 128
    asked = asked_of(loaded((96, 64), (96, 64), (wide, 64)), longest=2000)
    assert [(q.operation, q.sizes) for q in asked] == [
        (ATTENTION, "below 1024 keys"),
        (ATTENTION, "below 3072 keys"),
        ("linear 64 to 96", "up to 16 rows"),
        ("linear 64 to 96", "up to 32 rows"),
        (f"linear 64 to {wide}", "up to 16 rows"),
        (f"linear 64 to {wide}", "up to 32 rows"),
    ]
    assert [q.default for q in asked[2:]] == ["Triton, inputs split", "cuBLAS", "Triton", "Triton"]
    with_split = [q for q in asked if "Triton, inputs split" in q.candidates]
    assert [q.sizes for q in with_split] == ["up to 16 rows"]
    assert len(asked_of(loaded(), longest=4000)) == 3


def test_every_candidate_equals_its_reference(interpreter, monkeypatch):
    monkeypatch.setattr("tailrace.kernels.plan_questions._OUTPUTS", 40)
    for asked in asked_of(loaded((96, 64)), longest=70):
        truth = asked.reference()
        for name, work in asked.candidates.items():
            assert_close(f"{asked.operation} by {name}", work(), truth, rtol=1e-4, atol=1e-4)


def test_attention_in_parts_is_attention(interpreter, monkeypatch):
    """The reference, a few rows at a time, does not depend on how many."""
    (asked,) = asked_of(loaded(), longest=70)
    whole = asked.reference()
    monkeypatch.setattr("tailrace.kernels.plan_questions._ROWS", 16)
    torch.testing.assert_close(asked.reference(), whole)


def plan_of(*choices):
    return Plan(KEY, tuple(choose(op, sizes, won, {won: 1.0}, {}) for op, sizes, won in choices))


def test_winners_serve_and_the_rest_is_as_before(interpreter):
    kernels = loaded((96, 64))
    (layer,) = kernels.skinny_layers
    x = torch.randn(9, 64)
    before = layer(x)
    other = prefill_candidates(16, kernels.capability)[1]
    operation, sizes = linear_words(layer, 16)
    chosen = plan_of((ATTENTION, key_words(1024), other.words), (operation, sizes, "cuBLAS"))
    usual = kernels.prefill_shape(16, 5000)
    apply(chosen, kernels, 16, FILE)
    assert kernels.prefill_shape(16, 1023) == other != usual
    assert kernels.prefill_shape(16, 1024) == kernels.prefill_shape(16, 1 << 20) == usual
    assert [layer.serving(16), layer.serving(32)] == ["cuBLAS", "cuBLAS"]
    assert layer.name == "cuBLAS float32"
    assert torch.equal(layer(x), layer.plain(x))
    torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-4)


def test_a_layer_may_be_served_whole_for_more_rows(interpreter):
    kernels = loaded((96, 64))
    (layer,) = kernels.skinny_layers
    apply(plan_of((*linear_words(layer, 32), "Triton")), kernels, 16, FILE)
    assert layer.name == "cuBLAS float32, Triton up to 32 rows"
    x = torch.randn(30, 64)
    assert torch.equal(layer(x), layer.by("Triton", x))
    assert torch.equal(layer(x[:10]), layer.by("Triton, inputs split", x[:10]))


@pytest.mark.parametrize("rows", [16, 32])
def test_a_winner_that_is_no_candidate_is_refused_and_changes_nothing(interpreter, rows):
    kernels = loaded((96, 64))
    (layer,) = kernels.skinny_layers
    other = prefill_candidates(16, kernels.capability)[1]
    name = "magic" if rows == 16 else "Triton, inputs split"  # which has no room for 32 rows
    chosen = plan_of((ATTENTION, key_words(1024), other.words), (*linear_words(layer, rows), name))
    with pytest.raises(ConfigError, match=f"{FILE}: linear 64 to 96, up to {rows} rows: '{name}'"):
        apply(chosen, kernels, 16, FILE)
    assert kernels.prefill_rows == ()
    assert layer.serving(rows) == ("Triton, inputs split" if rows == 16 else "cuBLAS")
    with pytest.raises(ConfigError, match=f"{FILE}: {ATTENTION}, longer: '1x1'"):
        apply(plan_of((ATTENTION, "longer", "1x1")), kernels, 16, FILE)


def test_without_a_plan_the_table_serves():
    kernels = loaded()
    for head_dim, longest in itertools.product((64, 128, 256), (1, 1023, 1024, 1 << 20)):
        expected = next(s for bound, s in PREFILL[HOPPER][head_dim] if longest < bound)
        assert kernels.prefill_shape(head_dim, longest) == expected


def test_layers_start_as_measured_on_an_h200():
    kernels = loaded((96, 64), (64 * 128, 64))
    narrow, wide = kernels.skinny_layers
    assert [narrow._shapes, wide._shapes] == [[SPLIT, None], [WHOLE, WHOLE]]
