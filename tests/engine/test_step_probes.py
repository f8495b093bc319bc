import pytest

from tailrace.clock import VirtualClock
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.runner import StepResult
from tailrace.engine.step_probes import Probe, ProbeRun, choose
from tailrace.engine.step_time import StepLoad, StepTimeModel
from tailrace.errors import DeviceMemoryError
from tailrace.types import StepCosts, attended
from tests.support.fake_runner import FakeRunner

MACHINE = StepCosts(0.004, 2e-5, 0, 2e-9, 1e-5, 1e-8)


class TimedRunner(FakeRunner):
    """A fake device whose clock moves by what a machine would need."""

    def __init__(self, clock: VirtualClock, machine: StepCosts = MACHINE) -> None:
        super().__init__(8)
        self.clock = clock
        self.machine = machine
        self.touched: list[int] = []

    def touch_kv(self, units):
        self.touched = units

    def prepare(self, step, blocks):
        return step, super().prepare(step, blocks)

    def execute(self, prepared):
        step, rows = prepared
        self.steps.append(rows)
        assert {row.table[-1] for row in rows} <= set(self.touched)
        if self.fail_when(rows):
            raise DeviceMemoryError("none left")
        seconds = step.load.seconds(self.machine)
        self.clock.advance(seconds)
        return StepResult([], [], device_s=seconds)


def timed(probes, most_s=100.0, units=4096, fail_when=None, machine=MACHINE):
    clock = VirtualClock()
    blocks = BlockManager(units, 8, prefix_cache=False)
    runner = TimedRunner(clock, machine)
    runner.fail_when = fail_when or runner.fail_when
    samples = ProbeRun(runner, blocks, submit=runner.submit, clock=clock).run(probes, most_s)
    blocks.check_integrity()
    assert blocks.available_units == units
    return samples


@pytest.mark.parametrize("slots", [1, 4, 64])
@pytest.mark.parametrize("budget", [64, 1024])
@pytest.mark.parametrize("context", [16, 512, 8192])
@pytest.mark.parametrize("kv_tokens", [512, 32768])
@pytest.mark.parametrize("apart", [False, True], ids=["one copy", "two copies"])
def test_every_shape_fits_the_engine_it_is_for(slots, budget, context, kv_tokens, apart):
    probes = choose(
        max_batch_size=slots,
        token_budget=budget,
        context_length=context,
        kv_tokens=kv_tokens,
        prompts_apart=apart,
    )
    assert len(probes) == len(set(probes))
    for probe in probes:
        assert probe.decodes or probe.tokens
        assert probe.decodes + bool(probe.tokens) <= slots
        assert probe.decodes + probe.tokens <= budget
        assert max(probe.context, probe.start + probe.tokens) <= context
        assert probe.decodes * probe.context + probe.start + probe.tokens <= kv_tokens


def test_the_shapes_give_the_machine_back():
    probes = choose(max_batch_size=32, token_budget=512, context_length=4096, kv_tokens=30000)
    model = StepTimeModel()
    costs = model.fit(timed(probes))
    for probe in (Probe(tokens=300, start=700), Probe(decodes=20, context=400)):
        ((load, seconds),) = timed([probe])
        assert load.seconds(costs) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("apart", [False, True], ids=["one copy", "two copies"])
@pytest.mark.parametrize(
    ("budget", "context"), [(8192, 8192), (8192, 4096), (8192, 9000), (1024, 1100), (128, 8192)]
)
def test_attention_is_told_from_tokens_where_a_step_holds_a_whole_prompt_too(
    budget, context, apart
):
    asked = {"max_batch_size": 64, "token_budget": budget, "context_length": context}
    probes = choose(**asked, kv_tokens=10**6, prompts_apart=apart)
    costs = StepTimeModel().fit(timed(probes, units=10**5), prompts_apart=apart)
    assert costs.attention_s == pytest.approx(MACHINE.attention_s, rel=1e-3)
    # None is timed twice: the largest takes a good part of the time that there is.
    prompts = [(probe.decodes, probe.tokens, probe.start // 64) for probe in probes if probe.tokens]
    assert len(prompts) == len(set(prompts))


TWO_COPIES = StepCosts(1e-3, 1e-5, 192, 1.8e-9, 1e-5, 1.4e-8, True, 3e-3, 2.2e-3, 2e-5, 2e-6)
"""A machine on which prompts, by a copy of their own, hide behind its reading up to 192 tokens."""


@pytest.mark.parametrize(
    ("budget", "most_s"), [(1024, 9.0), (4096, 9.0), (16384, 9.0), (8192, 0.7)]
)
def test_short_prompts_are_predicted_however_large_a_step_may_be(budget, most_s):
    probes = choose(
        max_batch_size=128, token_budget=budget, context_length=32768, kv_tokens=10**6,
        prompts_apart=True,
    )  # fmt: skip
    samples = timed(probes, most_s=most_s, units=10**6 // 8, machine=TWO_COPIES)
    costs = StepTimeModel().fit(samples, prompts_apart=True)
    for tokens in (30, 100, 300, 900):
        load = StepLoad(prefill_tokens=tokens, prefill_context=attended(0, tokens))
        assert load.seconds(costs) == pytest.approx(load.seconds(TWO_COPIES), rel=0.05)


def test_a_shape_without_memory_is_left_out_and_gives_its_units_back():
    probes = choose(max_batch_size=32, token_budget=512, context_length=4096, kv_tokens=30000)
    found = timed(probes, fail_when=lambda rows: any(row.end - row.start == 512 for row in rows))
    whole = sum(probe.tokens == 512 for probe in probes)
    assert whole > 0
    assert len(found) == len(probes) - whole
    assert all(load.prefill_tokens < 512 for load, _ in found)


def test_a_shape_that_the_pool_has_no_units_for_is_left_out():
    samples = timed([Probe(decodes=40, context=4), Probe(tokens=100), Probe(tokens=200)], units=16)
    assert [load.prefill_tokens for load, _ in samples] == [100]


def test_probes_end_with_their_time_but_two_are_always_there():
    probes = choose(max_batch_size=32, token_budget=512, context_length=4096, kv_tokens=30000)
    assert len(timed(probes, most_s=0.0)) == 2
    assert 2 < len(timed(probes, most_s=0.1)) < len(probes)


def test_two_copies_are_timed_together_early_and_decodes_where_their_arithmetic_begins_to_show():
    asked = {"token_budget": 1024, "context_length": 8192, "kv_tokens": 10**6}
    probes = choose(max_batch_size=128, prompts_apart=True, **asked)
    assert any(probe.decodes and probe.tokens for probe in probes[:3])
    assert Probe(decodes=32, context=64) in probes
    assert set(choose(max_batch_size=128, **asked)) < set(probes)
