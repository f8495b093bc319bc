import random
import statistics
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.step_probes import choose
from tailrace.engine.step_time import StepLoad, StepTimeModel, fit
from tailrace.errors import EngineError
from tailrace.types import StepCosts, attended

# About Qwen2.5-7B on an H200, and a small model on two CPU cores.
GPU = StepCosts(4.6e-3, 2.2e-5, 128, 1.8e-9, 1e-5, 1.4e-8)
CPU = StepCosts(1.2e-2, 1.25e-3, 0, 1e-7, 2e-4, 2e-6)


def prompt(start: int, end: int, decodes: int = 0, context: int = 0) -> StepLoad:
    return StepLoad(end - start, attended(start, end), decodes, decodes * context)


def decode(count: int, context: int) -> StepLoad:
    return StepLoad(0, 0, count, count * context)


PROBES = [
    decode(1, 64),
    decode(1, 2048),
    decode(64, 64),
    decode(64, 2048),
    decode(128, 64),
    decode(128, 2048),
    prompt(0, 64),
    prompt(0, 128),
    prompt(0, 256),
    prompt(0, 512),
    prompt(0, 1024),
    prompt(3000, 4000),
    prompt(0, 900, 64, 2048),
]


def measured(costs: StepCosts, loads, noise: float = 0.0, seed: int = 1):
    draw = random.Random(seed)
    return [(load, load.seconds(costs) * (1 + draw.gauss(0, noise))) for load in loads]


def off(model_costs: StepCosts, truth: StepCosts, load: StepLoad) -> float:
    return abs(load.seconds(model_costs) / load.seconds(truth) - 1)


@pytest.mark.parametrize("apart", [False, True], ids=["one copy", "two copies"])
def test_tokens_computed_again_cost_what_they_add_to_a_full_step(apart):
    """By the model itself, with no term 0: one that is added later is missed here first."""
    terms = {name: 1e-3 * (i + 1) for i, name in enumerate(StepCosts.__struct_fields__)}
    if not apart:
        terms |= dict.fromkeys(("prompts_s", "decodes_s", "crowd_s", "late_token_s"), 0.0)
    costs = StepCosts(**terms | {"free_rows": 128, "prompts_apart": apart})
    others = {"decodes": 64, "context": 640.0}
    full = costs.seconds(300.0, 5e4, **others)
    with_them = costs.seconds(300.0 + 70, 5e4 + attended(0, 70), **others)
    assert costs.again_s(70) == pytest.approx(with_them - full)


UNSEEN = [
    decode(30, 1000),
    decode(100, 1500),
    prompt(0, 700),
    prompt(1000, 1500, 20, 500),
    prompt(2000, 2800, 128, 2000),
]


@pytest.mark.parametrize("truth", [GPU, CPU], ids=["gpu", "cpu"])
def test_exact_measurements_give_the_machine_back(truth):
    found = fit(measured(truth, PROBES))
    assert found.free_rows == truth.free_rows
    assert max(off(found, truth, load) for load in UNSEEN) < 1e-6


@pytest.mark.parametrize("truth", [GPU, CPU], ids=["gpu", "cpu"])
def test_noisy_measurements_predict_steps_that_were_not_measured(truth):
    for seed in range(10):
        found = fit(measured(truth, PROBES, noise=0.03, seed=seed))
        assert max(off(found, truth, load) for load in UNSEEN) < 0.15


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2000), st.integers(0, 5000), st.integers(0, 64), st.integers(1, 5000)
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 1000),
)
def test_whatever_was_measured_no_coefficient_is_negative_and_more_work_takes_no_less(jobs, seed):
    draw = random.Random(seed)
    samples = [
        (prompt(start, start + tokens, decodes, context), draw.uniform(1e-3, 1.0))
        for tokens, start, decodes, context in jobs
    ]
    if not any(load.rows for load, _ in samples):
        samples.append((decode(1, 1), 0.1))
    costs = fit(samples)
    assert min(costs.base_s, costs.token_s, costs.attention_s, costs.decode_s, costs.kv_s) >= 0
    smaller, larger = prompt(100, 200, 3, 50), prompt(100, 300, 4, 60)
    assert smaller.seconds(costs) <= larger.seconds(costs)


@pytest.mark.parametrize("stalled", range(len(PROBES)))
def test_one_stalled_measurement_bends_the_fit_little(stalled):
    samples = measured(GPU, PROBES, noise=0.02)
    samples[stalled] = (samples[stalled][0], 3 * samples[stalled][1])
    assert statistics.median(off(fit(samples), GPU, load) for load in UNSEEN) < 0.15


def test_a_few_short_prompts_tell_nothing_of_attention():
    """A stall in one of three steps is not taken for attention, which would grow without bound."""
    loads = [decode(1, 45), prompt(0, 16), prompt(0, 32)]
    costs = fit(list(zip(loads, [0.09, 0.25, 0.48], strict=True)))
    assert costs.attention_s == costs.kv_s == costs.decode_s == 0.0
    assert prompt(1000, 1128).seconds(costs) < 3.0


def test_nothing_measured_cannot_be_fitted():
    with pytest.raises(EngineError, match="no step was measured"):
        fit([(StepLoad(), 1.0), (decode(1, 1), 0.0)])


def test_an_unfitted_model_predicts_nothing_and_learns_nothing():
    model = StepTimeModel()
    model.observe(decode(1, 1), 1.0)
    assert model.costs is None
    assert model.predict(decode(1, 1)) is None


def fitted(truth: StepCosts) -> StepTimeModel:
    model = StepTimeModel()
    model.fit(measured(truth, PROBES, noise=0.02))
    return model


def times(costs: StepCosts, factor: float) -> StepCosts:
    return StepCosts(
        costs.base_s * factor,
        costs.token_s * factor,
        costs.free_rows,
        costs.attention_s * factor,
        costs.decode_s * factor,
        costs.kv_s * factor,
    )


def serve(model: StepTimeModel, truth: StepCosts, steps: int, seed: int = 2, noise=0.05) -> None:
    """Steps as a server has them: decodes, with prompts beside them in every third."""
    draw = random.Random(seed)
    for step in range(steps):
        decodes, context = draw.randint(20, 60), draw.randint(500, 1500)
        load = prompt(0, 512, decodes, context) if step % 3 == 0 else decode(decodes, context)
        model.observe(load, load.seconds(truth) * (1 + draw.gauss(0, noise)))


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_a_machine_that_changes_speed_is_followed_within_some_fifty_steps(factor):
    model, slow = fitted(GPU), times(GPU, factor)
    serve(model, slow, 60)
    assert off(model.costs, slow, decode(40, 1000)) < 0.1
    assert off(model.costs, slow, prompt(0, 512, 40, 1000)) < 0.15


def test_steps_of_decodes_alone_teach_that_prompts_take_longer_too():
    model, slow = fitted(GPU), times(GPU, 2.0)
    draw = random.Random(3)
    for _ in range(200):
        load = decode(draw.randint(20, 60), draw.randint(500, 1500))
        model.observe(load, load.seconds(slow) * (1 + draw.gauss(0, 0.05)))
    assert off(model.costs, slow, prompt(0, 1024, 32, 1000)) < 0.3


def test_a_term_that_the_fit_missed_is_learnt():
    blind = StepCosts(GPU.base_s, GPU.token_s, GPU.free_rows, 0.0, GPU.decode_s, 0.0)
    model = StepTimeModel()
    model.start(blind, np.array([1.0, 1000.0, 4e6, 128.0, 128 * 2048.0]))
    draw = random.Random(4)
    for _ in range(300):
        load = decode(draw.randint(8, 128), draw.randint(500, 4500))
        model.observe(load, load.seconds(GPU) * (1 + draw.gauss(0, 0.05)))
    assert off(model.costs, GPU, decode(16, 500)) < 0.1
    assert off(model.costs, GPU, decode(128, 4500)) < 0.1


def test_a_step_that_was_predicted_to_take_nothing_is_learnt():
    model = StepTimeModel()
    model.start(StepCosts(0.0, 2e-5, 64, 0.0, 0.0, 0.0), np.array([1.0, 1000.0, 4e6, 128.0, 3e5]))
    assert model.predict(decode(8, 100)) == 0.0
    for _ in range(300):
        model.observe(decode(8, 100), 0.005)
    assert 0.004 < model.predict(decode(8, 100)) < 0.006


def test_a_compilation_in_a_step_moves_the_next_prediction_little():
    model = fitted(GPU)
    serve(model, GPU, 100)
    load = prompt(0, 512, 40, 1000)
    before = model.predict(load)
    model.observe(load, 100 * before)
    assert model.predict(load) < 1.15 * before
    serve(model, GPU, 30)
    assert off(model.costs, GPU, load) < 0.08


def test_the_prediction_does_not_wander_on_a_steady_machine():
    model = fitted(GPU)
    errors = []
    for seed in range(20):
        serve(model, GPU, 50, seed=seed, noise=0.08)
        errors += [off(model.costs, GPU, load) for load in UNSEEN]
    assert statistics.median(errors) < 0.06
    assert max(errors) < 0.35


def test_attended_counts_each_tokens_prefix_and_itself():
    assert attended(0, 3) == 1 + 2 + 3
    assert attended(5, 7) == 6 + 7
    assert attended(4, 4) == 0


def test_an_empty_step_takes_no_time():
    assert GPU.predict(0, 0, 0, 0) == 0.0


# Milliseconds of all linear layers of Qwen2.5-7B's shape on an H200, by rows: docs/performance.md,
# "Quantised layers, by rows", with rows that the same run has between (benchmarks/gpu_gemm.py).
# Up to 32 rows FP8's were measured before rows are rounded from 33 on, so 100 rows stand for them.
FOUR_BITS_MS = {1: 1.82, 8: 1.87, 16: 1.93, 32: 2.22, 64: 3.27, 128: 5.91}
FP8_MS = {1: 3.60, 100: 3.60, 128: 3.65, 256: 4.14, 512: 5.79, 1024: 10.6, 2048: 19.8}


def awq_with_an_fp8_copy(load: StepLoad) -> float:
    """Seconds of a step whose decodes go by 4-bit weights and whose prompts by a copy in FP8."""
    ms = 0.9  # norms, rotary embedding, SiLU, the head's weight
    for rows, table in ((load.decodes, FOUR_BITS_MS), (load.prefill_tokens, FP8_MS)):
        if rows:
            ms += float(np.interp(rows, list(table), list(table.values())))
    attention_s = 1.8e-9 * load.prefill_context + 1.6e-8 * load.decode_context
    return ms / 1e3 + attention_s + 1e-5 * load.decodes


def probed(most: int, *, prompts_apart: bool) -> list[StepLoad]:
    probes = choose(
        max_batch_size=most,
        token_budget=1024,
        context_length=8192,
        kv_tokens=1_000_000,
        prompts_apart=prompts_apart,
    )
    return [prompt(p.start, p.start + p.tokens, p.decodes, p.context) for p in probes]


def at_once(load: StepLoad, saved: float) -> float:
    """Seconds of the same where a step of both kinds saves a share of the shorter one."""
    if not (load.prefill_tokens and load.decodes):
        return awq_with_an_fp8_copy(load)
    head_s = 3e-4
    prompts_s = awq_with_an_fp8_copy(StepLoad(load.prefill_tokens, load.prefill_context)) - head_s
    decodes_s = awq_with_an_fp8_copy(StepLoad(0, 0, load.decodes, load.decode_context)) - head_s
    longer_s, shorter_s = max(prompts_s, decodes_s), min(prompts_s, decodes_s)
    return head_s + longer_s + (1.0 - saved) * shorter_s


def errors_over_the_table(
    most: int, *, prompts_apart: bool, truth: Callable[[StepLoad], float] = awq_with_an_fp8_copy
) -> list[float]:
    """Errors of a fit to what a warm-up measures, over steps of the table's sizes."""
    loads = probed(most, prompts_apart=prompts_apart)
    costs = fit([(load, truth(load)) for load in loads], prompts_apart=prompts_apart)
    errors = []
    for decodes in (count for count in (0, *FOUR_BITS_MS) if count <= most):
        for tokens in (0, 128, 256, 512, 1024 - decodes):
            for start, context in ((0, 200), (0, 4000), (3000, 1500)):
                load = prompt(start, start + tokens, decodes, context)
                if load.rows:
                    errors.append(abs(load.seconds(costs) / truth(load) - 1))
    return errors


@pytest.mark.parametrize(("saved", "bound"), [(0.1, 0.05), (0.25, 0.09)], ids=str)
@pytest.mark.parametrize("most", [16, 64, 128])
def test_phases_that_go_at_once_are_predicted_by_what_all_steps_cost(most, saved, bound):
    """A step of both pays `base` once, steps of either pay it each: so it takes up what is saved.

    An H200 saves about 6 % of the shorter.
    """
    truth = partial(at_once, saved=saved)
    errors = errors_over_the_table(most, prompts_apart=True, truth=truth)
    assert max(errors) < bound
    assert statistics.median(errors) < 0.02


@pytest.mark.parametrize("most", [16, 32, 64, 128])
def test_two_copies_of_the_weights_are_predicted_within_5_percent_where_one_form_errs_by_a_third(
    most,
):
    """Steps of both kinds most of all: what reads both copies is no step of either."""
    before = errors_over_the_table(most, prompts_apart=False)
    after = errors_over_the_table(most, prompts_apart=True)
    assert max(before) > 0.3
    assert statistics.median(before) > 0.1
    assert max(after) < 0.05
    assert statistics.median(after) < 0.025


@pytest.mark.parametrize("seed", range(5))
def test_noisy_measurements_of_two_copies_are_not_bent_far(seed):
    draw = random.Random(seed)
    loads = probed(128, prompts_apart=True)
    costs = fit(
        [(load, awq_with_an_fp8_copy(load) * (1 + draw.gauss(0, 0.02))) for load in loads],
        prompts_apart=True,
    )
    for load in (prompt(0, 512, 64, 1000), prompt(0, 900, 16, 300), decode(48, 2000)):
        assert load.seconds(costs) == pytest.approx(awq_with_an_fp8_copy(load), rel=0.1)


@pytest.mark.parametrize("count", range(2, 12))
def test_few_measurements_of_two_copies_give_no_wild_prediction(count):
    """A large model's warm-up has time for the first few shapes alone."""
    loads = probed(128, prompts_apart=True)[:count]
    costs = fit([(load, awq_with_an_fp8_copy(load)) for load in loads], prompts_apart=True)
    for load in loads:
        assert load.seconds(costs) == pytest.approx(awq_with_an_fp8_copy(load), rel=0.1)
    for load in (prompt(0, 512, 16, 200), prompt(0, 256), decode(16, 200)):
        assert 0.5 < load.seconds(costs) / awq_with_an_fp8_copy(load) < 1.5


def test_two_copies_without_a_step_of_both_leave_what_all_steps_cost_to_each():
    loads = [decode(1, 64), prompt(0, 256), decode(64, 64), prompt(0, 1024)]
    costs = fit([(load, awq_with_an_fp8_copy(load)) for load in loads], prompts_apart=True)
    assert costs.base_s == 0.0
    assert min(costs.prompts_s, costs.decodes_s) > 1e-3


def test_two_copies_are_followed_when_the_machine_changes_speed():
    model = StepTimeModel()
    loads = probed(128, prompts_apart=True)
    model.fit([(load, awq_with_an_fp8_copy(load)) for load in loads], prompts_apart=True)
    assert model.costs.prompts_apart
    draw = random.Random(7)
    for step in range(80):
        decodes, context = draw.randint(8, 60), draw.randint(200, 1500)
        load = prompt(0, 512, decodes, context) if step % 3 == 0 else decode(decodes, context)
        model.observe(load, 2 * awq_with_an_fp8_copy(load) * (1 + draw.gauss(0, 0.03)))
    for load in (prompt(0, 512, 32, 800), decode(32, 800)):
        assert model.predict(load) == pytest.approx(2 * awq_with_an_fp8_copy(load), rel=0.15)


COEFFICIENTS = st.floats(0.0, 1e-3) | st.just(0.0)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS, COEFFICIENTS),
    st.integers(0, 300),
    st.booleans(),
    st.integers(0, 200),
    st.integers(0, 5000),
    st.floats(0.0, 0.5),
)
def test_the_tokens_that_fit_into_a_time_are_those_that_the_formula_gives(
    coefficients, free_rows, apart, decodes, depth, spare_s
):
    token, attention, decode_s, late = coefficients
    costs = StepCosts(
        1e-3, token, free_rows, attention, decode_s, 0.0, apart, late_token_s=late if apart else 0.0
    )
    fitting = costs.tokens_within(spare_s, depth, decodes)
    alone_s = costs.seconds(0.0, 0.0, decodes, 0.0)

    def added_s(tokens: float) -> float:
        return costs.seconds(tokens, tokens * depth, decodes, 0.0) - alone_s

    if fitting > 1e9:
        assert added_s(1e6) <= spare_s + 1e-6
    else:
        assert added_s(fitting) <= spare_s + 1e-6
        assert added_s(1.01 * fitting + 1.0) >= spare_s - 1e-6


def test_costs_of_before_are_read_as_those_of_one_copy():
    told = msgspec.msgpack.encode(list(msgspec.structs.astuple(GPU))[:6])
    assert msgspec.msgpack.decode(told, type=StepCosts) == GPU
