"""The pace's margin: where it comes to stand, what moves it, and what does not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tailrace.engine.pace import Pace
from tailrace.engine.pace_margin import MOST, PaceMargin
from tailrace.engine.step_time import StepLoad, StepTimeModel
from tailrace.types import StepCosts

COSTS = StepCosts(0.004, 2e-5, 0, 2e-9, 1e-5, 1e-8)
TARGET_S = 0.03


def make_pace():
    model = StepTimeModel()
    model.start(COSTS, np.ones(5))
    return Pace(model, TARGET_S, least_tokens=16, round_down=lambda decodes, tokens: tokens)


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("bias", [0.8, 1.0, 1.15])
def test_nineteen_of_twenty_steps_that_are_cut_end_within_the_target(noise, bias):
    pace, draw = make_pace(), random.Random(7)
    decodes = StepLoad(decodes=60, decode_context=60 * 500)
    late = []
    for _ in range(6000):
        tokens = pace.limit(decodes, [(0, 50_000)], 8192)
        load = decodes.with_chunk(0, tokens)
        predicted_s = load.seconds(COSTS)
        measured_s = predicted_s * bias * draw.lognormvariate(0.0, noise)
        late.append(measured_s > TARGET_S)
        pace.observe(load, predicted_s, measured_s)
    share = sum(late[1000:]) / 5000
    if bias * (1 + 2 * noise) < 1.0:
        assert pace.margin.value == 1.0  # it never asks for more than the model allows
        assert share < 0.05
    elif bias * (1 + 1.7 * noise) < MOST:
        assert share == pytest.approx(0.05, abs=0.015)


def test_one_stall_moves_it_as_little_as_any_late_step():
    one, other = PaceMargin(1.2), PaceMargin(1.2)
    one.add(0.025, 5.0, TARGET_S)
    other.add(0.025, 0.0301, TARGET_S)
    assert one.value == other.value == pytest.approx(1.219)


def test_it_stays_between_one_and_its_most():
    margin = PaceMargin()
    margin.add(0.03, 0.01, TARGET_S)
    assert margin.value == 1.0
    for _ in range(100):
        margin.add(0.03 / margin.value, 1.0, TARGET_S)
    assert margin.value == MOST


def test_steps_that_were_not_cut_teach_nothing():
    """They are shorter than what is aimed at: no decode beside them, or few prompt tokens."""
    margin = PaceMargin(1.2)
    margin.add(0.0174, 1.0, TARGET_S)
    assert margin.value == 1.2
    margin.add(0.0176, 1.0, TARGET_S)
    assert margin.value > 1.2
    pace = make_pace()
    for load in (StepLoad(prefill_tokens=900), StepLoad(decodes=60, decode_context=9)):
        pace.observe(load, 0.03, 1.0)
    assert pace.margin.value == 1.0


def test_a_margin_leaves_a_step_fewer_prompt_tokens():
    pace = make_pace()
    decodes = StepLoad(decodes=60, decode_context=60 * 500)
    before = pace.limit(decodes, [(0, 50_000)], 8192)
    pace.margin.value = 1.25
    after = pace.limit(decodes, [(0, 50_000)], 8192)
    assert decodes.with_chunk(0, after).seconds(COSTS) <= TARGET_S / 1.25
    assert decodes.with_chunk(0, after + 1).seconds(COSTS) > TARGET_S / 1.25
    assert 0 < after < before
