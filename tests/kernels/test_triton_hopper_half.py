"""The kernel for Hopper of few rows in half precision, on the CPU in our Gluon interpreter.

On a GPU every candidate is checked, under a timeout, by benchmarks/gpu_half.py;
test_compile_ahead compiles them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.linear.workspace import Workspace
from tests.support.pairs import dealt

hopper = pytest.importorskip(
    "tailrace.kernels.linear.triton_hopper_half", reason="Triton with Gluon is not installed"
)
gluon_interpreter = pytest.importorskip(
    "tests.kernels.gluon_interpreter", reason="Triton with Gluon is not installed"
)
Language = pytest.importorskip("tests.kernels.gluon_interpreter.language").Language
on_gluon = pytest.importorskip("tests.kernels.on_gluon")

Shape = hopper.HopperHalfShape
BF16, FP16 = torch.bfloat16, torch.float16
BOUNDS = {BF16: 0.0019, FP16: 0.00023}
"""Of the error: the result's own rounding is 0.0017 and 0.0002."""
CASES = [(block, shape) for block, shapes in hopper.CANDIDATES.items() for shape in shapes]
KINDS = [(block, shape) for block, shape in CASES if shape.least_span != 14]
"""That differ in more than where work is cut."""
SMALL = Shape(128, 64, 4, 2, 2, "pairs")
AT_ONCE = replace(SMALL, meets="last")
PADDED = Shape(80, 128, 4, 1, 2, "pairs")
WHOLE = Shape(160, 64, 4)
SLICED = Shape(64, 128, 4, slices=2)
NARROW = Shape(40, 128, 4, slices=2)


@dataclass(frozen=True)
class Layer:
    """Sizes of a weight, and of the GPU that it is cut for."""

    outputs: int = 301
    inputs: int = 656
    multiprocessors: int = 3


def amid_nan(values, dtype):
    """Return values with NaN behind them."""
    around = torch.full((len(values) + 40, values.shape[1]), float("nan"), dtype=dtype)
    around[: len(values)] = values
    return around[: len(values)]


def multiplied(
    monkeypatch, layer, rows, shape, dtype, *, seed=0, dependent=False, stages=3, ahead=None
):
    """Return the rows, the result and its error; memory around and before them is NaN."""
    kernel = gluon_interpreter.Interpreter(
        hopper.half_hopper_kernel, seed=seed, late=on_gluon.WRITTEN_BEFORE
    )
    weight = amid_nan(torch.randn(layer.outputs, layer.inputs) * layer.inputs**-0.5, dtype)
    bias = torch.randn(layer.outputs).to(dtype)
    x = amid_nan(torch.randn(rows, layer.inputs), dtype)
    block = next(size for size in hopper.CANDIDATES if rows <= size)
    sizes = layer.outputs, layer.inputs
    workspace = Workspace(torch.device("cpu"), dtype)
    workspace.reserve(
        outputs=layer.outputs, splits=1, rows=rows,
        parts=shape.parts(*sizes, block, layer.multiprocessors),
        arrivals=shape.cut(*sizes, layer.multiprocessors).programs,
    )  # fmt: skip
    workspace.scratch.parts.fill_(float("nan"))
    out = torch.full((rows + 2, layer.outputs), float("nan"), dtype=dtype)
    few = min(shape.stages(block), max(stages // shape.slices, 1) * shape.slices)
    is_ahead = few >= 2 * shape.slices if ahead is None else ahead
    with monkeypatch.context() as patched, dependent_launches(on=dependent):
        patched.setattr(hopper, "multiprocessors", lambda device: layer.multiprocessors)
        patched.setattr(hopper, "half_hopper_kernel", kernel)
        patched.setattr(Shape, "stages", lambda self, rows: few)
        patched.setattr(Shape, "is_ahead", lambda self, rows: is_ahead)
        hopper.half_hopper(
            x, weight, bias, scratch=workspace.scratch, shape=shape, out_TO=out[1:-1]
        )
    assert not workspace.scratch.arrivals.any(), "the next launch finds arrivals"
    assert bool(out[[0, -1]].isnan().all()), "rows beyond the result are written"
    return x, out[1:-1], on_gluon.error(x, bias, out[1:-1], weight)


@pytest.mark.parametrize(("block", "shape", "dtype"), dealt(KINDS, (BF16, FP16)), ids=str)
def test_it_equals_the_product(monkeypatch, block, shape, dtype):
    """Each tile of rows and each shape that has several, in both halves."""
    torch.manual_seed(block)
    layer = Layer(multiprocessors=2)
    is_ahead = shape.is_ahead(block)
    *_, error = multiplied(monkeypatch, layer, block - 3, shape, dtype, seed=block, ahead=is_ahead)
    assert error < BOUNDS[dtype]


@pytest.mark.parametrize("shape", [SMALL, PADDED, WHOLE, SLICED, NARROW], ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 8, 16), (7, 64, 45), (16, 136, 130), (5, 400, 64)]
)
def test_sizes_that_nothing_divides(monkeypatch, shape, rows, inputs, outputs):
    layer = Layer(outputs, inputs)
    for dtype, bound in BOUNDS.items():
        *_, error = multiplied(monkeypatch, layer, rows, shape, dtype, seed=inputs)
        assert error < 2 * bound  # of few numbers, whose rounding varies


@pytest.mark.parametrize("inputs", [64, 256, 384, 1408])
@pytest.mark.parametrize("shape", [SLICED, NARROW], ids=str)
def test_slices_of_unequal_length_or_without_a_unit(monkeypatch, shape, inputs):
    layer = Layer(70, inputs)
    *_, error = multiplied(monkeypatch, layer, 4, shape, BF16, seed=inputs)
    assert error < BOUNDS[BF16]


@pytest.mark.parametrize("shape", [SMALL, PADDED, WHOLE, SLICED, Shape(256, 64, 8)], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_slots_are_filled_again_only_when_all_are_done_with_them(monkeypatch, shape, stages):
    """Also where a product is under way while the next is queued, which one slot cannot have."""
    layer = Layer(200, 9 * 64, multiprocessors=1)
    for ahead in (False, True)[: 1 + (stages > 1)]:
        few = stages * shape.slices
        *_, error = multiplied(
            monkeypatch, layer, 7, shape, BF16, seed=stages, stages=few * shape.slices, ahead=ahead
        )
        assert error < BOUNDS[BF16]


@pytest.mark.parametrize(
    "shape", [SMALL, AT_ONCE, replace(AT_ONCE, tile=64), replace(PADDED, meets="last")], ids=str
)
@pytest.mark.parametrize("sharers", [2, 3, 5, 8])
def test_a_tile_of_several_programs_is_the_same_bits_whoever_comes_last(
    monkeypatch, sharers, shape
):
    """Also where it starts before the kernel before has ended, whose results it does not touch."""
    layer = Layer(90, 2 * shape.inputs * sharers, multiprocessors=16)
    tiles = -(-layer.outputs // shape.tile)
    programs = shape.cut(layer.outputs, layer.inputs, 16).programs
    assert programs == min(sharers * tiles, 16 * shape.programs)
    same_bits(monkeypatch, layer, shape)


@pytest.mark.parametrize("shape", [SLICED, NARROW, WHOLE], ids=str)
def test_whole_tiles_are_the_same_bits_in_whatever_order_units_come(monkeypatch, shape):
    same_bits(monkeypatch, Layer(64, 7 * 128), shape)


def same_bits(monkeypatch, layer, shape):
    def product(**given):
        return multiplied(monkeypatch, layer, 11, shape, BF16, **given)[1:]

    on_gluon.assert_same_bits(product, BOUNDS[BF16])


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
        results.append(multiplied(monkeypatch, layer, 11, SMALL, BF16)[1])
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", [SMALL, AT_ONCE, PADDED, WHOLE, SLICED], ids=str)
def test_a_row_is_the_same_beside_fewer_rows(monkeypatch, shape):
    results = []
    for rows in (14, 3):
        torch.manual_seed(9)
        weight_first = Layer(200, 5 * 128)
        x, y, _ = multiplied(monkeypatch, weight_first, rows, shape, BF16, seed=rows)
        results.append((x[:3], y[:3]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_rows_that_no_tile_takes_are_refused():
    workspace = Workspace(torch.device("cpu"), FP16)
    for rows in (0, 129):
        x = torch.randn(rows, 64).half()
        with pytest.raises(EngineError, match=f"{rows} rows: this product takes 1 to 128"):
            hopper.half_hopper(
                x, torch.randn(16, 64).half(), None, scratch=workspace.scratch, shape=SMALL
            )


def test_weights_are_taken_that_tma_can_copy():
    assert hopper.takes(torch.zeros(3, 72).half())
    assert hopper.takes(torch.zeros(3, 72).bfloat16())
    assert not hopper.takes(torch.zeros(3, 72))
    assert not hopper.takes(torch.zeros(3, 68).half())
    assert not hopper.takes(torch.zeros(1 + 3 * 72).half()[1:].view(3, 72))


@pytest.mark.parametrize(("block", "shape"), CASES, ids=str)
def test_rings_hold_several_units_and_fit(block, shape):
    stages = shape.stages(block)
    unit = (shape.padded + block) * shape.inputs * 2
    assert stages >= 3
    assert stages % shape.slices == 0, "slices would meet at a slot"
    meeting = (shape.slices - 1) * shape.padded * block * 4
    assert (stages * unit + meeting) * shape.programs < 227 * 1024
    # An H200's memory wants some 35 KB in flight of each multiprocessor, and one slot is in use.
    weights = (stages - 1 - shape.is_ahead(block)) * shape.tile * shape.inputs * 2
    assert weights * shape.programs >= (40 if shape.slices > 1 else 48) * 1024


LAYERS = {
    "qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944),
    "head": (152064, 3584),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("block", "shape"), CASES, ids=str)
def test_every_unit_is_done_once_and_parts_do_not_meet(name, block, shape):
    outputs, inputs = LAYERS[name]
    chunks = inputs // shape.inputs
    cut = shape.cut(outputs, inputs, 132)
    assert (cut.tiles - 1) * shape.tile < outputs <= cut.tiles * shape.tile
    assert cut.programs * cut.span >= cut.tiles * chunks > (cut.programs - 1) * cut.span
    parts, arrivals = hopper.reserved(outputs, inputs, 132)
    assert cut.programs <= arrivals
    if shape.slices > 1:
        assert cut.span == chunks
        offered = {"qkv": {40, 64}, "o": {32, 64}, "down": {32, 64}}.get(name, set())
        assert shape.fits(outputs, 132) == (shape.tile in offered)
        return
    assert cut.programs <= 132 * shape.programs, "a tail of a second wave"
    if shape.meets == "whole":
        assert cut.span % chunks == 0, "a tile has several programs"
        return
    assert shape.fits(outputs, 132)
    places = set()
    shared = 0
    for tile in range(cut.tiles):
        first, last = tile * chunks // cut.span, ((tile + 1) * chunks - 1) // cut.span
        if last > first:
            own = {first + min(tile, first) + mine for mine in range(last - first + 1)}
            assert not own & places
            places |= own
            shared += 1
    assert shared or name == "head", "parts never meet"
    assert (max(places, default=0) + 1) * shape.padded * block <= parts


def test_whole_tiles_are_offered_in_the_size_that_divides_a_layer_evenly():
    for block, shapes in hopper.CANDIDATES.items():
        whole = [s for s in shapes if s.meets == "whole" and s.slices == 1]
        offered = {
            name: [s.tile for s in whole if s.fits(outputs, 132)]
            for name, (outputs, _) in LAYERS.items()
        }
        assert offered == {"qkv": [], "o": [], "gate_up": [288], "down": [], "head": [288]}
        assert [s.words for s in shapes if s in whole and s.fits(28672, 132)] == [
            f"Hopper 224x64/{4 if block < 128 else 8} whole"
        ]


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(264, 50), (3584, 528)])
@pytest.mark.parametrize(("block", "shape"), KINDS, ids=str)
def test_on_a_gpu_its_products_are_the_formulas(block, shape, inputs, outputs):
    """After gpu_half.py --only-check, which has each under a timeout."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernels need a Hopper GPU")
    device = torch.device("cuda")
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16().to(device)
    x = amid_nan(torch.randn(block - 3, inputs), BF16).to(device)
    parts, arrivals = hopper.reserved(outputs, inputs, hopper.multiprocessors(device))
    workspace = Workspace(device, BF16)
    workspace.reserve(outputs=outputs, splits=1, rows=block, parts=parts, arrivals=arrivals)
    workspace.scratch.parts.fill_(float("nan"))
    given = {"scratch": workspace.scratch, "shape": shape}
    y = hopper.half_hopper(x, weight, None, **given)
    truth = x.double() @ weight.double().t()
    assert float((y.double() - truth).norm() / truth.norm()) < 0.003
    assert torch.equal(hopper.half_hopper(x, weight, None, **given), y)
    assert not workspace.mend()
