"""Repacking moves numbers and changes none."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.errors import ModelError
from tailrace.kernels.select import select
from tailrace.models.awq_export import export_awq
from tailrace.models.checkpoint import Checkpoint
from tailrace.models.config import load_config
from tailrace.models.loader import load_model
from tailrace.models.quantization import AwqInt4
from tailrace.models.weight_reader import WeightReader
from tests.models.paged import PagedRun
from tests.support.quantized import (
    AWQ_ORDER,
    compressed_float8,
    packed,
    plain_beside,
    words_along_columns,
    write_quantized,
)
from tests.support.tiny import make_tiny_checkpoint, write_json

DOWN = "model.layers.0.mlp.down_proj"


def logits(folder):
    model = load_model(folder, dtype="float32", kernels=select("torch", 1))
    return PagedRun(model).step({0: list(b"some text")})


def written(tmp_path, form, **options):
    source = make_tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)
    return write_quantized(source, tmp_path / "packed", form, **options)


def read(folder):
    layout = load_config(folder).quantization.layout_of(DOWN)
    return WeightReader(Checkpoint(folder), torch.device("cpu")).read(DOWN, layout, 64, 96)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_classic_layout_holds_the_same_numbers(tmp_path, symmetric, dtype):
    folder = written(tmp_path, packed(32, symmetric=symmetric, dtype=dtype))
    export_awq(folder, tmp_path / "awq")
    before, after = read(folder), read(tmp_path / "awq")
    assert torch.equal(before.codes, after.codes)
    assert torch.equal(before.zeros, after.zeros)
    assert torch.equal(before.scales.float(), after.scales.float())
    assert torch.equal(logits(tmp_path / "awq"), logits(plain_beside(folder)))
    config = load_config(tmp_path / "awq")
    assert config.quantization.method == "awq"
    assert config.quantization.layout_of(DOWN) == AwqInt4(32)
    assert (tmp_path / "awq" / "tokenizer.json").exists()


def test_the_words_are_autoawqs(tmp_path):
    folder = written(tmp_path, packed(32, symmetric=False, dtype=torch.float16))
    export_awq(folder, tmp_path / "awq")
    tensors = load_file(tmp_path / "awq" / "model.safetensors")
    weight = read(folder)
    codes, zeros = weight.unpacked().t().long(), weight.zeros.t().long()
    assert torch.equal(tensors[f"{DOWN}.qweight"], words_along_columns(codes, AWQ_ORDER))
    assert torch.equal(tensors[f"{DOWN}.qzeros"], words_along_columns(zeros, AWQ_ORDER))
    assert tensors[f"{DOWN}.scales"].dtype == torch.float16
    assert not [name for name in tensors if "weight_" in name]


def test_layers_that_were_plain_stay_plain_and_are_named(tmp_path):
    form = packed(32, symmetric=True, ignore=["lm_head", DOWN])
    folder = written(tmp_path, form, plain=(DOWN,))
    export_awq(folder, tmp_path / "awq")
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == [DOWN]
    assert torch.equal(logits(tmp_path / "awq"), logits(plain_beside(folder)))


def test_shards_stay_shards_even_where_a_layer_lies_across_two(tmp_path):
    folder = written(tmp_path, packed(32, symmetric=False))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for name, value in tensors.items():
        is_packed = name.endswith("weight_packed") or "norm" in name
        parts["a.safetensors" if is_packed else "b.safetensors"][name] = value
    for file, part in parts.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    export_awq(folder, tmp_path / "awq")
    assert sorted(file.name for file in (tmp_path / "awq").glob("*.safetensors")) == list(parts)
    assert torch.equal(logits(tmp_path / "awq"), logits(plain_beside(folder)))


def test_scales_that_float16_does_not_hold_are_named(tmp_path):
    folder = written(tmp_path, packed(32, symmetric=True))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.weight_scale"][0, 0] = 1.5e-9
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"down_proj\.weight_scale: .*quantise the model in float16"
    ):
        export_awq(folder, tmp_path / "awq")


def test_a_head_in_4_bits_is_refused(tmp_path):
    form = packed(32, symmetric=True, ignore=[])
    source = make_tiny_checkpoint(tmp_path / "source", "qwen2", num_hidden_layers=1)
    folder = write_quantized(
        source, tmp_path / "packed", form, layers=".weight", plain=("model.embed_tokens",)
    )
    with pytest.raises(ModelError, match=r"lm_head\.weight_packed: AutoAWQ's layout"):
        export_awq(folder, tmp_path / "awq")


@pytest.mark.parametrize("form", [None, compressed_float8("channel")], ids=["plain", "fp8"])
def test_what_is_not_packed_in_4_bits_is_refused(tmp_path, form):
    source = make_tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)
    folder = source if form is None else write_quantized(source, tmp_path / "q", form)
    with pytest.raises(ModelError, match="--format awq-gemm needs compressed-tensors'"):
        export_awq(folder, tmp_path / "awq")
