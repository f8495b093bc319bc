"""A mixed step as two: the rows of each, the order of streams, and when that is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.config import EngineConfig
from tailrace.engine import cuda_setup, phase_overlap
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.phase_overlap import PhaseOverlap, overlap_of, why_off
from tailrace.engine.prefill_weights import with_copy
from tailrace.errors import ConfigError
from tailrace.kernels.linear.prefill_format import FORMATS
from tailrace.kernels.paged_attention.device_batch import DeviceBatch
from tests.engine.test_cuda_runner import CPU, Framed, generate, make_requests, make_runner
from tests.engine.test_prefill_weights import AWQ, FakeCuda, loaded, make_folder
from tests.support.interpreter import exact_float8, quietly
from tests.support.streams import written_streams

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    exact_float8(monkeypatch)
    with quietly():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("apart"), AWQ)


def copied(folder, name):
    kernels, model = loaded(folder)
    return kernels, with_copy(model, kernels, FORMATS[name])


# Tokens


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_phases_that_go_apart_give_the_tokens_of_steps_that_do_not(folder, name):
    """Mixed steps in frames with padding, and out of them; prompts and decodes alone."""
    kernels, model = copied(folder, name)
    found = []
    for overlap in (None, PhaseOverlap.on(CPU)):
        for kind in (Framed, CudaRunner):
            runner = make_runner(model, kernels, kind, prefill_weights=name, overlap=overlap)
            for caches in runner.kv_caches:
                for cache in caches:
                    cache.fill_(float("nan"))
            found.append(generate(runner, make_requests(temperature=0.0)[1:4]))
    assert found[0] == found[1] == found[2] == found[3]


def test_rows_of_each_phase_go_through_the_layers_by_themselves(folder):
    kernels, model = copied(folder, "bf16")
    steps = []

    class Counted:
        layer_linears = model.layer_linears

        def __getattr__(self, name):
            return getattr(model, name)

        def forward(self, ids, batch, *rest):
            steps.append((len(ids), batch.num_decodes, len(batch.tiles) > 0))
            return model.forward(ids, batch, *rest)

    runner = make_runner(Counted(), kernels, prefill_weights="bf16", overlap=PhaseOverlap.on(CPU))
    generate(runner, make_requests(temperature=0.0)[1:4])
    assert {(rows == decodes, has_tiles) for rows, decodes, has_tiles in steps} == {
        (True, False),
        (False, True),
    }
    assert all(decodes in (0, rows) for rows, decodes, _ in steps)


def test_scratch_of_the_weights_is_not_that_of_their_copies(folder):
    """They are multiplied at once."""
    _, model = copied(folder, "fp8")
    few, many = (
        {id(layer._workspace) for layer in layers}
        for layers in zip(*((one.few, one.many) for one in model.layer_linears), strict=True)
    )
    assert len(few) == len(many) == 1
    assert few != many


# Streams


class Layers:
    """A model that is written down where it runs; `fails` names a phase that finds no memory."""

    def __init__(self, fails=None):
        self.fails = fails

    def forward(self, ids, batch, *_):
        phase = "decodes" if batch.num_decodes else "prompts"
        stream = torch.cuda.current_stream()
        stream.words.append(f"{phase} on {stream.name}")
        if phase == self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return ids[:, None].float()


@pytest.fixture
def apart(monkeypatch):
    """Return an overlap over streams of the tests, and what happens on them."""
    _, *two = written_streams(monkeypatch, "steps", "first", "second")
    return PhaseOverlap(CPU, tuple(two)), two[0].words


def step_of(decodes, tokens):
    """Return ids and batch of so many decodes, and of one prompt where it has tokens."""
    prompts = min(tokens, 1)
    starts = [*range(decodes + 1), *([decodes + tokens] * prompts)]
    rows, sequences = decodes + tokens, decodes + prompts
    batch = DeviceBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.arange(100, 100 + sequences, dtype=torch.int32),
        block_tables=torch.arange(2 * sequences, dtype=torch.int32).view(sequences, 2),
        positions=torch.arange(rows, dtype=torch.int32),
        slots=torch.arange(rows, dtype=torch.int32),
        max_query_len=max(tokens, 1),
        max_kv_len=200,
        num_decodes=decodes,
        tiles=torch.tensor([[decodes, 0]] * prompts, dtype=torch.int32).view(-1, 2),
        shape=None,
    )
    return torch.arange(rows), batch


def test_a_mixed_step_forks_both_streams_and_waits_for_both(apart):
    overlap, words = apart
    ids, batch = step_of(3, 5)
    hidden = overlap.forward(Layers(), ids, batch, [], None)
    assert hidden[:, 0].tolist() == [*map(float, range(8))]
    assert words[:4] == [
        "second waits for steps",
        "prompts on second",
        "first waits for steps",
        "decodes on first",
    ]
    assert sorted(words[4:]) == ["steps waits for first", "steps waits for second"]


def test_decodes_alone_stay_on_the_stream_of_steps(apart):
    """A stream that was not forked must not be waited for in a capture."""
    overlap, words = apart
    ids, batch = step_of(3, 0)
    overlap.forward(Layers(), ids, batch, [], None)
    assert words == ["decodes on steps"]


def test_prompts_alone_leave_the_decodes_stream_alone(apart):
    overlap, words = apart
    ids, batch = step_of(0, 5)
    overlap.forward(Layers(), ids, batch, [], None)
    assert words == ["second waits for steps", "prompts on second", "steps waits for second"]


@pytest.mark.parametrize(
    ("fails", "joined"),
    [("prompts", ["second"]), ("decodes", ["first", "second"])],
    ids=["prompts", "decodes"],
)
def test_a_step_that_fails_half_way_is_joined_by_what_was_forked(apart, fails, joined):
    """Else the next step overwrites the arrays that its kernels still read."""
    overlap, words = apart
    ids, batch = step_of(3, 5)
    with pytest.raises(torch.OutOfMemoryError):
        overlap.forward(Layers(fails), ids, batch, [], None)
    end = words.index(f"{fails} on {'first' if fails == 'decodes' else 'second'}") + 1
    assert sorted(words[end:]) == [f"steps waits for {name}" for name in joined]


def test_the_next_step_after_one_without_memory_gives_what_it_should(folder):
    """The failed step's chunks are computed again."""
    kernels, model = copied(folder, "fp8")
    runner = make_runner(model, kernels, prefill_weights="fp8", overlap=PhaseOverlap.on(CPU))
    found = generate(runner, make_requests(temperature=0.0)[1:4])
    forward, calls = runner.forward_pass.overlap.forward, []

    def short_once(*given):
        calls.append(1)
        hidden = forward(*given)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden

    runner.forward_pass.overlap = SimpleNamespace(forward=short_once)
    assert generate(runner, make_requests(temperature=0.0)[1:4]) == found
    assert len(calls) > 3


# When that is


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (None, "one copy of the weights serves both phases, and would be read twice"),
        (AWQ | {"modules_to_not_convert": ["down_proj"]}, r"1 layers \(.*\) have no copy"),
    ],
    ids=["one copy", "a layer without"],
)
def test_phases_that_cannot_go_apart_are_an_error_where_it_is_asked_for(tmp_path, stored, words):
    kernels, model = loaded(make_folder(tmp_path, stored))
    if stored is not None:
        model = with_copy(model, kernels, FORMATS["fp8"])
    assert overlap_of("off", model, CPU, HOPPER) is None
    assert overlap_of("auto", model, CPU, HOPPER) is None
    with pytest.raises(ConfigError, match=f"--phase-overlap on: {words}"):
        overlap_of("on", model, CPU, HOPPER)


@pytest.mark.parametrize("copy", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("capability", [(8, 9), HOPPER, (10, 0)], ids=str)
def test_over_4_bits_phases_go_apart_by_themselves_where_that_was_measured(
    folder, copy, capability
):
    _, model = copied(folder, copy)
    assert why_off("on", model, capability) is None
    assert isinstance(overlap_of("on", model, CPU, capability), PhaseOverlap)
    assert why_off("off", model, capability) == "as asked"
    assert overlap_of("off", model, CPU, capability) is None
    is_apart = isinstance(overlap_of("auto", model, CPU, capability), PhaseOverlap)
    assert is_apart == (copy == "fp8" and capability == HOPPER)
    if not is_apart:
        assert "over 4 bits beside copies in FP8" in why_off("auto", model, capability)


def test_over_half_precision_it_was_not_measured(tmp_path):
    kernels, model = loaded(make_folder(tmp_path, None))
    model = with_copy(model, kernels, FORMATS["fp8"])
    assert why_off("on", model, HOPPER) is None
    assert "over 4 bits beside copies in FP8" in why_off("auto", model, HOPPER)


@pytest.mark.parametrize(
    ("weights", "asked", "told"),
    [
        ("fp8", "on", "decodes and prompts at once"),
        ("fp8", "auto", "decodes and prompts at once"),
        ("bf16", "auto", "off: it was measured over 4 bits beside copies in FP8 on GPUs of"),
        ("fp8", "off", "off: as asked"),
        ("same", "auto", "off: one copy of the weights serves both phases"),
    ],
    ids=["on", "auto", "not measured", "off", "one copy"],
)
def test_a_start_says_whether_phases_go_apart(folder, monkeypatch, weights, asked, told):
    FakeCuda(monkeypatch, 2 << 30)
    config = EngineConfig(
        model_path=str(folder), load_format="dummy", dtype="float16", gpus=(0,), max_batch_size=2,
        max_num_batched_tokens=16, context_length=64, gpu_memory_utilization=1.0,
        prefill_weights=weights, phase_overlap=asked,
    )  # fmt: skip
    with capture_logs() as logs:
        runner, *_ = cuda_setup.load_runner(config, folder, 16)
    (said,) = [entry["serves"] for entry in logs if entry["event"] == "phase_overlap"]
    assert said.startswith(told)
    assert (runner.forward_pass.overlap is None) == said.startswith("off")


def test_memory_that_streams_keep_to_themselves_is_no_kv(folder, monkeypatch):
    """What decodes take, and the joined rows: once in graphs, once out of them."""
    kernels, model = copied(folder, "fp8")
    FakeCuda(monkeypatch, 4 << 30)
    monkeypatch.setattr(cuda_setup, "measure_step", lambda *_, rows, **__: rows << 20)
    plans = {}
    for asked in ("on", "off"):
        config = EngineConfig(
            model_path=str(folder), gpus=(0,), max_batch_size=2, max_num_batched_tokens=16,
            gpu_memory_utilization=1.0, phase_overlap=asked,
        )  # fmt: skip
        plans[asked] = cuda_setup.plan_memory(config, model, kernels, 16, 64)
    more = 2 * ((2 << 20) + 16 * model.config.hidden_size * 4)
    assert plans["on"].activations == plans["off"].activations == 16 << 20
    assert plans["on"].overhead - plans["off"].overhead == more
    assert plans["off"].kv - plans["on"].kv == more


def test_the_steps_that_are_measured_are_compiled_ahead(folder, monkeypatch):
    kernels, model = copied(folder, "fp8")
    FakeCuda(monkeypatch, 4 << 30)
    done = []
    monkeypatch.setattr(cuda_setup, "measure_step", lambda *_, rows, **__: done.append(rows) or 0)

    class Early:
        def before(self, work, *, since):
            work()
            done.append(since)

    config = EngineConfig(
        model_path=str(folder), gpus=(0,), max_batch_size=2, max_num_batched_tokens=16,
        phase_overlap="on",
    )  # fmt: skip
    cuda_setup.plan_memory(config, model, kernels, 16, 64, early=Early())
    assert done == [16, 2, "largest step", 16, 2]


def test_streams_are_made_by_the_measured_priorities(monkeypatch):
    made = []
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority: made.append((device, priority)) or priority
    )
    device = torch.device("cuda", 0)
    assert PhaseOverlap.on(device).streams == phase_overlap.PRIORITIES == (0, -1)
    assert made == [(device, 0), (device, -1)]
