import pytest

from tailrace.clock import VirtualClock
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.runner import StepResult
from tailrace.engine.step_probes import Probe, ProbeRun, choose
from tailrace.engine.step_time import StepTimeModel
from tailrace.errors import DeviceMemoryError
from tailrace.types import StepCosts
from tests.support.fake_runner import FakeRunner

MACHINE = StepCosts(0.004, 2e-5, 0, 2e-9, 1e-5, 1e-8)


class TimedRunner(FakeRunner):
    """A fake device whose clock moves by what a machine would need."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(8)
        self.clock = clock
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
        seconds = step.load.seconds(MACHINE)
        self.clock.advance(seconds)
        return StepResult([], [], device_s=seconds)


def timed(probes, most_s=100.0, units=4096, fail_when=None):
    clock = VirtualClock()
    blocks = BlockManager(units, 8, prefix_cache=False)
    runner = TimedRunner(clock)
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
