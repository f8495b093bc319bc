"""What `tailrace check-accuracy --prefill-weights` found for a checkpoint, kept for later starts.

One small JSON file a checkpoint, in the cache folder beside the plans. A checkpoint is known by its
config and by the names, sizes and times of its weight files: reading 15 GB to hash them would cost
every start more than the copy does. So a changed or copied checkpoint counts as another one, and is
measured again.

A finding holds for what decides numbers as it was when they were measured (`Numerics`), and for
nothing else. A record of another version's format holds nothing, and a new finding replaces it; one
that is damaged is an error, which `require_room` finds before minutes are spent on a finding.
No torch here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import msgspec
import structlog

from tailrace import __version__
from tailrace.config import cache_dir
from tailrace.errors import ConfigError
from tailrace.kept_file import KeptFile, OtherFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tailrace.config import EngineConfig

log = structlog.get_logger("tailrace.engine")

FORMAT = 2
MOST_BYTES = 1 << 16
"""Of a record's file."""
LEAST_POSITIONS = 20_000
"""Of text, for a finding to be recorded."""

_CONFIG_BYTES = 16 << 20
_MOST_FINDINGS = 64

Words = Annotated[str, msgspec.Meta(max_length=100)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Nats = Annotated[float, msgspec.Meta(ge=-1.0, le=1e6)]
"""Rounding may bring a divergence of nothing below 0."""


class Numerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides the numbers that a copy gives, beside the checkpoint.

    Kernels that multiply the same numbers with sums of the same precision, among which a plan and
    `--prefill-attention` choose, do not.
    """

    dtype: Words
    """Of activations."""
    weights: Words
    """How weights that the checkpoint has not in FP8 are kept: `--quant-type fp8` rounds them."""
    fp8_activations: Words
    kv_dtype: Words
    capability: Words
    """Of the GPU: it decides which kernels there are."""
    tailrace: Words
    torch: Words
    triton: Words

    @classmethod
    def of(cls, config: EngineConfig, dtype: str, capability: tuple[int, int]) -> Numerics:
        """Return those of a model as it is served.

        Args:
            config: The settings.
            dtype: Of activations, such as "bfloat16".
            capability: The GPU's compute capability.
        """
        return cls(
            dtype=dtype,
            weights="rounded to FP8" if config.quant_type == "fp8" else "as stored",
            fp8_activations=config.fp8_activations,
            kv_dtype="float8" if config.kv_is_float8 else dtype,
            capability=".".join(map(str, capability)),
            tailrace=__version__,
            torch=metadata.version("torch"),
            triton=metadata.version("triton"),
        )

    def other_than(self, wanted: Numerics) -> str:
        """Name each field that is not as wanted, with both values; "" where all are."""
        pairs = zip(
            msgspec.structs.asdict(self).items(),
            msgspec.structs.asdict(wanted).values(),
            strict=True,
        )
        return ", ".join(
            f"{name.replace('_', ' ')} {had!r} (here {wants!r})"
            for (name, had), wants in pairs
            if had != wants
        )


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far prompts by one copy of the weights are from the checkpoint's own precision."""

    prefill_weights: Words
    under: Numerics
    positions: Annotated[int, msgspec.Meta(ge=LEAST_POSITIONS)]
    agreement: Share
    """Of likeliest tokens."""
    divergence: Nats
    """Mean, in nats."""

    def keeps(self, agreement: float, divergence: float) -> bool:
        """Tell whether both figures are within a bound."""
        return self.agreement >= agreement and self.divergence <= divergence

    def describe(self) -> str:
        """Say it as short as it goes."""
        return f"{self.agreement:.2%} / {self.divergence:.4g} nats"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint's findings, one for each copy and what decides its numbers; the latest last."""

    checkpoint: Words
    findings: Annotated[tuple[Finding, ...], msgspec.Meta(max_length=_MOST_FINDINGS)]
    format: int = FORMAT


@dataclass(frozen=True)
class Known:
    """What is known of a checkpoint as it is to be served, by the copy's name."""

    found: Mapping[str, Finding] = field(default_factory=dict)
    otherwise: Mapping[str, str] = field(default_factory=dict)
    """Copies that were measured under other conditions only: what was other, of the latest."""


_FILES = KeptFile(
    "accuracy record",
    Record,
    MOST_BYTES,
    FORMAT,
    "remove it, and run `tailrace check-accuracy` again",
)


def fingerprint(folder: Path) -> str:
    """Return what a checkpoint's folder is known by.

    Raises:
        ConfigError: It has no config.json that can be read.
    """
    told = hashlib.sha256()
    try:
        with (folder / "config.json").open("rb") as opened:
            told.update(opened.read(_CONFIG_BYTES))
        for file in sorted(folder.glob("*.safetensors")):
            status = file.stat()
            told.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    return told.hexdigest()[:32]


def file_of(checkpoint: str) -> Path:
    """Return where a checkpoint's record lies."""
    return cache_dir() / "accuracy" / f"{checkpoint}.json"


def known(folder: Path, under: Numerics) -> Known:
    """Return what was measured of a checkpoint, as far as it holds under these conditions.

    Raises:
        ConfigError: There is a record, and it is damaged.
    """
    checkpoint = fingerprint(folder)
    findings = _findings(file_of(checkpoint), checkpoint)
    # What holds here comes last, so that it stands in place of what does not.
    ordered = sorted(findings, key=lambda finding: finding.under == under)
    latest = {finding.prefill_weights: finding for finding in ordered}
    reasons = {name: finding.under.other_than(under) for name, finding in latest.items()}
    return Known(
        found={name: finding for name, finding in latest.items() if not reasons[name]},
        otherwise={name: reason for name, reason in reasons.items() if reason},
    )


def require_room(folder: Path) -> None:
    """Make sure that a finding about a checkpoint could be remembered.

    Raises:
        ConfigError: The record there is damaged, or its folder cannot be written to.
    """
    checkpoint = fingerprint(folder)
    file = file_of(checkpoint)
    _findings(file, checkpoint)
    _FILES.require_place(file)


def remember(folder: Path, finding: Finding) -> Path:
    """Add a finding to its checkpoint's record, in place of an older one; return the file.

    Raises:
        ConfigError: The record there is damaged, or cannot be written, or a figure is outside
            its bounds: what was written could not be read.
    """
    checkpoint = fingerprint(folder)
    file = file_of(checkpoint)
    before = _findings(file, checkpoint)
    key = (finding.prefill_weights, finding.under)
    kept = [f for f in before if (f.prefill_weights, f.under) != key][1 - _MOST_FINDINGS :]
    record = Record(checkpoint, (*kept, finding))
    try:
        msgspec.json.decode(msgspec.json.encode(record), type=Record)
    except msgspec.ValidationError as error:
        raise ConfigError(f"accuracy record {file}: {error}; nothing was written") from error
    _FILES.write(record, file)
    return file


def _findings(file: Path, checkpoint: str) -> tuple[Finding, ...]:
    """Return a record's findings; none where there is no record, or another version's."""
    if not file.exists():
        return ()
    try:
        record = _FILES.read(file)
    except OtherFormatError as error:
        log.warning("accuracy_record_of_another_version", reason=str(error))
        return ()
    if record.checkpoint != checkpoint:
        raise ConfigError(f"accuracy record {file}: is another checkpoint's; {_FILES.remedy}")
    return record.findings
