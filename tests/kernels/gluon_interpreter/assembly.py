"""What the kernels' pieces of assembler mean: a Python function for each text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.kernels.linear.triton_int4 import UNPACK_BFLOAT16, UNPACK_FLOAT16
from tests.kernels.gluon_interpreter.values import Array, GluonFaultError, plain

if TYPE_CHECKING:
    from collections.abc import Callable


def _unpack(magic: int, dtype: torch.dtype) -> Callable[[list[Array]], list[torch.Tensor]]:
    """Return the four nibbles of int16 as floats, plus an offset that is given as its bits."""

    def run(args: list[Array]) -> list[torch.Tensor]:
        codes, offsets = (x.data for x in args)
        if {codes.dtype, offsets.dtype} != {torch.int16}:
            raise GluonFaultError(f"codes in {codes.dtype}, offsets in {offsets.dtype}")
        wide = codes.int() & 0xFFFF
        values = [((wide >> shift & 15) | magic).short().view(dtype) for shift in (0, 4, 8, 12)]
        return [value + offsets.contiguous().view(dtype) for value in values]

    return run


MEANINGS: dict[str, tuple[str, int, Callable[[list[Array]], list[torch.Tensor]]]] = {
    str(plain(UNPACK_BFLOAT16)): ("=r,=r,=r,=r,r,r", 2, _unpack(0x4300, torch.bfloat16)),
    str(plain(UNPACK_FLOAT16)): ("=r,=r,=r,=r,r,r", 2, _unpack(0x6400, torch.float16)),
}
"""By text: the constraints, how many elements a register holds, and what is computed."""
