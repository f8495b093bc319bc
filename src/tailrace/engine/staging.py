"""A step's index arrays on their way to the device: one pinned buffer, one copy.

    pinned    [ids....|positions....|kv_lens..|tables............]      a ring of them: a copy may
    device    [ids....|positions....|kv_lens..|tables............]      still read the last one

Arrays start at multiples of 64 bytes, so that kernels specialised for aligned pointers serve every
step, and equal shapes give equal addresses, so that a captured graph finds its inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailrace.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

_ALIGN = 16  # int32 words
RING = 3
"""Steps whose arrays exist at once: one being prepared, one queued, one running."""


@dataclass(frozen=True)
class Packed:
    """Arrays in the pinned buffer `slot`."""

    slot: int
    words: int
    places: dict[str, tuple[int, tuple[int, ...]]]
    """Offset in words, and shape."""


class Staging:
    """Packs int32 arrays on the host and sends them.

    Args:
        words: Capacity of one step, in int32 words.
        device: Where they go.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.empty(RING, words, dtype=torch.int32, pin_memory=pinned)
        self._arrays = self._host.numpy()
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._words = words
        self._next = 0

    def pack(self, arrays: Mapping[str, np.ndarray]) -> Packed:
        """Copy arrays into the next pinned buffer.

        Raises:
            EngineError: They do not fit.
        """
        slot, self._next = self._next, (self._next + 1) % RING
        places: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for name, array in arrays.items():
            end = offset + array.size
            if end > self._words:
                raise EngineError(f"a step's arrays exceed the staging buffer of {self._words}")
            self._arrays[slot, offset:end] = array.reshape(-1)
            places[name] = (offset, array.shape)
            offset = -(-end // _ALIGN) * _ALIGN
        return Packed(slot, offset, places)

    def send(self, packed: Packed) -> dict[str, torch.Tensor]:
        """Queue the copy and return the arrays' views on the device."""
        words = min(packed.words, self._words)
        self._device[:words].copy_(self._host[packed.slot, :words], non_blocking=True)
        return self.views(packed)

    def views(self, packed: Packed) -> dict[str, torch.Tensor]:
        """Return the views without sending anything."""
        return {
            name: self._device[offset : offset + math.prod(shape)].view(shape)
            for name, (offset, shape) in packed.places.items()
        }
