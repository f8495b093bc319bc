"""How the steps that have frames are captured, on a CPU whose graphs are what would be captured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tailrace.engine import decode_launches
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.forward_pass import ForwardPass
from tailrace.errors import EngineError
from tailrace.kernels.dependent_launch import launch_options
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.triton_kernels import TritonKernels
from tailrace.models.loader import load_model
from tests.engine.test_cuda_runner import CPU, SLOTS, gpu_runner
from tests.support.interpreter import quietly
from tests.support.tiny import make_tiny_checkpoint


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    with quietly():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Heads of 32: Triton multiplies no narrower tiles than 16.
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=1)


@pytest.fixture
def device_of_graphs(monkeypatch):
    """Let a CPU capture, which reads no array: they all lie in one place."""
    monkeypatch.setattr("tailrace.engine.step_graphs.quietly", nullcontext)
    monkeypatch.setattr("tailrace.engine.step_graphs.captured", lambda run, *_: (run, run()))
    monkeypatch.setattr(ForwardPass, "sample_rows", lambda *_: (torch.zeros(1), torch.zeros(1)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: "stream")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")


def test_before_a_capture_runs_one_layer_of_each_kind_and_graphs_hold_all(
    folder, device_of_graphs, monkeypatch
):
    """The first layer, with nothing to add, is a kind of its own."""
    model = load_model(folder, dtype="float32", kernels=TritonKernels(CPU, "float32"))
    (layer,) = model.layers
    deep = replace(model, layers=[layer] * 4)
    assert [kept for _, kept in (model.shallow(), deep.shallow())] == [[0], [0, 1]]
    depths = []

    def forward(self, ids, batch, caches, scales=None):
        depths.append((len(self.layers), len(caches), batch.num_decodes))
        return torch.zeros(len(ids), self.config.hidden_size)

    monkeypatch.setattr(type(model), "forward", forward)
    runner = gpu_runner(folder, CudaRunner)
    runner.forward_pass.model = replace(deep, config=replace(model.config, num_layers=4))
    runner.forward_pass.kv_caches = runner.kv_caches * 4
    runner.capture()
    graphs = runner.step_graphs.graphs
    frames = sorted(graphs, key=lambda frame: frame.rows, reverse=True)
    assert list(graphs) == frames  # the largest first
    assert len(frames) > 3
    expected = [(layers, layers, frame.decodes) for layers in (2, 4) for frame in frames]
    assert depths == expected


class Rehearsals:
    """Has work done ahead, and says when."""

    def __init__(self, depths):
        self.depths = depths
        self.ended_at = []

    def before(self, work, *, since):
        assert since == "capture"
        work()
        self.ended_at.append(len(self.depths))


def test_what_a_capture_begins_with_is_done_ahead_and_leaves_no_ids(
    folder, device_of_graphs, monkeypatch
):
    """Ids that no kernel has made are not what the first steps begin with."""
    rows, ids = [], []

    def forward(self, ids, batch, caches, scales=None):
        rows.append((len(ids), batch.num_decodes, batch.shape))
        return torch.zeros(len(ids), self.config.hidden_size)

    def sample(places, *_):
        ids.append(places.last_tokens.tolist())
        places.last_tokens.fill_(9)
        return torch.zeros(1), torch.zeros(1)

    runner = gpu_runner(folder, CudaRunner)
    monkeypatch.setattr(ForwardPass, "sample_rows", sample)
    monkeypatch.setattr(type(runner.model), "forward", forward)
    runner._early_compile = rehearsals = Rehearsals(rows)
    runner.capture()
    count = len(runner.step_graphs.graphs)
    (ahead,) = rehearsals.ended_at
    assert len(rows) == ahead + 2 * count
    assert rows[:count] == rows[ahead : ahead + count]  # what is compiled ahead is what is wanted
    # Then prompts as the first requests have them, by each length's shape.
    assert {(tokens, decodes) for tokens, decodes, _ in rows[count:ahead]} == {(16, 0)}
    assert ids[ahead] == ids[0] == [0] * len(ids[0])
    assert ids[1] == [9] * len(ids[0])
    assert runner.sampler._slots == [None] * SLOTS


def test_decodes_are_captured_once_more_by_dependent_launches_and_serve_when_asked(
    folder, device_of_graphs, monkeypatch
):
    launches = []

    def forward(self, ids, batch, caches, scales=None):
        launches.append((batch.num_decodes == len(ids), launch_options()["DEPENDENT"]))
        return torch.zeros(len(ids), self.config.hidden_size)

    runner = gpu_runner(folder, CudaRunner)
    monkeypatch.setattr(type(runner.model), "forward", forward)
    runner.capture()
    assert {is_dependent for _, is_dependent in launches} == {False}
    assert {is_decode for is_decode, _ in launches} == {False, True}
    launches.clear()
    step_graphs = runner.step_graphs
    monkeypatch.setattr(step_graphs, "_has_dependent_launches", True)
    graphs = dict(step_graphs.graphs)
    dependent = step_graphs.captured_decodes(dependent=True)
    assert set(launches) == {(True, True)}
    assert step_graphs.graphs == graphs
    decodes = [frame for frame in graphs if not frame.tokens]
    assert list(dependent.graphs) == list(dependent.outputs) == decodes
    before = step_graphs.serve_by(dependent)
    assert before.graphs == graphs
    assert step_graphs.graphs == graphs | dependent.graphs
    assert list(step_graphs.graphs) == list(graphs)
    step_graphs.serve_by(before)
    assert step_graphs.graphs == graphs
    assert step_graphs.outputs == before.outputs


def test_decodes_serve_by_dependent_launches_where_these_win_and_mixed_steps_never(
    folder, device_of_graphs, monkeypatch
):
    launches = []

    def forward(self, ids, batch, caches, scales=None):
        dependent = launch_options()["DEPENDENT"]
        launches.append((batch.num_decodes, len(ids) - batch.num_decodes, dependent))
        return torch.zeros(len(ids), self.config.hidden_size)

    sampled = []

    def sample(*_):
        sampled.append(launch_options()["DEPENDENT"])
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(ForwardPass, "sample_rows", sample)
    # The interpreter passes for Hopper.
    monkeypatch.setattr(decode_launches, "has_dependent_launches", lambda *_: True)
    monkeypatch.setattr(decode_launches, "LEAST_DECODES", {CublasLinear: 2})
    runner = gpu_runner(folder, CudaRunner)
    step_graphs = runner.step_graphs
    assert step_graphs.dependent_from == 2
    monkeypatch.setattr(type(runner.model), "forward", forward)
    runner.capture()
    frames = list(step_graphs.graphs)
    assert {frame.decodes for frame in frames if frame.tokens} & {SLOTS}
    # Each is run once with a layer of each kind, and once as it is captured.
    expected = [
        (frame.decodes, frame.tokens, frame.decodes >= 2 and not frame.tokens) for frame in frames
    ]
    assert launches == expected * 2
    assert sampled == [is_dependent for *_, is_dependent in expected] * 2
    assert {is_dependent for *_, is_dependent in expected} == {False, True}
    launches.clear()
    plain = step_graphs.captured_decodes(dependent=False)
    assert {is_dependent for *_, is_dependent in launches} == {False}
    assert list(plain.graphs) == [frame for frame in frames if not frame.tokens]
    assert launch_options()["DEPENDENT"] is False


def test_dependent_launches_are_refused_where_the_device_does_not_know_them(folder):
    with pytest.raises(EngineError, match="does not know them"):
        gpu_runner(folder, CudaRunner).step_graphs.captured_decodes(dependent=True)
