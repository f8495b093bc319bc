"""Memory that the quantised layers of one stream share; it grows at load, and never after.

The parts of split sums, and room for one weight in half precision. A product is done with both when
the next one of its stream starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from tailrace.errors import EngineError

_TILE = 64
"""Outputs of the narrowest tile."""
_WIDEST = 256
"""Of the widest, which counts an arrival for each half."""


@dataclass(frozen=True)
class SplitScratch:
    """Where the parts of split sums meet."""

    parts: Tensor
    """float32 [splits x rows x outputs, the most that any layer needs]."""
    arrivals: Tensor
    """int32 [tiles], zero between launches."""


class Workspace:
    """Reserved by every layer as it is packed, allocated at the first product.

    Args:
        device: Of the layers.
        dtype: Of activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._lock = Lock()  # layers are built by several threads
        self._parts = self._tiles = self._elements = 0
        self._scratch: SplitScratch | None = None
        self._wide: Tensor | None = None

    def reserve(
        self,
        *,
        outputs: int,
        splits: int,
        rows: int,
        wide: int = 0,
        parts: int = 0,
        arrivals: int = 0,
    ) -> None:
        """Have room for a layer.

        Args:
            outputs: Of the layer.
            splits: Of its inputs.
            rows: The most that its split product takes.
            wide: Elements of its weight, where that is to be written out.
            parts: Floats of parts, where its kernel lays them out in a way of its own.
            arrivals: Likewise, where it counts more than one a tile.

        Raises:
            EngineError: A product has run already, and captured graphs may hold the old addresses.
        """
        with self._lock:
            if self._scratch is not None or self._wide is not None:
                raise EngineError("a quantised layer was added after one had run")
            usual = splits * rows * outputs if splits > 1 else 0
            self._parts = max(self._parts, usual, parts)
            tiles = -(-outputs // _WIDEST) * (_WIDEST // _TILE)
            self._tiles = max(self._tiles, tiles, arrivals)
            self._elements = max(self._elements, wide)

    @property
    def scratch(self) -> SplitScratch:
        """Of split sums."""
        if self._scratch is None:
            self._scratch = SplitScratch(
                torch.empty(self._parts, dtype=torch.float32, device=self.device),
                torch.zeros(self._tiles, dtype=torch.int32, device=self.device),
            )
        return self._scratch

    def mend(self) -> bool:
        """Make arrivals zero again; tell whether a kernel that is wrong had left some."""
        if self._scratch is None or not bool(self._scratch.arrivals.any()):
            return False
        self._scratch.arrivals.zero_()
        return True

    def wide(self, outputs: int, inputs: int) -> Tensor:
        """Return room for a weight [outputs, inputs]; the next call hands it out again."""
        if self._wide is None:
            self._wide = torch.empty(self._elements, dtype=self.dtype, device=self.device)
        return self._wide[: outputs * inputs].view(outputs, inputs)
