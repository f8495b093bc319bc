"""A linear layer over 4-bit weights on a GPU: few rows by the codes, many by what they stand for.

Up to `MOST_ROWS` rows a product is bound by the weight's bytes, and the codes are a quarter of
them. Beyond, arithmetic counts: the weight is written out in half precision, into a buffer that all
layers share, and multiplied by cuBLAS. That costs its bytes twice more, and keeps no second copy.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tailrace.errors import EngineError
from tailrace.kernels.linear.packed_int4 import PackedInt4
from tailrace.kernels.linear.triton_int4 import MOST_ROWS, Int4Scratch, dequantize, int4_linear

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.kernels.linear.int4 import GroupInt4


class Int4Workspace:
    """What the 4-bit layers of one stream share; it grows while they are loaded, and never after.

    Args:
        device: Of the layers.
        dtype: Of activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._lock = Lock()  # layers are built by several threads
        self._values = self._tiles = self._elements = 0
        self._scratch: Int4Scratch | None = None
        self._wide: Tensor | None = None

    def reserve(self, weight: PackedInt4) -> None:
        """Have room for a layer.

        Raises:
            EngineError: A product has run already, and captured graphs may hold the old addresses.
        """
        values = weight.splits * MOST_ROWS * weight.outputs if weight.splits > 1 else 0
        with self._lock:
            if self._scratch is not None or self._wide is not None:
                raise EngineError("a 4-bit layer was added after one had run")
            self._values = max(self._values, values)
            self._tiles = max(self._tiles, -(-weight.outputs // 64))
            self._elements = max(self._elements, weight.outputs * weight.inputs)

    @property
    def scratch(self) -> Int4Scratch:
        """Of split sums."""
        if self._scratch is None:
            self._scratch = Int4Scratch(
                torch.empty(self._values, dtype=torch.float32, device=self.device),
                torch.zeros(self._tiles, dtype=torch.int32, device=self.device),
            )
        return self._scratch

    def wide(self, weight: PackedInt4) -> Tensor:
        """Return room for a weight in half precision [N, K]; the next call hands it out again."""
        if self._wide is None:
            self._wide = torch.empty(self._elements, dtype=self.dtype, device=self.device)
        shape = (weight.outputs, weight.inputs)
        return self._wide[: weight.outputs * weight.inputs].view(shape)


class Int4Linear:
    """x @ weight.T + bias.

    Up to `MOST_ROWS` rows no weight is rounded, sums are float32, and a row's sum is cut at the
    same places whatever is beside it.

    Args:
        weight: Of any device; may be freed after packing.
        bias_O: Likewise, or none.
        workspace: Shared by all layers of a stream.

    Raises:
        ConfigError: The group is no multiple of 64.
    """

    def __init__(self, weight: GroupInt4, bias_O: Tensor | None, workspace: Int4Workspace) -> None:
        self._weight = PackedInt4.of(weight, workspace.device)
        self._bias_O = None
        if bias_O is not None:
            self._bias_O = bias_O.to(workspace.device, workspace.dtype).contiguous()
        self._workspace = workspace
        workspace.reserve(self._weight)
        self.name = f"Triton 4 bits in groups of {weight.group}"

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and the bias."""
        return self._weight.nbytes + (0 if self._bias_O is None else self._bias_O.nbytes)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O] in x's dtype."""
        if 0 < x_TI.shape[0] <= MOST_ROWS:
            scratch = self._workspace.scratch
            return int4_linear(x_TI, self._weight, self._bias_O, scratch=scratch)
        wide_OI = dequantize(self._weight, self._workspace.wide(self._weight))
        return functional.linear(x_TI, wide_OI, self._bias_O)
