"""Steps whose prompts are Hopper's kernel's: tables of tiles, frames, tokens, and the start.

A stand-in in PyTorch takes the kernel's place; the rest is what serves on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.config import EngineConfig
from tailrace.engine import cuda_setup
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.frames import fitting_frame, mixed_frames
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.sequence import Sequence
from tailrace.engine.step_arrays import cut_prompts
from tailrace.errors import ConfigError
from tailrace.kernels.paged_attention import prefill_kernels, triton_hopper_prefill
from tailrace.kernels.paged_attention.prefill_kernels import is_hopper, name_of
from tailrace.kernels.paged_attention.triton_hopper_prefill import (
    BLOCK_M,
    USUAL,
    hopper_prefill_kernel,
)
from tailrace.kernels.triton_kernels import TritonKernels
from tailrace.models.loader import load_model
from tailrace.types import EngineRequest, SamplingParams
from tests.engine import test_cuda_runner as runners
from tests.engine.test_cuda_runner import CPU, Framed, cpu_runner, generate, make_runner
from tests.engine.test_prefill_weights import OVERHEAD, FakeCuda
from tests.kernels.hopper_stand_in import let_hopper_serve
from tests.support.interpreter import quietly
from tests.support.tiny import make_tiny_checkpoint

SIZES = {"BLOCK": 8, "BLOCKS": 100, "BUDGET": 140, "CONTEXT": 256}
"""Chunks of more than one tile, over prefixes of other prompts' lengths."""

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Few: the interpreter takes each head's tiles one by one."""


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    with quietly():
        yield


@pytest.fixture(autouse=True)
def _sizes(monkeypatch):
    for name, value in SIZES.items():
        monkeypatch.setattr(runners, name, value)


@pytest.fixture
def hopper(monkeypatch):
    return let_hopper_serve(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")
    return make_tiny_checkpoint(path, "qwen3", num_hidden_layers=1, head_dim=64, **HEADS)


@pytest.fixture(scope="module")
def truth(folder):
    patch = pytest.MonkeyPatch()
    for name, value in SIZES.items():
        patch.setattr(runners, name, value)
    with patch.context():
        found = generated(cpu_runner(folder))
    patch.undo()
    return found


def requests():
    """Prompts of one tile and of two, chunks over prefixes, decodes beside them."""
    draw = np.random.default_rng(5)
    return [
        EngineRequest(
            request_id=str(index),
            token_ids=draw.integers(0, 256, length).tolist(),
            sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            arrival_s=float(index),
        )
        for index, length in enumerate((3, 131, 29, 150))
    ]


def generated(runner):
    blocks = BlockManager(SIZES["BLOCKS"], SIZES["BLOCK"], prefix_cache=False)
    return generate(runner, requests(), blocks=blocks)


def runner_by(folder, kind, asked="hopper", rows=(), dtype="float32"):
    kernels = TritonKernels(CPU, dtype)
    model = load_model(folder, dtype=dtype, kernels=kernels)
    kernels.serve_prompts_by(asked, head_dim=64, kv_dtype=kernels.dtype, unit=SIZES["BLOCK"])
    kernels.prefill_rows = rows
    runner = make_runner(model, kernels, kind, kv_dtype=kernels.dtype)
    for k, v in runner.kv_caches:
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    return runner


@pytest.mark.parametrize("kind", [CudaRunner, Framed], ids=["own sizes", "frames"])
def test_prompts_by_hoppers_kernel_give_the_cpu_runners_tokens(folder, truth, hopper, kind):
    runner = runner_by(folder, kind)
    assert generated(runner) == truth
    assert {call.shape for call in hopper.calls} == {USUAL[64]}
    assert any(first for call in hopper.calls for _, first in call.tiles)
    if kind is Framed:
        frames = {(frame.rows, frame.tiles) for frame in runner.frames if frame and frame.tokens}
        assert frames <= {(call.rows, len(call.tiles)) for call in hopper.calls}
        assert len(frames) > 1
        assert all(frame.tiles == -(-frame.tokens // BLOCK_M) + 16 for frame in runner.sizes.mixed)


def test_the_kernel_itself_gives_tritons_tokens_in_padded_steps(folder, monkeypatch):
    """In half precision, interpreted: no stand-in is strict about what a tile without rows does."""
    compare_interpreted(monkeypatch, partial(runner_by, folder, Framed, dtype="float16"))


def compare_interpreted(monkeypatch, runner_of):
    """See that runners by both kernels, as `runner_of` makes them by name, give the same tokens."""
    interpreters = pytest.importorskip("tests.kernels.gluon_interpreter")
    kernel = interpreters.Interpreter(hopper_prefill_kernel, seed=2, undefined_reads={"_clear"})
    monkeypatch.setattr(triton_hopper_prefill, "hopper_prefill_kernel", kernel)
    monkeypatch.setattr(prefill_kernels, "why_no_gluon", lambda *_: None)
    found = []
    for asked in ("triton", "hopper"):
        runner = runner_of(asked=asked)
        assert is_hopper(runner.step_graphs.shape) == (asked == "hopper")
        found.append(generate(runner, requests()[::2]))
        assert any(frame and frame.tokens for frame in runner.frames)
    assert found[0] == found[1]


def test_a_steps_longest_sequence_says_which_kernel_serves_all_of_its_prompts(
    folder, truth, hopper
):
    usual = TritonKernels(CPU, "float32").prefill_shape(64, 1)
    rows = ((150, usual), (1 << 30, USUAL[64]))
    runner = runner_by(folder, CudaRunner, "auto", rows)
    prepared = []
    prepare = runner.prepare

    def spy(step, blocks):
        prepared.append((prepare(step, blocks), [chunk.end for chunk in step.chunks]))
        return prepared[-1][0]

    runner.prepare = spy
    assert generated(runner) == truth
    with_prompts = [(step, ends) for step, ends in prepared if step.frame.tiles]
    assert all(is_hopper(step.shape) == (max(ends) >= 150) for step, ends in with_prompts)
    assert {is_hopper(step.shape) for step, _ in prepared} == {False, True}
    assert len(hopper.calls) == sum(is_hopper(step.shape) for step, _ in with_prompts)


@pytest.mark.parametrize(("kind", "tiles"), [(CudaRunner, 4), (Framed, 18)], ids=["own", "frame"])
def test_a_captured_step_is_cut_for_the_longest_sequence_that_there_can_be(
    folder, hopper, kind, tiles
):
    usual = TritonKernels(CPU, "float32").prefill_shape(64, 1)
    runner = runner_by(folder, kind, "auto", ((150, usual), (1 << 30, USUAL[64])))
    blocks = BlockManager(SIZES["BLOCKS"], SIZES["BLOCK"], prefix_cache=False)
    scheduler = Scheduler(blocks, max_batch_size=4, token_budget=SIZES["BUDGET"])
    for request in requests()[:2]:
        scheduler.add(Sequence.from_request(request, SIZES["CONTEXT"]))
    prepared = runner.prepare(scheduler.schedule(), blocks)
    assert prepared.max_kv_len == 131
    assert is_hopper(prepared.shape) == prepared.is_captured == (kind is Framed)
    assert prepared.frame.tiles == tiles


@dataclass
class Part:
    """As much of a chunk as tiles are cut by."""

    num_tokens: int
    end: int


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_tiles_of_a_frame_cover_every_row_once_and_fit(data):
    """Whatever fits a frame's rows and prompts fits its table, cut for 128 rows."""
    decodes = data.draw(st.integers(0, 12))
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=16))
    prefixes = [data.draw(st.integers(0, 900)) for _ in lengths]
    parts = [Part(1, 5)] * decodes
    parts += [Part(n, n + prefix) for n, prefix in zip(lengths, prefixes, strict=True)]
    frames = mixed_frames(32, 2048, BLOCK_M, paced=True)
    frame = fitting_frame(frames, decodes=decodes, tokens=sum(lengths), prompts=len(lengths))
    tiles = cut_prompts(parts, decodes, frame, USUAL[128])
    first = decodes if frame is None else frame.decodes
    covered = []
    for sequence, row in tiles.tolist():
        if frame is not None and sequence == frame.decodes + frame.prompts:
            assert row == 0
            continue
        rows = lengths[sequence - first]
        covered += [(sequence - first, r) for r in range(row, min(row + BLOCK_M, rows))]
    assert sorted(covered) == [(i, r) for i, rows in enumerate(lengths) for r in range(rows)]
    assert len(tiles) == (sum(-(-n // BLOCK_M) for n in lengths) if frame is None else frame.tiles)


def start(folder, monkeypatch, asked, **settings):
    """Return the runner that a start brings, its words, and what was logged of the attention."""
    FakeCuda(monkeypatch, OVERHEAD + (64 << 20))
    config = EngineConfig(
        model_path=str(folder),
        load_format="dummy",
        dtype="float16",
        gpus=(0,),
        max_batch_size=2,
        max_num_batched_tokens=16,
        context_length=64,
        gpu_memory_utilization=1.0,
        prefill_attention=asked,
        **settings,
    )
    with capture_logs() as logs:
        runner, _, _, words = cuda_setup.load_runner(config, folder, 16)
    (told,) = [entry["serves"] for entry in logs if entry["event"] == "prefill_attention"]
    assert f"prefill attention {told};" in words
    return runner, told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("auto", "Triton 64x64, 4 warps, 3 stages"),
        ("triton", "Triton 64x64, 4 warps, 3 stages"),
        ("hopper", name_of(USUAL[64])),
    ],
)
def test_a_start_serves_by_what_is_asked_for_and_says_so(folder, monkeypatch, hopper, asked, told):
    runner, found = start(folder, monkeypatch, asked)
    assert found == told
    assert is_hopper(runner.step_graphs.shape) == (asked == "hopper")
    # The largest step was measured by the kernel that serves.
    assert bool(hopper.calls) == (asked == "hopper")


def test_a_start_without_a_hopper_gpu_refuses_its_kernel(folder, monkeypatch):
    with pytest.raises(ConfigError, match="--prefill-attention hopper: .* on a Hopper GPU alone"):
        start(folder, monkeypatch, "hopper")
