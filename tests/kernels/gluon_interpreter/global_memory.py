"""Global memory during one launch: who wrote an element, and who knows, over all programs.

Programs run one after the other here and side by side on a GPU. So one that reads what another has
stored must have met it at an atomic: what is known is handed on there, as at a barrier.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tests.kernels.gluon_interpreter.values import GluonFaultError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kernels.gluon_interpreter.values import Memory

RELEASES, ACQUIRES = ("acq_rel", "release"), ("acq_rel", "acquire")


@dataclass(eq=False)
class GlobalMemory:
    """What all programs of a launch share."""

    events: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of events, of shared memory too."""
    _writers: dict[int, torch.Tensor] = field(default_factory=dict)
    """By a tensor's address: the event that wrote each element in this launch, or -1."""
    _met: dict[tuple[int, int], int] = field(default_factory=dict)
    """By an atomic's place: what those who came knew."""

    def _of(self, memory: Memory) -> torch.Tensor:
        place = memory.flat.data_ptr()
        if place not in self._writers:
            self._writers[place] = torch.full((memory.flat.numel(),), -1)
        return self._writers[place]

    def is_written(self, memory: Memory) -> bool:
        """Whether a tensor was stored to in this launch."""
        return memory.flat.data_ptr() in self._writers

    def check(self, memory: Memory, places: torch.Tensor, known: int, words: str) -> None:
        """Refuse to touch elements whose last write is not known to be done."""
        if not self.is_written(memory):
            return
        writers = self._of(memory)[places].reshape(-1)
        for event in torch.unique(writers[writers >= 0]).tolist():
            if not known >> event & 1:
                place = int(places.reshape(-1)[writers == event][0]) - memory.low
                raise GluonFaultError(
                    f"race: {words} of {memory.name}[{place}], whose last store is not known to "
                    "be done"
                )

    def write(self, memory: Memory, places: torch.Tensor, event: int) -> None:
        """Account for a store."""
        self._of(memory)[places] = event

    def meet(self, memory: Memory, place: int, published: int, semantics: str) -> int:
        """Return what those knew who came to an atomic before, and leave what is published."""
        key = memory.flat.data_ptr(), place
        met = self._met.get(key, 0)
        if semantics in RELEASES:
            self._met[key] = met | published
        return met if semantics in ACQUIRES else 0
