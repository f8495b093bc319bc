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
    """Let a launch look up once what the interpreter looks up among all names each time."""
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed
    from triton.runtime import interpreter  # noqa: PLC0415 - as above

    names: dict[int, list[str]] = {}

    def patch(package, builder, scope):
        known = names.get(id(package))
        if known is None:
            found = inspect.getmembers(package)
            known = [name for name, member in found if tl.core.is_builtin(member)]
            names[id(package)] = known
        for name in known:
            # Another launch further out may have patched it: that one is no builtin now.
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def recorded_asks(monkeypatch, threads=4):
    """Return the (address, bytes) pairs that programs will have asked for ahead.

    The interpreter has no such instruction, and does not know its programs' threads.
    """
    from triton import language as tl  # noqa: PLC0415 - where Triton is not installed

    from tailrace.kernels.weight_prefetch import triton as programs  # noqa: PLC0415 - as above

    found = []

    def ask(addresses, sizes, *_):
        places = addresses.handle.data.reshape(-1).tolist()
        counts = sizes.handle.data.reshape(-1).tolist()
        found.extend(pair for pair in zip(places, counts, strict=True) if pair[1])

    monkeypatch.setattr(programs, "ask", ask)
    monkeypatch.setattr(tl.extra.cuda, "num_threads", lambda: threads)
    return found
