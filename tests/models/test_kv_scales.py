from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.errors import ModelError
from tailrace.kernels.kv_scales import KVScales
from tailrace.kernels.torch_kernels import TorchKernels
from tailrace.models.kv_scales import read_kv_scales
from tailrace.models.loader import load_model
from tests.support.tiny import make_tiny_checkpoint

AT = "model.layers.{}.self_attn."
SPELLINGS = [
    (AT + "k_scale", AT + "v_scale"),
    (AT + "k_proj.k_scale", AT + "v_proj.v_scale"),
    (AT + "k_proj.output_scale", AT + "v_proj.output_scale"),
]


def add(folder, tensors):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    return make_tiny_checkpoint(tmp_path, "llama")


@pytest.mark.parametrize("spelling", SPELLINGS, ids=["compressed-tensors", "modelopt", "autofp8"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tools_scales_are_found_layer_by_layer(folder, spelling, shape, dtype):
    values = {}
    for layer in range(2):
        for which, name in enumerate(spelling):
            number = 0.25 + layer + 0.5 * which
            values[name.format(layer)] = torch.full(shape, number, dtype=dtype)
    add(folder, values)
    assert read_kv_scales(folder, 2) == [KVScales(0.25, 0.75), KVScales(1.25, 1.75)]


def test_a_checkpoint_without_scales_has_none(folder):
    assert read_kv_scales(folder, 2) is None


def test_a_checkpoint_with_scales_is_served_without_them_too(folder):
    names = [name.format(layer) for name in SPELLINGS[0] for layer in range(2)]
    add(folder, {name: torch.ones(1) for name in names} | {AT.format(0) + "q_scale": torch.ones(1)})
    load_model(folder, dtype="float32", kernels=TorchKernels())


def test_a_layer_whose_scale_is_missing_is_named(folder):
    add(folder, {name.format(0): torch.ones(1) for name in SPELLINGS[0]})
    add(folder, {SPELLINGS[0][0].format(1): torch.ones(1)})
    with pytest.raises(ModelError, match="some layers only; missing: layer 1's v"):
        read_kv_scales(folder, 2)


def test_a_scale_that_cannot_be_is_refused_by_name(folder):
    add(folder, {name.format(layer): torch.ones(1) for name in SPELLINGS[0] for layer in range(2)})
    add(folder, {"model.layers.1.self_attn.v_scale": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_scale: KV v_scale 0\.0"):
        read_kv_scales(folder, 2)
    add(folder, {"model.layers.1.self_attn.v_scale": torch.ones(4)})
    with pytest.raises(ModelError, match=r"v_scale has shape \[4\], expected one element"):
        read_kv_scales(folder, 2)


def set_scheme(folder, **scheme):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", **scheme},
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_scales_that_the_config_promises_must_be_there(folder):
    set_scheme(folder, dynamic=True)
    assert read_kv_scales(folder, 2) is None
    set_scheme(folder, dynamic=False)
    with pytest.raises(
        ModelError, match=r"promises static scales, .*layers\.0\.self_attn\.k_scale"
    ):
        read_kv_scales(folder, 2)
    add(folder, {name.format(layer): torch.ones(1) for name in SPELLINGS[0] for layer in range(2)})
    assert read_kv_scales(folder, 2) == [KVScales(1.0, 1.0)] * 2


@pytest.mark.parametrize("other", [{"type": "int"}, {"num_bits": 4}, {"strategy": "attn_head"}])
def test_a_scheme_of_another_kind_is_refused(folder, other):
    set_scheme(folder, **other)
    with pytest.raises(ModelError, match="kv_cache_scheme .* is not supported"):
        read_kv_scales(folder, 2)
