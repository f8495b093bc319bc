import importlib.util

import pytest

from tailrace import cli
from tailrace.config import EngineConfig
from tailrace.engine.accuracy import Bound, check_accuracy
from tailrace.errors import ConfigError, ModelError
from tailrace.models import compressor
from tailrace.models.compressor import Recipe, cut_samples, quantize
from tailrace.models.config import load_config
from tests.support.quantized import packed, write_quantized
from tests.support.tiny import make_tiny_checkpoint

TEXT = "Water runs down the tailrace of the mill, and the wheel stands still. " * 60


@pytest.fixture
def source(tmp_path):
    return make_tiny_checkpoint(tmp_path / "source", intermediate_size=128)


def test_without_llm_compressor_the_extra_is_named(tmp_path, source, monkeypatch):
    monkeypatch.setattr(compressor, "_is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"llmcompressor.*pip install 'tailrace\[quantize\]'"):
        quantize(str(source), tmp_path / "out", Recipe(group=32), TEXT)
    assert not (tmp_path / "out").exists()


def test_nothing_that_exists_is_written_over(tmp_path, source):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        quantize(str(source), tmp_path / "out", Recipe(group=32), TEXT)


def test_a_group_that_does_not_divide_the_inputs_is_refused_before_any_work(tmp_path, source):
    with pytest.raises(ConfigError, match="--group-size 48: .* layers with 64 and 128 inputs"):
        quantize(str(source), tmp_path / "out", Recipe(group=48), TEXT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "gptq"}, "--scheme gptq: must be one of awq, fp8, fp8-block"),
        ({"format": "gguf"}, "--format gguf: must be one of compressed-tensors, awq-gemm"),
        ({"scheme": "fp8", "format": "awq-gemm"}, "awq-gemm holds 4 bits, not --scheme fp8"),
        ({"group": 12}, "--group-size 12: must be a multiple of 8"),
        ({"samples": 0}, "must be at least 1"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**fields)


def test_samples_are_spread_evenly_over_the_text(source):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    samples = cut_samples(source, Recipe(samples=4, sample_tokens=100), text)
    assert [len(ids) for ids in samples] == [100] * 4
    assert [bytes(ids).decode() for ids in samples] == [
        text[i : i + 100] for i in (0, 250, 500, 750)
    ]


def test_too_little_text_is_refused(source):
    with pytest.raises(ConfigError, match="need 400 tokens, and the text has 399"):
        cut_samples(source, Recipe(samples=4, sample_tokens=100), "x" * 399)


def test_a_model_in_4_bits_is_repacked_without_llm_compressor(
    tmp_path, source, monkeypatch, capsys
):
    monkeypatch.setattr(compressor, "_is_installed", lambda _: False)
    folder = write_quantized(source, tmp_path / "packed", packed(32, symmetric=False))
    with pytest.raises(ConfigError, match="only --format awq-gemm is left"):
        quantize(str(folder), tmp_path / "out", Recipe(), TEXT)
    arguments = ["quantize", str(folder), "--out", str(tmp_path / "out"), "--format", "awq-gemm"]
    with pytest.raises(SystemExit) as ended:
        cli.app(arguments)
    assert ended.value.code == 0
    assert "check-accuracy" in capsys.readouterr().out
    assert load_config(tmp_path / "out").quantization.method == "awq"
    assert not list(tmp_path.glob(".*"))
    found = accuracy(tmp_path / "out", against=str(folder))
    assert found.keeps(Bound(agreement=1.0, divergence=0.0))


def test_a_failure_leaves_nothing_behind(tmp_path, source, monkeypatch):
    def fail(*_arguments):
        raise ModelError("no")

    monkeypatch.setattr(compressor, "_require_compressor", lambda: None)
    monkeypatch.setattr(compressor, "_compress", fail)
    with pytest.raises(ModelError, match="no"):
        quantize(str(source), tmp_path / "out", Recipe(group=32), TEXT)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def accuracy(folder, **options):
    config = EngineConfig(model_path=str(folder), dtype="float32", threads=1, cpu_kernels="torch")
    return check_accuracy(config, TEXT, positions=300, **options)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llmcompressor") is None,
    reason="llm-compressor is not installed: pip install 'tailrace[quantize]'",
)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        (Recipe("awq", group=32, samples=4, sample_tokens=64), "compressed-tensors"),
        (Recipe("awq", "awq-gemm", group=32, samples=4, sample_tokens=64), "awq"),
        (Recipe("fp8"), "compressed-tensors"),
        (Recipe("fp8-block"), "compressed-tensors"),
    ],
)
def test_what_llm_compressor_writes_is_served_and_passes_the_check(
    tmp_path, source, recipe, method
):
    quantize(str(source), tmp_path / "out", recipe, TEXT)
    assert load_config(tmp_path / "out").quantization.method == method
    assert accuracy(tmp_path / "out").keeps(Bound(agreement=1.0, divergence=0.0))
    beside_the_source = accuracy(tmp_path / "out", against=str(source))
    assert 0 < beside_the_source.first.divergence < 0.5
