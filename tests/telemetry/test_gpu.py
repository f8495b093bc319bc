"""Readings of GPUs by a scripted NVML; by the real one where there is a GPU."""

import sys
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from tailrace.telemetry.gpu import GpuReading, Gpus


class FakeNvml:
    """`pynvml` with two GPUs; `faults` maps a function, or a function and index, to its error."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818 -- pynvml's name
        pass

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818 -- pynvml's name
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818 -- pynvml's name
        pass

    class NVMLError_GpuIsLost(NVMLError):  # noqa: N801, N818 -- pynvml's name
        pass

    class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801, N818 -- pynvml's name
        pass

    def __init__(self):
        self.faults = {}

    def _check(self, *call):
        for key in (call, call[0]):
            if key in self.faults:
                raise self.faults[key]("the driver said no")

    def nvmlInit(self):  # noqa: N802 -- pynvml's name
        self._check("init")

    def nvmlDeviceGetCount(self):  # noqa: N802 -- pynvml's name
        self._check("count")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802 -- pynvml's name
        self._check("handle", index)
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802 -- pynvml's name
        self._check("uuid", handle)
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle):  # noqa: N802 -- pynvml's name
        self._check("name", handle)
        return f"Model {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802 -- pynvml's name
        self._check("rates", handle)
        return SimpleNamespace(gpu=25 * handle + 50, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802 -- pynvml's name
        self._check("memory", handle)
        return SimpleNamespace(used=1000 + handle, total=8000, free=0)

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802 -- pynvml's name
        self._check("power", handle)
        return 70_500 + handle * 1000

    NVML_CLOCK_SM = 1

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802 -- pynvml's name
        self._check("reasons", handle)
        return [0x1 | 0x100, 0x4][handle]  # idle, and a display's clock; the power cap

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802 -- pynvml's name
        self._check("old reasons", handle)
        return [0x20, 0x2][handle]  # heat; clocks that somebody has set

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802 -- pynvml's name
        assert kind == self.NVML_CLOCK_SM
        self._check("clock", handle)
        return 1500 + handle

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802 -- pynvml's name
        self._check("processes", handle)
        return [SimpleNamespace(pid=100 + handle), SimpleNamespace(pid=200 + handle)]


@pytest.fixture
def nvml():
    return FakeNvml()


FIRST = GpuReading(0, "GPU-0", 0.5, 1000, 8000, 70.5, 1500.0, is_held_back=False)
SECOND = GpuReading(1, "GPU-1", 0.75, 1001, 8000, 71.5, 1501.0, is_held_back=True)


def test_every_gpu_is_read(nvml):
    assert Gpus.open(nvml).read() == [FIRST, SECOND]


def test_an_older_driver_says_by_another_name_what_holds_clocks_back(nvml):
    nvml.faults["reasons"] = nvml.NVMLError_FunctionNotFound
    with capture_logs() as logs:
        assert [gpu.is_held_back for gpu in Gpus.open(nvml).read()] == [True, False]
    assert logs == []


def test_each_gpus_processes_are_told_where_the_driver_tells_them(nvml):
    assert Gpus.open(nvml).processes() == {0: {100, 200}, 1: {101, 201}}
    nvml.faults["processes", 0] = nvml.NVMLError_NotSupported
    assert Gpus.open(nvml).processes() == {1: {101, 201}}
    assert Gpus().processes() == {}


@pytest.mark.parametrize("missing", ["NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"])
def test_a_machine_without_a_driver_has_no_readings_and_no_warning(nvml, missing):
    nvml.faults["init"] = getattr(nvml, missing)
    with capture_logs() as logs:
        assert Gpus.open(nvml).read() == []
    assert logs == []


def test_a_driver_that_fails_at_the_start_is_warned_of(nvml):
    nvml.faults["init"] = nvml.NVMLError
    with capture_logs() as logs:
        assert Gpus.open(nvml).read() == []
    assert [log["error"] for log in logs] == ["the driver said no"]


def test_without_the_package_there_are_no_readings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus.find().read() == []


def test_what_a_gpu_does_not_tell_is_left_out_without_a_warning(nvml):
    nvml.faults["rates"] = nvml.NVMLError_NotSupported
    nvml.faults["memory", 1] = nvml.NVMLError_NotSupported
    nvml.faults["power", 1] = nvml.NVMLError_NotSupported
    nvml.faults["clock", 1] = nvml.NVMLError_NotSupported
    nvml.faults["reasons", 1] = nvml.NVMLError_NotSupported
    with capture_logs() as logs:
        readings = Gpus.open(nvml).read()
    assert readings == [
        GpuReading(0, "GPU-0", None, 1000, 8000, 70.5, 1500.0, is_held_back=False),
        GpuReading(1, "GPU-1", None, None, None, None, None, None),
    ]
    assert logs == []


@pytest.mark.parametrize("call", ["handle", "uuid"])
def test_a_lost_gpu_leaves_the_others_and_is_warned_of_once(nvml, call):
    nvml.faults[call, 0] = nvml.NVMLError_GpuIsLost
    gpus = Gpus.open(nvml)
    with capture_logs() as logs:
        assert gpus.read() == gpus.read() == [SECOND]
    assert [log["event"] for log in logs] == ["gpu_reading_failed"]


def test_a_gpu_that_is_lost_between_two_questions_keeps_what_it_said(nvml):
    nvml.faults["memory", 0] = nvml.NVMLError_GpuIsLost
    with capture_logs() as logs:
        first = GpuReading(0, "GPU-0", 0.5, None, None, 70.5, 1500.0, is_held_back=False)
        assert Gpus.open(nvml).read() == [first, SECOND]
    assert [log["event"] for log in logs] == ["gpu_reading_failed"]


def test_a_driver_that_goes_away_ends_the_readings_not_the_server(nvml):
    gpus = Gpus.open(nvml)
    nvml.faults["count"] = nvml.NVMLError
    assert gpus.read() == []


@pytest.mark.gpu
def test_a_real_gpu_is_read():
    gpus = Gpus.find()
    readings = gpus.read()
    if not readings:
        pytest.skip("no NVIDIA GPU, or no nvidia-ml-py, on this machine")
    assert len({reading.uuid for reading in readings}) == len(readings)
    for reading in readings:
        assert reading.uuid.startswith("GPU-")
        assert reading.busy_share is None or 0 <= reading.busy_share <= 1
        assert 0 < reading.memory_used_bytes <= reading.memory_total_bytes


def test_names_are_those_of_the_gpus_that_answer():
    nvml = FakeNvml()
    assert Gpus.open(nvml).names() == ["Model 0", "Model 1"]
    nvml.faults = {("handle", 0): FakeNvml.NVMLError_GpuIsLost}
    with capture_logs():
        assert Gpus.open(nvml).names() == ["Model 1"]
    nvml.faults = {("name", 1): FakeNvml.NVMLError_NotSupported}
    assert Gpus.open(nvml).names() == ["Model 0", "GPU of unknown name"]
    assert Gpus().names() == []
