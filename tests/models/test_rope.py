from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tailrace.models.config import Llama3Scaling, load_config
from tailrace.models.rope import inverse_frequencies, llama3_frequencies, rotary_of
from tests.support.tiny import make_tiny_checkpoint

SCALING = Llama3Scaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["default", "llama3"])
def test_tables_equal_the_references_at_every_position(tmp_path, scaling):
    """Llama 3's base and head size, up to its position 16384: bit for bit."""
    plain = load_config(make_tiny_checkpoint(tmp_path))
    config = replace(plain, head_dim=128, max_position=16384, rope_theta=5e5, rope_scaling=scaling)
    rotary = rotary_of(config)
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    if scaling is not None:
        parameters = {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    reference = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=parameters)
    )
    cos, sin = reference(torch.zeros(1), torch.arange(16384)[None])
    assert torch.equal(rotary.cos_PD, cos[0, :, :64])
    assert torch.equal(rotary.sin_PD, sin[0, :, :64])


def test_fast_waves_are_kept_and_slow_ones_stretched():
    frequencies = inverse_frequencies(128, 5e5)
    factors = frequencies / llama3_frequencies(frequencies, SCALING)
    assert factors[0] == 1
    assert factors[-1] == 8
    assert ((factors > 1) & (factors < 8)).any()
    assert (factors.diff() >= -1e-6).all()
