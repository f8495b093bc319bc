"""The kernel for Hopper of few FP8 rows over 4 bits, on the CPU in our Gluon interpreter.

On a GPU every candidate is checked, under a timeout, by benchmarks/gpu_int4_float8.py;
test_compile_ahead compiles them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.linear.float8_rows import Float8Rows, empty_rows, quantize_rows
from tailrace.kernels.linear.int4 import GroupInt4
from tailrace.kernels.linear.packed_int4 import PackedInt4
from tailrace.kernels.linear.workspace import Workspace

hopper = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_int4_float8", reason="Triton with Gluon is not installed"
)
gluon_interpreter = pytest.importorskip(
    "tests.kernels.gluon_interpreter", reason="Triton with Gluon is not installed"
)
on_gluon = pytest.importorskip("tests.kernels.on_gluon")

WRITTEN_BEFORE = frozenset({"x_desc", "x_scale_ptr", "out_ptr", "part_ptr", "arrivals"})
"""Arguments that kernels of a step write."""
BOUNDS = {torch.bfloat16: 0.0019, torch.float16: 0.00022}
"""Of the error: the result's own rounding is 0.0017 and 0.0002."""
CASES = [(block, shape) for block, shapes in hopper.CANDIDATES.items() for shape in shapes]
KINDS = [(block, shape) for block, shape in CASES if shape.least_span in {0, 4}]
"""That differ in more than where work is cut."""
SMALL = hopper.Int4Float8Shape(128, 1, 4, 2, 2)
AT_ONCE = replace(SMALL, meets="last")
WIDE = hopper.Int4Float8Shape(512, 1, 8, 1, 2)
SLICED = hopper.Int4Float8Shape(64, 4, 4, 1, 0)


def rows_amid_nan(rows, inputs):
    """Return rows in float8 with NaN behind them and behind their scales."""
    given = quantize_rows(torch.randn(rows, inputs))
    around = empty_rows(rows + 40, inputs, 0, torch.device("cpu"))
    around.values.view(torch.uint8).fill_(0x7F)
    around.values[:rows].view(torch.uint8).copy_(given.values.view(torch.uint8))
    around.scales.fill_(float("nan"))
    around.scales[:rows].copy_(given.scales)
    return Float8Rows(around.values[:rows], around.scales[:rows], given.group)


def multiplied(monkeypatch, layer, rows, shape, dtype, *, seed=0, dependent=False, stages=3):
    """Return the rows, the result and its error; memory around and before them is NaN."""
    kernel = gluon_interpreter.Interpreter(
        hopper.int4_float8_kernel, seed=seed, late=WRITTEN_BEFORE
    )
    weight, bias = layer.weight(), torch.randn(layer.outputs).to(dtype)
    x = rows_amid_nan(rows, layer.inputs)
    block = next(size for size in hopper.CANDIDATES if rows <= size)
    sizes = layer.outputs, layer.chunks
    workspace = Workspace(torch.device("cpu"), dtype)
    workspace.reserve(
        outputs=layer.outputs, splits=1, rows=rows,
        parts=shape.parts(*sizes, block, layer.multiprocessors),
        arrivals=shape.cut(*sizes, layer.multiprocessors).programs,
    )  # fmt: skip
    workspace.scratch.parts.fill_(float("nan"))
    out = torch.full((rows + 2, layer.outputs), float("nan"), dtype=dtype)
    few = min(shape.stages(block), max(stages // shape.slices, 1) * shape.slices)
    with monkeypatch.context() as patched, dependent_launches(on=dependent):
        patched.setattr(hopper, "multiprocessors", lambda device: layer.multiprocessors)
        patched.setattr(hopper, "int4_float8_kernel", kernel)
        patched.setattr(hopper.Int4Float8Shape, "stages", lambda self, rows: few)
        hopper.int4_float8(
            x, PackedInt4.of(weight, "cpu"), bias, dtype, scratch=workspace.scratch, shape=shape,
            out_TO=out[1:-1],
        )  # fmt: skip
    assert not workspace.scratch.arrivals.any(), "the next launch finds arrivals"
    assert bool(out[[0, -1]].isnan().all()), "rows beyond the result are written"
    y = out[1:-1]
    return x, y, on_gluon.error(x.dequantize(), bias, y, weight.dequantize())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("block", "shape"), KINDS, ids=str)
def test_it_equals_the_product_of_the_codes(monkeypatch, block, shape, dtype):
    torch.manual_seed(block)
    layer = on_gluon.Layer(multiprocessors=2)
    *_, error = multiplied(monkeypatch, layer, block - 3, shape, dtype, seed=block)
    assert error < BOUNDS[dtype]


@pytest.mark.parametrize("shape", [SMALL, SLICED], ids=str)
@pytest.mark.parametrize(("rows", "chunks", "outputs"), [(1, 1, 16), (7, 2, 130), (16, 5, 64)])
@pytest.mark.parametrize("group", [128, 256, 384])
def test_sizes_that_nothing_divides(monkeypatch, shape, group, rows, chunks, outputs):
    layer = on_gluon.Layer(outputs, chunks * group // 128, group)
    for dtype, bound in BOUNDS.items():
        *_, error = multiplied(monkeypatch, layer, rows, shape, dtype, seed=chunks)
        assert error < 2 * bound  # of few numbers, whose rounding varies


@pytest.mark.parametrize("shape", [SMALL, WIDE, SLICED], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_slots_are_filled_again_only_when_all_are_done_with_them(monkeypatch, shape, stages):
    layer = on_gluon.Layer(200, 9, multiprocessors=1)
    *_, error = multiplied(monkeypatch, layer, 7, shape, torch.bfloat16, seed=stages, stages=stages)
    assert error < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("shape", [SMALL, AT_ONCE, SLICED], ids=str)
@pytest.mark.parametrize("sharers", [2, 5])
def test_it_is_the_same_bits_whoever_comes_last(monkeypatch, shape, sharers):
    """Also where it starts before the kernel before has ended, whose results it does not touch."""
    layer = on_gluon.Layer(90 if shape.slices == 1 else 64, 2 * sharers, multiprocessors=8)

    def product(**given):
        return multiplied(monkeypatch, layer, 11, shape, torch.bfloat16, **given)[1:]

    on_gluon.assert_same_bits(product, BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("shape", [SMALL, AT_ONCE, SLICED], ids=str)
def test_a_row_is_the_same_beside_fewer_rows(monkeypatch, shape):
    results = []
    for rows in (14, 3):
        torch.manual_seed(9)
        layer = on_gluon.Layer(200, 5)
        x, y, _ = multiplied(monkeypatch, layer, rows, shape, torch.bfloat16, seed=rows)
        results.append((x.dequantize()[:3], y[:3]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_every_code_and_zero_point_is_what_it_stands_for(monkeypatch):
    """A row with a single 1 reads a column of the weight: 16 codes by 16 zero points, exactly."""
    codes = torch.arange(256).view(256, 1) // 16
    zeros = torch.arange(256).view(256, 1) % 16
    bytes_NH = (17 * codes).to(torch.uint8).expand(256, 64).contiguous()
    weight = GroupInt4(bytes_NH, torch.ones(256, 1).half(), zeros.to(torch.uint8), 128)
    assert torch.equal(weight.dequantize(), (codes - zeros).expand(256, 128).float())
    values = torch.zeros(3, 128)
    values[0, 0] = values[1, 77] = values[2, 127] = 1.0
    x = Float8Rows(values.to(FLOAT8), torch.ones(3, 1), 128)
    kernel = gluon_interpreter.Interpreter(hopper.int4_float8_kernel)
    monkeypatch.setattr(hopper, "int4_float8_kernel", kernel)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 1)
    workspace = Workspace(torch.device("cpu"), torch.float16)
    workspace.reserve(outputs=256, splits=1, rows=3, parts=4 * 128 * 16, arrivals=4)
    y = hopper.int4_float8(
        x, PackedInt4.of(weight, "cpu"), None, torch.float16, scratch=workspace.scratch, shape=SMALL
    )
    assert torch.equal(y.float(), (codes - zeros).T.expand(3, 256).float())


def test_rows_and_weights_that_do_not_go_together_are_refused():
    workspace = Workspace(torch.device("cpu"), torch.float16)
    given = {"scratch": workspace.scratch, "shape": SMALL}
    weight = PackedInt4.of(on_gluon.Layer(16, 2).weight(), "cpu")
    for rows in (0, 129):
        with pytest.raises(EngineError, match=f"{rows} rows by 1 scales: .* takes 1 to 128 by one"):
            hopper.int4_float8(
                quantize_rows(torch.randn(rows, 256)), weight, None, torch.float16, **given
            )
    with pytest.raises(EngineError, match="3 rows by 2 scales"):
        hopper.int4_float8(
            quantize_rows(torch.randn(3, 256), 128), weight, None, torch.float16, **given
        )
    weight = PackedInt4.of(on_gluon.Layer(16, 4, 64).weight(), "cpu")
    with pytest.raises(ConfigError, match="multiples of 128 inputs, and those of 64 are not"):
        hopper.int4_float8(quantize_rows(torch.randn(3, 256)), weight, None, torch.float16, **given)


@pytest.mark.parametrize(("block", "shape"), CASES, ids=str)
def test_rings_hold_several_units_and_fit(block, shape):
    stages = shape.stages(block)
    unit = shape.tile * 68 + block * 128
    assert stages >= max(3, 2 * shape.slices)
    assert stages % shape.slices == 0, "slices would meet at a slot"
    meeting = (shape.slices - 1) * shape.tile * block * 4
    assert (stages * unit + meeting) * shape.programs < 227 * 1024


LAYERS = {"qkv": (4608, 28), "o": (3584, 28), "gate_up": (37888, 28), "down": (3584, 148)}


@pytest.mark.parametrize("name", LAYERS)
def test_every_unit_is_done_once_and_parts_have_room(name):
    outputs, chunks = LAYERS[name]
    parts, arrivals = hopper.reserved(outputs, chunks, 132)
    for block, shape in CASES:
        cut = shape.cut(outputs, chunks, 132)
        assert cut.programs * cut.span >= cut.tiles * chunks > (cut.programs - 1) * cut.span
        assert cut.programs <= arrivals
        if shape.slices == 1:
            assert cut.programs <= 132 * shape.programs, "a tail of a second wave"
            assert (cut.tiles + cut.programs) * shape.tile * block <= parts
