"""The GPU's sampler under Triton's interpreter: the tokens of the CPU's, step after step."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tailrace.engine.device_sampler import NO_TOKEN, DeviceSampler
from tailrace.engine.sampler import Sampler
from tailrace.errors import EngineError
from tailrace.kernels.sampling.rows import NOT_FINITE, NOTHING_LEFT
from tailrace.types import SamplingParams
from tests.support.interpreter import quietly

VOCAB, EOS = 300, 299


def sampling(**fields):
    return SamplingParams(max_tokens=9, **fields)


CPU = torch.device("cpu")
PARAMS = (
    sampling(temperature=0.0),
    sampling(temperature=0.7, top_p=0.95, seed=1),
    sampling(temperature=1.3, top_k=5, min_p=0.01, seed=-2),
    sampling(temperature=1.0, min_tokens=2, stop_token_ids=(4, 900), seed=3),
    sampling(temperature=0.9, logit_bias={7: 4.5, 8: -100.0}, seed=4),
    sampling(
        temperature=0.8,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        seed=2**63,
    ),
    sampling(temperature=0.0, repetition_penalty=1.5, min_tokens=3),
)


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    """Triton's interpreter is NumPy, which warns of what a GPU does silently."""
    with quietly():
        yield


def both(count):
    return (
        Sampler(count, VOCAB, [EOS], 5),
        DeviceSampler(count, VOCAB, [EOS], 5, device=CPU),
    )


def admit(samplers, slot, params, prompt=(1, 2, 3), output=()):
    for sampler in samplers:
        sampler.admit(slot, params, list(prompt), list(output))


def test_every_kind_of_row_draws_the_cpus_token_step_after_step():
    torch.manual_seed(0)
    samplers = both(len(PARAMS))
    for slot, params in enumerate(PARAMS):
        # As after a preemption: some output is there already.
        admit(samplers, slot, params, output=[5] * (slot % 3))
    slots = [4, 0, 6, 2, 1, 5, 3]
    for _ in range(5):
        logits = torch.randn(len(PARAMS), VOCAB) * 2
        expected = samplers[0].sample(logits.clone(), slots)
        found = samplers[1].sample(logits.clone(), slots)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.errors == expected.errors == {}


def test_steps_that_ask_for_more_and_for_less_by_turns_draw_the_cpus_tokens():
    """Greedy rows alone, plain ones beside, filters beside these, and back."""
    samplers = both(len(PARAMS))
    for slot, params in enumerate(PARAMS):
        admit(samplers, slot, params)
    for slots in ([0, 6], [3, 0], [2, 4, 6], [5], [1, 3], [6, 0]):
        logits = torch.randn(len(slots), VOCAB) * 2
        expected, found = (s.sample(logits.clone(), slots).token_ids.tolist() for s in samplers)
        assert found == expected


def test_a_slots_new_owner_inherits_nothing():
    samplers = both(1)
    admit(samplers, 0, sampling(temperature=0.0, repetition_penalty=2.0), prompt=[7])
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9] = 3.0, 2.0
    assert [s.sample(logits.clone(), [0]).token_ids.item() for s in samplers] == [9, 9]
    for sampler in samplers:
        sampler.release(0)
    admit(samplers, 0, sampling(temperature=0.0, repetition_penalty=2.0), prompt=[8])
    assert [s.sample(logits.clone(), [0]).token_ids.item() for s in samplers] == [7, 7]


def test_log_probabilities_are_the_cpus():
    samplers = both(2)
    admit(samplers, 0, sampling(temperature=0.5, seed=1, logprobs=3))
    admit(samplers, 1, sampling(temperature=0.5, seed=2))
    logits = torch.randn(2, VOCAB)
    expected, found = (s.sample(logits.clone(), [0, 1]) for s in samplers)
    assert found.logprobs[1] is None
    assert found.logprobs[0].token_id == expected.logprobs[0].token_id
    assert found.logprobs[0].top_ids == expected.logprobs[0].top_ids
    assert found.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob)


def test_rows_without_a_token_fail_alone_and_say_why():
    sampler = both(4)[1]
    sampler.admit(0, sampling(temperature=1.0, seed=1), [], [])
    sampler.admit(1, sampling(temperature=1.0, seed=1), [], [])
    only = {i: -float("inf") for i in range(VOCAB)}
    sampler.admit(2, sampling(temperature=1.0, seed=1, logit_bias=only), [], [])
    sampler.admit(3, sampling(temperature=float("nan")), [], [])
    logits = torch.randn(4, VOCAB)
    logits[0, 3] = float("nan")
    drawn = sampler.sample(logits, [0, 1, 2, 3])
    ids = drawn.token_ids.tolist()
    assert ids[0] == NOT_FINITE
    assert ids[1] >= 0
    assert ids[2] == NOTHING_LEFT
    assert list(drawn.errors) == [3]
    assert set(NO_TOKEN) == {NOT_FINITE, NOTHING_LEFT}


def test_plain_greedy_rows_are_known_as_such():
    sampler = both(3)[1]
    sampler.admit(0, sampling(temperature=0.0), [], [])
    sampler.admit(1, sampling(temperature=0.0, min_tokens=1), [], [])
    sampler.admit(2, sampling(temperature=0.5), [], [])
    assert sampler.are_plain_greedy([0])
    assert not sampler.are_plain_greedy([0, 1])
    assert not sampler.are_plain_greedy([2])
    sampler.count_drawn([1])
    assert sampler.are_plain_greedy([0, 1])  # its one token is out


def test_changes_of_logits_are_read_when_a_slot_is_taken_and_never_again():
    """A thousand of them in Python, at every step, are milliseconds of the runner's thread."""

    class ReadOnce(dict):
        is_closed = False

        def _open(self):
            assert not self.is_closed, "logit_bias is read at a step"

        def items(self):
            self._open()
            return super().items()

        def __iter__(self):
            self._open()
            return super().__iter__()

    samplers = both(3)
    bias = ReadOnce({7: 4.5, 8: -100.0, EOS: 9.0})
    admit(samplers, 0, sampling(temperature=0.0, logit_bias=bias, min_tokens=2))
    admit(samplers, 1, sampling(temperature=0.0))
    admit(samplers, 2, sampling(temperature=0.0, min_tokens=1))
    ReadOnce.is_closed = True
    drawn = []
    for _ in range(3):
        assert not samplers[1].are_plain_greedy([0, 1, 2])
        logits = torch.zeros(3, VOCAB)
        logits[:, EOS] = 1.0
        expected, found = (s.sample(logits.clone(), [0, 1, 2]).token_ids.tolist() for s in samplers)
        assert found == expected
        drawn.append(found)
    assert drawn == [[7, EOS, 0], [7, EOS, EOS], [EOS, EOS, EOS]]
    assert samplers[1].are_plain_greedy([1, 2])


def test_a_bias_beyond_the_vocabulary_or_an_int32_fails_its_own_row_only():
    sampler = both(2)[1]
    sampler.admit(0, sampling(temperature=0.0, logit_bias={2**40: 1.0}), [], [])
    sampler.admit(1, sampling(temperature=0.0), [], [])
    assert not sampler.are_plain_greedy([0])
    drawn = sampler.sample(torch.randn(2, VOCAB), [0, 1])
    assert list(drawn.errors) == [0]


class Copies(TorchDispatchMode):
    """Notes the size of each tensor that is copied into another."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.sizes.append(args[1].numel())
        return function(*args, **(kwargs or {}))


def test_admission_sends_the_tokens_of_a_history_and_not_a_vocabulary():
    sampler = both(1)[1]
    with Copies() as copies:
        sampler.admit(0, sampling(repetition_penalty=1.5), [1, 2, 3, 2], [5, 5])
    assert max(copies.sizes) <= 2 * len({1, 2, 3, 5})


def test_a_slot_that_nobody_holds_is_a_bug():
    with pytest.raises(EngineError, match="slot 1 is not admitted"):
        both(2)[1].sample(torch.zeros(1, VOCAB), [1])
