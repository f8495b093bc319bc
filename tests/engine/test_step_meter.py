import pytest

from tailrace.engine.step_meter import Histogram, StepMeter


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
