"""A linear layer of few rows over a weight in 4 bits, in Triton: bound by the codes' bytes.

As in `triton_skinny`, the matrix is the left operand of `tl.dot`, so that its outputs fill the
tensor core's wide side and the few rows the narrow one, and layers with few outputs split their
inputs among SPLITS programs, the last of which adds the parts in order. What differs is the weight:

    chunk     CHUNK inputs, 64 or 128, all of one group
    codes     int16 [chunks, outputs, CHUNK / 4]: one tile of a chunk is one run of memory;
              nibble i of column j is input i * CHUNK / 4 + j, so a shift and a mask unpack
              a whole tile, and each nibble's tile meets CHUNK / 4 neighbouring inputs
    meta      int32 [groups, outputs]: the scale as float32, its last 4 bits the zero point

    part = (code - zero) @ x             whole numbers: exact in half precision
    acc += scale * part                  once a chunk, float32

The scale never touches the codes, so no weight is rounded: the result is that of the dequantised
float32 weight, but for the sum's order. That order is fixed by CHUNK and SPLITS, which depend on
the layer alone, never on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.int4 import GroupInt4

PADDING = 128
"""Outputs are padded to a multiple of it, so that no load of the weight is masked."""

ZERO_MASK = 15


# A register holds two neighbouring int16: `(r >> 4i) & 0x000f000f` are two codes, and with the
# exponent of 128 (bfloat16) or 1024 (float16) or-ed in, two floats 128 + code. $5 holds minus the
# zero point with the same offset, so the sum is exact. 0xea is (a & b) | c.
_UNPACK = """
{
    .reg .b32 shifted, value, one;
    mov.b32 one, 0x3f803f80;
    lop3.b32 value, $4, 0x000f000f, MAGIC, 0xea;
    PLUS $0, value, ONE $5;
    shr.u32 shifted, $4, 4;
    lop3.b32 value, shifted, 0x000f000f, MAGIC, 0xea;
    PLUS $1, value, ONE $5;
    shr.u32 shifted, $4, 8;
    lop3.b32 value, shifted, 0x000f000f, MAGIC, 0xea;
    PLUS $2, value, ONE $5;
    shr.u32 shifted, $4, 12;
    lop3.b32 value, shifted, 0x000f000f, MAGIC, 0xea;
    PLUS $3, value, ONE $5;
}
"""


def _assembler(magic: str, plus: str, one: str) -> tl.constexpr:
    text = _UNPACK.replace("MAGIC", magic).replace("PLUS", plus).replace("ONE", one)
    return tl.constexpr(text)


# bfloat16 has no plain packed sum before Hopper.
UNPACK_BFLOAT16: tl.constexpr = _assembler("0x43004300", "fma.rn.bf16x2", "one,")
UNPACK_FLOAT16: tl.constexpr = _assembler("0x64006400", "add.rn.f16x2", "")


@triton.jit
def _unpack(codes, zeros, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return the four nibbles' tiles less the zero points, in DTYPE.

    Args:
        codes: int16 [BLOCK_N, CHUNK / 4].
        zeros: int32 [BLOCK_N].
        DTYPE: Of the result.
        COMPILED: False in the interpreter, which knows no assembler.
    """
    if COMPILED and tl.bfloat16 == DTYPE:
        offsets = tl.broadcast_to((zeros | 0xC300).to(tl.int16)[:, None], codes.shape)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            UNPACK_BFLOAT16,
            "=r,=r,=r,=r,r,r",
            args=[codes, offsets],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif COMPILED:
        offsets = tl.broadcast_to((zeros | 0xE400).to(tl.int16)[:, None], codes.shape)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            UNPACK_FLOAT16,
            "=r,=r,=r,=r,r,r",
            args=[codes, offsets],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = codes.to(tl.int32)
        w0 = ((wide & 15) - zeros[:, None]).to(DTYPE)
        w1 = (((wide >> 4) & 15) - zeros[:, None]).to(DTYPE)
        w2 = (((wide >> 8) & 15) - zeros[:, None]).to(DTYPE)
        w3 = (((wide >> 12) & 15) - zeros[:, None]).to(DTYPE)
    return w0, w1, w2, w3


@triton.jit(do_not_specialize=["num_rows"])
def int4_kernel(
    x_ptr,
    codes_ptr,
    meta_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals,
    num_rows,
    N,
    padded_n,
    K,
    chunks,
    span,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_A_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COMPILED: tl.constexpr,
    STAGES: tl.constexpr,
):
    QUARTER: tl.constexpr = CHUNK // 4
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, QUARTER)
    is_row = (rows < num_rows)[None, :]
    low = split * span
    high = min(low + span, chunks)
    codes_at = codes_ptr + outputs[:, None] * QUARTER + inner[None, :]
    x_at = x_ptr + rows[None, :] * K + inner[:, None]
    dtype = x_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in tl.range(low, high, num_stages=STAGES):
        codes = tl.load(codes_at + chunk * padded_n * QUARTER, eviction_policy="evict_first")
        meta = tl.load(meta_ptr + (chunk // CHUNKS_A_GROUP) * padded_n + outputs)
        x_chunk = x_at + chunk * CHUNK
        x0 = tl.load(x_chunk, mask=is_row, other=0.0)
        x1 = tl.load(x_chunk + QUARTER, mask=is_row, other=0.0)
        x2 = tl.load(x_chunk + 2 * QUARTER, mask=is_row, other=0.0)
        x3 = tl.load(x_chunk + 3 * QUARTER, mask=is_row, other=0.0)
        w0, w1, w2, w3 = _unpack(codes, meta & 15, dtype, COMPILED)
        scale = (meta & -16).to(tl.float32, bitcast=True)
        part = tl.dot(w0, x0, input_precision="ieee")
        part = tl.dot(w1, x1, part, input_precision="ieee")
        part = tl.dot(w2, x2, part, input_precision="ieee")
        part = tl.dot(w3, x3, part, input_precision="ieee")
        acc += part * scale[:, None]
    places = rows[None, :] * N + outputs[:, None]
    is_place = (outputs < N)[:, None] & is_row
    if SPLITS > 1:
        mine = part_ptr + split * num_rows * N
        tl.store(mine + places, acc, mask=is_place)
        tl.debug_barrier()  # all of this program's stores, before its arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)  # for the next launch
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for index in range(SPLITS):
            other = part_ptr + index * num_rows * N
            acc += tl.load(other + places, mask=is_place, other=0.0, cache_modifier=".cg")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
        acc += bias[:, None]
    tl.store(out_ptr + places, acc.to(dtype), mask=is_place)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    meta_ptr,
    out_ptr,
    N,
    padded_n,
    K,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_A_GROUP: tl.constexpr,
):
    QUARTER: tl.constexpr = CHUNK // 4
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    inner = tl.arange(0, QUARTER)
    at = (chunk.to(tl.int64) * padded_n + outputs)[:, None] * QUARTER + inner[None, :]
    wide = tl.load(codes_ptr + at).to(tl.int32)
    meta = tl.load(meta_ptr + (chunk // CHUNKS_A_GROUP) * padded_n + outputs)
    scale = (meta & -16).to(tl.float32, bitcast=True)[:, None]
    zeros = (meta & 15)[:, None]
    places = outputs.to(tl.int64)[:, None] * K + chunk * CHUNK + inner[None, :]
    is_output = (outputs < N)[:, None]
    dtype = out_ptr.dtype.element_ty
    for nibble in tl.static_range(4):
        w = (((wide >> (4 * nibble)) & 15) - zeros).to(tl.float32) * scale
        tl.store(out_ptr + places + nibble * QUARTER, w.to(dtype), mask=is_output)


@dataclass(frozen=True)
class Int4Shape:
    """How the kernel is specialised for a number of rows."""

    block_n: int
    num_warps: int
    num_stages: int


SHAPES: tuple[tuple[int, Int4Shape], ...] = (
    (16, Int4Shape(128, 4, 4)),
    (32, Int4Shape(128, 4, 4)),
    (64, Int4Shape(128, 8, 4)),
    (128, Int4Shape(128, 8, 3)),
)
"""By the rows of the tile, ascending. Compiled without a spill for Ampere, Ada and Hopper; which
are the fastest is for benchmarks/gpu_gemm.py --sweep to say."""

MOST_ROWS = SHAPES[-1][0]
_PROGRAMS = 264
"""Two for each of Hopper's multiprocessors: layers of fewer tiles split their inputs."""
_MOST_SPLITS = 8
_LEAST_CHUNKS = 4
"""Of a split: fewer leave no room for loads ahead."""


def shape_for(rows: int) -> tuple[int, Int4Shape]:
    """Return the tile's rows, and its shape, for at most `MOST_ROWS` rows."""
    return next((block_m, shape) for block_m, shape in SHAPES if rows <= block_m)


@dataclass(frozen=True)
class PackedInt4:
    """A `GroupInt4` in the kernels' order; the head of this file draws it."""

    codes: Tensor
    """int16 [chunks, padded N, chunk / 4]."""
    meta: Tensor
    """int32 [groups, padded N]."""
    outputs: int
    inputs: int
    chunk: int
    chunks_a_group: int
    splits: int
    """Of the inputs; the same for any number of rows, so that sums are cut at the same places."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, padding included."""
        return self.codes.nbytes + self.meta.nbytes

    @property
    def span(self) -> int:
        """Chunks of one split."""
        return -(-self.codes.shape[0] // self.splits)

    @classmethod
    def of(cls, weight: GroupInt4, device: torch.device | str, splits: int = 0) -> PackedInt4:
        """Repack a weight, once, at load.

        Args:
            weight: On any device.
            device: Where it is to be held.
            splits: Of the inputs; 0 chooses by the layer's size.

        Raises:
            ConfigError: The group is no multiple of 64.
        """
        outputs, inputs = weight.shape
        if weight.group % 64:
            raise ConfigError(
                f"4-bit weights in groups of {weight.group}: the GPU kernel takes multiples of 64"
            )
        chunk = 64 if weight.group % 128 else 128
        chunks = inputs // chunk
        padded = -(-outputs // PADDING) * PADDING
        splits = splits or splits_for(padded, chunks)
        # Whole spans only: a split without a chunk would be waited for all the same.
        splits = -(-chunks // -(-chunks // splits))
        return cls(
            _ordered(weight.unpacked(), chunk, padded).to(device),
            _meta(weight, padded).to(device),
            outputs,
            inputs,
            chunk,
            weight.group // chunk,
            splits,
        )


def splits_for(outputs: int, chunks: int) -> int:
    """Return into how many parts the inputs of a layer are split."""
    tiles = -(-outputs // 128)
    return max(1, min(-(-_PROGRAMS // tiles), _MOST_SPLITS, chunks // _LEAST_CHUNKS))


def _ordered(codes: Tensor, chunk: int, padded: int) -> Tensor:
    """Return int16 [chunks, padded, chunk / 4] of uint8 codes [N, K]; rows that pad are 0."""
    outputs, inputs = codes.shape
    parts = codes.view(outputs, inputs // chunk, 4, chunk // 4).to(torch.int32)
    words = parts[:, :, 0] | (parts[:, :, 1] << 4) | (parts[:, :, 2] << 8) | (parts[:, :, 3] << 12)
    ordered = torch.zeros(
        inputs // chunk, padded, chunk // 4, dtype=torch.int16, device=codes.device
    )
    # From 32768 on, the conversion wraps around: the bits are what counts.
    ordered[:, :outputs] = words.to(torch.int16).transpose(0, 1)
    return ordered


def _meta(weight: GroupInt4, padded: int) -> Tensor:
    """Return int32 [groups, padded]: a half's scale leaves the last bits of a float32 free."""
    outputs = weight.shape[0]
    bits = weight.scales.to(torch.float32).view(torch.int32) | weight.zeros.to(torch.int32)
    meta = torch.zeros(bits.shape[1], padded, dtype=torch.int32, device=bits.device)
    meta[:, :outputs] = bits.t()
    return meta


@dataclass(frozen=True)
class Int4Scratch:
    """What all layers of a stream share."""

    parts: Tensor
    """float32 [splits x rows x outputs, the most that any layer needs]."""
    arrivals: Tensor
    """int32 [tiles], zero between launches."""

    @classmethod
    def allocate(
        cls, weights: list[PackedInt4], rows: int, device: torch.device | str
    ) -> Int4Scratch:
        """Make scratch for these layers and at most so many rows."""
        values = max((w.splits * rows * w.outputs for w in weights if w.splits > 1), default=0)
        tiles = max((-(-w.outputs // 64) for w in weights), default=0)
        return cls(
            torch.empty(values, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )


def int4_linear(
    x_TI: Tensor,
    weight: PackedInt4,
    bias_O: Tensor | None,
    *,
    scratch: Int4Scratch,
    shape: Int4Shape | None = None,
) -> Tensor:
    """Return x @ weight.T + bias [T, O] in x's dtype; sums are float32.

    Args:
        x_TI: Contiguous; 1 to `MOST_ROWS` rows, bfloat16 or float16 (float32 in the interpreter).
        weight: On x's device.
        bias_O: In x's dtype, or none.
        scratch: Large enough for the layer and the rows.
        shape: Instead of the one in `SHAPES`.
    """
    rows = x_TI.shape[0]
    block_m, usual = shape_for(rows)
    shape = shape or usual
    out_TO = torch.empty(rows, weight.outputs, dtype=x_TI.dtype, device=x_TI.device)
    int4_kernel[(triton.cdiv(weight.outputs, shape.block_n), weight.splits)](
        x_TI,
        weight.codes,
        weight.meta,
        x_TI if bias_O is None else bias_O,
        out_TO,
        scratch.parts,
        scratch.arrivals,
        rows,
        weight.outputs,
        weight.codes.shape[1],
        weight.inputs,
        weight.codes.shape[0],
        weight.span,
        BLOCK_M=block_m,
        BLOCK_N=shape.block_n,
        CHUNK=weight.chunk,
        CHUNKS_A_GROUP=weight.chunks_a_group,
        SPLITS=weight.splits,
        HAS_BIAS=bias_O is not None,
        COMPILED=x_TI.device.type == "cuda",
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out_TO


def dequantize(weight: PackedInt4, out_OI: Tensor) -> Tensor:
    """Write the weight it stands for into `out_OI` [N, K], contiguous, and return that."""
    block_n = 64
    dequantize_kernel[(triton.cdiv(weight.outputs, block_n), weight.codes.shape[0])](
        weight.codes,
        weight.meta,
        out_OI,
        weight.outputs,
        weight.codes.shape[1],
        weight.inputs,
        BLOCK_N=block_n,
        CHUNK=weight.chunk,
        CHUNKS_A_GROUP=weight.chunks_a_group,
        num_warps=4,
    )
    return out_OI
