import pytest

from tailrace.errors import ModelError
from tailrace.models import config, llama
from tailrace.models.registry import ARCHITECTURES, builder_of


def test_every_architecture_that_a_config_may_name_has_a_builder():
    assert set(ARCHITECTURES) == set(config._TRAITS)
    assert builder_of("LlamaForCausalLM") is llama.build


def test_an_unknown_architecture_is_named_with_the_known_ones():
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not supported.*Qwen2ForCausalLM"):
        builder_of("GPT2LMHeadModel")
