"""A linear layer with two copies of its weight: one serves decodes, the other prompts.

A step's rows are decodes, then prompts. A decode is bound by the weight's bytes, so it is served by
the fewest; a prompt by arithmetic, so it is served by what is multiplied fastest:

    out [decodes]   <-  few (4 bits, say)
        [prompts]   <-  many (FP8 or half precision)

Which copy serves a row is its phase's doing alone, never the number of rows beside it: so the
result of a decode depends on no prompt that shares its step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.linear.device_linear import DeviceLinear

    WriteRows = Callable[[DeviceLinear, slice, Tensor], None]


class PhasedLinear:
    """x @ weight.T + bias, by one of two layers for each row.

    Args:
        few: For decodes.
        many: For prompts; of the same sizes.
        dtype: Of activations and results.
        device: Of both.
    """

    def __init__(
        self, few: DeviceLinear, many: DeviceLinear, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.few, self.many = few, many
        self._dtype, self._device = dtype, device

    @property
    def name(self) -> str:
        """How it computes."""
        return f"{self.few.name} and for prompts {self.many.name}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.few.sizes

    @property
    def nbytes(self) -> int:
        """Bytes of both copies."""
        return self.few.nbytes + self.many.nbytes

    def write_by_phase(self, rows: int, decodes: int, write: WriteRows) -> Tensor:
        """Return [rows, O], each part of it written by its own layer.

        Args:
            rows: Of the step.
            decodes: How many of them, at the front, are decodes.
            write: Takes a layer, its rows, and where their products go.
        """
        out_TO = torch.empty(rows, self.sizes[0], dtype=self._dtype, device=self._device)
        if decodes:
            write(self.few, slice(decodes), out_TO[:decodes])
        if decodes < rows:
            write(self.many, slice(decodes, rows), out_TO[decodes:])
        return out_TO

    def __call__(self, x_TI: Tensor, decodes: int = 0) -> Tensor:
        """Return [T, O] in x's dtype; the first `decodes` rows are decodes, the rest prompts."""

        def write(layer: DeviceLinear, rows: slice, out_TO: Tensor) -> None:
            layer.write(x_TI[rows], out_TO)

        return self.write_by_phase(x_TI.shape[0], decodes, write)
