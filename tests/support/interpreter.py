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
    _quicken_scopes()
    _quicken_shapes()
    _quicken_operands()


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


def _quicken_scopes():
    """Replace the language's functions once a launch, not for each function that a kernel calls."""
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed
    from triton.runtime import interpreter  # noqa: PLC0415 - as above

    scope = interpreter._LangPatchScope
    their_patch, their_restore = interpreter._patch_lang, scope.restore
    languages = {id(tl): tl, id(tl.core): tl.core}
    seen: dict[int, tuple[dict, set[int]]] = {}
    replaced: set[int] = set()

    def patch(fn):
        names = fn.__globals__
        if id(names) not in seen:  # and kept, so that no other ones take its place
            seen[id(names)] = names, {id(value) for value in names.values()} & languages.keys()
        wanted = seen[id(names)][1]
        if wanted <= replaced:
            return scope()
        replaced.update(wanted)
        return their_patch(fn)

    def restore(self):
        their_restore(self)
        replaced.clear()

    interpreter._patch_lang, scope.restore = patch, restore


def _quicken_operands():
    """Look for what is to be converted only where types differ, and compare those by identity.

    And do not compute anew, in 64 bits, what no assertion reads: whether integers overflow is
    found out for debugging alone.
    """
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed
    from triton.language.semantic import TritonSemantic  # noqa: PLC0415 - as above
    from triton.runtime import interpreter  # noqa: PLC0415 - as above

    if not interpreter.interpreter_builder.options.debug:
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    for kind in (tl.core.dtype, tl.core.pointer_type):
        _compare_by_identity(kind)
    value, halves = tl.core.tensor, (tl.float16, tl.bfloat16)
    their_check, their_cast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.cast
    their_tensor, their_unwrap = TritonSemantic.to_tensor, tl.core._unwrap_if_constexpr
    # Numbers that are taken as what they are combined with.
    whole = {"int32": (int,), "int64": (int,), "fp32": (int, float)}
    plain = {value, int, float, bool, str, type(None), tl.core.dtype, tl.core.pointer_type}

    def check(
        self, left, right, left_pointer=False, right_pointer=False, arithmetic=True, division=False
    ):
        if type(left) is value and type(right) is value:
            kind = left.dtype
            if kind.is_ptr():
                is_plain = left_pointer and right.dtype.is_int()
            else:  # halves are divided in single precision
                is_plain = kind is right.dtype and not (division and kind in halves)
            if is_plain:
                return self.broadcast_impl_value(left, right)
        elif arithmetic and type(left) is value:
            is_whole = type(right) in whole.get(left.dtype.name, ())
            if is_whole and abs(right) < 1 << 31:
                right = self.scalar_constant(right, left.dtype)
                return self.broadcast_impl_value(left, right)
        return their_check(self, left, right, left_pointer, right_pointer, arithmetic, division)

    def cast(self, given, kind, rounding=None):
        if rounding is None and given.dtype is kind:
            return given
        return their_cast(self, given, kind, rounding)

    def to_tensor(self, given, check_type=True):
        return given if type(given) is value else their_tensor(self, given, check_type)

    def unwrap(given):
        return given if type(given) in plain else their_unwrap(given)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.cast = check, cast
    TritonSemantic.to_tensor, tl.core._unwrap_if_constexpr = to_tensor, unwrap
    _quicken_handles()


def _compare_by_identity(kind):
    theirs = kind.__eq__
    kind.__eq__ = lambda self, other: self is other or theirs(self, other)


def _quicken_handles():
    """Know by a type's name how many bytes a value of it may have."""
    from triton.runtime import interpreter  # noqa: PLC0415 - where Triton is not installed

    handle = interpreter.TensorHandle
    their_check = handle.__post_init__
    most_bytes: dict[str, int] = {}

    def room(kind):
        if kind.name not in most_bytes:
            bits = 64 if kind.is_ptr() else kind.primitive_bitwidth
            most_bytes[kind.name] = max(bits, 8) // 8
        return most_bytes[kind.name]

    def make(self, data, dtype, attr=None):
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr
        if data.itemsize > room(dtype):
            their_check(self)

    def operate(self, left, right, operation):
        kind = left.dtype.scalar
        found = operation(left.data, right.data)
        if found.itemsize > room(kind):
            found = found.astype(interpreter._get_np_dtype(kind))
        return handle(found, kind)

    handle.__init__ = make
    interpreter.InterpreterBuilder.binary_op = operate


def _quicken_shapes():
    """Check a shape once, not for every value that has it; name types when somebody reads it."""
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed

    block, value, shapes = tl.core.block_type, tl.core.tensor, tl.core.tuple
    constant = tl.core.constexpr
    their_block, their_value = block.__init__, value.__init__
    their_shape, their_equal = shapes.__init__, shapes.__eq__
    checked: dict[tuple[int, ...], tuple] = {}
    shown: dict[int, tuple] = {}

    def make_block(self, element_ty, shape):
        key = tuple([size.value if type(size) is constant else size for size in shape])
        if key not in checked:
            their_block(self, element_ty, shape)
            checked[key] = self.shape, self.numel
        else:
            self.element_ty = element_ty
            self.shape, self.numel = checked[key]

    def make_value(self, handle, kind):
        # A scalar has none; others have the one that is kept above.
        shape = kind.shape if type(kind) is block else None
        known = shown.get(id(shape))
        if known is None:
            their_value(self, handle, kind)
            shown[id(shape)] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = known

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
    _quicken_broadcasts()


def _quicken_broadcasts():
    """Spread blocks of one rank at once, and leave alone what has one shape."""
    import numpy as np  # noqa: PLC0415 - conftest.py imports this file for every test
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed
    from triton.language.semantic import TritonSemantic  # noqa: PLC0415 - as above
    from triton.runtime import interpreter  # noqa: PLC0415 - as above

    block, value = tl.core.block_type, tl.core.tensor
    theirs = TritonSemantic.broadcast_impl_value

    def spread(given, shape):
        if given.type.shape.values == shape:
            return given
        handle = interpreter.TensorHandle(np.broadcast_to(given.handle.data, shape), given.dtype)
        return value(handle, block(given.dtype, shape))

    def broadcast(self, left, right):
        if type(left.type) is block and type(right.type) is block:
            if left.type.shape is right.type.shape:
                return left, right
            sizes = left.type.shape.values, right.type.shape.values
            if len(sizes[0]) == len(sizes[1]) and all(
                a == b or 1 in {a, b} for a, b in zip(*sizes, strict=True)
            ):
                shape = [b if a == 1 else a for a, b in zip(*sizes, strict=True)]
                return spread(left, shape), spread(right, shape)
        return theirs(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast
