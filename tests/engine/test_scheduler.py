import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.block_manager import BlockManager
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.sequence import Sequence, Status
from tailrace.errors import EngineError
from tailrace.types import EngineRequest, SamplingParams

SIZE = 8


def sequence(index: int, prompt: int, output: int = 10, priority: int = 0) -> Sequence:
    return Sequence.from_request(
        EngineRequest(
            request_id=f"s{index}",
            token_ids=[index] * prompt,
            sampling=SamplingParams(max_tokens=output),
            arrival_s=float(index),
            priority=priority,
        ),
        context_length=1000,
    )


def scheduler(blocks: int = 64, slots: int = 4, budget: int = 16) -> Scheduler:
    pool = BlockManager(blocks, SIZE, prefix_cache=False)
    return Scheduler(pool, max_batch_size=slots, token_budget=budget)


def settle(chosen: Scheduler, step) -> None:
    """Commit a step as the engine would, every sample being token 1."""
    for chunk in step.chunks:
        if chunk.samples and chunk.sequence.status is not Status.FINISHED:
            chunk.sequence.token_ids.append(1)
        chosen.commit(chunk)
        done = chunk.sequence.num_output >= chunk.sequence.max_output
        if done and chunk.sequence.status is not Status.FINISHED:
            chosen.finish(chunk.sequence)


def spans(step) -> list[tuple[str, int, int]]:
    return [(c.sequence.request_id, c.start, c.end) for c in step.chunks]


def test_decodes_come_first_then_running_prefills_then_new_ones():
    chosen = scheduler(budget=16)
    chosen.add(sequence(0, 4))
    settle(chosen, chosen.schedule())
    chosen.add(sequence(1, 40))
    chosen.add(sequence(2, 3))
    step = chosen.schedule()
    assert spans(step) == [("s0", 4, 5), ("s1", 0, 15)]
    settle(chosen, step)
    assert spans(chosen.schedule()) == [("s0", 5, 6), ("s1", 15, 30)]


def test_what_a_prefill_leaves_of_the_budget_starts_the_next():
    chosen = scheduler(budget=16)
    for index in range(3):
        chosen.add(sequence(index, 10))
    assert spans(chosen.schedule()) == [("s0", 0, 10), ("s1", 0, 6)]


def test_a_decode_is_scheduled_while_its_input_is_still_being_sampled():
    chosen = scheduler()
    chosen.add(sequence(0, 4))
    first = chosen.schedule()
    second = chosen.schedule()
    assert [(c.start, c.end, c.from_device) for c in first.chunks] == [(0, 4, False)]
    assert [(c.start, c.end, c.from_device) for c in second.chunks] == [(4, 5, True)]


def test_no_step_is_issued_beyond_the_last_token():
    chosen = scheduler()
    chosen.add(sequence(0, 4, output=2))
    steps = [chosen.schedule() for _ in range(4)]
    assert [len(step.chunks) for step in steps] == [1, 1, 0, 0]


def test_a_prompt_that_does_not_fit_waits_and_nobody_overtakes_it():
    chosen = scheduler(blocks=6, budget=100)
    chosen.add(sequence(0, 30, output=5))
    chosen.schedule()
    chosen.add(sequence(1, 30))
    chosen.add(sequence(2, 2))
    step = chosen.schedule()
    assert [c.sequence.request_id for c in step.chunks] == ["s0"]
    assert [s.request_id for s in chosen.waiting] == ["s1", "s2"]


def test_nobody_is_admitted_in_a_step_that_preempts():
    chosen = scheduler(blocks=4, budget=100)
    chosen.add(sequence(0, 14, output=50))
    chosen.add(sequence(1, 6, output=50))
    settle(chosen, chosen.schedule())
    preempting = None
    for _ in range(30):
        step = chosen.schedule()
        if step.preempted:
            preempting = step
            break
        settle(chosen, step)
    assert preempting is not None
    assert not preempting.admitted
    assert [s.request_id for s in chosen.running] == ["s0"]
    assert chosen.waiting[0].request_id == "s1"
    assert chosen.waiting[0].preemptions == 1


def test_a_freed_slot_is_released_before_it_is_given_again():
    chosen = scheduler(slots=1)
    chosen.add(sequence(0, 4, output=1))
    chosen.add(sequence(1, 4, output=1))
    settle(chosen, chosen.schedule())
    step = chosen.schedule()
    assert step.released == [0]
    assert [s.slot for s in step.admitted] == [0]


def test_a_budget_below_the_batch_is_refused():
    with pytest.raises(EngineError, match="token budget 3 < max batch size 4"):
        scheduler(slots=4, budget=3)


@settings(max_examples=150, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(11, 40),
    budget=st.integers(4, 64),
    depth=st.integers(1, 2),
)
def test_rules_hold_for_any_work(jobs, blocks, budget, depth):
    """Budget kept, decodes never starved, blocks accounted for, everybody ends."""
    chosen = scheduler(blocks=blocks, budget=budget)
    for index, (prompt, output, priority) in enumerate(jobs):
        chosen.add(sequence(index, prompt, output, priority))
    in_flight = []
    for _ in range(5000):
        due = [s for s in chosen.running if s.uncomputed == 1 and s.wants_work]
        step = chosen.schedule()
        assert step.num_tokens == sum(c.end - c.start for c in step.chunks) <= budget
        served = {c.sequence.request_id for c in step.chunks}
        for decode in due:
            assert decode.request_id in served or decode.status is Status.WAITING
        slots = [s.slot for s in chosen.running]
        assert len(set(slots)) == len(slots)
        assert chosen.running == sorted(chosen.running, key=lambda s: s.order)
        chosen.blocks.check_integrity()
        if step.chunks:
            in_flight.append(step)
        if len(in_flight) >= depth or not step.chunks:
            if not in_flight:
                break
            settle(chosen, in_flight.pop(0))
    assert not chosen.has_work
    assert chosen.blocks.held_blocks == 0


def test_rows_that_pad_the_decodes_are_taken_from_the_prompts_budget():
    pool = BlockManager(64, SIZE, prefix_cache=False)
    chosen = Scheduler(
        pool, max_batch_size=4, token_budget=16, padded_decodes=lambda n: 4 if n else 0
    )
    chosen.add(sequence(0, 4))
    settle(chosen, chosen.schedule())
    chosen.add(sequence(1, 40))
    step = chosen.schedule()
    assert spans(step) == [("s0", 4, 5), ("s1", 0, 12)]
    assert step.num_tokens + step.padding == 16
