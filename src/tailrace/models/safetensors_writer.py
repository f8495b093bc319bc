"""Writes a safetensors file one tensor at a time, so that memory holds one tensor at a time.

The library's own writer wants all tensors at once: 28 GB for a 7B model in float32. The format is
a header's length, the header in JSON with each tensor's place, and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_FLOAT32_BYTES = 4


def write_safetensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, NDArray[np.float32]]],
) -> None:
    """Write float32 tensors, and see them on the disk before returning.

    Args:
        file: Created or overwritten.
        shapes: Every tensor's shape, in the order of the file.
        tensors: The same names in the same order, with their values.

    Raises:
        ModelError: A tensor has another name, shape or type than announced.
        OSError: The disk is full, for instance.
    """
    with file.open("wb") as out:
        out.write(_header(shapes))
        for (name, shape), (found, values) in zip(shapes.items(), tensors, strict=True):
            if found != name or values.shape != shape or values.dtype != np.float32:
                raise ModelError(
                    f"tensor {found} {list(values.shape)} {values.dtype}: announced was {name} "
                    f"{list(shape)} float32"
                )
            out.write(np.ascontiguousarray(values).data)
        out.flush()
        os.fsync(out.fileno())


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + math.prod(shape) * _FLOAT32_BYTES
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return struct.pack("<Q", len(text)) + text
