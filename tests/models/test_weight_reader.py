"""Quantised checkpoints compute what the plain ones they stand for compute, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.errors import ModelError
from tailrace.kernels.linear.float8 import Float8Weight, quantize_blocks, quantize_channels
from tailrace.kernels.linear.int4 import GroupInt4, quantize_groups
from tailrace.kernels.linear.weight import format_of, plain
from tailrace.kernels.select import select
from tailrace.models import weight_reader
from tailrace.models.checkpoint import Checkpoint
from tailrace.models.config import load_config
from tailrace.models.int4_packing import pack_words
from tailrace.models.loader import describe_weights, load_model
from tailrace.models.quantization import PackedInt4, chosen
from tailrace.models.weight_reader import WeightReader, float8_of_int4, stack
from tests.models.paged import PagedRun
from tests.support.quantized import (
    FLOAT8,
    TINY_FORMATS,
    awq,
    compressed_float8,
    float8,
    packed,
    plain_beside,
    write_quantized,
)
from tests.support.tiny import make_tiny_checkpoint, write_json

CPU = torch.device("cpu")
DOWN = "model.layers.0.mlp.down_proj"
OUTPUTS, INPUTS = 64, 96  # of DOWN


def logits(folder, **options):
    options = {"dtype": "float32"} | options
    model = load_model(folder, kernels=select("torch", 1), **options)
    return PagedRun(model).step({0: list(b"some text")})


def write(tmp_path, form, family="llama", **options):
    source = make_tiny_checkpoint(tmp_path / "source", family, num_hidden_layers=1)
    return write_quantized(source, tmp_path / "quantized", form, **options)


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def read(folder, module=DOWN, outputs=OUTPUTS, inputs=INPUTS, quant_type="auto"):
    file = folder / "config.json"
    layout = chosen(quant_type, load_config(folder).quantization, file).layout_of(module)
    return WeightReader(Checkpoint(folder), CPU).read(module, layout, outputs, inputs)


@pytest.mark.parametrize("name", TINY_FORMATS)
def test_a_layer_is_read_as_the_values_it_stands_for(tmp_path, name):
    folder = write(tmp_path, TINY_FORMATS[name]())
    expected = load_file(plain_beside(folder) / "model.safetensors")[f"{DOWN}.weight"]
    weight = read(folder)
    assert isinstance(weight, Float8Weight if "fp8" in name or "compressed" in name else GroupInt4)
    assert tuple(weight.shape) == (OUTPUTS, INPUTS)
    assert torch.equal(plain(weight), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", TINY_FORMATS)
def test_a_model_computes_as_its_plain_twin(tmp_path, name, family):
    folder = write(tmp_path, TINY_FORMATS[name](), family)
    expected = logits(plain_beside(folder))
    assert torch.equal(logits(folder), expected)
    assert not torch.equal(logits(tmp_path / "source"), expected)


@pytest.mark.parametrize("form", [awq(128), packed(128, symmetric=False), float8(blocks=True)])
def test_groups_and_blocks_of_128_in_layers_that_hold_several(tmp_path, form):
    """q, k and v of 256, 128 and 128 rows: their blocks stay blocks in the fused layer."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    source = make_tiny_checkpoint(tmp_path / "source", "qwen2", num_hidden_layers=1, **sizes)
    folder = write_quantized(source, tmp_path / "quantized", form)
    assert torch.equal(logits(folder), logits(plain_beside(folder)))


def test_layers_that_are_left_plain_are_read_so(tmp_path):
    up = "model.layers.0.mlp.up_proj"
    form = awq(32, modules_to_not_convert=["mlp.down_proj", "up_proj"])
    folder = write(tmp_path, form, plain=(DOWN, up))
    assert isinstance(read(folder), torch.Tensor)
    # gate_proj is in 4 bits and up_proj is not: the fused layer holds their values.
    assert torch.equal(logits(folder), logits(plain_beside(folder)))


def test_groups_of_compressed_tensors_may_differ_by_layer(tmp_path):
    """The mixed-precision format: attention in FP8, the MLP in 4 bits."""
    attention, mlp = compressed_float8("channel"), packed(32, symmetric=True)
    groups = {
        "group_0": attention.config["config_groups"]["group_0"]
        | {"targets": ["re:.*self_attn.*"], "format": "float-quantized"},
        "group_1": mlp.config["config_groups"]["group_0"]
        | {"targets": ["Linear"], "format": "pack-quantized"},
    }
    config = attention.config | {"format": "mixed-precision", "config_groups": groups}
    first = write(tmp_path, attention, layers="self_attn")
    (first / "config.json").unlink()
    stands_for = json.loads((plain_beside(first) / "config.json").read_text())
    write_json(first / "config.json", stands_for)
    second = write_quantized(first, tmp_path / "both", mlp, layers="mlp")
    write_json(second / "config.json", stands_for | {"quantization_config": config})
    beside = load_file(plain_beside(first) / "model.safetensors")
    edit(plain_beside(second), lambda tensors: _put_plain(tensors, beside))
    assert torch.equal(logits(second), logits(plain_beside(second)))


def _put_plain(tensors, beside):
    for name in [name for name in tensors if "self_attn" in name]:
        del tensors[name]
    tensors |= {name: value for name, value in beside.items() if "self_attn" in name}


def test_a_quantised_head_is_read(tmp_path):
    form = compressed_float8("channel", ignore=[])
    folder = write(tmp_path, form, "qwen2", layers=".weight", plain=("model.embed_tokens",))
    assert torch.equal(logits(folder), logits(plain_beside(folder)))


def test_what_weights_take_and_where_they_come_from_is_said(tmp_path):
    folder = write(tmp_path, awq(32))
    model = load_model(folder, dtype="float16", kernels=select("torch", 1))
    assert describe_weights(model) == (
        "0 MiB of weights: 5 x fbgemm float16; read from awq, 4 bits in groups of 32"
    )
    source = load_model(tmp_path / "source", dtype="float16", kernels=select("torch", 1))
    assert describe_weights(source) == "0 MiB of weights: 5 x fbgemm float16"


def test_float32_scales_that_float16_holds_are_read(tmp_path):
    folder = write(tmp_path, packed(32, symmetric=False, dtype=torch.float16))
    name = f"{DOWN}.weight_scale"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].float()}))
    assert read(folder).scales.dtype == torch.float16
    assert torch.equal(logits(folder), logits(plain_beside(folder)))


def test_float16_holds_the_values_rounded_once(tmp_path):
    folder = write(tmp_path, awq(32))
    half = logits(folder, dtype="float16")
    assert torch.equal(half, logits(plain_beside(folder), dtype="float16"))


def test_rows_and_columns_that_fill_no_word(tmp_path):
    """compressed-tensors pads the last word: 20 inputs in three words, 10 zero points in two."""
    codes, zeros = (torch.randint(0, 16, shape).to(torch.uint8) for shape in ((10, 20), (10, 1)))
    scales = torch.rand(10, 1).half()
    tensors = {
        "x.weight_packed": pack_words(codes),
        "x.weight_scale": scales,
        "x.weight_shape": torch.tensor([10, 20]),
        "x.weight_zero_point": pack_words(zeros.t()).t().contiguous(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    layout = PackedInt4(-1, symmetric=False)
    weight = WeightReader(Checkpoint(tmp_path), CPU).read("x", layout, 10, 20)
    expected = (codes.float() - zeros.float()) * scales.float()
    assert torch.equal(plain(weight), expected)


class TestStack:
    """Fused layers keep their format where one form holds all parts."""

    def test_4_bits_stay_4_bits(self):
        parts = [quantize_groups(torch.randn(n, 64), 32) for n in (8, 24)]
        whole = stack(parts)
        assert isinstance(whole, GroupInt4)
        assert torch.equal(plain(whole), torch.cat([plain(part) for part in parts]))

    def test_scales_of_whole_tensors_become_scales_of_rows_where_they_differ(self):
        weights = [torch.randn(n, 64) * n for n in (8, 24)]
        parts = [one_scale(weight, weight.abs().max() / 448) for weight in weights]
        whole = stack(parts)
        assert whole.scheme == "channel"
        assert torch.equal(plain(whole), torch.cat([plain(part) for part in parts]))

    def test_equal_scales_of_whole_tensors_stay_one(self):
        parts = [one_scale(torch.randn(n, 64), torch.tensor(0.01)) for n in (8, 24)]
        whole = stack(parts)
        assert (whole.scheme, whole.scales.numel()) == ("tensor", 1)
        assert torch.equal(plain(whole), torch.cat([plain(part) for part in parts]))

    def test_blocks_stay_blocks_where_none_lies_across_a_seam(self):
        parts = [quantize_blocks(torch.randn(n, 200)) for n in (256, 40)]
        whole = stack(parts)
        assert whole.scheme == "block128"
        assert torch.equal(plain(whole), torch.cat([plain(part) for part in parts]))

    @pytest.mark.parametrize(
        "parts",
        [
            (
                lambda: quantize_blocks(torch.randn(40, 64)),
                lambda: quantize_blocks(torch.randn(40, 64)),
            ),
            (
                lambda: quantize_groups(torch.randn(8, 64), 32),
                lambda: quantize_groups(torch.randn(8, 64), 64),
            ),
            (lambda: quantize_groups(torch.randn(8, 64), 32), lambda: torch.randn(8, 64)),
            (
                lambda: quantize_channels(torch.randn(8, 64)),
                lambda: quantize_blocks(torch.randn(8, 64)),
            ),
        ],
        ids=["seam", "groups", "plain", "schemes"],
    )
    def test_other_mixtures_become_their_values(self, parts):
        made = [part() for part in parts]
        whole = stack(made)
        assert format_of(whole) == "plain"
        assert torch.equal(whole, torch.cat([plain(part) for part in made]))


def one_scale(weight, scale):
    values = (weight / scale).clamp(-448, 448).to(FLOAT8)
    return Float8Weight(values, scale.reshape(1), "tensor")


@pytest.mark.parametrize("method", ["awq", "packed", "fp8-block", "compressed-channel"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_dummies_of_a_quantised_checkpoint_need_its_config_alone(tmp_path, method, family):
    folder = write(tmp_path, TINY_FORMATS[method](), family)
    (folder / "model.safetensors").unlink()
    first = logits(folder, load_format="dummy", seed=3)
    assert first.isfinite().all()
    assert torch.equal(first, logits(folder, load_format="dummy", seed=3))
    unrounded = logits(plain_beside(folder), load_format="dummy", seed=3)
    assert not torch.equal(first, unrounded)
    assert (first - unrounded).abs().max() < 0.5 * unrounded.abs().max()


def test_plain_weights_are_rounded_to_fp8_where_asked(tmp_path):
    source = make_tiny_checkpoint(tmp_path / "source", "qwen2")
    got = logits(source, quant_type="fp8")
    exact = logits(source)
    assert not torch.equal(got, exact)
    tensors = load_file(source / "model.safetensors")
    for name, value in tensors.items():
        if "_proj.weight" in name:
            tensors[name] = plain(quantize_channels(value))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert torch.equal(got, logits(source))


def same_float8(found, expected):
    assert isinstance(found, Float8Weight)
    assert found.scheme == expected.scheme
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)


FOUR_BITS = [name for name in TINY_FORMATS if name.startswith(("awq", "packed"))]


@pytest.mark.parametrize("name", FOUR_BITS)
def test_4_bits_become_fp8_by_way_of_their_values(tmp_path, name):
    folder = write(tmp_path, TINY_FORMATS[name](), "qwen2")
    values = load_file(plain_beside(folder) / "model.safetensors")[f"{DOWN}.weight"]
    same_float8(read(folder, quant_type="fp8"), quantize_channels(values))
    got = logits(folder, quant_type="fp8")
    assert torch.equal(got, logits(plain_beside(folder), quant_type="fp8"))
    assert not torch.equal(got, logits(folder))


@pytest.mark.parametrize("outputs", [1, 7, 24])
def test_a_weight_is_rounded_in_bands_as_if_it_were_whole(monkeypatch, outputs):
    monkeypatch.setattr(weight_reader, "_BAND_VALUES", 7 * 64)
    weight = quantize_groups(torch.randn(outputs, 64), 32)
    same_float8(float8_of_int4(weight), quantize_channels(plain(weight)))


def test_a_band_is_an_output_where_there_are_many_inputs(monkeypatch):
    monkeypatch.setattr(weight_reader, "_BAND_VALUES", 5)
    weight = quantize_groups(torch.randn(3, 64), 64)
    same_float8(float8_of_int4(weight), quantize_channels(plain(weight)))


@pytest.mark.parametrize("form", [awq(32), packed(32, symmetric=True)], ids=["awq", "packed"])
def test_every_layer_is_packed_in_fp8_and_the_head_plain(tmp_path, monkeypatch, form):
    """q, k and v are stacked in FP8; what the checkpoint leaves plain is rounded like them."""
    folder = write(tmp_path, form, plain=(DOWN,))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"modules_to_not_convert": ["down_proj"]}
    config["quantization_config"] |= {"ignore": ["lm_head", DOWN]}
    write_json(folder / "config.json", config)
    values = load_file(plain_beside(folder) / "model.safetensors")
    kernels, packed_weights = select("torch", 1), []
    pack = type(kernels).pack_linear

    def recording(self, weight, *rest):
        packed_weights.append(weight)
        return pack(self, weight, *rest)

    monkeypatch.setattr(type(kernels), "pack_linear", recording)
    model = load_model(folder, dtype="float16", kernels=kernels, quant_type="fp8")
    head, *layers = packed_weights
    parts = [("q", "k", "v"), ("o",), ("gate", "up"), ("down",)]
    assert len(layers) == len(parts)
    for found, names in zip(layers, parts, strict=True):
        whole = torch.cat(
            [value for part in names for name, value in values.items() if f".{part}_proj.w" in name]
        )
        same_float8(found, quantize_channels(whole))
    assert isinstance(head, torch.Tensor)
    said = "4 bits in groups of 32, rounded to FP8"
    assert describe_weights(model).endswith(f"; read from {form.config['quant_method']}, {said}")


@pytest.mark.parametrize("name", ["compressed-channel", "fp8-block"])
def test_fp8_checkpoints_are_what_they_were_where_fp8_is_asked_for(tmp_path, name):
    folder = write(tmp_path, TINY_FORMATS[name]())
    assert torch.equal(logits(folder, quant_type="fp8"), logits(folder))


def test_dummies_of_4_bits_in_fp8_are_those_of_a_plain_config(tmp_path):
    folder = write(tmp_path, awq(32))
    (folder / "model.safetensors").unlink()
    dummies = {"load_format": "dummy", "seed": 3, "quant_type": "fp8"}
    assert torch.equal(logits(folder, **dummies), logits(plain_beside(folder), **dummies))


def take(name):
    return lambda tensors: tensors.pop(f"{DOWN}.{name}")


def put(name, value):
    return lambda tensors: tensors.update({f"{DOWN}.{name}": value})


def words(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (awq(32), take("qzeros"), r"down_proj\.qzeros \[3, 8\] is missing"),
        (
            awq(32),
            put("qweight", words(96, 9)),
            r"safetensors: tensor .*down_proj\.qweight has shape \[96, 9\], expected \[96, 8\]",
        ),
        (
            awq(32),
            put("qweight", torch.zeros(96, 8)),
            r"down_proj\.qweight has type F32; supported are I32",
        ),
        (
            awq(32),
            put("scales", torch.full((3, 64), 0.1)),
            r"down_proj\.scales holds float32 scales that float16 does not hold",
        ),
        (
            awq(32),
            put("scales", torch.full((3, 64), torch.inf).half()),
            r"down_proj\.scales holds scales that are no finite",
        ),
        (
            awq(32, group_size=40),
            lambda tensors: None,
            r"_proj\.qweight: (64|96) inputs do not divide into groups of 40",
        ),
        (
            awq(32),
            put("weight", torch.zeros(64, 96)),
            r"no place in this architecture: model\.layers\.0\.mlp\.down_proj\.weight",
        ),
        (
            packed(32, symmetric=False),
            take("weight_zero_point"),
            r"down_proj\.weight_zero_point \[8, 3\] is missing",
        ),
        (
            packed(32, symmetric=False),
            put("weight_shape", torch.tensor([64, 95])),
            r"down_proj\.weight_shape says \[64, 95\], expected \[64, 96\]",
        ),
        (
            packed(32, symmetric=True),
            put("weight_g_idx", words(96)),
            r"down_proj\.weight_g_idx: inputs in another order",
        ),
        (
            packed(32, symmetric=True),
            put("weight_scale", torch.zeros(64, 2).half()),
            r"down_proj\.weight_scale has shape \[64, 2\], expected \[64, 3\]",
        ),
        (
            float8(blocks=True),
            take("weight_scale_inv"),
            r"down_proj\.weight_scale_inv \[1, 1\] is missing",
        ),
        (
            float8(blocks=False),
            put("weight", torch.zeros(64, 96)),
            r"down_proj\.weight has type F32; supported are F8_E4M3",
        ),
        (
            float8(blocks=False),
            put("weight_scale", torch.zeros(64)),
            r"down_proj\.weight_scale has shape \[64\], expected \[1\] or \[\]",
        ),
        (
            float8(blocks=False, static=True),
            take("input_scale"),
            r"down_proj\.input_scale \[1\] is missing",
        ),
        (
            float8(blocks=False),
            put("input_scale", torch.ones(1)),
            r"no place in this architecture: .*input_scale",
        ),
        (
            compressed_float8("channel"),
            put("weight_scale", torch.zeros(1)),
            r"weight_scale has shape \[1\], expected \[64, 1\] or \[64\]",
        ),
    ],
)
def test_what_does_not_fit_the_layout_is_named_with_its_file(tmp_path, form, change, message):
    folder = write(tmp_path, form)
    edit(folder, change)
    with pytest.raises(ModelError, match=message) as caught:
        logits(folder)
    assert str(folder) in str(caught.value)


def test_outputs_that_fill_no_word_are_named(tmp_path):
    folder = write(tmp_path, awq(32))
    with pytest.raises(ModelError, match=r"down_proj\.qweight: 60 outputs are no multiple of 8"):
        read(folder, outputs=60)
