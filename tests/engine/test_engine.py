from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tailrace.clock import VirtualClock
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.engine import Engine
from tailrace.engine.late_binding import LateBinding
from tailrace.engine.pace import Pace
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.step_time import StepTimeModel
from tailrace.errors import DeviceMemoryError
from tailrace.types import (
    EngineRequest,
    GrowPrompt,
    ReserveKv,
    SamplingParams,
    StepCosts,
    TokenOutput,
)
from tests.engine.test_arrivals import Compiler
from tests.support.fake_runner import VOCAB, FakeRunner, expected_output

CONTEXT = 64


@dataclass
class Bench:
    """An engine over the fake device, and what it has put out."""

    engine: Engine
    runner: FakeRunner
    blocks: BlockManager
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, "output after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def step(self) -> None:
        self.take(self.engine.step())
        self.blocks.check_integrity()

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps")


def make_bench(
    *,
    num_blocks=16,
    block_size=8,
    slots=4,
    budget=16,
    prefix_cache=True,
    fail_when=None,
    failure=RuntimeError,
    eos=(),
    mixed_sizes=True,
    surprised=False,
    clock=None,
    late=False,
    predicted_s=None,
    target_s=None,
    host_places=0,
    context_length=CONTEXT,
) -> Bench:
    """Make an engine; a surprised one has only ever seen answers of one token.

    With a target, its steps are predicted to take 1 ms, and 0.1 ms more a token and decode.
    """
    blocks = BlockManager(
        num_blocks,
        block_size,
        prefix_cache=prefix_cache,
        mixed_sizes=mixed_sizes,
        host_places=host_places,
    )
    runner = FakeRunner(block_size, **({"fail_when": fail_when} if fail_when else {}))
    runner.failure = failure
    step_time = StepTimeModel()
    pace = None
    if target_s is not None:
        step_time.start(StepCosts(1e-3, 1e-4, 0, 1e-6, 1e-4, 1e-6), np.ones(5))
        pace = Pace(step_time, target_s, max(1, budget // 8), runner.whole_prompts)
    scheduler = Scheduler(
        blocks,
        max_batch_size=slots,
        token_budget=budget,
        pace=pace,
        swap_pays=(lambda tokens, units: tokens > units) if host_places else None,
    )
    for _ in range(20 * surprised):
        scheduler.answers.observe(1)
    engine = Engine(
        scheduler,
        runner,
        submit=runner.submit,
        clock=clock or VirtualClock(),
        context_length=min(context_length, num_blocks * block_size),
        vocab_size=VOCAB,
        eos_token_ids=eos,
        step_time=step_time,
        late_binding=LateBinding() if late else None,
    )
    if predicted_s is not None:
        engine.step_time.start(StepCosts(predicted_s, 0.0, 0, 0.0, 0.0, 0.0), np.ones(5))
    return Bench(engine, runner, blocks)


def request(request_id: str, prompt: list[int], max_tokens: int, **sampling) -> EngineRequest:
    fields = ("priority", "cache_salt", "key", "share", "max_sequences")
    extra = {name: sampling.pop(name) for name in fields if name in sampling}
    return EngineRequest(
        request_id=request_id,
        token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_s=float(request_id.split("-")[-1]),
        **extra,
    )


# Few distinct tokens and shared stems, so that prefixes really repeat.
prompts = st.builds(
    lambda stem, tail: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17][:stem] + tail,
    st.integers(0, 17),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)


@settings(max_examples=150, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(prompts, st.integers(1, 24), st.integers(0, 2), st.integers(0, 12)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(8, 24),
    budget=st.integers(4, 40),
    slots=st.integers(1, 4),
    prefix_cache=st.booleans(),
    mixed_sizes=st.booleans(),
    surprised=st.booleans(),
    host_places=st.sampled_from([0, 5, 40]),
    abort_at=st.dictionaries(st.integers(0, 11), st.integers(0, 30), max_size=3),
    target_s=st.sampled_from([None, 0.0, 0.002]),
)
def test_output_is_the_models_whatever_is_batched_chunked_cached_preempted_swapped_or_aborted(
    jobs,
    num_blocks,
    budget,
    slots,
    prefix_cache,
    mixed_sizes,
    surprised,
    host_places,
    abort_at,
    target_s,
):
    eos = frozenset({7})
    bench = make_bench(
        num_blocks=num_blocks,
        budget=budget,
        slots=slots,
        prefix_cache=prefix_cache,
        mixed_sizes=mixed_sizes,
        surprised=surprised,
        host_places=host_places,
        eos=eos,
        target_s=target_s,
    )
    arrivals = sorted(range(len(jobs)), key=lambda i: jobs[i][3])
    for step in range(3000):
        while arrivals and jobs[arrivals[0]][3] <= step:
            i = arrivals.pop(0)
            prompt, max_tokens, priority, _ = jobs[i]
            refused = bench.engine.add(request(f"r-{i}", prompt, max_tokens, priority=priority))
            assert refused is None
        for i, when in abort_at.items():
            if when == step:
                bench.take(bench.engine.abort([f"r-{i}"]))
                bench.blocks.check_integrity()
        if not arrivals and not bench.engine.has_work:
            break
        bench.step()
    else:
        raise AssertionError("not done")
    for i, (prompt, max_tokens, _, _) in enumerate(jobs):
        got = bench.tokens[f"r-{i}"]
        wanted = expected_output(prompt, min(max_tokens, CONTEXT - len(prompt)), eos)
        if bench.reasons[f"r-{i}"] == "abort":
            assert got == wanted[: len(got)]
        else:
            assert got == wanted
            assert bench.reasons[f"r-{i}"] == ("stop" if wanted[-1] in eos else "length")
    assert bench.blocks.held_units == bench.blocks.swapped_units == 0
    assert bench.blocks.available_units == num_blocks


def test_who_is_swapped_out_goes_on_where_it_was_and_computes_nothing_again():
    jobs = [([i + 1] * 15, 30) for i in range(3)]
    bench = make_bench(num_blocks=8, budget=32, prefix_cache=False, surprised=True, host_places=100)
    for i, (prompt, answer) in enumerate(jobs):
        bench.engine.add(request(f"r-{i}", prompt, answer))
    bench.run()
    stats = bench.engine.stats()
    assert stats.preemptions_total > 0
    assert stats.swapped_in_blocks_total == stats.swapped_out_blocks_total > 0
    assert (stats.host_blocks, stats.swapped_blocks) == (100, 0)
    for i, (prompt, answer) in enumerate(jobs):
        assert bench.tokens[f"r-{i}"] == expected_output(prompt, answer, frozenset())
    computed = sum(row.end - row.start for rows in bench.runner.steps for row in rows)
    assert computed == sum(len(prompt) + answer - 1 for prompt, answer in jobs)


def test_what_the_prefix_cache_still_has_is_not_copied_back():
    bench = make_bench(num_blocks=9, budget=32, surprised=True, host_places=100)
    for i in range(3):
        bench.engine.add(request(f"r-{i}", [i + 1] * 15, 30))
    bench.run()
    stats = bench.engine.stats()
    assert 0 < stats.swapped_in_blocks_total < stats.swapped_out_blocks_total
    for i in range(3):
        assert bench.tokens[f"r-{i}"] == expected_output([i + 1] * 15, 30, frozenset())


def test_where_the_host_is_full_the_preempted_are_computed_again():
    bench = make_bench(num_blocks=8, budget=32, prefix_cache=False, surprised=True, host_places=1)
    for i in range(3):
        bench.engine.add(request(f"r-{i}", [i + 1] * 15, 30))
    bench.run()
    stats = bench.engine.stats()
    assert stats.preemptions_total > 0
    assert stats.swapped_out_blocks_total == 0
    for i in range(3):
        assert bench.tokens[f"r-{i}"] == expected_output([i + 1] * 15, 30, frozenset())


def test_an_abort_while_swapped_out_gives_the_places_back():
    bench = make_bench(num_blocks=8, budget=32, prefix_cache=False, surprised=True, host_places=100)
    for i in range(3):
        bench.engine.add(request(f"r-{i}", [i + 1] * 15, 30))
    for _ in range(100):
        bench.step()
        if bench.blocks.swapped_units:
            break
    swapped = [s for s in bench.engine.scheduler.waiting if s.preemptions]
    assert swapped
    bench.take(bench.engine.abort([s.request_id for s in swapped]))
    assert bench.blocks.swapped_units == 0
    bench.run()
    assert sorted(bench.reasons.values()) == sorted(
        ["abort"] * len(swapped) + ["length"] * (3 - len(swapped))
    )


@settings(max_examples=40, deadline=None)
@given(
    failing=st.sets(st.integers(1, 5), max_size=4),
    others=st.sets(st.integers(4, 30), max_size=6),
    failure=st.sampled_from([RuntimeError, DeviceMemoryError]),
    host_places=st.sampled_from([6, 40]),
    prefix_cache=st.booleans(),
)
# The step before the first copies, which is in flight when they are ordered.
@example(failing=set(), others={6}, failure=DeviceMemoryError, host_places=40, prefix_cache=False)
@example(failing=set(), others={13}, failure=DeviceMemoryError, host_places=40, prefix_cache=False)
def test_copies_of_a_step_that_failed_are_never_used(
    failing, others, failure, host_places, prefix_cache
):
    """Who was in no failing step, or gets a second try, has the answer that it would have alone.

    `failing` counts the steps that copy something, `others` all of them.
    """
    copying, failed = [], []

    def fail_when(rows):
        is_copying = bool(rows.swapped_out or rows.swapped_in)
        copying.extend([rows] * is_copying)
        fails = len(bench.runner.steps) in others or (is_copying and len(copying) in failing)
        failed.extend([rows] * fails)
        return fails

    bench = make_bench(
        num_blocks=9,
        budget=20,
        prefix_cache=prefix_cache,
        surprised=True,
        host_places=host_places,
        fail_when=fail_when,
        failure=failure,
    )
    for i in range(5):
        bench.engine.add(request(f"r-{i}", [i + 1] * 12, 30))
    with capture_logs() as logs:  # tracebacks would take longer to print than all the rest
        bench.run()
    faults = [entry for entry in logs if entry["event"].startswith("step_")]
    # In a void step, which follows on one that failed, somebody may never have been admitted.
    void = [e for e in faults if "not admitted" in str(e.get("exc_info"))]
    assert {entry["event"] for entry in void} <= {"step_after_one_without_memory_failed"}
    assert len(faults) - len(void) == len(failed)
    for i in range(5):
        got, wanted = bench.tokens[f"r-{i}"], expected_output([i + 1] * 12, 30, frozenset())
        assert got == wanted if bench.reasons[f"r-{i}"] == "length" else got == wanted[: len(got)]
    assert bench.blocks.held_units == bench.blocks.swapped_units == 0


def test_no_step_exceeds_the_token_budget_and_each_runner_gets_its_token_in_every_step():
    bench = make_bench(num_blocks=64, slots=4, budget=8)
    bench.engine.add(request("r-0", [1] * 3, 20))
    bench.engine.add(request("r-1", [2] * 3, 20))
    for _ in range(3):
        bench.step()
    before = len(bench.runner.steps)
    bench.engine.add(request("r-2", [3] * 50, 2))
    bench.run()
    for rows in bench.runner.steps:
        assert sum(row.end - row.start for row in rows) <= 8
    prefill_steps = [
        rows
        for rows in bench.runner.steps[before:]
        if any(row.inputs and len(row.inputs) > 1 for row in rows)
    ]
    assert len(prefill_steps) >= 8
    for rows in prefill_steps[1:-1]:
        decodes = [row for row in rows if row.inputs is None]
        assert len(decodes) == 2


def test_several_prompts_are_mid_prefill_at_once_and_share_a_step():
    bench = make_bench(num_blocks=64, slots=4, budget=24)
    bench.engine.add(request("r-0", [1] * 20, 2))
    bench.engine.add(request("r-1", [2] * 20, 2))
    bench.run()
    assert [row.end - row.start for row in bench.runner.steps[0]] == [20, 4]


def test_the_next_step_is_scheduled_before_the_former_has_run():
    bench = make_bench()
    bench.engine.add(request("r-0", [1, 2, 3], 4))
    assert bench.engine.step() == []
    assert bench.runner.steps == []
    bench.step()
    # Step 1 has run now; step 2, a decode whose input nobody knew, is prepared already.
    assert len(bench.runner.steps) == 1
    bench.step()
    assert bench.runner.steps[1][0].inputs is None


def test_out_of_blocks_the_youngest_is_preempted_and_the_oldest_never():
    bench = make_bench(num_blocks=8, slots=4, budget=32, prefix_cache=False, surprised=True)
    for i in range(3):
        bench.engine.add(request(f"r-{i}", [i + 1] * 15, 30))
    bench.run()
    assert bench.engine.scheduler.preemptions_total > 0
    finished = list(bench.reasons)
    assert finished[0] == "r-0"
    for i in range(3):
        assert bench.tokens[f"r-{i}"] == expected_output([i + 1] * 15, 30, frozenset())


def test_a_smaller_priority_number_overtakes_in_the_queue():
    bench = make_bench(slots=1)
    for i, priority in enumerate([0, 5, 1]):
        bench.engine.add(request(f"r-{i}", [i + 1] * 4, 3, priority=priority))
    bench.run()
    assert list(bench.reasons) == ["r-0", "r-2", "r-1"]


def test_a_repeated_prompt_is_computed_from_its_cached_prefix():
    bench = make_bench(num_blocks=32)
    prompt = list(range(20))
    bench.engine.add(request("r-0", prompt, 3))
    bench.run()
    bench.engine.add(request("r-1", prompt, 3))
    bench.run()
    assert bench.runner.steps[-3][0].start == 16
    assert bench.tokens["r-0"] == bench.tokens["r-1"]
    assert bench.engine.stats().cached_tokens_total == 16


def test_prefixes_are_not_shared_across_salts():
    bench = make_bench(num_blocks=32)
    prompt = list(range(20))
    bench.engine.add(request("r-0", prompt, 1, cache_salt="a"))
    bench.run()
    bench.engine.add(request("r-1", prompt, 1, cache_salt="b"))
    bench.run()
    assert bench.engine.stats().cached_tokens_total == 0


def test_a_failing_step_ends_its_own_requests_and_no_other():
    bench = make_bench(slots=1, fail_when=lambda rows: any(9 in (r.inputs or []) for r in rows))
    bench.engine.add(request("r-0", [9, 9], 3))
    bench.engine.add(request("r-1", [1, 2], 3))
    bench.run()
    assert bench.reasons == {"r-0": "error", "r-1": "length"}
    assert bench.tokens["r-1"] == expected_output([1, 2], 3, frozenset())
    assert bench.blocks.held_units == 0


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=6),
    failing=st.sets(st.integers(0, 20), min_size=1, max_size=5),
    budget=st.integers(4, 40),
)
def test_out_of_memory_in_a_step_costs_time_and_no_wrong_token(jobs, failing, budget):
    """Whatever steps fail, each request gets the model's tokens, or an error after its second."""
    calls = itertools.count()
    bench = make_bench(
        num_blocks=32,
        budget=budget,
        fail_when=lambda rows: next(calls) in failing,
        failure=DeviceMemoryError,
    )
    for i, (prompt, max_tokens) in enumerate(jobs):
        assert bench.engine.add(request(f"r-{i}", prompt, max_tokens)) is None
    bench.run()
    for i, (prompt, max_tokens) in enumerate(jobs):
        expected = expected_output(prompt, max_tokens, frozenset())
        found = bench.tokens.get(f"r-{i}", [])
        assert found == expected[: len(found)]
        if len(failing) == 1:
            assert found == expected
    assert bench.blocks.available_units == bench.blocks.num_units


def test_a_request_without_memory_twice_ends_with_an_error_that_may_be_retried():
    bench = make_bench(
        budget=64,
        fail_when=lambda rows: any(row.inputs and 39 in row.inputs for row in rows),
        failure=DeviceMemoryError,
    )
    bench.engine.add(request("small-0", [1, 2], 20))
    bench.engine.add(request("large-1", list(range(40)), 4))
    said = []
    for _ in range(200):
        if not bench.engine.has_work:
            break
        said += bench.engine.step()
        bench.blocks.check_integrity()
    ends = {output.request_id: output for output in said if output.finish_reason}
    assert ends["large-1"].finish_reason == "error"
    assert ends["large-1"].may_retry
    assert "ran out of memory" in ends["large-1"].error
    assert ends["small-0"].finish_reason == "length"
    small = [token for o in said if o.request_id == "small-0" for token in o.token_ids]
    assert small == expected_output([1, 2], 20, frozenset())
    stats = bench.engine.stats()
    assert (stats.memory_failures_total, stats.preemptions_total) == (2, 0)


def test_steps_after_one_without_memory_are_smaller_for_a_while():
    failed = []

    def too_large(rows):
        failed.append(sum(row.end - row.start for row in rows))
        return len(failed) == 1

    bench = make_bench(
        num_blocks=64,
        budget=32,
        prefix_cache=False,
        fail_when=too_large,
        failure=DeviceMemoryError,
        context_length=400,
    )
    for i in range(8):
        bench.engine.add(request(f"r-{i}", [i] * 50, 60))
    bench.run()
    assert failed[0] == 32
    assert max(failed[2:60]) <= 16  # the second was issued before the first had failed
    assert max(failed[60:]) == 32
    assert all(
        bench.tokens[f"r-{i}"] == expected_output([i] * 50, 60, frozenset()) for i in range(8)
    )


def test_failures_of_memory_that_are_far_apart_do_not_add_up():
    steps = itertools.count()
    bench = make_bench(
        slots=2, fail_when=lambda rows: next(steps) in (3, 45), failure=DeviceMemoryError
    )
    bench.engine.add(request("r-0", [1, 2], 60))
    bench.run()
    assert bench.reasons == {"r-0": "length"}
    assert bench.tokens["r-0"] == expected_output([1, 2], 60, frozenset())
    assert bench.engine.stats().memory_failures_total == 2


def test_an_admission_is_not_lost_with_a_step_that_had_no_chunk_of_its():
    """The second failure is that of a step in which the budget left `b-1` nothing."""
    steps = itertools.count()
    bench = make_bench(
        slots=4, fail_when=lambda rows: next(steps) in (0, 2), failure=DeviceMemoryError
    )
    bench.engine.add(request("a-0", [1] * 10, 8))
    bench.engine.add(request("b-1", [2] * 40, 8))
    bench.run()
    assert [len(rows) for rows in bench.runner.steps[:3]] == [2, 2, 1]
    assert bench.reasons["b-1"] == "length"
    assert bench.tokens["b-1"] == expected_output([2] * 40, 8, frozenset())


def test_a_failed_step_ends_nobody_of_the_next_step_though_that_fails_of_it():
    """The next one draws for `new-1`, whose admission was lost: that fails as a whole."""
    steps = itertools.count()
    bench = make_bench(slots=4, fail_when=lambda rows: next(steps) == 1)
    bench.engine.add(request("old-0", [1, 2], 30))
    bench.step()
    bench.engine.add(request("new-1", [3] * 9, 30))
    bench.step()
    bench.engine.add(request("late-2", [4, 5], 30))
    bench.run()
    assert [len(rows) for rows in bench.runner.steps[:3]] == [1, 2, 3]
    assert bench.reasons == {"old-0": "error", "new-1": "error", "late-2": "length"}
    assert bench.tokens["late-2"] == expected_output([4, 5], 30, frozenset())


def test_what_another_steps_fault_cost_a_request_is_not_taken_for_its_want_of_memory():
    """As above; then `late-2` finds no memory for the first time."""
    steps, failures = itertools.count(), {1: RuntimeError, 3: DeviceMemoryError}

    def fails(rows):
        bench.runner.failure = failures.get(next(steps))
        return bench.runner.failure is not None

    bench = make_bench(slots=4, fail_when=fails)
    bench.engine.add(request("old-0", [1, 2], 30))
    bench.step()
    bench.engine.add(request("new-1", [3] * 9, 30))
    bench.step()
    bench.engine.add(request("late-2", [4, 5], 30))
    bench.run()
    assert bench.engine.stats().memory_failures_total == 1
    assert bench.reasons == {"old-0": "error", "new-1": "error", "late-2": "length"}
    assert bench.tokens["late-2"] == expected_output([4, 5], 30, frozenset())


def test_a_lost_device_ends_the_engine_even_where_memory_was_short():
    bench = make_bench(fail_when=lambda rows: True, failure=DeviceMemoryError)

    def lost():
        raise RuntimeError("the device is gone")

    bench.runner.check_device = lost
    bench.engine.add(request("r-0", [1, 2, 3], 4))
    with pytest.raises(RuntimeError, match="gone"):
        bench.run()


def test_prompt_scores_lost_with_a_step_are_made_again():
    """The fake scores nothing: what matters is that the positions are asked for once more."""
    calls = itertools.count()
    bench = make_bench(fail_when=lambda rows: next(calls) == 1, failure=DeviceMemoryError)
    bench.engine.add(request("r-0", list(range(40)), 4, prompt_logprobs=0))
    sequence = bench.engine._sequences["r-0"]
    sequence.prompt_scored, sequence.prompt_logprobs = 32, [None] * 17
    for _ in range(3):
        bench.step()
    assert sequence.memory_failures == 1
    assert (sequence.num_computed, sequence.prompt_scored) == (16, 16)
    bench.run()
    assert bench.tokens["r-0"] == expected_output(list(range(40)), 4, frozenset())


def test_a_lost_device_ends_the_engine_since_no_later_step_could_succeed():
    bench = make_bench(slots=1, fail_when=lambda rows: True)

    def lost():
        raise RuntimeError("the device is lost")

    bench.engine.runner.check_device = lost
    bench.engine.add(request("r-0", [9, 9], 3))
    with pytest.raises(RuntimeError, match="the device is lost"):
        bench.run()


def test_an_aborted_request_returns_its_blocks_at_once():
    bench = make_bench()
    bench.engine.add(request("r-0", [1] * 20, 30))
    bench.step()
    bench.step()
    assert bench.blocks.held_units > 0
    bench.take(bench.engine.abort(["r-0", "never-heard-of"]))
    assert bench.blocks.held_units == 0
    bench.run()
    assert bench.reasons == {"r-0": "abort"}


def test_an_abort_takes_a_grammar_that_is_not_compiled_out_of_the_queue():
    bench = make_bench()
    bench.engine._arrivals.grammars = compiler = Compiler()
    for i in range(2):
        bench.engine.add(request(f"r-{i}", [1, 2], 2, grammar="a"))
    (output,) = bench.engine.abort(["r-0"])
    assert (output.request_id, output.finish_reason) == ("r-0", "abort")
    assert [asked.cancelled() for asked in compiler.asked] == [True, False]
    assert bench.engine.requests == 1


def test_a_fault_of_the_engine_is_not_taken_for_one_of_a_grammar(monkeypatch):
    """The sequence may be queued by then: an output that ends it would not be its last."""
    bench = make_bench()
    bench.engine._arrivals.grammars = compiler = Compiler()
    bench.engine.add(request("r-0", [1, 2], 2, grammar="a"))
    compiler.asked[0].set_result(None)

    def judge(*args, **named):
        raise ZeroDivisionError

    monkeypatch.setattr(bench.engine.gate, "judge", judge)
    with pytest.raises(ZeroDivisionError):
        bench.engine.step()


def test_an_id_that_one_abort_names_twice_ends_its_request_once():
    bench = make_bench()
    bench.engine.add(request("r-0", [1, 2, 3], 5))
    bench.step()
    outputs = bench.engine.abort(["r-0", "r-0"])
    assert [output.request_id for output in outputs] == ["r-0"]
    bench.run()
    assert bench.blocks.held_units == 0


@pytest.mark.parametrize(
    ("ids", "max_tokens", "wanted"),
    [
        ([], 1, "no tokens"),
        ([1] * CONTEXT, 1, f"the context holds {CONTEXT}"),
        ([VOCAB], 1, f"outside 0..{VOCAB - 1}"),
        ([-1], 1, "outside 0.."),
        ([1], 0, "must be at least 1"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(ids, max_tokens, wanted):
    bench = make_bench()
    refused = bench.engine.add(request("r-0", ids, max_tokens))
    assert refused is not None
    assert refused.finish_reason == "error"
    assert wanted in refused.error
    assert not bench.engine.has_work


def test_ignore_eos_runs_to_the_length():
    prompt = [3, 1]
    eos = frozenset(expected_output(prompt, 2, frozenset()))
    bench = make_bench(eos=eos)
    bench.engine.add(request("r-0", prompt, 6, ignore_eos=True))
    bench.engine.add(request("r-1", prompt, 6))
    bench.run()
    assert len(bench.tokens["r-0"]) == 6
    assert bench.reasons == {"r-1": "stop", "r-0": "length"}
    assert len(bench.tokens["r-1"]) == 1


def test_max_tokens_beyond_the_context_end_at_the_context():
    bench = make_bench(num_blocks=8)
    bench.engine.add(request("r-0", [1] * 10, 1000))
    bench.run()
    assert len(bench.tokens["r-0"]) == CONTEXT - 10
    assert bench.reasons["r-0"] == "length"


def test_stats_count_what_ran():
    bench = make_bench()
    bench.engine.add(request("r-0", [1] * 10, 4))
    bench.step()
    assert bench.engine.stats().running_requests == 1
    bench.run()
    stats = bench.engine.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (10, 4)
    assert (stats.running_requests, stats.waiting_requests, stats.live_tokens) == (0, 0, 0)
    assert stats.steps_total == 4


def test_a_prompt_that_is_preempted_and_computed_again_counts_once():
    bench = make_bench(num_blocks=8, slots=4, budget=64, prefix_cache=False, surprised=True)
    for index in range(3):
        bench.engine.add(request(f"r-{index}", [index] * 14, 20))
    bench.run()
    assert bench.engine.scheduler.preemptions_total > 0
    assert bench.engine.stats().prompt_tokens_total == 3 * 14


def test_the_kv_report_tells_who_holds_what_and_what_is_broken():
    bench = make_bench()
    bench.engine.add(request("r-0", [1] * 10, 20))
    bench.step()
    report = bench.engine.inspect_kv()
    assert report.fault == ""
    assert (report.block_size, report.total_blocks, report.free_blocks) == (8, 16, 14)
    table = report.tables[0]
    assert (table.request_id, table.held, table.claim, table.debt) == ("r-0", 2, 2, 0)
    bench.blocks._holders[15] = 1
    assert "unit 15: 1 holders noted, 0 found" in bench.engine.inspect_kv().fault


def test_a_lease_for_an_arriving_request_is_taken_over_given_back_or_expires():
    bench = make_bench(num_blocks=64)
    blocks, clock = bench.blocks, bench.engine._clock
    for name in ("r-0", "r-1", "r-2", "r-0"):
        bench.engine.reserve(ReserveKv(name, 40, 5.0))
    assert blocks.reserved_units == 15
    assert bench.engine.abort(["r-1"]) == []
    assert blocks.reserved_units == 10
    bench.engine.add(request("r-0", [1] * 40, 4))
    bench.step()
    assert blocks.reserved_units == 5  # r-2's
    clock.advance(5.0)
    bench.run()
    bench.step()
    assert blocks.reserved_units == blocks.leased_units == 0
    assert bench.reasons == {"r-0": "length"}


def test_a_lease_ends_in_time_on_an_engine_that_has_nothing_to_do():
    clock = VirtualClock()
    bench = make_bench(num_blocks=32, clock=clock)
    bench.engine.grow(GrowPrompt("r-0", 0, list(range(40)), 5.0))
    bench.run()
    assert bench.engine.stats().held_blocks > 0
    clock.advance(6.0)
    stats = bench.engine.stats()
    assert (stats.held_blocks, stats.leased_blocks) == (0, 0)


def test_steps_that_score_prompts_teach_nothing_of_the_time_of_others_and_are_no_misprediction():
    bench = make_bench(slots=2)
    bench.engine.step_time.start(StepCosts(0.25, 0.0, 0, 0.0, 0.0, 0.0), np.ones(5))
    execute, observed = bench.runner.execute, []

    def scoring(rows):
        result = replace(execute(rows), device_s=0.25)
        if len(bench.runner.steps) != 2:
            return result
        return replace(result, device_s=5.0, prompt_logprobs={0: []})

    bench.runner.execute = scoring
    bench.engine.step_time.observe = lambda load, device_s: observed.append(load)
    bench.engine.add(request("r-0", [1] * 40, 2))
    bench.run()
    assert [load.prefill_tokens for load in observed] == [16, 8, 0]
    timings = bench.engine.stats().timings
    assert sum(timings.device.counts) == 4
    assert (sum(timings.error.counts), timings.error.total, timings.recent_error) == (3, 0.0, 0.0)
    assert sum(timings.ratio.counts) == 3


def test_steps_that_outlast_what_they_were_cut_to_widen_the_margin_and_scored_ones_do_not():
    """Decodes beside a prompt that no step has time for as a whole."""
    for scores in (False, True):
        bench = make_bench(slots=2, budget=64, num_blocks=64, target_s=0.0031)
        execute = bench.runner.execute

        def late(rows, execute=execute, scores=scores):
            result = replace(execute(rows), device_s=0.5)
            return replace(result, prompt_logprobs={0: []}) if scores else result

        bench.runner.execute = late
        bench.engine.add(request("r-0", [1], 12))
        bench.step()
        bench.engine.add(request("r-1", [1] * 40, 1))
        bench.run()
        margin = bench.engine.scheduler.pace.margin.value
        assert (margin > 1.0) is not scores
        assert bench.engine.stats().timings.pace_margin == margin


def test_a_lease_goes_with_a_request_that_is_refused_or_aborted_while_it_waits():
    bench = make_bench(num_blocks=16, slots=1)
    bench.engine.add(request("r-0", [1] * 10, 20))
    bench.step()
    for name in ("r-1", "r-2"):
        bench.engine.reserve(ReserveKv(name, 16, 5.0))
    assert bench.engine.add(request("r-1", [], 4)).finish_reason == "error"
    bench.engine.add(request("r-2", [2] * 16, 4))
    bench.step()
    assert bench.blocks.reserved_units == 2
    bench.take(bench.engine.abort(["r-2"]))
    assert bench.blocks.reserved_units == 0
    bench.run()


def test_a_request_finds_its_own_lease_where_there_is_no_other_room():
    bench = make_bench(num_blocks=32, slots=4, budget=256)
    bench.engine.reserve(ReserveKv("r-1", 64, 5.0))
    for index in (0, 2, 3):
        bench.engine.add(request(f"r-{index}", [index] * 20, 44))
    bench.step()
    assert bench.blocks.unclaimed_units == 0
    bench.engine.add(request("r-1", [2] * 50, 14))
    bench.step()
    assert bench.engine.stats().running_requests == 4
    bench.run()


def test_a_lease_that_is_lent_out_is_no_room_until_it_comes_back():
    bench = make_bench(num_blocks=8, surprised=True)
    # r-0 outgrows what was expected of it, into what r-1's lease promises.
    bench.engine.reserve(ReserveKv("r-1", 32, 5.0))
    assert bench.blocks.reserved_units == 2
    bench.engine.add(request("r-0", [1] * 8, 54))
    for _ in range(60):
        if not bench.blocks.available_units:
            break
        bench.step()
    assert bench.blocks.lent_units > 0
    bench.engine.add(request("r-1", [2] * 10, 4))
    bench.run()
    assert bench.reasons == {"r-0": "length", "r-1": "length"}
    bench.blocks.check_integrity()


def test_leases_for_the_arriving_overtake_nobody_and_leave_most_of_the_pool():
    bench = make_bench(num_blocks=16, slots=1)
    bench.engine.add(request("r-0", [1] * 10, 20))
    bench.step()
    for index in range(1, 9):
        bench.engine.reserve(ReserveKv(f"r-{index}", 16, 5.0))
    assert bench.blocks.reserved_units == 4
    bench.engine.abort([f"r-{index}" for index in range(1, 9)])
    bench.engine.add(request("r-9", [1] * 60, 4))
    bench.engine.reserve(ReserveKv("r-1", 16, 5.0))
    assert bench.blocks.reserved_units == 0
    bench.run()


def test_a_failed_requests_kv_is_never_found_in_the_prefix_cache():
    prompt = [9, *range(20)]
    bench = make_bench(num_blocks=32, fail_when=lambda rows: any(r.end > 21 for r in rows))
    bench.engine.add(request("r-0", prompt, 4))
    bench.run()
    assert bench.reasons == {"r-0": "error"}
    assert bench.blocks.lookup(prompt, "") == 0
    bench.blocks.check_integrity()


def test_predictions_come_with_the_first_token_alone():
    bench = make_bench(num_blocks=64, predicted_s=0.5)
    assert bench.engine.add(request("r-0", [1] * 40, 3)) is None  # 16 tokens a step: three steps
    outputs = [output for _ in range(8) for output in bench.engine.step()]
    assert [output.predicted_ttft_s for output in outputs] == [pytest.approx(1.5), None, None]


def test_a_late_first_token_is_refused_and_nothing_of_it_stays():
    bench = make_bench(num_blocks=64, predicted_s=0.5)
    bench.engine.gate.max_ttft_s = 2.0
    assert bench.engine.add(request("r-0", [1] * 40, 3)) is None
    bench.engine.reserve(ReserveKv("x-0", 16, 5.0))
    late = bench.engine.add(request("x-0", [2] * 40, 3))
    assert (late.finish_reason, late.refusal) == ("refused", "first_token_late")
    assert late.predicted_ttft_s == pytest.approx(3.0)  # a stream takes a row of each step
    assert late.retry_after_s == 1.0
    assert bench.engine.requests == 1
    assert bench.engine.stats().late_refusals_total == 1
    assert bench.engine.add(request("y-0", [3] * 4, 3)) is None  # it fits into the third
    bench.run()
    assert set(bench.reasons) == {"r-0", "y-0"}
    assert bench.blocks.leased_units == bench.blocks.held_units == 0
    assert bench.engine.scheduler.shares.members == 0


def test_a_key_is_held_to_its_sequences_and_others_are_not():
    bench = make_bench(num_blocks=64, slots=1)
    mine = {"key": "k", "max_sequences": 2}
    for name in ("r-0", "r-1"):
        assert bench.engine.add(request(name, [1] * 4, 3, **mine)) is None
    refused = bench.engine.add(request("r-2", [1] * 4, 3, **mine))
    assert (refused.finish_reason, refused.refusal) == ("refused", "key_limit_exceeded")
    assert "'k' has 2 of 2" in refused.error
    assert bench.engine.add(request("r-3", [1] * 4, 3, key="other", max_sequences=2)) is None
    assert bench.engine.add(request("r-4", [1] * 4, 3)) is None
    bench.engine.abort(["r-1"])
    assert bench.engine.add(request("r-5", [1] * 4, 3, **mine)) is None
    bench.run()
    assert bench.engine.add(request("r-6", [1] * 4, 3, **mine)) is None


def test_reports_say_when_a_place_will_be_free_while_somebody_waits_for_one():
    bench = make_bench(num_blocks=64, slots=1, predicted_s=0.5, clock=VirtualClock())
    bench.engine.add(request("r-0", [1] * 4, 20))
    assert bench.engine.stats().place_free_s == 0.0  # nobody runs yet
    bench.step()
    bench.step()
    bench.engine._clock.advance(1.0)
    bench.engine.add(request("r-1", [1] * 4, 20))
    assert 8.0 < bench.engine.stats().place_free_s < 11.0
    bench.run()
    assert bench.engine.stats().place_free_s is None


def test_rows_that_pad_a_step_without_decodes_are_nobodys_stream():
    """The pace's margin is of steps that streams wait for: such a step was not cut to a time."""
    bench = make_bench(target_s=0.002)
    execute, margin = bench.runner.execute, bench.engine.scheduler.pace.margin
    bench.runner.computed = lambda step: replace(step.load, decodes=4)
    bench.runner.execute = lambda rows: replace(execute(rows), device_s=1.0)
    bench.engine.add(request("r-0", [1] * 40, 1))
    bench.run()
    assert margin.value == 1.0
    bench.engine.add(request("r-1", [1] * 8, 20))
    bench.step()
    bench.engine.add(request("r-2", [2] * 40, 1))
    bench.run()
    assert margin.value > 1.0
