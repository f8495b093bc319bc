"""Reads a linear layer's weight by its layout, and stacks the weights of fused layers.

Words are unpacked on the device that will hold the weight: for 7 billion of them a GPU takes a
moment, a CPU half a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tailrace.errors import ModelError
from tailrace.kernels.linear.float8 import (
    BLOCK,
    FLOAT8,
    Float8Weight,
    quantize_blocks,
    quantize_channels,
    scales_shape,
)
from tailrace.kernels.linear.int4 import GroupInt4, quantize_groups
from tailrace.kernels.linear.weight import plain
from tailrace.models.int4_packing import PER_WORD, pack_pairs, unpack_awq, unpack_words
from tailrace.models.quantization import (
    AwqInt4,
    Float8OfInt4,
    Layout,
    PackedInt4,
    RoundedFloat8,
    RoundedInt4,
    StoredFloat8,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tailrace.kernels.linear.weight import Weight

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MIDDLE = 8
"""The zero point of symmetric 4-bit codes."""
_BAND_VALUES = 1 << 24
"""Unpacked at once where 4 bits become FP8: 64 MiB in float32."""


class TensorSource(Protocol):
    """Where tensors come from; see `Checkpoint` and `RandomTensors`."""

    def take(
        self, name: str, *shapes: tuple[int, ...], types: Sequence[torch.dtype] = FLOATS
    ) -> Tensor:
        """Return the tensor, of one of `shapes` and `types`, or raise `ModelError`."""
        ...

    def has(self, name: str) -> bool:
        """Tell whether there is such a tensor."""
        ...

    def place(self, name: str) -> str:
        """Say where a tensor is, such as "model.safetensors: tensor lm_head.weight"."""
        ...

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raise `ModelError` where tensors are left over."""
        ...


@dataclass(frozen=True)
class WeightReader:
    """Reads weights from `source` onto `device`."""

    source: TensorSource
    device: torch.device

    def read(self, module: str, layout: Layout | None, outputs: int, inputs: int) -> Weight:
        """Return the weight [outputs, inputs] of a layer such as "model.layers.0.mlp.up_proj".

        A plain one is as its source holds it, perhaps a file's page in another dtype.

        Raises:
            ModelError: A tensor is missing, misshapen or of the wrong type; names it and its file.
        """
        match layout:
            case None:
                return self.source.take(f"{module}.weight", (outputs, inputs))
            case AwqInt4() | PackedInt4():
                return self._int4(module, layout, outputs, inputs)
            case StoredFloat8():
                return self._float8(module, layout, outputs, inputs)
            case RoundedInt4(group):
                weight = self.source.take(f"{module}.weight", (outputs, inputs)).to(self.device)
                self._require_groups(f"{module}.weight", _whole(group, inputs), inputs)
                return quantize_groups(weight, _whole(group, inputs))
            case RoundedFloat8(grain):
                weight = self.source.take(f"{module}.weight", (outputs, inputs)).to(self.device)
                return _rounded_float8(weight, grain)
            case Float8OfInt4(stored):
                return float8_of_int4(self._int4(module, stored, outputs, inputs))

    def _int4(
        self, module: str, layout: AwqInt4 | PackedInt4, outputs: int, inputs: int
    ) -> GroupInt4:
        group = _whole(layout.group, inputs)
        if isinstance(layout, AwqInt4):
            return self._awq(module, group, outputs, inputs)
        return self._packed(module, group, outputs, inputs, symmetric=layout.symmetric)

    def _awq(self, module: str, group: int, outputs: int, inputs: int) -> GroupInt4:
        self._require_groups(f"{module}.qweight", group, inputs)
        if outputs % PER_WORD:
            raise ModelError(
                f"{self.source.place(f'{module}.qweight')}: {outputs} outputs are no multiple of "
                f"{PER_WORD}, which AWQ's gemm layout packs into a word"
            )
        words, groups = outputs // PER_WORD, inputs // group
        codes = self._take(f"{module}.qweight", (inputs, words), types=(torch.int32,))
        zeros = self._take(f"{module}.qzeros", (groups, words), types=(torch.int32,))
        scales = self._half_scales(f"{module}.scales", (groups, outputs))
        return GroupInt4(
            pack_pairs(unpack_awq(codes).t()),
            scales.t().contiguous(),
            unpack_awq(zeros).t().contiguous(),
            group,
        )

    def _packed(
        self, module: str, group: int, outputs: int, inputs: int, *, symmetric: bool
    ) -> GroupInt4:
        name = f"{module}.weight_packed"
        self._require_groups(name, group, inputs)
        if self.source.has(f"{module}.weight_g_idx"):
            raise ModelError(
                f"{self.source.place(f'{module}.weight_g_idx')}: inputs in another order "
                "(actorder group) are not supported"
            )
        words, groups = -(-inputs // PER_WORD), inputs // group
        codes = self._take(name, (outputs, words), types=(torch.int32,))
        scales = self._half_scales(f"{module}.weight_scale", (outputs, groups))
        told = self.source.take(f"{module}.weight_shape", (2,), types=(torch.int64, torch.int32))
        if told.tolist() != [outputs, inputs]:
            raise ModelError(
                f"{self.source.place(f'{module}.weight_shape')} says {told.tolist()}, expected "
                f"{[outputs, inputs]}"
            )
        if symmetric:
            zeros = torch.full(scales.shape, _MIDDLE, dtype=torch.uint8, device=self.device)
        else:
            shape = (-(-outputs // PER_WORD), groups)
            packed = self._take(f"{module}.weight_zero_point", shape, types=(torch.int32,))
            zeros = unpack_words(packed.t())[:, :outputs].t().contiguous()
        return GroupInt4(pack_pairs(unpack_words(codes)[:, :inputs]), scales, zeros, group)

    def _float8(self, module: str, layout: StoredFloat8, outputs: int, inputs: int) -> Float8Weight:
        # A copy: pages of a mapped file may be dropped, and read again mid-request.
        values = self.source.take(f"{module}.weight", (outputs, inputs), types=(FLOAT8,))
        values = values.to(self.device, copy=True)
        shape = scales_shape(layout.grain, outputs, inputs)
        # One number may be stored without a dimension, a column of numbers with two.
        shapes = {"tensor": (shape, ()), "channel": ((*shape, 1), shape)}
        name = f"{module}.{layout.scale}"
        scales = self._scales(name, *shapes.get(layout.grain, (shape,)))
        if layout.static_inputs:
            self._scales(f"{module}.input_scale", (1,), ())
        return Float8Weight(values, scales.reshape(shape).to(torch.float32), layout.grain)

    def _take(self, name: str, *shapes: tuple[int, ...], types: Sequence[torch.dtype]) -> Tensor:
        return self.source.take(name, *shapes, types=types).to(self.device)

    def _half_scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Take scales in half precision; those stored in float32 must be such numbers, too."""
        scales = self._scales(name, shape)
        if scales.dtype != torch.float32:
            return scales
        half = scales.to(torch.float16)
        if not torch.equal(half.to(torch.float32), scales):
            raise ModelError(
                f"{self.source.place(name)} holds float32 scales that float16 does not hold "
                "exactly, which is not supported; quantise the model in half precision"
            )
        return half

    def _scales(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """Take scales, as a copy that no file backs."""
        scales = self.source.take(name, *shapes).to(self.device, copy=True)
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{self.source.place(name)} holds scales that are no finite numbers")
        return scales

    def _require_groups(self, name: str, group: int, inputs: int) -> None:
        if inputs % group or group % 2:
            raise ModelError(
                f"{self.source.place(name)}: {inputs} inputs do not divide into groups of {group}"
            )


def stack(parts: Sequence[Weight]) -> Weight:
    """Return the weights of layers with the same inputs as one, below each other.

    Formats are kept where one form can hold them all:

        4 bits    equal groups and scale dtypes
        FP8       a scale each: kept where they are equal, else a scale a row; rows with scales;
                  blocks, where no block would lie across a seam

    Other mixtures become their plain values, which is exact and takes more memory.
    """
    if len(parts) == 1 and not isinstance(parts[0], Tensor):
        return parts[0]
    fours = [part for part in parts if isinstance(part, GroupInt4)]
    if len(fours) == len(parts) and len({(p.group, p.scales.dtype) for p in fours}) == 1:
        return GroupInt4(
            torch.cat([part.codes for part in fours]),
            torch.cat([part.scales for part in fours]),
            torch.cat([part.zeros for part in fours]),
            fours[0].group,
        )
    eights = [part for part in parts if isinstance(part, Float8Weight)]
    if len(eights) == len(parts):
        merged = _stacked_float8(eights)
        if merged is not None:
            return merged
    return stack_plain([plain(part) for part in parts])


def stack_plain(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one, float32, one below the other."""
    rows = [tensor.shape[0] for tensor in tensors]
    # Dummy weights are made on the device, files are read on the host.
    device = tensors[0].device
    stacked = torch.empty(sum(rows), *tensors[0].shape[1:], device=device)
    for tensor, place in zip(tensors, torch.split(stacked, rows), strict=True):
        place.copy_(tensor)
    return stacked


def _stacked_float8(parts: Sequence[Float8Weight]) -> Float8Weight | None:
    schemes = {part.scheme for part in parts}
    scales = [part.scales for part in parts]
    if schemes == {"block128"}:
        if any(part.shape[0] % BLOCK for part in parts[:-1]):
            return None
        return Float8Weight(_stacked_values(parts), torch.cat(scales), "block128")
    if "block128" in schemes:
        return None
    if schemes == {"tensor"} and all(torch.equal(scale, scales[0]) for scale in scales):
        return Float8Weight(_stacked_values(parts), scales[0], "tensor")
    rows = [part.scales.expand(part.shape[0]) for part in parts]
    return Float8Weight(_stacked_values(parts), torch.cat(rows), "channel")


def _stacked_values(parts: Sequence[Float8Weight]) -> Tensor:
    # As bytes: not every build of torch joins FP8 tensors.
    return torch.cat([part.values.view(torch.uint8) for part in parts]).view(FLOAT8)


def _rounded_float8(weight_OI: Tensor, grain: str) -> Float8Weight:
    if grain == "channel":
        return quantize_channels(weight_OI)
    if grain == "block128":
        return quantize_blocks(weight_OI)
    peak = quantize_channels(weight_OI.reshape(1, -1))
    return Float8Weight(peak.values.view(weight_OI.shape), peak.scales, "tensor")


def float8_of_int4(weight: GroupInt4) -> Float8Weight:
    """Round the values of a weight in 4 bits to FP8, a scale for each output.

    The same numbers as `quantize_channels` of the whole weight gives, made a band of outputs at a
    time: whole, its float32 values and what is made of them on the way take many times its memory.
    """
    outputs, inputs = weight.shape
    band = max(1, _BAND_VALUES // inputs)
    parts = [
        quantize_channels(_band(weight, slice(start, start + band)).dequantize())
        for start in range(0, outputs, band)
    ]
    return Float8Weight(_stacked_values(parts), torch.cat([p.scales for p in parts]), "channel")


def _band(weight: GroupInt4, outputs: slice) -> GroupInt4:
    return GroupInt4(
        weight.codes[outputs], weight.scales[outputs], weight.zeros[outputs], weight.group
    )


def _whole(group: int, inputs: int) -> int:
    return inputs if group == -1 else group
