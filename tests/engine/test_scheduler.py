import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.block_manager import BlockManager
from tailrace.engine.scheduler import MOST_OVERTAKEN, Scheduler
from tailrace.engine.sequence import Sequence, Status
from tailrace.errors import EngineError
from tailrace.types import EngineRequest, SamplingParams

SIZE = 8


def sequence(
    index: int, prompt: int, output: int = 10, priority: int = 0, key: str = "", share: float = 1.0
) -> Sequence:
    return Sequence.from_request(
        EngineRequest(
            request_id=f"s{index}",
            token_ids=[index] * prompt,
            sampling=SamplingParams(max_tokens=output),
            arrival_s=float(index),
            priority=priority,
            key=key,
            share=share,
        ),
        context_length=1000,
    )


def scheduler(
    blocks: int = 64,
    slots: int = 4,
    budget: int = 16,
    surprised: bool = False,
    host_places: int = 0,
) -> Scheduler:
    """Make a scheduler; a surprised one has only ever seen answers of one token."""
    pool = BlockManager(blocks, SIZE, prefix_cache=False, host_places=host_places)
    chosen = Scheduler(
        pool,
        max_batch_size=slots,
        token_budget=budget,
        swap_pays=(lambda tokens, units: units > 1) if host_places else None,
    )
    for _ in range(20 * surprised):
        chosen.answers.observe(1)
    return chosen


def run(chosen: Scheduler, steps: int = 1000) -> list:
    """Run to the end, or for so many steps; return the steps."""
    done = []
    while chosen.has_work and len(done) < steps:
        done.append(chosen.schedule())
        settle(chosen, done[-1])
        chosen.blocks.check_integrity()
    return done


def settle(chosen: Scheduler, step) -> None:
    """Commit a step as the engine would, every sample being token 1."""
    chosen.retire_copies(step)
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
    chosen = scheduler(blocks=8, budget=100, surprised=True)
    chosen.add(sequence(0, 14, output=40))
    chosen.add(sequence(1, 6, output=40))
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


@pytest.mark.parametrize(("prompt", "is_admitted"), [(119, True), (120, False)])
def test_a_prompt_that_cannot_be_leased_in_full_starts_where_everybody_can_still_grow(
    prompt, is_admitted
):
    chosen = scheduler(blocks=20, budget=200)
    chosen.add(sequence(0, 8, output=64))
    settle(chosen, chosen.schedule())
    # s0 takes its second unit of 9; 18 are left, of which 3 are kept for it to grow by 18 tokens.
    chosen.add(sequence(1, prompt, output=500))
    step = chosen.schedule()
    assert [s.request_id for s in step.admitted] == ["s1"] * is_admitted
    assert (chosen.blocks.unclaimed_units == 0) is is_admitted


def test_who_was_preempted_four_times_waits_for_a_full_lease():
    chosen = scheduler(blocks=20, budget=200)
    chosen.add(sequence(0, 8, output=64))
    settle(chosen, chosen.schedule())
    patient = sequence(1, 80, output=16)  # 12 units, of which 11 are promised to nobody
    patient.preemptions = 3
    assert chosen._fits(patient)
    patient.preemptions = 4
    assert not chosen._fits(patient)
    chosen.finish(chosen.running[0])
    assert chosen._fits(patient)


def test_an_owner_gets_its_units_back_from_a_borrower_that_was_expected_to_end():
    chosen = scheduler(blocks=14, budget=100)
    owner, borrower = sequence(0, 8, output=72), sequence(1, 20, output=60)
    chosen.add(owner)
    settle(chosen, chosen.schedule())
    for _ in range(20):
        chosen.answers.observe(2)
    chosen.add(borrower)
    lent = 0
    for _ in range(71):  # the owner gets its token in every step
        step = chosen.schedule()
        assert step.chunks[0].sequence is owner
        lent = max(lent, chosen.blocks.lent_units)
        settle(chosen, step)
        chosen.blocks.check_integrity()
    assert owner.status is Status.FINISHED
    assert owner.preemptions == 0
    assert lent > 0
    assert borrower.preemptions == chosen.returns_total == chosen.preemptions_total == 1
    run(chosen)
    assert borrower.num_output == 60


def test_a_prompts_chunk_is_cut_to_what_is_available_before_anybody_goes():
    chosen = scheduler(blocks=10, budget=32)
    chosen.add(sequence(0, 60, output=4))
    settle(chosen, chosen.schedule())
    # Somebody takes what was promised, all but one unit.
    chosen.blocks.expect(chosen.running[0].kv, 0)
    other = chosen.blocks.open("other", [1], "")
    chosen.blocks.grow(other, 5 * SIZE)
    step = chosen.schedule()
    assert spans(step) == [("s0", 32, 40)]
    assert not step.preempted


def test_who_was_preempted_asks_for_a_lease_at_least_twice_as_long():
    chosen = scheduler(blocks=10, budget=100, surprised=True)
    for index in range(3):
        chosen.add(sequence(index, 15, output=40))
    preempted = {}
    while chosen.has_work:
        step = chosen.schedule()
        for waiting in chosen.waiting:
            if waiting.preemptions:
                preempted[waiting.request_id] = waiting.num_output
        for admitted in step.admitted:
            if admitted.preemptions:
                length = min(2 * preempted[admitted.request_id], admitted.max_output)
                assert admitted.expected_output >= length
        settle(chosen, step)
        chosen.blocks.check_integrity()
    assert preempted
    assert chosen.preemptions_total < 10


def test_who_is_swapped_out_comes_back_once_its_copy_is_known_to_be_made():
    chosen = scheduler(blocks=8, budget=100, surprised=True, host_places=8)
    chosen.add(sequence(0, 14, output=40))
    chosen.add(sequence(1, 14, output=40))
    for _ in range(40):
        step = chosen.schedule()
        if step.preempted:
            break
        settle(chosen, step)
    [(swapped, copy)] = step.swapped_out
    tokens = chosen.blocks.swapped_tokens(swapped.request_id)
    assert swapped.status is Status.WAITING
    assert len(copy.units) == len(copy.places) == chosen.blocks.units_for(tokens) > 1
    chosen.finish(next(s for s in chosen.running if s is not swapped))
    assert not chosen.schedule().chunks  # there is room, but the step may yet fail
    settle(chosen, step)
    back = chosen.schedule()
    [(again, copied)] = back.swapped_in
    assert (again, copied.places) == (swapped, copy.places)
    assert spans(back) == [(swapped.request_id, tokens, tokens + 1)]
    chosen.blocks.check_integrity()
    assert chosen.blocks.swapped_units == 0


def test_who_has_little_to_lose_or_nothing_to_come_is_not_swapped_out():
    chosen = scheduler(blocks=8, budget=100, host_places=8)
    chosen.add(sequence(0, 14, output=1))
    chosen.add(sequence(1, 7, output=5))
    step = chosen.schedule()
    for victim in list(chosen.running):
        chosen._preempt(step, victim)
    assert not chosen._swapped_out


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
    surprised=st.booleans(),
)
def test_rules_hold_for_any_work(jobs, blocks, budget, depth, surprised):
    """Budget kept, decodes never starved, blocks accounted for, everybody ends."""
    chosen = scheduler(blocks=blocks, budget=budget, surprised=surprised)
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
    assert chosen.blocks.held_units == 0


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


def test_lack_of_memory_halves_the_budget_and_time_brings_it_back():
    chosen = scheduler(budget=64, slots=4, blocks=4096)
    assert [chosen.cut_budget() for _ in range(5)] == [32, 16, 12, 12, 12]
    for index in range(20):
        chosen.add(sequence(index, 600, output=300))
    sizes = [step.num_tokens for step in run(chosen, 300)]
    assert max(sizes[:63]) == 12
    assert max(sizes[:127]) == 24
    assert max(sizes) > 32


def test_lack_of_memory_takes_no_step_from_a_running_stream():
    chosen = scheduler(budget=32, slots=16, blocks=4096)
    for index in range(16):
        chosen.add(sequence(index, 2, output=100))
    settle(chosen, chosen.schedule())
    for _ in range(4):
        chosen.cut_budget()
    for _ in range(5):
        step = chosen.schedule()
        assert len(step.chunks) == 16
        settle(chosen, step)


def test_a_rewound_sequence_is_told_to_the_runner_again_with_its_next_step():
    chosen = scheduler(budget=16)
    one = sequence(0, 40)
    chosen.add(one)
    first = chosen.schedule()
    assert first.admitted == [one]
    for chunk in first.chunks:
        chosen.retire(chunk)
    chosen.rewind(one, 0)
    second = chosen.schedule()
    assert second.admitted == [one]
    assert spans(second) == spans(first)
    assert not chosen.schedule().admitted


def admitted(chosen: Scheduler, steps: int = 5000) -> list[Sequence]:
    """Run to the end; return who was admitted for the first time, in order."""
    found: list[Sequence] = []
    for step in run(chosen, steps):
        found += [s for s in step.admitted if s not in found]
    return found


def test_keys_are_admitted_in_turns_by_the_tokens_of_their_requests():
    chosen = scheduler(slots=1)
    for index in range(6):
        chosen.add(sequence(index, 10, key="flood"))
    for index in range(6, 9):
        chosen.add(sequence(index, 10, key="other"))
    chosen.add(sequence(9, 10, key="single"))
    names = [s.key for s in admitted(chosen)]
    assert sorted(names[:3]) == ["flood", "other", "single"]
    assert sorted(names[3:7]) == ["flood", "flood", "other", "other"]
    assert names[7:] == ["flood"] * 3


def test_a_key_with_four_times_the_share_gets_four_times_the_turns():
    chosen = scheduler(slots=1)
    for index in range(40):
        chosen.add(sequence(index, 10, key="large", share=4.0))
    for index in range(40, 60):
        chosen.add(sequence(index, 10, key="small"))
    assert [s.key for s in admitted(chosen)][:20].count("large") == 16


def test_the_lowest_priority_gets_one_admission_in_sixteen():
    chosen = scheduler(slots=1)
    low = [sequence(index, 4, output=2, priority=9) for index in range(3)]
    for one in low:
        chosen.add(one)
    for index in range(3, 60):
        chosen.add(sequence(index, 4, output=2))
    order = admitted(chosen)
    places = [order.index(one) for one in low]
    assert places == [MOST_OVERTAKEN, 2 * MOST_OVERTAKEN + 1, 3 * MOST_OVERTAKEN + 2]


def test_whoever_waited_longest_of_the_lower_ones_is_next_though_it_has_to_wait_for_room():
    chosen = scheduler(blocks=16, slots=4, budget=200)
    large = sequence(0, 100, output=3, priority=9)
    chosen.add(large)
    for index in range(1, 80):
        chosen.add(sequence(index, 20, output=4))
    order = admitted(chosen)
    assert order.index(large) <= MOST_OVERTAKEN + 1


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 12),
            st.integers(0, 2),
            st.sampled_from(["", "a", "b"]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=25,
    ),
    blocks=st.integers(8, 30),
    slots=st.integers(1, 4),
)
def test_everybody_ends_and_a_key_is_served_in_the_order_in_which_it_came(jobs, blocks, slots):
    chosen, came, order = scheduler(blocks=blocks, slots=slots), [], []
    for index, (prompt, output, priority, key, steps) in enumerate(jobs):
        came.append(sequence(index, prompt, output, priority, key, share=1.0 + 2 * (key == "a")))
        chosen.add(came[-1])
        order += [s for step in run(chosen, steps) for s in step.admitted]
    order += [s for step in run(chosen) for s in step.admitted]
    assert all(s.status is Status.FINISHED for s in came)
    assert chosen.shares.members == 0
    firsts = list(dict.fromkeys(order))
    for level in {(s.priority, s.key) for s in came}:
        mine = [s for s in came if (s.priority, s.key) == level]
        assert [s for s in firsts if s in mine] == mine
