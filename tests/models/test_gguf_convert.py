import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tailrace.errors import ModelError
from tailrace.kernels.select import select
from tailrace.models.config import load_config
from tailrace.models.gguf_convert import convert
from tailrace.models.loader import load_model
from tests.models.gguf_maker import Kind, gguf_of, tiny_source
from tests.models.paged import PagedRun


def converted(file):
    folder = file.with_suffix("")
    folder.mkdir()
    convert(file, folder)
    return folder


def logits(folder):
    model = load_model(folder, dtype="float32", kernels=select("torch", 1))
    return PagedRun(model).step({0: list(range(40, 100))})


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_converted_model_is_the_checkpoint_it_came_from(tmp_path, family, overrides):
    """Names, config, and llama.cpp's order of rows (Llama's alone): the logits are equal."""
    source = tiny_source(tmp_path / "hf", family, **overrides)
    folder = converted(gguf_of(source, tmp_path / "m.gguf"))
    assert load_config(folder) == load_config(source)
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_quantised_weights_stay_near_their_source(tmp_path, kind):
    bounds = {Kind.F16: 1e-3, Kind.Q8_0: 1e-2, Kind.Q4_0: 0.2, Kind.Q4_1: 0.2}
    source = tiny_source(tmp_path / "hf")
    folder = converted(gguf_of(source, tmp_path / "m.gguf", kind=kind))
    expected = load_file(source / "model.safetensors")
    for name, values in load_file(folder / "model.safetensors").items():
        error = np.abs(values - expected[name]).max() / np.abs(expected[name]).max()
        assert error < bounds[kind], name


def test_the_folder_holds_what_tokenizer_and_server_need(tmp_path):
    folder = converted(gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "m.gguf"))
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert "im_start" in written["chat_template"]
    assert written["model_max_length"] == 512


def test_every_token_that_ends_a_turn_is_an_end(tmp_path):
    file = gguf_of(
        tiny_source(tmp_path / "hf"),
        tmp_path / "m.gguf",
        metadata={"tokenizer.ggml.eot_token_id": 257, "tokenizer.ggml.eom_token_id": 258},
    )
    assert load_config(converted(file)).eos_token_ids == (258, 257)


def test_more_tokens_than_rows_are_refused(tmp_path):
    tokens = [str(number) for number in range(300)]
    file = gguf_of(
        tiny_source(tmp_path / "hf"),
        tmp_path / "m.gguf",
        metadata={
            "tokenizer.ggml.tokens": [*tokens, "h", "e", "he"],
            "tokenizer.ggml.token_type": [1] * 303,
        },
    )
    with pytest.raises(ModelError, match=r"303 tokens, but token_embd\.weight has only 260 rows"):
        converted(file)


def test_rows_that_do_not_divide_into_heads_are_named(tmp_path):
    """Three heads of five and a third rows cannot be put back in order."""
    file = gguf_of(
        tiny_source(tmp_path / "hf"),
        tmp_path / "m.gguf",
        metadata={"llama.attention.head_count": 3, "llama.attention.head_count_kv": 1},
    )
    message = r"blk\.\d\.attn_q\.weight: 64 rows do not divide into 3 heads"
    with pytest.raises(ModelError, match=message):
        converted(file)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    source = tiny_source(folder / "hf", num_hidden_layers=1)
    return gguf_of(source, folder / "m.gguf").read_bytes()


@given(data=st.data())
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_model_is_an_error_or_loads(whole_file, tmp_path, data):
    """Bytes of the header overwritten: conversion and loading end in a `ModelError` at worst."""
    content = bytearray(whole_file)
    header_bytes = 7000
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_bytes))
        content[at] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    folder = tmp_path / "out"
    folder.mkdir(exist_ok=True)
    try:
        convert(damaged, folder)
        config = load_config(folder)
        if config.max_position < 10_000:  # else the rotary tables alone take seconds
            load_model(folder, dtype="float32", kernels=select("torch", 1))
    except ModelError:
        pass
