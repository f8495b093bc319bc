import numpy as np
import pytest

from tailrace.errors import ModelError
from tailrace.models.gguf_config import hf_config, hf_name
from tailrace.models.gguf_file import GgufFile
from tailrace.models.rope import inverse_frequencies
from tests.models.gguf_maker import gguf_of, tiny_source


@pytest.fixture
def make(tmp_path):
    """Make a tiny GGUF file with metadata and tensors of the test's choice."""

    def made(family="llama", **options):
        source = tiny_source(tmp_path / family, family, num_hidden_layers=1)
        return GgufFile(gguf_of(source, tmp_path / "m.gguf", **options))

    return made


def llama3_factors(head_dim=16, theta=10000.0, factor=8.0):
    """Llama 3's published rule, in float64, wave by wave."""
    factors = []
    for frequency in inverse_frequencies(head_dim, theta).tolist():
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_float32_metadata_comes_back_as_the_decimal_it_was(make):
    config = hf_config(make(metadata={"llama.rope.freq_base": 1e6}))
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 1e6


def test_defaults_are_llama_cpps(make):
    absent = [
        "llama.rope.freq_base",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.rope.dimension_count",
    ]
    config = hf_config(make(metadata=dict.fromkeys(absent)))
    assert config["rope_theta"] == 10000.0
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16


def test_the_head_is_tied_where_the_file_has_none(make):
    assert hf_config(make("llama"))["tie_word_embeddings"]
    assert not hf_config(make("qwen2"))["tie_word_embeddings"]


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 5e5), (32.0, 5e5), (8.0, 1e4)])
def test_llama3_rope_factors_become_its_scaling(make, factor, theta):
    factors = llama3_factors(theta=theta, factor=factor)
    file = make(metadata={"llama.rope.freq_base": theta}, extra={"rope_freqs.weight": factors})
    assert len(set(factors.tolist())) >= 3, "some wave is blended"
    assert hf_config(file)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    "factors",
    [llama3_factors() * np.linspace(1, 1.01, 8, dtype=np.float32), np.ones(5, np.float32)],
    ids=["values", "count"],
)
def test_foreign_rope_factors_are_refused(make, factors):
    file = make(extra={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight holds rotary factors other than"):
        hf_config(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported.*qwen3"),
        ({"general.architecture": None}, "architecture None is not supported"),
        ({"general.architecture": ["llama"]}, r"architecture \['llama'\] is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = 'yarn'"),
        ({"llama.rope.scale_linear": 4.0}, r"llama\.rope\.scale_linear = 4\.0"),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window = 4096"),
        ({"split.count": 3}, r"split\.count = 3"),
        ({"llama.block_count": None}, r"llama\.block_count must be an integer above 0, is None"),
        ({"llama.block_count": "two"}, "block_count must be an integer above 0, is 'two'"),
        ({"llama.attention.head_count": [4, 4]}, "head_count must be an integer above 0"),
        ({"llama.rope.freq_base": -1.0}, "freq_base must be a number above 0"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8, must be the head dimension 16"),
        ({"llama.attention.value_length": 8}, "value_length is 8, must be"),
        ({"tokenizer.ggml.eot_token_id": 10**9}, "eot_token_id 1000000000 is not one of the"),
        ({"tokenizer.ggml.eom_token_id": "<eom>"}, "eom_token_id '<eom>' is not one of the"),
        ({"tokenizer.ggml.eot_token_id": [1, 2]}, r"eot_token_id \[1, 2\] is not one of the"),
        ({"tokenizer.ggml.eom_token_id": True}, "eom_token_id True is not one of the"),
    ],
)
def test_what_cannot_be_served_is_named(make, metadata, message):
    file = make(metadata=metadata)
    with pytest.raises(ModelError, match=message):
        hf_config(file)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.17.attn_q.bias", "model.layers.17.self_attn.q_proj.bias"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ],
)
def test_tensors_get_their_hugging_face_names(make, name, expected):
    assert hf_name(make(), name) == expected


@pytest.mark.parametrize(
    "name", ["blk.01.attn_q.weight", "blk.0.ssm_a.weight", "blk.٣.attn_q.bias"]
)
def test_other_names_have_no_place(make, name):
    with pytest.raises(ModelError, match="has no place in a llama model"):
        hf_name(make(), name)
