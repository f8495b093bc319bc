import json

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from tailrace.errors import ModelError
from tailrace.models.config import Llama3Scaling, load_config
from tests.support.tiny import make_tiny_checkpoint, write_json

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def folder(tmp_path):
    return make_tiny_checkpoint(tmp_path)


def change(folder, **fields):
    """Change config.json; None removes a field."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    write_json(file, {name: value for name, value in config.items() if value is not None})


def test_sizes_are_taken_from_the_file(folder):
    config = load_config(folder)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.intermediate_size) == (64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.vocab_size, config.head_dim, config.max_position) == (259, 16, 512)
    assert config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.qk_norm


def test_absent_fields_follow_from_the_others(folder):
    change(folder, head_dim=None, num_key_value_heads=None, rope_theta=None)
    config = load_config(folder)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (16, 4, 10000.0)


@pytest.mark.parametrize(
    ("family", "qkv", "out", "qk_norm"),
    [
        ("llama", True, True, False),
        ("qwen2", True, False, False),
        ("qwen3", True, True, True),
    ],
)
def test_biases_and_norms_are_the_familys(tmp_path, family, qkv, out, qk_norm):
    """Qwen2 has biases whatever its config says; the others follow `attention_bias`."""
    make_tiny_checkpoint(tmp_path, family)
    plain = load_config(tmp_path)
    assert plain.attention_bias == (family == "qwen2")
    assert not plain.attention_out_bias
    change(tmp_path, attention_bias=True)
    config = load_config(tmp_path)
    assert (config.attention_bias, config.attention_out_bias) == (qkv, out)
    assert config.qk_norm == qk_norm


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_llama3_scaling_is_read_from_both_generations_of_files(folder, key, type_key):
    change(folder, **{key: LLAMA3 | {type_key: "llama3"}})
    assert load_config(folder).rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_theta_may_stand_among_the_rope_parameters(folder):
    change(folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = load_config(folder)
    assert (config.rope_theta, config.rope_scaling) == (5e5, None)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}),
        Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        Qwen3Config(head_dim=64),
    ],
    ids=lambda config: config.model_type,
)
def test_what_transformers_writes_is_read(tmp_path, config):
    """Including Qwen's `sliding_window`, which is written and not in use."""
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    ours = load_config(tmp_path)
    assert ours.rope_theta == config.rope_parameters["rope_theta"]
    assert ours.head_dim == getattr(config, "head_dim", None) or 128
    assert (ours.rope_scaling is not None) == (config.model_type == "llama")


def test_generation_config_names_the_ends(folder):
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 9]})
    assert load_config(folder).eos_token_ids == (7, 9)
    write_json(folder / "generation_config.json", {})
    assert load_config(folder).eos_token_ids == (258,)
    (folder / "generation_config.json").unlink()
    change(folder, eos_token_id=None)
    assert load_config(folder).eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM.*Qwen3ForCausal"),
        ({"architectures": []}, "architecture none named is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama3 needs factor above 0, found None"),
        (
            {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4.0}},
            r"low_freq_factor \(4.0\) below high_freq_factor",
        ),
        ({"rope_theta": -1.0}, "rope_theta -1.0 must be a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
            "sliding_window 128 is in use",
        ),
        (
            {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window 64 is in use",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_hidden_layers": 0}, "num_layers is 0, must be above 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"max_position_embeddings": 2**40}, "max_position 1099511627776 is above 16777216"),
        ({"num_hidden_layers": 2**31}, "num_layers 2147483648 is above 10000"),
        ({"head_dim": 2**31}, "head_dim 2147483648 is above 1024"),
        ({"hidden_size": "64"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
    ],
)
def test_what_cannot_be_served_is_named(folder, fields, message):
    change(folder, **fields)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(folder)
    assert "config.json" in str(caught.value)


def test_windows_behind_the_last_layer_are_not_in_use(folder):
    change(folder, use_sliding_window=True, sliding_window=128, max_window_layers=2)
    load_config(folder)


def test_an_end_outside_the_vocabulary_is_refused(folder):
    write_json(folder / "generation_config.json", {"eos_token_id": 259})
    with pytest.raises(ModelError, match="end-of-sequence id 259 is outside the vocabulary of 259"):
        load_config(folder)


def test_a_missing_field_and_a_missing_file_are_named(folder):
    change(folder, hidden_size=None)
    with pytest.raises(ModelError, match="missing required field `hidden_size`"):
        load_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        load_config(folder)
