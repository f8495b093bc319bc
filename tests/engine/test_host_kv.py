import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tailrace.clock import VirtualClock
from tailrace.engine.host_kv import HostKv, _pin, runs
from tailrace.engine.host_units import KvCopy

UNITS, HEADS, SIZE, DIM, LAYERS = 7, 2, 8, 4, 3


def caches(layout: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A pool of random KV as the CPU's runner stores it, or as the GPU's does."""
    pairs = []
    for _ in range(LAYERS):
        if layout == "token-major":
            k, v = torch.randn(2, UNITS, SIZE, HEADS, DIM)
            pairs.append((k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)))
        else:
            k, v = torch.randn(UNITS, HEADS, DIM, SIZE), torch.randn(UNITS, HEADS, SIZE, DIM)
            pairs.append((k, v))
    return pairs


@pytest.mark.parametrize("layout", ["token-major", "blocked"])
@pytest.mark.parametrize("staged", [1, 2, 5])
def test_what_goes_out_comes_back_to_other_units_and_nothing_else_changes(layout, staged):
    pool = caches(layout)
    host = HostKv(pool, 6)
    host._staging = host._staging[:staged]  # as of a model with larger units
    before = [(k.clone(), v.clone()) for k, v in pool]
    host.run([KvCopy([4, 1, 6], [2, 3, 5])], [])
    for k, v in pool:
        k[[4, 1, 6]] = torch.nan
        v[[4, 1, 6]] = torch.nan
    host.run([], [KvCopy([0, 6, 4], [2, 3, 5])])
    for (k, v), (old_k, old_v) in zip(pool, before, strict=True):
        for now, old in ((k, old_k), (v, old_v)):
            assert torch.equal(now[[0, 6, 4]], old[[4, 1, 6]])
            assert torch.equal(now[[2, 3, 5]], old[[2, 3, 5]])
            assert now[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "f8"])
def test_any_dtype_is_copied_bit_for_bit(dtype):
    pool = [(torch.randn(UNITS, SIZE, HEADS, DIM).to(dtype).permute(0, 2, 3, 1),) * 2]
    before = pool[0][0].clone()
    host = HostKv(pool, 2)
    host.run([KvCopy([6, 0], [0, 1])], [])
    host.run([], [KvCopy([3, 2], [1, 0])])
    words = [tensor.float() for tensor in (pool[0][0][[3, 2]], before[[0, 6]])]
    assert torch.equal(*words)
    assert host.unit_bytes == 2 * SIZE * HEADS * DIM * dtype.itemsize


def test_out_comes_before_back_so_a_place_may_change_hands_in_one_step():
    pool = caches("blocked")
    k = pool[0][0]
    old = k.clone()
    host = HostKv(pool, 1)
    host.run([KvCopy([3], [0])], [])
    host.run([KvCopy([5], [0])], [KvCopy([2], [0])])
    assert torch.equal(k[2], old[5])


def test_sizes_are_those_of_all_layers_and_measuring_leaves_the_pool_alone():
    pool = caches("token-major")
    before = [(k.clone(), v.clone()) for k, v in pool]
    host = HostKv(pool, 4)
    assert host.unit_bytes == 2 * LAYERS * HEADS * SIZE * DIM * 4
    assert host.nbytes == 4 * host.unit_bytes
    assert host.measure().seconds(4) > 0
    for now, old in zip(pool, before, strict=True):
        assert torch.equal(now[0], old[0])
        assert torch.equal(now[1], old[1])


@pytest.mark.parametrize(("part_s", "unit_s"), [(1e-3, 9e-6), (0.0, 9e-6), (1e-3, 0.0)])
def test_what_a_copy_costs_whatever_its_size_is_told_from_what_each_unit_does(
    monkeypatch, part_s, unit_s
):
    """A part is two kernels a layer and one copy, however few units it has."""
    clock, sizes = VirtualClock(), []
    k, v = torch.randn(2, 300, SIZE, HEADS, DIM)
    host = HostKv([(k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3))], 250)

    def run(out, back):
        for copy in (*out, *back):
            sizes.append(len(copy.units))
            clock.advance(part_s + unit_s * len(copy.units))

    monkeypatch.setattr(host, "run", run)
    monkeypatch.setattr("tailrace.engine.host_kv.time", SimpleNamespace(perf_counter=clock))
    costs = host.measure()
    assert max(sizes) == 250  # as much as is gathered at once
    for units, parts in ((1, 1), (7, 1), (250, 1), (251, 2), (1000, 4)):
        assert costs.seconds(units) == pytest.approx(parts * part_s + units * unit_s)


def test_a_pool_of_one_unit_and_a_clock_that_stands_still_are_measured_too(monkeypatch):
    pool = [(torch.randn(1, SIZE, HEADS, DIM).permute(0, 2, 3, 1),) * 2]
    costs = HostKv(pool, 3).measure()
    assert costs.seconds(2) == 2 * costs.seconds(1) > 0.0
    monkeypatch.setattr(
        "tailrace.engine.host_kv.time", SimpleNamespace(perf_counter=VirtualClock())
    )
    assert HostKv(pool, 3).measure().seconds(2) == 0.0


def test_runs_are_the_stretches_that_count_up():
    assert list(runs([4, 5, 6, 2, 3, 9])) == [(0, 3, 4), (3, 5, 2), (5, 6, 9)]
    assert list(runs([])) == []


class Runtime:
    """Stands for torch's module of CUDA's runtime: takes and gives what that does."""

    def __init__(self, status=0):
        self.status = status
        self.calls = []
        self.is_alive = lambda: True

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 -- CUDA's name
        self.calls.append(("register", address, size, flags))
        return self.status

    def cudaHostUnregister(self, address):  # noqa: N802 -- CUDA's name
        self.calls.append(("unregister", address, self.is_alive()))
        return 0


def test_memory_is_locked_whole_and_given_back_before_it_is_freed(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = np.zeros(1000, dtype=np.int64)
    kept = weakref.ref(memory)
    runtime.is_alive = lambda: kept() is not None
    host = torch.from_numpy(memory)
    address = host.data_ptr()
    del memory
    _pin(host)
    assert runtime.calls == [("register", address, 8000, 0)]
    host[3:7].fill_(1)  # what is left of a view does not count
    del host
    gc.collect()
    assert runtime.calls[1:] == [("unregister", address, True)]
    assert kept() is None


def test_memory_that_the_driver_does_not_lock_is_not_given_back(monkeypatch):
    runtime = Runtime(status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host = torch.zeros(8)
    with pytest.raises(RuntimeError, match="cudaHostRegister answers 2"):
        _pin(host)
    del host
    gc.collect()
    assert [call[0] for call in runtime.calls] == ["register"]
