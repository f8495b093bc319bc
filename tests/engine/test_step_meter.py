import pytest
from structlog.testing import capture_logs

from tailrace.engine.step_meter import Histogram, StepMeter
from tailrace.types import STEP_RATIO_BOUNDS


def test_a_value_counts_under_the_smallest_bound_that_holds_it():
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 5.0, 7.0):
        histogram.add(value)
    read = histogram.read()
    assert read.counts == (2, 1, 1, 1)
    assert read.total == pytest.approx(14.5)


def test_a_turn_is_counted_whole_once_it_is_published():
    meter = StepMeter()
    meter.begin_turn()
    meter.add_schedule(0.0001)
    meter.add_prepare(0.0003)
    meter.add_commit(0.0002)
    meter.add_publish(0.0015)
    assert sum(meter.read().host.counts) == 0
    meter.begin_turn()
    read = meter.read()
    assert sum(read.host.counts) == 1
    assert read.host.total == pytest.approx(0.0021)
    assert read.prepare_s_total == 0.0003
    meter.begin_turn()  # one in which nothing was done
    assert sum(meter.read().host.counts) == 1


def test_the_forecast_is_judged_by_what_the_device_took():
    meter = StepMeter()
    meter.add_step(0.02, idle_s=0.001, queue_s=0.0005, predicted_s=0.023)
    meter.add_step(0.02, idle_s=0.0, queue_s=0.0005, predicted_s=None)
    meter.add_step(0.0, idle_s=0.0, queue_s=0.0, predicted_s=0.02)  # nobody measured
    read = meter.read()
    assert sum(read.device.counts) == 2
    assert sum(read.error.counts) == 1
    assert read.error.total == pytest.approx(0.15)
    assert (read.idle_s_total, read.predicted_s) == (0.001, 0.023)


def test_ratios_are_counted_above_and_below_one_and_bounded():
    meter = StepMeter()
    for predicted_s in (0.04, 0.02, 0.008, 0.0):
        meter.add_step(0.02, idle_s=0.0, queue_s=0.0, predicted_s=predicted_s)
    ratio = meter.read().ratio
    bounds = STEP_RATIO_BOUNDS
    assert ratio.counts[bounds.index(0.5)] == 1
    assert ratio.counts[bounds.index(1.0)] == 1
    assert ratio.counts[bounds.index(3.0)] == 1
    assert ratio.counts[-1] == 1
    assert ratio.total == pytest.approx(0.5 + 1.0 + 2.5 + 1000.0)


def test_predictions_that_are_off_for_long_are_logged_once():
    meter = StepMeter()
    with capture_logs() as logs:
        for _ in range(200):
            meter.add_step(1.0, idle_s=0.0, queue_s=0.0, predicted_s=0.5)
    (told,) = logs
    assert (told["event"], told["log_level"], told["error"]) == (
        "steps_mispredicted",
        "warning",
        0.5,
    )
    read = meter.read()
    assert read.is_off
    assert read.recent_error == pytest.approx(0.5)
    assert read.off_s == pytest.approx(200.0)
