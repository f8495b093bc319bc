"""Hopper's decode kernel over a float8 cache: the formula over what the cache holds, in its scales.

As test_triton_hopper_decode sees the kernel over 16 bits, and by its ways.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.kv_scales import KVScales, quantised
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention import triton_decode
from tailrace.kernels.paged_attention.reference import paged_attention
from tests.kernels.paged import NAN, Paged, make_batch
from tests.kernels.test_float8_kv import SCALES
from tests.kernels.test_triton_hopper_decode import (
    BOUND,
    LENGTHS,
    ROOM,
    cache_of,
    hopper,
    interpret,
    shared_memory,
)
from tests.kernels.test_triton_hopper_decode import decoded as decoded_by

tiles = pytest.importorskip(
    "tailrace.kernels.paged_attention.triton_hopper_float8_kv",
    reason="Triton with Gluon is not installed",
)

USUAL = hopper.USUAL_FLOAT8


def paged(lens, *, heads=(7, 1), unit=8):
    """Return sequences whose keys and values are what a float8 cache holds, and that cache."""
    case = Paged(
        kv_lens=list(lens), num_heads=heads[0], num_kv_heads=heads[1], head_dim=128,
        block_size=unit,
    )  # fmt: skip
    held = [
        quantised(cache, scale, FLOAT8)
        for cache, scale in ((case.k_cache, SCALES.k), (case.v_cache, SCALES.v))
    ]
    case.k_cache, case.v_cache = held[0].float() * SCALES.k, held[1].float() * SCALES.v
    return case, held


decoded = partial(decoded_by, shape=USUAL, kv_scales=SCALES)


def attended(
    lens, *, heads=(7, 1), unit=8, dtype=torch.bfloat16, shape=USUAL, room=ROOM, device="cpu"
):
    """Return the kernel's result for one row of each length, and its error against float64's."""
    case, held = paged(lens, heads=heads, unit=unit)
    # A padded row's query is whatever lay there.
    rows = [q[-1] if len(q) else torch.full((heads[0], 128), NAN) for q in case.queries]
    q = torch.stack(rows).to(dtype)
    whole = make_batch([(min(1, n), n) for n in lens], unit, case.tables)
    live = [row for row, n in enumerate(lens) if n]
    batch = make_batch([(1, lens[row]) for row in live], unit, [case.tables[row] for row in live])
    caches = (case.k_cache.double(), case.v_cache.double())
    truth = torch.zeros(q.shape, dtype=torch.float64)
    found = paged_attention(q[live].double(), *caches, batch, case.scale)
    truth[live] = found.view(len(live), *q.shape[1:])
    result = decoded(
        q.to(device), held, whole.kv_lens, whole.block_tables, case.scale, shape=shape, room=room
    )
    return result, float((result.double() - truth).norm() / truth.norm())


def test_words_are_read_where_their_boxes_are_put():
    box = shared_memory._addresses((1, 1, 1, 8, 128), hopper.box_layout(is_float8=True), 1)
    boxes = torch.arange(8).view(-1, 1, 1) * 1024 + box[0, 0, 0]
    expected = boxes.view(64, 128)[:, ::4]
    found = shared_memory._addresses((64, 32), tiles.part_layout(), 4)
    rows = torch.arange(64)
    keys = rows & ~5 | (rows & 1) << 2 | rows >> 2 & 1
    assert torch.equal(found, expected[keys])


@pytest.mark.parametrize(("layout", "together"), [("key_words", 4), ("value_words", 1)])
def test_threads_that_read_at_once_read_other_banks(layout, together):
    """Eight threads 16 bytes each, or a warp's 32 threads 4 bytes each."""
    places = shared_memory._addresses((64, 32), tiles.part_layout(), 4)
    order = getattr(tiles, layout)()
    at_once = 32 // together
    seen = []
    for others in itertools.product((0, 1), repeat=len(order.reg_bases) + 2):
        warp = _combined([*order.warp_bases, *order.reg_bases], others)
        for group in range(together):
            lanes = range(group * at_once, (group + 1) * at_once)
            at = [_moved(order.lane_bases, lane, warp) for lane in lanes]
            found = [int(places[key, word]) for key, word in at]
            seen += found
            assert len({place // (4 * together) % (32 // together) for place in found}) == at_once
    assert sorted(seen) == list(range(0, 8192, 4))


def _combined(bases, bits):
    place = [0, 0]
    for basis, bit in zip(bases, bits, strict=True):
        place = [a ^ b * bit for a, b in zip(place, basis, strict=True)]
    return place


def _moved(bases, lane, place):
    own = _combined(bases, [lane >> bit & 1 for bit in range(5)])
    return [a ^ b for a, b in zip(place, own, strict=True)]


@pytest.mark.parametrize("shape", hopper.FLOAT8_CANDIDATES, ids=str)
def test_a_program_leaves_room_for_others_on_its_multiprocessor(shape):
    ring = shape.stages * shape.tile * 128
    # Queries and weights of 8 heads, barriers, and what the runtime takes.
    other = 8 * 128 * 2 + shape.split * 8 * 2 + 1536
    programs = min((228 << 10) // (ring + other), (1 << 16) // (256 * shape.registers))
    assert programs == (2 if ring > 64 << 10 else {80: 3, 64: 4}[shape.registers])


def test_the_pools_layout_is_served():
    for dtype, tokens in ((torch.float16, 8), (torch.bfloat16, 64)):
        q = torch.zeros(5, 14, 128, dtype=dtype)
        assert hopper.serves(q, *cache_of(tokens=tokens, dtype=FLOAT8)) is None


@pytest.mark.parametrize(
    ("q_dtype", "given", "reason"),
    [
        (torch.bfloat16, {"dim": 64}, "64 dimensions"),
        (torch.float32, {}, "queries in torch.float32"),
        (torch.bfloat16, {"tokens": 4}, "units of 4 tokens"),
        (torch.bfloat16, {"tokens": 24}, "units of 24 tokens"),
        (torch.bfloat16, {"heads": 1}, "34 heads over 1"),
    ],
    ids=["dimensions", "queries", "small units", "odd units", "group"],
)
def test_what_is_not_served_is_refused_by_name(q_dtype, given, reason):
    k, v = cache_of(**given, dtype=FLOAT8)
    q = torch.zeros(5, 34 if "heads" in given else 4, k.shape[2], dtype=q_dtype)
    assert reason in hopper.serves(q, k, v)


def test_keys_and_values_of_two_kinds_are_refused():
    q = torch.zeros(5, 4, 128, dtype=torch.bfloat16)
    (k, v), (k8, v8) = cache_of(), cache_of(dtype=FLOAT8)
    assert "they must be the same" in hopper.serves(q, k8, v)
    assert "they must be the same" in hopper.serves(q, k, v8)


def test_dimensions_that_lie_apart_are_refused():
    k, v = cache_of(dtype=FLOAT8)
    q = torch.zeros(5, 4, 128, dtype=torch.bfloat16)
    assert "lie apart" in hopper.serves(q, k.contiguous(), v)
    shifted = torch.zeros(v.numel() + 8, dtype=FLOAT8)[8:].view(3, 8, 2, 128).permute(0, 2, 1, 3)
    assert "16 bytes" in hopper.serves(q, k, shifted)


def test_scales_of_a_cache_that_has_none_are_refused():
    k, v = cache_of()
    q = torch.zeros(3, 4, 128, dtype=torch.bfloat16)
    index = torch.zeros(1, 2, dtype=torch.int32)
    scratch = triton_decode.DecodeScratch.allocate(3, 4, 128, ROOM, 512, "cpu")
    with pytest.raises(EngineError, match="scales of a cache in torch.bfloat16"):
        hopper.decode(
            q, k, v, torch.empty_like(q), kv_lens=index[0], block_tables=index, scale=1.0,
            shape=hopper.USUAL, scratch=scratch, kv_scales=KVScales(1.0, 2.0),
        )  # fmt: skip


@pytest.mark.parametrize("length", LENGTHS)
def test_each_length_equals_the_reference(monkeypatch, length):
    """Scratch ends with the last row's last part: no more of them is read than there are."""
    interpret(monkeypatch, seed=length)
    out, error = attended([9, length], room=max(LENGTHS))
    assert error < BOUND[torch.bfloat16]
    if length == 0:
        assert not bool(out[1].any())


@pytest.mark.parametrize("group", [1, 4, 7, 8, 9, 16])
def test_each_group_equals_the_reference(monkeypatch, group):
    interpret(monkeypatch, seed=group)
    dtype = (torch.bfloat16, torch.float16)[group % 2]
    _, error = attended([77, 530], heads=(2 * group, 2), dtype=dtype)
    assert error < BOUND[dtype]


@pytest.mark.parametrize("unit", [8, 16, 32, 64, 256])
def test_each_unit_equals_the_reference(monkeypatch, unit):
    interpret(monkeypatch, seed=unit)
    _, error = attended([unit - 1, 333, 520], heads=(4, 2), unit=unit)
    assert error < BOUND[torch.bfloat16]


@pytest.mark.parametrize(
    "shape",
    [*hopper.FLOAT8_CANDIDATES, hopper.HopperDecodeShape(stages=2, split=64),
     hopper.HopperDecodeShape(stages=3, split=128),
     hopper.HopperDecodeShape(tile=128, stages=3, split=128)],
    ids=str,
)  # fmt: skip
def test_each_shape_equals_the_reference(monkeypatch, shape):
    """Rings that go round and rings that are never full, one split and several."""
    interpret(monkeypatch, seed=shape.stages)
    _, error = attended([130, 1100], heads=(3, 1), shape=shape)
    assert error < BOUND[torch.bfloat16]


def test_tiles_of_64_and_of_128_keys_give_the_same_bits(monkeypatch):
    seen = []
    for tile in (64, 128):
        torch.manual_seed(2)
        interpret(monkeypatch, seed=tile)
        shape = hopper.HopperDecodeShape(tile=tile, stages=4)
        out, _ = attended([130, 700], heads=(3, 1), shape=shape)
        seen.append(out)
    assert torch.equal(*seen)


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


def test_a_row_has_the_same_bits_alone_and_with_room_to_grow(monkeypatch):
    interpret(monkeypatch, seed=5)
    torch.manual_seed(6)
    company, _ = attended([601, 40, 1030])
    torch.manual_seed(6)
    case, held = paged([601, 40, 1030])  # drawn likewise, so that they are the same
    alone = decoded(
        case.queries[0][-1:].bfloat16(), held, torch.tensor([601], dtype=torch.int32),
        torch.tensor([case.tables[0]], dtype=torch.int32), case.scale, room=4 * ROOM,
    )  # fmt: skip
    assert torch.equal(alone[0], company[0])


def one_sequence(keys, values):
    """Return a cache of one sequence [tokens, 128] in units of 8, and its table."""
    units = -(-len(keys) // 8)
    held = []
    for given in (keys, values):
        filled = torch.full((8 * units, 128), NAN)
        filled[: len(given)] = given
        held.append(filled.to(FLOAT8).view(units, 1, 8, 128))
    table = torch.arange(units, dtype=torch.int32)[None]
    return (held[0].transpose(2, 3), held[1]), table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_largest_queries_there_are_keep_the_softmax_finite(monkeypatch, dtype):
    """In float16 that is 65504; times a scale and keys of some hundreds it is far beyond."""
    interpret(monkeypatch, seed=1)
    torch.manual_seed(7)
    keys, values = (torch.randn(90, 128).to(FLOAT8).float() for _ in range(2))
    held, table = one_sequence(keys, values)
    most = torch.finfo(dtype).max if dtype == torch.float16 else 1e30
    q = torch.full((1, 2, 128), most, dtype=dtype)
    out = decoded(q, held, torch.tensor([90], dtype=torch.int32), table, 1.0)
    # One key has all the weight, and its values come out.
    best = values[keys.sum(1).argmax()] * SCALES.v
    torch.testing.assert_close(out[0].float(), best.expand(2, -1), rtol=0.01, atol=1e-6)


def test_weights_below_what_float16_holds_of_one_still_count(monkeypatch):
    """2^-27 is nothing in float16, but 2^-12 is, 15 powers of two higher."""
    interpret(monkeypatch, seed=2)
    keys, values = torch.zeros(60, 128), torch.full((60, 128), 448.0)
    # One key is 27 octaves above the others, and its values are 0.
    keys[0, 0], values[0] = 1.0, 0.0
    held, table = one_sequence(keys, values)
    q = torch.zeros(1, 1, 128, dtype=torch.float16)
    q[0, 0, 0] = 27 / math.log2(math.e)
    unit = KVScales(1.0, 1.0)
    out = decoded(q, held, torch.tensor([60], dtype=torch.int32), table, 1.0, kv_scales=unit)
    weight = math.exp(-float(q[0, 0, 0]))
    expected = 59 * 448 * weight / (1 + 59 * weight)
    torch.testing.assert_close(out[0, 0].double(), torch.full((128,), expected).double(),
                               rtol=2e-3, atol=0)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("unit", [8, 16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", hopper.FLOAT8_CANDIDATES, ids=str)
@pytest.mark.parametrize("heads", [(28, 4), (32, 2)])
def test_it_equals_the_reference(heads, shape, dtype, unit):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernel needs a Hopper GPU")
    lens = [*LENGTHS, 7, 1023, 2048]
    _, error = attended(lens, heads=heads, unit=unit, dtype=dtype, shape=shape, device="cuda")
    assert math.isfinite(error)
    assert error < 0.01
