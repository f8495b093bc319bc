"""A request's time in phases: every moment in one, whatever the stamps say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.clock import VirtualClock
from tailrace.server.timeline import Timeline
from tailrace.types import RequestTimes

FRONT = ("tokenise", "admission", "tokenise")


def told(arrival_s, *, queue=0.0, prefill=0.0, wait=0.0, decode=0.0, preempted=0.0, first=True):
    end_s = arrival_s + queue + prefill + wait + decode + preempted
    return RequestTimes(
        arrival_s=arrival_s,
        scheduled_s=arrival_s + queue,
        first_token_s=end_s - decode if first else 0.0,
        finished_s=end_s,
        queue_s=queue,
        prefill_s=prefill,
        prefill_wait_s=wait,
        decode_s=decode,
        preempted_s=preempted,
    )


def submitted(clock):
    timeline = Timeline(clock(), clock)
    for seconds, phase in zip((1.0, 0.2, 0.3, 0.4), (*FRONT, None), strict=True):
        clock.advance(seconds)
        if phase is not None:
            timeline.enter(phase)
    timeline.submit()
    return timeline


def test_each_phase_is_as_long_as_it_took():
    clock = VirtualClock(100.0)
    timeline = submitted(clock)
    times = told(clock(), queue=2.0, prefill=3.0, wait=4.0, decode=5.0, preempted=6.0)
    clock.advance(20.5)  # made after 20 s, and half a second on its way
    timeline.send_began()
    clock.advance(0.25)
    timeline.send_ended()
    timeline.is_complete = True
    clock.advance(1.0)
    phases = timeline.phases(times, times.finished_s, clock())
    assert phases.by_name() == pytest.approx(
        {
            "body": 1.0,
            "tokenise": 0.6,
            "admission": 0.3,
            "queue": 2.0,
            "prefill": 3.0,
            "prefill_wait": 4.0,
            "decode": 5.0,
            "preempted": 6.0,
            "emit": 0.5,
            "socket": 1.25,
        }
    )
    assert phases.total_s == pytest.approx(clock() - 100.0)


def test_a_client_that_is_behind_while_the_engine_decodes_costs_nothing():
    clock = VirtualClock(0.0)
    timeline = submitted(clock)
    start_s = clock()
    timeline.send_began()
    clock.advance(8.0)
    timeline.send_ended()
    timeline.token_came()
    clock.advance(2.0)
    phases = timeline.phases(told(start_s, decode=10.0), start_s + 10.0, clock())
    assert (phases.decode_s, phases.socket_s) == (10.0, 0.0)


def test_the_part_of_a_wait_after_the_engines_end_is_the_sockets():
    clock = VirtualClock(0.0)
    timeline = submitted(clock)
    start_s = clock()
    clock.advance(9.0)
    timeline.send_began()
    clock.advance(4.0)
    # Still waiting, as an answer's own metrics would see it, and when it is over.
    for _ in range(2):
        phases = timeline.phases(told(start_s, decode=10.0), start_s + 10.0, clock())
        assert (phases.decode_s, phases.emit_s, phases.socket_s) == (10.0, 0.0, 3.0)
        timeline.send_ended()


def test_what_the_engine_did_not_tell_is_decode_after_a_first_token_and_queue_before_one():
    clock = VirtualClock(0.0)
    timeline = submitted(clock)
    start_s = clock()
    clock.advance(50.0)
    early = told(start_s, queue=1.0, prefill=2.0)
    assert timeline.phases(early, clock(), clock()).decode_s == 47.0
    assert timeline.phases(None, clock(), clock()).queue_s == 50.0
    unfinished = told(start_s, queue=1.0, prefill=2.0, first=False)
    assert timeline.phases(unfinished, clock(), clock()).prefill_s == 49.0


def test_a_refusal_has_no_time_at_the_engine():
    clock = VirtualClock(10.0)
    timeline = Timeline(clock(), clock)
    clock.advance(3.0)
    timeline.enter("emit")  # a stalled body was given up
    clock.advance(0.5)
    timeline.send_began()
    timeline.send_ended()
    timeline.is_complete = True
    clock.advance(2.0)
    phases = timeline.refused(clock())
    assert (phases.body_s, phases.emit_s, phases.socket_s) == (3.0, 0.5, 2.0)
    assert phases.total_s == 5.5


seconds = st.floats(0.0, 100.0)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            seconds, st.sampled_from(["tokenise", "admission", "emit", "send", "sent", "token"])
        ),
        max_size=12,
    ),
    submit_after=st.integers(0, 12) | st.none(),
    parts=st.lists(seconds, min_size=5, max_size=5),
    is_told=st.booleans(),
    has_first=st.booleans(),
    skew_s=st.floats(-150.0, 150.0),
    is_complete=st.booleans(),
)
def test_the_phases_add_up_whatever_was_stamped_when(
    steps, submit_after, parts, is_told, has_first, skew_s, is_complete
):
    """Also where the engine's account contradicts this process's clock."""
    clock = VirtualClock(1000.0)
    timeline = Timeline(clock(), clock)
    for number, (wait_s, what) in enumerate(steps):
        if number == submit_after:
            timeline.submit()
        clock.advance(wait_s)
        if what == "send":
            timeline.send_began()
        elif what == "sent":
            timeline.send_ended()
        elif what == "token":
            timeline.token_came()
        else:
            timeline.enter(what)
    timeline.is_complete = is_complete
    end_s = clock()
    if timeline.submitted_s is None:
        phases = timeline.refused(end_s)
    else:
        queue, prefill, wait, decode, preempted = parts
        account = told(
            timeline.submitted_s + skew_s,
            queue=queue,
            prefill=prefill,
            wait=wait,
            decode=decode,
            preempted=preempted,
            first=has_first,
        )
        phases = timeline.phases(account if is_told else None, account.finished_s, end_s)
    assert phases.total_s == pytest.approx(end_s - 1000.0, abs=1e-6)
    assert min(phases.by_name().values()) >= -1e-9


def test_a_part_that_the_socket_took_at_once_is_no_waiting_for_the_client():
    clock = VirtualClock(100.0)
    timeline = submitted(clock)
    clock.advance(1.0)
    timeline.part_written()
    assert timeline.begun_s == timeline.written_s == clock()
    clock.advance(0.5)
    timeline.part_written()
    assert (timeline.begun_s, timeline.written_s) == (clock() - 0.5, clock())
    assert timeline.phases(None, clock(), clock()).by_name()["socket"] == 0.0
