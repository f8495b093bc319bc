"""Steps whose prompts are Hopper's kernel's, over a float8 cache: Triton's tokens, frames, room.

A stand-in in PyTorch takes the kernel's place, but where the kernel itself is interpreted; both
engines read the same rounded keys and values, and only add in another order.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.engine import cuda_setup
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.kv_calibration import FoundScales
from tailrace.engine.phase_overlap import prompts_of
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.sequence import Sequence
from tailrace.engine.step_graphs import StepGraphs
from tailrace.kernels.attention_shapes import prefill_shape
from tailrace.kernels.kv_scales import KVScales
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention import (
    triton_prefill,
    triton_widened_kv,
)
from tailrace.kernels.paged_attention.device_batch import plan
from tailrace.kernels.paged_attention.prefill_kernels import is_hopper, name_of
from tailrace.kernels.paged_attention.triton_hopper_prefill import USUAL
from tailrace.kernels.paged_attention.triton_widened_kv import UNIT_TOKENS, WidenedKv, units_of
from tailrace.kernels.triton_kernels import TritonKernels
from tailrace.models.loader import load_model
from tests.engine import test_cuda_runner as runners
from tests.engine.test_cuda_runner import CPU, Framed, generate, make_runner
from tests.engine.test_prefill_attention import HEADS, SIZES, compare_interpreted, requests, start
from tests.kernels.hopper_stand_in import let_hopper_serve
from tests.kernels.paged import Paged, make_batch
from tests.kernels.test_triton_widened_kv import float8_caches
from tests.support.interpreter import exact_float8, quietly
from tests.support.tiny import make_tiny_checkpoint

SCALES = [KVScales(0.013, 0.007)]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    exact_float8(monkeypatch)
    for name, value in SIZES.items():
        monkeypatch.setattr(runners, name, value)
    with quietly():
        yield


@pytest.fixture
def hopper(monkeypatch):
    return let_hopper_serve(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("widened")
    return make_tiny_checkpoint(path, "qwen3", num_hidden_layers=1, head_dim=64, **HEADS)


def runner_by(folder, asked, kind=CudaRunner, dtype="float32"):
    """Return a runner over a float8 cache; NaN in its every slot and in the scratch."""
    kernels = TritonKernels(CPU, dtype)
    model = load_model(folder, dtype=dtype, kernels=kernels)
    kernels.serve_prompts_by(asked, head_dim=64, kv_dtype=FLOAT8, unit=SIZES["BLOCK"])
    runner = make_runner(model, kernels, kind, kv_dtype=FLOAT8, kv_scales=SCALES)
    poisoned = [cache for pair in runner.kv_caches for cache in pair]
    if kernels._wide is not None:
        poisoned += [kernels._wide.keys, kernels._wide.values]
    for cache in poisoned:
        cache.copy_(torch.full(cache.shape, torch.nan).to(cache.dtype))
    return runner


@pytest.fixture(scope="module")
def tritons(folder):
    """The tokens by Triton's kernel over the same kind of cache."""
    patch = pytest.MonkeyPatch()
    with patch.context():
        exact_float8(patch)
        for name, value in SIZES.items():
            patch.setattr(runners, name, value)
        with quietly():
            found = generate(runner_by(folder, "triton"), requests())
    patch.undo()
    return found


def noting(runner):
    """Return the list of what is prepared: the step, its prompts' units, and what it computes."""
    prepared = []
    prepare = runner.prepare

    def spy(step, blocks):
        made = prepare(step, blocks)
        ends = [chunk.end for chunk in step.chunks[runner._decodes(step) :]]
        units = units_of(np.array(ends, np.int32))
        prepared.append((made, units, runner.computed(step)))
        return made

    runner.prepare = spy
    return prepared


@pytest.mark.parametrize("kind", [CudaRunner, Framed], ids=["own sizes", "frames"])
def test_prompts_by_hoppers_kernel_give_tritons_tokens(folder, tritons, hopper, kind):
    runner = runner_by(folder, "hopper", kind)
    assert generate(runner, requests()) == tritons
    assert {call.shape for call in hopper.calls} == {USUAL[64]}
    assert {call.v_scale for call in hopper.calls} == {SCALES[0].v}
    assert any(first for call in hopper.calls for _, first in call.tiles)
    if kind is Framed:
        frames = {(frame.rows, frame.tiles) for frame in runner.frames if frame and frame.tokens}
        assert frames <= {(call.rows, len(call.tiles)) for call in hopper.calls}
        assert len(frames) > 1


def test_the_kernel_itself_gives_tritons_tokens_in_padded_steps(folder, monkeypatch):
    runner_of = partial(runner_by, folder, kind=Framed, dtype="float16")
    compare_interpreted(monkeypatch, runner_of)


@pytest.mark.parametrize("kind", [CudaRunner, Framed], ids=["own sizes", "frames"])
def test_steps_that_do_not_fit_the_scratch_go_by_tritons_kernel_and_in_no_frame(
    folder, tritons, hopper, monkeypatch, kind
):
    monkeypatch.setattr(triton_widened_kv, "USUAL_TOKENS", UNIT_TOKENS)
    runner = runner_by(folder, "hopper", kind)
    prepared = noting(runner)
    assert generate(runner, requests()) == tritons
    room = -(-SIZES["CONTEXT"] // UNIT_TOKENS)  # one sequence of the whole context
    by_units = [(step, units <= room, load) for step, units, load in prepared if units]
    assert {fits for _, fits, _ in by_units} == {False, True}
    for step, fits, load in by_units:
        assert is_hopper(step.shape) == fits
        assert fits or load == step.step.load  # without a frame's padding
    assert len(hopper.calls) == sum(fits for _, fits, _ in by_units)
    if kind is Framed:
        pairs = list(zip(prepared, runner.frames, strict=True))
        assert all(units <= room or frame is None for (_, units, _), frame in pairs)
        assert any(frame and frame.tokens for frame in runner.frames)


def test_what_serves_prompts_without_room_is_compiled_at_start(folder, hopper, monkeypatch):
    runner = runner_by(folder, "hopper")
    served = []
    prefill = triton_prefill.prefill

    def spy(*tensors, **known):
        served.append(known["shape"])
        prefill(*tensors, **known)

    monkeypatch.setattr(triton_prefill, "prefill", spy)
    monkeypatch.setattr(StepGraphs, "capture", lambda *_: None)
    runner.capture()
    assert served == [prefill_shape(64, SIZES["CONTEXT"], (9, 0))]
    assert not hopper.calls
    runner_by(folder, "triton").capture()
    assert len(served) == 1


@pytest.mark.parametrize("by_hopper", [True, False])
def test_frames_by_tritons_kernel_need_no_room(folder, hopper, monkeypatch, by_hopper):
    """As a plan may choose for the longest sequences alone, for which captured steps are cut."""
    monkeypatch.setattr(triton_widened_kv, "USUAL_TOKENS", UNIT_TOKENS)
    monkeypatch.setattr(runners, "CONTEXT", 128)
    runner = runner_by(folder, "hopper", Framed)
    assert runner._kernels.wide_tokens == UNIT_TOKENS
    if not by_hopper:
        runner.step_graphs.shape = prefill_shape(64, 128, (9, 0))
    blocks = BlockManager(SIZES["BLOCKS"], SIZES["BLOCK"], prefix_cache=False)
    scheduler = Scheduler(blocks, max_batch_size=4, token_budget=SIZES["BUDGET"])
    for request in requests()[::2]:  # 3 tokens and 29: two units
        scheduler.add(Sequence.from_request(request, 128))
    prepared = runner.prepare(scheduler.schedule(), blocks)
    assert prepared.is_captured != by_hopper
    assert not is_hopper(prepared.shape)


def test_a_steps_prompts_alone_are_widened_as_beside_its_decodes(hopper):
    """As `--phase-overlap` has them go: with tables and lengths of their own."""
    lens = [40, 9, 130, 257]
    paged = Paged(kv_lens=lens, num_heads=2, num_kv_heads=1, head_dim=64, block_size=8)
    chunks = [(1, 40), (1, 9), (4, 130), (150, 257)]
    batch = plan(make_batch(chunks, 8, paged.tables), USUAL[64])
    q = torch.cat([q[n - rows : n] for q, (rows, n) in zip(paged.queries, chunks, strict=True)])
    k, v = float8_caches(paged, SCALES[0])
    kernels = TritonKernels(CPU, "float32")
    kernels.serve_prompts_by("hopper", head_dim=64, kv_dtype=FLOAT8, unit=8)
    kernels.reserve(rows=4, sequences=6, num_heads=2, num_kv_heads=1, head_dim=64, max_kv_len=300)
    whole, alone = (
        kernels.paged_attention(rows, k, v, part, paged.scale, kv_scales=SCALES[0])
        for rows, part in ((q, batch), (q[2:], prompts_of(batch)))
    )
    assert torch.equal(whole[2:], alone)
    assert len(hopper.calls) == 2


def test_a_start_counts_the_scratch_in_its_memory_and_says_what_it_holds(
    folder, monkeypatch, hopper
):
    # The interpreter would calibrate for half a minute.
    monkeypatch.setattr(cuda_setup, "find_scales", lambda *_: FoundScales(SCALES, "given"))
    units = 2 + 16 + 1  # slots, a frame's prompts and its padding: of 64 tokens each
    plans = []
    planned = cuda_setup.plan_memory

    def spy(*given, **more):
        plans.append(planned(*given, **more))
        return plans[-1]

    monkeypatch.setattr(cuda_setup, "plan_memory", spy)
    for asked in ("triton", "auto", "hopper"):
        runner, told = start(folder, monkeypatch, asked, kv_cache_dtype="fp8")
        assert is_hopper(runner.step_graphs.shape) == (asked == "hopper")
        beyond = f"; more than {units * UNIT_TOKENS} keys of a step's prompts: Triton's"
        assert told.endswith(beyond) == (asked == "hopper")
    assert told == name_of(USUAL[64]) + beyond
    scratch = WidenedKv.bytes_of(units, 1, 64, torch.float16)  # one head of 64 dimensions
    assert scratch == units * 2 * 128 * 64 * 2
    assert plans[0].overhead == plans[1].overhead == plans[2].overhead - scratch
