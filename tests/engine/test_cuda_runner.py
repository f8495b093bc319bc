"""The GPU runner under Triton's interpreter: the same tokens as the CPU's runner, frame or none."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch

from tailrace.clock import VirtualClock, monotonic
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.device_sampler import DeviceSampler
from tailrace.engine.engine import Engine
from tailrace.engine.frames import Frame
from tailrace.engine.host_kv import HostKv
from tailrace.engine.runner import Runner, StepWatch
from tailrace.engine.sampler import Sampler
from tailrace.engine.scheduler import Chunk, Scheduler, Step
from tailrace.engine.sequence import Sequence
from tailrace.engine.slot_tables import table_bytes
from tailrace.errors import DeviceMemoryError
from tailrace.kernels.torch_kernels import TorchKernels
from tailrace.kernels.triton_kernels import TritonKernels
from tailrace.models.loader import load_model
from tailrace.types import EngineRequest, GrowPrompt, SamplingParams
from tests.support.interpreter import quietly
from tests.support.tiny import make_tiny_checkpoint

SLOTS, BLOCK, BLOCKS, BUDGET, CONTEXT = 4, 16, 64, 24, 128
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    """Triton's interpreter is NumPy, which warns of what a GPU does silently: 0 / 0 in padding."""
    with quietly():
        yield


class Framed(CudaRunner):
    """Runs every step that fits a frame in that frame, padding and all, without a graph."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.frames = []
        self.step_graphs.graphs = {Frame(0): self}  # so that frames are chosen

    def execute(self, prepared):
        self.frames.append(prepared.frame if prepared.is_captured else None)
        # The same arrays; the kernels are run one by one.
        object.__setattr__(prepared, "is_captured", False)
        return super().execute(prepared)


def run_now(function, *args):
    done = Future()
    try:
        done.set_result(function(*args))
    except DeviceMemoryError as error:
        done.set_exception(error)
    return done


def cpu_runner(folder):
    model = load_model(folder, dtype="float32", kernels=TorchKernels())
    sampler = Sampler(SLOTS, 259, [258], 0)
    return Runner(model, sampler, num_blocks=BLOCKS, block_size=BLOCK, num_slots=SLOTS)


def make_runner(model, kernels, kind=CudaRunner, *, kv_dtype=torch.float32, **more):
    """Return a runner of these tests' sizes, over a model that is loaded."""
    return kind(
        model,
        DeviceSampler(SLOTS, 259, [258], 0, device=CPU),
        kernels,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        num_slots=SLOTS,
        context_length=CONTEXT,
        token_budget=BUDGET,
        kv_dtype=kv_dtype,
        **more,
    )


def gpu_runner(folder, kind):
    kernels = TritonKernels(CPU, "float32")
    model = load_model(folder, dtype="float32", kernels=kernels)
    runner = make_runner(model, kernels, kind)
    for k, v in runner.kv_caches:
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    return runner


def generate(runner, requests, *, arriving=False, blocks=None, late=()):
    """Return each request's tokens.

    Those arriving have their prompts sent ahead of them; late ones come once tokens have.
    """
    blocks = blocks or BlockManager(BLOCKS, BLOCK, prefix_cache=False)
    engine = Engine(
        Scheduler(
            blocks,
            max_batch_size=SLOTS,
            token_budget=BUDGET,
            swap_pays=(lambda tokens, units: True) if blocks.host_places else None,
        ),
        runner,
        submit=run_now,
        clock=monotonic,
        context_length=CONTEXT,
        vocab_size=259,
        eos_token_ids=[258],
    )
    for request in requests if arriving else ():
        ids = request.token_ids
        for start in range(0, len(ids), 19):
            engine.grow(GrowPrompt(request.request_id, start, ids[start : start + 19], 30.0))
            if engine.has_work:
                assert engine.step() == []
    for request in requests:
        engine.add(request)
    found = {request.request_id: [] for request in (*requests, *late)}
    early = sum(sequence.num_computed for sequence in engine.scheduler.early.holders)
    assert bool(early) is arriving
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            found[output.request_id] += output.token_ids
        if any(found.values()):
            for request in late:
                engine.add(request)
            late = ()
    return found


def make_requests(**sampling):
    draw = random.Random(3)
    return [
        EngineRequest(
            request_id=str(index),
            token_ids=[draw.randrange(256) for _ in range(length)],
            sampling=SamplingParams(max_tokens=4, ignore_eos=True, **sampling),
            arrival_s=float(index),
        )
        for index, length in enumerate((1, 5, 31, 17, 3, 40))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Heads of 32: Triton multiplies no narrower tiles than 16.
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def truth(folder):
    return generate(cpu_runner(folder), make_requests(temperature=0.0))


def test_steps_of_their_own_size_give_the_cpu_runners_tokens(folder, truth):
    assert generate(gpu_runner(folder, CudaRunner), make_requests(temperature=0.0)) == truth


def test_prompts_computed_while_they_arrive_give_the_same_tokens(folder, truth):
    for kind in (CudaRunner, Framed):
        runner = gpu_runner(folder, kind)
        assert generate(runner, make_requests(temperature=0.0), arriving=True) == truth


def test_padded_frames_give_the_same_tokens(folder, truth):
    runner = gpu_runner(folder, Framed)
    assert generate(runner, make_requests(temperature=0.0)) == truth
    assert {frame.tokens for frame in runner.frames if frame} >= {0, BUDGET - SLOTS}


def requests_that_swap():
    return [
        EngineRequest(
            request_id=str(index),
            token_ids=[index * 7 + 1] * 15,
            sampling=SamplingParams(max_tokens=22, temperature=0.0, ignore_eos=True),
            arrival_s=float(index),
        )
        for index in range(2)
    ]


def generate_swapping(runner):
    """Return the tokens of two sequences, one of which must leave and come back."""
    runner.keep_on_host(8)
    blocks = BlockManager(5, BLOCK, prefix_cache=False, host_places=8)
    found = generate(runner, requests_that_swap(), blocks=blocks)
    assert blocks.swapped_in_total == blocks.swapped_out_total > 0
    return found


def test_swapped_sequences_give_the_same_tokens(folder):
    expected = generate(cpu_runner(folder), requests_that_swap())
    assert generate_swapping(gpu_runner(folder, CudaRunner)) == expected


class Moment:
    """An event of a device that has no work but what moves a virtual clock."""

    def __init__(self, clock):
        self.at_s = clock()

    def elapsed_time(self, later):
        return 1e3 * (later.at_s - self.at_s)

    def synchronize(self):
        """Nothing is queued."""


@pytest.mark.parametrize("make", [cpu_runner, partial(gpu_runner, kind=CudaRunner)])
def test_a_device_that_copies_is_not_idle_nor_at_its_step(folder, monkeypatch, make):
    clock, found = VirtualClock(), []
    runner = make(folder)
    execute, run = runner.execute, HostKv.run

    def watched(prepared):
        result = execute(prepared)
        found.append((result.wait().idle_s, result.wait().device_s))
        return result

    def copied(*args):
        run(*args)
        clock.advance(5.0)

    runner.execute = watched
    runner._watch = StepWatch(clock)
    monkeypatch.setattr(HostKv, "run", copied)
    monkeypatch.setattr("tailrace.engine.cuda_runner.mark", lambda _: Moment(clock))
    generate_swapping(runner)
    assert clock() >= 10.0
    assert set(found) == {(0.0, 0.0)}


def test_sampled_rows_draw_as_on_the_cpu(folder):
    requests = make_requests(temperature=0.8, top_p=0.9, seed=7)
    expected = generate(cpu_runner(folder), requests)
    assert generate(gpu_runner(folder, CudaRunner), requests) == expected


class Starved(CudaRunner):
    """Finds no memory in a step, after all else of them is done: the worst moment."""

    failing = (4,)
    calls = 0

    def _queue(self, prepared):
        result = super()._queue(prepared)
        self.calls += 1
        if self.calls in self.failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return result


def test_a_step_without_memory_changes_no_token_that_was_drawn_with_a_seed(folder):
    requests = make_requests(temperature=0.8, seed=7, presence_penalty=0.5)
    starved = gpu_runner(folder, Starved)
    assert generate(starved, requests) == generate(cpu_runner(folder), requests)
    assert starved.calls > max(starved.failing)


def test_lack_of_memory_is_told_from_other_faults_in_one_line(folder):
    runner = gpu_runner(folder, Starved)
    runner.failing = (1,)
    with pytest.raises(
        DeviceMemoryError, match=r"^CUDA out of memory. Tried to allocate 2.00 GiB.$"
    ):
        generate_alone(runner)


def generate_alone(runner):
    """Run one step without an engine, which would try again."""
    blocks = BlockManager(BLOCKS, BLOCK, prefix_cache=False)
    scheduler = Scheduler(blocks, max_batch_size=SLOTS, token_budget=BUDGET)
    scheduler.add(Sequence.from_request(make_requests(temperature=0.0)[1], CONTEXT))
    runner.execute(runner.prepare(scheduler.schedule(), blocks))


@pytest.mark.parametrize("make", [cpu_runner, partial(gpu_runner, kind=Framed)])
def test_a_step_is_described_by_its_size_and_by_what_serves_it(folder, make):
    runner = make(folder)
    decode, prompt = (Sequence.from_request(request, CONTEXT) for request in make_requests()[1:3])
    decode.token_ids.append(7)
    step = Step()
    blocks = BlockManager(BLOCKS, BLOCK, prefix_cache=False)
    for sequence, start, end in ((decode, 5, 6), (prompt, 0, 12)):
        blocks.grow(blocks.open(sequence.request_id, sequence.token_ids, "", end), end)
        step.add(Chunk(sequence, step.decodes, start, end, samples=False, from_device=False))
    prepared = runner.prepare(step, blocks)
    told = runner.describe(prepared)
    assert (told["tokens"], told["decodes"], told["prompts"]) == (13, 1, 1)
    assert told["longest_tokens"] == 12
    if isinstance(runner, CudaRunner):
        frame = prepared.frame
        assert frame.rows > told["tokens"]  # it is padded
        assert told["frame"].startswith(f"{frame.decodes} decodes, {frame.tokens} tokens")
        assert told["captured"]
        assert told["prefill_attention"] == prepared.shape.words
        assert told["decode_attention"]


def test_the_time_of_a_prompts_last_row_is_predicted_for_the_frame_that_computes_it(folder):
    """With a second copy of the weights such a row is no decode, though its chunk is as long."""
    decode, prompt = (Sequence.from_request(request, CONTEXT) for request in make_requests()[1:3])
    decode.token_ids.append(7)
    step = Step()
    step.add(Chunk(decode, 0, 5, 6, samples=True, from_device=False))
    step.add(Chunk(prompt, 1, 30, 31, samples=True, from_device=False))
    runner = gpu_runner(folder, CudaRunner)
    runner.step_graphs.graphs = {Frame(0): None}  # so that frames are chosen
    frame = Frame(2, 16, 1, 2)
    runner.sizes.mixed = [frame]
    assert runner.computed(step) == step.load
    runner.prefill_weights = "fp8"
    load = runner.computed(step)
    assert (load.decodes, load.prefill_tokens) == (frame.decodes, frame.tokens)


def test_what_tables_take_of_the_device_is_known_before_they_are_made(folder):
    runner = gpu_runner(folder, CudaRunner)
    rows = 11 * (BUDGET + 2 * SLOTS + 64) * 4
    tables = runner.forward_pass.tables
    made = (
        tables._device.nbytes
        + tables._step.nbytes
        + runner.forward_pass.staging._device.nbytes
        - rows
    )
    assert table_bytes(SLOTS, CONTEXT, BLOCK, runner.sizes.mixed) == made > 0


def test_padding_never_takes_more_than_half_of_the_prompts_budget(folder):
    runner = gpu_runner(folder, CudaRunner)  # 4 slots, 24 tokens
    assert [runner.padded_decodes(n) for n in range(5)] == [0, 4, 4, 4, 4]
    runner.sizes.token_budget = 4
    assert [runner.padded_decodes(n) for n in range(5)] == [0, 1, 2, 3, 4]


def test_layers_that_differ_are_kinds_of_their_own(folder):
    model = load_model(folder, dtype="float32", kernels=TritonKernels(CPU, "float32"))
    (layer,) = model.layers
    other = replace(layer, attention=replace(layer.attention, q_norm=None))
    layers = [layer, layer, other, layer, other]
    shallow, kept = replace(model, layers=layers).shallow()
    assert kept == [0, 1, 2]
    assert [id(layer) for layer in shallow.layers] == [id(layers[index]) for index in kept]
