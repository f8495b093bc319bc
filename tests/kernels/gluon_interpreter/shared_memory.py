"""Shared memory: where each element lies, who wrote and read it last, and who knows.

A view is a tensor of byte addresses, so a swizzled ring that is written as one layout and read as
another gives what the hardware would.

Every access is an event, a number. What happened before a point is a set of events, a whole number
with a bit for each: partitions and barriers hand such sets on. An access that conflicts with one
that its partition does not know of is a race, in whatever order the two happened to run. A product
reads from when it is queued until it is waited for; a copy writes from when it is asked for until
its barrier is waited for.

    copy, changing store   must know all reads and writes of the bytes
    load, product          must know the last write of the bytes; one by a store must be fenced
                           before a product reads it
    store of the same      touches nobody: bytes stay what they are, and who knows of this store
    bytes as are there     knows what the bytes are
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from tests.kernels.gluon_interpreter.values import (
    GLUON_DTYPES,
    ArrayType,
    GluonFaultError,
    integer,
    torch_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kernels.gluon_interpreter.language import Language

_GRANULE = 16
"""Bytes that are accounted for together."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _swizzled(offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Return byte offsets with the 16-byte pieces of rows exchanged, as the hardware does."""
    phases = {32: 1, 64: 3, 128: 7}[width]
    return offsets ^ (((offsets >> 7) & phases) << 4)


def _nvmma_addresses(shape: Sequence[int], layout: gl.NVMMASharedLayout, size: int) -> torch.Tensor:
    """Return byte offsets: tiles of the swizzle's width, each of all rows, one after the other."""
    if layout.transposed or layout.fp4_padded:
        raise GluonFaultError(f"{layout} is not known here")
    if layout.element_bitwidth != size * 8:
        raise GluonFaultError(f"{layout} holds elements of {size} bytes")
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    width = layout.swizzle_byte_width
    if width == 0:
        if rows != 1:
            raise GluonFaultError(f"{layout} of {rows} rows is not known here")
        return (torch.arange(columns) * size).reshape(list(shape))
    if columns * size % width or rows % 8:
        raise GluonFaultError(f"{layout} does not swizzle {list(shape)}")
    row = torch.arange(rows)[:, None]
    byte = torch.arange(columns)[None, :] * size
    offsets = byte // width * (rows * width) + row * width + byte % width
    return _swizzled(offsets, width).reshape(list(shape))


def _plain_addresses(
    shape: Sequence[int], layout: gl.SwizzledSharedLayout, size: int
) -> torch.Tensor:
    """Return byte offsets of a layout without a swizzle, its fastest dimension first in `order`."""
    if layout.max_phase != 1:
        raise GluonFaultError(f"{layout} is not known here: it swizzles")
    strides = [0] * len(shape)
    step = size
    for dim in layout.order:
        strides[dim] = step
        step *= shape[dim]
    total = torch.zeros(list(shape), dtype=torch.int64)
    for dim, stride in enumerate(strides):
        sizes = [-1 if other == dim else 1 for other in range(len(shape))]
        total = total + (torch.arange(shape[dim]) * stride).reshape(sizes)
    return total


def _linear_addresses(
    shape: Sequence[int], layout: gl.SharedLinearLayout, size: int
) -> torch.Tensor:
    """Return byte offsets of a layout that names, for each bit of an offset, what it moves to."""
    places = torch.zeros(1, len(shape), dtype=torch.int64)
    for basis in layout.offset_bases:
        places = torch.cat([places, places ^ torch.tensor(basis)])
    if len(places) != math.prod(shape):
        raise GluonFaultError(f"{layout} is of {len(places)} elements, not of {list(shape)}")
    offsets = torch.full(list(shape), -1)
    offsets[tuple(places.t())] = torch.arange(len(places)) * size
    return offsets


@lru_cache(maxsize=64)
def _addresses(shape: tuple[int, ...], layout: object, size: int) -> torch.Tensor:
    """Return the byte offset of each element; a dimension more than the layout's is a ring's."""
    if isinstance(layout, gl.NVMMASharedLayout):
        rank, within = layout.rank, _nvmma_addresses
        period = {0: 16, 32: 256, 64: 512, 128: 1024}[layout.swizzle_byte_width]
    elif isinstance(layout, gl.SwizzledSharedLayout):
        rank, within = len(layout.order), _plain_addresses
        period = 1
    elif isinstance(layout, gl.SharedLinearLayout):
        rank, within = len(layout.offset_bases[0]), _linear_addresses
        period = layout.alignment
    else:
        raise GluonFaultError(f"{layout} is not known here")
    if len(shape) == rank:
        return within(shape, layout, size)
    if len(shape) != rank + 1:
        raise GluonFaultError(f"{layout} of a tensor {list(shape)}")
    one = within(shape[1:], layout, size)
    nbytes = one.numel() * size
    if nbytes % period:
        raise GluonFaultError(f"slots of {nbytes} bytes are out of step with {layout}")
    return torch.arange(shape[0]).reshape(-1, *[1] * rank) * nbytes + one


@dataclass
class Access:
    """Some bytes that were read or written, and the events that did so."""

    granules: int
    events: list[int]
    words: str
    by_store: list[int] = field(default_factory=list)
    """Of the events, those that the asynchronous side sees only after a fence."""
    is_undefined: bool = False
    """A read that takes what others may be storing, and throws it away."""


@dataclass(eq=False)
class Allocation:
    """Bytes of shared memory, poisoned at first."""

    machine: Language
    name: str
    nbytes: int
    raw: torch.Tensor = field(init=False)
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.raw = torch.full((-(-self.nbytes // 16) * 16,), 0xFF, dtype=torch.uint8)

    def mask(self, addresses: torch.Tensor) -> int:
        """Return the granules of addresses, a bit for each."""
        touched = np.zeros(len(self.raw) // _GRANULE, dtype=bool)
        touched[addresses.numpy() // _GRANULE] = True
        return int.from_bytes(np.packbits(touched, bitorder="little").tobytes(), "little")

    def changed(self, event: int, mask: int, known: int, words: str, *, by_store: bool) -> None:
        """Account for a write that changes bytes.

        Raises:
            GluonFaultError: Somebody uses or writes them who is not known to be done.
        """
        for earlier in (*self.reads, *self.writes):
            if not earlier.granules & mask or (by_store and earlier.is_undefined):
                continue
            unknown = [x for x in earlier.events if not known >> x & 1]
            if unknown:
                raise GluonFaultError(
                    f"race in {self.name}: {words} while {earlier.words} is not known to be done"
                )
        self.reads = _without(self.reads, mask)
        self.writes = _without(self.writes, mask)
        self.writes.append(Access(mask, [event], words, [event] if by_store else []))

    def repeated(self, event: int, mask: int, words: str) -> None:
        """Account for a store of the bytes that are there already."""
        writes = []
        for write in self.writes:
            common = write.granules & mask
            if common:
                events, by_store = [*write.events, event], [*write.by_store, event]
                writes.append(Access(common, events, f"{write.words} or {words}", by_store))
            writes += _without([write], mask)
        self.writes = writes

    def unknown_to(self, mask: int, known: int, fenced: int | None) -> tuple[int, str]:
        """Return the granules whose last write a reader does not know, and what wrote them.

        Args:
            mask: Granules read.
            known: Events that happened before.
            fenced: Stores that the asynchronous side sees; None for a plain load.
        """
        never = mask
        racing, words = 0, ""
        for write in self.writes:
            common = write.granules & mask
            never &= ~write.granules
            if not common:
                continue
            seen = [x for x in write.events if known >> x & 1]
            if fenced is not None and seen:
                seen = [x for x in seen if x not in write.by_store or fenced >> x & 1]
                reason = f"{write.words}, with no fence_async_shared since"
            else:
                reason = f"{write.words} is not known to be done"
            if not seen:
                racing, words = racing | common, reason
        if never:
            racing, words = racing | never, "nobody has written it"
        return racing, words


def _without(accesses: list[Access], mask: int) -> list[Access]:
    """Return the parts of accesses outside some granules."""
    kept = []
    for access in accesses:
        left = access.granules & ~mask
        if left == access.granules:
            kept.append(access)
        elif left:
            kept.append(replace(access, granules=left))
    return kept


class View:
    """A memory descriptor: some elements of an allocation."""

    def __init__(
        self,
        allocation: Allocation,
        dtype: torch.dtype,
        addresses: torch.Tensor,
        layout: object,
        name: str,
        *,
        is_whole: bool = False,
    ) -> None:
        self.allocation, self.addresses, self.layout = allocation, addresses, layout
        self.torch_dtype, self.name, self._is_whole = dtype, name, is_whole
        self._known: dict[object, View] = {}

    @cached_property
    def shape(self) -> list[int]:
        return list(self.addresses.shape)

    @property
    def rank(self) -> int:
        return self.addresses.ndim

    @property
    def dtype(self) -> object:
        return GLUON_DTYPES[self.torch_dtype]

    @property
    def type(self) -> ArrayType:
        return ArrayType(self.dtype, self.shape, self.layout)

    @cached_property
    def granules(self) -> int:
        return self.allocation.mask(self.addresses)

    @cached_property
    def _bits(self) -> torch.Tensor:
        """The allocation's bytes, as numbers of an element's size."""
        return self.allocation.raw.view(_BITS[self.torch_dtype.itemsize])

    @cached_property
    def _slots(self) -> torch.Tensor:
        """The addresses in a row, counted in elements."""
        return (self.addresses // self.torch_dtype.itemsize).reshape(-1)

    def _part(self, key: object, addresses: torch.Tensor, name: str) -> View:
        if key not in self._known:
            self._known[key] = View(self.allocation, self.torch_dtype, addresses, self.layout, name)
        return self._known[key]

    def index(self, index: object) -> View:
        at = integer(index)
        if not 0 <= at < self.shape[0]:
            raise GluonFaultError(f"{self.name}[{at}]: there are {self.shape[0]}")
        return self._part(("index", at), self.addresses[at], f"{self.name}[{at}]")

    def slice(self, start: object, length: object, dim: object = 0) -> View:
        first, size, along = integer(start), integer(length), integer(dim)
        if not 0 <= first <= first + size <= self.shape[along]:
            raise GluonFaultError(f"{self.name}: {first} + {size} of {self.shape[along]}")
        part = self.addresses.narrow(along, first, size)
        name = f"{self.name}[{':, ' * along}{first}:{first + size}]"
        return self._part(("slice", first, size, along), part, name)

    def permute(self, order: Sequence[object]) -> View:
        dims = tuple(integer(x) for x in order)
        return self._part(("permute", dims), self.addresses.permute(dims), self.name)

    def reshape(self, shape: Sequence[object]) -> View:
        sizes = tuple(integer(x) for x in shape)
        return self._part(("reshape", sizes), self.addresses.reshape(sizes), self.name)

    def _reinterpret(self, dtype: object, shape: Sequence[object], layout: object) -> View:
        if not self._is_whole:
            raise GluonFaultError(f"{self.name}: only a whole allocation is taken for another")
        wanted = torch_dtype(dtype)
        key = (wanted, tuple(integer(x) for x in shape), layout)
        if key not in self._known:
            addresses = _addresses(key[1], layout, wanted.itemsize)
            if addresses.numel() * wanted.itemsize > self.allocation.nbytes:
                raise GluonFaultError(f"{self.name} is smaller than {shape} of {wanted}")
            self._known[key] = View(
                self.allocation, wanted, addresses, layout, self.name, is_whole=True
            )
        return self._known[key]

    def peek(self) -> torch.Tensor:
        """Return what lies there now, whoever may know."""
        bits = self._bits.index_select(0, self._slots)
        return bits.view(self.torch_dtype).reshape(self.addresses.shape)

    def poke(self, values: torch.Tensor) -> None:
        """Put values there, whoever may be reading."""
        bits = values.contiguous().view(self._bits.dtype)
        self._bits.index_copy_(0, self._slots, bits.reshape(-1))

    def poison(self) -> None:
        """Put there what nobody wrote: every bit is 1."""
        ones = 0xFF if self._bits.dtype == torch.uint8 else -1
        self._bits.index_fill_(0, self._slots, ones)

    def load(self, layout: object) -> object:
        return self.allocation.machine.shared_load(self, layout)

    def store(self, value: object) -> None:
        self.allocation.machine.shared_store(self, value)

    def _keep_alive(self) -> None:
        pass


def allocate(
    machine: Language, name: str, dtype: torch.dtype, shape: Sequence[int], layout: object
) -> View:
    """Return new shared memory."""
    addresses = _addresses(tuple(shape), layout, dtype.itemsize)
    allocation = Allocation(machine, name, addresses.numel() * dtype.itemsize)
    return View(allocation, dtype, addresses, layout, name, is_whole=True)
