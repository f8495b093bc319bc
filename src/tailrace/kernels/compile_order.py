"""One specialisation of one kernel, as a line that another process compiles from.

    JITFunction + types, constants, attributes, options    <->    a line of JSON

Triton has such a line of its own (`JITFunction.preload`), which loses what is a tuple and whether
a constant is a text or a dtype that is written like it. Here constants that JSON does not have are
told by their kind, and what has no kind is refused: its kernel is compiled where it is launched.

Both sides know under which key Triton's cache on disk keeps the kernel. If they differ, what one
compiled the other does not find: the worker says so instead of compiling in vain.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import triton.language as tl
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITCallable, JITFunction

from tailrace.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME_CHARACTERS = 150
"""Of a kernel's name in the names of its files, as Triton cuts it."""


class CompileOrder(msgspec.Struct, frozen=True):
    """What is to be compiled: the kernel by its name, all else as tagged JSON."""

    module: str
    name: str
    """Qualified, within the module."""
    target: tuple[str, int, int]
    """Backend, architecture (90) and lanes of a warp."""
    signature: list[tuple[str, Any]]
    constants: list[tuple[list[int], Any]]
    attributes: list[tuple[list[int], Any]]
    options: dict[str, Any]
    key: str
    """Of Triton's cache on disk, as the process that launches has it."""
    is_gluon: bool


@dataclass(frozen=True)
class Launch:
    """What Triton has made of a launch's arguments: `JITFunction._do_compile`'s own."""

    device: int
    signature: Mapping[str, Any]
    """Types by the arguments' names."""
    constants: Mapping[tuple[int, ...], Any]
    """By the arguments' places."""
    attributes: Mapping[tuple[int, ...], Any]
    """By the same."""
    options: Mapping[str, Any]


def order_of(function: JITFunction, launch: Launch) -> CompileOrder:
    """Return the order for a kernel that is about to be compiled for a launch.

    Raises:
        TypeError: A constant is of no kind that goes over a line.
    """
    settle_hash(function)
    target = function.device_caches[launch.device][2]
    source = function.ASTSource(function, launch.signature, launch.constants, launch.attributes)
    return CompileOrder(
        module=function.fn.__module__,
        name=function.fn.__qualname__,
        target=(target.backend, target.arch, target.warp_size),
        signature=[(name, _told(value)) for name, value in launch.signature.items()],
        constants=[(list(path), _told(value)) for path, value in launch.constants.items()],
        attributes=[(list(path), _told(value)) for path, value in launch.attributes.items()],
        options={name: _told(value) for name, value in launch.options.items()},
        key=cache_key(source, target, launch.options),
        is_gluon=function.is_gluon(),
    )


def source_of(order: CompileOrder) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """Return what `triton.compile` takes: the source, the target and the options.

    Raises:
        EngineError: There is no such kernel here, or its key is another than the order's.
    """
    found: Any = import_module(order.module)
    for part in order.name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, JITFunction):
        raise EngineError(f"{order.module} has no kernel {order.name}")
    settle_hash(found)
    kind = GluonASTSource if order.is_gluon else ASTSource
    source = kind(
        found,
        {name: _value(told) for name, told in order.signature},
        {tuple(path): _value(told) for path, told in order.constants},
        {tuple(path): _value(told) for path, told in order.attributes},
    )
    target = GPUTarget(*order.target)
    options = {name: _value(told) for name, told in order.options.items()}
    if cache_key(source, target, options) != order.key:
        raise EngineError("its key in Triton's cache is another here")
    return source, target, options


def settle_hash(function: JITCallable, seen: set[int] | None = None) -> None:
    """Have Triton hash a kernel's functions before the kernel.

    It adds what a function uses of its module to the hash of who calls it, but only if the
    function was hashed before (`DependenciesFinder._update_hash`): by chance, that is, and not the
    same in two processes. Innermost first, it always was.
    """
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    known, names = function.fn.__globals__, function.fn.__code__.co_names
    used = [known.get(name) for name in names]
    for module in [value for value in used if isinstance(value, ModuleType)]:
        used += [getattr(module, name, None) for name in names]
    for value in used:
        if isinstance(value, JITCallable):
            settle_hash(value, seen)
    function.cache_key  # noqa: B018 - a property that computes


def settle_hashes(package: str = "tailrace.kernels") -> None:
    """Settle all kernels of a package that are imported, before any is compiled."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for value in [*vars(module).values()]:
                if isinstance(value, JITCallable):
                    settle_hash(value)


def cache_key(source: ASTSource, target: GPUTarget, options: Mapping[str, Any]) -> str:
    """Return the key under which `triton.compile` keeps a kernel on disk."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    key = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def is_on_disk(order: CompileOrder) -> bool:
    """Whether Triton's cache has what the order would compile.

    Raises:
        ConfigError: It has not, and cannot be written either: Triton makes the kernel's folder.
    """
    name = order.name.rpartition(".")[2][:_NAME_CHARACTERS] + ".json"
    try:
        return name in (get_cache_manager(order.key).get_group(name) or {})
    except OSError as error:
        raise ConfigError(
            f"Triton's cache {knobs.cache.dir}: kernel {order.name} is not there and cannot be put "
            f"there ({error.strerror}); set TRITON_CACHE_DIR to a folder that can be written"
        ) from error


def _told(value: Any) -> Any:
    """Return a value as JSON, what JSON does not have by its kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [_told(item) for item in value]}
    if type(value) is tl.dtype:
        return {"dtype": value.name}
    if type(value) is tl.constexpr:
        return {"constexpr": _told(value.value)}
    raise TypeError(f"a {type(value).__name__} does not go over a line")


def _value(told: Any) -> Any:
    """Return the value that `_told` was given."""
    if not isinstance(told, dict):
        return told
    ((kind, inner),) = told.items()
    if kind == "dtype":
        return tl.dtype(inner)
    if kind == "constexpr":
        return tl.constexpr(_value(inner))
    items = [_value(item) for item in inner]
    return tuple(items) if kind == "tuple" else items
