"""A linear layer over 4-bit weights on a GPU: few rows by the codes, many by what they stand for.

`triton_int4` multiplies few rows; on Hopper one of several kernels over the same codes does, by a
table or a plan (`hopper_int4_ways`). All multiply whole numbers, so no weight is rounded.

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
from tailrace.kernels.linear.triton_int4 import (
    MOST_ROWS,
    TILES,
    dequantize,
    int4_linear,
    tile_options,
    writing_ways,
)
from tailrace.kernels.linear.ways import Ways

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.linear.int4 import GroupInt4
    from tailrace.kernels.linear.workspace import Workspace


_GLUON = "3.6."
"""The release of Triton whose Gluon Hopper's kernels are written in: it changes still."""


def has_hopper_kernel(capability: tuple[int, int] | None, release: str) -> bool:
    """Tell whether a GPU, none in the interpreter, and a release of Triton run those kernels."""
    return capability == (9, 0) and release.startswith(_GLUON)


def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return has_hopper_kernel(torch.cuda.get_device_capability(device), triton.__version__)


class Int4Linear:
    """x @ weight.T + bias.

    Up to `MOST_ROWS` no weight is rounded, sums are float32, and a row's sum is cut at the same
    places whatever is beside it: at one set of places by Triton's kernel, and by each other one
    that serves a class of rows (16, 32, 64, 128).

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
        self._writing = writing_ways()
        weights = self._weight.outputs * self._weight.inputs
        self._tiles: Ways[object]
        self._multiply: Callable[..., Tensor]
        self._words: Callable[[object], str]
        room: dict[str, int] = {}
        if _is_hopper(workspace.device):
            from tailrace.kernels.linear import hopper_int4_ways  # noqa: PLC0415 - see _GLUON

            self._tiles = hopper_int4_ways.ways(self._weight, workspace.device)
            self._multiply = hopper_int4_ways.multiply
            self._words = hopper_int4_ways.kernel_words
            room = hopper_int4_ways.room(self._weight, workspace.device)
        else:
            self._tiles = Ways(tile_options(weights))
            self._multiply = int4_linear
            self._words = lambda _: TILES
        self._group = weight.group
        self.by_codes = self._tiles
        """The ways that `write` takes."""
        self.planned: tuple[Ways[object], ...] = (self._tiles, self._writing)
        workspace.reserve(
            outputs=self._weight.outputs,
            splits=self._weight.splits,
            rows=MOST_ROWS,
            wide=weights,
            **room,
        )
        self.operation = f"int4/{weight.group} linear"

    @property
    def name(self) -> str:
        """How it computes: Triton's tiles, and from how many rows on another kernel."""
        words, kernel, below = f"Triton 4 bits in groups of {self._group}", TILES, 0
        for most_rows in self._tiles.classes:
            serving = self._words(self._tiles.of(most_rows))
            if serving != kernel:
                words += f", {serving} above {below} rows"
            kernel, below = serving, most_rows
        return words

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and the bias."""
        return self._weight.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._weight.outputs, self._weight.inputs

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
        return self._multiply(
            x_TI,
            self._weight,
            self.bias_O,
            scratch=self._workspace.scratch,
            shape=self._tiles.of(x_TI.shape[0]),
            out_TO=out_TO,
        )

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O] in x's dtype."""
        if 0 < x_TI.shape[0] <= MOST_ROWS:
            return self._by_codes(x_TI)
        room_OI = self._workspace.wide(self._weight.outputs, self._weight.inputs)
        wide_OI = dequantize(self._weight, room_OI, self._writing.of(x_TI.shape[0]))
        return functional.linear(x_TI, wide_OI, self.bias_O)
