"""Captured decode steps ask for weights ahead, by the budget of their rows; results stay."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tailrace.errors import ConfigError, EngineError

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.engine.forward_pass import ForwardPass
from tailrace.engine.frames import Frame
from tailrace.engine.prefill_weights import with_copy
from tailrace.engine.weight_prefetch import DeviceCache, budget_of, describe
from tailrace.kernels.linear.prefill_format import HALF
from tailrace.kernels.torch_kernels import TorchKernels
from tailrace.kernels.triton_kernels import TritonKernels
from tailrace.kernels.weight_prefetch.gaps import MIB, PIECE, Budget
from tailrace.models.loader import load_model
from tests.engine.test_cuda_runner import BLOCKS, SLOTS, make_runner
from tests.engine.test_quantised_runner import folder_of, loaded
from tests.support.interpreter import exact_float8, quietly, recorded_asks
from tests.support.tiny import make_tiny_checkpoint

CPU = torch.device("cpu")
SMALL = Budget(2 * PIECE)
CACHE = DeviceCache(nbytes=40 * PIECE, multiprocessors=3, capability=(9, 0))


@pytest.fixture(autouse=True)
def _quiet():
    with quietly():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", num_hidden_layers=2)


@pytest.fixture
def hidden(monkeypatch):
    """Let a CPU capture, which runs nothing; return the hidden rows of each step that is run."""
    rows = []

    def sampled(_, hidden, *__):
        rows.append(hidden.clone())
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr("tailrace.engine.step_graphs.quietly", nullcontext)
    monkeypatch.setattr(
        "tailrace.engine.step_graphs.captured",
        lambda run, *_: (SimpleNamespace(replay=run), ()),
    )
    monkeypatch.setattr(ForwardPass, "sample_rows", sampled)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: "stream")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return rows


@pytest.fixture
def asked(monkeypatch):
    return recorded_asks(monkeypatch)


def runner_of(folder, monkeypatch, budgets):
    monkeypatch.setattr(DeviceCache, "of", classmethod(lambda *_: CACHE))
    kernels = TritonKernels(CPU, "float32")
    model = load_model(folder, dtype="float32", kernels=kernels)
    runner = make_runner(model, kernels, budgets=budgets)
    # One will do, and each takes the interpreter a second.
    runner.sizes.mixed = runner.sizes.mixed[:1]
    return runner


def test_the_first_class_that_holds_the_rows_has_their_budget():
    budgets = {16: None, 64: SMALL}
    assert [budget_of(budgets, rows) for rows in (1, 16, 17, 64, 65)] == [
        None, None, SMALL, SMALL, None,
    ]  # fmt: skip
    assert describe(budgets) == "up to 16 rows off, up to 64 rows 0.0078125 MiB"
    assert describe({}) == "off"


def test_a_cpu_has_no_cache_to_ask_into(folder):
    assert DeviceCache.of(CPU) is None
    kernels = TritonKernels(CPU, "float32")
    model = load_model(folder, dtype="float32", kernels=kernels)
    with pytest.raises(EngineError, match="on a GPU only"):
        make_runner(model, kernels, budgets={16: SMALL})
    with pytest.raises(EngineError, match="on a GPU only"):
        make_runner(model, kernels).step_graphs.captured_decodes(budget=SMALL)


def test_a_budget_beyond_half_of_the_cache_is_refused():
    cache = replace(CACHE, nbytes=50 * MIB)
    cache.require(Budget(25 * MIB))
    with pytest.raises(ConfigError, match="26: this GPU's L2 cache has 50 MiB.* at most 25"):
        cache.require(Budget(26 * MIB))


def test_layers_that_do_not_tell_are_named(folder):
    model = load_model(folder, dtype="float32", kernels=TorchKernels())
    with pytest.raises(ConfigError, match="layers by .* do not tell how their weight is read"):
        CACHE.asks(model, SMALL)


def replayed(runner, hidden):
    """Return the hidden rows of each decode step's graph over sequences of 20 tokens."""
    for k, v in runner.kv_caches:
        k.fill_(0.5)
        v.fill_(0.25)
    hidden.clear()
    step_graphs = runner.step_graphs
    for size in step_graphs.decode_sizes:
        step_graphs._rehearse(step_graphs.graphs[Frame(size)], Frame(size), size, 20)
    return list(hidden)


def test_decode_steps_of_a_class_ask_for_its_budget_and_others_for_nothing(
    folder, monkeypatch, hidden, asked
):
    usual = runner_of(folder, monkeypatch, {})
    usual.capture()
    expected = replayed(usual, hidden)
    assert asked == []
    runner = runner_of(folder, monkeypatch, {2: SMALL})
    runner.capture()
    asks = CACHE.asks(runner.model, SMALL)
    each = sum(ask.nbytes for ask in asks)
    asking = [size for size in runner.step_graphs.decode_sizes if size <= 2]
    # Once before each capture, by a layer of each kind, which are both.
    assert sum(size for _, size in asked) == len(asking) * each > 0
    asked.clear()
    found = replayed(runner, hidden)
    assert sum(size for _, size in asked) == len(asking) * each
    assert len(found) == len(runner.step_graphs.decode_sizes) > len(asking)
    assert all(rows.isfinite().all() for rows in found)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    weights = [linear.streamed() for linear in runner.model.layer_linears]
    held = [range(w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights]
    assert all(any(place in one for one in held) for place, _ in asked)


def test_graphs_of_another_budget_serve_the_steps_that_it_changes(
    folder, monkeypatch, hidden, asked
):
    runner = runner_of(folder, monkeypatch, {2: SMALL})
    runner.capture()
    graphs = runner.step_graphs
    before = dict(graphs.graphs)
    graphs.prefetch_by({1: None, SLOTS: SMALL})
    changed = [frame for frame in before if graphs.graphs[frame] is not before[frame]]
    assert changed == [Frame(SLOTS), Frame(1)]
    assert graphs.describe_prefetch() == f"up to 1 rows off, up to {SLOTS} rows 0.0078125 MiB"
    asked.clear()
    steps = graphs.captured_decodes(budget=SMALL)
    assert list(steps.graphs) == [Frame(size) for size in reversed(graphs.decode_sizes)]
    assert asked
    assert graphs.graphs[Frame(1)] is not steps.graphs[Frame(1)]


def test_a_rehearsal_is_a_step_over_sequences_of_units_of_their_own(
    folder, monkeypatch, hidden, asked
):
    runner = runner_of(folder, monkeypatch, {})
    runner.capture()
    for k, v in runner.kv_caches:
        k.fill_(0.5)
        v.fill_(0.5)
    seen = []
    forward = type(runner.model).forward

    def watched(self, ids, batch, caches, scales=None):
        seen.append((batch.kv_lens.tolist(), batch.positions.tolist(), batch.slots.tolist()))
        seen[-1] += (batch.block_tables[:, :3].tolist(),)
        return forward(self, ids, batch, caches, scales)

    first, beyond = runner.step_graphs.rehearsals(2, (40, 10_000), SMALL)
    monkeypatch.setattr(type(runner.model), "forward", watched)
    hidden.clear()
    asked.clear()
    assert first() == beyond() == 0.0  # a CPU has no clock of its own
    (lens, positions, slots, tables), (longest, *_) = seen
    assert (lens, positions, slots) == ([40, 40, 0], [39, 39], [-1, -1])
    assert longest == [128, 128, 0]  # the longest context
    assert tables == [[0, 1, 2], [3, 4, 5], [0, 0, 0]]
    assert max(map(max, tables)) < BLOCKS
    assert asked
    assert all(rows.isfinite().all() for rows in hidden)
    assert all((k == 0.5).all() and (v == 0.5).all() for k, v in runner.kv_caches)
    assert not runner.forward_pass.tables._device.any()


@pytest.mark.parametrize("kind", ["awq", "fp8 blocks", "all rows rounded", "two copies"])
def test_a_decode_step_over_quantised_weights_asks_for_those_that_decodes_read(
    kind, tmp_path, monkeypatch, hidden, asked
):
    exact_float8(monkeypatch)
    monkeypatch.setattr(DeviceCache, "of", classmethod(lambda *_: CACHE))
    kernels = TritonKernels(CPU, "float32", rounds_all=kind == "all rows rounded")
    stored = "awq" if kind in ("awq", "two copies") else "fp8 blocks"
    model = loaded(folder_of(tmp_path, stored), kernels)
    more = {}
    if kind == "two copies":
        model, more = with_copy(model, kernels, HALF), {"prefill_weights": HALF.name}
    runner = make_runner(model, kernels, budgets={1: SMALL}, **more)
    runner.sizes.buckets, runner.sizes.mixed = [1, 2], []
    runner.capture()
    asked.clear()
    first = replayed(runner, hidden)[0]
    weights = [linear.streamed() for linear in model.layer_linears]
    held = [range(w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights]
    assert {next(i for i, one in enumerate(held) if place in one) for place, _ in asked} == set(
        range(4)
    )
    runner.step_graphs.prefetch_by({})
    asked.clear()
    assert torch.equal(replayed(runner, hidden)[0], first)
    assert asked == []
