from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.models.quantization import (
    ONLINE_FLOAT8,
    AwqInt4,
    Float8OfInt4,
    PackedInt4,
    RoundedFloat8,
    RoundedInt4,
    Rule,
    StoredFloat8,
    chosen,
    read_quantization,
)
from tests.support.quantized import awq, compressed_float8, float8, packed

FILE = Path("m/config.json")
UP = "model.layers.10.mlp.up_proj"


def layout(form, module=UP):
    return read_quantization(form.config, FILE).layout_of(module)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (awq(64), AwqInt4(64)),
        (awq(-1), AwqInt4(-1)),
        (awq(128, version="GEMM"), AwqInt4(128)),
        (packed(64, symmetric=False), PackedInt4(64, symmetric=False)),
        (packed(-1, symmetric=True), PackedInt4(-1, symmetric=True)),
        (compressed_float8("tensor"), StoredFloat8("tensor", "weight_scale", False)),
        (compressed_float8("channel"), StoredFloat8("channel", "weight_scale", False)),
        (compressed_float8("block"), StoredFloat8("block128", "weight_scale", False)),
        (compressed_float8("tensor", static=True), StoredFloat8("tensor", "weight_scale", True)),
        (float8(blocks=True), StoredFloat8("block128", "weight_scale_inv", False)),
        (float8(blocks=False), StoredFloat8("tensor", "weight_scale", False)),
        (float8(blocks=False, static=True), StoredFloat8("tensor", "weight_scale", True)),
    ],
)
def test_the_public_configs_are_read(form, expected):
    assert layout(form) == expected


def test_the_fields_that_llm_compressor_leaves_empty_are_no_obstacle():
    empty = {"sparsity_config": {}, "transform_config": {}, "kv_cache_scheme": None}
    assert layout(packed(64, symmetric=True, version="0.19.0", **empty)) == PackedInt4(64, True)


@pytest.mark.parametrize("form", [awq(64), packed(64, symmetric=True), float8(blocks=True)])
def test_the_head_is_plain(form):
    assert layout(form, "lm_head") is None


def test_awqs_exceptions_are_whole_parts_of_a_name():
    told = read_quantization(awq(64, modules_to_not_convert=["layers.1", "gate"]).config, FILE)
    plain = [
        "model.layers.1.mlp.up_proj",
        "model.layers.3.mlp.gate",
    ]
    assert all(told.layout_of(name) is None for name in plain)
    # layers.1 is not layers.10, and gate is not gate_proj.
    others = [UP, "model.layers.0.mlp.gate_proj", "model.layers.21.mlp.up_proj"]
    assert all(told.layout_of(name) == AwqInt4(64) for name in others)


def test_fp8s_exceptions_go_by_two_names():
    names = {"ignored_layers": [UP], "modules_to_not_convert": ["model.layers.0"]}
    told = read_quantization(float8(blocks=True, **names).config, FILE)
    assert told.layout_of(UP) is None
    assert told.layout_of("model.layers.0.mlp.up_proj") is None
    assert told.layout_of("model.layers.1.mlp.up_proj") is not None


def test_compressed_tensors_ignores_by_name_and_by_pattern():
    form = packed(64, symmetric=True, ignore=[UP, "re:.*self_attn.*"])
    assert layout(form) is None
    assert layout(form, "model.layers.3.self_attn.q_proj") is None
    assert layout(form, "model.layers.3.mlp.up_proj") is not None
    assert layout(form, "lm_head") is not None


def test_of_several_groups_a_name_comes_before_a_pattern_and_that_before_the_class():
    def group(form, target):
        return form.config["config_groups"]["group_0"] | {"targets": [target]}

    config = packed(64, symmetric=True).config | {
        "config_groups": {
            "all": group(packed(64, symmetric=True), "Linear"),
            "some": group(packed(128, symmetric=True), "re:.*mlp.*"),
            "one": group(packed(32, symmetric=True), UP),
        }
    }
    told = read_quantization(config, FILE)
    groups = [
        told.layout_of(name).group
        for name in (UP, "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj")
    ]
    assert groups == [32, 128, 64]


def edited(form, *path, **values):
    """Return the form's config with values put in at a path of keys."""
    config = dict(form.config)
    inner = config
    for key in path:
        inner[key] = dict(inner[key])
        inner = inner[key]
    inner.update(values)
    return config


FOUR, EIGHT = packed(64, symmetric=True), compressed_float8("channel")
GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")
INPUTS = (*GROUP, "input_activations")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
        ({"quant_method": "compressed-tensor"}, "did you mean 'compressed-tensors'"),
        ({}, "quant_method None is not supported"),
        ({"quant_method": ["awq"]}, "is not supported"),
        (edited(awq(64), bits=8), "bits is 8, only 4"),
        (edited(awq(64), bits="four"), r"Expected `int`, got `str` - at `\$.bits`"),
        (edited(awq(64), version="gemv"), "version 'gemv'"),
        (edited(awq(64), zero_point=False), "zero_point false"),
        (edited(awq(64), group_size=12), "group_size 12 must be -1 or a multiple of 8"),
        (edited(awq(64), group_size=0), "group_size 0"),
        (edited(float8(blocks=True), weight_block_size=[64, 64]), r"\[64, 64\] is not supported"),
        (edited(float8(blocks=True), activation_scheme="static"), "static does not go with blocks"),
        (edited(float8(blocks=False), fmt="e5m2"), "fmt 'e5m2'"),
        (edited(float8(blocks=False), activation_scheme="x"), "activation_scheme 'x'"),
        (edited(FOUR, format="int-quantized"), "group_0: format 'int-quantized'"),
        (edited(FOUR, format="marlin-24"), "format 'marlin-24' is not supported"),
        (edited(FOUR, quantization_status="frozen"), "quantization_status 'frozen'"),
        (edited(FOUR, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not"),
        (edited(FOUR, transform_config={"config_groups": {"R1": {}}}), "transform_config is not"),
        (edited(FOUR, config_groups={}), "config_groups is empty"),
        (edited(FOUR, *GROUP, targets=[]), "targets is empty"),
        (edited(FOUR, *GROUP, targets=["re:("]), "no regular expression"),
        (edited(FOUR, ignore=["re:*"]), "no regular expression"),
        (edited(FOUR, *GROUP, weights=None), "no weights are described"),
        (edited(FOUR, *WEIGHTS, num_bits=8), "'int' in 8 bits"),
        (edited(FOUR, *WEIGHTS, actorder="group"), "actorder 'group'"),
        (edited(FOUR, *WEIGHTS, strategy="tensor"), "strategy 'tensor'"),
        (edited(FOUR, *WEIGHTS, group_size=None), "group_size None"),
        (edited(FOUR, *GROUP, input_activations={"num_bits": 8}), "beside 4-bit weights"),
        (edited(FOUR, *GROUP, output_activations={"num_bits": 8}), "output_activations"),
        (edited(EIGHT, *WEIGHTS, num_bits=4), "'float' in 4 bits"),
        (edited(EIGHT, *WEIGHTS, strategy="group"), "strategy 'group'"),
        (edited(EIGHT, *WEIGHTS, strategy="block"), "block_structure None"),
        (edited(EIGHT, *INPUTS, num_bits=4), "input_activations of type 'float' in 4 bits"),
        (edited(EIGHT, *INPUTS, dynamic=False), "static input_activations of strategy 'token'"),
    ],
)
def test_what_is_not_supported_is_named_with_the_file(config, message):
    with pytest.raises(ModelError, match=message) as caught:
        read_quantization(config, FILE)
    assert "config.json" in str(caught.value)


def stored(form):
    return read_quantization(form.config, FILE)


AWQ, PACKED, FP8 = (stored(f) for f in (awq(64), FOUR, compressed_float8("channel")))


@pytest.mark.parametrize(
    ("asked", "found", "expected"),
    [
        ("auto", None, None),
        ("none", None, None),
        ("auto", AWQ, AWQ),
        ("awq", AWQ, AWQ),
        ("compressed-tensors", PACKED, PACKED),
        ("fp8", FP8, FP8),
        ("compressed-tensors", FP8, FP8),
        ("fp8", None, ONLINE_FLOAT8),
    ],
)
def test_quant_type_takes_what_the_checkpoint_says_and_rounds_plain_weights(asked, found, expected):
    assert chosen(asked, found, FILE) == expected


@pytest.mark.parametrize(
    ("asked", "found", "message"),
    [
        ("none", AWQ, "says quant_method 'awq'; use auto"),
        ("awq", PACKED, "says quant_method 'compressed-tensors'"),
        ("awq", FP8, "says quant_method 'compressed-tensors'"),
        ("awq", None, "tailrace quantize"),
        ("fp9", None, "did you mean 'fp8'"),
    ],
)
def test_another_format_than_asked_for_is_an_error(asked, found, message):
    with pytest.raises(ModelError, match=message):
        chosen(asked, found, FILE)


@pytest.mark.parametrize("found", [AWQ, PACKED], ids=["awq", "packed"])
def test_4_bits_are_read_as_they_are_stored_and_rounded_where_fp8_is_asked_for(found):
    held = chosen("fp8", found, FILE)
    assert held.layout_of(UP) == Float8OfInt4(found.layout_of(UP))
    assert held.layout_of("lm_head") is None
    assert held.describe() == f"{found.describe()}, rounded to FP8"


def test_layers_that_a_4_bit_checkpoint_leaves_plain_are_rounded_too_but_not_the_head():
    held = chosen("fp8", stored(awq(64, modules_to_not_convert=["up_proj"])), FILE)
    assert held.layout_of(UP) == RoundedFloat8("channel")
    assert held.layout_of("lm_head") is None
    whole = chosen("fp8", read_quantization(edited(FOUR, ignore=[]), FILE), FILE)
    assert isinstance(whole.layout_of("lm_head"), PackedInt4)


def test_of_a_checkpoint_in_both_formats_the_4_bits_are_rounded():
    both = replace(FP8, rules=(Rule(("re:.*mlp.*",), PACKED.rules[0].layout), *FP8.rules))
    held = chosen("fp8", both, FILE)
    assert isinstance(held.layout_of(UP), Float8OfInt4)
    assert held.layout_of(UP.replace("mlp.up", "self_attn.o")) == FP8.rules[0].layout


def test_dummies_of_4_bits_are_rounded_once():
    held = chosen("fp8", AWQ, FILE).rounded()
    assert held.layout_of(UP) == RoundedFloat8("channel")
    assert held.layout_of("lm_head") is None
    assert held.describe() == "awq, FP8 with a scale a channel (rounded here)"


def test_dummies_are_rounded_to_the_checkpoints_formats():
    assert AWQ.rounded().layout_of(UP) == RoundedInt4(64)
    assert FP8.rounded().layout_of(UP) == RoundedFloat8("channel")
    assert stored(float8(blocks=True)).rounded().layout_of(UP) == RoundedFloat8("block128")
    assert ONLINE_FLOAT8.rounded() == ONLINE_FLOAT8
    assert AWQ.rounded().layout_of("lm_head") is None
