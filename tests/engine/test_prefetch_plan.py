"""`--weight-prefetch`: what is known before graphs, what is measured after, on a runner of ours."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import structlog
import torch

from tailrace.errors import ConfigError

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.engine import prefetch_plan
from tailrace.engine.prefetch_plan import OFF, classes, find, settle, timed
from tailrace.engine.weight_prefetch import ROW_CLASSES, DeviceCache
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.plan import Choice, Key, Plan, pin, read, usual_file, write
from tailrace.kernels.weight_prefetch.gaps import MIB, Budget

KEY = Key("some GPU (9.0)", "a model", "bfloat16", "1", "2", "3")
CACHE = DeviceCache(50 * MIB, 132, (9, 0))
MODEL = SimpleNamespace(layer_linears=[])
SIZES = [1, 2, 4, 8, 16, 24, 32, 40]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(DeviceCache, "of", classmethod(lambda *_: CACHE))
    monkeypatch.setattr(prefetch_plan, "quietly", nullcontext)


class Timed:
    """Steps of 5 ms a context, less what a budget saves at so many rows."""

    cache = CACHE
    decode_sizes = SIZES

    def __init__(self, saved_s, error=None):
        self.saved_s, self.error = saved_s, error
        self.rehearsed, self.served = [], None

    def rehearsals(self, size, keys, budget):
        self.rehearsed.append((size, budget.words if budget else OFF))
        seconds = 0.005 - (self.saved_s.get((size, budget.words), 0.0) if budget else 0.0)
        return [lambda: seconds for _ in keys]

    def prefetch_by(self, budgets):
        if self.error is not None:
            raise self.error
        self.served = budgets


def known(asked, plan="auto", *, kv_dtype=torch.bfloat16):
    """Return what a start knows before graphs, once its plan was found."""
    file = usual_file(KEY) if plan == "auto" else plan
    found = None if plan == "off" else read(file) if file.exists() else Plan(KEY, ())
    device = torch.device("cpu")
    return find(asked, str(plan), found, MODEL, device=device, kv_dtype=kv_dtype)


def start(asked, plan, saved_s=None, *, kv_dtype=torch.bfloat16, **more):
    """Return (budgets known before, the runner afterwards)."""
    prefetching = known(asked, plan, kv_dtype=kv_dtype)
    runner = Timed(saved_s or {}, **more)
    settle(prefetching, runner, clock=lambda: 0.0)
    return prefetching.budgets, runner


def test_off_knows_and_measures_nothing():
    budgets, runner = start("off", "auto")
    assert (budgets, runner.rehearsed, runner.served) == ({}, [], None)
    assert not usual_file(KEY).exists()


def test_a_number_serves_every_class_and_nothing_is_measured():
    budgets, runner = start("8", "off")
    assert budgets == dict.fromkeys(ROW_CLASSES, Budget(8 * MIB))
    assert (runner.rehearsed, runner.served) == ([], None)


@pytest.mark.parametrize("asked", ["26", "9999"])
def test_a_number_that_the_cache_has_no_room_for_is_refused(asked):
    with pytest.raises(ConfigError, match=f"--weight-prefetch {asked}: .* at most 25"):
        known(asked, "off")


@pytest.mark.parametrize("asked", ["8", "auto"])
def test_a_cpu_is_refused(asked, monkeypatch):
    monkeypatch.setattr(DeviceCache, "of", classmethod(lambda *_: None))
    with pytest.raises(ConfigError, match=f"--weight-prefetch {asked}: needs a GPU"):
        known(asked)


def test_auto_measures_each_class_once_keeps_it_and_lets_the_winners_serve():
    saved_s = {(32, "16 MiB"): 0.0004, (32, "8 MiB"): 0.0002, (40, "8 MiB"): 0.00004}
    with structlog.testing.capture_logs() as logs:
        budgets, runner = start("auto", "auto", saved_s)
    assert budgets == dict.fromkeys(ROW_CLASSES)
    arms = [OFF, "8 MiB", "16 MiB", "24 MiB", "16 MiB, columns", "16 MiB, early"]
    assert runner.rehearsed == [(size, arm) for size in (16, 32, 40) for arm in arms]
    # At 40 rows a hundredth is not reached.
    won = {16: None, 32: Budget(16 * MIB), 64: None, 128: None}
    assert runner.served == won
    (told,) = (entry for entry in logs if entry["event"] == "weight_prefetch_measured")
    assert "decode steps up to 32 rows: 16 MiB, 800 us of 10000" in told["choices"]
    plan = read(usual_file(KEY))
    assert [choice.winner for choice in plan.choices] == [OFF, "16 MiB", OFF]
    assert plan.choices[1].seconds == pytest.approx(
        dict.fromkeys(arms, 0.01) | {"8 MiB": 0.0096, "16 MiB": 0.0092}
    )
    budgets, runner = start("auto", "auto", saved_s)
    assert (budgets, runner.rehearsed, runner.served) == (won, [], None)
    assert any("weight prefetch, decode steps up to 32 rows" in line for line in plan.describe())


def test_what_the_plan_holds_besides_stays():
    write(Plan(KEY, (other := choice_of("prefill attention", "64x64"),)), usual_file(KEY))
    start("auto", "auto")
    assert read(usual_file(KEY)).choices[0] == other


def choice_of(operation, winner, sizes="longer"):
    return Choice(operation, sizes, winner, winner, {winner: 1.0})


def test_time_bounds_what_is_measured_and_the_next_start_goes_on():
    ticks = iter([0.0, 0.0, 9.0, 9.0])
    runner = Timed({})
    settle(known("auto"), runner, clock=lambda: next(ticks))
    assert {size for size, _ in runner.rehearsed} == {16}
    _, runner = start("auto", "auto")
    assert {size for size, _ in runner.rehearsed} == {32, 40}


def test_a_file_is_taken_as_it_is_and_nothing_is_added(tmp_path):
    file = tmp_path / "given.json"
    held = choice_of(prefetch_plan.OPERATION, "24 MiB", prefetch_plan.sizes_of(64))
    write(Plan(KEY, (held,)), file)
    budgets, runner = start("auto", file)
    assert budgets == {16: None, 32: None, 64: Budget(24 * MIB), 128: None}
    assert (runner.rehearsed, runner.served) == ([], None)


def test_a_pinned_plan_is_not_added_to(tmp_path):
    write(Plan(KEY, ()), tmp_path / "some.json")
    usual_file(KEY).parent.mkdir(parents=True)
    pin(tmp_path / "some.json", usual_file(KEY))
    with structlog.testing.capture_logs() as logs:
        budgets, runner = start("auto", "auto")
    assert (set(budgets.values()), runner.rehearsed) == ({None}, [])
    assert [entry["event"] for entry in logs] == ["weight_prefetch_not_in_plan"]


def test_auto_without_a_plan_is_refused():
    with pytest.raises(ConfigError, match="--weight-prefetch auto: .* add --plan auto"):
        start("auto", "off")


def test_a_file_that_says_nothing_of_it_is_told(tmp_path):
    """Nothing is asked for ahead then, which whoever asked for it should know."""
    file = tmp_path / "given.json"
    held = choice_of(prefetch_plan.OPERATION, "8 MiB", prefetch_plan.sizes_of(16))
    write(Plan(KEY, (held,)), file)
    for kv_dtype, expected in ((torch.bfloat16, []), (FLOAT8, ["weight prefetch over float8"])):
        with structlog.testing.capture_logs() as logs:
            budgets, _ = start("auto", file, kv_dtype=kv_dtype)
        assert (budgets[16] is None) == bool(expected)
        assert [entry["question"] for entry in logs] == expected
        assert all(entry["log_level"] == "warning" for entry in logs)
        assert all(
            (entry["file"], "--plan auto" in entry["remedy"]) == (str(file), True) for entry in logs
        )


def test_a_file_that_names_no_budget_of_here_is_refused(tmp_path):
    file = tmp_path / "given.json"
    held = choice_of(prefetch_plan.OPERATION, "7 MiB", prefetch_plan.sizes_of(16))
    write(Plan(KEY, (held,)), file)
    with pytest.raises(ConfigError, match="up to 16 rows: '7 MiB' is none of off, 8 MiB, 16 MiB"):
        start("auto", file)


def test_a_kept_winner_that_is_no_budget_of_here_is_told_dropped_and_measured_again():
    others = [
        choice_of("linear 64 to 96", "7 MiB"),
        choice_of("weight prefetch over float8", "7 MiB"),
    ]
    held = choice_of(prefetch_plan.OPERATION, "7 MiB", prefetch_plan.sizes_of(32))
    start("auto", "auto")
    write(read(usual_file(KEY)).with_choices([*others, held]), usual_file(KEY))
    with structlog.testing.capture_logs() as logs:
        budgets, runner = start("auto", "auto", {(32, "8 MiB"): 0.001})
    assert budgets[32] is None
    assert {size for size, _ in runner.rehearsed} == {32}
    assert runner.served[32] == Budget(8 * MIB)
    (told,) = (entry for entry in logs if entry["event"] == "plan_choice_dropped")
    assert told["question"] == "weight prefetch, decode steps up to 32 rows"
    assert (told["log_level"], "'7 MiB' is no candidate" in told["reason"]) == ("warning", True)
    kept = read(usual_file(KEY))
    assert all(choice in kept.choices for choice in others)
    assert start("auto", "auto")[1].rehearsed == []


def test_what_was_measured_without_a_budget_of_now_is_measured_again(monkeypatch):
    saved_s = {(32, "8 MiB"): 0.0004, (32, "24 MiB"): 0.0008}
    with monkeypatch.context() as patch:
        patch.setattr(prefetch_plan, "CANDIDATES", prefetch_plan.CANDIDATES[:1])
        assert start("auto", "auto", saved_s)[1].served[32] == Budget(8 * MIB)
    budgets, runner = start("auto", "auto", saved_s)
    assert budgets[32] == Budget(8 * MIB)  # till it is measured
    assert {size for size, _ in runner.rehearsed} == {16, 32, 40}
    assert runner.served[32] == Budget(24 * MIB)
    assert start("auto", "auto", saved_s)[1].rehearsed == []


def test_each_kind_of_cache_has_budgets_of_its_own():
    """Over float8 attention reads half as much, and leaves memory idle for another while."""
    start("auto", "auto", {(32, "8 MiB"): 0.0004})
    half = read(usual_file(KEY))
    budgets, runner = start("auto", "auto", {(32, "16 MiB"): 0.0004}, kv_dtype=FLOAT8)
    assert set(budgets.values()) == {None}
    assert {size for size, _ in runner.rehearsed} == {16, 32, 40}
    both = read(usual_file(KEY))
    assert both.choices[: len(half.choices)] == half.choices
    assert len(both.choices) == 2 * len(half.choices)
    assert known("auto").budgets[32] == Budget(8 * MIB)
    assert known("auto", kv_dtype=FLOAT8).budgets[32] == Budget(16 * MIB)


def test_a_small_cache_is_offered_what_fits(monkeypatch):
    small = DeviceCache(32 * MIB, 108, (8, 0))
    monkeypatch.setattr(DeviceCache, "of", classmethod(lambda *_: small))
    monkeypatch.setattr(Timed, "cache", small)
    _, runner = start("auto", "auto")
    assert {arm for _, arm in runner.rehearsed} == {
        OFF, "8 MiB", "16 MiB", "16 MiB, columns", "16 MiB, early",
    }  # fmt: skip


def test_without_memory_for_further_graphs_the_old_ones_serve_and_the_plan_keeps_what_it_found():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore.")
    with structlog.testing.capture_logs() as logs:
        _, runner = start("auto", "auto", {(32, "8 MiB"): 0.001}, error=error)
    assert runner.served is None
    assert [e["reason"] for e in logs if e["event"] == "weight_prefetch_lacks_memory"] == [
        "CUDA out of memory. Tried 2 GiB."
    ]
    assert known("auto").budgets[32] == Budget(8 * MIB)
    usual_file(KEY).unlink()
    with pytest.raises(RuntimeError, match="assert"):
        start("auto", "auto", error=RuntimeError("device-side assert"))


def test_each_class_is_timed_at_its_largest_captured_size():
    assert classes([1, 8, 12, 20, 200]) == [(16, 12), (32, 20)]
    assert classes([64]) == [(64, 64)]
    assert classes([]) == []


def test_arms_take_turns_and_medians_of_contexts_are_added():
    turns = []

    def step(name, seconds):
        def run():
            turns.append(name)
            return seconds[min(turns.count(name), len(seconds)) - 1]

        return run

    found = timed({"a": [step("a", [9.0, 1.0])], "b": [step("b", [9.0, 3.0])]})
    assert found == {"a": 1.0, "b": 3.0}  # the first of each is not counted
    assert turns[:6] == ["a", "b", "b", "a", "a", "b"]
    assert timed({"a": [lambda: 1.0, lambda: 2.0]}) == {"a": 3.0}
