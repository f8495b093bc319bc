"""What the kernels' pieces of assembler mean: a Python function for each text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.linear import triton_hopper_int4_bands as bands
from tailrace.kernels.linear.triton_int4 import UNPACK_BFLOAT16, UNPACK_FLOAT16
from tailrace.kernels.paged_attention.triton_hopper_float8_kv import DEAL_HIGHER, DEAL_LOWER, WIDEN
from tests.kernels.gluon_interpreter.values import Array, GluonFaultError, plain

if TYPE_CHECKING:
    from collections.abc import Callable

    _Meaning = Callable[[list[Array]], list[torch.Tensor]]


def _unpack(magic: int, dtype: torch.dtype) -> _Meaning:
    """Return the four nibbles of int16 as floats, plus an offset that is given as its bits."""

    def run(args: list[Array]) -> list[torch.Tensor]:
        codes, offsets = (x.data for x in args)
        if {codes.dtype, offsets.dtype} != {torch.int16}:
            raise GluonFaultError(f"codes in {codes.dtype}, offsets in {offsets.dtype}")
        wide = codes.int() & 0xFFFF
        values = [((wide >> shift & 15) | magic).short().view(dtype) for shift in (0, 4, 8, 12)]
        return [value + offsets.contiguous().view(dtype) for value in values]

    return run


def _pair(magic: int, shifts: tuple[int, int], dtype: torch.dtype) -> tuple[str, int, _Meaning]:
    """Return what gives two nibbles of int16 as floats, plus their offsets.

    In float16 the second nibble stays where it is, as 16 x what it is, and has an offset of its
    own.
    """
    count = 1 if dtype == torch.bfloat16 else 2

    def run(args: list[Array]) -> list[torch.Tensor]:
        codes, *offsets = (x.data for x in args)
        if {codes.dtype, *(x.dtype for x in offsets)} != {torch.int16}:
            raise GluonFaultError(f"codes and offsets in {[x.data.dtype for x in args]}")
        wide = codes.int() & 0xFFFF
        results = []
        for nibble, shift in enumerate(shifts):
            is_high = count == 2 and nibble == 1
            bits = wide >> (shift - 4) & 0xF0 if is_high else wide >> shift & 0xF
            value = (bits | magic).short().view(dtype)
            offset = offsets[-1 if is_high else 0].contiguous().view(dtype)
            # One rounding, of a product and a sum: exact in either half.
            results.append((value.float() / (16 if is_high else 1) + offset.float()).to(dtype))
        return results

    return "=r,=r,r" + ",r" * count, 2, run


def _pairs() -> dict[str, tuple[str, int, _Meaning]]:
    """Return the assembler of `triton_hopper_int4_bands`."""
    found = {}
    for half, magic, dtype in (
        ("BFLOAT16", 0x4300, torch.bfloat16), ("FLOAT16", 0x6400, torch.float16),
    ):  # fmt: skip
        for place, shifts in (("LOW", (0, 4)), ("HIGH", (8, 12))):
            text = getattr(bands, f"{half}_{place}")
            found[str(plain(text))] = _pair(magic, shifts, dtype)
    return found


def _widen(asm: object) -> _Meaning:
    """Return four float8 numbers in float16: a word's, or those that a permutation of two names."""
    selector = re.search(r"prmt\.b32 \w+, \$4, \$5, 0x([0-7]{4});", str(plain(asm)))
    places = [int(digit) for digit in reversed(selector[1])] if selector else range(4)

    def run(args: list[Array]) -> list[torch.Tensor]:
        words = torch.stack([x.data for x in args], dim=-1)
        if words.dtype != torch.int32:
            raise GluonFaultError(f"words of float8 in {words.dtype}")
        numbers = words.view(torch.float8_e4m3fn).half()  # [..., 4 of each word]
        return [numbers[..., place] for place in places]

    return run


MEANINGS: dict[str, tuple[str, int, _Meaning]] = {
    str(plain(UNPACK_BFLOAT16)): ("=r,=r,=r,=r,r,r", 2, _unpack(0x4300, torch.bfloat16)),
    str(plain(UNPACK_FLOAT16)): ("=r,=r,=r,=r,r,r", 2, _unpack(0x6400, torch.float16)),
    **_pairs(),
    str(plain(WIDEN)): ("=h,=h,=h,=h,r", 1, _widen(WIDEN)),
    str(plain(DEAL_LOWER)): ("=h,=h,=h,=h,r,r", 1, _widen(DEAL_LOWER)),
    str(plain(DEAL_HIGHER)): ("=h,=h,=h,=h,r,r", 1, _widen(DEAL_HIGHER)),
}
"""By text: the constraints, how many elements a register holds, and what is computed."""
