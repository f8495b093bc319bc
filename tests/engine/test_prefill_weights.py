"""What serves prompts: what is chosen, what it may take, and the tokens that come of it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from weakref import ref

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.config import EngineConfig
from tailrace.engine import cuda_setup, prefill_weights
from tailrace.engine.accuracy_record import (
    Finding,
    Known,
    Numerics,
    file_of,
    fingerprint,
    remember,
)
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.device_kv import kv_bytes_per_token
from tailrace.engine.prefill_weights import Choice, Prefill, choose, copy_bytes, make, with_copy
from tailrace.engine.step_arrays import leading_decodes
from tailrace.engine.step_probes import Probe, ProbeRun
from tailrace.errors import ConfigError
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.phased_linear import PhasedLinear
from tailrace.kernels.linear.prefill_format import FORMATS
from tailrace.kernels.triton_kernels import TritonKernels, UnpackedTritonKernels
from tailrace.models.loader import load_model
from tests.engine.test_cuda_runner import (
    BUDGET,
    CPU,
    Framed,
    generate,
    make_requests,
    make_runner,
)
from tests.support.interpreter import exact_float8, quietly
from tests.support.tiny import make_tiny_checkpoint

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GIB = 2**30
HERE = Numerics.of(EngineConfig(gpus=(0,)), "float32", (9, 0))


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    exact_float8(monkeypatch)
    with quietly():
        yield


def make_folder(path, stored, **sizes):
    folder = make_tiny_checkpoint(
        path, "llama", num_hidden_layers=1, intermediate_size=256, head_dim=32, **sizes
    )
    config = json.loads((folder / "config.json").read_text())
    if stored is not None:
        config["quantization_config"] = stored
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder, kernels=None, dtype="float32", **options):
    kernels = kernels or TritonKernels(CPU, dtype)
    options |= {"load_format": "dummy", "seed": 3}
    return kernels, load_model(folder, dtype=dtype, kernels=kernels, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefill")
    kinds = {"4 bits": AWQ, "fp8": FLOAT8, "plain": None}
    return {kind: make_folder(path / kind, stored) for kind, stored in kinds.items()}


def finding(name="fp8", agreement=0.995, divergence=0.001):
    return Finding(name, HERE, 20_480, agreement, divergence)


def knowing(*findings):
    return Known({found.prefill_weights: found for found in findings})


def chosen(folders, kind, asked, known=()):
    kernels, model = loaded(folders[kind])
    return choose(asked, kernels, model, knowing(*known))


@pytest.mark.parametrize("kind", ["4 bits", "fp8", "plain"])
def test_same_is_one_copy_whatever_was_measured(folders, kind):
    assert chosen(folders, kind, "same", [finding()]).format is None


@pytest.mark.parametrize("kind", ["fp8", "plain"])
def test_auto_copies_weights_in_4_bits_alone(folders, kind):
    choice = chosen(folders, kind, "auto", [finding()])
    assert (choice.name, "serve prompts as they are" in choice.words) == ("same", True)


@pytest.mark.parametrize(
    ("known", "expected", "words"),
    [
        ([], "bf16", "fp8 not measured (tailrace check-accuracy MODEL --prefill-weights fp8)"),
        ([finding()], "fp8", "fp8 measured 99.50% / 0.001 nats over 20,480 positions"),
        ([finding(agreement=0.936)], "bf16", "fp8 measured 93.60% / 0.001 nats"),
        (
            [finding(agreement=0.936), finding("int8", 0.993, 6e-4)],
            "int8",
            "fp8 measured 93.60% / 0.001 nats over 20,480 positions, int8 measured 99.30% / 0.0006",
        ),
        ([finding(divergence=0.0135)], "bf16", "fp8 measured 99.50% / 0.0135 nats"),
        (
            [finding(agreement=0.5), finding("bf16", 0.9991, 1e-5)],
            "bf16",
            "bf16 measured 99.91% / 1e-05 nats",
        ),
    ],
    ids=["unmeasured", "within", "agreement", "int8", "divergence", "both"],
)
def test_auto_takes_what_was_measured_within_the_bound_else_half_precision(
    folders, known, expected, words
):
    choice = chosen(folders, "4 bits", "auto", known)
    assert choice.name == expected
    assert words in choice.words
    assert "bound 99% / 0.005 nats" in choice.words


def test_auto_does_not_count_what_was_measured_as_nobody_serves_it(folders):
    kernels, model = loaded(folders["4 bits"])
    strange = Known(otherwise={"fp8": "fp8 activations 'many' (here 'all')"})
    choice = choose("auto", kernels, model, strange)
    assert choice.name == "bf16"
    assert (
        "fp8 measured under fp8 activations 'many' (here 'all') "
        "(tailrace check-accuracy MODEL --prefill-weights fp8)"
    ) in choice.words


def test_auto_leaves_out_what_the_gpu_or_the_sizes_do_not_allow(folders):
    kernels, model = loaded(folders["4 bits"])
    kernels.capability = (8, 0)
    assert choose("auto", kernels, model, knowing(finding())).name == "bf16"
    with pytest.raises(ConfigError, match="weights fp8: .*capability is 8.0, and FP8 .* needs 8.9"):
        choose("fp8", kernels, model, Known())
    kernels = TritonKernels(CPU, "float32")
    layer = kernels.pack_linear(quantize_groups(torch.randn(40, 64), 64), None, "float32")
    odd = SimpleNamespace(layer_linears=[layer], config=SimpleNamespace(quantization=None))
    assert choose("auto", kernels, odd, knowing(finding())).name == "bf16"
    with pytest.raises(ConfigError, match="40 outputs .* multiples of 16; use auto or same"):
        choose("fp8", kernels, odd, Known())


def test_a_copy_that_is_asked_for_is_made_whatever_was_measured(folders):
    for known in ([], [finding(agreement=0.1)]):
        choice = chosen(folders, "4 bits", "fp8", known)
        assert (choice.name, choice.is_asked) == ("fp8", True)
        assert choice.words.startswith("as asked, fp8 ")
    assert chosen(folders, "plain", "fp8").name == "fp8"


@pytest.mark.parametrize("asked", ["fp8", "bf16"])
def test_weights_in_float8_have_no_other_copy(folders, asked):
    with pytest.raises(ConfigError, match=f"--prefill-weights {asked}: .*in FP8.*use auto or same"):
        chosen(folders, "fp8", asked)


@pytest.mark.parametrize("asked", list(FORMATS))
def test_4_bits_that_were_rounded_to_float8_have_no_copy(folders, asked):
    kernels = TritonKernels(CPU, "float32")
    model = loaded(folders["4 bits"], kernels, quant_type="fp8")[1]
    for gives_none in ("auto", "same"):
        assert choose(gives_none, kernels, model, knowing(finding())).format is None
    with pytest.raises(ConfigError, match=f"weights {asked}: --quant-type fp8 .* 4 bits to FP8"):
        choose(asked, kernels, model, Known())


def test_half_precision_of_half_precision_is_one_copy(folders):
    choice = chosen(folders, "plain", "bf16")
    assert (choice.name, choice.words) == ("same", "weights are in float32 already")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["4 bits", "plain"])
def test_a_copy_is_of_every_layer_but_the_head(folders, kind, name):
    kernels, model = loaded(folders[kind])
    copied = with_copy(model, kernels, FORMATS[name])
    assert all(isinstance(linear, PhasedLinear) for linear in copied.layer_linears)
    assert copied.head is model.head
    assert not any(isinstance(linear, PhasedLinear) for linear in model.layer_linears)
    many = sum(linear.many.nbytes for linear in copied.layer_linears)
    assert copied.weight_bytes == model.weight_bytes + many
    if name != "bf16":
        assert copy_bytes(FORMATS[name], model) == many
        words = f"and for prompts {name.replace('fp', 'FP')}"
        assert any(words in name for name in copied.linear_names)


def test_layers_that_a_4_bit_checkpoint_leaves_plain_stay_so(tmp_path):
    stored = AWQ | {"modules_to_not_convert": ["down_proj"]}
    kernels, model = loaded(make_folder(tmp_path, stored))
    copied = with_copy(model, kernels, FORMATS["fp8"])
    mlp = copied.layers[0].mlp
    assert isinstance(mlp.gate_up, PhasedLinear)
    assert mlp.down is model.layers[0].mlp.down


# Memory


class Model:
    """Any model: nobody runs it."""


def prefill_of(*, is_asked, copy_bytes=4 * GIB):
    choice = Choice(FORMATS["fp8"], "why", is_asked)
    return Prefill(choice, Model(), Model(), copy_bytes)


@pytest.mark.parametrize(
    ("kv", "needed", "kept_by_auto", "kept_as_asked"),
    [(4, 1, True, True), (3.9, 1, False, True), (4, 5, False, False), (9, 9, True, True)],
)
def test_a_copy_leaves_room_for_a_sequence_and_by_auto_for_half_of_what_kv_had(
    kv, needed, kept_by_auto, kept_as_asked
):
    room = {"kv_bytes": int(kv * GIB), "needed_bytes": int(needed * GIB)}
    prefill = prefill_of(is_asked=False)
    found = prefill.in_room(**room)
    assert (found.choice.name == "fp8") is kept_by_auto
    assert found.model is (prefill.model if kept_by_auto else prefill.without)
    if kept_by_auto:
        assert found.describe() == f"fp8 (4.00 GiB, leaves {kv:.2f} GiB for KV): why"
    else:
        assert found.copy_bytes == 0
        assert found.describe().startswith(f"same: the copy takes 4.00 GiB and leaves {kv:.2f} GiB")
        assert found.describe().endswith("; why")
    asked = prefill_of(is_asked=True)
    if kept_as_asked:
        assert asked.in_room(**room).model is asked.model
    else:
        with pytest.raises(ConfigError, match="weights fp8: the copy takes 4.00 GiB and leaves"):
            asked.in_room(**room)


def test_one_copy_needs_no_room():
    model = Model()
    alone = Prefill(Choice(None, "why"), model, model)
    assert alone.in_room(kv_bytes=0, needed_bytes=GIB) is alone


def test_a_copy_larger_than_what_is_free_is_not_begun(folders, monkeypatch):
    kernels, model = loaded(folders["4 bits"])
    size = copy_bytes(FORMATS["bf16"], model)
    choice = choose("auto", kernels, model, Known())
    assert make(choice, model, kernels, free_bytes=size).choice is choice
    monkeypatch.setattr(prefill_weights, "with_copy", None)
    found = make(choice, model, kernels, free_bytes=size - 1)
    assert (found.choice.name, found.model) == ("same", model)
    with pytest.raises(ConfigError, match="--prefill-weights bf16: the copy takes .* are free"):
        make(choose("bf16", kernels, model, Known()), model, kernels, free_bytes=size - 1)


def test_a_copy_that_finds_no_memory_on_the_way_is_given_up(folders, monkeypatch):
    kernels, model = loaded(folders["4 bits"])

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore.")

    monkeypatch.setattr(prefill_weights, "with_copy", fail)
    found = make(choose("auto", kernels, model, Known()), model, kernels, free_bytes=GIB)
    assert (found.model, "Tried 2 GiB.;" in found.choice.words) == (model, True)
    with pytest.raises(ConfigError, match="Tried 2 GiB"):
        make(choose("fp8", kernels, model, Known()), model, kernels, free_bytes=GIB)

    def lost(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(prefill_weights, "with_copy", lost)
    with pytest.raises(RuntimeError, match="device-side assert"):
        make(choose("auto", kernels, model, Known()), model, kernels, free_bytes=GIB)


# Tokens


def runner_of(model, kernels, name, kind=Framed):
    return make_runner(model, kernels, kind, prefill_weights=name)


def test_in_float32_an_exact_copy_gives_the_tokens_of_the_weights_it_stands_for(folders):
    """Mixed steps, padded decodes and prompts of one row among them."""
    found = []
    for kernels, name in (
        (TritonKernels(CPU, "float32"), "bf16"),
        (UnpackedTritonKernels(CPU, "float32"), "same"),
    ):
        _, model = loaded(folders["4 bits"], kernels)
        if name != "same":
            model = with_copy(model, kernels, FORMATS[name])
        runner = runner_of(model, kernels, name)
        found.append(generate(runner, make_requests(temperature=0.0)[1:4]))
        assert any(frame and frame.decodes and frame.tokens for frame in runner.frames)
    assert found[0] == found[1]


def test_prompts_are_multiplied_by_the_copy_and_decodes_by_the_weights(folders):
    kernels, model = loaded(folders["4 bits"])
    copied = with_copy(model, kernels, FORMATS["bf16"])
    seen = []
    for linear in copied.layer_linears:
        few = linear.few.write

        def spy(x, out, few=few):
            seen.append(len(x))
            few(x, out)

        linear.few.write = spy
    runner = runner_of(copied, kernels, "bf16", CudaRunner)
    generate(runner, [make_requests(temperature=0.0)[2]])
    # Three decodes of one row each, in four layers; the prompt went elsewhere.
    assert seen == [1] * 12


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_requests_tokens_do_not_depend_on_its_neighbours(folders, name):
    kernels, model = loaded(folders["4 bits"])
    runner = runner_of(with_copy(model, kernels, FORMATS[name]), kernels, name, CudaRunner)
    requests = make_requests(temperature=0.0)[2:4]
    together = generate(runner, requests)
    alone = {}
    for request in requests:
        alone |= generate(runner, [request])
    assert together == alone


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_prompts_last_token_takes_no_decode_with_it_though_it_goes_first(folders, name):
    """The late one's priority is the higher; a token of its prompt is left to a step of decodes."""
    kernels, model = loaded(folders["4 bits"])
    runner = runner_of(with_copy(model, kernels, FORMATS[name]), kernels, name, CudaRunner)
    served = []
    prepare = runner.prepare

    def spy(step, blocks):
        alone = [c.num_tokens == 1 and c.start < c.sequence.num_prompt for c in step.chunks]
        served.append((runner._decodes(step), len(alone), any(alone)))
        return prepare(step, blocks)

    runner.prepare = spy
    early, other = make_requests(temperature=0.0)[2:4]
    early = msgspec.structs.replace(early, priority=1)
    late = msgspec.structs.replace(other, token_ids=early.token_ids[:BUDGET])
    together = generate(runner, [early], late=[late])
    assert (1, 2, True) in served
    assert together == generate(runner, [early]) | generate(runner, [late])


# A start, on a device that is none


class FakeCuda:
    """Torch's view of a GPU of `free` bytes, which nothing takes anything of."""

    def __init__(self, monkeypatch, free):
        self.free = free
        answers = {
            "mem_get_info": lambda: (self.free, self.free),
            "memory_allocated": lambda: 0,
            "max_memory_allocated": lambda: 0,
            "reset_peak_memory_stats": lambda: None,
            "empty_cache": lambda: None,
            "synchronize": lambda _=None: None,
            "get_device_name": lambda _: "a GPU of the tests",
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(cuda_setup, "load_device", lambda _: CPU)
        monkeypatch.setattr(CudaRunner, "capture", lambda *_: None)


OVERHEAD = (600 << 20) + cuda_setup._GRAPH_BYTES


def start(folder, asked, *, free=None, **settings):
    """Return the runner that a start brings, and what it logged of the copy."""
    config = EngineConfig(
        model_path=str(folder),
        load_format=settings.pop("load_format", "dummy"),
        dtype="float16",
        gpus=(0,),
        max_batch_size=2,
        max_num_batched_tokens=16,
        context_length=64,
        gpu_memory_utilization=1.0,
        prefill_weights=asked,
        **settings,
    )
    with capture_logs() as logs:
        runner, _, _, words = cuda_setup.load_runner(config, folder, 16)
    told = next(entry["serves"] for entry in logs if entry["event"] == "prefill_weights")
    assert told in words
    return runner, told


@pytest.mark.parametrize(
    ("asked", "name"),
    [("auto", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("bf16", "bf16"), ("same", "same")],
)
def test_a_start_makes_the_copy_and_says_so(folders, monkeypatch, asked, name):
    FakeCuda(monkeypatch, OVERHEAD + (64 << 20))
    runner, told = start(folders["4 bits"], asked)
    assert runner.prefill_weights == name
    assert told.startswith(name)
    linears = runner.model.layer_linears
    assert all(isinstance(linear, PhasedLinear) == (name != "same") for linear in linears)


def test_a_start_gives_the_copy_up_where_kv_would_have_too_little(folders, monkeypatch):
    """Two sequences of the context fit beside the copy, then half of one."""
    kernels, model = loaded(folders["4 bits"], dtype="float16")
    later = cuda_setup.later_bytes(
        EngineConfig(max_batch_size=2, gpus=(0,)), model, kernels, 16, 64
    )
    sequence = 64 * kv_bytes_per_token(model, torch.float16)
    device = FakeCuda(monkeypatch, OVERHEAD + later + 2 * sequence)
    monkeypatch.setattr(prefill_weights, "copy_bytes", lambda *_: sequence)
    assert start(folders["4 bits"], "auto")[0].prefill_weights == "bf16"
    monkeypatch.setattr(prefill_weights, "copy_bytes", lambda *_: 3 * sequence)
    runner, told = start(folders["4 bits"], "auto")
    assert runner.prefill_weights == "same"
    assert "less than half of what it has without; fp8 not measured" in told
    assert start(folders["4 bits"], "fp8")[0].prefill_weights == "fp8"
    device.free -= sequence + sequence // 2
    with pytest.raises(ConfigError, match="--prefill-weights fp8: .* for KV, which needs"):
        start(folders["4 bits"], "fp8")


def test_a_pool_that_was_asked_for_and_fits_leaves_the_copy(folders, monkeypatch):
    kernels, model = loaded(folders["4 bits"], dtype="float16")
    later = cuda_setup.later_bytes(
        EngineConfig(max_batch_size=2, gpus=(0,)), model, kernels, 16, 64
    )
    sequence = 64 * kv_bytes_per_token(model, torch.float16)
    device = FakeCuda(monkeypatch, OVERHEAD + later + 2 * sequence)
    monkeypatch.setattr(prefill_weights, "copy_bytes", lambda *_: 3 * sequence)
    assert start(folders["4 bits"], "auto", kv_cache_tokens=64)[0].prefill_weights == "bf16"
    device.free -= sequence + sequence // 2
    runner, told = start(folders["4 bits"], "auto", kv_cache_tokens=64)
    assert (runner.prefill_weights, "which needs" in told) == ("same", True)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore.")


@pytest.mark.parametrize("at", ["_make_sampler", "_apply_plan", "measure_step"])
def test_a_start_gives_the_copy_up_where_nothing_fits_beside_it(folders, monkeypatch, at):
    FakeCuda(monkeypatch, OVERHEAD + (64 << 20))
    true, copies = getattr(cuda_setup, at), []
    made = cuda_setup.make_copy

    def make_and_watch(*given, **named):
        prefill = made(*given, **named)
        copies[:] = [ref(linear.many) for linear in prefill.model.layer_linears]
        return prefill

    def short(*given, **named):
        if any(copy() is not None for copy in copies):
            out_of_memory()
        return true(*given, **named)

    monkeypatch.setattr(cuda_setup, "make_copy", make_and_watch)
    monkeypatch.setattr(cuda_setup, at, short)
    runner, told = start(folders["4 bits"], "auto")
    assert copies
    assert runner.prefill_weights == "same"
    assert told.startswith("same: the largest step does not fit beside it; fp8 not measured")
    with pytest.raises(ConfigError, match="--prefill-weights fp8: the largest step does not fit"):
        start(folders["4 bits"], "fp8")


def test_want_of_memory_without_a_copy_is_not_hidden(folders, monkeypatch):
    FakeCuda(monkeypatch, OVERHEAD + (64 << 20))
    monkeypatch.setattr(cuda_setup, "measure_step", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        start(folders["4 bits"], "same")


@pytest.mark.parametrize(
    ("served", "told"),
    [
        ({}, ""),
        ({"fp8_activations": "all"}, "fp8 activations 'many' (here 'all')"),
        ({"kv_cache_dtype": "fp8"}, "kv dtype 'float32' (here 'float8')"),
        ({"quant_type": "fp8"}, "weights 'as stored' (here 'rounded to FP8')"),
    ],
    ids=["as measured", "activations", "kv", "weights"],
)
def test_auto_counts_a_record_only_where_it_serves_what_was_measured(
    folders, monkeypatch, tmp_path, served, told
):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path))
    FakeCuda(monkeypatch, GIB)
    folder = folders["4 bits"]
    kernels, model = loaded(folder)
    measured = EngineConfig(model_path=str(folder), prefill_weights="auto", gpus=(0,))
    under = Numerics.of(measured, "float32", kernels.capability)
    remember(folder, Finding("fp8", under, 20_480, 0.995, 0.001))
    choice = cuda_setup.copy_for_prompts(replace(measured, **served), folder, kernels, model).choice
    assert choice.name == ("bf16" if told else "fp8")
    assert told in choice.words


def test_by_auto_a_damaged_record_is_none_with_a_warning(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path))
    FakeCuda(monkeypatch, GIB)
    folder = folders["4 bits"]
    file = file_of(fingerprint(folder))
    file.parent.mkdir(parents=True)
    file.write_bytes(b'{"checkpoint": "x", "findings": [')
    kernels, model = loaded(folder)
    config = EngineConfig(model_path=str(folder), prefill_weights="auto", gpus=(0,))
    with capture_logs() as logs:
        made = cuda_setup.copy_for_prompts(config, folder, kernels, model)
    assert (made.choice.name, "fp8 not measured" in made.choice.words) == ("bf16", True)
    (told,) = [entry for entry in logs if entry["event"] == "accuracy_record_not_read"]
    assert "truncated; remove it" in told["reason"]
    named = replace(config, prefill_weights="fp8")
    with pytest.raises(ConfigError, match="truncated; remove it"):
        cuda_setup.copy_for_prompts(named, folder, kernels, model)
    file.write_bytes(b'{"checkpoint": "x", "findings": [{}], "format": 1}')  # another version's
    assert cuda_setup.copy_for_prompts(named, folder, kernels, model).choice.name == "fp8"


def test_a_prompts_single_row_is_no_decode_where_it_has_a_copy():
    def chunk(num_tokens, start, num_prompt=10):
        return SimpleNamespace(
            num_tokens=num_tokens, start=start, sequence=SimpleNamespace(num_prompt=num_prompt)
        )

    chunks = [chunk(1, 10), chunk(1, 14), chunk(1, 9), chunk(5, 0)]
    assert leading_decodes(chunks) == 3
    assert leading_decodes(chunks, prompts_apart=True) == 2


def test_decodes_that_are_timed_at_warm_up_are_decodes():
    probe = Probe(decodes=3, context=10, tokens=5)
    step = ProbeRun(None, None, submit=None, clock=None)._step(probe)
    assert leading_decodes(step.chunks, prompts_apart=True) == 3


def test_kv_of_one_copy_is_not_found_by_another():
    """As where a cache outlives a process: the first key names the weights."""
    caches = [BlockManager(8, 4, computed_by=name)._cache for name in ("same", "fp8")]
    keys = {cache._key("", [1, 2, 3, 4]) for cache in caches}
    assert len(keys) == 2
    # No salt of a client's makes one of the other's keys.
    assert caches[0]._key("fp8\0", [1, 2, 3, 4]) not in keys
