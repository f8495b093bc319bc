"""Small JSON files that are kept between runs: read within bounds, written whole or not at all."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class OtherFormatError(ConfigError):
    """A kept file is whole, and of another version: no damage, and nothing that this one reads."""


class Versioned(Protocol):
    """What such a file holds; its struct bounds every field."""

    @property
    def format(self) -> int:
        """Which version of the struct it is."""
        ...


Content = TypeVar("Content", bound=Versioned)
Part = TypeVar("Part")


class _Format(msgspec.Struct):
    """What every such file has, whatever else."""

    format: int | None = None


@dataclass(frozen=True)
class KeptFile(Generic[Content]):
    """One kind of file."""

    what: str
    """In messages, before the file's name."""
    kind: type[Content]
    """A msgspec struct."""
    most_bytes: int
    format: int
    remedy: str
    """What to do about a file that cannot be read."""

    def read(self, file: Path) -> Content:
        """Return a file's content.

        Raises:
            OtherFormatError: It is of another format.
            ConfigError: It cannot be read, or is none.
        """
        content = self._bytes_of(file)
        # Before all else: what another version wrote is no damage.
        told = self._decoded(content, _Format, file).format
        if told not in (None, self.format):
            raise OtherFormatError(
                f"{self.what} {file}: format {told}, and this version reads {self.format}; "
                f"{self.remedy}"
            )
        return self._decoded(content, self.kind, file)

    def glance(self, file: Path, kind: type[Part]) -> Part:
        """Return what a file of whatever format has of a struct's fields.

        Raises:
            ConfigError: It cannot be read, or is none.
        """
        return self._decoded(self._bytes_of(file), kind, file)

    def _bytes_of(self, file: Path) -> bytes:
        try:
            with file.open("rb") as opened:
                content = opened.read(self.most_bytes + 1)
        except OSError as error:
            raise ConfigError(f"{self.what} {file}: {error.strerror}") from error
        if len(content) > self.most_bytes:
            raise ConfigError(
                f"{self.what} {file}: larger than {self.most_bytes} bytes; {self.remedy}"
            )
        return content

    def _decoded(self, content: bytes, kind: type[Part], file: Path) -> Part:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self.what} {file}: {error}; {self.remedy}") from error

    def require_place(self, file: Path) -> None:
        """Make a file's folder, and refuse one that nothing can be written to.

        Raises:
            ConfigError: It cannot be made, or not be written to.
        """
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.what} {file}: {error.strerror}") from error
        if not os.access(file.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{self.what} {file}: {os.strerror(errno.EACCES)}")

    def write(self, content: Content, file: Path) -> None:
        """Write a file, whole or not at all.

        Raises:
            ConfigError: It cannot be written.
        """
        part = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            part.replace(file)
        except OSError as error:
            raise ConfigError(f"{self.what} {file}: {error.strerror}") from error
