"""The interpreter of Gluon: a right kernel gives the right result, each fault is named.

The kernel multiplies over a ring as the real ones do; Triton compiles it for Hopper with each of
the faults. One is caught whatever the schedule: most are found in the account of who knows what,
not in a result that happened to be wrong.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Triton with Gluon is not installed")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tailrace.kernels.paged_attention.triton_hopper_float8_kv import DEAL_HIGHER, DEAL_LOWER, WIDEN
from tests.kernels.gluon_interpreter import GluonFaultError, Interpreter, registers
from tests.kernels.gluon_interpreter.assembly import MEANINGS
from tests.kernels.gluon_interpreter.machine import Copy, Machine, Partition
from tests.kernels.gluon_interpreter.shared_memory import _addresses
from tests.kernels.gluon_interpreter.values import Array, array, plain

ROWS, COLUMNS, STEP = 64, 32, 64
SLOTS = gl.constexpr(3)


@gluon.jit
def produce(x_desc, w_desc, rings, bars, steps, fault: gl.constexpr):
    x_ring, w_ring = rings
    full, free = bars
    nbytes: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    slot = 0
    phase = 1
    if fault == "wrong phase":
        phase = 0
    for step in range(steps):
        bar = full.index(slot)
        if fault != "copies without a free slot":
            mbarrier.wait(free.index(slot), phase)
        if fault == "too many bytes":
            mbarrier.expect(bar, nbytes + 16)
        elif fault == "too few bytes":
            mbarrier.expect(bar, nbytes - 16)
        elif fault != "expects nothing":
            mbarrier.expect(bar, nbytes)
        at = step * x_desc.block_type.shape[1]
        tma.async_copy_global_to_shared(x_desc, [0, at], bar, x_ring.index(slot))
        if fault != "copies one box only":
            tma.async_copy_global_to_shared(w_desc, [0, at], bar, w_ring.index(slot))
        slot += 1
        if slot == SLOTS and fault != "forgets the ring's end":
            slot = 0
            phase ^= 1


@gluon.jit
def consume(out_ptr, rings, bars, steps, fault: gl.constexpr):
    x_ring, w_ring = rings
    full, free = bars
    height: gl.constexpr = x_ring.shape[1]
    columns: gl.constexpr = w_ring.shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    acc = gl.zeros([height, columns], gl.float32, layout=sums)
    slot = 0
    phase = 0
    for _ in range(steps):
        if fault != "multiplies unasked":
            mbarrier.wait(full.index(slot), phase)
        w = w_ring.index(slot).permute((1, 0))
        acc = warpgroup_mma(x_ring.index(slot), w, acc, is_async=True)
        if fault == "hands over too early":
            mbarrier.arrive(free.index(slot), count=1)
        if fault == "waits for all but one":
            acc = warpgroup_mma_wait(1, deps=[acc])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if fault != "no thread barrier":
            gl.thread_barrier()
        if fault == "never hands over":
            pass
        elif fault != "hands over too early":
            mbarrier.arrive(free.index(slot), count=1)
        if fault == "hands over twice":
            mbarrier.arrive(free.index(slot), count=1)
        slot += 1
        if slot == SLOTS:
            slot = 0
            phase ^= 1
    if fault != "reads sums in flight":
        acc = warpgroup_mma_wait(0, deps=[acc])
    else:
        acc = warpgroup_mma(x_ring.index(0), w_ring.index(0).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
    rows = gl.arange(0, height, layout=gl.SliceLayout(1, sums))
    places = gl.arange(0, columns, layout=gl.SliceLayout(0, sums))
    if fault == "writes out of bounds":
        rows += 1
    gl.store(out_ptr + rows[:, None] * columns + places[None, :], acc)


@gluon.jit
def ring_kernel(x_desc, w_desc, out_ptr, steps, fault: gl.constexpr):
    rows: gl.constexpr = x_desc.block_type.shape[0]
    columns: gl.constexpr = w_desc.block_type.shape[0]
    step: gl.constexpr = x_desc.block_type.shape[1]
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, rows, step], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [SLOTS, columns, step], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        if fault != "a barrier is not made":
            mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    rings = (x_ring, w_ring)
    bars = (full, free)
    gl.warp_specialize(
        [
            (consume, (out_ptr, rings, bars, steps, fault)),
            (produce, (x_desc, w_desc, rings, bars, steps, fault)),
        ],
        [1],
        [24],
    )


def multiplied(fault="", seed=0, steps=8, dtype=torch.bfloat16):
    """Return [ROWS, COLUMNS] by the kernel, and by the formula."""
    torch.manual_seed(5)
    x, w = torch.randn(ROWS - 3, steps * STEP), torch.randn(COLUMNS, steps * STEP)
    x, w = x.to(dtype), w.to(dtype)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    out = torch.full((ROWS, COLUMNS), float("nan"))
    Interpreter(ring_kernel, seed=seed)[(1,)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, STEP], layout),
        TensorDescriptor(w, list(w.shape), list(w.stride()), [COLUMNS, STEP], layout),
        out, steps, fault, num_warps=4,
    )  # fmt: skip
    truth = torch.zeros(ROWS, COLUMNS)
    truth[: ROWS - 3] = x.float() @ w.float().t()
    return out, truth


def test_a_right_kernel_gives_the_product_in_whatever_order_things_happen():
    first, truth = multiplied()
    assert torch.allclose(first, truth, rtol=1e-4, atol=1e-4)
    for seed in range(1, 12):
        out, _ = multiplied(seed=seed)
        assert torch.equal(out, first), f"seed {seed}"


FAULTS = {
    "wrong phase": "deadlock: .*consume.* waits for phase 0 of full.*free",
    "copies without a free slot": "race in x_ring: a copy|arrives twice at full",
    "too many bytes": "deadlock: .* waits for phase 0 of full.* and 16 bytes",
    "too few bytes": "a copy brings [0-9]+ bytes to full",
    "expects nothing": "a copy brings [0-9]+ bytes to full",
    "copies one box only": "deadlock: .* waits for phase 0 of full.* and 4096 bytes",
    "forgets the ring's end": r"full\[3\]: there are 3",
    "multiplies unasked": "race: a product of x_ring",
    "hands over too early": "race in x_ring: a copy .* while a product",
    "waits for all but one": "race in x_ring: a copy .* while a product",
    "no thread barrier": "race in x_ring: a copy .* while a product",
    "never hands over": "deadlock: .*free",
    "hands over twice": "arrives twice|has completed phase|race in x_ring|complete",
    "reads sums in flight": "used before the wait that covers its product",
    "writes out of bounds": r"out_ptr\[2048\] is out of bounds: it has 2048 elements",
    "a barrier is not made": "is no barrier: init it first",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault, seed):
    with pytest.raises(GluonFaultError, match=FAULTS[fault]):
        multiplied(fault, seed)


def test_an_error_names_program_partition_and_seed():
    with pytest.raises(GluonFaultError) as caught:
        multiplied("writes out of bounds", seed=7)
    assert caught.value.__notes__ == ["in partition 0 (consume)", "program (0,) of (1,), seed 7"]


@gluon.jit
def store_kernel(x_ptr, out_desc, w_desc, out_ptr, fault: gl.constexpr):
    """Multiply rows that are stored to shared memory by hand; copy them out too."""
    order: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    shape: gl.constexpr = out_desc.block_type.shape
    height: gl.constexpr = shape[0]
    columns: gl.constexpr = w_desc.block_type.shape[0]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    x = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    w = gl.allocate_shared_memory(w_desc.dtype, w_desc.block_type.shape, w_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, w_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(w_desc, [0, 0], bar, w)
    rows = gl.arange(0, height, layout=gl.SliceLayout(1, order))
    inputs = gl.arange(0, shape[1], layout=gl.SliceLayout(0, order))
    at = x_ptr + rows[:, None] * shape[1] + inputs[None, :]
    values = gl.load(at)
    if fault == "loads what nobody wrote":
        values += x.load(order)
    x.store(values)
    if fault != "no fence":
        fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [0, 0], x)
    if fault == "overwrites what is copied out":
        x.store(gl.zeros_like(values))
    if fault != "leaves a copy behind":
        tma.store_wait(0)
    mbarrier.wait(bar, 0)
    zero = gl.zeros([height, columns], gl.float32, layout=sums)
    acc = warpgroup_mma(x, w.permute((1, 0)), zero, use_acc=False)
    outputs = gl.arange(0, columns, layout=gl.SliceLayout(0, sums))
    rows = gl.arange(0, height, layout=gl.SliceLayout(1, sums))
    gl.store(out_ptr + rows[:, None] * columns + outputs[None, :], acc)


def stored(fault="", seed=0):
    torch.manual_seed(5)
    x, w = torch.randn(ROWS, STEP).half(), torch.randn(COLUMNS, STEP).half()
    copy, out = torch.full_like(x[:-1], float("nan")), torch.full((ROWS, COLUMNS), float("nan"))
    layout = gl.NVMMASharedLayout(128, 16, 2)
    Interpreter(store_kernel, seed=seed)[(1,)](
        x,
        TensorDescriptor(copy, list(copy.shape), [STEP, 1], [ROWS, STEP], layout),
        TensorDescriptor(w, [COLUMNS, STEP], [STEP, 1], [COLUMNS, STEP], layout),
        out, fault, num_warps=4,
    )  # fmt: skip
    return x, w, copy, out


def test_stores_are_multiplied_and_copied_out():
    for seed in range(4):
        x, w, copy, out = stored(seed=seed)
        assert torch.equal(copy, x[:-1]), "rows beyond the tensor are not written"
        assert torch.allclose(out, x.float() @ w.float().t(), rtol=1e-4, atol=1e-4)


STORE_FAULTS = {
    "no fence": "no fence_async_shared since",
    "loads what nobody wrote": "race: a load of x .* nobody has written it",
    "overwrites what is copied out": "race in x: a store of x .* while a copy out of x",
    "leaves a copy behind": "ends with a copy to global memory that it has not waited for",
}


@pytest.mark.parametrize("fault", STORE_FAULTS)
def test_each_fault_of_stores_is_named(fault):
    for seed in range(3):
        with pytest.raises(GluonFaultError, match=STORE_FAULTS[fault]):
            stored(fault, seed)


@gluon.jit
def rounds_kernel(out_ptr, rounds, is_eager: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    back = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.init(back, count=1)
    gl.warp_specialize(
        [
            (wait_rounds, (out_ptr, bar, back, rounds)),
            (arrive_rounds, (bar, back, rounds, is_eager)),
        ],
        [1],
        [24],
    )


@gluon.jit
def wait_rounds(out_ptr, bar, back, rounds):
    for number in range(rounds):
        mbarrier.wait(bar, number & 1)
        gl.store(out_ptr + number, number * 7 // -2)
        gl.thread_barrier()
        mbarrier.arrive(back, count=1)


@gluon.jit
def arrive_rounds(bar, back, rounds, is_eager: gl.constexpr):
    for number in range(rounds):
        mbarrier.arrive(bar, count=1)
        if not is_eager:
            mbarrier.wait(back, number & 1)


def test_whoever_is_two_phases_behind_is_told():
    out = torch.zeros(9, dtype=torch.int32)
    for seed in range(5):
        Interpreter(rounds_kernel, seed=seed)[(1,)](out, 9, False)
        assert out.tolist() == [-(n * 7 // 2) for n in range(9)], "division is C's"
    caught = set()
    for seed in range(20):
        try:
            Interpreter(rounds_kernel, seed=seed)[(1,)](out, 9, True)
        except GluonFaultError as error:
            caught.add(str(error).split()[0])
    assert caught


def test_addresses_are_the_hardwares():
    """An element's 16 bytes change places by their row's number, within 8 rows of 128 bytes."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    places = _addresses((2, 16, 128), layout, 2)
    assert sorted(places.reshape(-1).tolist()) == list(range(0, 2 * 16 * 128 * 2, 2))
    assert places[0, 0, :64].tolist() == list(range(0, 128, 2))
    assert int(places[0, 0, 64]) == 16 * 128, "the next 64 columns come after all rows"
    assert int(places[0, 3, 0]) == 3 * 128 + (3 << 4)
    assert int(places[0, 9, 8]) == 9 * 128 + ((1 ^ 1) << 4)
    assert int(places[1, 0, 0]) == 16 * 128 * 2
    narrow = _addresses((16, 16), gl.NVMMASharedLayout(32, 16, 2), 2)
    assert [int(narrow[row, 0]) for row in (0, 3, 4, 8)] == [0, 96, 128 + 16, 256]
    boxes = _addresses((4, 1, 8, 1, 64), gl.NVMMASharedLayout(128, 16, 4), 2)
    tile = _addresses((1, 32, 64), layout, 2)
    assert torch.equal(boxes.reshape(32, 64), tile[0]), "boxes of 8 rows are a tile of 32"
    columns = [[0, 1 << bit] for bit in range(6)]
    rows = [*([1 << bit, 8 << bit] for bit in range(3)), [8, 0], [16, 0]]
    linear = _addresses((1, 32, 64), gl.SharedLinearLayout([*columns, *rows]), 2)
    assert torch.equal(linear, tile), "bit by bit"
    with pytest.raises(GluonFaultError, match="of 2048 elements, not of"):
        _addresses((32, 128), gl.SharedLinearLayout([*columns, *rows]), 2)


def test_arithmetic_is_tritons():
    minus = array(-7)
    assert int((minus // 2).data) == -3
    assert int((minus % 2).data) == -1
    half = Array(torch.tensor([1.0, 3.0]).bfloat16())
    assert (half * 2).data.dtype == torch.bfloat16
    assert (half / 3).data.dtype == torch.float32
    assert (half + Array(torch.tensor(1.0))).data.dtype == torch.float32, "run-time scalars count"
    assert (array(1) + array(2**40)).data.dtype == torch.int64
    with pytest.raises(GluonFaultError, match="does not fit"):
        Array(torch.tensor([1], dtype=torch.int16)) + 70000
    with pytest.raises(GluonFaultError, match="branch on an array"):
        bool(half == 1)
    pair = Array(torch.tensor([[1, -2], [3, -4]]))
    first, second = registers.split(pair)
    assert (first.data.tolist(), registers.absolute(second).data.tolist()) == ([1, 3], [2, 4])
    with pytest.raises(GluonFaultError, match="is not split"):
        registers.split(first.broadcast_to([4, 2]).reshape(2, 4))


@pytest.mark.parametrize(
    ("text", "words", "places"),
    [(WIDEN, 1, (0, 1, 2, 3)), (DEAL_LOWER, 2, (0, 1)), (DEAL_HIGHER, 2, (2, 3))],
    ids=["one word", "two, lower half", "two, higher half"],
)
def test_words_of_float8_are_widened_number_by_number(text, words, places):
    """Of all words the first of these numbers, then the second; NaN stays NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(words, -1, 4)
    given = [Array(x.contiguous().view(torch.int32).reshape(-1)) for x in numbers]
    _, _, meaning = MEANINGS[str(plain(text))]
    found = torch.stack(meaning(given)).view(len(places), words, -1).permute(1, 2, 0)
    expected = numbers[..., list(places)].view(torch.float8_e4m3fn).half()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@gluon.jit
def unknown_kernel(out_ptr, what: gl.constexpr):
    if what == "builtin":
        gl.histogram(out_ptr, 4)
    if what == "assembler":
        gl.inline_asm_elementwise("nanosleep.u32 9; // $0", "=r", [], dtype=gl.int32, is_pure=False,
                                  pack=1)  # fmt: skip


@pytest.mark.parametrize(
    ("what", "words"),
    [("builtin", "gl.histogram is not known here"), ("assembler", "meaning is not known here")],
    ids=["builtin", "assembler"],
)
def test_what_is_not_known_is_refused(what, words):
    with pytest.raises(GluonFaultError, match=words):
        Interpreter(unknown_kernel)[(1,)](torch.zeros(4), what)


@gluon.jit
def dependent_kernel(x_ptr, out_ptr, is_early: gl.constexpr):
    if is_early:
        value = gl.load(x_ptr)
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    if not is_early:
        value = gl.load(x_ptr)
    gl.store(out_ptr, value)


def test_what_the_kernel_before_writes_is_not_touched_before_the_wait_for_it():
    x, out = torch.ones(1), torch.zeros(1)
    kernel = Interpreter(dependent_kernel, late={"x_ptr"})[(1,)]
    kernel(x, out, False, launch_pdl=True)
    assert out == 1
    kernel(x, out, True)
    with pytest.raises(GluonFaultError, match="x_ptr is touched before the wait"):
        kernel(x, out, True, launch_pdl=True)


@gluon.jit
def meeting_kernel(x_ptr, parts_ptr, arrivals, out_ptr, programs, fault: gl.constexpr):
    """Add up a row of each program: whoever comes last does."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    places = gl.arange(0, 128, layout=layout)
    mine = gl.program_id(0) * 128
    gl.store(parts_ptr + mine + places, gl.load(x_ptr + mine + places) * 2)
    if fault != "no thread barrier":
        gl.thread_barrier()
    if fault == "relaxed":
        come = gl.atomic_add(arrivals, 1, sem="relaxed")
    else:
        come = gl.atomic_add(arrivals, 1, sem="acq_rel")
    if come == programs - 1:
        total = gl.zeros([128], gl.float32, layout=layout)
        for program in range(programs):
            total += gl.load(parts_ptr + program * 128 + places)
        gl.store(out_ptr + places, total)
        gl.store(arrivals, 0)
    if fault == "all write":
        gl.store(out_ptr + places, gl.zeros([128], gl.float32, layout=layout))


@pytest.mark.parametrize("fault", ["", "no thread barrier", "relaxed", "all write"])
def test_programs_meet_at_atomics(fault):
    x = torch.randn(5, 128)
    for seed in range(3):
        out, arrivals = torch.zeros(128), torch.zeros(1, dtype=torch.int32)
        arguments = x, torch.full_like(x, float("nan")), arrivals, out, 5, fault
        if not fault:
            Interpreter(meeting_kernel, seed=seed)[(5,)](*arguments)
            assert torch.allclose(out, 2 * x.sum(0), atol=1e-5)
            assert arrivals == 0
            continue
        with pytest.raises(GluonFaultError, match=r"race: a (load|store) of (parts|out)_ptr\["):
            Interpreter(meeting_kernel, seed=seed)[(5,)](*arguments)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(6))
def test_what_a_copy_raises_when_its_partition_has_ended_ends_the_program(seed):
    """And holds nobody up who waits for it."""
    machine = Machine(str(seed), itertools.count())

    def fail():
        raise ValueError("no such place")

    work = [
        (Partition("asks", 4), lambda: machine.copies.append(Copy("a copy", fail))),
        (Partition("waits", 4), lambda: machine.wait(lambda: False, lambda: "it")),
    ]
    with pytest.raises(ValueError, match="no such place"):
        machine.specialize(work)
