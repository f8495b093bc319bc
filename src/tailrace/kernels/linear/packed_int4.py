"""A 4-bit weight in the order that the GPU kernels read: whole tiles, each one run of memory.

    chunk     CHUNK inputs, 64 or 128, all of one group
    codes     int16 [chunks, outputs, CHUNK / 4]: nibble i of column j is input i * CHUNK / 4 + j,
              so a shift and a mask unpack a whole tile, and each nibble's tile meets CHUNK / 4
              neighbouring inputs
    meta      int32 [groups, outputs]: the scale as float32, its last 4 bits the zero point

Outputs are padded, so that no load of the weight is masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.kernels.linear.int4 import GroupInt4

PADDING = 128
"""Outputs are a multiple of it in memory."""

LEAST_GROUP = 64
"""Groups are multiples of it: a quarter of a chunk is the least that a tensor core takes."""

_PROGRAMS = 264
"""Two for each of Hopper's multiprocessors: layers of fewer tiles split their inputs."""
_MOST_SPLITS = 8
_LEAST_CHUNKS = 7
"""Of a split: the parts of shorter ones cost more than they save (an H200, 16 to 64 rows)."""


@dataclass(frozen=True)
class PackedInt4:
    """A `GroupInt4` repacked; the head of this file draws it."""

    codes: Tensor
    """int16 [chunks, padded N, chunk / 4]."""
    meta: Tensor
    """int32 [groups, padded N]."""
    outputs: int
    inputs: int
    chunk: int
    chunks_a_group: int
    splits: int
    """Of the inputs; the same for any number of rows, so that sums are cut at the same places."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, padding included."""
        return self.codes.nbytes + self.meta.nbytes

    def part(self, first: int, end: int) -> PackedInt4:
        """Return a copy of some outputs, their places in memory beginning with 0."""
        width = -(-(end - first) // PADDING) * PADDING
        return replace(
            self,
            codes=self.codes[:, first : first + width].contiguous(),
            meta=self.meta[:, first : first + width].contiguous(),
            outputs=end - first,
        )

    @property
    def span(self) -> int:
        """Chunks of one split."""
        return -(-self.codes.shape[0] // self.splits)

    @classmethod
    def of(cls, weight: GroupInt4, device: torch.device | str, splits: int = 0) -> PackedInt4:
        """Repack a weight, once, at load.

        Args:
            weight: On any device.
            device: Where it is to be held.
            splits: Of the inputs; 0 chooses by the layer's size.

        Raises:
            ConfigError: The group is no multiple of 64.
        """
        outputs, inputs = weight.shape
        if weight.group % LEAST_GROUP:
            raise ConfigError(
                f"4-bit weights in groups of {weight.group}: the GPU kernel takes multiples of "
                f"{LEAST_GROUP}"
            )
        chunk = 64 if weight.group % 128 else 128
        chunks = inputs // chunk
        padded = -(-outputs // PADDING) * PADDING
        splits = splits or splits_for(padded, chunks)
        # Whole spans only: a split without a chunk would be waited for all the same.
        splits = -(-chunks // -(-chunks // splits))
        return cls(
            _ordered(weight.unpacked(), chunk, padded).to(device),
            _meta(weight, padded).to(device),
            outputs,
            inputs,
            chunk,
            weight.group // chunk,
            splits,
        )


def splits_for(outputs: int, chunks: int) -> int:
    """Return into how many parts the inputs of a layer are split."""
    tiles = -(-outputs // 128)
    return max(1, min(-(-_PROGRAMS // tiles), _MOST_SPLITS, chunks // _LEAST_CHUNKS))


def _ordered(codes: Tensor, chunk: int, padded: int) -> Tensor:
    """Return int16 [chunks, padded, chunk / 4] of uint8 codes [N, K]; rows that pad are 0."""
    outputs, inputs = codes.shape
    parts = codes.view(outputs, inputs // chunk, 4, chunk // 4)
    # In 16 bits throughout: many layers are packed at once, and the largest has 136 million codes.
    words = parts[:, :, 0].to(torch.int16)
    for nibble in range(1, 4):
        words |= parts[:, :, nibble].to(torch.int16) << (4 * nibble)
    ordered = torch.zeros(
        inputs // chunk, padded, chunk // 4, dtype=torch.int16, device=codes.device
    )
    ordered[:, :outputs] = words.transpose(0, 1)
    return ordered


def _meta(weight: GroupInt4, padded: int) -> Tensor:
    """Return int32 [groups, padded]: a half's scale leaves the last bits of a float32 free."""
    outputs = weight.shape[0]
    bits = weight.scales.to(torch.float32).view(torch.int32) | weight.zeros.to(torch.int32)
    meta = torch.zeros(bits.shape[1], padded, dtype=torch.int32, device=bits.device)
    meta[:, :outputs] = bits.t()
    return meta
