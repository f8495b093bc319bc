"""What `tailrace check-accuracy --prefill-weights` found for a checkpoint, kept for later starts.

One small JSON file a checkpoint, in the cache folder beside the plans. A checkpoint is known by its
config and by the names, sizes and times of its weight files: reading 15 GB to hash them would cost
every start more than the copy does. So a changed or copied checkpoint counts as another one, and is
measured again. No torch here.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from tailrace import __version__
from tailrace.config import cache_dir
from tailrace.errors import ConfigError
from tailrace.kept_file import KeptFile

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
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


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far prompts by one copy of the weights are from the checkpoint's own precision."""

    prefill_weights: Words
    dtype: Words
    """Of activations."""
    positions: Annotated[int, msgspec.Meta(ge=LEAST_POSITIONS)]
    agreement: Share
    """Of likeliest tokens."""
    divergence: Nats
    """Mean, in nats."""
    tailrace: Words = __version__

    def keeps(self, agreement: float, divergence: float) -> bool:
        """Tell whether both figures are within a bound."""
        return self.agreement >= agreement and self.divergence <= divergence

    def describe(self) -> str:
        """Say it as short as it goes."""
        return f"{self.agreement:.2%} / {self.divergence:.4g} nats"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint's findings, one for each copy and dtype."""

    checkpoint: Words
    findings: Annotated[tuple[Finding, ...], msgspec.Meta(max_length=_MOST_FINDINGS)]
    format: int = FORMAT


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


def findings(folder: Path, dtype: str) -> dict[str, Finding]:
    """Return what is known of a checkpoint in one dtype, by the copy's name; of this version alone.

    Raises:
        ConfigError: There is a record, and it cannot be read.
    """
    checkpoint = fingerprint(folder)
    file = file_of(checkpoint)
    if not file.exists():
        return {}
    return {
        found.prefill_weights: found
        for found in _read(file, checkpoint).findings
        if (found.dtype, found.tailrace) == (dtype, __version__)
    }


def remember(folder: Path, finding: Finding) -> Path:
    """Add a finding to its checkpoint's record, in place of an older one; return the file.

    Raises:
        ConfigError: The record there cannot be read, or not be written, or a figure is outside
            its bounds: what was written could not be read.
    """
    checkpoint = fingerprint(folder)
    file = file_of(checkpoint)
    known = _read(file, checkpoint).findings if file.exists() else ()
    merged = {(f.prefill_weights, f.dtype): f for f in (*known, finding)}
    record = Record(checkpoint, tuple(merged.values()))
    try:
        msgspec.json.decode(msgspec.json.encode(record), type=Record)
    except msgspec.ValidationError as error:
        raise ConfigError(f"accuracy record {file}: {error}; nothing was written") from error
    _FILES.write(record, file)
    return file


def _read(file: Path, checkpoint: str) -> Record:
    record = _FILES.read(file)
    if record.checkpoint != checkpoint:
        raise ConfigError(f"accuracy record {file}: is another checkpoint's; {_FILES.remedy}")
    return record
