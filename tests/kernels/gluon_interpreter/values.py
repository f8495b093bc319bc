"""What a kernel holds in registers: arrays and pointers, with Triton's rules of arithmetic.

A scalar of run time is an array without dimensions. A Python number is one of compile time, and
takes the dtype of the array it meets unless its kind is higher. Layouts are carried along, not
acted on: two that differ do not meet in one operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon import language as gl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.kernels.gluon_interpreter.products import Product

TORCH_DTYPES = {
    gl.int1: torch.bool,
    gl.int8: torch.int8,
    gl.int16: torch.int16,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
    gl.uint8: torch.uint8,
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float32: torch.float32,
    gl.float64: torch.float64,
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.float8e5: torch.float8_e5m2,
}
GLUON_DTYPES = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}


_PLAIN: set[type] = {int, float, bool}
"""Of what is no constexpr, and is asked most often whether it is one."""


class GluonFaultError(Exception):
    """The kernel does what no GPU does as it is meant, or what this interpreter does not know."""


def plain(value: object) -> object:
    """Return what a constexpr holds; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, gl.constexpr):
        return plain(value.value)
    if isinstance(value, list):
        return [plain(x) for x in value]
    return value


def torch_dtype(dtype: object) -> torch.dtype:
    """Return torch's name of one of Triton's dtypes."""
    known = TORCH_DTYPES.get(plain(dtype))
    if known is None:
        raise GluonFaultError(f"dtype {dtype} is not known here")
    return known


def integer(value: object) -> int:
    """Return a number of compile time or of run time as Python's."""
    if type(value) is int:
        return value
    value = plain(value)
    if isinstance(value, Array) and not value.shape:
        value = value.data.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise GluonFaultError(f"a whole number is wanted, not {value!r}")
    return value


def truth(value: object) -> bool:
    """Return a condition of compile time or of run time as Python's."""
    return bool(plain(value))


def poison(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what nobody wrote: every byte 0xff, which is NaN or -1."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.full((max(math.prod(shape), 1) * size,), 0xFF, dtype=torch.uint8)
    if dtype == torch.bool:
        return raw.bool()[: math.prod(shape)].reshape(list(shape))
    return raw.view(dtype)[: math.prod(shape)].reshape(list(shape))


@dataclass(frozen=True)
class ArrayType:
    """As kernels ask for it: `x.type.layout`."""

    element_ty: object
    shape: list[int]
    layout: object


@cache
def _common(a: torch.dtype, b: torch.dtype, *, divides: bool) -> torch.dtype:
    """Return the dtype in which Triton computes with two arrays."""
    if torch.float64 in {a, b}:
        return torch.float64
    if torch.float32 in {a, b}:
        return torch.float32
    halves = {torch.float16, torch.bfloat16}
    if halves & {a, b}:
        if divides:
            return torch.float32
        if torch.float16 in {a, b}:
            return torch.float16
        return torch.bfloat16 if a == b else torch.float32
    if a.is_floating_point or b.is_floating_point:
        raise GluonFaultError(f"{a} and {b} do not meet")
    return torch.promote_types(a, b)


_KINDS = {bool: 0, int: 1, float: 2}


def _kind(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else 2 if dtype.is_floating_point else 1


def array(value: object, like: torch.dtype | None = None, *, divides: bool = False) -> Array:
    """Return a value as an array; a Python number beside `like` takes its dtype if it can."""
    value = plain(value)
    if isinstance(value, Array):
        return value
    if isinstance(value, InFlight):
        raise GluonFaultError(_UNCOVERED)
    if not isinstance(value, bool | int | float):
        raise GluonFaultError(f"no value of registers: {value!r}")
    if isinstance(value, float):  # of which two zeros are one key
        return _number(value, like, divides)
    return _known_number(value, like, divides, type(value))


@lru_cache(maxsize=4096)
def _known_number(value: float, like: torch.dtype | None, divides: bool, kind: type) -> Array:
    """Return a number of compile time as an array; `kind` tells True from 1."""
    return _number(value, like, divides)


def _number(value: float, like: torch.dtype | None, divides: bool) -> Array:
    if like is not None and _KINDS[type(value)] <= _kind(like):
        if divides and like in {torch.float16, torch.bfloat16}:
            like = torch.float32
        if not like.is_floating_point and like != torch.bool:
            bounds = torch.iinfo(like)
            if not bounds.min <= value <= bounds.max:
                raise GluonFaultError(f"{value} does not fit into {like}")
        return Array(torch.tensor(value, dtype=like))
    if isinstance(value, bool):
        return Array(torch.tensor(value))
    if isinstance(value, float):
        return Array(torch.tensor(value, dtype=torch.float32))
    wide = not -(2**31) <= value < 2**31
    return Array(torch.tensor(value, dtype=torch.int64 if wide else torch.int32))


def joint_layout(*arrays: Array | Pointer) -> object:
    """Return the layout of an operation on arrays: one, or none where none is known."""
    joint = None
    for x in arrays:
        layout = x.layout
        if layout is None or layout is joint or not x.shape:
            continue
        if joint is not None and layout != joint:
            raise GluonFaultError(f"layouts differ: {[joint, layout]}")
        joint = layout
    return joint


def paired(a: object, b: object, *, divides: bool = False) -> tuple[Array, Array]:
    """Return two operands in the dtype they are computed in."""
    a, b = plain(a), plain(b)
    left = array(a, b.data.dtype if isinstance(b, Array) else None, divides=divides)
    right = array(b, a.data.dtype if isinstance(a, Array) else None, divides=divides)
    ranks = left.data.ndim, right.data.ndim
    if ranks[0] != ranks[1] and all(ranks):
        raise GluonFaultError(f"shapes {left.shape} and {right.shape} do not meet")
    if left.data.dtype is right.data.dtype and not divides:
        return left, right
    dtype = _common(left.data.dtype, right.data.dtype, divides=divides)
    left, right = (
        side if side.data.dtype == dtype else Array(side.data.to(dtype), side.layout)
        for side in (left, right)
    )
    return left, right


def _binary(
    a: object, b: object, compute: Callable[..., torch.Tensor], *, divides: bool = False
) -> Array:
    if type(a) is Array and not divides:
        # Most operations are on places: whole numbers without dimensions.
        other = _known_number(b, a.data.dtype, False, int) if type(b) is int else b
        if type(other) is Array and not other.data.ndim and a.data.dtype is other.data.dtype:
            return Array(compute(a.data, other.data), a.layout if a.data.ndim else None)
    if isinstance(plain(b), Pointer) or isinstance(plain(a), Pointer):
        raise GluonFaultError("pointers are only added to")
    left, right = paired(a, b, divides=divides)
    return Array(compute(left.data, right.data), joint_layout(left, right))


def _divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")  # as C, not as Python


@dataclass(frozen=True, eq=False)
class Array:
    """A value of registers, immutable."""

    data: torch.Tensor
    layout: object = None

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> object:
        return GLUON_DTYPES[self.data.dtype]

    @property
    def type(self) -> ArrayType:
        return ArrayType(self.dtype, self.shape, self.layout)

    def __bool__(self) -> bool:
        if self.shape:
            raise GluonFaultError("a branch on an array")
        return bool(self.data)

    def __add__(self, other: object) -> Array | Pointer:
        if isinstance(other, Pointer):
            return other + self
        return _binary(self, other, torch.add)

    def __radd__(self, other: object) -> Array | Pointer:
        return self + other

    def __sub__(self, other: object) -> Array:
        return _binary(self, other, torch.sub)

    def __rsub__(self, other: object) -> Array:
        return _binary(other, self, torch.sub)

    def __mul__(self, other: object) -> Array:
        return _binary(self, other, torch.mul)

    def __rmul__(self, other: object) -> Array:
        return _binary(other, self, torch.mul)

    def __truediv__(self, other: object) -> Array:
        return _binary(self, other, torch.div, divides=True)

    def __rtruediv__(self, other: object) -> Array:
        return _binary(other, self, torch.div, divides=True)

    def __floordiv__(self, other: object) -> Array:
        return _binary(self, other, _divided, divides=True)

    def __rfloordiv__(self, other: object) -> Array:
        return _binary(other, self, _divided, divides=True)

    def __mod__(self, other: object) -> Array:
        return _binary(self, other, torch.fmod, divides=True)

    def __rmod__(self, other: object) -> Array:
        return _binary(other, self, torch.fmod, divides=True)

    def __and__(self, other: object) -> Array:
        return _binary(self, other, torch.bitwise_and)

    __rand__ = __and__

    def __or__(self, other: object) -> Array:
        return _binary(self, other, torch.bitwise_or)

    __ror__ = __or__

    def __xor__(self, other: object) -> Array:
        return _binary(self, other, torch.bitwise_xor)

    __rxor__ = __xor__

    def __lshift__(self, other: object) -> Array:
        return _binary(self, other, torch.bitwise_left_shift)

    def __rshift__(self, other: object) -> Array:
        return _binary(self, other, torch.bitwise_right_shift)

    def __neg__(self) -> Array:
        return Array(-self.data, self.layout)

    def __lt__(self, other: object) -> Array:
        return _binary(self, other, torch.lt)

    def __le__(self, other: object) -> Array:
        return _binary(self, other, torch.le)

    def __gt__(self, other: object) -> Array:
        return _binary(self, other, torch.gt)

    def __ge__(self, other: object) -> Array:
        return _binary(self, other, torch.ge)

    def __eq__(self, other: object) -> Array:  # type: ignore[override]
        return _binary(self, other, torch.eq)

    def __ne__(self, other: object) -> Array:  # type: ignore[override]
        return _binary(self, other, torch.ne)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, places: object) -> Array:
        return Array(*expanded(self.data, self.layout, places))

    def to(self, dtype: object, *, bitcast: bool = False) -> Array:
        wanted = torch_dtype(dtype)
        if bitcast:
            if wanted.itemsize != self.data.dtype.itemsize:
                raise GluonFaultError(f"{self.data.dtype} is not as wide as {wanted}")
            return Array(self.data.view(wanted), self.layout)
        return Array(converted(self.data, wanted), self.layout)

    def broadcast_to(self, shape: Sequence[object]) -> Array:
        return Array(self.data.broadcast_to([integer(x) for x in shape]), self.layout)

    def permute(self, *order: object) -> Array:
        return Array(self.data.permute([integer(x) for x in order]))

    def reshape(self, *shape: object) -> Array:
        return Array(self.data.reshape([integer(x) for x in shape]))


_PLAIN.add(Array)


def converted(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return data in another dtype, as a GPU converts: float8 saturates."""
    if dtype in {torch.float8_e4m3fn, torch.float8_e5m2} and data.dtype.is_floating_point:
        most = torch.finfo(dtype).max
        return data.float().clamp(-most, most).to(dtype)
    return data.to(dtype)


def expanded(data: torch.Tensor, layout: object, places: object) -> tuple[torch.Tensor, object]:
    """Return data with new dimensions of 1 where places say None, and its layout then."""
    index = places if isinstance(places, tuple) else (places,)
    if any(x is not None and x != slice(None) for x in index):
        raise GluonFaultError(f"[{places}] takes parts of registers")
    for dim, place in enumerate(index):
        if place is None and layout is not None:
            if not isinstance(layout, gl.SliceLayout) or layout.dim != dim:
                raise GluonFaultError(f"dimension {dim} is not what {layout} is a slice along")
            layout = layout.parent
    return data[index], layout


@dataclass(frozen=True)
class Memory:
    """A tensor that kernels point into: what a view of it spans, all else is out of bounds."""

    name: str
    flat: torch.Tensor
    """The whole of its storage."""
    low: int
    high: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Memory:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        span = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((size - 1) * stride for size, stride in span)
        extent = int(1 + reach) if tensor.numel() else 0
        low = int(tensor.storage_offset())
        return cls(name, flat, low, low + extent)

    def check(self, places: torch.Tensor) -> None:
        """Refuse places outside."""
        outside = (places < self.low) | (places >= self.high)
        if bool(outside.any()):
            place = int(places[outside][0]) - self.low
            raise GluonFaultError(
                f"{self.name}[{place}] is out of bounds: it has {self.high - self.low} elements"
            )


@dataclass(frozen=True, eq=False)
class Pointer:
    """Places in one tensor."""

    memory: Memory
    offsets: torch.Tensor
    layout: object = None

    @property
    def shape(self) -> list[int]:
        return list(self.offsets.shape)

    @property
    def dtype(self) -> object:
        return gl.pointer_type(GLUON_DTYPES[self.memory.flat.dtype])

    def __add__(self, other: object) -> Pointer:
        step = array(other)
        if step.data.dtype.is_floating_point:
            raise GluonFaultError("a pointer plus a float")
        if self.shape and step.shape and len(self.shape) != len(step.shape):
            raise GluonFaultError(f"places {self.shape} and steps {step.shape} do not meet")
        return Pointer(self.memory, self.offsets + step.data.long(), joint_layout(self, step))

    __radd__ = __add__

    def __getitem__(self, places: object) -> Pointer:
        return Pointer(self.memory, *expanded(self.offsets, self.layout, places))


@dataclass(frozen=True)
class InFlight:
    """An accumulator whose product is not waited for: the next product may add to it, no more."""

    product: Product = field(repr=False)
    shape: list[int]
    dtype: object
    layout: object

    @property
    def type(self) -> ArrayType:
        return ArrayType(self.dtype, self.shape, self.layout)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise GluonFaultError(f"{_UNCOVERED}: its {name}")


_UNCOVERED = "an accumulator is used before the wait that covers its product"
