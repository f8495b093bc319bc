"""A call's time on a device that is slower or faster than the host that launches it."""

from itertools import count, pairwise

import pytest

from tailrace.engine.device_timer import seconds

WRITE_S, QUEUE_S = 65e-6, 2e-6


class Device:
    """A host's clock, and the moment when what is queued will have run."""

    def __init__(self):
        self.now_s = 0.0
        self.free_s = 0.0
        self.writes = 0

    def launch(self, host_s, device_s):
        self.now_s += host_s
        self.free_s = max(self.free_s, self.now_s) + device_s

    def write(self):
        self.writes += 1
        self.launch(QUEUE_S, WRITE_S)

    def event(self):
        return Moment(self)


class Moment:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at_s = max(self.device.free_s, self.device.now_s)

    def query(self):
        return self.at_s <= self.device.now_s

    def synchronize(self):
        self.device.now_s = max(self.device.now_s, self.at_s)

    def elapsed_time(self, later):
        return 1e3 * (later.at_s - self.at_s)


def timed(device, work):
    return seconds(work, write=device.write, event=device.event)


@pytest.mark.parametrize("launch_s", [5e-6, 120e-6, 300e-6, 2e-3])
@pytest.mark.parametrize("kernels", [1, 3])
def test_what_launching_takes_is_not_the_calls_time(launch_s, kernels):
    device = Device()

    def work():
        for _ in range(kernels):
            device.launch(launch_s, 20e-6)

    assert timed(device, work) == pytest.approx(kernels * 20e-6)


def test_no_call_finds_the_device_idle_or_its_own_data_in_the_cache():
    device, found = Device(), []

    def work():
        found.append(device.writes)
        device.launch(400e-6, 20e-6)

    timed(device, work)
    assert min(later - earlier for earlier, later in pairwise(found)) >= 2


def test_the_time_is_the_median_of_calls():
    device, calls = Device(), count()
    assert timed(
        device, lambda: device.launch(5e-6, 1.0 if next(calls) % 4 == 0 else 30e-6)
    ) == pytest.approx(30e-6)


def test_a_call_that_nothing_hides_is_timed_all_the_same():
    device = Device()

    def work():
        device.launch(1.0, 20e-6)
        device.launch(1.0, 20e-6)

    assert 1.0 <= timed(device, work) <= 2.1
