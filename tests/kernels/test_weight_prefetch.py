"""What is asked for ahead: the schedule of a step, and programs that ask, by their addresses."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.errors import EngineError
from tailrace.kernels.kv_scales import UNSCALED
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.float8 import quantize_channels
from tailrace.kernels.linear.float8_linear import Float8Linear
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.int4_linear import Int4Linear
from tailrace.kernels.linear.int8_linear import Int8Linear
from tailrace.kernels.linear.phased_linear import PhasedLinear
from tailrace.kernels.linear.triton_float8_rows import add_rms_norm_float8, silu_mul_float8
from tailrace.kernels.linear.triton_skinny import SkinnyLinear, SkinnyScratch
from tailrace.kernels.linear.workspace import Workspace
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch, DecodeShape, decode
from tailrace.kernels.rms_norm.triton import add_rms_norm
from tailrace.kernels.rope_cache.triton import rope_and_cache
from tailrace.kernels.rotary import Rotary
from tailrace.kernels.silu_mul.triton import silu_mul
from tailrace.kernels.weight_prefetch.gaps import (
    LINE,
    MIB,
    PIECE,
    Ask,
    Budget,
    Span,
    Streamed,
    asked_ahead,
    asking,
    asks_in_bulk,
    schedule,
)
from tests.support.interpreter import exact_float8, quietly, recorded_asks

CPU = torch.device("cpu")
A_LAYER = ["norm", "rope", "attention", "norm", "silu"]


@pytest.fixture(autouse=True)
def _quiet():
    with quietly():
        yield


def bytes_of(span):
    """Return the addresses of a span's bytes, by their lines."""
    first = span.memory.data_ptr()
    return [
        first + index * span.stride + place
        for index in range(span.count)
        for place in range(0, span.piece, LINE)
    ]


def weights_of(shapes, begin=0):
    """Return weights that begin so many bytes after a line does."""
    found = []
    for rows, width in shapes:
        storage = torch.zeros(rows * width + 2 * LINE, dtype=torch.uint8)
        first = -storage.data_ptr() % LINE + begin
        found.append(storage[first : first + rows * width].view(rows, width))
    return found


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 24).map(lambda n: 64 * n))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SIZES, min_size=4, max_size=8).filter(lambda sizes: len(sizes) % 4 == 0),
    st.integers(1, 40_000),
    st.integers(1, 80_000),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 64]),
)
def test_no_gap_exceeds_its_budget_no_byte_comes_twice_and_the_room_is_kept(
    sizes, budget, room, by_columns, is_early, begin
):
    weights = weights_of(sizes, begin)
    asks = schedule(weights, Budget(budget, by_columns, is_early), room)
    assert [ask.gap for ask in asks] == A_LAYER * (len(sizes) // 4) + ["norm"]
    lines = [line for ask in asks for span in ask.spans for line in bytes_of(span)]
    assert len(set(lines)) == len(lines)
    held = [range(w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights]
    assert all(any(line in one and line + LINE - 1 in one for one in held) for line in lines)
    assert all(ask.nbytes <= min(budget, room) for ask in asks)
    assert asks[-1].spans == ()
    for first in range(0, len(asks) - 1, 5):
        _, rope, attention, norm, _ = asks[first : first + 5]
        assert rope.nbytes + attention.nbytes <= room
        assert is_early or not rope.spans
        out = weights[4 * (first // 5) + 1]
        held = range(out.data_ptr(), out.data_ptr() + out.nbytes)
        of_gate_up = [s.nbytes for s in attention.spans if s.memory.data_ptr() not in held]
        assert sum(of_gate_up) + norm.nbytes <= room


def test_a_weight_is_asked_for_from_its_beginning_and_goes_on_where_it_ended():
    qkv, out, gate_up, down = weights = weights_of([(10, PIECE)] * 4)
    asks = schedule(weights, Budget(4 * PIECE + 5, is_early=True), 100 * PIECE)
    assert [[(s.memory.data_ptr(), s.count) for s in ask.spans] for ask in asks[:5]] == [
        [(qkv.data_ptr(), 4)],
        [(out.data_ptr(), 4)],
        [(out.data_ptr() + 4 * PIECE, 4)],
        [(gate_up.data_ptr(), 4)],
        [(down.data_ptr(), 4)],
    ]
    usual, early = (
        schedule(weights, Budget(8 * PIECE, is_early=early), 100 * PIECE) for early in (False, True)
    )
    assert [[(s.memory.data_ptr(), s.count) for s in ask.spans] for ask in early[1:4]] == [
        [(out.data_ptr(), 8)],
        [(out.data_ptr() + 8 * PIECE, 2), (gate_up.data_ptr(), 6)],
        [(gate_up.data_ptr() + 6 * PIECE, 4)],
    ]
    assert [[(s.memory.data_ptr(), s.count) for s in ask.spans] for ask in usual[1:4]] == [
        [],
        [(out.data_ptr(), 8)],
        [(gate_up.data_ptr(), 8)],
    ]


def test_by_columns_every_row_is_asked_for_from_its_beginning():
    weights = weights_of([(10, PIECE)] * 4)
    ask, _, further = schedule(
        weights, Budget(25 * LINE, by_columns=True, is_early=True), 100 * PIECE
    )[:3]
    (span,) = ask.spans
    assert (span.memory.data_ptr(), span.stride, span.piece, span.count) == (
        weights[0].data_ptr(), PIECE, 2 * LINE, 10,
    )  # fmt: skip
    (span,) = further.spans
    assert (span.memory.data_ptr(), span.piece) == (weights[1].data_ptr() + 2 * LINE, 2 * LINE)


def test_a_weight_that_begins_within_a_line_is_asked_for_from_the_next():
    weights = weights_of([(1, 3 * PIECE + LINE)] * 4, begin=16)
    (span,) = schedule(weights, Budget(MIB), MIB)[0].spans
    assert span.memory.data_ptr() % LINE == 0
    assert span.memory.data_ptr() - weights[0].data_ptr() == LINE - 16
    assert span.count == 3


def test_half_a_layer_is_refused():
    with pytest.raises(EngineError, match="3 linear layers are no whole layers of 4"):
        schedule(weights_of([(1, 64)] * 3), Budget(MIB), MIB)


def test_steps_that_are_not_those_of_the_asks_are_errors():
    asks = [Ask("norm"), Ask("silu")]
    with (
        pytest.raises(EngineError, match="silu comes where norm, silu was expected"),
        asking(asks, hosts=1, is_bulk=False),
    ):
        asked_ahead("silu")
    with (
        pytest.raises(EngineError, match="the step ended before silu"),
        asking(asks, hosts=1, is_bulk=False),
    ):
        asked_ahead("norm")
    with (
        pytest.raises(EngineError, match="rope comes where the end was expected"),
        asking([], hosts=1, is_bulk=False),
    ):
        asked_ahead("rope")
    assert asked_ahead("norm").arguments() == {}


def test_other_threads_ask_for_nothing_and_a_failure_ends_it():
    found = []

    def fail():
        with asking([Ask("norm")], hosts=1, is_bulk=False):
            thread = Thread(target=lambda: found.append(asked_ahead("silu").programs()))
            thread.start()
            thread.join()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert found == [0]
    assert asked_ahead("silu").programs() == 0


@pytest.mark.parametrize(
    ("capability", "in_bulk"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)]
)
def test_hopper_asks_for_pieces_others_for_lines(capability, in_bulk):
    assert asks_in_bulk(capability) == in_bulk


def test_a_budget_has_a_name():
    assert Budget(8 * MIB).words == "8 MiB"
    assert Budget(MIB // 2, True, True, True).words == "0.5 MiB, columns, early, kept"


# The programs


@pytest.fixture
def asked(monkeypatch):
    return recorded_asks(monkeypatch)


def half(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.float16)


def normed():
    residual = half(3, 40).float()
    out = add_rms_norm(half(3, 40), residual, half(40).float(), 1e-6, out_dtype=torch.float16)
    return torch.cat([out.float(), residual])


def normed_float8():
    rows = add_rms_norm_float8(half(3, 40), half(3, 40).float(), half(40).float(), 1e-6)
    return rows.dequantize()


def rotated():
    k, v = torch.zeros(2, 1, 16, 8).half(), torch.zeros(2, 1, 8, 16).half()
    tables = Rotary(half(9, 8).float(), half(9, 8).float())
    places = torch.tensor([3, 8, 5], dtype=torch.int32)
    q = rope_and_cache(
        half(3, 4 * 16), tables, places, places, k, v, num_heads=2, num_kv_heads=1, head_dim=16,
        q_norm=None, k_norm=None, norm_eps=1e-6,
    )  # fmt: skip
    return torch.cat([q.flatten(), k.flatten(), v.flatten()])


def attended():
    q, out = half(3, 2, 16), torch.empty(3, 2, 16).half()
    shape = DecodeShape(16, 16, 4, 2)
    decode(
        q, half(9, 1, 16, 8), half(9, 1, 8, 16), out,
        kv_lens=torch.tensor([20, 0, 7], dtype=torch.int32),
        block_tables=torch.arange(9, dtype=torch.int32).view(3, 3),
        scale=0.25, shape=shape, scratch=DecodeScratch.allocate(3, 2, 16, 40, 16, "cpu"),
        kv_scales=UNSCALED,
    )  # fmt: skip
    return out


HOSTS = {
    "norm": normed,
    "norm in float8": normed_float8,
    "rope": rotated,
    "attention": attended,
    "silu": lambda: silu_mul(half(3, 2 * 1100)),
    "silu in float8": lambda: silu_mul_float8(half(3, 2 * 40)).dequantize(),
}


@pytest.mark.parametrize("in_bulk", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_programs_behind_a_kernels_own_ask_for_each_byte_once_and_change_no_bit(
    host, in_bulk, asked, monkeypatch
):
    if "float8" in host:
        exact_float8(monkeypatch)
    usual = HOSTS[host]()
    assert asked == []
    memory = torch.zeros(64 * PIECE, dtype=torch.uint8)
    spans = (Span(memory, PIECE, PIECE, 11), Span(memory[20 * PIECE :], 3 * LINE, 2 * LINE, 37))
    for some in (spans, spans[:1]):
        asked.clear()
        with asking([Ask(host.split()[0], some)], hosts=5, is_bulk=in_bulk):
            found = HOSTS[host]()
        assert torch.equal(found.view(torch.uint8), usual.view(torch.uint8))
        sizes = {span.piece for span in some} if in_bulk else {LINE}
        assert {size for _, size in asked} == sizes
        lines = [place + more for place, size in asked for more in range(0, size, LINE)]
        assert sorted(lines) == sorted(line for span in some for line in bytes_of(span))


# Layers


def layers():
    space = Workspace(CPU, torch.float16)
    weight = half(128, 256).float()
    plain = CublasLinear(weight, None, torch.float16, CPU)
    four = Int4Linear(quantize_groups(weight, 64), None, space)
    return {
        "plain": (plain, plain.weight_OI),
        "few rows": (SkinnyLinear(plain, SkinnyScratch.allocate("cpu")), plain.weight_OI),
        "4 bits": (four, four._weight.codes),
        "FP8": (
            eight := Float8Linear(quantize_channels(weight), None, space),
            eight._weight.values,
        ),
        "int8": (
            whole := Int8Linear(weight, None, torch.float16, CPU),
            whole._weight.values,
        ),
        "two copies": (PhasedLinear(four, plain, torch.float16, CPU), four._weight.codes),
    }


def test_every_layer_tells_the_memory_that_few_rows_read():
    for name, (layer, held) in layers().items():
        assert isinstance(layer, Streamed), name
        streamed = layer.streamed()
        assert (streamed.dtype, streamed.dim()) == (torch.uint8, 2), name
        assert streamed.is_contiguous(), name
        assert (streamed.data_ptr(), streamed.nbytes) == (held.data_ptr(), held.nbytes), name
        assert len(streamed) == (1 if held.dtype == torch.int16 else 128), name
