"""A linear layer over 4-bit weights on a GPU: few rows by the codes, many by what they stand for.

`triton_int4` multiplies few rows; on Hopper `triton_hopper_int4` does where it is the faster one,
over the same codes (`rows_by_triton`). Both multiply whole numbers, so no weight is rounded;
`triton_hopper_int4_bands` can round them, for speed, and serves nobody yet (`rows_unrounded`).

Up to `MOST_ROWS` rows a product is bound by the weight's bytes, and the codes are a quarter of
them. Beyond, arithmetic counts: the weight is written out in half precision, into a buffer that all
layers share, and multiplied by cuBLAS. That costs its bytes twice more, and keeps no second copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch.nn import functional

from tailrace.kernels.linear.packed_int4 import PackedInt4
from tailrace.kernels.linear.triton_int4 import MOST_ROWS, dequantize, int4_linear, ways

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.linear.int4 import GroupInt4
    from tailrace.kernels.linear.ways import Ways
    from tailrace.kernels.linear.workspace import Workspace


_GLUON = "3.6."
"""The release of Triton whose Gluon the Hopper kernel is written in: it changes still."""


def has_hopper_kernel(capability: tuple[int, int] | None, release: str) -> bool:
    """Tell whether a GPU, none in the interpreter, and a release of Triton run that kernel."""
    return capability == (9, 0) and release.startswith(_GLUON)


_WIDE = 132 * 128
"""Outputs: a tile of 128 for each multiprocessor. Between the layers measured, 4608 and 37888."""
_LARGE = 14_000_000
"""Weights. Between o, 12.8 million, and qkv, 16.5."""


def rows_by_triton(outputs: int, inputs: int) -> int:
    """Return up to how many rows of a layer Triton's kernel takes where a GPU has Hopper's too.

    Seen on an H200 (gpu_int4.py, 2026-11-30), microseconds by Triton's / the best of Hopper's:

        rows           16           32           64            128
        gate_up   31.8 / 31.6  38.3 / 34.3  58.5 / 44.9  101.9 / 81.5    37888 x 3584
        qkv        8.9 /  9.0  10.5 / 12.7  14.7 / 14.8   29.1 / 24.7     4608 x 3584
        o          8.3 /  8.1   9.2 /  9.7  11.9 / 12.8   18.4 / 22.2     3584 x 3584
        down      20.7 / 21.0  23.7 / 27.2  33.2 / 40.1   62.4 / 58.0     3584 x 18944
    """
    if outputs >= _WIDE:
        return 16
    return 64 if outputs * inputs >= _LARGE else MOST_ROWS


def rows_unrounded(outputs: int, inputs: int) -> int:  # noqa: ARG001 - a layer's sizes will decide
    """Return up to how many rows of a layer a Hopper GPU multiplies by weights as they are.

    More of them, up to `MOST_ROWS`, go by the kernel that scales weights in half precision first.
    None do: it has not run on a GPU yet (gpu_int4.py checks and times it).
    """
    return MOST_ROWS


def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return has_hopper_kernel(torch.cuda.get_device_capability(device), triton.__version__)


class Int4Linear:
    """x @ weight.T + bias.

    Up to `rows_unrounded` no weight is rounded. Up to `MOST_ROWS` sums are float32, and a row's sum
    is cut at the same places whatever is beside it: at one set of places by each kernel that serves
    the layer.

    Args:
        weight: Of any device; may be freed after packing.
        bias_O: Likewise, or none.
        workspace: Shared by all layers of a stream.

    Raises:
        ConfigError: The group is no multiple of 64.
    """

    def __init__(self, weight: GroupInt4, bias_O: Tensor | None, workspace: Workspace) -> None:
        self._weight = PackedInt4.of(weight, workspace.device)
        self.bias_O = None
        if bias_O is not None:
            self.bias_O = bias_O.to(workspace.device, workspace.dtype).contiguous()
        self._workspace = workspace
        held = self._weight
        self._hopper: list[tuple[int, Callable[..., Tensor]]] = []
        parts = arrivals = 0
        by_triton = unrounded = MOST_ROWS
        self.name = f"Triton 4 bits in groups of {weight.group}"
        if _is_hopper(workspace.device):
            unrounded = rows_unrounded(held.outputs, held.inputs)
            by_triton = min(unrounded, rows_by_triton(held.outputs, held.inputs))
        layer = held.outputs, held.codes.shape[0], workspace.device
        # Each kernel's shapes cut sums at places of their own, so that classes of rows must not
        # differ.
        if by_triton < unrounded:
            from tailrace.kernels.linear.triton_hopper_int4 import (  # noqa: PLC0415 - see _GLUON
                int4_hopper,
                reserved_parts,
            )

            parts = reserved_parts(*layer)
            self._hopper.append((unrounded, int4_hopper))
            self.name += f", for Hopper above {by_triton} rows"
        if unrounded < MOST_ROWS:
            from tailrace.kernels.linear.triton_hopper_int4_bands import (  # noqa: PLC0415
                int4_bands,
                reserved,
            )

            scaled_parts, arrivals = reserved(*layer)
            parts = max(parts, scaled_parts)
            self._hopper.append((MOST_ROWS, int4_bands))
            self.name += f", scaled in half precision above {unrounded} rows"
        self._tiles, self._writing = ways(held.outputs * held.inputs, by_triton)
        self._by_triton = by_triton
        self.by_codes: Ways[object] = self._tiles
        """The ways that `write` takes."""
        self.planned: tuple[Ways[object], ...] = (self._tiles, self._writing)
        workspace.reserve(
            outputs=held.outputs,
            splits=held.splits,
            rows=MOST_ROWS,
            wide=held.outputs * held.inputs,
            parts=parts,
            arrivals=arrivals,
        )
        self.operation = f"int4/{weight.group} linear"

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and the bias."""
        return self._weight.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._weight.outputs, self._weight.inputs

    def streamed(self) -> Tensor:
        """See `DeviceLinear.streamed`: the codes, chunk after chunk of all outputs.

        Scales and zero points, a sixteenth of them, are left out.
        """
        return self._weight.codes.view(torch.uint8).view(1, -1)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return new memory with the weight [O, I] that the codes stand for."""
        out_OI = torch.empty(self.sizes, dtype=dtype, device=self._workspace.device)
        return dequantize(self._weight, out_OI)

    def weight_rows(self, first: int, end: int) -> Tensor:
        """See `PlannedLinear.weight_rows`."""
        out_OI = torch.empty(end - first, self._weight.inputs, device=self._workspace.device)
        return dequantize(self._weight.part(first, end), out_OI)

    def given(self, x_TI: Tensor) -> Tensor:
        """See `PlannedLinear.given`."""
        return x_TI

    def write(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """See `DeviceLinear.write`; by the codes, however many rows there are.

        So a row's result is the same beside any number of others that the same kernel takes.
        """
        for start in range(0, x_TI.shape[0], MOST_ROWS):
            rows = slice(start, start + MOST_ROWS)
            self._by_codes(x_TI[rows], out_TO[rows])

    def _by_codes(self, x_TI: Tensor, out_TO: Tensor | None = None) -> Tensor:
        scratch = self._workspace.scratch
        rows = x_TI.shape[0]
        if rows > self._by_triton:
            kernel = next(kernel for most_rows, kernel in self._hopper if rows <= most_rows)
            return kernel(x_TI, self._weight, self.bias_O, scratch=scratch, out_TO=out_TO)
        return int4_linear(
            x_TI,
            self._weight,
            self.bias_O,
            scratch=scratch,
            shape=self._tiles.of(rows),
            out_TO=out_TO,
        )

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O] in x's dtype."""
        if 0 < x_TI.shape[0] <= MOST_ROWS:
            return self._by_codes(x_TI)
        room_OI = self._workspace.wide(self._weight.outputs, self._weight.inputs)
        wide_OI = dequantize(self._weight, room_OI, self._writing.of(x_TI.shape[0]))
        return functional.linear(x_TI, wide_OI, self.bias_O)
