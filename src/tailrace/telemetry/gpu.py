"""What NVML says of this machine's GPUs, whoever uses them; nothing where it says nothing.

A machine without an NVIDIA driver, or without the package `nvidia-ml-py` (the extra `gpu`), has no
readings, which is no error. A driver that is there and fails is worth a warning, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger("tailrace.gpu")

_HELD_BACK = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
"""Of NVML's reasons for low clocks: power cap, hardware slowdown, heat by software and by hardware,
power brake. Others are an idle board, or clocks that somebody has set."""


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; None: the driver does not tell (as of the parts of a split GPU).

    Attributes:
        index: As the driver counts, which CUDA_VISIBLE_DEVICES does not change.
        uuid: Stays the same when the order changes.
        busy_share: Share of the driver's last sample, about a second, in which any kernel ran.
        memory_used_bytes: Of all processes, and what the driver keeps for itself.
        memory_total_bytes: Of the board.
        power_w: Drawn by the board.
        sm_clock_mhz: Of the multiprocessors: what a board at its power limit lowers.
        is_held_back: Whether power or heat kept its clocks below what they would have been.
    """

    index: int
    uuid: str
    busy_share: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    is_held_back: bool | None = None


class Gpus:
    """The GPUs of this machine, by an open NVML.

    Args:
        nvml: The module `pynvml`, initialised; None reads nothing.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._has_warned = False

    @classmethod
    def find(cls) -> Self:
        """Open NVML where there is one."""
        try:
            import pynvml  # noqa: PLC0415 -- an extra, and slow to import where it is of no use
        except ImportError:
            return cls()
        return cls.open(pynvml)

    @classmethod
    def open(cls, nvml: Any) -> Self:
        """Initialise a `pynvml`."""
        try:
            nvml.nvmlInit()
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
            return cls()  # no NVIDIA driver: a machine without such a GPU
        except nvml.NVMLError as error:
            log.warning("no_gpu_readings", error=str(error))
            return cls()
        return cls(nvml)

    def read(self) -> list[GpuReading]:
        """Return a reading of each GPU that answers."""
        if self._nvml is None:
            return []
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            self._warn(error)
            return []
        readings = (self._read_one(index) for index in range(count))
        return [reading for reading in readings if reading is not None]

    def names(self) -> list[str]:
        """Return the product name of each GPU that answers."""
        if self._nvml is None:
            return []
        nvml = self._nvml
        found = []
        for reading in self.read():
            handle = nvml.nvmlDeviceGetHandleByIndex(reading.index)
            name = self._ask(nvml.nvmlDeviceGetName, handle)
            found.append("GPU of unknown name" if name is None else str(name))
        return found

    def processes(self) -> dict[int, frozenset[int]]:
        """Return, by GPU, the processes that compute on it; GPUs that do not answer are left out.

        Their numbers are the driver's: in a container not those of the container.
        """
        if self._nvml is None:
            return {}
        nvml = self._nvml
        found = {}
        for reading in self.read():
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, reading.index)
            if handle is None:
                continue
            listed = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
            if listed is not None:
                found[reading.index] = frozenset(process.pid for process in listed)
        return found

    def _read_one(self, index: int) -> GpuReading | None:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:  # it fell off the bus; the others may be well
            self._warn(error)
            return None
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        clock_mhz = self._ask(self._sm_clock, handle)
        reasons = self._ask(self._clock_reasons, handle)
        return GpuReading(
            index=index,
            uuid=uuid,
            busy_share=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_w=None if power_mw is None else power_mw / 1000,
            sm_clock_mhz=None if clock_mhz is None else float(clock_mhz),
            is_held_back=None if reasons is None else bool(reasons & _HELD_BACK),
        )

    def _clock_reasons(self, handle: Any) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except nvml.NVMLError_FunctionNotFound:  # drivers before 535 have its old name alone
            return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    def _sm_clock(self, handle: Any) -> Any:
        return self._nvml.nvmlDeviceGetClockInfo(handle, self._nvml.NVML_CLOCK_SM)

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return question(handle)
        except self._nvml.NVMLError_NotSupported:
            return None
        except self._nvml.NVMLError as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            log.warning("gpu_reading_failed", error=str(error))
        self._has_warned = True
