"""Hopper's decode kernel: what it serves, what fits, and on a GPU that it gives the formula.

What the kernel computes is seen on the CPU in our interpreter of Gluon, and on a GPU, here and,
with every candidate under a timeout, by benchmarks/gpu_decode.py; test_compile_ahead compiles it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.kv_scales import UNSCALED
from tailrace.kernels.paged_attention import triton_decode
from tailrace.kernels.paged_attention.reference import paged_attention
from tests.kernels.paged import NAN, Paged, make_batch

hopper = pytest.importorskip(
    "tailrace.kernels.paged_attention.triton_hopper_decode",
    reason="Triton with Gluon is not installed",
)

gluon_interpreter = pytest.importorskip(
    "tests.kernels.gluon_interpreter", reason="Triton with Gluon is not installed"
)
shared_memory = pytest.importorskip(
    "tests.kernels.gluon_interpreter.shared_memory", reason="Triton with Gluon is not installed"
)

KERNEL = hopper.hopper_decode_kernel
WRITTEN_BEFORE = frozenset(
    {"q_desc", "k_desc", "v_desc", "out_ptr", "part_ptr", "lse_ptr", "arrivals"}
)
"""Arguments that kernels of a step write; of keys, those of the step's own tokens."""
LENGTHS = (0, 1, 63, 64, 65, 511, 512, 513, 1500)
ROOM = 2048
BOUND = {torch.bfloat16: 0.004, torch.float16: 0.0005}


def decoded(
    q, caches, kv_lens, tables, scale, *, shape=hopper.USUAL, room=ROOM, kv_scales=UNSCALED
):
    """Return the kernel's result [B, Hq, D] for these rows; nothing beyond them is written."""
    scratch = triton_decode.DecodeScratch.allocate(*q.shape, room, shape.split, str(q.device))
    scratch.parts.fill_(NAN)
    scratch.lses.fill_(NAN)
    out = torch.full((len(q) + 2, *q.shape[1:]), NAN, dtype=q.dtype, device=q.device)
    hopper.decode(
        q,
        caches[0].to(q.device).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        caches[1].to(q.device).permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
        out[1:-1],
        kv_lens=kv_lens.to(q.device),
        block_tables=tables.to(q.device),
        scale=scale,
        shape=shape,
        scratch=scratch,
        kv_scales=kv_scales,
    )
    assert bool(out[[0, -1]].isnan().all()), "rows beyond the result are written"
    assert not bool(scratch.arrivals.any()), "the next launch finds arrivals"
    return out[1:-1].cpu()


def attended(
    lens,
    *,
    heads=(7, 1),
    head_dim=128,
    unit=8,
    dtype=torch.bfloat16,
    shape=hopper.USUAL,
    room=ROOM,
    device="cpu",
):
    """Return the kernel's result for one row of each length, and its error against float64's."""
    paged = Paged(
        kv_lens=list(lens), num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim,
        block_size=unit,
    )  # fmt: skip
    # A padded row's query is whatever lay there.
    rows = [q[-1] if len(q) else torch.full((heads[0], head_dim), NAN) for q in paged.queries]
    q = torch.stack(rows).to(dtype)
    whole = make_batch([(min(1, n), n) for n in lens], unit, paged.tables)
    live = [row for row, n in enumerate(lens) if n]
    batch = make_batch([(1, lens[row]) for row in live], unit, [paged.tables[row] for row in live])
    truth = torch.zeros(q.shape, dtype=torch.float64)
    caches = [cache.to(dtype) for cache in (paged.k_cache, paged.v_cache)]
    found = paged_attention(q[live].double(), *(x.double() for x in caches), batch, paged.scale)
    truth[live] = found.view(len(live), *q.shape[1:])
    result = decoded(
        q.to(device), caches, whole.kv_lens, whole.block_tables, paged.scale, shape=shape, room=room
    )
    error = (result.double() - truth).norm() / truth.norm()
    return result, float(error)


@dataclass(frozen=True)
class Interpreted:
    """Runs the kernel on the CPU, and knows what kernels of a step write before it."""

    seed: int

    def __getitem__(self, grid):
        def launch(*args, **known):
            kv_lens, tables = args[7:9]
            lasts = (kv_lens - 1).clamp_min(0) // known["UNIT"]
            own = set(tables[torch.arange(len(lasts)), lasts.long()].tolist())
            late = dict.fromkeys(WRITTEN_BEFORE) | {"k_desc": own}
            gluon_interpreter.Interpreter(KERNEL, seed=self.seed, late=late)[grid](*args, **known)

        return launch


def interpret(monkeypatch, seed):
    """Run the kernel on the CPU."""
    monkeypatch.setattr(hopper, "hopper_decode_kernel", Interpreted(seed))


@pytest.mark.parametrize("shape", hopper.CANDIDATES, ids=str)
def test_as_many_programs_fit_a_multiprocessor_as_their_registers_are_for(shape):
    ring = shape.stages * shape.tile * 128 * 2
    # Queries and weights of 8 heads, barriers, and what the runtime takes.
    other = 8 * 128 * 2 + shape.split * 8 * 2 + 1536
    programs = {80: 3, 64: 4}[shape.registers]
    assert programs * 256 * shape.registers <= 1 << 16
    assert programs * (ring + other) <= 228 << 10
    # What the consumer has, once it has asked for what the producer gave back.
    assert 2 * shape.registers - shape.producer_registers >= 88


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile", [64, 128])
def test_a_tile_is_read_where_its_boxes_are_put(tile, head_dim):
    halves = head_dim // 64
    box = shared_memory._addresses((1, 1, halves, 8, 64), hopper.box_layout(), 2)
    boxes = torch.arange(tile // 8).view(-1, 1, 1, 1) * (8 * head_dim * 2) + box[0]
    layout = hopper.ring_layout(tile, head_dim)
    ring = shared_memory._addresses((tile, head_dim), layout, 2)
    expected = boxes.view(tile // 8, halves, 8, 64).transpose(1, 2).reshape(tile, head_dim)
    assert torch.equal(ring, expected)
    assert sorted(ring.flatten().tolist()) == list(range(0, 2 * tile * head_dim, 2))


def cache_of(units=3, tokens=8, heads=2, dim=128, dtype=torch.bfloat16):
    """Return keys and values as `allocate_kv` lays them out."""
    k, v = (torch.zeros(units, tokens, heads, dim, dtype=dtype) for _ in range(2))
    return k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)


def test_the_pools_layout_is_served():
    for dim, dtype, tokens in ((64, torch.float16, 8), (128, torch.bfloat16, 64)):
        q = torch.zeros(5, 14, dim, dtype=dtype)
        assert hopper.serves(q, *cache_of(tokens=tokens, dim=dim, dtype=dtype)) is None


@pytest.mark.parametrize(
    ("q_dtype", "given", "reason"),
    [
        (torch.bfloat16, {"dim": 256}, "256 dimensions"),
        (torch.float32, {"dtype": torch.float32}, "queries in torch.float32"),
        (torch.bfloat16, {"dtype": torch.float8_e5m2}, "a cache in torch.float8_e5m2"),
        (torch.bfloat16, {"tokens": 4}, "units of 4 tokens"),
        (torch.bfloat16, {"tokens": 24}, "units of 24 tokens"),
        (torch.bfloat16, {"heads": 1}, "34 heads over 1"),
        (torch.bfloat16, {"heads": 4}, "34 heads over 4"),
    ],
    ids=["dimensions", "queries", "float8", "small units", "odd units", "group", "heads"],
)
def test_what_is_not_served_is_refused_by_name(q_dtype, given, reason):
    k, v = cache_of(**given)
    q = torch.zeros(5, 34 if "heads" in given else 4, k.shape[2], dtype=q_dtype)
    assert reason in hopper.serves(q, k, v)
    index = torch.zeros(1, 2, dtype=torch.int32)
    scratch = triton_decode.DecodeScratch.allocate(5, 34, 128, ROOM, 512, "cpu")
    with pytest.raises(EngineError, match=reason):
        hopper.decode(
            q, k, v, torch.empty_like(q), kv_lens=index[0], block_tables=index, scale=1.0,
            shape=hopper.USUAL, scratch=scratch,
        )  # fmt: skip


def test_dimensions_that_lie_apart_are_refused():
    k, v = cache_of()
    q = torch.zeros(5, 4, 128, dtype=torch.bfloat16)
    assert "lie apart" in hopper.serves(q, k.contiguous(), v)
    shifted = torch.zeros(v.numel() + 1, dtype=v.dtype)[1:].view(3, 8, 2, 128).permute(0, 2, 1, 3)
    assert "16 bytes" in hopper.serves(q, k, shifted)


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"tile": 32}, "tiles of 32"), ({"split": 96}, "splits of 96"), ({"split": 1024}, "of 1024")],
)
def test_a_shape_that_cannot_be_is_refused(given, reason):
    with pytest.raises(EngineError, match=reason):
        hopper.HopperDecodeShape(**given)


@pytest.mark.parametrize("length", LENGTHS)
def test_each_length_equals_the_reference(monkeypatch, length):
    """Scratch ends with the last row's last part: no more of them is read than there are."""
    interpret(monkeypatch, seed=length)
    out, error = attended([9, length], room=max(LENGTHS))
    assert error < BOUND[torch.bfloat16]
    if length == 0:
        assert not bool(out[1].any())


@pytest.mark.parametrize("group", [*range(1, 9), 12, 16])
def test_each_group_equals_the_reference(monkeypatch, group):
    interpret(monkeypatch, seed=group)
    dtype = (torch.bfloat16, torch.float16)[group % 2]
    _, error = attended([77, 530], heads=(2 * group, 2), dtype=dtype)
    assert error < BOUND[dtype]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("unit", [8, 16, 32, 64, 256])
def test_each_unit_equals_the_reference(monkeypatch, unit, head_dim):
    interpret(monkeypatch, seed=unit)
    _, error = attended([unit - 1, 333, 520], heads=(4, 2), head_dim=head_dim, unit=unit)
    assert error < BOUND[torch.bfloat16]


@pytest.mark.parametrize(
    "shape",
    [*hopper.CANDIDATES, hopper.HopperDecodeShape(stages=2, split=64),
     hopper.HopperDecodeShape(stages=3, split=128), hopper.HopperDecodeShape(split=256)],
    ids=str,
)  # fmt: skip
def test_each_shape_equals_the_reference(monkeypatch, shape):
    """Rings that go round and rings that are never full, one split and several."""
    interpret(monkeypatch, seed=shape.stages)
    _, error = attended([130, 1100], heads=(3, 1), shape=shape)
    assert error < BOUND[torch.bfloat16]


@pytest.mark.parametrize("programs", [1, 2])
def test_programs_that_take_splits_in_turn_give_the_same_bits(monkeypatch, programs):
    lens = [2000, 0, 700, 3]
    interpret(monkeypatch, seed=programs)
    torch.manual_seed(4)
    monkeypatch.setattr(hopper, "PROGRAMS", 1 << 20)
    own, error = attended(lens)
    assert error < BOUND[torch.bfloat16]
    monkeypatch.setattr(hopper, "PROGRAMS", 4 * programs)
    torch.manual_seed(4)
    in_turn, _ = attended(lens)
    assert torch.equal(own, in_turn)


def test_a_row_has_the_same_bits_in_whatever_order_things_come(monkeypatch):
    seen = []
    for seed in range(6):
        torch.manual_seed(3)
        interpret(monkeypatch, seed)
        with dependent_launches(on=seed > 2):
            out, error = attended([1100, 77, 0], heads=(2, 1), unit=16)
        assert error < BOUND[torch.bfloat16]
        seen.append(out)
    assert all(torch.equal(seen[0], out) for out in seen[1:])


def test_a_dependent_launch_asks_early_for_keys_of_earlier_steps_alone(monkeypatch):
    """A step's own keys, which end a tile or begin one, come after the wait."""
    for seed in range(3):
        interpret(monkeypatch, seed)
        with dependent_launches():
            _, error = attended([64, 65, 512, 577, 1, 0], heads=(2, 1))
        assert error < BOUND[torch.bfloat16]
    kernel = gluon_interpreter.Interpreter(KERNEL, late=WRITTEN_BEFORE)
    monkeypatch.setattr(hopper, "hopper_decode_kernel", kernel)
    with (
        dependent_launches(),
        pytest.raises(gluon_interpreter.GluonFaultError, match="k_desc is touched before"),
    ):
        attended([65], heads=(2, 1))


@pytest.mark.parametrize(
    ("splits", "rows", "expected"),
    [(16, 4, 16), (16, 200, 6), (256, 200, 6), (16, 512, 3), (1, 4000, 1)],
)
def test_programs_without_work_are_few(splits, rows, expected):
    assert hopper.programs_a_row(splits, rows) == expected


def test_a_row_has_the_same_bits_alone_and_with_room_to_grow(monkeypatch):
    interpret(monkeypatch, seed=5)
    torch.manual_seed(6)
    company, _ = attended([601, 40, 1030])
    torch.manual_seed(6)
    # Drawn first of all, so that they are the same.
    paged = Paged(kv_lens=[601, 40, 1030], num_heads=7, num_kv_heads=1, head_dim=128, block_size=8)
    alone = decoded(
        paged.queries[0][-1:].bfloat16(), (paged.k_cache.bfloat16(), paged.v_cache.bfloat16()),
        torch.tensor([601], dtype=torch.int32), torch.tensor([paged.tables[0]], dtype=torch.int32),
        128**-0.5, room=4 * ROOM,
    )  # fmt: skip
    assert torch.equal(alone[0], company[0])


@pytest.mark.gpu
@pytest.mark.parametrize("unit", [8, 16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", hopper.CANDIDATES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((28, 4), 128), ((32, 8), 64), ((32, 2), 128)])
def test_it_equals_the_reference(heads, head_dim, shape, dtype, unit):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernel needs a Hopper GPU")
    lens = [*LENGTHS, 7, 1023, 2048]
    _, error = attended(
        lens, heads=heads, head_dim=head_dim, unit=unit, dtype=dtype, shape=shape, device="cuda"
    )
    assert math.isfinite(error)
    assert error < 0.01
