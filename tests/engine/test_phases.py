"""Where a sequence's time goes, over scripted devices: the phases add up, whatever happens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.clock import VirtualClock
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.engine import Engine
from tailrace.engine.scheduler import Scheduler
from tailrace.errors import DeviceMemoryError
from tailrace.types import (
    EngineRequest,
    GrowPrompt,
    RequestTimes,
    SamplingParams,
    TokenOutput,
)
from tests.support.fake_runner import VOCAB, FakeRunner

CONTEXT = 64


@dataclass
class TimedRunner(FakeRunner):
    """A device whose steps take what a script says, in seconds."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    steps_s: itertools.cycle = field(default_factory=lambda: itertools.cycle([1.0]))

    def execute(self, rows):
        self.clock.advance(next(self.steps_s))
        return super().execute(rows)


@dataclass
class Run:
    """An engine over that device, and the times that it told."""

    engine: Engine
    runner: TimedRunner
    firsts: dict[str, RequestTimes] = field(default_factory=dict)
    finals: dict[str, RequestTimes] = field(default_factory=dict)
    between: dict[str, RequestTimes] = field(default_factory=dict)
    """Told with the first token after a preemption."""

    @property
    def clock(self) -> VirtualClock:
        return self.runner.clock

    def add(self, name, prompt, max_tokens, *, ignore_eos=True, **fields) -> None:
        refused = self.engine.add(
            EngineRequest(
                request_id=name,
                token_ids=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
                arrival_s=self.clock(),
                **fields,
            )
        )
        assert refused is None

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            times = output.times
            if output.finish_reason is not None:
                assert times is not None
                self.finals[output.request_id] = times
            elif times is not None:
                known = self.firsts if output.request_id not in self.firsts else self.between
                known[output.request_id] = times

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self.take(self.engine.step())
        raise AssertionError("not done")


def make_run(
    steps_s=(1.0,), *, num_units=64, slots=4, budget=16, surprised=False, fail_when=None
) -> Run:
    blocks = BlockManager(num_units, 8, prefix_cache=True, mixed_sizes=True)
    runner = TimedRunner(8, steps_s=itertools.cycle(steps_s))
    if fail_when is not None:
        runner.fail_when = fail_when
    scheduler = Scheduler(blocks, max_batch_size=slots, token_budget=budget)
    for _ in range(20 * surprised):
        scheduler.answers.observe(1)
    engine = Engine(
        scheduler,
        runner,
        submit=runner.submit,
        clock=runner.clock,
        context_length=min(CONTEXT, num_units * 8),
        vocab_size=VOCAB,
        eos_token_ids=[7],
    )
    return Run(engine, runner)


def phases(times: RequestTimes) -> tuple[float, ...]:
    return (
        times.queue_s,
        times.prefill_s,
        times.prefill_wait_s,
        times.decode_s,
        times.preempted_s,
    )


def check(times: RequestTimes) -> None:
    assert min(phases(times)) >= 0
    assert sum(phases(times)) == pytest.approx(times.finished_s - times.arrival_s, abs=1e-9)
    assert 0 <= times.decode_wait_s <= times.decode_s + 1e-9
    if times.scheduled_s:
        assert times.queue_s == pytest.approx(times.scheduled_s - times.arrival_s, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2), st.integers(0, 12)),
        min_size=1,
        max_size=10,
    ),
    steps_s=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=7),
    host_s=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=5),
    num_units=st.integers(8, 24),
    budget=st.integers(4, 40),
    surprised=st.booleans(),
    abort_at=st.dictionaries(st.integers(0, 9), st.integers(0, 30), max_size=3),
    failure=st.sampled_from([None, RuntimeError, DeviceMemoryError]),
)
def test_the_phases_of_every_request_add_up_to_its_time_in_the_engine(
    jobs, steps_s, host_s, num_units, budget, surprised, abort_at, failure
):
    run = make_run(
        steps_s,
        num_units=num_units,
        budget=budget,
        surprised=surprised,
        fail_when=lambda rows: failure and any(4 in (row.inputs or []) for row in rows),
    )
    run.runner.failure = failure
    waits = itertools.cycle(host_s)
    for step in range(3000):
        run.clock.advance(next(waits))
        for i, (prompt, max_tokens, priority, at_step) in enumerate(jobs):
            if at_step == step:
                run.add(f"r-{i}", [i % 5] * prompt, max_tokens, priority=priority, ignore_eos=False)
        for i, at_step in abort_at.items():
            if at_step == step:
                run.take(run.engine.abort([f"r-{i}"]))
        if step > 12 and not run.engine.has_work:
            break
        run.take(run.engine.step())
    assert len(run.finals) == len(jobs)
    for name, times in run.finals.items():
        check(times)
        first = run.firsts.get(name)
        if first is not None:
            check(first)
            assert first.decode_s == 0
            assert first.finished_s == first.first_token_s
            for earlier, later in zip(phases(first), phases(times), strict=True):
                assert earlier <= later
        if not times.preemptions:
            assert times.preempted_s == 0


def test_alone_a_request_waits_for_nobody():
    run = make_run([2.0])
    run.add("r", [1] * 40, 3)
    run.finish()
    times = run.finals["r"]
    # 40 tokens in chunks of 16, 16 and 8, then two more tokens.
    assert phases(times) == (0.0, 6.0, 0.0, 4.0, 0.0)
    assert times.decode_wait_s == 0
    assert times.first_token_s == 6.0


def test_a_steps_time_is_divided_among_its_prompts_by_tokens():
    run = make_run([4.0], budget=16)
    run.add("r-0", [1] * 12, 1)
    run.add("r-1", [2] * 4, 1)
    run.finish()
    assert phases(run.finals["r-0"]) == (0.0, 3.0, 1.0, 0.0, 0.0)
    assert phases(run.finals["r-1"]) == (0.0, 1.0, 3.0, 0.0, 0.0)


def test_who_is_admitted_and_gets_no_chunk_waits_for_the_prompts_of_others():
    run = make_run([1.0], budget=16)
    run.add("long", [1] * 40, 1)
    run.engine.step()
    run.add("urgent", [2] * 16, 1, priority=-1)
    run.finish()
    # The urgent one overtakes nobody who is mid-prefill, but shares the last step with him.
    waited = run.finals["urgent"]
    assert waited.prefill_wait_s == pytest.approx(0.5)
    assert waited.queue_s == pytest.approx(2.0)
    check(waited)


def test_a_long_prompt_of_another_is_told_apart_in_an_answers_time():
    run = make_run([1.0], budget=17)
    run.add("talks", [1] * 4, 12)
    run.engine.step()
    run.engine.step()
    run.add("reads", [2] * 48, 1)
    run.finish()
    talks = run.finals["talks"]
    # Three steps carry 16 tokens of the other's prompt beside the one of its own.
    assert talks.decode_wait_s == pytest.approx(3 * 16 / 17)
    assert talks.decode_s == pytest.approx(11.0)


def test_the_time_of_a_preemption_ends_where_it_is_computed_again():
    run = make_run([1.0], num_units=8, budget=32, surprised=True)
    for i in range(3):
        run.add(f"r-{i}", [i + 1] * 15, 30)
    run.finish()
    hit = {name: times for name, times in run.finals.items() if times.preemptions}
    assert hit
    for name, times in hit.items():
        assert times.preempted_s > 0
        check(times)
        # Told at once, for a stop string may end the answer before the engine does.
        assert run.between[name].preempted_s > 0
        check(run.between[name])
    oldest = run.finals["r-0"]
    assert oldest.preempted_s == 0


def test_who_is_aborted_in_the_queue_has_only_queued():
    run = make_run(slots=1)
    run.add("r-0", [1] * 4, 9)
    run.add("r-1", [2] * 4, 9)
    run.take(run.engine.step())
    run.take(run.engine.step())
    run.take(run.engine.abort(["r-1"]))
    assert phases(run.finals["r-1"]) == (1.0, 0.0, 0.0, 0.0, 0.0)
    assert run.finals["r-1"].scheduled_s == 0
    run.finish()


def test_what_was_computed_while_the_body_came_cost_the_request_nothing():
    run = make_run([1.0], num_units=64, budget=64)
    prompt = [1] * 40
    run.engine.grow(GrowPrompt("r", 0, prompt[:33], lifetime_s=99.0))
    for _ in range(6):
        run.take(run.engine.step())
    assert run.engine.scheduler.early.holders
    computed = sum(row.end - row.start for rows in run.runner.steps for row in rows)
    assert computed >= 16
    run.clock.advance(5.0)  # the rest of the body took its time
    run.add("r", prompt, 3)
    run.finish()
    assert run.engine.scheduler.early.used_tokens_total >= 16
    # One step for what was left of the prompt, then two tokens.
    assert phases(run.finals["r"]) == (0.0, 1.0, 0.0, 2.0, 0.0)
    check(run.finals["r"])


def test_an_early_step_in_flight_is_not_the_requests_own():
    """The request comes while its prompt is being computed early, and then has to wait."""
    run = make_run([1.0], num_units=64, budget=64, slots=1)
    run.add("first", [2] * 4, 6)
    run.engine.grow(GrowPrompt("r", 0, [1] * 33, lifetime_s=99.0))
    run.take(run.engine.step())
    run.take(run.engine.step())
    run.add("r", [1] * 40, 2)
    run.finish()
    first, waited = run.finals["first"], run.finals["r"]
    check(waited)
    assert waited.queue_s >= first.finished_s - waited.arrival_s
    assert waited.prefill_s + waited.prefill_wait_s + waited.decode_s == pytest.approx(2.0)


def test_who_is_preempted_again_while_it_catches_up_has_not_decoded_meanwhile():
    """Whatever is in flight at the second preemption: none of the wait before is the answer's."""
    run = make_run([1.0], num_units=8, budget=4, surprised=True)
    for i in range(4):
        run.add(f"r-{i}", [i + 1] * 3, 34)
    run.finish()
    assert any(times.preemptions > 1 for times in run.finals.values())
    for times in run.finals.values():
        check(times)
        # An answer of 34 tokens: 33 steps, and no more than one beside it for each preemption.
        assert times.decode_s <= 33 + times.preemptions
