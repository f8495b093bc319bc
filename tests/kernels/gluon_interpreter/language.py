"""Gluon's builtins as kernels call them: each does on the CPU what it means, on one machine."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tests.kernels.gluon_interpreter import assembly, copies, products, registers
from tests.kernels.gluon_interpreter.machine import (
    Barrier,
    Machine,
    Partition,
    awaited,
    kernel_frame,
    kernel_function,
)
from tests.kernels.gluon_interpreter.shared_memory import Access, View, allocate
from tests.kernels.gluon_interpreter.values import (
    Array,
    GluonFaultError,
    Pointer,
    array,
    converted,
    integer,
    joint_layout,
    plain,
    poison,
    torch_dtype,
    truth,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from tests.kernels.gluon_interpreter.global_memory import GlobalMemory

_PASSED = (
    "int1", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32",
    "float64", "float8e4nv", "float8e5", "BlockedLayout", "SliceLayout", "DotOperandLayout",
    "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout", "AutoLayout",
)  # fmt: skip
"""Names of `gl` that mean here what they mean there."""


class Namespace(SimpleNamespace):
    """A module of builtins; one that is not known is an error when it is asked for."""

    def __getattr__(self, name: str) -> object:
        raise GluonFaultError(f"{self.__dict__.get('_name')}.{name} is not known here")


@dataclass(frozen=True)
class Where:
    """A program of the grid."""

    program: tuple[int, ...]
    grid: tuple[int, ...]


class Language:
    """The builtins, for one program.

    Args:
        machine: What it runs on.
        memory: Global memory's account, of all programs.
        where: Its place in the grid.
        undefined_reads: Functions of the kernel that may load what others are writing; such bytes
            are poison.
        late: Names of arguments that kernels before write, untouched before the wait for them; of a
            descriptor perhaps only boxes whose first coordinate is one of those.
        num_warps: Of the program before it is specialized.
    """

    def __init__(
        self,
        machine: Machine,
        memory: GlobalMemory,
        where: Where,
        undefined_reads: frozenset[str],
        late: Mapping[str, Collection[int] | None],
        num_warps: int,
    ) -> None:
        self.machine, self.memory, self.where = machine, memory, where
        self.undefined_reads, self.late = undefined_reads, late
        self.turned: int | None = None
        """The event of the wait for the kernel before."""
        machine.main.warps = num_warps
        self.gl = Namespace(
            _name="gl",
            **{name: getattr(gl, name) for name in _PASSED},
            **{name: getattr(self, name) for name in _OWN},
            **registers.BUILTINS, constexpr=plain,
        )  # fmt: skip
        self.mbarrier = Namespace(
            _name="mbarrier", MBarrierLayout=mbarrier.MBarrierLayout, init=self.init,
            expect=self.expect, arrive=self.arrive, wait=self.wait, invalidate=self.invalidate,
        )  # fmt: skip
        mover = copies.Mover(self)
        self.tma = Namespace(
            _name="tma", async_copy_global_to_shared=mover.load,
            async_copy_shared_to_global=mover.store, store_wait=mover.store_wait,
        )  # fmt: skip
        multiplier = products.Multiplier(self)
        self.replaced: dict[int, object] = {
            id(gl): self.gl, id(mbarrier): self.mbarrier, id(tma): self.tma,
            id(products.THEIRS["warpgroup_mma"]): multiplier.multiply,
            id(products.THEIRS["warpgroup_mma_wait"]): multiplier.wait,
            id(products.THEIRS["fence_async_shared"]): self.fence_async_shared,
        }  # fmt: skip

    @property
    def me(self) -> Partition:
        return self.machine.current

    # ---- assembler

    def inline_asm_elementwise(
        self,
        asm: object,
        constraints: object,
        args: Sequence[object],
        dtype: object,
        is_pure: object,
        pack: object,
    ) -> object:
        text = str(plain(asm))
        if text.startswith("griddepcontrol.wait;"):
            self.turned = self.machine.event()
            self.me.known |= 1 << self.turned
        if text.startswith(("griddepcontrol.wait;", "griddepcontrol.launch_dependents;")):
            return array(0)
        meaning = assembly.MEANINGS.get(text)
        if meaning is None:
            raise GluonFaultError(f"this assembler's meaning is not known here: {text!r}")
        if (plain(constraints), plain(pack)) != meaning[:2]:
            raise GluonFaultError(f"assembler with {constraints}, {pack} elements a register")
        values = [array(x) for x in args]
        kinds = [torch_dtype(x) for x in (dtype if isinstance(dtype, tuple) else (dtype,))]
        results = meaning[2](values)
        if [x.dtype for x in results] != kinds:
            raise GluonFaultError(f"assembler gives {[x.dtype for x in results]}, not {kinds}")
        layout = joint_layout(*values)
        arrays = tuple(Array(x, layout) for x in results)
        return arrays if isinstance(dtype, tuple) else arrays[0]

    # ---- global memory

    def touch(self, name: str, place: int | None = None) -> None:
        """Refuse an argument, or a place of it, that the kernel before may still be writing."""
        if name not in self.late or (self.turned is not None and self.me.known >> self.turned & 1):
            return
        places = self.late[name]
        if places is None or place is None or place in places:
            raise GluonFaultError(f"{name} is touched before the wait for the kernel before")

    def load(
        self,
        pointer: Pointer,
        mask: object = None,
        other: object = None,
        cache_modifier: object = "",
        eviction_policy: object = "",
    ) -> Array:
        places, is_read = self._places(pointer, mask)
        flat = pointer.memory.flat
        self.memory.check(pointer.memory, places[is_read], self.me.known, "a load")
        if other is None:
            values = poison(places.shape, flat.dtype)
        else:
            filler = converted(array(other, flat.dtype).data, flat.dtype)
            values = filler.broadcast_to(places.shape).clone()
        values[is_read] = flat[places[is_read]]
        return Array(values, pointer.layout)

    def store(
        self, pointer: Pointer, value: object, mask: object = None, cache_modifier: object = ""
    ) -> None:
        places, is_written = self._places(pointer, mask)
        flat = pointer.memory.flat
        given = array(value, flat.dtype)
        if given.shape:
            joint_layout(pointer, given)
        data = converted(given.data, flat.dtype).broadcast_to(places.shape)
        chosen = places[is_written]
        self.memory.check(pointer.memory, chosen, self.me.known, "a store")
        flat[chosen] = data[is_written]
        event = self.machine.event()
        self.memory.write(pointer.memory, chosen, event)
        self.me.note(event)

    def atomic_add(
        self,
        pointer: Pointer,
        value: object,
        mask: object = None,
        sem: object = None,
        scope: object = None,
    ) -> Array:
        if pointer.shape:
            raise GluonFaultError("atomic_add of an array is not known here")
        places, _ = self._places(pointer, None)
        flat, place = pointer.memory.flat, int(places)
        if mask is not None and not truth(mask):
            return Array(poison([], flat.dtype))
        event = self.machine.event()
        known = self.me.published | 1 << event
        semantics = "acq_rel" if sem is None else str(plain(sem))
        self.me.known |= self.memory.meet(pointer.memory, place, known, semantics) | 1 << event
        before = flat[place].clone()
        flat[place] = (Array(before) + array(value, flat.dtype)).data  # type: ignore[union-attr]
        self.memory.write(pointer.memory, places, event)
        return Array(before)

    def _places(self, pointer: object, mask: object) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(pointer, Pointer):
            raise GluonFaultError(f"no pointer: {pointer!r}")
        self.touch(pointer.memory.name)
        places = pointer.offsets
        chosen = torch.tensor(True) if mask is None else array(mask).data
        chosen = chosen.bool().broadcast_to(places.shape)
        pointer.memory.check(places[chosen])
        return places, chosen

    # ---- shared memory

    def allocate_shared_memory(
        self, element_ty: object, shape: Sequence[object], layout: object, value: object = None
    ) -> View:
        if self.me is not self.machine.main or value is not None:
            raise GluonFaultError("shared memory is allocated before the program is specialized")
        sizes = [integer(x) for x in shape]
        return allocate(self, _assigned(), torch_dtype(element_ty), sizes, plain(layout))

    def shared_load(self, view: View, layout: object) -> Array:
        self.machine.pause()
        values = view.peek()
        racing, words = view.allocation.unknown_to(view.granules, self.me.known, None)
        is_undefined = kernel_function() in self.undefined_reads
        if racing and not is_undefined:
            raise GluonFaultError(f"race: {self.words('a load', view)}, and {words}")
        if racing:
            is_racing = _granule_bits(racing, view.addresses)
            values[is_racing] = poison([int(is_racing.sum())], values.dtype)
        self.read(view, "a load", self.machine.event(), is_undefined=is_undefined)
        return Array(values, plain(layout))

    def shared_store(self, view: View, value: object) -> None:
        given = array(value)
        if given.data.dtype != view.torch_dtype or given.shape != view.shape:
            raise GluonFaultError(f"{given.type} is stored to {view.name}, {view.type}")
        self.machine.pause()
        allocation, words = view.allocation, self.words("a store", view)
        same = view.peek().contiguous().view(torch.uint8) == given.data.contiguous().view(
            torch.uint8
        )
        same = same.reshape(*view.shape, -1).all(-1)
        changes = allocation.mask(view.addresses[~same]) if not bool(same.all()) else 0
        changes |= view.granules & ~_written(allocation.writes)
        event = self.machine.event()
        if changes:
            allocation.changed(event, changes, self.me.known, words, by_store=True)
        allocation.repeated(event, view.granules & ~changes, words)
        view.poke(given.data)
        self.me.note(event)

    def read(
        self,
        view: View,
        what: str,
        event: int,
        *,
        is_done: bool = True,
        is_undefined: bool = False,
    ) -> None:
        """Account for a read of a view."""
        words = self.words(what, view)
        view.allocation.reads.append(
            Access(view.granules, [event], words, is_undefined=is_undefined)
        )
        if is_done:
            self.me.note(event)

    def words(self, what: str, view: View) -> str:
        """Say who does what."""
        frame = kernel_frame()
        line = frame.f_lineno if frame else 0
        return f"{what} of {view.name} by {self.me.name} (line {line})"

    def fence_async_shared(self, cluster: object = False) -> None:
        self.machine.fenced |= self.me.known

    def thread_barrier(self) -> None:
        self.machine.pause()
        self.me.unsynced = 0

    # ---- barriers

    def _barrier(self, view: object) -> Barrier:
        barrier = self.machine.barriers.get(_place(view))
        if barrier is None:
            raise GluonFaultError(f"{getattr(view, 'name', view)} is no barrier: init it first")
        return barrier

    def init(self, view: View, count: object) -> None:
        place = _place(view)
        if place in self.machine.barriers:
            raise GluonFaultError(f"{view.name} is a barrier already")
        if integer(count) < 1:
            raise GluonFaultError(f"{view.name} of {integer(count)} arrivals")
        self.machine.barriers[place] = Barrier(view.name, integer(count))

    def invalidate(self, view: View) -> None:
        barrier = self._barrier(view)
        if barrier.nbytes:
            raise GluonFaultError(f"{barrier} is invalidated")
        del self.machine.barriers[_place(view)]

    def expect(self, view: View, bytes: object, pred: object = True) -> None:  # noqa: A002
        self._arrive(view, 1, integer(bytes), pred)

    def arrive(self, view: View, *, count: object = 1, pred: object = True) -> None:
        self._arrive(view, integer(count), 0, pred)

    def _arrive(self, view: View, count: int, nbytes: int, pred: object) -> None:
        barrier = self._barrier(view)
        if not truth(pred):
            return
        self.machine.pause()
        barrier.arrive(self.me, count, nbytes)
        barrier.complete(self.machine.partitions)

    def wait(
        self, view: View, phase: object, pred: object = True, deps: Sequence[object] = ()
    ) -> None:
        barrier = self._barrier(view)
        if not truth(pred):
            return
        parity = integer(phase)
        if parity not in {0, 1}:
            raise GluonFaultError(f"phase {parity} of {barrier.name}: a parity is 0 or 1")
        me = self.me
        meant = awaited(me, barrier, parity)
        self.machine.wait(lambda: barrier.passes(parity), lambda: f"phase {meant} of {barrier}")
        if barrier.completed != meant + 1:
            raise GluonFaultError(
                f"{me.name} waits for phase {meant} of {barrier.name} and passes, but "
                f"{barrier.completed} are complete"
            )
        me.waited[barrier] = meant
        me.known |= barrier.published

    # ---- the program

    def program_id(self, axis: object) -> Array:
        return array(self.where.program[integer(axis)])

    def num_programs(self, axis: object) -> Array:
        return array(self.where.grid[integer(axis)])

    def num_warps(self) -> int:
        return self.me.warps

    def static_range(self, *bounds: object) -> range:
        if any(isinstance(x, Array) for x in bounds):
            raise GluonFaultError("static_range over numbers of run time")
        return range(*map(integer, bounds))

    def range(self, *bounds: object) -> Iterator[Array]:
        """Count as a kernel's `range`, in run time."""
        kinds = [array(x).data.dtype for x in bounds]
        kind = torch.int64 if torch.int64 in kinds else torch.int32
        for number in range(*map(integer, bounds)):
            yield Array(torch.tensor(number, dtype=kind))

    def static_assert(self, condition: object, message: object = "") -> None:
        if not truth(condition):
            raise GluonFaultError(f"static_assert: {message}")

    def warp_specialize(
        self,
        functions_and_args: Sequence[tuple[Callable[..., None], tuple[object, ...]]],
        worker_num_warps: Sequence[object],
        worker_num_regs: Sequence[object],
    ) -> None:
        if self.me is not self.machine.main:
            raise GluonFaultError("a partition is not specialized again")
        warps = [self.me.warps, *map(integer, worker_num_warps)]
        registers = [integer(x) for x in worker_num_regs]
        if len(warps) != len(functions_and_args) or len(registers) != len(warps) - 1:
            raise GluonFaultError("as many workers as there are numbers of warps and registers")
        if any(x % 8 or not 24 <= x <= 256 for x in registers):
            raise GluonFaultError(f"registers {registers}: multiples of 8 from 24 to 256")
        work = []
        for place, (function, args) in enumerate(functions_and_args):
            name = f"partition {place} ({getattr(function, '__name__', '?')})"
            work.append((Partition(name, warps[place]), _call(function, args)))
        self.machine.specialize(work)


_OWN = (
    "inline_asm_elementwise", "load", "store", "atomic_add", "allocate_shared_memory",
    "thread_barrier", "program_id", "num_programs", "num_warps",
    "static_range", "static_assert", "warp_specialize",
)  # fmt: skip


def _call(function: Callable[..., None], args: tuple[object, ...]) -> Callable[[], None]:
    return lambda: function(*args)


def _place(view: object) -> tuple[object, int]:
    """Return a barrier's identity."""
    if not isinstance(view, View) or view.torch_dtype != torch.int64 or view.shape != [1]:
        raise GluonFaultError(f"{getattr(view, 'name', view)} is no barrier: one int64 is")
    return view.allocation, int(view.addresses[0])


def _written(accesses: Sequence[Access]) -> int:
    total = 0
    for access in accesses:
        total |= access.granules
    return total


def _granule_bits(granules: int, addresses: torch.Tensor) -> torch.Tensor:
    """Return which addresses lie in some granules."""
    flat = [bool(granules >> (x // 16) & 1) for x in addresses.reshape(-1).tolist()]
    return torch.tensor(flat).reshape(addresses.shape)


def _assigned() -> str:
    """Return the name that the kernel gives to what it is calling for."""
    frame = kernel_frame()
    if frame is None:
        return "shared memory"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = re.match(r"\s*(\w+)\s*=", line)
    return found[1] if found else f"the allocation at line {frame.f_lineno}"
