import pytest

from tailrace.engine.sequence import TRANSITIONS, Sequence, Status
from tailrace.errors import EngineError
from tailrace.types import EngineRequest, SamplingParams


def make(max_tokens=5, **extra):
    sampling = SamplingParams(max_tokens=max_tokens, **extra.pop("sampling", {}))
    request = EngineRequest(
        request_id="r", token_ids=[1, 2, 3], sampling=sampling, arrival_s=0.0, **extra
    )
    return Sequence.from_request(request, context_length=6)


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("event", ["admit", "preempt", "finish"])
def test_only_the_tables_transitions_are_possible(status, event):
    sequence = make()
    sequence.status = status
    if (status, event) in TRANSITIONS:
        sequence.move(event)
        assert sequence.status is TRANSITIONS[status, event]
    else:
        with pytest.raises(EngineError, match=f"{event} in state {status.value}"):
            sequence.move(event)


def test_output_is_bounded_by_the_context_as_well_as_by_max_tokens():
    assert make(max_tokens=5).max_output == 3
    assert make(max_tokens=2).max_output == 2


def test_pending_tokens_count_as_length_and_end_the_wish_for_work():
    sequence = make(max_tokens=1)
    assert (sequence.uncomputed, sequence.wants_work) == (3, True)
    sequence.num_computed = 3
    sequence.pending_tokens = 1
    assert (sequence.length, sequence.uncomputed, sequence.wants_work) == (4, 1, False)


def test_prompt_logprobs_never_take_a_shared_prefix():
    plain = make(cache_salt="s")
    scored = make(cache_salt="s", sampling={"prompt_logprobs": 1})
    assert plain.cache_salt == "s"
    assert scored.cache_salt is None


def test_order_is_priority_then_age():
    old, young = make(), make()
    young.arrival_s = 1.0
    urgent = make(priority=-1)
    urgent.arrival_s = 2.0
    assert sorted([young, old, urgent], key=lambda s: s.order) == [urgent, old, young]
