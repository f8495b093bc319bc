"""The GPU runner over quantised weights, under Triton's interpreter: the tokens of plain ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tailrace.config import EngineConfig
from tailrace.engine.cuda_setup import check_fp8_activations
from tailrace.errors import ConfigError
from tailrace.kernels.triton_kernels import TritonKernels, UnpackedTritonKernels
from tailrace.models.loader import load_model
from tests.engine.test_cuda_runner import (
    CPU,
    generate,
    make_requests,
    make_runner,
)
from tests.support.interpreter import exact_float8, quietly
from tests.support.tiny import make_tiny_checkpoint

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
BLOCKS_OF_FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
ROUNDS_ALL = EngineConfig(gpus=(0,), fp8_activations="all")
FORMATS = {"awq": AWQ, "fp8 blocks": BLOCKS_OF_FP8}
NAMES = {
    "awq": "Triton 4 bits in groups of 64",
    "fp8 blocks": "FP8 by block128, many rows by Triton",
}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    exact_float8(monkeypatch)
    with quietly():
        yield


def loaded(folder, kernels, quant_type="auto"):
    """Return a model of seeded weights, rounded to the format that config.json names."""
    options = {"load_format": "dummy", "quant_type": quant_type, "seed": 3}
    return load_model(folder, dtype="float32", kernels=kernels, **options)


def folder_of(path, name):
    folder = make_tiny_checkpoint(
        path, "llama", num_hidden_layers=1, intermediate_size=256, head_dim=32,
        num_key_value_heads=4,  # so that stacked projections keep to blocks of 128
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FORMATS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_layers_give_the_tokens_of_the_weights_they_stand_for(name, tmp_path):
    folder = folder_of(tmp_path, name)
    found = []
    for kernels in (TritonKernels(CPU, "float32"), UnpackedTritonKernels(CPU, "float32")):
        model = loaded(folder, kernels)
        held = NAMES[name] if type(kernels) is TritonKernels else "cuBLAS float32"
        assert model.linear_names[held] >= 4
        found.append(generate(make_runner(model, kernels), make_requests(temperature=0.0)[1:4]))
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "quant_type"), [("fp8 blocks", "auto"), ("awq", "fp8")])
def test_with_all_rows_rounded_tokens_are_the_same_alone_and_in_company(name, quant_type, tmp_path):
    kernels = TritonKernels(CPU, "float32", rounds_all=True)
    model = loaded(folder_of(tmp_path, name), kernels, quant_type)
    check_fp8_activations(ROUNDS_ALL, model)
    requests = make_requests(temperature=0.0)[1:4]
    together = generate(make_runner(model, kernels), requests)
    alone = {}
    for request in requests:
        alone |= generate(make_runner(model, kernels), [request])
    assert together == alone
    assert len({tuple(tokens) for tokens in together.values()}) > 1


def test_rounding_all_rows_without_a_layer_in_fp8_is_refused(tmp_path):
    model = loaded(folder_of(tmp_path, "awq"), TritonKernels(CPU, "float32", rounds_all=True))
    with pytest.raises(
        ConfigError, match="--fp8-activations all: no layer multiplies in FP8 .*4 b"
    ):
        check_fp8_activations(ROUNDS_ALL, model)
    check_fp8_activations(replace(ROUNDS_ALL, fp8_activations="many"), model)
