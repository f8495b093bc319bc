"""Every family, and every variation of it, computes what transformers computes."""

import random

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tailrace.errors import ConfigError
from tailrace.kernels.select import select
from tailrace.models.loader import load_model
from tests.models.paged import PagedRun
from tests.models.reference import reference_greedy, reference_logits, reference_model

# Float32 sums in another order, through two layers, on logits of size about 1.
LOGIT_BOUND = 2e-5

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VARIATIONS = {
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3-tied-biases": (
        "qwen3",
        {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


@pytest.fixture(scope="module", params=VARIATIONS)
def checkpoint(request, tmp_path_factory):
    """One variation's folder, every parameter random (transformers makes norms flat)."""
    family, overrides = VARIATIONS[request.param]
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**(SIZES | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request):
    try:
        return select(request.param, 1)
    except ConfigError as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture(scope="module")
def ours(checkpoint, kernels):
    return load_model(checkpoint, dtype="float32", kernels=kernels)


@pytest.fixture(scope="module")
def theirs(checkpoint):
    return reference_model(checkpoint)


def some_tokens(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(SIZES["vocab_size"]) for _ in range(count)]


def test_one_chunk_gives_the_reference_logits(ours, theirs):
    tokens = some_tokens(90)
    assert_close(PagedRun(ours).step({0: tokens}), reference_logits(theirs, tokens))


@pytest.mark.parametrize("block_size", [8, 16])
def test_chunks_and_decodes_in_shared_steps_give_the_reference_logits(ours, theirs, block_size):
    """Three sequences: one decodes while others are mid-prefill, in uneven chunks."""
    texts = [some_tokens(40, seed=1), some_tokens(61, seed=2), some_tokens(13, seed=3)]
    run = PagedRun(ours, sequences=3, block_size=block_size)
    rng = random.Random(block_size)
    got = [[], [], []]
    while any(run.lengths[i] < len(text) for i, text in enumerate(texts)):
        chunks = {}
        for i in (2, 0, 1):
            rest = texts[i][run.lengths[i] :]
            if rest and rng.random() < 0.8:
                chunks[i] = rest[: rng.choice([1, 1, 3, 8, 17])]
        if chunks:
            rows = run.step(chunks).split([len(chunk) for chunk in chunks.values()])
            for i, logits in zip(chunks, rows, strict=True):
                got[i].append(logits)
    for text, logits in zip(texts, got, strict=True):
        assert_close(torch.cat(logits), reference_logits(theirs, text))


def test_greedy_tokens_are_the_references(ours, theirs):
    prompt = some_tokens(21, seed=5)
    expected = reference_greedy(theirs, prompt, 32)
    assert len(set(expected)) > 4, "a reference that repeats itself proves little"
    assert PagedRun(ours).greedy(prompt, 32) == expected
    assert PagedRun(ours, seed=1).greedy(prompt, 32, chunk=5) == expected


def test_float16_weights_stay_near_the_reference(checkpoint, theirs):
    """Eleven bits a weight: relative error 2^-11, averaged over each sum."""
    model = load_model(checkpoint, dtype="float16", kernels=select("torch", 1))
    tokens = some_tokens(50)
    difference = PagedRun(model).step({0: tokens}) - reference_logits(theirs, tokens)
    assert difference.abs().max() < 5e-2
    assert difference.abs().max() > 0


def assert_close(actual, expected):
    worst = (actual - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    assert worst <= LOGIT_BOUND * scale, f"off by {worst} on logits up to {scale}"
