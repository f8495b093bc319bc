"""Triton's interpreter, with float8 conversions as a GPU makes them.

Triton 3.6's own lose the carry of a rounded mantissa (31.7 becomes 16), round subnormals down, and
make 384 of NaN. torch's are right: to the nearest, ties to even, NaN stays.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import contextmanager


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
