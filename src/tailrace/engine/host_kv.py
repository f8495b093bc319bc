"""The host memory that holds the KV of preempted sequences, and the copies to it and back.

A place holds one unit of all layers in one piece:

    host      [places, layers x (K, V), words of a unit]        pinned where a GPU copies
    staging   the same for a few units, on the device: gathered there, then copied run by run

Copies are queued on the runner's stream between two steps, so they need no events of their own: the
step before has written what goes out, and the step after reads what came in.
"""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailrace.engine.host_units import KvCopy
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

STAGING_BYTES = 64 << 20
"""Most of the device's memory that copies take."""
_MEASUREMENTS = 3


@dataclass(frozen=True)
class CopyCosts:
    """What it takes to copy units one way: in parts, of which each costs something by itself.

    Two kernels gather, or scatter, a layer's keys and values, of however few units: on a GPU most
    of what a few units take.
    """

    part_s: float
    unit_s: float
    part_units: int
    """Most units of one part."""

    def seconds(self, units: int) -> float:
        """Return what so many units take."""
        return -(-units // self.part_units) * self.part_s + units * self.unit_s


class HostKv:
    """Host memory for KV.

    Args:
        kv_caches: The pool: a (K, V) pair a layer, the unit's index first.
        num_places: Units that the host holds; at least 1.

    Raises:
        ConfigError: The host does not give the memory.
    """

    def __init__(
        self, kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]], num_places: int
    ) -> None:
        self._rows = [_as_stored(cache) for pair in kv_caches for cache in pair]
        first = self._rows[0]
        self.device = first.device
        self.unit_bytes = len(self._rows) * first.shape[1] * first.element_size()
        shape = (num_places, len(self._rows), first.shape[1])
        is_gpu = self.device.type == "cuda"
        try:
            self._host = torch.empty(shape, dtype=first.dtype)
            if is_gpu:
                _pin(self._host)
        except RuntimeError as error:
            raise ConfigError(
                f"--cpu-offload-gib: the host does not give {num_places * self.unit_bytes} bytes "
                f"({error}); lower it"
            ) from error
        staged = max(1, min(num_places, first.shape[0], STAGING_BYTES // self.unit_bytes))
        self._staging = torch.empty((staged, *shape[1:]), dtype=first.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Of host memory."""
        return self._host.nbytes

    def run(self, out: Iterable[KvCopy], back: Iterable[KvCopy]) -> None:
        """Queue a step's copies: to the host first, then back to the pool."""
        for staged, units, places in self._parts(out):
            for layer, rows in enumerate(self._rows):
                staged[:, layer].copy_(rows.index_select(0, units))
            for low, high, place in runs(places):
                self._host[place : place + high - low].copy_(staged[low:high], non_blocking=True)
        for staged, units, places in self._parts(back):
            for low, high, place in runs(places):
                staged[low:high].copy_(self._host[place : place + high - low], non_blocking=True)
            for layer, rows in enumerate(self._rows):
                rows.index_copy_(0, units, staged[:, layer])

    def measure(self) -> CopyCosts:
        """Return what copies take, by the smallest and the largest part, the quickest of a few.

        Leaves the pool as it was; not while anybody is served.
        """
        most = len(self._staging)
        one_s, most_s = self._one_way_s(1), self._one_way_s(most)
        unit_s = max(0.0, most_s - one_s) / max(1, most - 1)
        return CopyCosts(part_s=max(0.0, one_s - unit_s), unit_s=unit_s, part_units=most)

    def _one_way_s(self, count: int) -> float:
        """Return what so many units take one way."""
        copies = [KvCopy(list(range(count)), list(range(count)))]
        taken_s = math.inf
        for _ in range(_MEASUREMENTS):
            started_s = time.perf_counter()
            self.run(copies, copies)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            taken_s = min(taken_s, time.perf_counter() - started_s)
        return taken_s / 2

    def _parts(
        self, copies: Iterable[KvCopy]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """Cut copies to what the staging memory holds; yield it, with units and places."""
        most = len(self._staging)
        for copy in copies:
            for low in range(0, len(copy.units), most):
                units = torch.tensor(copy.units[low : low + most])
                if self.device.type == "cuda":  # from pageable memory, it would wait for the device
                    units = units.pin_memory().to(self.device, non_blocking=True)
                yield self._staging[: len(units)], units, copy.places[low : low + most]


def runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (from, to, first place) of the stretches of `places` that count up by one."""
    low = 0
    for high in range(1, len(places) + 1):
        if high == len(places) or places[high] != places[high - 1] + 1:
            yield low, high, places[low]
            low = high


def _pin(host: torch.Tensor) -> None:
    """Lock memory for the device's copies, for as long as the tensor lives.

    `pin_memory=True` would lock up to twice as much: torch's allocator rounds to a power of two.

    Raises:
        RuntimeError: The driver does not lock it.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = host.data_ptr()
    status = int(cudart.cudaHostRegister(address, host.nbytes, 0))
    if status:
        raise RuntimeError(f"cudaHostRegister answers {status}")
    weakref.finalize(host, cudart.cudaHostUnregister, address)


def _as_stored(cache: torch.Tensor) -> torch.Tensor:
    """Return the view [units, words] of a cache whose units lie in one piece each.

    Words of 8 bytes, whatever the dtype: gathering needs no arithmetic, which float8 has not.
    """
    order = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
    return cache.permute(0, *order).view(cache.shape[0], -1).view(torch.int64)
