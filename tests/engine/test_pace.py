import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.block_manager import BlockManager
from tailrace.engine.frames import mixed_frames
from tailrace.engine.pace import Pace
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.step_time import StepLoad, StepTimeModel
from tailrace.types import StepCosts
from tests.engine.test_scheduler import sequence, settle

COSTS = StepCosts(0.004, 2e-5, 0, 2e-9, 1e-5, 1e-8)


def pace(target_s=0.01, least=16, round_down=lambda decodes, tokens: tokens, costs=COSTS):
    model = StepTimeModel()
    if costs is not None:
        model.start(costs, np.ones(5))
    return Pace(model, target_s=target_s, least_tokens=least, round_down=round_down)


def decodes(count: int, context: int = 100) -> StepLoad:
    return StepLoad(decodes=count, decode_context=count * context)


def seconds(load: StepLoad, prompts) -> float:
    for start, tokens in prompts:
        pairs = sum(range(start + 1, start + tokens + 1))
        load = StepLoad(
            load.prefill_tokens + tokens,
            load.prefill_context + pairs,
            load.decodes,
            load.decode_context,
        )
    return load.seconds(COSTS)


def test_the_prompts_take_what_the_time_allows_and_not_a_token_more():
    limit = pace().limit(decodes(20), [(0, 5000)], 1000)
    assert seconds(decodes(20), [(0, limit)]) <= 0.01 < seconds(decodes(20), [(0, limit + 1)])


def test_a_chunk_deep_in_its_prompt_is_shorter_for_its_attention():
    shallow, deep = (pace().limit(decodes(20), [(start, 5000)], 1000) for start in (0, 20000))
    assert deep < 0.6 * shallow


def test_several_prompts_share_the_time_in_order():
    limit = pace().limit(decodes(20), [(0, 100), (3000, 60), (0, 900)], 1000)
    assert 160 < limit < 400
    assert seconds(decodes(20), [(0, 100), (3000, 60), (0, limit - 160)]) <= 0.01


@pytest.mark.parametrize(
    ("load", "prompts"),
    [
        (StepLoad(), [(0, 5000)]),  # nobody waits for a token
        (decodes(20), [(0, 100)]),  # all of it fits
        (decodes(20), []),
    ],
    ids=["no-decodes", "fits", "no-prompts"],
)
def test_what_needs_no_cut_is_not_cut(load, prompts):
    assert pace().limit(load, prompts, 1000) == 1000


def test_before_a_fit_nothing_is_cut():
    assert pace(costs=None).limit(decodes(20), [(0, 5000)], 1000) == 1000


def test_a_target_below_what_decodes_take_alone_leaves_prompts_their_share():
    assert pace(target_s=0.001).limit(decodes(20), [(0, 5000)], 1000) == 16
    assert pace(target_s=0.001).limit(decodes(20), [(0, 5000)], 7) == 7


def test_a_cut_is_rounded_down_to_what_is_captured():
    def captured(count: int, tokens: int) -> int:
        assert count == 20
        return max(size for size in (16, 64, 128, 256, 512) if size <= tokens)

    assert pace(round_down=captured).limit(decodes(20), [(0, 5000)], 1000) == 256


def running(count: int, **options) -> Scheduler:
    """Make a scheduler with so many decodes under way and a long prompt that waits."""
    chosen = Scheduler(
        BlockManager(4096, 8, prefix_cache=True), max_batch_size=count + 2, **options
    )
    for index in range(count):
        chosen.add(sequence(index, 8, output=500))
    settle(chosen, chosen.schedule())
    return chosen


def test_steps_with_decodes_keep_the_target_and_others_use_the_whole_budget():
    chosen = running(4, token_budget=400, pace=pace(target_s=0.006))
    chosen.add(sequence(90, 900))
    step = chosen.schedule()
    assert step.decodes == 4
    assert 50 < step.num_tokens - 4 < 120
    assert step.load.seconds(COSTS) <= 0.006

    alone = Scheduler(
        BlockManager(4096, 8, prefix_cache=False),
        max_batch_size=4,
        token_budget=400,
        pace=pace(target_s=0.006),
    )
    alone.add(sequence(90, 900))
    assert alone.schedule().num_tokens == 400


def test_a_prompt_whose_prefix_turns_out_to_be_cached_is_cut_to_its_real_attention():
    costs = StepCosts(0.004, 0.0, 0, 2e-8, 1e-5, 0.0)  # attention alone counts
    chosen = running(2, token_budget=600, pace=pace(target_s=0.006, least=4, costs=costs))
    first = sequence(50, 800)
    chosen.add(first)
    for _ in range(40):
        if first.num_output:
            break
        settle(chosen, chosen.schedule())
    assert first.num_output
    again = sequence(51, 0)
    again.token_ids, again.num_prompt = [50] * 990, 990
    chosen.add(again)
    step = chosen.schedule()
    assert again.num_computed >= 792
    chunk = next(c for c in step.chunks if c.sequence is again)
    assert chunk.start == 800
    assert 1 <= chunk.num_tokens < 190
    assert step.load.seconds(costs) <= 0.006


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=8),
    target_s=st.floats(0.0, 0.02),
    budget=st.integers(8, 200),
)
def test_whatever_the_target_every_prompt_gets_on_and_ends(jobs, target_s, budget):
    chosen = Scheduler(
        BlockManager(512, 8, prefix_cache=False),
        max_batch_size=4,
        token_budget=budget,
        pace=pace(target_s=target_s, least=max(1, budget // 8)),
    )
    total = sum(prompt + output for prompt, output in jobs)
    for index, (prompt, output) in enumerate(jobs):
        chosen.add(sequence(index, prompt, output=output))
    for _ in range(total + 10):
        if not chosen.has_work:
            break
        waits = any(runner.uncomputed == 1 for runner in chosen.running)
        step = chosen.schedule()
        assert step.chunks
        assert step.num_tokens <= budget
        if waits and step.num_tokens - step.decodes > max(1, budget // 8):
            # A prompt of one token is no more than a decode to anybody.
            assert step.load.seconds(COSTS) <= target_s + 1e-4
        settle(chosen, step)
        chosen.blocks.check_integrity()
    assert not chosen.has_work


def test_frames_between_the_usual_sizes_are_captured_only_beside_decodes_that_are_paced():
    plain, paced = (set(mixed_frames(128, 1024, 64, paced=flag)) for flag in (False, True))
    assert plain < paced
    assert {frame.tokens for frame in paced - plain} == {384, 640, 768, 896}
    assert all(frame.decodes for frame in paced - plain)
    assert all(frame.rows <= 1024 for frame in paced)
