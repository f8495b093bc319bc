"""A process that compiles kernels for another, without a GPU: `python -m` this module.

    stdin     a `Batch`, then `CompileOrder`s, a line of JSON each, until the end
    stdout    a `Compiled` for each order, as it is done; what was compiled lies in Triton's cache

Most of a compilation holds Python's lock, so this takes processes. All that has to be imported is
so once, before the orders are here; then this process forks, while it still has no other thread.
Its children draw orders from a pipe, and end with it or where nobody reads their answers.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module

import msgspec
import triton
from triton.runtime.cache import triton_key

from tailrace.kernels.compile_order import CompileOrder, source_of

MOST_ORDERS = 4096
"""Of a batch: their numbers fit in a pipe."""
_REASON_CHARACTERS = 300
_NUMBER_BYTES = 4


class Batch(msgspec.Struct, frozen=True):
    """The first line."""

    workers: int


class Compiled(msgspec.Struct, frozen=True):
    """What became of an order."""

    index: int
    """Of the order, from 0."""
    seconds: float
    error: str = ""
    """Why it is not compiled, if so."""
    launcher_error: str = ""
    """Why the code that launches it (C, by the host's compiler) is not there, if so."""


def main() -> int:
    """Import, read the orders, have them compiled; return the exit status."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what compilers print is no answer
    import_module("tailrace.kernels.triton_kernels")
    import_module("tailrace.kernels.sampling.triton_likeliest")
    triton_key()  # reads all of Triton's files: once, for all children
    lines = sys.stdin.buffer.read().splitlines()
    if not lines:
        return 0
    batch = msgspec.json.decode(lines[0], type=Batch)
    decode = msgspec.json.Decoder(CompileOrder).decode
    orders = [decode(line) for line in lines[1 : MOST_ORDERS + 1]]
    numbers, ahead = os.pipe()
    os.write(ahead, b"".join(i.to_bytes(_NUMBER_BYTES, "little") for i in range(len(orders))))
    os.close(ahead)
    children = [_child(orders, numbers, answers) for _ in range(batch.workers)]
    return max([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children])


def _child(orders: list[CompileOrder], numbers: int, answers: int) -> int:
    """Fork a process that compiles until no number is left; return its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        while number := os.read(numbers, _NUMBER_BYTES):
            index = int.from_bytes(number, "little")
            line = msgspec.json.encode(_compiled(index, orders[index]))
            os.write(answers, line + b"\n")  # at once, as it is less than a pipe's unit
        status = 0
    except BrokenPipeError:
        pass  # nobody waits any more
    finally:
        os._exit(status)  # without what the parent has to do at its own end


def _compiled(index: int, order: CompileOrder) -> Compiled:
    begun_s = time.monotonic()
    error = launcher_error = ""
    try:
        source, target, options = source_of(order)
        kernel = triton.compile(source, target=target, options=options)
    except Exception as failure:  # noqa: BLE001 - whatever it is, the launching process meets it too
        error = _reason(failure)
    else:
        launcher_error = _build_launcher(source, kernel)
    return Compiled(index, time.monotonic() - begun_s, error, launcher_error)


def _build_launcher(source: object, kernel: triton.compiler.CompiledKernel) -> str:
    """Have the code built that launches a kernel; return why it is not, or nothing.

    It is linked with the driver's library, of which nothing is called here.
    """
    from triton.backends.nvidia.driver import CudaLauncher  # noqa: PLC0415 - looks for the driver

    try:
        CudaLauncher(source, kernel.metadata)
    except Exception as failure:  # noqa: BLE001 - the launching process builds it as well
        return _reason(failure)
    return ""


def _reason(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    text = f"{type(failure).__name__}: {lines[-1] if lines else 'no reason given'}"
    return text[:_REASON_CHARACTERS]


if __name__ == "__main__":
    sys.exit(main())
