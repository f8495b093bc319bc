"""Reads GGUF files without trusting them.

A GGUF file is a header (metadata, then one entry a tensor: name, dimensions, type, offset) and,
from the next multiple of the alignment on, the tensors' bytes:

    "GGUF" version tensors pairs | key type value ... | name dims type offset ... | pad | data

Every length and offset in it is the file author's claim. Here each is checked against the size
of the file before it is used, in Python's unbounded integers, so no claim can wrap around, point
outside or make this process allocate more than the file is long (CVE-2026-7482 was such a trust).
Block formats and their dequantisation come from the `gguf` package; its own reader is not used,
as it checks none of this and takes seconds.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tailrace.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SUPPORTED_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"
)  # fmt: skip

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # ggml's own limit
_MAX_NAME_BYTES = 65535  # the format's own limit on keys
_DEFAULT_ALIGNMENT = 32

# The format's value types: number -> struct code. 8 is a string, 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as everywhere but in GGUF itself."""
    type: GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GgufFile:
    """The metadata and the tensor table of one file; `read` fetches a tensor.

    Args:
        path: The file.

    Raises:
        ModelError: The file cannot be read, is no GGUF file, is damaged or truncated, or holds a
            tensor of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._read_header(_Cursor(file, path))
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor, dequantised, in its shape.

        Raises:
            ModelError: A value is not finite, or the file has become shorter since it was opened.
        """
        tensor = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, count=tensor.nbytes, offset=tensor.offset)
        if raw.nbytes != tensor.nbytes:
            raise ModelError(f"{self.path}: tensor {name} ends early: the file was changed")
        with np.errstate(all="ignore"):  # what overflows is found below
            rows = raw.reshape(*tensor.shape[:-1], -1)
            values: NDArray[np.float32] = dequantize(rows, tensor.type)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor {name} holds values that are no finite numbers")
        return values

    def _read_header(self, cursor: _Cursor) -> None:
        if cursor.bytes(4, "the magic") != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file (it does not start with 'GGUF')")
        version = cursor.scalar("I", "the version")
        if version not in _VERSIONS:
            raise ModelError(
                f"{self.path}: GGUF version {version} is not supported; "
                f"{' and '.join(map(str, _VERSIONS))} are, little-endian"
            )
        tensor_count = cursor.scalar("Q", "the tensor count")
        pair_count = cursor.scalar("Q", "the metadata count")
        for _ in range(pair_count):
            key = cursor.text("a metadata key", _MAX_NAME_BYTES)
            if key in self.metadata:
                raise ModelError(f"{self.path}: metadata key {key!r} appears twice")
            self.metadata[key] = cursor.value(key)
        entries = [_read_entry(cursor) for _ in range(tensor_count)]
        start = _aligned(cursor.position, self._alignment())
        for entry in entries:
            if entry.name in self.tensors:
                raise ModelError(f"{self.path}: tensor {entry.name} appears twice")
            self.tensors[entry.name] = self._placed(entry, start, cursor.size)
        # Those that share bytes would let a small file ask for any amount of disk and memory.
        held = sum(tensor.nbytes for tensor in self.tensors.values())
        if held > cursor.size - start:
            raise ModelError(
                f"{self.path}: its tensors claim {held} bytes, and {cursor.size - start} follow "
                "the header: they overlap"
            )

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(
                f"{self.path}: general.alignment is {alignment!r}, must be a power of two"
            )
        return alignment

    def _placed(self, entry: _Entry, start: int, file_bytes: int) -> GgufTensor:
        """Check an entry's claims, and turn it into a place in the file."""
        at = f"{self.path}: tensor {entry.name}"
        kind = _supported_type(entry.type_number, at)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        shape = tuple(reversed(entry.dimensions))
        if not shape or min(shape) < 1:
            raise ModelError(f"{at} has the impossible shape {list(shape)}")
        if shape[-1] % block_values:
            raise ModelError(
                f"{at}: rows of {shape[-1]} values do not divide into {kind.name} blocks of "
                f"{block_values}"
            )
        nbytes = math.prod(shape) // block_values * block_bytes
        end = start + entry.offset + nbytes
        if end > file_bytes:
            raise ModelError(
                f"{at} ({kind.name}, {list(shape)}) ends at byte {end}, the file has "
                f"{file_bytes}: it is truncated or damaged"
            )
        return GgufTensor(entry.name, shape, kind, start + entry.offset, nbytes)


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header claims it."""

    name: str
    dimensions: tuple[int, ...]
    type_number: int
    offset: int


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.text("a tensor's name", _MAX_NAME_BYTES)
    count = cursor.scalar("I", f"the dimensions of tensor {name}")
    if count > _MAX_DIMENSIONS:
        raise ModelError(
            f"{cursor.path}: tensor {name} has {count} dimensions, at most {_MAX_DIMENSIONS} exist"
        )
    dimensions = tuple(cursor.scalar("Q", f"the shape of tensor {name}") for _ in range(count))
    type_number = cursor.scalar("I", f"the type of tensor {name}")
    return _Entry(name, dimensions, type_number, cursor.scalar("Q", f"the offset of {name}"))


def _supported_type(number: int, at: str) -> GGMLQuantizationType:
    known = {kind.value: kind for kind in GGMLQuantizationType}
    kind = known.get(number)
    if kind is None or kind.name not in SUPPORTED_TYPES:
        shown = kind.name if kind is not None else f"number {number}"
        raise ModelError(
            f"{at} has type {shown}, which is not supported; supported are "
            f"{', '.join(SUPPORTED_TYPES)}"
        )
    return kind


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Cursor:
    """A position in the header that never moves beyond the end of the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self.path = path
        self.size = path.stat().st_size
        self.position = 0

    def bytes(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes."""
        if count > self.size - self.position:
            raise ModelError(
                f"{self.path}: {what} needs {count} bytes at byte {self.position}, the file has "
                f"{self.size}: it is truncated or damaged"
            )
        taken = self._file.read(count)
        if len(taken) != count:
            raise ModelError(f"{self.path}: {what} ends early: the file was changed")
        self.position += count
        return taken

    def scalar(self, code: str, what: str) -> Any:
        """Return one little-endian number or flag."""
        layout = "<" + code
        return struct.unpack(layout, self.bytes(struct.calcsize(layout), what))[0]

    def text(self, what: str, max_bytes: int | None = None) -> str:
        """Return a string: its length, then UTF-8."""
        count = self.scalar("Q", what)
        if max_bytes is not None and count > max_bytes:
            raise ModelError(f"{self.path}: {what} of {count} bytes, at most {max_bytes} exist")
        try:
            return self.bytes(count, what).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def value(self, key: str) -> Any:
        """Return one metadata value; an array becomes a list."""
        what = f"metadata {key!r}"
        kind = self.scalar("I", what)
        if kind != _ARRAY:
            return self._item(kind, what)
        item_kind, count = self.scalar("I", what), self.scalar("Q", what)
        if item_kind in _SCALARS:
            item = struct.Struct("<" + _SCALARS[item_kind])
            packed = self.bytes(count * item.size, what)
            return [value for (value,) in item.iter_unpack(packed)]
        return [self._item(item_kind, what) for _ in range(count)]

    def _item(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        raise ModelError(f"{self.path}: {what} has the unknown value type {kind}")
