"""How a plan's questions are answered: candidates that err, fail, hang or find no memory."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial

import pytest
import structlog
import torch

from tailrace.errors import ConfigError

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels import plan_answers
from tailrace.kernels.plan import choose
from tailrace.kernels.plan_answers import measure
from tailrace.kernels.plan_questions import Question

TRUTH = torch.tensor([3.0, 4.0])


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
    ("usual", "lucky", "steady", "winner"),
    [
        ([2.0, 2.0], [1.0, 2.2], [1.9, 1.95, 1.9], "usual"),
        ([2.0, 2.0], [1.0, 2.2], [1.5, 1.6], "steady"),
        ([2.0, 1.0], [1.5, 1.5], [1.6], "usual"),
        ([2.0, 2.0], [1.0, 1.1], [1.5], "lucky"),
    ],
    ids=["the default stays", "another wins", "the default was slow once", "it is so again"],
)
def test_what_is_the_fastest_by_chance_does_not_win(usual, lucky, steady, winner):
    times = {"usual": [*usual, *usual], "lucky": lucky, "steady": steady}

    def timer(work):
        return times[work.name].pop(0)

    asked = question(usual=TRUTH, lucky=TRUTH, steady=TRUTH)
    (found,) = measure([asked], timer, lambda: 0.0, 100.0)
    assert found.winner == winner


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


def test_where_bits_must_be_equal_the_nearest_is_refused():
    bench = Bench({"usual": 2.0, "same": 1.5, "other": 1.0})
    asked = replace(question(usual=TRUTH, same=TRUTH, other=TRUTH + 1e-6), is_exact=True)
    (found,) = measure([asked], bench.timer, bench.clock, 100.0)
    assert found.winner == "same"
    assert found.refused == {"other": "its bits are not the default's"}


def is_no_memory(failure):
    return isinstance(failure, torch.OutOfMemoryError)


def test_a_candidate_that_runs_out_of_memory_is_not_refused():
    bench = Bench({"usual": 2.0, "a": 1.0})
    asked = question(usual=TRUTH, greedy=torch.OutOfMemoryError("2 GiB"), a=TRUTH, b=TRUTH + 1.0)
    (found,) = measure([asked], bench.timer, bench.clock, 100.0, is_no_memory)
    assert found.no_memory == {"greedy": "OutOfMemoryError: 2 GiB"}
    assert list(found.refused) == ["b"]
    assert found.winner == "a"


def test_one_that_runs_out_of_memory_while_it_is_timed_is_not_refused_either():
    bench = Bench({"usual": 2.0, "a": 1.0})

    def timer(work):
        if work.name == "greedy":
            raise torch.OutOfMemoryError("more")
        return bench.timer(work)

    asked = question(usual=TRUTH, greedy=TRUTH, a=TRUTH)
    (found,) = measure([asked], timer, bench.clock, 100.0, is_no_memory)
    assert (list(found.no_memory), found.refused, found.winner) == (["greedy"], {}, "a")


def test_what_passed_and_fails_while_it_is_timed_is_an_error():
    bench = Bench({"usual": 2.0})
    asked = question(usual=TRUTH, broken=TRUTH)
    with pytest.raises(KeyError, match="broken"):
        measure([asked], bench.timer, bench.clock, 100.0, is_no_memory)


def test_what_a_failed_candidate_held_is_let_go_before_the_next_is_tried():
    held = []

    def greedy():
        taken = torch.zeros(8)
        held.append(weakref.ref(taken))
        raise torch.OutOfMemoryError("2 GiB")

    def after():
        assert held[0]() is None
        return TRUTH

    works = {"usual": Work("usual", TRUTH), "greedy": greedy, "after": after}
    asked = Question("op", "small", "usual", works, lambda: TRUTH)
    (found,) = measure([asked], lambda _: 1.0, lambda: 0.0, 100.0, is_no_memory)
    assert list(found.seconds) == ["usual", "after"]


def test_past_the_bound_no_candidate_is_begun_and_half_an_answer_is_none():
    bench = Bench({"usual": 1.0, "a": 1.0})
    asked = [question(sizes, usual=TRUTH, a=TRUTH) for sizes in ("one", "two", "three")]
    found = measure(asked, bench.timer, bench.clock, 2.5)
    assert [choice.sizes for choice in found] == ["one"]
    assert bench.timed == ["usual", "a", "usual"]
    assert measure(asked, bench.timer, bench.clock, 0.0) == []


class Event:
    """Of a device that is done, or never is."""

    is_done = True

    def record(self):
        """Nothing is queued."""

    def query(self):
        return self.is_done


@pytest.mark.parametrize("ends", [True, False])
def test_a_candidate_that_does_not_end_is_an_error_that_names_it(monkeypatch, ends):
    monkeypatch.setattr(plan_answers, "_MOST_S", 0.01)
    monkeypatch.setattr(Event, "is_done", ends)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    # Only what waits looks at where a result is.
    on_device = type("OnDevice", (), {"is_cuda": True, "double": lambda _: TRUTH.double()})()
    bench = Bench({"usual": 2.0, "other": 1.0})
    asked = [question(usual=TRUTH, other=on_device)]
    if ends:
        (found,) = measure(asked, bench.timer, bench.clock, 100.0)
        assert found.winner == "other"
        return
    with pytest.raises(ConfigError, match="op, small: other has not ended after 0 s.*--plan off"):
        measure(asked, bench.timer, bench.clock, 100.0)


class Device:
    """A GPU whose faults are sticky: after one, whatever is called raises it again."""

    FAULT = "CUDA error: an illegal memory access was encountered"

    def __init__(self, monkeypatch):
        self.is_lost = False
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.check())

    def check(self):
        if self.is_lost:
            raise RuntimeError(self.FAULT)

    def timer(self, work):
        work()
        return 1.0

    def works(self, *names, faulty, good_runs=0):
        """Return candidates that give the truth; one is a fault after so many runs."""
        runs = []

        def work(name):
            self.check()
            runs.append(name)
            self.is_lost = name == faulty and runs.count(name) > good_runs
            self.check()
            return TRUTH

        return {name: partial(work, name) for name in names}


@pytest.mark.parametrize("good_runs", [0, 1], ids=["checked", "timed"])
def test_a_fault_on_the_device_is_an_error_that_names_whose_it_is(monkeypatch, good_runs):
    device = Device(monkeypatch)
    works = device.works("usual", "wild", "after", faulty="wild", good_runs=good_runs)
    asked = [Question("op", sizes, "usual", works, lambda: TRUTH) for sizes in ("a", "b")]
    whose = r"op, a: wild is a fault on the GPU \(RuntimeError: CUDA error: an illegal"
    with pytest.raises(ConfigError, match=f"{whose}.*--plan off .*--prefill-attention triton"):
        measure(asked, device.timer, lambda: 0.0, 100.0, is_no_memory)


def test_a_fault_that_shows_when_a_result_is_looked_at_is_one_of_its_candidate(monkeypatch):
    device = Device(monkeypatch)

    class Lost:
        is_cuda = False

        def double(self):
            device.is_lost = True
            device.check()

    asked = [question(usual=TRUTH, wild=Lost(), after=TRUTH)]
    with pytest.raises(ConfigError, match="op, small: wild is a fault on the GPU"):
        measure(asked, device.timer, lambda: 0.0, 100.0, is_no_memory)


def test_a_candidate_that_cannot_run_on_a_sound_device_is_refused_and_told(monkeypatch):
    device = Device(monkeypatch)
    asked = question(usual=TRUTH, big=RuntimeError("out of resource: shared memory"), after=TRUTH)
    with structlog.testing.capture_logs() as logs:
        (found,) = measure([asked], device.timer, lambda: 0.0, 100.0, is_no_memory)
    why = "RuntimeError: out of resource: shared memory"
    assert (found.refused, list(found.seconds)) == ({"big": why}, ["usual", "after"])
    (told,) = logs
    assert (told["event"], told["question"]) == ("plan_candidate_refused", "op, small")
    assert (told["name"], told["why"]) == ("big", why)
