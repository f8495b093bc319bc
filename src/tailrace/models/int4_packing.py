"""How checkpoints pack 4-bit numbers into int32 words, both ways.

    AutoAWQ            a word holds 8 neighbouring OUTPUTS of one input, in the order
                       0 2 4 6 1 3 5 7 from the lowest bits up
    compressed-tensors a word holds 8 neighbouring inputs (of zero points: outputs) in their order;
                       numbers are stored with 8 added, so that they are 0 to 15 as well

Words are read as bytes, low byte first: safetensors files and the machines served here are
little-endian. Nibbles here are uint8 tensors of one number a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_WORD = 8

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_PLACES = tuple(_AWQ_ORDER.index(output) for output in range(PER_WORD))


def unpack_words(words: Tensor) -> Tensor:
    """Return the nibbles of int32 [R, W], lowest bits first, as uint8 [R, 8 W]."""
    raw = words.contiguous().view(torch.uint8)
    return torch.stack([raw & 15, raw >> 4], dim=-1).flatten(1)


def pack_words(nibbles: Tensor) -> Tensor:
    """Return uint8 [R, C] as int32 [R, ceil(C / 8)], lowest bits first; what is missing is 0."""
    rows, columns = nibbles.shape
    short = -columns % PER_WORD
    padded = torch.nn.functional.pad(nibbles, (0, short)) if short else nibbles
    pairs = padded.view(rows, -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous().view(torch.int32)


def unpack_awq(words: Tensor) -> Tensor:
    """Return the nibbles of AutoAWQ's int32 [R, N/8] as uint8 [R, N]."""
    return _reordered(unpack_words(words), _AWQ_PLACES)


def pack_awq(nibbles: Tensor) -> Tensor:
    """Return uint8 [R, N], N a multiple of 8, as AutoAWQ's int32 [R, N/8]."""
    return pack_words(_reordered(nibbles, _AWQ_ORDER))


def pack_pairs(nibbles: Tensor) -> Tensor:
    """Return uint8 [N, K], K even, as `GroupInt4.codes`, uint8 [N, K/2]."""
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).contiguous()


def _reordered(nibbles: Tensor, order: tuple[int, ...]) -> Tensor:
    words = nibbles.view(nibbles.shape[0], -1, PER_WORD)
    return words[..., list(order)].flatten(1)
