"""When predictions count as off: by the device's time, after long, and not for one stall."""

import random

import pytest

from tailrace.engine.prediction_watch import LASTING_S, MOST_ERROR, PredictionWatch


def told(watch, steps):
    """Return the indices of the steps with which it was told that predictions are off."""
    return [index for index, step in enumerate(steps) if watch.add(*step)]


def test_before_any_step_nothing_is_off():
    watch = PredictionWatch()
    assert (watch.error, watch.off_s, watch.is_off) == (0.0, 0.0, False)


def test_noise_around_the_prediction_is_not_off_however_long():
    draw, watch = random.Random(1), PredictionWatch()
    steps = [(0.02, 0.02 * draw.uniform(0.7, 1.3)) for _ in range(20_000)]
    assert told(watch, steps) == []
    assert watch.error == pytest.approx(0.15, abs=0.02)
    assert watch.off_s == 0.0


@pytest.mark.parametrize("factor", [0.6, 1.5], ids=["quicker", "slower"])
def test_what_is_off_for_long_is_told_once_and_for_how_long(factor):
    watch = PredictionWatch()
    measured_s = 0.02 * factor
    needed = round(LASTING_S / measured_s)
    (index,) = told(watch, [(0.02, measured_s)] * (3 * needed))
    assert index == pytest.approx(needed, abs=2)
    assert watch.is_off
    assert watch.off_s == pytest.approx(3 * LASTING_S, rel=0.01)
    assert watch.error == pytest.approx(abs(factor - 1) / factor)


def test_once_predictions_hold_again_it_is_over_and_may_be_told_again():
    watch = PredictionWatch()
    off, well = [(0.02, 0.04)] * 2000, [(0.04, 0.04)] * 1000
    assert len(told(watch, off)) == 1
    assert told(watch, well) == []
    assert (watch.off_s, watch.is_off) == (0.0, False)
    assert watch.error < 0.1 * MOST_ERROR
    assert len(told(watch, off)) == 1


@pytest.mark.parametrize("stall_s", [1.0, 15.0, 600.0])
def test_one_stall_is_forgotten_before_it_is_told(stall_s):
    watch = PredictionWatch()
    assert told(watch, [(0.02, 0.02)] * 500 + [(0.02, stall_s)] + [(0.02, 0.02)] * 5000) == []
    assert watch.off_s == 0.0


def test_steps_count_by_their_time_and_not_by_their_number():
    # Of ten steps one is mixed, takes most of the time, and is predicted at half of it.
    steps = ([(0.004, 0.004)] * 9 + [(0.05, 0.1)]) * 1000
    watch = PredictionWatch()
    assert len(told(watch, steps)) == 1
    assert watch.error == pytest.approx(0.05 / 0.136, rel=0.05)
