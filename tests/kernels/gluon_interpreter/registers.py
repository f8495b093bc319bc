"""Builtins of registers alone: arrays in, an array out, on no machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon import language as gl

from tests.kernels.gluon_interpreter.values import (
    Array,
    GluonFaultError,
    array,
    expanded,
    integer,
    joint_layout,
    paired,
    plain,
    torch_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def arange(start: object, end: object, layout: object = None) -> Array:
    return Array(torch.arange(integer(start), integer(end), dtype=torch.int32), layout)


def full(shape: Sequence[object], value: object, dtype: object, layout: object = None) -> Array:
    number = array(value).data.to(torch_dtype(dtype))
    return Array(number.expand([integer(x) for x in shape]).clone(), layout)


def zeros(shape: Sequence[object], dtype: object, layout: object = None) -> Array:
    return full(shape, 0, dtype, layout)


def zeros_like(x: object) -> Array:
    value = array(x)
    return Array(torch.zeros_like(value.data), value.layout)


def convert_layout(value: object, layout: object, assert_trivial: bool = False) -> Array:
    return Array(array(value).data, layout)


def where(condition: object, x: object, y: object) -> Array:
    left, right = paired(x, y)
    test = array(condition)
    return Array(
        torch.where(test.data.bool(), left.data, right.data), joint_layout(test, left, right)
    )


def maximum(x: object, y: object) -> Array:
    left, right = paired(x, y)
    pick = torch.fmax if left.data.dtype.is_floating_point else torch.maximum
    return Array(pick(left.data, right.data), joint_layout(left, right))


def minimum(x: object, y: object) -> Array:
    left, right = paired(x, y)
    pick = torch.fmin if left.data.dtype.is_floating_point else torch.minimum
    return Array(pick(left.data, right.data), joint_layout(left, right))


def highest(x: object, axis: object) -> Array:
    value, dim = array(x), integer(axis)
    data = value.data
    if data.dtype.is_floating_point:  # a NaN loses against a number
        numbers = data.masked_fill(data.isnan(), float("-inf")).amax(dim)
        data = numbers.masked_fill(data.isnan().all(dim), float("nan"))
    else:
        data = data.amax(dim)
    return Array(data, _sliced(value.layout, dim))


def total(x: object, axis: object) -> Array:
    value, dim = array(x), integer(axis)
    return Array(value.data.sum(dim).to(value.data.dtype), _sliced(value.layout, dim))


def exp2(x: object) -> Array:
    value = array(x)
    return Array(torch.exp2(value.data), value.layout)


def log2(x: object) -> Array:
    value = array(x)
    return Array(torch.log2(value.data), value.layout)


def join(a: object, b: object) -> Array:
    left, right = array(a), array(b)
    if left.data.dtype != right.data.dtype or left.shape != right.shape:
        raise GluonFaultError(f"{left.type} and {right.type} are not joined")
    return Array(torch.stack([left.data, right.data], dim=-1))


def split(a: object) -> tuple[Array, Array]:
    value = array(a)
    if not value.shape or value.shape[-1] != 2:
        raise GluonFaultError(f"{value.type} is not split: two in the last dimension are")
    first, second = value.data.unbind(-1)
    return Array(first), Array(second)


def absolute(x: object) -> Array:
    value = array(x)
    return Array(value.data.abs(), value.layout)


def expand_dims(x: object, axis: object) -> Array:
    value = array(x)
    places = (slice(None),) * integer(axis) + (None,)
    return Array(*expanded(value.data, value.layout, places))


def cdiv(x: object, y: object) -> object:
    return (x + plain(y) - 1) // y  # type: ignore[operator]


def _sliced(layout: object, dim: int) -> object:
    return None if layout is None else gl.SliceLayout(dim, layout)


BUILTINS = {
    "arange": arange,
    "full": full,
    "zeros": zeros,
    "zeros_like": zeros_like,
    "convert_layout": convert_layout,
    "where": where,
    "maximum": maximum,
    "minimum": minimum,
    "max": highest,
    "sum": total,
    "exp2": exp2,
    "log2": log2,
    "join": join,
    "split": split,
    "abs": absolute,
    "expand_dims": expand_dims,
    "cdiv": cdiv,
}
"""By their names in `gl`."""
