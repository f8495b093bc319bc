"""KV scales found at start, and an engine whose KV is float8, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.config import EngineConfig
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.cuda_setup import kv_dtype_of
from tailrace.engine.device_kv import kv_bytes_per_token
from tailrace.engine.kv_calibration import CALIBRATION_TEXT, HEADROOM, calibrate, find_scales
from tailrace.engine.runner import Runner
from tailrace.engine.sampler import Sampler
from tailrace.errors import ConfigError, EngineError, ModelError
from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.linear.float8 import FLOAT8, FLOAT8_MAX
from tailrace.kernels.torch_kernels import TorchKernels
from tailrace.kernels.triton_kernels import TritonKernels
from tailrace.models.loader import load_model
from tests.engine.test_cuda_runner import (
    BLOCK,
    BLOCKS,
    CPU,
    SLOTS,
    Framed,
    generate,
    make_requests,
    make_runner,
)
from tests.models.paged import PagedRun
from tests.support.interpreter import exact_float8, quietly
from tests.support.tiny import make_tiny_checkpoint


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    exact_float8(monkeypatch)
    with quietly():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=2, max_position_embeddings=128
    )


@pytest.fixture(scope="module")
def kernels():
    return TritonKernels(CPU, "float32")


@pytest.fixture(scope="module")
def model(folder, kernels):
    return load_model(folder, dtype="float32", kernels=kernels)


def with_tensors(folder, source, tensors):
    make_tiny_checkpoint(folder, "qwen3", num_hidden_layers=2, max_position_embeddings=128)
    save_file({**load_file(source / "model.safetensors"), **tensors}, folder / "model.safetensors")
    return folder


def test_scales_hold_twice_what_the_text_reaches(folder, model, kernels):
    ids = [(7 * i) % 256 for i in range(37)]
    found = calibrate(model, kernels, ids)
    run = PagedRun(load_model(folder, dtype="float32", kernels=TorchKernels()))
    run.step({0: ids})
    for scales, pair in zip(found, run.caches, strict=True):
        peaks = [float(cache.nan_to_num(0.0).abs().max()) for cache in pair]
        assert scales.k == pytest.approx(HEADROOM * peaks[0] / FLOAT8_MAX, rel=1e-5)
        assert scales.v == pytest.approx(HEADROOM * peaks[1] / FLOAT8_MAX, rel=1e-5)


def test_a_checkpoint_without_scales_is_calibrated_on_its_own_tokens(folder, model, kernels):
    found = find_scales(model, kernels, folder, "auto")
    assert len(CALIBRATION_TEXT.encode()) > 128
    assert found.describe().startswith("calibrated on 128 tokens of the built-in text")
    assert len(found.scales) == 2
    assert all(scales != UNSCALED for scales in found.scales)
    assert found.listed().count("/") == 2


def test_dummy_weights_are_calibrated_on_random_ids_that_the_source_names(model, kernels, tmp_path):
    found = find_scales(model, kernels, tmp_path, "dummy")
    assert "random ids (dummy weights)" in found.source
    assert len(found.scales) == 2


def test_the_checkpoints_own_scales_win(folder, model, kernels, tmp_path):
    at = "model.layers.{}.self_attn.{}_scale"
    numbers = {at.format(i, which): torch.tensor(i + 0.5) for i in range(2) for which in "kv"}
    found = find_scales(model, kernels, with_tensors(tmp_path, folder, numbers), "auto")
    assert found.scales == [KVScales(0.5, 0.5), KVScales(1.5, 1.5)]
    assert found.source == "the checkpoint's"


def test_a_layer_without_a_value_to_scale_by_is_an_error(folder, kernels, tmp_path):
    dead = {"model.layers.1.self_attn.v_proj.weight": torch.zeros(64, 64)}
    broken = load_model(with_tensors(tmp_path, folder, dead), dtype="float32", kernels=kernels)
    with pytest.raises(ModelError, match="layer 1's values reach 0 .*--kv-cache-dtype auto"):
        calibrate(broken, kernels, [1, 2, 3])


class Scaled:
    """A model that is always given the same KV scales."""

    def __init__(self, model, scales):
        self.config, self.logits = model.config, model.logits
        self._model, self._scales = model, scales

    def forward(self, token_ids, batch, kv_caches):
        return self._model.forward(token_ids, batch, kv_caches, self._scales)


def reference_runner(folder, scales):
    """The CPU's runner over the reference kernels, its cache in float8."""
    model = Scaled(load_model(folder, dtype="float32", kernels=TorchKernels()), scales)
    sampler = Sampler(SLOTS, 259, [258], 0)
    runner = Runner(model, sampler, num_blocks=BLOCKS, block_size=BLOCK, num_slots=SLOTS)
    runner.kv_caches = [
        tuple(torch.full_like(cache, float("nan")).to(FLOAT8) for cache in pair)
        for pair in runner.kv_caches
    ]
    return runner


def float8_runner(model, kernels, scales, kind=CudaRunner):
    runner = make_runner(model, kernels, kind, kv_dtype=FLOAT8, kv_scales=scales)
    for pair in runner.kv_caches:
        for cache in pair:
            cache.view(torch.uint8).fill_(0x7F)  # NaN
    return runner


@pytest.mark.parametrize(
    "kind", [CudaRunner, pytest.param(Framed, marks=pytest.mark.slow)], ids=["own size", "framed"]
)
def test_an_engine_over_float8_kv_gives_the_references_tokens(folder, model, kernels, kind):
    scales = calibrate(model, kernels, list(range(128)))
    requests = make_requests(temperature=0.0)[1:5]
    expected = generate(reference_runner(folder, scales), requests)
    assert generate(float8_runner(model, kernels, scales, kind), requests) == expected


def test_a_token_takes_half_of_bfloat16s_bytes(model):
    assert 2 * kv_bytes_per_token(model, FLOAT8) == kv_bytes_per_token(model, torch.bfloat16)


def test_a_float8_cache_without_scales_is_an_error(model, kernels):
    with pytest.raises(EngineError, match="KV scales go with a float8 cache"):
        float8_runner(model, kernels, None)


def test_a_gpu_without_float8_is_refused_by_its_capability(kernels, monkeypatch):
    config = EngineConfig(gpus=(0,), kv_cache_dtype="fp8")
    assert kv_dtype_of(config, kernels) == FLOAT8
    assert kv_dtype_of(EngineConfig(gpus=(0,)), kernels) == kernels.dtype
    monkeypatch.setattr(kernels, "capability", (8, 0))
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8: .* 8\.0, .* needs 8\.9 or later"):
        kv_dtype_of(config, kernels)
