"""The watch over steps, on a clock that moves when told to: no step here takes any time."""

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from structlog.testing import capture_logs

from tailrace.clock import VirtualClock
from tailrace.engine.device_result import DeviceResult
from tailrace.engine.hang_watch import HangWatch
from tailrace.types import STEP_HUNG_STATUS

LIMIT_S = 80.0
LOOK_S = 1.0


class Event:
    """A device's event, which happens when the test says so, if ever."""

    def __init__(self):
        self.has_happened = threading.Event()
        self.is_waited_for = threading.Event()
        self.error = None

    def query(self):
        if self.error is not None:
            raise self.error
        return self.has_happened.is_set()

    def synchronize(self):
        self.is_waited_for.set()
        self.has_happened.wait()


@pytest.fixture
def waiting():
    """A runner's thread, and an event that it may wait for until the test is over."""
    event = Event()
    with ThreadPoolExecutor(1, thread_name_prefix="runner") as executor:
        try:
            yield executor, event
        finally:
            event.has_happened.set()


class Prepared:
    pass


class Runner:
    def execute(self, prepared):
        raise AssertionError("steps run when the test says so")

    def touch_kv(self, units):
        raise AssertionError("steps run when the test says so")

    def describe(self, prepared):
        assert isinstance(prepared, Prepared)
        return {"tokens": 17, "decodes": 3}


class Watched:
    """A watch whose runner's thread is the test."""

    def __init__(self, runner=None, dump=lambda: None):
        self.clock = VirtualClock(1000.0)
        self.runner = runner or Runner()
        self.futures = []
        self.ends = []
        self.watch = HangWatch(
            self._submit, self.runner, LIMIT_S, clock=self.clock, dump=dump, end=self.ends.append
        )

    def _submit(self, function, *args):
        self.futures.append(Future())
        return self.futures[-1]

    def issue(self):
        return self.watch.submit(self.runner.execute, Prepared())

    def queue(self, future):
        """Have the runner's thread be done with a step: it is the device's now."""
        event = Event()
        future.set_result(DeviceResult(torch.zeros(0, dtype=torch.int64), event, []))
        return event

    def after(self, seconds):
        """Let time pass under the watch's eyes."""
        for _ in range(int(seconds / LOOK_S)):
            self.clock.advance(LOOK_S)
            self.watch.look()

    @property
    def has_hung(self):
        return bool(self.ends)


def test_a_step_that_the_device_does_not_end_in_time_ends_the_process():
    watched = Watched()
    watched.queue(watched.issue())
    watched.after(LIMIT_S - 2 * LOOK_S)
    assert not watched.has_hung
    watched.after(3 * LOOK_S)
    assert watched.ends[0] == STEP_HUNG_STATUS


def test_a_step_that_cannot_even_be_queued_ends_it_too():
    """Its scores, or the ids that its grammars want, wait for what hangs."""
    watched = Watched()
    watched.issue()
    watched.after(LIMIT_S + 2 * LOOK_S)
    assert watched.has_hung


def test_the_line_in_the_log_names_the_step_and_who_waits_and_comes_before_the_end():
    told = []
    watched = Watched(dump=lambda: told.append("dump"))
    watched.watch._end = told.append
    watched.queue(watched.issue())
    with capture_logs() as logs:
        watched.after(LIMIT_S + LOOK_S)
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("step_hung", "error")
    assert (line["tokens"], line["decodes"], line["waited_s"]) == (17, 3, LIMIT_S)
    assert told == ["dump", STEP_HUNG_STATUS]


def test_where_other_threads_stand_in_our_code_is_told(waiting):
    executor, event = waiting
    hung = DeviceResult(torch.zeros(0, dtype=torch.int64), event, [])
    executor.submit(hung.wait)
    assert event.is_waited_for.wait(120)
    watched = Watched()
    watched.issue().set_result(hung)
    with capture_logs() as logs:
        watched.after(LIMIT_S + 2 * LOOK_S)
    assert "runner_0 at device_result.py:" in logs[0]["threads"]
    assert "in _settle" in logs[0]["threads"]


def test_a_steps_time_begins_when_the_one_before_is_done():
    watched = Watched()
    events = [watched.queue(watched.issue()) for _ in range(3)]
    for event in events:
        watched.after(LIMIT_S - 2 * LOOK_S)
        event.has_happened.set()
    watched.after(2 * LIMIT_S)
    assert not watched.has_hung


def test_a_first_step_that_compiles_for_long_is_no_hang_within_the_limit():
    watched = Watched()
    first, second = watched.issue(), watched.issue()
    watched.after(LIMIT_S - 2 * LOOK_S)  # queueing all the while
    watched.queue(first).has_happened.set()
    watched.after(LIMIT_S - 2 * LOOK_S)
    watched.queue(second).has_happened.set()
    watched.after(2 * LIMIT_S)
    assert not watched.has_hung


def test_an_engine_without_work_does_not_hang():
    watched = Watched()
    watched.after(2 * LIMIT_S)
    watched.queue(watched.issue()).has_happened.set()
    watched.after(2 * LIMIT_S)
    assert not watched.has_hung


def test_a_process_that_was_stopped_has_not_hung():
    watched = Watched()
    event = watched.queue(watched.issue())
    watched.after(5.0)
    watched.clock.advance(1e6)
    watched.watch.look()
    assert not watched.has_hung
    event.has_happened.set()
    watched.after(2 * LIMIT_S)
    assert not watched.has_hung


@pytest.mark.parametrize("where", ["queueing", "on the device"])
def test_a_step_that_fails_is_somebody_elses(where):
    watched = Watched()
    if where == "queueing":
        watched.issue().set_exception(RuntimeError("no"))
    else:
        watched.queue(watched.issue()).error = RuntimeError("CUDA error: unspecified")
    watched.after(2 * LIMIT_S)
    assert not watched.has_hung


def test_what_is_no_step_is_not_watched():
    watched = Watched()
    watched.watch.submit(watched.runner.touch_kv, [1])
    watched.after(2 * LIMIT_S)
    assert not watched.has_hung


def test_steps_that_are_done_are_let_go_of():
    watched = Watched()
    prepared = Prepared()
    kept = weakref.ref(prepared)
    future = watched.watch.submit(watched.runner.execute, prepared)
    del prepared
    watched.watch.look()
    assert kept() is not None
    watched.queue(future).has_happened.set()
    watched.watch.look()
    assert kept() is None


class Speechless(Runner):
    def describe(self, prepared):
        raise KeyError("a bug of ours")


def test_what_cannot_be_told_or_dumped_does_not_keep_the_process():
    def dump():
        raise RuntimeError("a bug of ours")

    watched = Watched(Speechless(), dump)
    watched.issue()
    with capture_logs() as logs, pytest.raises(RuntimeError):
        watched.after(LIMIT_S + 2 * LOOK_S)
    assert watched.ends == [STEP_HUNG_STATUS]
    assert "a bug of ours" in logs[0]["not_described"]


def test_a_thread_of_its_own_looks(waiting):
    executor, event = waiting
    statuses, has_ended = [], threading.Event()
    runner = Runner()
    runner.execute = lambda prepared: event.synchronize()

    def end(status):
        watch.stop()
        statuses.append(status)
        has_ended.set()

    watch = HangWatch(executor.submit, runner, 0.05, dump=lambda: None, end=end)
    watch.start()
    with capture_logs():
        watch.submit(runner.execute, Prepared())
        assert has_ended.wait(120)
    assert statuses == [STEP_HUNG_STATUS]
