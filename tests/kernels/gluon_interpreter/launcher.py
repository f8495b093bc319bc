"""A kernel of Gluon as a test launches it on the CPU: the same source, other globals."""

from __future__ import annotations

import dis
import inspect
import itertools
import random
from collections.abc import Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.kernels.gluon_interpreter.copies import Descriptor
from tests.kernels.gluon_interpreter.global_memory import GlobalMemory
from tests.kernels.gluon_interpreter.language import Language, Where
from tests.kernels.gluon_interpreter.machine import Machine
from tests.kernels.gluon_interpreter.values import (
    Array,
    GluonFaultError,
    InFlight,
    Memory,
    Pointer,
    array,
    integer,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"})


class Interpreter:
    """Stands for a kernel: `Interpreter(kernel, seed=1)[grid](...)`.

    Args:
        kernel: A function of `gluon.jit`.
        seed: Of the schedule: which programs, partitions and copies go first.
        undefined_reads: Names of functions that may load shared memory while others write it, since
            they throw such values away; they get poison.
        late: Names of arguments that the kernel before writes, of a dependent launch; or by name
            the first coordinates of a descriptor's boxes that it writes, None for all.
    """

    def __init__(
        self,
        kernel: GluonJITFunction,
        *,
        seed: int = 0,
        undefined_reads: Iterable[str] = (),
        late: Iterable[str] | Mapping[str, Collection[int] | None] = (),
    ) -> None:
        self._kernel, self._seed = kernel, seed
        self._undefined_reads = frozenset(undefined_reads)
        self._late = dict(late) if isinstance(late, Mapping) else dict.fromkeys(late)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            self._launch(tuple(grid), args, kwargs)

        return launch

    def _launch(
        self, grid: tuple[int, ...], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS & set(kwargs)}
        given = _signature(self._kernel.fn).bind(*args, **kwargs)
        given.apply_defaults()
        constants = {p.name for p in self._kernel.params if p.is_constexpr}
        values = {
            name: plain(value) if name in constants else _argument(name, value)
            for name, value in given.arguments.items()
        }
        late = self._late if options.get("launch_pdl") else {}
        memory = GlobalMemory()
        programs = list(itertools.product(*map(range, grid)))
        random.Random(self._seed).shuffle(programs)
        whole_grid = (*grid, 1, 1, 1)[:3]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # else each partition's thread starts as many of its own
        try:
            for program in programs:
                machine = Machine(f"{self._seed} {program}", memory.events)
                where = Where((*program, 0, 0, 0)[:3], whole_grid)
                warps = integer(options.get("num_warps", 4))
                language = Language(machine, memory, where, self._undefined_reads, late, warps)
                try:
                    Clones(language).of(self._kernel)(**values)
                    machine.check_end()
                except GluonFaultError as error:
                    error.add_note(f"program {program} of {grid}, seed {self._seed}")
                    raise
        finally:
            torch.set_num_threads(threads)


def _argument(name: str, value: object) -> object:
    """Return what a kernel gets for an argument."""
    if isinstance(value, torch.Tensor):
        memory = Memory.of(name, value)
        return Pointer(memory, torch.tensor(memory.low))
    if isinstance(value, TensorDescriptor):
        return Descriptor.of(name, value)
    return None if value is None else array(value)


class Clones:
    """A kernel's functions, and those they call, over the interpreter's builtins."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._functions: dict[int, Callable[..., object]] = {}

    def of(self, jitted: GluonJITFunction) -> Callable[..., object]:
        """Return a function as Python may call it."""
        if id(jitted) not in self._functions:
            theirs = jitted.fn
            ours = FunctionType(
                theirs.__code__, self._globals(theirs), theirs.__name__,
                theirs.__defaults__, theirs.__closure__,
            )  # fmt: skip
            ours.__kwdefaults__ = theirs.__kwdefaults__
            constants = {p.name for p in jitted.params if p.is_constexpr}
            self._functions[id(jitted)] = _guarded(ours, _signature(theirs), constants)
        return self._functions[id(jitted)]

    def _globals(self, function: FunctionType) -> dict[str, object]:
        """Return what a function finds in its module, as a kernel sees it here."""
        theirs = function.__globals__
        ours = {
            name: self._value(name, theirs[name])
            for name in _names(function.__code__)
            if name in theirs
        }
        return {**ours, "__builtins__": theirs["__builtins__"], "range": self._language.range}

    def _value(self, name: str, value: object) -> object:
        if isinstance(value, GluonJITFunction):
            return self.of(value)
        if isinstance(value, gl.constexpr):
            return plain(value)
        known = self._language.replaced.get(id(value))
        if known is None and getattr(value, "__triton_builtin__", False):
            return _unknown(name)
        return value if known is None else known


@cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that code, and the code within it, looks up in its module."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    steps = dis.get_instructions(code)
    own = {step.argval for step in steps if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"}}
    return frozenset(own).union(*inner)


def _unknown(name: str) -> Callable[..., None]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise GluonFaultError(f"{name} is not known here")

    return refuse


_signature = cache(inspect.signature)


def _guarded(
    function: Callable[..., object], signature: inspect.Signature, constants: set[str]
) -> Callable[..., object]:
    """Return a function that refuses values of run time where constants are wanted."""
    places = [(place, name) for place, name in enumerate(signature.parameters) if name in constants]

    def call(*args: object, **kwargs: object) -> object:
        given = [(name, args[place]) for place, name in places if place < len(args)]
        given += [(name, kwargs[name]) for name in constants & kwargs.keys()]
        for name, value in given:
            if isinstance(value, Array | Pointer | InFlight):
                raise GluonFaultError(f"{function.__name__}: {name} is no constant: {value!r}")
        return function(*args, **kwargs)

    call.__name__ = function.__name__
    return call
