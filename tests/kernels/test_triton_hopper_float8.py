"""The kernel for Hopper of few FP8 rows, on the CPU in our Gluon interpreter.

On a GPU every candidate is checked, under a timeout, by benchmarks/gpu_float8.py;
test_compile_ahead compiles them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.linear.float8 import FLOAT8, quantize_blocks, quantize_channels
from tailrace.kernels.linear.float8_rows import Float8Rows, empty_rows, quantize_rows
from tailrace.kernels.linear.workspace import Workspace

hopper = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_float8", reason="Triton with Gluon is not installed"
)
gluon_interpreter = pytest.importorskip(
    "tests.kernels.gluon_interpreter", reason="Triton with Gluon is not installed"
)
Language = pytest.importorskip("tests.kernels.gluon_interpreter.language").Language
on_gluon = pytest.importorskip("tests.kernels.on_gluon")

WRITTEN_BEFORE = frozenset(
    {"x_desc", "scale_desc", "x_scale_ptr", "out_ptr", "part_ptr", "arrivals"}
)
"""Arguments that kernels of a step write."""
BOUNDS = {torch.bfloat16: 0.0019, torch.float16: 0.00022}
"""Of the error: the result's own rounding is 0.0017 and 0.0002."""
CASES = [(block, shape) for block, shapes in hopper.CANDIDATES.items() for shape in shapes]
KINDS = [(block, shape) for block, shape in CASES if shape.least_span in {0, 4}]
"""That differ in more than where work is cut."""
SMALL = hopper.HopperFloat8Shape(128, 1, 4, 2, 2)
AT_ONCE = replace(SMALL, meets="last")
SLICED = hopper.HopperFloat8Shape(64, 4, 4, 1, 0)


@dataclass(frozen=True)
class Layer:
    """Sizes of a weight, and of the GPU that it is cut for."""

    outputs: int = 304
    inputs: int = 656
    by_blocks: bool = False
    multiprocessors: int = 3

    @property
    def chunks(self) -> int:
        return -(-self.inputs // 128)

    def weight(self):
        matrix = torch.randn(self.outputs, self.inputs) * self.inputs**-0.5
        return (quantize_blocks if self.by_blocks else quantize_channels)(matrix)


def rows_amid_nan(layer, rows):
    """Return rows in float8 with NaN behind them and behind their scales."""
    given = quantize_rows(torch.randn(rows, layer.inputs), 128 if layer.by_blocks else 0)
    around = empty_rows(rows + 40, layer.inputs, given.group, torch.device("cpu"))
    around.values.view(torch.uint8).fill_(0x7F)
    around.values[:rows].view(torch.uint8).copy_(given.values.view(torch.uint8))
    around.scales.fill_(float("nan"))
    around.scales[:rows].copy_(given.scales)
    return Float8Rows(around.values[:rows], around.scales[:rows], given.group)


def multiplied(monkeypatch, layer, rows, shape, dtype, *, seed=0, dependent=False, stages=3):
    """Return the rows, the result and its error; memory around and before them is NaN."""
    kernel = gluon_interpreter.Interpreter(
        hopper.float8_hopper_kernel, seed=seed, late=WRITTEN_BEFORE
    )
    weight, bias = layer.weight(), torch.randn(layer.outputs).to(dtype)
    x = rows_amid_nan(layer, rows)
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
        patched.setattr(hopper, "float8_hopper_kernel", kernel)
        patched.setattr(hopper.HopperFloat8Shape, "stages", lambda self, rows: few)
        hopper.float8_hopper(
            x, weight, bias, dtype, scratch=workspace.scratch, shape=shape, out_TO=out[1:-1]
        )
    assert not workspace.scratch.arrivals.any(), "the next launch finds arrivals"
    assert bool(out[[0, -1]].isnan().all()), "rows beyond the result are written"
    y = out[1:-1]
    truth = x.dequantize().double() @ weight.dequantize().double().t() + bias.double()
    return x, y, float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(
    ("by_blocks", "dtype"), [(False, torch.bfloat16), (True, torch.float16)], ids=str
)
@pytest.mark.parametrize(("block", "shape"), KINDS, ids=str)
def test_it_equals_the_product(monkeypatch, block, shape, by_blocks, dtype):
    torch.manual_seed(block)
    layer = Layer(by_blocks=by_blocks, multiprocessors=2)
    *_, error = multiplied(monkeypatch, layer, block - 3, shape, dtype, seed=block)
    assert error < BOUNDS[dtype]


@pytest.mark.parametrize("shape", [SMALL, SLICED], ids=str)
@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 16, 16), (7, 128, 48), (16, 144, 130), (5, 400, 64)]
)
def test_sizes_that_nothing_divides(monkeypatch, shape, by_blocks, rows, inputs, outputs):
    layer = Layer(outputs, inputs, by_blocks)
    for dtype, bound in BOUNDS.items():
        *_, error = multiplied(monkeypatch, layer, rows, shape, dtype, seed=inputs)
        assert error < 2 * bound  # of few numbers, whose rounding varies


@pytest.mark.parametrize("inputs", [128, 256, 384, 1408])
@pytest.mark.parametrize("shape", [s for s in hopper.CANDIDATES[16] if s.slices > 1], ids=str)
def test_slices_of_unequal_length_or_without_a_unit(monkeypatch, shape, inputs):
    layer = Layer(70, inputs, by_blocks=inputs == 384)
    *_, error = multiplied(monkeypatch, layer, 4, shape, torch.bfloat16, seed=inputs)
    assert error < BOUNDS[torch.bfloat16]


WIDE = hopper.HopperFloat8Shape(512, 1, 8, 1, 2)


@pytest.mark.parametrize("shape", [SMALL, WIDE, SLICED], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_slots_are_filled_again_only_when_all_are_done_with_them(monkeypatch, shape, stages):
    for by_blocks in (False, True):
        layer = Layer(200, 9 * 128, by_blocks, multiprocessors=1)
        *_, error = multiplied(
            monkeypatch, layer, 7, shape, torch.bfloat16, seed=stages, stages=stages
        )
        assert error < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("shape", [SMALL, AT_ONCE, replace(AT_ONCE, tile=64)], ids=str)
@pytest.mark.parametrize("sharers", [2, 3, 5, 8])
def test_a_tile_of_several_programs_is_the_same_bits_whoever_comes_last(
    monkeypatch, sharers, shape
):
    """Also where it starts before the kernel before has ended, whose results it does not touch."""
    layer = Layer(90, 2 * 128 * sharers, by_blocks=sharers == 3, multiprocessors=8)
    tiles = -(-layer.outputs // shape.tile)
    assert shape.cut(layer.outputs, layer.chunks, 8).programs == min(sharers * tiles, 16)
    same_bits(monkeypatch, layer, shape)


def test_slices_are_the_same_bits_in_whatever_order_they_come(monkeypatch):
    for by_blocks in (False, True):
        same_bits(monkeypatch, Layer(64, 7 * 128, by_blocks), SLICED)


def same_bits(monkeypatch, layer, shape):
    def product(**given):
        return multiplied(monkeypatch, layer, 11, shape, torch.bfloat16, **given)[1:]

    on_gluon.assert_same_bits(product, BOUNDS[torch.bfloat16])


def test_programs_that_meet_at_once_add_each_part_once(monkeypatch):
    """Each finds that nobody has come yet, leaves its sums, and counts itself."""
    counted = Language.atomic_add

    def late(language, pointer, value, mask=None, sem=None, scope=None):
        before = counted(language, pointer, value, mask, sem, scope)
        return before * 0 if value == 0 else before

    results = []
    for atomic_add in (counted, late):
        monkeypatch.setattr(Language, "atomic_add", atomic_add)
        torch.manual_seed(3)
        layer = Layer(90, 1280, multiprocessors=8)
        results.append(multiplied(monkeypatch, layer, 11, SMALL, torch.bfloat16)[1])
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", [SMALL, AT_ONCE, SLICED], ids=str)
@pytest.mark.parametrize("by_blocks", [False, True])
def test_a_row_is_the_same_beside_fewer_rows(monkeypatch, shape, by_blocks):
    results = []
    for rows in (14, 3):
        torch.manual_seed(9)
        layer = Layer(200, 5 * 128, by_blocks)
        x, y, _ = multiplied(monkeypatch, layer, rows, shape, torch.bfloat16, seed=rows)
        results.append((x.dequantize()[:3], y[:3]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_chunks_are_added_in_float32(monkeypatch):
    """A large sum of one chunk would swallow small ones in a tensor core's 14 bits."""
    matrix = torch.full((16, 4 * 128), 1.0)
    weight = quantize_channels(matrix)
    values = torch.zeros(1, 512)
    values[0, 0], values[0, 128::128] = 448.0, 2.0**-6
    x = Float8Rows(values.to(FLOAT8), torch.ones(1, 1), 512)
    kernel = gluon_interpreter.Interpreter(hopper.float8_hopper_kernel)
    monkeypatch.setattr(hopper, "float8_hopper_kernel", kernel)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 1)
    workspace = Workspace(torch.device("cpu"), torch.float16)
    workspace.reserve(outputs=16, splits=1, rows=1, parts=4 * 128 * 16, arrivals=4)
    y = hopper.float8_hopper(x, weight, None, torch.float32, scratch=workspace.scratch, shape=SMALL)
    truth = x.dequantize().double() @ weight.dequantize().double().t()
    assert torch.allclose(y.double(), truth, rtol=2e-7)


def test_rows_and_scales_that_do_not_go_together_are_refused():
    workspace = Workspace(torch.device("cpu"), torch.float16)
    weight = Layer(16, 256).weight()
    for rows in (0, 129):
        x = quantize_rows(torch.randn(rows, 256))
        with pytest.raises(EngineError, match=f"{rows} rows: this FP8 product takes 1 to 128"):
            hopper.float8_hopper(
                x, weight, None, torch.float16, scratch=workspace.scratch, shape=SMALL
            )
    x = quantize_rows(torch.randn(3, 256), 128)
    with pytest.raises(EngineError, match="rows in groups of 128"):
        hopper.float8_hopper(x, weight, None, torch.float16, scratch=workspace.scratch, shape=SMALL)


@pytest.mark.parametrize(("block", "shape"), CASES, ids=str)
def test_rings_hold_several_units_and_fit(block, shape):
    stages = shape.stages(block)
    unit = (shape.tile + block) * 128 + 4 * max(block, 32)
    assert stages >= max(3, 2 * shape.slices)
    assert stages % shape.slices == 0, "slices would meet at a slot"
    meeting = (shape.slices - 1) * shape.tile * block * 4
    assert (stages * unit + meeting) * shape.programs < 227 * 1024
    # An H200's memory wants some 35 KB in flight of each multiprocessor.
    assert stages * unit * shape.programs > 90 * 1024


LAYERS = {"qkv": (4608, 28), "o": (3584, 28), "gate_up": (37888, 28), "down": (3584, 148)}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("block", "shape"), CASES, ids=str)
def test_every_unit_is_done_once_and_parts_do_not_meet(name, block, shape):
    outputs, chunks = LAYERS[name]
    cut = shape.cut(outputs, chunks, 132)
    assert (cut.tiles - 1) * shape.tile < outputs <= cut.tiles * shape.tile
    assert shape.slices > 1 or cut.programs <= 132 * shape.programs, "a tail of a second wave"
    assert cut.programs * cut.span >= cut.tiles * chunks > (cut.programs - 1) * cut.span
    parts, arrivals = hopper.reserved(outputs, chunks, 132)
    assert cut.programs <= arrivals
    if shape.slices > 1:
        assert cut.span == chunks
        assert shape.fits(outputs, 132) == (name in ("qkv", "o", "down"))
        return
    assert shape.fits(outputs, 132)
    last_place = cut.tiles - 1 + cut.programs - 1
    assert (last_place + 1) * shape.tile * block <= parts


@pytest.mark.gpu
@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(272, 48), (3584, 528)])
@pytest.mark.parametrize(("block", "shape"), KINDS, ids=str)
def test_on_a_gpu_its_products_are_the_formulas(block, shape, inputs, outputs, by_blocks):
    """After gpu_float8.py --only-check, which has each under a timeout."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernels need a Hopper GPU")
    device = torch.device("cuda")
    layer = Layer(outputs, inputs, by_blocks, hopper.multiprocessors(device))
    held = layer.weight()
    weight = type(held)(held.values.to(device), held.scales.to(device), held.scheme)
    around = rows_amid_nan(layer, block - 3)
    x = empty_rows(block - 3, inputs, around.group, device)
    x.values.view(torch.uint8).copy_(around.values.view(torch.uint8))
    x.scales.copy_(around.scales)
    parts, arrivals = hopper.reserved(outputs, layer.chunks, layer.multiprocessors)
    workspace = Workspace(device, torch.bfloat16)
    workspace.reserve(outputs=outputs, splits=1, rows=block, parts=parts, arrivals=arrivals)
    workspace.scratch.parts.fill_(float("nan"))
    given = {"scratch": workspace.scratch, "shape": shape}
    y = hopper.float8_hopper(x, weight, None, torch.bfloat16, **given)
    truth = x.dequantize().double() @ weight.dequantize().double().t()
    assert float((y.double() - truth).norm() / truth.norm()) < 0.003
    assert torch.equal(hopper.float8_hopper(x, weight, None, torch.bfloat16, **given), y)
    assert not workspace.mend()
