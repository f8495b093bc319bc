"""Where the time of a start goes."""

from __future__ import annotations

from tailrace.clock import VirtualClock
from tailrace.engine.start_times import StartTimes


def test_every_second_belongs_to_one_phase_and_a_phase_may_have_parts():
    clock = VirtualClock(10.0)
    times = StartTimes(clock, begun_s=9.0)
    for phase, seconds in (("import", 2.0), ("memory", 0.25), ("capture", 5.0), ("memory", 0.5)):
        clock.advance(seconds)
        times.mark(phase)
    assert times.seconds == {"import": 3.0, "memory": 0.75, "capture": 5.0}
    assert times.total_s == clock() - 9.0
    assert times.describe() == "import 3.0 s, memory 0.8 s, capture 5.0 s; 8.8 s in all"


def test_it_begins_now_unless_told_otherwise():
    clock = VirtualClock(10.0)
    times = StartTimes(clock)
    clock.advance(1.5)
    times.mark("all")
    assert times.seconds == {"all": 1.5}
