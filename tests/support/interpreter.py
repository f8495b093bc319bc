"""Triton's interpreter, with float8 conversions as a GPU makes them.

Triton 3.6's own lose the carry of a rounded mantissa (31.7 becomes 16), round subnormals down, and
make 384 of NaN. torch's are right: to the nearest, ties to even, NaN stays.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import contextmanager
from functools import cached_property


@contextmanager
def quietly():
    """Silence what NumPy, which the interpreter is, warns of and a GPU passes without a word.

    That is its own loops over programs, and NaN and infinity in padding.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0")
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        yield


def exact_float8(monkeypatch):
    """Give the interpreter torch's conversions from and to float8 (e4m3)."""
    import numpy as np  # noqa: PLC0415 - conftest.py imports this file for every test
    import torch  # noqa: PLC0415 - as above
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed
    from triton.runtime import interpreter  # noqa: PLC0415 - as above

    kinds = {
        tl.float32: (torch.float32, np.uint32),
        tl.float16: (torch.float16, np.uint16),
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    }
    theirs = interpreter._convert_float

    def convert(values, given, wanted, rounding):
        if tl.float8e4nv not in (given, wanted):
            return theirs(values, given, wanted, rounding)
        bits = np.ascontiguousarray(values).view(kinds[given][1])
        x = torch.from_numpy(bits.copy()).view(kinds[given][0])
        # Beyond its largest value a GPU saturates here; torch makes NaN.
        if wanted == tl.float8e4nv:
            x = x.float().clamp(-448, 448)
        y = x.to(torch.float32).to(kinds[wanted][0])
        as_bytes = y.contiguous().view(torch.uint8).numpy().view(kinds[wanted][1])
        return as_bytes.reshape(np.shape(values))

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def quicken():
    """Take from the interpreter what costs most of its time and changes nothing that it computes.

    It looks up among all names of the language, anew for each function that a kernel calls; it
    multiplies half precision without BLAS; and it spells out what each tuple holds, which nobody
    reads.
    """
    import numpy as np  # noqa: PLC0415 - conftest.py imports this file for every test
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed
    from triton.runtime import interpreter  # noqa: PLC0415 - as above

    names: dict[int, list[str]] = {}

    def patch(package, builder, scope):
        known = names.get(id(package))
        if known is None:
            found = inspect.getmembers(package)
            known = [name for name, member in found if tl.core.is_builtin(member)]
            names[id(package)] = known
        # A launch further out may have patched it: then none is a builtin now, or all are.
        if known and tl.core.is_builtin(getattr(package, known[0])):
            for name in known:
                interpreter._patch_attr(package, name, getattr(package, name), builder, scope)

    interpreter._patch_builtin = patch
    arrays: dict[str, np.dtype] = {}
    their_array = interpreter._get_np_dtype

    def array(kind):
        if isinstance(kind.scalar, tl.pointer_type):
            return their_array(kind)
        if kind.scalar.name not in arrays:
            arrays[kind.scalar.name] = their_array(kind)
        return arrays[kind.scalar.name]

    interpreter._get_np_dtype = array
    their_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, d, *options):
        # Products of these are exact in what they are added up in; int8 ones, and their sums, too.
        wider = {np.float16: np.float32, np.int8: np.float64}.get(a.data.dtype.type)
        if wider is None or a.data.dtype != b.data.dtype or d.data.dtype.itemsize != 4:
            return their_dot(self, a, b, d, *options)
        product = np.matmul(a.data.astype(wider), b.data.astype(wider))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot

    def note(self, types, fields=None):
        self.types = types
        self.fields = fields or [""] * len(types)

    def spell(self):
        pairs = zip(self.fields, self.types, strict=False)
        return "[" + ",".join(f"{field}:{kind}" for field, kind in pairs) + "]"

    tl.core.tuple_type.__init__ = note
    tl.core.tuple_type.name = property(spell)
    _quicken_calls()
    _quicken_shapes()


def _quicken_calls():
    """Hand the interpreter to a function of the language without a copy of its arguments."""
    from triton.runtime import interpreter  # noqa: PLC0415 - where Triton is not installed

    semantics = {}

    def attribute(place, name, member, builder, scope):
        semantic = semantics.get(id(builder))
        if semantic is None or semantic.builder is not builder:
            semantic = semantics[id(builder)] = interpreter.TritonSemantic(builder)

        def call(*arguments, **named):
            named["_semantic"] = semantic
            return member(*arguments, **named)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = attribute


def _quicken_shapes():
    """Check a shape once, not for every value that has it; name types when somebody reads it."""
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed
    from triton.language.semantic import TritonSemantic  # noqa: PLC0415 - as above

    block, value, shapes = tl.core.block_type, tl.core.tensor, tl.core.tuple
    their_block, their_value = block.__init__, value.__init__
    their_shape, their_equal = shapes.__init__, shapes.__eq__
    their_broadcast = TritonSemantic.broadcast_impl_value
    checked: dict[tuple[int, ...], tuple] = {}
    shown: dict[tuple[int, ...], tuple] = {}

    def make_block(self, element_ty, shape):
        key = tuple(shape)
        if not all(type(size) is int for size in key):
            their_block(self, element_ty, shape)
        elif key not in checked:
            their_block(self, element_ty, shape)
            checked[key] = self.shape, self.numel
        else:
            self.element_ty = element_ty
            self.shape, self.numel = checked[key]

    def make_value(self, handle, kind):
        key = tuple(kind.shape) if kind.is_block() else ()
        if key not in shown:
            their_value(self, handle, kind)
            shown[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = shown[key]

    def make_shape(self, args, type=None):  # noqa: A002 - their name
        if type is None:
            self.values = list(args)
        else:
            their_shape(self, args, type)

    def equal(self, other):
        values = other.values if isinstance(other, shapes) else other
        if isinstance(values, list | tuple) and all(type(size) is int for size in values):
            return tl.constexpr(self.values == list(values))
        return their_equal(self, other)

    def broadcast(self, left, right):
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return their_broadcast(self, left, right)

    # Both give way to what an object was told itself.
    for kind, name, make in (
        (block, "name", lambda self: f"<{self.shape}, {self.element_ty}>"),
        (shapes, "type", lambda self: tl.core._type_for_tuple_values(self.values)),
    ):
        lazy = cached_property(make)
        lazy.__set_name__(kind, name)
        setattr(kind, name, lazy)
    block.__init__, value.__init__, shapes.__init__ = make_block, make_value, make_shape
    shapes.__eq__ = equal
    TritonSemantic.broadcast_impl_value = broadcast
