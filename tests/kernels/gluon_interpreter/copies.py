"""Copies of boxes between global and shared memory (TMA): asked for now, done some time later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tests.kernels.gluon_interpreter.machine import Copy
from tests.kernels.gluon_interpreter.shared_memory import View
from tests.kernels.gluon_interpreter.values import (
    GLUON_DTYPES,
    GluonFaultError,
    Memory,
    integer,
    truth,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tests.kernels.gluon_interpreter.language import Language


@dataclass(frozen=True)
class BlockType:
    """A box."""

    element_ty: object
    shape: list[int]
    nbytes: int


@dataclass(frozen=True)
class Descriptor:
    """A tensor in global memory, and the boxes it is copied in."""

    memory: Memory
    shape: list[int]
    strides: list[int]
    block_type: BlockType
    layout: object

    @classmethod
    def of(cls, name: str, given: TensorDescriptor) -> Descriptor:
        """Take a descriptor as the hardware does.

        Raises:
            GluonFaultError: It has no such boxes.
        """
        memory = Memory.of(name, given.base)
        box = list(given.block_shape)
        size = given.base.element_size()
        extent = 1 + sum((n - 1) * s for n, s in zip(given.shape, given.strides, strict=True))
        if extent > memory.high - memory.low:
            raise GluonFaultError(f"{name} describes {extent} elements of {memory.high}")
        if box[-1] * size % 16 or any(x > 256 for x in box[:-1]):
            raise GluonFaultError(f"{name}: boxes of {box} x {size} bytes")
        if given.padding != "zero":
            raise GluonFaultError(f"{name}: padding with {given.padding} is not known here")
        numel = 1
        for x in box:
            numel *= x
        block = BlockType(GLUON_DTYPES[given.base.dtype], box, numel * size)
        return cls(memory, list(given.shape), list(given.strides), block, given.layout)

    @property
    def dtype(self) -> object:
        return self.block_type.element_ty

    @property
    def block_shape(self) -> list[int]:
        return self.block_type.shape

    def places(self, at: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of a box in the flat memory, and which of them exist."""
        rank = len(at)
        places = torch.full([1] * rank, self.memory.low)
        exists = torch.ones([1] * rank, dtype=torch.bool)
        for dim, (start, size) in enumerate(zip(at, self.block_shape, strict=True)):
            along = torch.arange(start, start + size)
            along = along.reshape([-1 if dim == other else 1 for other in range(rank)])
            places = places + along * self.strides[dim]
            exists = exists & (along >= 0) & (along < self.shape[dim])
        return places, exists

    def box(self, at: list[int]) -> torch.Tensor:
        """Return what lies in a box; what does not exist there is zero."""
        values = torch.zeros(self.block_shape, dtype=self.memory.flat.dtype)
        sizes, offset, inside = [], self.memory.low, values
        for dim, (start, size) in enumerate(zip(at, self.block_shape, strict=True)):
            first, end = max(start, 0), min(start + size, self.shape[dim])
            if end <= first:
                return values
            inside = inside.narrow(dim, first - start, end - first)
            sizes.append(end - first)
            offset += first * self.strides[dim]
        inside.copy_(self.memory.flat.as_strided(sizes, self.strides, offset))
        return values


class Mover:
    """`tma`."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def load(
        self,
        desc: Descriptor,
        coord: Sequence[object],
        barrier: View,
        result: View,
        pred: object = True,
    ) -> None:
        language = self._language
        counter = language._barrier(barrier)
        at = _checked(desc, coord, result)
        if not truth(pred):
            return
        language.machine.pause()
        language.touch(desc.memory.name, at[0])
        event = language.machine.event()
        words = language.words("a copy", result)
        allocation = result.allocation
        known = language.me.published
        allocation.changed(event, result.granules, known, words, by_store=False)
        result.poison()

        def perform() -> None:
            if language.memory.is_written(desc.memory):
                places, exists = desc.places(at)
                language.memory.check(desc.memory, places[exists], known, "a copy")
            result.poke(desc.box(at))
            counter.receive(desc.block_type.nbytes, known | 1 << event)
            counter.complete(language.machine.partitions)

        language.machine.copies.append(Copy(words, perform))

    def store(self, desc: Descriptor, coord: Sequence[object], src: View) -> None:
        language = self._language
        at = _checked(desc, coord, src)
        language.machine.pause()
        language.touch(desc.memory.name)
        words = language.words("a copy out", src)
        racing, why = src.allocation.unknown_to(
            src.granules, language.me.published, language.machine.fenced
        )
        if racing:
            raise GluonFaultError(f"race: {words}, and {why}")
        known, event = language.me.published, language.machine.event()
        language.read(src, "a copy out", event, is_done=False)

        def perform() -> None:
            places, exists = desc.places(at)
            language.memory.check(desc.memory, places[exists], known, "a copy out")
            desc.memory.flat[places[exists]] = src.peek()[exists]
            language.memory.write(desc.memory, places[exists], event)

        copy = Copy(words, perform)
        language.machine.copies.append(copy)
        language.me.stores.append((copy, event))

    def store_wait(self, pendings: object) -> None:
        language = self._language
        language.machine.pause()
        while len(language.me.stores) > integer(pendings):
            copy, event = language.me.stores.popleft()
            language.machine.finish_copies([copy])
            language.me.note(event)


def _checked(desc: object, coord: Sequence[object], view: object) -> list[int]:
    """Return where a box begins.

    Raises:
        GluonFaultError: The shared memory is not what the descriptor says.
    """
    if not isinstance(desc, Descriptor) or not isinstance(view, View):
        raise GluonFaultError(f"a copy between {desc!r} and {view!r}")
    if len(coord) != len(desc.shape):
        raise GluonFaultError(f"{len(coord)} coordinates for {desc.shape}")
    if view.shape != desc.block_shape or view.dtype != desc.dtype:
        raise GluonFaultError(
            f"{view.name} is {view.dtype} {view.shape}, boxes of {desc.memory.name} are "
            f"{desc.dtype} {desc.block_shape}"
        )
    if view.layout != desc.layout:
        raise GluonFaultError(f"{view.name} lies in {view.layout}, boxes in {desc.layout}")
    at = [integer(x) for x in coord]
    if any(not -(2**31) <= x < 2**31 for x in at):
        raise GluonFaultError(f"coordinates {at} beyond 32 bits")
    return at
