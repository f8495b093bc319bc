import math
import os

import msgspec
import pytest

from tailrace.config import EngineConfig
from tailrace.engine import accuracy_record
from tailrace.engine.accuracy import Accuracy, record
from tailrace.engine.accuracy_record import (
    LEAST_POSITIONS,
    MOST_BYTES,
    Finding,
    file_of,
    findings,
    fingerprint,
    remember,
)
from tailrace.errors import ConfigError


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def finding(name="fp8", dtype="bfloat16", agreement=0.99, **more):
    return Finding(name, dtype, LEAST_POSITIONS, agreement, 0.004, **more)


def test_what_was_found_is_known_later_by_copy_and_dtype(folder):
    assert findings(folder, "bfloat16") == {}
    for found in (finding(agreement=0.1), finding(), finding("bf16"), finding(dtype="float16")):
        file = remember(folder, found)
    assert file == file_of(fingerprint(folder))
    assert findings(folder, "bfloat16") == {"fp8": finding(), "bf16": finding("bf16")}
    assert findings(folder, "float16") == {"fp8": finding(dtype="float16")}


def test_another_versions_figures_are_not_ours(folder):
    remember(folder, finding(tailrace="0.0.0"))
    assert findings(folder, "bfloat16") == {}


@pytest.mark.parametrize("changed", ["config", "size", "time", "further file"])
def test_a_changed_checkpoint_is_another_one(folder, changed):
    remember(folder, finding())
    weights = folder / "model.safetensors"
    if changed == "config":
        (folder / "config.json").write_text("{ }")
    elif changed == "size":
        weights.write_bytes(b"other weights")
    elif changed == "time":
        os.utime(weights, ns=(1, 1))
    else:
        (folder / "more.safetensors").write_bytes(b"")
    assert findings(folder, "bfloat16") == {}


def test_a_checkpoint_without_a_config_is_none(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "truncated"),
        (b"\xff", "invalid|malformed"),
        (b"[" * 60_000, "Expected|recursion"),
        (b" " * (MOST_BYTES + 1), "larger than"),
        (b'{"checkpoint": "x", "findings": [], "what": 1}', "unknown field `what`"),
        (b'{"checkpoint": "x", "findings": [], "format": 2}', "format 2, and this version reads 1"),
        (b'{"checkpoint": "x", "findings": []}', "is another checkpoint's"),
    ],
    ids=["cut", "no text", "deep", "large", "unknown field", "later format", "foreign"],
)
def test_a_damaged_or_foreign_record_is_refused(folder, content, why):
    file = file_of(fingerprint(folder))
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    for ask in (lambda: findings(folder, "bfloat16"), lambda: remember(folder, finding())):
        with pytest.raises(ConfigError, match=f"(?s)accuracy record .*({why}).*remove it"):
            ask()


@pytest.mark.parametrize(
    "wrong", [{"agreement": 1.1}, {"positions": 10}, {"divergence": 1e9}, {"dtype": "x" * 101}]
)
def test_figures_that_cannot_be_are_refused(folder, wrong):
    file = remember(folder, finding())
    told = msgspec.json.decode(file.read_bytes())
    told["findings"][0] |= wrong
    file.write_bytes(msgspec.json.encode(told))
    with pytest.raises(ConfigError, match="Expected"):
        findings(folder, "bfloat16")


def test_a_record_that_cannot_be_written_is_an_error(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="accuracy record"):
        remember(folder, finding())


def accuracy(positions=LEAST_POSITIONS, agreement=0.995, divergence=0.002):
    return Accuracy(positions, agreement, divergence, 0.1, 20.0, 20.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("figure", ["agreement", "divergence"])
def test_figures_that_are_not_finite_are_not_recorded(folder, figure, wrong):
    """JSON would have null in their place, and no later start could read the record."""
    config = EngineConfig(model_path=str(folder), prefill_weights="fp8", gpus=(0,))
    assert record(config, accuracy(**{figure: wrong}), against="") == "not recorded: not finite"
    assert findings(folder, "bfloat16") == {}


def test_nothing_is_written_that_could_not_be_read(folder):
    file = remember(folder, finding())
    for wrong in (finding("bf16", agreement=1.1), finding("bf16", agreement=math.nan)):
        with pytest.raises(ConfigError, match="nothing was written"):
            remember(folder, wrong)
    assert findings(folder, "bfloat16") == {"fp8": finding()}
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_the_command_records_a_copy_beside_its_own_checkpoint_only(folder):
    config = EngineConfig(model_path=str(folder), prefill_weights="fp8", gpus=(0,))
    assert "another checkpoint" in record(config, accuracy(), against="else")
    assert "fewer than 20,000 positions" in record(config, accuracy(19_999), against="")
    assert findings(folder, "bfloat16") == {}
    assert str(file_of(fingerprint(folder))) in record(config, accuracy(), against="")
    found = findings(folder, "bfloat16")["fp8"]
    assert (found.agreement, found.divergence) == (0.995, 0.002)
    assert found.keeps(0.99, 0.005)
    assert not found.keeps(0.996, 0.005)
    assert not found.keeps(0.99, 0.001)
    assert accuracy_record.FORMAT == 1
