"""Compile every Triton kernel for GPUs that are not here; prints one JSON line a kernel.

Runs as a program, in a process without TRITON_INTERPRET: `python -m tests.kernels.compile_ahead
sm_90 [all]`. Nothing but Triton's wheel is needed, which brings ptxas and cuobjdump. `--into
FOLDER` leaves the lines in a file instead, unless they are there: one process compiles, and who
comes meanwhile waits. `--idle` computes in the time that nobody else wants.

What serves without a plan is always compiled, in one half at least; of the rest, which is the
candidates that only a plan may choose and the other halves, a sample of each kernel's, for all of
them take minutes. Who changes a kernel compiles `all`.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tailrace.kernels.attention_shapes import (
    ADA,
    BOUNDS,
    HOPPER,
    decode_candidates,
    decode_shape,
    prefill_candidates,
    prefill_shape,
)
from tailrace.kernels.dependent_launch import has_dependent_launches
from tailrace.kernels.linear import (
    hopper_float8_ways,
    hopper_half_ways,
    hopper_int4_ways,
    triton_float8,
    triton_float8_few,
    triton_float8_rows,
    triton_hopper_float8,
    triton_hopper_half,
    triton_hopper_int4,
    triton_hopper_int4_bands,
    triton_hopper_int4_few,
    triton_hopper_int8,
    triton_hopper_ring,
    triton_int4,
    triton_int8,
    triton_int8_rows,
    triton_skinny,
)
from tailrace.kernels.paged_attention import triton_hopper_decode, triton_hopper_prefill
from tailrace.kernels.paged_attention.contiguous import WHOLE
from tailrace.kernels.paged_attention.triton_decode import GRAIN, decode_kernel
from tailrace.kernels.paged_attention.triton_float8 import Reading
from tailrace.kernels.paged_attention.triton_prefill import prefill_kernel
from tailrace.kernels.paged_attention.triton_widened_kv import PIECE, UNIT_TOKENS, widen_kernel
from tailrace.kernels.rms_norm.triton import rms_norm_kernel
from tailrace.kernels.rope_cache.triton import rope_cache_kernel
from tailrace.kernels.sampling import triton as sampling
from tailrace.kernels.sampling import triton_likeliest
from tailrace.kernels.sampling.rows import NOT_FINITE
from tailrace.kernels.silu_mul.triton import BLOCK, silu_mul_kernel
from tests.kernels import machine_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
NVDISASM = CUOBJDUMP.with_name("nvdisasm")
HEADS = {64: (32, 8), 128: (28, 4), 256: (16, 8)}
"""Query and KV heads that a head dimension comes with."""

HALF = ("q_ptr", "k_cache", "v_cache", "out_ptr", "x_ptr", "qkv_ptr", "logits")
FLOAT = (
    "part_ptr", "lse_ptr", "residual_ptr", "weight_ptr", "cos_ptr", "sin_ptr",
    "q_norm_ptr", "k_norm_ptr", "weights", "gathered", "raw_peaks", "raw_sums", "peaks",
    "temperatures", "min_p", "presence", "frequency", "repetition", "edit_values", "logprobs",
)  # fmt: skip
INDEX = (
    "tiles", "query_starts", "kv_lens", "tables", "positions", "slots", "best_ids", "edit_starts",
    "edit_ids", "history_rows", "history", "top_k", "coarse_counts", "lows", "highs", "sizes",
    "thresholds", "wants_rank", "ranks", "arrivals", "mask_rows", "masks",
)  # fmt: skip
LONG = ("sums", "coarse_sums", "aboves", "seeds", "token_ids")
TYPES = {
    **dict.fromkeys(HALF, "*bf16"),
    **dict.fromkeys(FLOAT, "*fp32"),
    **dict.fromkeys(INDEX, "*i32"),
    **dict.fromkeys(LONG, "*i64"),
    "top_p": "*fp64",
    **dict.fromkeys(("scale_log2", "eps", "norm_eps", "v_scale", "k_inverse", "v_inverse"), "fp32"),
}
FLOAT8_KV = {**TYPES, **dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv")}
# Strides of a cache whose tokens lie one after the other; those of 1 are compiled in.
UNIT_STRIDES = {"stride_kd": 1, "stride_vd": 1}
WIDE = ("N", "K", "span", "padded_n", "vocab_size", "logits_stride")
"""Sizes of matrices, multiples of 16 in every model that is served, and vocabularies, which mostly
are."""


@dataclass(frozen=True)
class Case:
    """One specialisation of one kernel."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    types: dict[str, str] = field(default_factory=lambda: TYPES)
    registers: int | None = None
    """A thread at the start, where warps of several kinds then divide them."""
    source: type[ASTSource] = ASTSource
    is_dependent: bool = False
    """Whether it starts before the kernel ahead of it has ended."""
    is_candidate: bool = False
    """Whether a few of its like are enough: it serves nobody that no plan tells to, or is what
    another case is, in the other half."""

    @property
    def family(self) -> tuple[str, bool]:
        """The kernel, and whether it reads a float8 cache."""
        kernel, *rest = self.name.split()
        return kernel, "float8" in rest


def float8_cases(kind: int) -> Iterator[Case]:
    """The kernels that see the cache, where it is float8."""
    if kind < ADA:
        return
    for case in [*attention_cases(kind, is_float8=True), *rope_cases(is_float8=True)]:
        if "k_cache" in case.kernel.arg_names:
            yield replace(case, name=f"{case.name} float8", types=FLOAT8_KV)


def attention_cases(
    kind: int, units: tuple[int, ...] = (16,), *, is_float8: bool = False
) -> Iterator[Case]:
    """The table's shapes, and those that plans may choose."""
    capability = divmod(kind, 10)
    decodes = Reading.PAIRS if is_float8 else Reading.AS_Q
    for head_dim, (heads, kv_heads) in HEADS.items():
        known = {"NUM_HEADS": heads, "GROUP": heads // kv_heads, "UNIT": 16, "HEAD_DIM": head_dim}
        shapes = prefill_candidates(head_dim, capability)
        served = {prefill_shape(head_dim, bound - 1, capability) for bound in BOUNDS}
        is_plain = kind >= HOPPER and head_dim < 256
        prompts = Reading.FLOAT16 if is_float8 and is_plain else decodes
        for shape, unit in itertools.product(shapes, units):
            tile = {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "UNIT": unit}
            where = "" if unit == 16 else " in one piece"
            yield Case(
                f"prefill {head_dim} {shape.words}{where}",
                prefill_kernel,
                {**UNIT_STRIDES, **known, **tile, **prompts.constants, "COMPILED": True},
                shape.num_warps,
                shape.num_stages,
                is_candidate=shape not in served,
            )
        usual = decode_shape(head_dim, capability, is_float8=is_float8)
        candidates = decode_candidates(head_dim, capability, is_float8=is_float8)
        taken = [(decode, False) for decode in candidates] + [(usual, True)]
        for decode, in_turn in taken:
            yield Case(
                f"decode {head_dim} {decode.words}{' in turn' if in_turn else ''}",
                decode_kernel,
                {
                    **UNIT_STRIDES, **known, "PADDED": 16, "BLOCK_N": decode.block_n,
                    "SPLIT": decode.split, "IN_TURN": in_turn, **decodes.constants,
                    "GRAIN": GRAIN, "ALIKE": True, "WIDE": False, "COMPILED": True,
                },
                decode.num_warps,
                decode.num_stages,
                is_candidate=decode != usual,
            )  # fmt: skip


def rope_cases(*, is_float8: bool) -> Iterator[Case]:
    for has_norm in (False, True):
        yield Case(
            f"rope_cache norm={has_norm}",
            rope_cache_kernel,
            {
                **UNIT_STRIDES, "NUM_HEADS": 28, "NUM_KV_HEADS": 4, "HALF": 64, "PADDED": 64,
                "UNIT": 16, "HAS_NORM": has_norm, "IS_FLOAT8": is_float8,
            },
        )  # fmt: skip


def other_cases() -> Iterator[Case]:
    yield from rope_cases(is_float8=False)
    for has_x in (False, True):
        constants = {"WIDTH": 3584, "BLOCK": 4096, "HAS_X": has_x}
        types = TYPES if has_x else {**TYPES, "x_ptr": "*fp32"}
        yield Case(f"rms_norm x={has_x}", rms_norm_kernel, constants, 8, types=types)
    yield Case("silu_mul", silu_mul_kernel, {"WIDTH": 18944, "BLOCK": BLOCK})
    for shape, rows in itertools.product((triton_skinny.WHOLE, triton_skinny.SPLIT), (16, 32)):
        constants = {
            "BLOCK_M": rows, "BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k,
            "SPLITS": shape.splits, "HAS_BIAS": True,
        }  # fmt: skip
        types = TYPES | {"w_ptr": "*bf16", "bias_ptr": "*bf16"}
        kernel = triton_skinny.skinny_kernel
        yield Case(
            f"skinny {rows}/{shape.splits}", kernel, constants, shape.num_warps, shape.num_stages,
            types,
        )  # fmt: skip


def int4_cases() -> Iterator[Case]:
    """Every tile of rows, for groups of 64 and 128, in one half each; the others are candidates."""
    usual = [*triton_int4.SHAPES.items()]
    usual += [(block_m, triton_int4.SMALL_SHAPE) for block_m in (16, 32, 64)]
    planned = [
        (block_m, shape)
        for block_m, shapes in triton_int4.CANDIDATES.items()
        for shape in shapes
        if (block_m, shape) not in usual
    ]
    for (block_m, shape), chunk, half in itertools.chain(
        itertools.product(usual, (64, 128), ("bf16", "fp16")),
        itertools.product(planned, (64, 128), ("bf16",)),
    ):
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": shape.block_n, "CHUNK": chunk, "CHUNKS_A_GROUP": 1,
            "IS_SPLIT": True, "HAS_BIAS": True, "COMPILED": True, "STAGES": shape.num_stages,
        }  # fmt: skip
        yield Case(
            f"int4 {block_m}/{chunk} {half} {shape.words}", triton_int4.int4_kernel, constants,
            shape.num_warps, shape.num_stages, types=_int4_types(half),
            is_candidate=(block_m, shape) in planned or (chunk == 128) is (half == "fp16"),
        )  # fmt: skip
    for writing in (triton_int4.WRITING, *triton_int4.WRITING_CANDIDATES):
        constants = {"BLOCK_N": writing.block_n, "CHUNK": 128, "CHUNKS_A_GROUP": 1}
        for out in ("bf16", "fp32"):  # to be multiplied, and to be rounded to another format
            yield Case(
                f"int4_dequantize {out} {writing.words}", triton_int4.dequantize_kernel, constants,
                writing.num_warps, types=_int4_types(out),
                is_candidate=writing != triton_int4.WRITING,
            )  # fmt: skip


def hopper_int4_cases(kind: int) -> Iterator[Case]:
    """Each kind of shape; groups of 64, in the other half, for what serves and the widest."""
    if kind < HOPPER:
        return
    kinds = {
        (rows, chunk, shape.words): (rows, chunk, shape)
        for rows, shapes in triton_hopper_int4.CANDIDATES.items()
        for shape in (replace(shape, least_span=4) for shape in shapes)
        for chunk in (64, 128)
        if chunk == 128 or shape.order == "pair" or shape.sides == 2
    }
    served = {name for *_, names in hopper_int4_ways.SERVED for name in names}
    for rows, chunk, shape in kinds.values():
        registers, side_registers = shape.registers
        sides, stages = shape.sides, shape.stages(rows, chunk)
        half = "bf16" if chunk == 128 else "fp16"
        pieces = 2 if rows > 64 else 1
        rings = _int4_rings(half, 128 * sides, chunk, rows // pieces, chunk)
        constants = {
            "PIECES": pieces, "CHUNKS_A_GROUP": 1, "HAS_BIAS": True, "STAGES": stages,
            "ORDER": shape.order, "REGISTERS": side_registers,
        }  # fmt: skip
        yield Case(
            f"hopper_int4 {rows}/{chunk} {shape.words}", triton_hopper_int4.int4_hopper_kernel,
            constants, types={**_int4_types(half), **rings},
            registers=registers, source=GluonASTSource,
            is_candidate=replace(shape, least_span=7).words not in served,
        )  # fmt: skip


def hopper_band_cases(kind: int) -> Iterator[Case]:
    """Every candidate's kind, for both chunks, in one half each."""
    if kind < HOPPER:
        return
    kinds = {
        (rows, chunk, shape.words): (rows, chunk, shape)
        for rows, shapes in triton_hopper_int4_bands.CANDIDATES.items()
        for shape in (replace(shape, least_span=4) for shape in shapes)
        for chunk in (64, 128)
    }
    for rows, chunk, shape in kinds.values():
        half = "bf16" if chunk == 128 else "fp16"
        constants = {
            "TILE": shape.tile, "CHUNKS_A_GROUP": 1, "HAS_BIAS": True,
            "STAGES": shape.stages(rows, chunk),
        }  # fmt: skip
        yield Case(
            f"hopper_int4_bands {rows}/{chunk} {shape.words}",
            triton_hopper_int4_bands.int4_bands_kernel, constants, shape.warps,
            types={**_int4_types(half), **_int4_rings(half, shape.box, chunk, rows, 64)},
            registers=shape.registers, source=GluonASTSource, is_candidate=True,
        )  # fmt: skip


def hopper_few_cases(kind: int) -> Iterator[Case]:
    """Every candidate of few rows, for both chunks, in one half each."""
    if kind < HOPPER:
        return
    for rows, shapes in triton_hopper_int4_few.CANDIDATES.items():
        for shape, chunk in itertools.product(shapes, (64, 128)):
            half = "bf16" if chunk == 128 else "fp16"
            registers, slice_registers = shape.registers
            constants = {
                "SLICES": shape.slices, "CHUNKS_A_GROUP": 1, "HAS_BIAS": True,
                "STAGES": shape.stages(rows, chunk), "REGISTERS": slice_registers,
            }  # fmt: skip
            yield Case(
                f"hopper_int4_few {rows}/{chunk} {shape.words}",
                triton_hopper_int4_few.int4_few_kernel, constants,
                types={**_int4_types(half), **_int4_rings(half, 64, chunk, rows, chunk)},
                registers=registers, source=GluonASTSource, is_candidate=True,
            )  # fmt: skip


def _int4_rings(half: str, outputs: int, chunk: int, rows: int, inputs: int) -> dict[str, str]:
    """Return the descriptors' types, for boxes of so many outputs, rows, and inputs of rows."""
    quarter = chunk // 4
    by_width = {width: triton_hopper_ring.shared_layout(width) for width in (quarter, inputs)}
    return {
        "codes_desc": f"tensordesc<i16[{outputs}, {quarter}],{by_width[quarter]!r}>",
        "x_desc": f"tensordesc<{half}[{rows}, {inputs}],{by_width[inputs]!r}>",
        "meta_desc": f"tensordesc<i32[1, {outputs}],{triton_hopper_ring.META_LAYOUT!r}>",
    }


def _int4_types(half: str) -> dict[str, str]:
    halves = dict.fromkeys(("x_ptr", "out_ptr", "bias_ptr"), f"*{half}")
    codes = {"codes_ptr": "*i16", "meta_ptr": "*i32", "arrivals": "*i32"}
    return {**TYPES, **halves, **codes}


def float8_linear_cases(kind: int) -> Iterator[Case]:
    """Products over FP8 weights, and rows rounded to FP8."""
    if kind < ADA:
        return
    halves = dict.fromkeys(("x_ptr", "out_ptr", "bias_ptr"), "*bf16")
    floats = dict.fromkeys(("scale_ptr", "scales_ptr", "x_scale_ptr", "w_scale_ptr"), "*fp32")
    wide = dict.fromkeys(("w_ptr", "values_ptr"), "*fp8e4nv")
    types = {**TYPES, **halves, **floats, **wide, "arrivals": "*i32"}
    planned = [(rows, shape) for rows, some in triton_float8.CANDIDATES.items() for shape in some]
    for (block_m, shape), by_blocks in itertools.product(
        (*triton_float8.SKINNY_SHAPES, *planned), (False, True)
    ):
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": shape.block_n, "BLOCK_K": 128, "BY_BLOCKS": by_blocks,
            "IS_SPLIT": True, "HAS_BIAS": True, "STAGES": shape.num_stages,
        }  # fmt: skip
        yield Case(
            f"float8_skinny {block_m} blocks={by_blocks} {shape.words}",
            triton_float8.float8_skinny_kernel, constants,
            shape.num_warps, shape.num_stages, types=types,
            is_candidate=(block_m, shape) not in triton_float8.SKINNY_SHAPES,
        )  # fmt: skip
    many = (triton_float8.MANY_SHAPE, *triton_float8.MANY_CANDIDATES)
    for tile, by_blocks in itertools.product(many, (False, True)):
        constants = {
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP_M": triton_float8.GROUP_M,
            "BY_BLOCKS": by_blocks, "HAS_BIAS": True,
        }  # fmt: skip
        yield Case(
            f"float8_many blocks={by_blocks} {tile.words}", triton_float8.float8_many_kernel,
            constants, tile.num_warps, tile.num_stages, {**types, "x_ptr": "*fp8e4nv"},
            is_candidate=tile != triton_float8.MANY_SHAPE,
        )  # fmt: skip
    yield from float8_few_cases(kind, types)
    hidden = {"WIDTH": 3584, "BLOCK": 4096}
    inner = {"WIDTH": 18944, "BLOCK": 32768}
    for group in (0, 128):
        for name, sizes, warps in (
            ("quantize_rows", hidden, 8), ("rms_norm_float8", hidden, 8),
            ("silu_mul_float8", inner, 16),
        ):  # fmt: skip
            kernel = getattr(triton_float8_rows, f"{name}_kernel")
            constants = {**sizes, "GROUP": group}
            if "HAS_X" in kernel.arg_names:
                constants["HAS_X"] = True
            yield Case(f"{name} {group}", kernel, constants, warps, types=types)


def float8_few_cases(kind: int, types: dict[str, str]) -> Iterator[Case]:
    """Products of few FP8 rows: every shape that serves, and those that plans may choose."""
    is_hopper = kind >= HOPPER
    few, more = triton_float8_few.OTHERS, triton_float8_few.OTHER_CANDIDATES
    if is_hopper:
        few, more = triton_float8_few.HOPPER, triton_float8_few.HOPPER_CANDIDATES
    shapes = [*few, *((rows, shape) for rows, some in more.items() for shape in some)]
    for (block_m, shape), by_blocks in itertools.product(shapes, (False, True)):
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": shape.block_n, "BY_BLOCKS": by_blocks,
            "BY_DESCRIPTOR": is_hopper, "IS_SPLIT": True, "HAS_BIAS": True,
            "STAGES": shape.num_stages,
        }  # fmt: skip
        sources = dict.fromkeys(("x_desc", "w_desc"), "*fp8e4nv")
        if is_hopper:
            sources = {
                "x_desc": f"tensordesc<fp8e4nv[{block_m}, 128]>",
                "w_desc": f"tensordesc<fp8e4nv[{shape.block_n}, 128]>",
            }
        yield Case(
            f"float8_few {block_m} blocks={by_blocks} {shape.words}",
            triton_float8_few.float8_few_kernel, constants, shape.num_warps, shape.num_stages,
            {**types, "x_ptr": "*fp8e4nv", **sources}, is_candidate=(block_m, shape) not in few,
        )  # fmt: skip


def hopper_float8_cases(kind: int) -> Iterator[Case]:
    """Every candidate's kind, by channels and by blocks, in one half each."""
    if kind < HOPPER:
        return
    served = {
        of_class
        for *_, names in hopper_float8_ways.SERVED
        for of_class in zip(triton_hopper_float8.CANDIDATES, names, strict=True)
    }
    floats = dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32")
    boxes, scales = triton_hopper_float8.BYTES_LAYOUT, triton_hopper_ring.META_LAYOUT
    kinds = {
        (rows, shape.words): (rows, shape)
        for rows, shapes in triton_hopper_float8.CANDIDATES.items()
        for shape in (replace(shape, least_span=min(shape.least_span, 4)) for shape in shapes)
    }
    for (rows, shape), by_blocks in itertools.product(kinds.values(), (False, True)):
        registers, slice_registers = shape.registers
        constants = {
            "TILE": shape.tile, "SLICES": shape.slices, "BY_BLOCKS": by_blocks, "HAS_BIAS": True,
            "STAGES": shape.stages(rows), "REGISTERS": slice_registers,
            "IN_PAIRS": shape.meets == "pairs",
        }  # fmt: skip
        if not by_blocks:
            constants["scale_desc"] = None
        half = "bf16" if by_blocks else "fp16"
        types = {
            **TYPES, **floats, **dict.fromkeys(("out_ptr", "bias_ptr"), f"*{half}"),
            "w_desc": f"tensordesc<fp8e4nv[{shape.box}, 128],{boxes!r}>",
            "x_desc": f"tensordesc<fp8e4nv[{rows}, 128],{boxes!r}>",
            "scale_desc": f"tensordesc<fp32[1, {max(rows, 32)}],{scales!r}>",
        }  # fmt: skip
        yield Case(
            f"hopper_float8 {rows} blocks={by_blocks} {shape.words}",
            triton_hopper_float8.float8_hopper_kernel, constants, shape.warps, types=types,
            registers=registers, source=GluonASTSource,
            is_candidate=(rows, shape.words) not in served,
        )  # fmt: skip


def hopper_half_cases(kind: int) -> Iterator[Case]:
    """Every candidate's kind, in one half each."""
    if kind < HOPPER:
        return
    served = {
        of_class
        for *_, names in hopper_half_ways.SERVED
        for of_class in zip(triton_hopper_half.CANDIDATES, names, strict=True)
    }
    boxes = triton_hopper_half.BOX_LAYOUT
    kinds = {
        (rows, replace(shape, least_span=0)): (rows, shape)
        for rows, shapes in triton_hopper_half.CANDIDATES.items()
        for shape in shapes
    }
    for (rows, shape), half in zip(kinds.values(), itertools.cycle(("bf16", "fp16"))):
        registers, slice_registers = shape.registers
        constants = {
            "TILE": shape.tile, "STEPS": shape.steps, "SLICES": shape.slices, "HAS_BIAS": True,
            "MEETS": shape.meets, "STAGES": shape.stages(rows), "AHEAD": shape.is_ahead(rows),
            "REGISTERS": slice_registers,
        }  # fmt: skip
        types = {
            **TYPES, **dict.fromkeys(("out_ptr", "bias_ptr"), f"*{half}"),
            "w_desc": f"tensordesc<{half}[{shape.box}, 64],{boxes!r}>",
            "x_desc": f"tensordesc<{half}[{rows}, 64],{boxes!r}>",
        }  # fmt: skip
        yield Case(
            f"hopper_half {rows} {shape.words}", triton_hopper_half.half_hopper_kernel, constants,
            shape.warps, types=types, registers=registers, source=GluonASTSource,
            is_candidate=(rows, shape.words) not in served,
        )  # fmt: skip


def int8_cases(kind: int) -> Iterator[Case]:
    """Products of int8 rows, by tensor descriptors on Hopper, and rows rounded to int8."""
    halves = dict.fromkeys(("x_ptr", "out_ptr", "bias_ptr", "matrix_ptr"), "*bf16")
    floats = dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "scales_ptr"), "*fp32")
    types = {**TYPES, **halves, **floats, "values_ptr": "*i8"}
    is_hopper = kind >= HOPPER
    rows = triton_int8.HOPPER if is_hopper else triton_int8.OTHERS
    served = shapes = [shape for _, shape in rows]
    if is_hopper:
        shapes = [*served, *itertools.chain(*triton_int8.HOPPER_CANDIDATES.values())]
    for shape in dict.fromkeys(shapes):
        operands = {"x": "*i8", "w": "*i8"}
        if is_hopper:
            operands = {
                "x": f"tensordesc<i8[{shape.block_m}, {shape.block_k}]>",
                "w": f"tensordesc<i8[{shape.block_n}, {shape.block_k}]>",
            }
        constants = {
            "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k,
            "GROUP_M": triton_int8.GROUP_M, "BY_DESCRIPTOR": is_hopper, "HAS_BIAS": True,
            "STAGES": shape.num_stages,
        }  # fmt: skip
        yield Case(
            f"int8 {shape.words}", triton_int8.int8_kernel, constants, shape.num_warps,
            shape.num_stages, {**types, **operands}, is_candidate=shape not in served,
        )  # fmt: skip
    hidden = {"WIDTH": 3584, "BLOCK": 4096, "ROTATED": 128}
    inner = {"WIDTH": 18944, "BLOCK": triton_int8_rows.PIECE, "ROTATED": 128}
    for name, sizes in (
        ("quantize_rows", hidden), ("rms_norm_int8", hidden), ("silu_mul_int8", inner),
    ):  # fmt: skip
        kernel = getattr(triton_int8_rows, f"{name}_kernel")
        constants = sizes | ({"HAS_X": True} if "HAS_X" in kernel.arg_names else {})
        yield Case(f"{name} int8", kernel, constants, 8, types=types)


def hopper_int8_cases(kind: int) -> Iterator[Case]:
    """Every candidate, with a bias, in one half each."""
    if kind < HOPPER:
        return
    layout = triton_hopper_int8.shared_layout()
    for shape, half in itertools.product(triton_hopper_int8.CANDIDATES, ("bf16", "fp16")):
        types = {
            **TYPES, **dict.fromkeys(("out_ptr", "bias_ptr"), f"*{half}"),
            **dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32"), "tiles": "i32",
            "x_desc": f"tensordesc<i8[128, 128],{layout!r}>",
            "w_desc": f"tensordesc<i8[{shape.block_n}, 128],{layout!r}>",
        }  # fmt: skip
        constants = {"GROUP_M": shape.group_m, "HAS_BIAS": True, "STAGES": shape.stages}
        yield Case(
            f"hopper_int8 {shape.block_n}/{shape.stages}/{shape.group_m} {half}",
            triton_hopper_int8.int8_hopper_kernel, constants, types=types,
            registers=triton_hopper_int8.REGISTERS, source=GluonASTSource, is_candidate=True,
        )  # fmt: skip


def hopper_prefill_cases(kind: int) -> Iterator[Case]:
    """Every candidate in bfloat16 over units of 8; the usual ones over what else they serve.

    That is units of 16 and 32 in a pool, keys in one piece, float16, and what was widened.
    """
    if kind < HOPPER:
        return
    usual = triton_hopper_prefill.USUAL
    wanted = [
        (head_dim, shape, "bf16", 8, False)
        for head_dim, shapes in triton_hopper_prefill.CANDIDATES.items()
        for shape in shapes
    ]
    others = itertools.product(usual.items(), (("fp16", 16), ("bf16", 32), ("bf16", WHOLE)))
    wanted += [(dim, shape, half, unit, False) for (dim, shape), (half, unit) in others]
    wanted += [(dim, shape, "bf16", UNIT_TOKENS, True) for dim, shape in usual.items()]
    for head_dim, shape, half, unit, is_scaled in wanted:
        heads, kv_heads = HEADS[head_dim]
        box = triton_hopper_prefill.box_tokens(unit, shape)
        boxes = f"tensordesc<{half}[1, {box}, 1, 64],{triton_hopper_prefill.box_layout()!r}>"
        rows = f"tensordesc<{half}[64, {head_dim}],{triton_hopper_prefill.query_layout()!r}>"
        types = {
            **TYPES, "q_desc": rows, "k_desc": boxes, "v_desc": boxes, "out_ptr": f"*{half}",
        }  # fmt: skip
        constants = {
            "NUM_HEADS": heads, "GROUP": heads // kv_heads, "UNIT": unit, "HEAD_DIM": head_dim,
            "BLOCK_N": shape.block_n, "STAGES": shape.stages,
            "VALUE_STAGES": shape.value_stages, "TURNS": shape.turns,
            "REGISTERS": shape.registers, "IS_SCALED": is_scaled,
        }  # fmt: skip
        yield Case(
            f"hopper_prefill {head_dim} {shape.words} {half}/{unit}",
            triton_hopper_prefill.hopper_prefill_kernel, constants, types=types,
            registers=triton_hopper_prefill.REGISTERS, source=GluonASTSource, is_candidate=True,
        )  # fmt: skip


def hopper_decode_cases(kind: int) -> Iterator[Case]:
    """Every candidate in bfloat16 over units of 8; the usual one over what else it serves.

    That is heads of 64, units of 16 in float16, 16 heads a KV head, and programs that take splits
    in turn. Likewise over a float8 cache, but for heads of 64.
    """
    if kind < HOPPER:
        return
    usual = triton_hopper_decode.USUAL
    wanted = [
        (shape, 128, 7, "bf16", 8, in_turn, False)
        for shape in triton_hopper_decode.CANDIDATES
        for in_turn in ((False, True) if shape == usual else (False,))
    ]
    wanted += [(usual, 64, 4, "bf16", 8, False, False), (usual, 128, 8, "fp16", 16, False, False)]
    wanted += [(triton_hopper_decode.RINGS[0], 128, 16, "bf16", 8, True, False)]
    usual = triton_hopper_decode.USUAL_FLOAT8
    wanted += [
        (shape, 128, 7, "bf16", 8, in_turn, True)
        for shape in triton_hopper_decode.FLOAT8_CANDIDATES
        for in_turn in ((False, True) if shape == usual else (False,))
    ]
    # 16 heads have twice the scores: of half the keys they leave room for two products' left sides.
    short = triton_hopper_decode.HopperDecodeShape(stages=6, split=256, registers=80)
    wanted += [(usual, 128, 8, "fp16", 16, False, True), (short, 128, 16, "bf16", 8, True, True)]
    for shape, head_dim, group, half, unit, in_turn, is_float8 in wanted:
        columns = triton_hopper_decode.padded(group)
        box = triton_hopper_decode.box_layout(is_float8=is_float8)
        pieces = (
            "fp8e4nv[1, 1, 1, 8, 128]" if is_float8 else f"{half}[1, 1, {head_dim // 64}, 8, 64]"
        )
        boxes = f"tensordesc<{pieces},{box!r}>"
        rows = f"tensordesc<{half}[{columns}, {head_dim}],{triton_hopper_decode.query_layout()!r}>"
        types = {
            **TYPES, "q_desc": rows, "k_desc": boxes, "v_desc": boxes, "out_ptr": f"*{half}",
        }  # fmt: skip
        constants = {
            "NUM_HEADS": 4 * group, "GROUP": group, "UNIT": unit, "TILE": shape.tile,
            "SPLIT": shape.split, "STAGES": shape.stages, "REGISTERS": shape.producer_registers,
            "IN_TURN": in_turn,
        }  # fmt: skip
        where, kv = " in turn" if in_turn else "", "float8 " if is_float8 else ""
        yield Case(
            f"hopper_decode {kv}{head_dim} {shape.words} {half}/{group}/{unit}{where}",
            triton_hopper_decode.hopper_decode_kernel, constants, types=types,
            registers=shape.registers, source=GluonASTSource, is_candidate=True,
        )  # fmt: skip


def widen_cases(kind: int) -> Iterator[Case]:
    """From units of 8 and 32 to either half, as many sequences as captured steps have and more."""
    if kind < HOPPER:
        return
    for (head_dim, (_, kv_heads)), (half, unit, padded) in itertools.product(
        HEADS.items(), (("bf16", 8, 32), ("fp16", 32, 256))
    ):
        if head_dim not in triton_hopper_prefill.USUAL:
            continue
        constants = {
            **UNIT_STRIDES, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "UNIT": unit,
            "WIDE_UNIT": UNIT_TOKENS, "PIECE": PIECE, "PADDED": padded,
        }  # fmt: skip
        types = {
            **FLOAT8_KV, **dict.fromkeys(("wide_k", "wide_v"), f"*{half}"), "wide_tables": "*i32",
        }  # fmt: skip
        yield Case(f"widen {head_dim} {half}/{unit}/{padded}", widen_kernel, constants, types=types)


def sampling_cases() -> Iterator[Case]:
    """For a vocabulary of 152k, which is 149 blocks."""
    warps = {"weigh": 8, "aim": 8, "search": 16}
    known = {"PARTS": 256, "BLOCK": sampling.BLOCK}
    for name in ("adjust", "weigh", "aim", "gather", "search", "sum_kept", "draw", "rank"):
        kernel = getattr(sampling, f"{name}_kernel")
        constants = {key: value for key, value in known.items() if key in kernel.arg_names}
        types = {**TYPES, "positions": "*i64"}
        registers = sampling.WEIGH_REGISTERS if name == "weigh" else None
        yield Case(
            f"sample_{name}", kernel, constants, warps.get(name, 4), types=types,
            registers=registers,
        )  # fmt: skip


def likeliest_cases() -> Iterator[Case]:
    types = {**TYPES, "tops": "*fp32", "slots": "*i32", "last_tokens": "*i64"}
    block = {"BLOCK": triton_likeliest.BLOCK}
    yield Case("tops", triton_likeliest.tops_kernel, block, types=types)
    constants = {"NOT_FINITE": NOT_FINITE, "PARTS": 256}
    yield Case("likeliest", triton_likeliest.likeliest_kernel, constants, types=types)


def families(cases: list[Case]) -> list[list[Case]]:
    """Return the cases by kernel, in their order."""
    found: dict[tuple[str, bool], list[Case]] = {}
    for case in cases:
        found.setdefault(case.family, []).append(case)
    return list(found.values())


def dependent_cases(kind: int, cases: list[Case]) -> Iterator[Case]:
    """Some of each kernel that can be launched so, where the hardware knows it: two lines more."""
    if not has_dependent_launches(torch.device("cuda"), (kind // 10, kind % 10)):
        return
    able = [case for case in cases if "DEPENDENT" in case.kernel.arg_names]
    for several in families(able):
        for case in several[:: -(-len(several) // 3)]:
            yield replace(case, name=f"{case.name} dependent", is_dependent=True)


def build(case: Case, arch: int) -> Any:
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    known = {"DEPENDENT": case.is_dependent, **case.constants}
    for index, name in enumerate(case.kernel.arg_names):
        if name in known:
            signature[name], constants[index,] = "constexpr", known[name]
            continue
        signature[name] = case.types.get(name, "i32")
        # What the launcher finds out by itself: pointers and strides are multiples of 16.
        if signature[name].startswith("*") or name.startswith("stride_") or name in WIDE:
            attributes[index,] = [["tt.divisibility", 16]]
    source = case.source(case.kernel, signature, constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if case.registers is not None:
        options["maxnreg"] = case.registers
    if case.is_dependent:
        options["launch_pdl"] = True
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def usage(compiled: Any) -> dict[str, int]:
    """Registers a thread, bytes of stack and of spills a thread, shared bytes of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", run.stdout + run.stderr)
    assert found is not None, run.stdout + run.stderr
    registers, stack, local = map(int, found.groups())
    return {
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": compiled.metadata.shared,
    }


def dependence(compiled: Any) -> dict[str, int]:
    """Waits and signals in the code, and what is written or copied before the first wait."""
    ptx = compiled.asm["ptx"]
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    early = re.findall(r"\b(?:st|atom|red)\.\S*global|\bcp\.async", before) if wait else []
    return {
        "waits": ptx.count("griddepcontrol.wait"),
        "signals": ptx.count("griddepcontrol.launch_dependents"),
        "early": len(early),
    }


_BARRIER = re.compile(r"^\s*(%\S+) = ttg\.local_alloc .*memdesc<(?:\d+x)*i64,", re.MULTILINE)


def loose_barriers(ttgir: str) -> list[str]:
    """Return the barriers that are not handed to a kernel's partitions of warps.

    Their memory is free for others after their last use, and no barrier may lie there then that
    was not invalidated (PTX ISA, mbarrier.inval): it comes back over what is written there, where
    contexts are switched.

    Raises:
        ValueError: There is none at all: every kernel of ours in Gluon has some, so that is not how
            Triton writes them.
    """
    barriers = _BARRIER.findall(ttgir)
    if not barriers:
        raise ValueError("no barrier is found in what Triton made of a kernel in Gluon")
    handed = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    given = {name for names in handed for name in names.split(", ")}
    return [name for name in barriers if name not in given]


def assembler(compiled: Any) -> str:
    """Return the machine's own code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = subprocess.run(
            [NVDISASM, "-c", file.name], capture_output=True, text=True, check=True
        )
    return run.stdout


def detours(code: str) -> dict[str, int]:
    """Instructions by which reading a float8 cache would cost more than its bytes save.

    Conversions at a fraction of the rate of those from e4m3, single bytes fetched from shared
    memory, and copies of less than 16 bytes of keys or values (those of 4 are of the table).
    """
    found = {"F2F": r"\bF2F\.", "LDS.U8": r"\bLDS\.[US]8", "LDGSTS.64": r"\bLDGSTS\.E\.64"}
    return {name: len(re.findall(pattern, code)) for name, pattern in found.items()}


@dataclass(frozen=True)
class Pipeline:
    """What a kernel's innermost loop of products looks like in the machine's code."""

    products: int
    """Instructions of the tensor cores, each of 16 inputs."""
    commits: int
    """Groups of them that are waited for together."""
    drains: int
    """Waits that leave nothing in flight."""


_LINE = re.compile(r"/\*[0-9a-f]{4,5}\*/ +(?:@!?U?P\d+ )?(\S+) *(.*?) *;")


def pipelines(code: str) -> list[Pipeline]:
    """Return the innermost loops that have products, from disassembled code."""
    lines = code.splitlines()
    labels = {line.strip()[:-1]: at for at, line in enumerate(lines) if line.startswith(".L_x")}
    found = []
    for at, line in enumerate(lines):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        begin = labels.get(jump[1], at) if jump else at
        body = [match.groups() for text in lines[begin:at] if (match := _LINE.search(text))]
        operations = [operation for operation, _ in body]
        has_products = any(operation.startswith("HGMMA") for operation in operations)
        if has_products and not any(operation.startswith("STG") for operation in operations):
            found.append(_pipeline(body))
    return found


def _pipeline(body: list[tuple[str, str]]) -> Pipeline:
    products = [operands for name, operands in body if name.startswith("HGMMA")]
    waits = [operands for name, operands in body if name.startswith("WARPGROUP.DEPBAR")]
    return Pipeline(
        products=len(products),
        commits=sum("gsb0" in operands for operands in products),
        drains=sum(operands.endswith("0x0") for operands in waits),
    )


def float8_products(code: str) -> tuple[int, int]:
    """Instructions that multiply float8, 32 inputs each, and those whose sums begin at zero."""
    products = [line for line in code.splitlines() if "QGMMA.64x" in line]
    return len(products), sum("RZ, !UPT" in line for line in products)


def overlap(code: str) -> list[int]:
    """Exponentials between each wait for all but one product and the next wait.

    Where the assembler serialises asynchronous products, it waits after each of them.
    """
    spans = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d+)", code)
    return [
        span.count("MUFU.EX2")
        for left, span in zip(spans[1::2], spans[2::2], strict=True)
        if left == "0x1"
    ]


LOOPS = (triton_hopper_int4_bands.int4_bands_kernel, triton_hopper_half.half_hopper_kernel)
"""Kernels whose innermost loops are looked at."""


def sample(cases: list[Case]) -> list[Case]:
    """Return what serves, and of each kernel's candidates every fifth and the last.

    Cases come in pairs, such as two halves: an odd step has both among them.
    """
    kept = {id(case) for case in cases if not case.is_candidate}
    for several in families([case for case in cases if case.is_candidate]):
        kept |= {id(case) for case in (*several[::5], several[-1])}
    return [case for case in cases if id(case) in kept]


def found(kind: int, *, with_all: bool = False) -> Iterator[str]:
    """Compile; yield what is known of each kernel, as a line of JSON."""
    cases = [
        *attention_cases(kind, (16, WHOLE)),
        *float8_cases(kind),
        *other_cases(),
        *int4_cases(),
        *hopper_int4_cases(kind),
        *hopper_band_cases(kind),
        *hopper_few_cases(kind),
        *hopper_int8_cases(kind),
        *hopper_float8_cases(kind),
        *hopper_half_cases(kind),
        *hopper_prefill_cases(kind),
        *hopper_decode_cases(kind),
        *widen_cases(kind),
        *float8_linear_cases(kind),
        *int8_cases(kind),
        *sampling_cases(),
        *likeliest_cases(),
    ]
    cases = cases if with_all else sample(cases)
    cases += dependent_cases(kind, cases)
    for case in cases:
        compiled = build(case, kind)
        entry = {"name": case.name, **usage(compiled), **dependence(compiled)}
        if case.source is GluonASTSource:
            code = assembler(compiled)
            entry["faults"] = machine_code.faults(code, entry["registers"])
            entry["hand_backs"] = machine_code.hand_backs(code)
            entry["loose_barriers"] = loose_barriers(compiled.asm["ttgir"])
            if case.kernel is triton_hopper_prefill.hopper_prefill_kernel:
                entry["overlap"] = overlap(code)
            if case.kernel is triton_hopper_float8.float8_hopper_kernel:
                entry["float8_products"] = float8_products(code)
            if case.kernel is triton_hopper_half.half_hopper_kernel:
                entry["is_ahead"] = case.constants["AHEAD"]
            if case.kernel in LOOPS:
                entry["pipelines"] = [asdict(loop) for loop in pipelines(code)]
        reads_float8 = case.types is FLOAT8_KV and case.kernel in {prefill_kernel, decode_kernel}
        if reads_float8 or case.kernel is widen_kernel:
            entry["detours"] = detours(assembler(compiled))
        yield json.dumps(entry)


def keep(lines: Iterable[str], file: Path) -> None:
    """Write lines to a file, all or none, where it is not there and nobody else is at it."""
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            return
        part = file.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in lines))
        part.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compile_ahead")
    parser.add_argument("kind", help="of GPU: sm_80, sm_89 or sm_90")
    parser.add_argument("what", nargs="?", choices=["all"], help="every candidate, for minutes")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("--idle", action="store_true")
    wanted = parser.parse_args()
    if wanted.idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    lines = found(int(wanted.kind.removeprefix("sm_")), with_all=wanted.what == "all")
    if wanted.into:
        keep(lines, wanted.into / f"{wanted.kind}.jsonl")
        return
    for line in lines:
        print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
