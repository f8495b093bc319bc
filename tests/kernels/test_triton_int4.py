"""The linear layer of few rows over 4-bit weights, and what its assembler computes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.int4_linear import Int4Linear
from tailrace.kernels.linear.packed_int4 import PackedInt4, splits_for
from tailrace.kernels.linear.triton_int4 import (
    MOST_ROWS,
    UNPACK_BFLOAT16,
    UNPACK_FLOAT16,
    Int4Shape,
    dequantize,
    int4_linear,
)
from tailrace.kernels.linear.workspace import Workspace
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN

# (rows, inputs, outputs, group): SmolLM2's inputs (576, 1536) among them.
SHAPES = [
    (1, 64, 5, 64),
    (1, 576, 192, 64),
    (3, 1536, 100, 64),
    (7, 128, 77, 128),
    (17, 640, 130, 128),
    (33, 256, 256, 256),
    (65, 384, 100, 64),
    (100, 512, 200, 128),
]


def poisoned(on_triton, rows, inputs):
    """Return x at the head of a larger block that holds NaN, as freed memory may."""
    whole = on_triton.half(torch.full((rows + 40, inputs), NAN))
    whole[:rows] = on_triton.half(torch.randn(rows, inputs))
    return whole[:rows]


def packed(on_triton, outputs, inputs, group, *, splits=0, scale_dtype=torch.float16):
    weight = quantize_groups(torch.randn(outputs, inputs) * inputs**-0.5, group, scale_dtype)
    return weight, PackedInt4.of(weight, on_triton.kernels.device, splits)


def scratch_for(weight):
    workspace = Workspace(weight.codes.device, torch.float32)
    workspace.reserve(outputs=weight.outputs, splits=weight.splits, rows=MOST_ROWS)
    workspace.scratch.parts.fill_(NAN)
    return workspace.scratch


@pytest.mark.parametrize(("rows", "inputs", "outputs", "group"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_equals_the_product_with_the_dequantised_weight(
    on_triton, rows, inputs, outputs, group, with_bias
):
    weight, held = packed(on_triton, outputs, inputs, group)
    x = poisoned(on_triton, rows, inputs)
    bias = on_triton.half(torch.randn(outputs)) if with_bias else None
    scratch = scratch_for(held)
    y = int4_linear(x, held, bias, scratch=scratch)
    assert y.dtype == x.dtype
    truth = x.cpu().double() @ weight.dequantize(torch.float64).t()
    if bias is not None:
        truth += bias.cpu().double()
    assert_close("y", y.cpu(), truth, **on_triton.tolerance)
    assert not scratch.arrivals.any(), "the next launch would wait for nobody, or add too early"


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_split_sums_equal_the_product(on_triton, splits, scale_dtype):
    weight, held = packed(on_triton, 140, 896, 128, splits=splits, scale_dtype=scale_dtype)
    x = poisoned(on_triton, 9, 896)
    y = int4_linear(x, held, None, scratch=scratch_for(held), shape=Int4Shape(64, 4, 3))
    truth = x.cpu().double() @ weight.dequantize(torch.float64).t()
    assert_close("y", y.cpu(), truth, **on_triton.tolerance)


def test_a_row_does_not_depend_on_its_neighbours_of_the_same_tile(on_triton):
    _, held = packed(on_triton, 200, 640, 64, splits=3)
    x = poisoned(on_triton, 15, 640)
    scratch = scratch_for(held)
    together = int4_linear(x, held, None, scratch=scratch)
    for row in (0, 7, 14):
        alone = int4_linear(x[row : row + 1], held, None, scratch=scratch)
        assert torch.equal(alone[0], together[row])


def test_nan_in_a_row_stays_in_that_row(on_triton):
    _, held = packed(on_triton, 70, 256, 128)
    x = poisoned(on_triton, 4, 256)
    x[2, 100] = NAN
    y = int4_linear(x, held, None, scratch=scratch_for(held)).cpu()
    assert bool(y[2].isnan().all())
    assert bool(y[[0, 1, 3]].isfinite().all())


def test_splits_depend_on_the_layer_alone_and_all_have_work():
    assert splits_for(37888, 28) == 1
    for chunks in range(1, 40):
        weight = quantize_groups(torch.randn(3, 64 * chunks), 64)
        for asked in (0, 1, 3, 8):
            held = PackedInt4.of(weight, "cpu", asked)
            assert held.span * (held.splits - 1) < chunks <= held.span * held.splits


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(5, 64, 64), (130, 768, 128)])
def test_the_packed_weight_dequantises_to_the_same(on_triton, outputs, inputs, group):
    weight, held = packed(on_triton, outputs, inputs, group)
    out = torch.empty(outputs, inputs, dtype=on_triton.kernels.dtype, device=held.codes.device)
    expected = weight.dequantize(on_triton.kernels.dtype)
    assert torch.equal(dequantize(held, out).cpu(), expected)
    # Codes and a word for each group, the rows padded to 128.
    padded = -(-outputs // 128) * 128
    assert held.nbytes == padded * inputs // 2 + padded * inputs // group * 4


def test_a_group_that_no_tile_fits_is_refused():
    with pytest.raises(ConfigError, match="groups of 32: the GPU kernel takes multiples of 64"):
        PackedInt4.of(quantize_groups(torch.randn(4, 64), 32), "cpu")


@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS, MOST_ROWS + 1])
def test_layers_share_a_workspace_and_serve_any_number_of_rows(on_triton, rows):
    dtype = on_triton.kernels.dtype
    workspace = Workspace(on_triton.kernels.device, dtype)
    sizes = [(130, 128), (40, 512)]
    weights = [quantize_groups(torch.randn(n, k) * k**-0.5, 64) for n, k in sizes]
    bias = torch.randn(130)
    layers = [Int4Linear(weights[0], bias, workspace), Int4Linear(weights[1], None, workspace)]
    assert layers[0].nbytes == 256 * 128 // 2 + 256 * 2 * 4 + 130 * dtype.itemsize
    for layer, weight, added in zip(layers, weights, (bias, None), strict=True):
        x = poisoned(on_triton, rows, weight.shape[1])
        truth = x.cpu().double() @ weight.dequantize(torch.float64).t()
        if added is not None:
            truth += on_triton.rounded(added).double()
        # Many rows see the weight rounded to half precision.
        assert_close("y", layer(x).cpu(), truth, **on_triton.tolerance)
    with pytest.raises(EngineError, match="after one had run"):
        Int4Linear(weights[0], bias, workspace)


def test_the_kernels_keep_4_bits_where_the_group_allows(on_triton):
    dtype = str(on_triton.kernels.dtype).removeprefix("torch.")
    x = poisoned(on_triton, 3, 128)
    for group, name in ((64, "Triton 4 bits in groups of 64"), (32, f"cuBLAS {dtype}")):
        weight = quantize_groups(torch.randn(70, 128), group)
        linear = on_triton.kernels.pack_linear(weight, None, dtype)
        assert linear.name.startswith(name)
        truth = x.cpu().double() @ on_triton.rounded(weight.dequantize()).double().t()
        assert_close("y", linear(x).cpu(), truth, **_loose(on_triton))


def _loose(on_triton):
    """Sums of 128 products of some units: their rounding is that of larger values."""
    return {name: 4 * value for name, value in on_triton.tolerance.items()}


def run_assembler(text, codes, offsets):
    """Compute what the instructions do to 32-bit words, two halves at a time; returns $0 to $3."""
    kind = torch.bfloat16 if "bf16x2" in text else torch.float16
    words = {"$4": codes, "$5": offsets}

    def value(name):
        return np.full_like(codes, int(name, 16)) if name.startswith("0x") else words[name]

    def halves(word):
        return torch.from_numpy(word.view(np.uint16)).view(kind)

    for line in re.findall(r"^\s+(\w[\w.]* .*);$", text, re.MULTILINE):
        name, _, rest = line.partition(" ")
        target, *given = [part.strip() for part in rest.split(",")]
        if name == "mov.b32":
            words[target] = value(given[0])
        elif name == "shr.u32":
            words[target] = value(given[0]) >> np.uint32(int(given[1]))
        elif name == "lop3.b32":
            assert given[3] == "0xea"  # (a & b) | c
            words[target] = (value(given[0]) & value(given[1])) | value(given[2])
        else:
            assert name in ("fma.rn.bf16x2", "add.rn.f16x2")
            a, *factor, c = (halves(value(part)) for part in given)
            exact = a.double() * (factor[0].double() if factor else 1) + c.double()
            words[target] = exact.to(kind).view(torch.uint16).numpy().view(np.uint32)
    return [halves(words[f"${index}"]) for index in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_assembler_gives_every_code_less_every_zero_point(dtype):
    """No GPU runs here: its instructions are followed one by one, over all words."""
    text = (UNPACK_BFLOAT16 if dtype == torch.bfloat16 else UNPACK_FLOAT16).value
    low = np.arange(1 << 16, dtype=np.uint32)
    codes = low | (low[::-1] << 16)
    for zero in range(16):
        half = (0xC300 if dtype == torch.bfloat16 else 0xE400) | zero
        offsets = np.full_like(codes, half | half << 16)
        for index, found in enumerate(run_assembler(text, codes, offsets)):
            halves = codes.view(np.uint16).astype(np.int32)
            expected = ((halves >> 4 * index) & 15) - zero
            assert torch.equal(found.int(), torch.from_numpy(expected))
