import math
import os

import msgspec
import pytest
from structlog.testing import capture_logs

from tailrace.config import EngineConfig
from tailrace.engine import accuracy_record
from tailrace.engine.accuracy import Accuracy, Report, record
from tailrace.engine.accuracy_record import (
    LEAST_POSITIONS,
    MOST_BYTES,
    Finding,
    Known,
    Numerics,
    file_of,
    fingerprint,
    known,
    remember,
    require_room,
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


HERE = Numerics.of(EngineConfig(gpus=(0,)), "bfloat16", (9, 0))


def under(**changed):
    return msgspec.structs.replace(HERE, **changed)


def finding(name="fp8", agreement=0.99, **changed):
    return Finding(name, under(**changed), LEAST_POSITIONS, agreement, 0.004)


def test_what_was_found_is_known_later_by_copy_and_conditions(folder):
    assert known(folder, HERE) == Known()
    half = finding(dtype="float16", kv_dtype="float16")
    for found in (finding(agreement=0.1), finding(), finding("bf16"), half):
        file = remember(folder, found)
    assert file == file_of(fingerprint(folder))
    assert known(folder, HERE) == Known({"fp8": finding(), "bf16": finding("bf16")})
    there = known(folder, half.under)
    assert there.found == {"fp8": half}
    assert there.otherwise == {
        "bf16": "dtype 'bfloat16' (here 'float16'), kv dtype 'bfloat16' (here 'float16')"
    }


@pytest.mark.parametrize("name", Numerics.__struct_fields__)
def test_what_was_measured_under_other_conditions_does_not_count_and_the_reason_is_told(
    folder, name
):
    """Every field: a model that is served otherwise was not measured."""
    remember(folder, finding(**{name: "other"}))
    wanted = getattr(HERE, name)
    reason = f"{name.replace('_', ' ')} 'other' (here {wanted!r})"
    assert known(folder, HERE) == Known({}, {"fp8": reason})
    remember(folder, finding())
    remember(folder, finding(**{name: "third"}))
    assert known(folder, HERE) == Known({"fp8": finding()})


def test_conditions_are_those_of_the_settings():
    asked = EngineConfig(
        gpus=(0,), quant_type="fp8", fp8_activations="all", kv_cache_dtype="fp8_e4m3"
    )
    told = Numerics.of(asked, "float16", (8, 9))
    assert (told.weights, told.fp8_activations, told.kv_dtype) == (
        "rounded to FP8",
        "all",
        "float8",
    )
    assert (told.dtype, told.capability) == ("float16", "8.9")
    assert (HERE.weights, HERE.kv_dtype) == ("as stored", "bfloat16")
    # Naming what the checkpoint is changes nothing.
    named = EngineConfig(gpus=(0,), quant_type="awq")
    assert Numerics.of(named, "bfloat16", (9, 0)) == HERE


def test_a_record_keeps_the_latest_findings_and_never_fills_up(folder):
    for version in range(70):
        remember(folder, finding(torch=str(version)))
    assert known(folder, under(torch="5")).found == {}
    for version in (6, 69):
        assert list(known(folder, under(torch=str(version))).found) == ["fp8"]


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
    assert known(folder, HERE) == Known()


def test_a_checkpoint_without_a_config_is_none(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        fingerprint(tmp_path)


OLD = (
    b'{"checkpoint": "x", "findings": [{"prefill_weights": "fp8", "dtype": "bfloat16", '
    b'"positions": 20480, "agreement": 0.995, "divergence": 0.001, "tailrace": "0.1.0"}], '
    b'"format": 1}'
)
"""As it was before it told what decides numbers."""


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "truncated"),
        (b"\xff", "invalid|malformed"),
        (b"[" * 60_000, "Expected|recursion"),
        (b" " * (MOST_BYTES + 1), "larger than"),
        (b'{"checkpoint": "x", "findings": [], "what": 1}', "unknown field `what`"),
        (b'{"checkpoint": "x", "findings": [], "format": "2"}', "Expected"),
        (b'{"checkpoint": "x", "findings": []}', "is another checkpoint's"),
    ],
    ids=[
        "cut",
        "no text",
        "deep",
        "large",
        "unknown field",
        "no format",
        "foreign",
    ],
)
def test_a_damaged_or_foreign_record_is_refused(folder, content, why):
    file = file_of(fingerprint(folder))
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    asks = (known, folder, HERE), (remember, folder, finding()), (require_room, folder)
    for ask, *given in asks:
        with pytest.raises(ConfigError, match=f"(?s)accuracy record .*({why}).*remove it"):
            ask(*given)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (OLD, "format 1, and this version reads 2"),
        (b'{"format": 3, "else": {}}', "format 3, and this version reads 2"),
    ],
    ids=["earlier", "later"],
)
def test_a_record_of_another_version_holds_nothing_and_is_replaced_with_a_warning(
    folder, content, told
):
    file = file_of(fingerprint(folder))
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with capture_logs() as logs:
        assert known(folder, HERE) == Known()
        require_room(folder)
        assert file.read_bytes() == content
        remember(folder, finding())
    assert [entry["event"] for entry in logs] == ["accuracy_record_of_another_version"] * 3
    assert all(told in entry["reason"] for entry in logs)
    assert known(folder, HERE) == Known({"fp8": finding()})


@pytest.mark.parametrize(
    "wrong",
    [{"agreement": 1.1}, {"positions": 10}, {"divergence": 1e9}, {"prefill_weights": "x" * 101}],
)
def test_figures_that_cannot_be_are_refused(folder, wrong):
    file = remember(folder, finding())
    told = msgspec.json.decode(file.read_bytes())
    told["findings"][0] |= wrong
    file.write_bytes(msgspec.json.encode(told))
    with pytest.raises(ConfigError, match="Expected"):
        known(folder, HERE)


def test_a_record_that_cannot_be_written_is_an_error(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "file"))
    for ask in (lambda: remember(folder, finding()), lambda: require_room(folder)):
        with pytest.raises(ConfigError, match="accuracy record .*: Not a directory"):
            ask()


def test_a_folder_that_is_closed_is_found_out_without_writing(folder, monkeypatch):
    require_room(folder)
    place = file_of(fingerprint(folder)).parent
    assert list(place.iterdir()) == []
    # Not by its mode: whoever may do anything (root) may write there all the same.
    monkeypatch.setattr("os.access", lambda path, mode: path != place)
    with pytest.raises(ConfigError, match="accuracy record .*: Permission denied"):
        require_room(folder)


def accuracy(
    positions=LEAST_POSITIONS, agreement=0.995, divergence=0.002, numerics: Numerics | None = HERE
):
    reading = Accuracy(positions, agreement, divergence, 0.1, 20.0, 20.0)
    return Report("served", "reference", (reading,), numerics)


@pytest.mark.parametrize("wrong", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("figure", ["agreement", "divergence"])
def test_figures_that_are_not_finite_are_not_recorded(folder, figure, wrong):
    """JSON would have null in their place, and no later start could read the record."""
    config = EngineConfig(model_path=str(folder), prefill_weights="fp8", gpus=(0,))
    assert record(config, accuracy(**{figure: wrong}), against="") == "not recorded: not finite"
    assert known(folder, HERE) == Known()


def test_nothing_is_written_that_could_not_be_read(folder):
    file = remember(folder, finding())
    for wrong in (finding("bf16", agreement=1.1), finding("bf16", agreement=math.nan)):
        with pytest.raises(ConfigError, match="nothing was written"):
            remember(folder, wrong)
    assert known(folder, HERE) == Known({"fp8": finding()})
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_the_command_records_a_copy_beside_its_own_checkpoint_only(folder):
    config = EngineConfig(model_path=str(folder), prefill_weights="fp8", gpus=(0,))
    assert "another checkpoint" in record(config, accuracy(), against="else")
    assert "on a CPU" in record(config, accuracy(numerics=None), against="")
    assert "fewer than 20,000 positions" in record(config, accuracy(19_999), against="")
    assert known(folder, HERE) == Known()
    assert str(file_of(fingerprint(folder))) in record(config, accuracy(), against="")
    found = known(folder, HERE).found["fp8"]
    assert (found.agreement, found.divergence) == (0.995, 0.002)
    assert found.keeps(0.99, 0.005)
    assert not found.keeps(0.996, 0.005)
    assert not found.keeps(0.99, 0.001)
    assert accuracy_record.FORMAT == 2
