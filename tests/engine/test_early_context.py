"""The driver is asked in order, and whatever fails is left to torch."""

from __future__ import annotations

import ctypes

import pytest

from tailrace.engine.early_context import open_context


class Driver:
    """Writes down its calls; one of them fails."""

    def __init__(self, failing=""):
        self.calls = []
        self.failing = failing

    def _called(self, name, *given):
        self.calls.append((name, *given))
        return 100 if name == self.failing else 0

    def cuInit(self, flags):  # noqa: N802 - the driver's name
        return self._called("init", flags)

    def cuDeviceGet(self, device, index):  # noqa: N802 - as above
        device._obj.value = 40 + index
        return self._called("device", index)

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802 - as above
        assert isinstance(context._obj, ctypes.c_void_p)
        return self._called("context", device.value)


@pytest.mark.parametrize(
    ("failing", "calls"),
    [
        ("", ["init", "device", "context"]),
        ("context", ["init", "device", "context"]),
        ("device", ["init", "device"]),
        ("init", ["init"]),
    ],
)
def test_each_call_needs_the_one_before(monkeypatch, failing, calls):
    driver = Driver(failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert open_context(2) is (not failing)
    assert [name for name, *_ in driver.calls] == calls
    if not failing:
        assert driver.calls[-1] == ("context", 42)


def test_a_machine_without_a_driver_is_no_fault():
    assert not open_context(0, "libcuda-that-is-not-there.so.1")
