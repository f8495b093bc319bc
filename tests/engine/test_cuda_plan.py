"""The plan that a start finds, measures or refuses; in the interpreter, by a timer of ours."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import msgspec
import pytest
import structlog
import torch

from tailrace.errors import ConfigError

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.engine import cuda_plan
from tailrace.engine.cuda_plan import key_of, measure_whole, settle
from tailrace.kernels.attention_shapes import (
    INTERPRETER,
    decode_candidates,
    prefill_candidates,
)
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.linear.triton_skinny import SkinnyLinear, SkinnyScratch
from tailrace.kernels.paged_attention.prefill_kernels import hopper_shapes, name_of
from tailrace.kernels.plan import FORMAT, Plan, choose, pin, read, usual_file, write
from tailrace.kernels.plan_questions import Question, over
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.hopper_stand_in import let_hopper_serve
from tests.support.interpreter import exact_float8, quietly

PREFILLS = len(prefill_candidates(16, INTERPRETER))
DECODES = len(decode_candidates(16, INTERPRETER))
FLOAT8_DECODES = len(decode_candidates(16, INTERPRETER, is_float8=True))
WHOLE = PREFILLS + DECODES + 3 + 2
"""Candidates of all questions; those of the linear layer: split, whole and cuBLAS up to 16 rows,
then the last two."""
MODEL = SimpleNamespace(config=SimpleNamespace(num_heads=2, num_kv_heads=1, head_dim=16))
LONGEST = 40
HELD = []
"""Layers: kernels know those that are in use, and do not hold them."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tailrace.kernels.plan_questions._DECODES", 2)
    with quietly():
        yield


class Ticking:
    """Each candidate takes a tenth less than the one before, always: the last one wins."""

    def __init__(self):
        self.calls = 0
        """Of candidates: what is timed again counts once."""
        self.seconds = weakref.WeakKeyDictionary()

    def timer(self, work):
        work()
        if work not in self.seconds:
            self.calls += 1
            self.seconds[work] = 100.0 * 0.9**self.calls
        return self.seconds[work]

    def clock(self):
        return float(self.calls)


def loaded():
    kernels = TritonKernels(torch.device("cpu"), "float32")
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    many = CublasLinear(weight, None, torch.float32, torch.device("cpu"))
    HELD.append(kernels.let_plan(SkinnyLinear(many, SkinnyScratch.allocate("cpu"))))
    return kernels


def start(asked, bound_s=math.inf, *, kv_dtype=torch.float32, unit=8):
    """Return (kernels, plan, calls timed) of a start."""
    kernels, ticking = loaded(), Ticking()
    plan = settle(
        str(asked), kernels, MODEL, longest=LONGEST, timer=ticking.timer, clock=ticking.clock,
        bound_s=bound_s, kv_dtype=kv_dtype, unit=unit,
    )  # fmt: skip
    return kernels, plan, ticking.calls


def file_here():
    return usual_file(key_of(loaded(), MODEL))


def test_off_asks_and_changes_nothing():
    kernels, plan, calls = start("off")
    assert (kernels.prefill_rows, plan, calls) == ((), None, 0)
    assert not file_here().exists()


def test_auto_measures_once_and_the_next_start_reads():
    first, plan, calls = start("auto")
    assert calls == WHOLE
    assert read(file_here()) == plan
    second, again, calls = start("auto")
    assert (calls, again) == (0, plan)
    for kernels in (first, second):
        assert len(kernels.prefill_rows) == 3
        assert kernels.prefill_rows[0][1].words == plan.choices[0].winner
        assert kernels.prefill_rows[0][1] != kernels.prefill_rows[1][1]
        assert kernels.decode_row.words == plan.choices[1].winner


def test_a_plan_grows_by_what_another_kind_of_cache_asks(monkeypatch):
    exact_float8(monkeypatch)
    _, plan, calls = start("auto")
    _, both, more = start("auto", kv_dtype=FLOAT8)
    assert (more, len(both.choices)) == (PREFILLS + FLOAT8_DECODES, len(plan.choices) + 2)
    for kv_dtype in (torch.float32, FLOAT8):
        kernels, again, calls = start("auto", kv_dtype=kv_dtype)
        assert (again, calls) == (both, 0)
        won = both.winner(over("decode attention", kv_dtype), "any length")
        assert kernels.decode_row.words == won


def test_attention_over_units_of_another_size_is_another_question():
    """Kernels are compiled for a unit: over another they were neither compared nor timed."""
    _, plan, _ = start("auto")
    kernels, both, more = start("auto", unit=16)
    assert (more, len(both.choices)) == (PREFILLS + DECODES, len(plan.choices) + 2)
    assert both.choices[: len(plan.choices)] == plan.choices
    words = "decode attention by units of 16"
    assert kernels.decode_row.words == both.winner(words, "any length")
    first = decode_candidates(16, INTERPRETER)[0].words
    changed = msgspec.structs.replace(both.choice(words, "any length"), winner=first)
    write(both.with_choices([changed]), file_here())
    served = [start("auto", unit=unit) for unit in (8, 16)]
    assert [calls for _, _, calls in served] == [0, 0]
    usual = plan.winner("decode attention", "any length")
    assert [kernels.decode_row.words for kernels, _, _ in served] == [usual, first]


def test_what_a_bound_left_out_is_measured_by_the_next_start():
    _, plan, calls = start("auto", bound_s=PREFILLS + 1.0)
    assert [choice.operation for choice in plan.choices] == ["prefill attention"]
    assert calls == PREFILLS + 1  # the last one's answer is not whole
    _, plan, _ = start("auto")
    assert len(plan.choices) == 4
    assert read(file_here()) == plan


NO_MEMORY = "CUDA out of memory. Tried 2 GiB."


def without_memory(*_):
    raise torch.OutOfMemoryError(f"{NO_MEMORY}\nMore.")


def test_questions_without_memory_for_a_reference_go_unanswered_and_nothing_else(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(SkinnyLinear, "weight_rows", without_memory)
        with structlog.testing.capture_logs() as logs:
            _, plan, _ = start("auto")
        whole, _ = measure_whole(loaded(), MODEL, LONGEST, None, Ticking().timer, unit=8)
    attention = ["prefill attention", over("decode attention", torch.float32)]
    for found in (plan, whole):
        assert [choice.operation for choice in found.choices][:2] == attention
        assert not any("linear" in choice.operation for choice in found.choices)
    left_out = [entry for entry in logs if entry["event"] == "plan_question_without_memory"]
    assert [entry["reason"] for entry in left_out] == [NO_MEMORY] * 2
    assert left_out[0]["question"] == "linear 64 to 96, up to 16 rows"
    assert len(start("auto")[1].choices) == len(whole.choices) + 2


def test_a_default_without_memory_goes_unanswered_too(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(SkinnyLinear, "__call__", without_memory)
        with structlog.testing.capture_logs() as logs:
            _, plan, _ = start("auto")
    assert len(plan.choices) == 2
    assert NO_MEMORY in str([entry.get("reason") for entry in logs])


def test_candidates_without_memory_are_told_apart_and_tried_again_by_plan_measure(monkeypatch):
    whole = SkinnyLinear.__call__

    def greedy(layer, given):
        if layer.planned[0].serving(16) == "cuBLAS":
            without_memory()
        return whole(layer, given)

    with monkeypatch.context() as patch:
        patch.setattr(SkinnyLinear, "__call__", greedy)
        _, plan, _ = start("auto")
        _, again, calls = start("auto")
    (choice,) = (c for c in plan.choices if c.no_memory)
    assert (list(choice.no_memory), choice.refused) == (["cuBLAS"], {})
    assert NO_MEMORY in choice.no_memory["cuBLAS"]
    # The plan holds all the same, and a start does not try again.
    assert (again, calls) == (plan, 0)
    found, _ = measure_whole(loaded(), MODEL, LONGEST, None, Ticking().timer, unit=8)
    (now,) = (c for c in found.choices if c.question == choice.question)
    assert now.no_memory == {}
    assert "cuBLAS" in now.seconds


def test_a_gpu_without_memory_for_any_question_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setattr("tailrace.kernels.plan_answers._answer", without_memory)
    with pytest.raises(ConfigError, match="has no memory for any question: end what else uses it"):
        measure_whole(loaded(), MODEL, LONGEST, None, Ticking().timer, unit=8)
    assert start("auto")[1].choices == ()


def test_another_fault_of_a_reference_is_raised(monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(SkinnyLinear, "weight_rows", fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        start("auto")


def test_a_plan_of_other_versions_is_measured_anew():
    _, plan, _ = start("auto")
    write(stale(plan), file_here())
    _, again, calls = start("auto")
    assert calls == WHOLE
    assert read(file_here()) == again == plan


@pytest.mark.parametrize("operation", ["prefill attention", "decode attention", "linear 64 to 96"])
def test_a_kept_winner_that_is_no_candidate_any_more_is_told_and_measured_again(
    operation, tmp_path
):
    _, plan, _ = start("auto")
    held = next(c for c in plan.choices if c.operation == operation)
    gone = msgspec.structs.replace(held, winner="gone", seconds={**held.seconds, "gone": 1e-9})
    write(changed := plan.with_choices([gone]), file_here())
    with structlog.testing.capture_logs() as logs:
        _, again, calls = start("auto")
    assert calls == len(held.seconds)
    assert again.winner(*held.question) in held.seconds
    assert read(file_here()) == again
    (told,) = (entry for entry in logs if entry["event"] == "plan_choice_dropped")
    assert told["question"] == f"{operation}, {held.sizes}"
    file = tmp_path / "given.json"
    write(changed, file)
    with pytest.raises(ConfigError, match="'gone' is none of"):
        start(file)


def test_what_a_kept_plan_says_of_what_nobody_asks_is_told_and_forgotten(tmp_path):
    """As of the weights that 0.1.0's decode steps once could ask for ahead."""
    _, plan, _ = start("auto")
    words = ("weight prefetch over float8", "decode steps up to 32 rows")
    gone = choose(*words, "off", {"off": 1.0, "8 MiB": 0.5}, {})
    write(changed := plan.with_choices([gone]), file_here())
    with structlog.testing.capture_logs() as logs:
        _, again, calls = start("auto")
    assert (calls, again) == (0, plan)
    assert read(file_here()) == plan
    (told,) = (entry for entry in logs if entry["event"] == "plan_choice_dropped")
    assert told["question"] == ", ".join(words)
    assert "plan_measured" not in [entry["event"] for entry in logs]
    with structlog.testing.capture_logs() as logs:
        start("auto")
    assert "plan_choice_dropped" not in [entry["event"] for entry in logs]
    file = tmp_path / "given.json"
    write(changed, file)
    with pytest.raises(ConfigError, match="weight prefetch over float8, .*: nothing here is chos"):
        start(file)
    file_here().unlink()
    pin(file, file_here())
    with pytest.raises(ConfigError, match="nothing here is chosen by that; `tailrace plan measure"):
        start("auto")


def test_a_cache_that_cannot_be_written_costs_the_next_start_its_time_and_no_more(
    monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        with structlog.testing.capture_logs() as logs:
            kernels, plan, calls = start("auto")
        assert calls == WHOLE
        assert kernels.prefill_rows[0][1].words == plan.choices[0].winner
        assert "plan_not_kept" in [entry["event"] for entry in logs]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"format": %d}' % FORMAT, b""])
def test_a_damaged_plan_is_left_alone_and_auto_serves_without_it(content, tmp_path):
    file_here().parent.mkdir(parents=True)
    file_here().write_bytes(content)
    with structlog.testing.capture_logs() as logs:
        kernels, plan, calls = start("auto")
    assert (calls, len(plan.choices)) == (WHOLE, 4)
    assert kernels.prefill_rows[0][1].words == plan.choices[0].winner
    assert {"plan_not_read", "plan_not_kept"} <= {entry["event"] for entry in logs}
    assert file_here().read_bytes() == content
    file = tmp_path / "given.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=str(file)):
        start(file)


def stale(plan):
    return msgspec.structs.replace(plan, key=msgspec.structs.replace(plan.key, torch="1.0"))


def of_another_format(plan):
    return msgspec.structs.replace(plan, format=FORMAT + 1)


def test_a_plan_of_another_format_is_measured_anew_once_and_kept(tmp_path):
    """It lies where this one belongs: left there, every start would measure."""
    _, plan, _ = start("auto")
    write(of_another_format(plan), file_here())
    with structlog.testing.capture_logs() as logs:
        _, again, calls = start("auto")
    assert (calls, again, read(file_here())) == (WHOLE, plan, plan)
    assert [e["event"] for e in logs if "plan_" in e["event"]] == [
        "plan_measured_anew", "plan_measured",
    ]  # fmt: skip
    assert start("auto")[2] == 0
    write(of_another_format(plan), file := tmp_path / "given.json")
    with pytest.raises(ConfigError, match=f"{file}: format {FORMAT + 1}, and this version reads"):
        start(file)
    assert measure_whole(loaded(), MODEL, LONGEST, file, Ticking().timer, unit=8)[0] == read(file)


def test_a_pinned_plan_of_another_format_is_never_written_to():
    _, plan, _ = start("auto")
    write(of_another_format(msgspec.structs.replace(plan, pinned=True)), file_here())
    content = file_here().read_bytes()
    with pytest.raises(ConfigError, match=f"format {FORMAT + 1}, and this version reads {FORMAT}"):
        start("auto")
    with pytest.raises(ConfigError, match="is pinned"):
        write(plan, file_here())
    assert file_here().read_bytes() == content


def test_a_pinned_plan_is_taken_as_it_is_and_refused_where_it_is_stale(tmp_path):
    _, plan, _ = start("auto")
    few = msgspec.structs.replace(plan, choices=plan.choices[:1])
    for given, calls in ((few, 0), (stale(few), None)):
        write(given, tmp_path / "some.json")
        file_here().unlink()
        pin(tmp_path / "some.json", file_here())
        if calls is None:
            with pytest.raises(ConfigError, match=r"measured for torch '1\.0'"):
                start("auto")
        else:
            assert start("auto")[1:] == (msgspec.structs.replace(given, pinned=True), calls)


@pytest.mark.parametrize("name", ["gpu", "model", "dtype", "tailrace", "torch", "triton"])
def test_a_files_plan_must_be_of_this_machine_model_and_version(tmp_path, name):
    key = key_of(loaded(), MODEL)
    file = tmp_path / "given.json"
    write(Plan(msgspec.structs.replace(key, **{name: "other"}), ()), file)
    with pytest.raises(ConfigError, match=f"{file}: measured for {name} 'other'"):
        start(file)


def test_a_files_plan_serves_and_nothing_is_measured(tmp_path):
    _, plan, _ = start("auto")
    file = tmp_path / "given.json"
    write(plan, file)
    file_here().unlink()
    kernels, found, calls = start(file)
    assert (found, calls) == (plan, 0)
    assert kernels.prefill_rows[0][1].words == plan.choices[0].winner
    assert not file_here().exists()


def test_a_whole_plan_is_measured_without_a_bound_and_replaces_the_old(tmp_path, monkeypatch):
    kernels, out = loaded(), tmp_path / "out.json"
    exact_float8(monkeypatch)
    plan, file = measure_whole(kernels, MODEL, LONGEST, out, Ticking().timer, unit=8)
    assert (file, read(out)) == (out, plan)
    assert len(plan.choices) == 6  # attention over both kinds of cache
    found = measure_whole(kernels, MODEL, LONGEST, None, Ticking().timer, unit=8)
    assert found[1] == file_here()
    pin(out, tmp_path / "pinned.json")
    ticking = Ticking()
    with pytest.raises(ConfigError, match="is pinned"):
        measure_whole(kernels, MODEL, LONGEST, tmp_path / "pinned.json", ticking.timer, unit=8)
    assert ticking.calls == 0


def test_what_one_question_is_asked_with_is_gone_when_the_next_is_asked(monkeypatch):
    """Sequences of 32,768 tokens take gigabytes each."""
    given, held = weakref.WeakSet(), []

    def asked(*_):
        for number in range(4):
            yield question(number)

    def question(number):
        @cache
        def tensor():
            made = torch.ones(3)
            given.add(made)
            return made

        def work():
            held.append(len(given))
            return tensor() + 0.0

        return Question("linear", f"{number}", "one", {"one": work, "other": work}, tensor)

    monkeypatch.setattr(cuda_plan, "questions_of", asked)
    plan, _ = measure_whole(loaded(), MODEL, LONGEST, None, Ticking().timer, unit=8)
    assert len(plan.choices) == 4
    assert set(held) == {1}


def test_a_whole_plan_forgets_all_that_was_there(monkeypatch):
    exact_float8(monkeypatch)
    foreign = choose("another", "longer", "a", {"a": 1.0}, {})
    gone = choose("decode attention", "another class", "a", {"a": 1.0}, {})
    write(Plan(key_of(loaded(), MODEL), (foreign, gone)), file_here())
    plan, _ = measure_whole(loaded(), MODEL, LONGEST, None, Ticking().timer, unit=8)
    assert len(plan.choices) == 6
    assert all(choice not in plan.choices for choice in (foreign, gone))
    assert read(file_here()) == plan


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", ".*; remove it, and `tailrace plan mea"),
        ('{"format": 9, "pinned": true}', "is pinned"),
    ],
    ids=["damaged", "other version"],
)
def test_what_lies_where_a_whole_plan_goes_and_must_stay_is_found_before_it_is_measured(
    tmp_path, content, why
):
    """What is damaged is not written over either: it may be somebody's pinned plan."""
    out, ticking = tmp_path / "out.json", Ticking()
    out.write_text(content)
    with pytest.raises(ConfigError, match=f"plan .*out.json: {why}"):
        measure_whole(loaded(), MODEL, LONGEST, out, ticking.timer, unit=8)
    assert (ticking.calls, out.read_text()) == (0, content)
    out.unlink()
    assert measure_whole(loaded(), MODEL, LONGEST, out, ticking.timer, unit=8)[0].choices


def test_a_model_with_nothing_to_choose_is_told_so(monkeypatch):
    monkeypatch.setattr(cuda_plan, "questions_of", lambda *_: iter(()))
    with pytest.raises(ConfigError, match="nothing to choose for 2/1 heads of 16"):
        measure_whole(loaded(), MODEL, LONGEST, None, Ticking().timer, unit=8)


@dataclass(eq=False)
class Other:
    operation: str
    sizes: tuple[int, int]


def test_a_key_names_the_layers_or_digests_what_would_be_too_long():
    kernels = loaded()
    assert key_of(kernels, MODEL).model == "2/1 heads of 16, linear 64 to 96"
    (layer,) = kernels.planned_layers
    for outputs in range(64, 3000, 64):
        other = Other(layer.operation, (outputs, 64))
        HELD.append(kernels.let_plan(other))
    long = key_of(kernels, MODEL)
    assert long.model.startswith("2/1 heads of 16, 47 kinds of layers, ")
    write(Plan(long, ()), usual_file(long))
    assert read(usual_file(long)).key == long
    HELD.pop()
    del other
    assert key_of(kernels, MODEL).model != long.model


def test_both_kernels_of_prompts_are_measured_kept_and_read_and_one_may_be_left_out(monkeypatch):
    let_hopper_serve(monkeypatch)
    model = SimpleNamespace(config=SimpleNamespace(num_heads=2, num_kv_heads=1, head_dim=64))
    tritons = len(prefill_candidates(64, INTERPRETER))
    hoppers = [name_of(shape) for shape in hopper_shapes(64)]
    decodes = len(decode_candidates(64, INTERPRETER))

    def begin(asked):
        kernels, ticking = TritonKernels(torch.device("cpu"), "float32"), Ticking()
        kernels.serve_prompts_by(asked, head_dim=64, kv_dtype=torch.float32, unit=8)
        plan = settle(
            "auto", kernels, model, longest=LONGEST, timer=ticking.timer, clock=ticking.clock,
            bound_s=math.inf, kv_dtype=torch.float32, unit=8,
        )  # fmt: skip
        return name_of(kernels.prefill_shape(64, 1000)), plan, ticking.calls

    # Ever the last one that is timed is the quickest.
    serving, plan, calls = begin("triton")
    assert (calls, serving) == (tritons + decodes, plan.choices[0].winner)
    assert not set(plan.choices[0].seconds) & set(hoppers)
    # What lacks candidates is asked again, and the rest is as it was.
    serving, both, calls = begin("auto")
    assert (calls, serving) == (tritons + len(hoppers), hoppers[-1])
    assert set(both.choices[0].seconds) >= set(hoppers)
    assert both.choices[1] == plan.choices[1]
    assert read(usual_file(both.key)) == both
    for asked, expected in (
        ("auto", hoppers[-1]), ("hopper", hoppers[-1]), ("triton", plan.choices[0].winner),
    ):  # fmt: skip
        assert begin(asked) == (expected, both, 0)
